"""A run resumes only while the kernel's source files are unchanged."""

import hashlib
import os
from pathlib import Path

import pytest
from tests.gate.gate_driver import choices

from attncheck.cli import long_runs
from attncheck.cli.gate import _change_since
from attncheck.gate.gate_worker import GateWorker
from attncheck.gate.plan import describe_units
from attncheck.gate.sources import changed_source, file_hashes, source_fingerprint
from attncheck.workers.journal_format import JournalContent
from attncheck.workers.units import Unit, UnitResult

KERNEL = """\
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import helper


def attention(query, key, value, *, is_causal=False, scale=None):
    return helper.attention(query, key, value)
"""
ENTRY = "kernel.py::attention"


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("helper.py").write_text("def attention(query, key, value):\n    return value\n")
    Path("kernel.py").write_text(KERNEL)
    return tmp_path


def journal(facts, kernel=ENTRY, **changes):
    """The journal of a run that has described its kernel and asked it nothing yet."""
    (unit,) = describe_units([kernel], device="cpu", tier="smoke", convention="")
    pending = Unit(kind="ask", stage="contract", kernel=kernel, device="cpu", tier="smoke")
    content = JournalContent(head={"sources": "as they were"} | changes)
    content.units |= {unit.id: unit, pending.id: pending}
    content.results[unit.id] = UnitResult(unit=unit.id, facts=facts)
    return content


def test_describing_a_kernel_hashes_every_file_it_loaded(project):
    gate = GateWorker(choices(isolated=True, stages="contract"))
    (unit,) = describe_units([ENTRY], device="cpu", tier="smoke", convention="")
    done = gate.do(unit)
    assert not done.harness, done.harness
    facts = done.facts
    gate.close()
    for name in ("kernel.py", "helper.py"):
        assert facts["files"][name] == hashlib.sha256(Path(name).read_bytes()).hexdigest()
    assert changed_source(journal(facts)) == ""
    Path("helper.py").write_text("")
    assert changed_source(journal(facts)) == "helper.py has changed"


def test_run_resumes_only_with_unchanged_files(project, capsys, monkeypatch):
    facts = file_hashes([str(project / "kernel.py"), str(project / "helper.py")])
    head = {"sources": "as they were"}
    monkeypatch.setattr(long_runs, "existing_journal", lambda *_, **__: journal(facts))
    assert long_runs.resumable("folder", head, _change_since, fresh=False)[1]
    assert "goes on with" in capsys.readouterr().err
    Path("helper.py").write_text("")
    assert not long_runs.resumable("folder", head, _change_since, fresh=False)[1]
    message = "attncheck: helper.py has changed since folder/results.jsonl: all is asked anew.\n"
    assert capsys.readouterr().err == message


def test_declared_sources_count_where_loaded_files_are_unknown(project):
    unknown = f"nobody can tell whether {ENTRY} has changed"
    assert changed_source(journal({})) == changed_source(journal({"files": {}})) == unknown
    assert changed_source(journal({}, kernel="ideal")) == ""
    table = f'[kernels.mine]\nentry = "{ENTRY}"\n'
    Path("attncheck.toml").write_text(table)
    assert changed_source(journal({}, kernel="mine")) != ""
    Path("attncheck.toml").write_text(f'{table}sources = ["helper.py"]\n')
    assert changed_source(journal({}, kernel="mine")) == ""


def test_file_hashes_skip_anything_but_regular_files(project):
    os.mkfifo("pipe")
    names = ("/dev/zero", str(project / "pipe"), "a\0b", "lone \ud800", str(project))
    assert set(file_hashes(names)["files"].values()) == {""}


@pytest.mark.parametrize("pattern", [".", "./", "csrc/**", "csrc", "**/*.cu", "csrc/*/a.cu"])
def test_fingerprint_covers_declared_sources_but_not_reports(project, pattern):
    Path("attncheck.toml").write_text(
        f'[kernels.mine]\nentry = "{ENTRY}"\nsources = ["{pattern}"]\n'
    )
    source = Path("csrc", "deep", "a.cu")
    source.parent.mkdir(parents=True)
    source.write_text("1")
    before = source_fingerprint(["mine"], ["reports"])
    written = Path("reports", "gate", "results.jsonl")
    written.parent.mkdir(parents=True)
    written.write_text("a run writes it")
    assert source_fingerprint(["mine"], ["reports"]) == before
    source.write_text("2")
    assert source_fingerprint(["mine"], ["reports"]) != before

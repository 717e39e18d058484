"""What a kernel is made of: a run goes on only where that is what it was."""

import hashlib
import os
from pathlib import Path

import pytest
from tests.gate.driven import choices

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
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("helper.py").write_text("def attention(query, key, value):\n    return value\n")
    Path("kernel.py").write_text(KERNEL)
    return tmp_path


def journal(facts, kernel=ENTRY, **changes):
    """Of a run that has described its kernel, and not asked it anything yet."""
    (unit,) = describe_units([kernel], device="cpu", tier="smoke", convention="")
    left = Unit(kind="ask", stage="contract", kernel=kernel, device="cpu", tier="smoke")
    content = JournalContent(head={"sources": "as they were"} | changes)
    content.units |= {unit.id: unit, left.id: left}
    content.results[unit.id] = UnitResult(unit=unit.id, facts=facts)
    return content


def test_a_kernel_is_described_with_all_files_that_it_has_loaded(here):
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


def test_a_run_goes_on_only_with_the_same_files(here, capsys, monkeypatch):
    facts = file_hashes([str(here / "kernel.py"), str(here / "helper.py")])
    head = {"sources": "as they were"}
    monkeypatch.setattr(long_runs, "existing_journal", lambda *_, **__: journal(facts))
    assert long_runs.resumable("folder", head, _change_since, fresh=False)[1]
    assert "goes on with" in capsys.readouterr().err
    Path("helper.py").write_text("")
    assert not long_runs.resumable("folder", head, _change_since, fresh=False)[1]
    said = "attncheck: helper.py has changed since folder/results.jsonl: all is asked anew.\n"
    assert capsys.readouterr().err == said


def test_where_files_cannot_be_told_sources_are_what_counts(here):
    unknown = f"nobody can tell whether {ENTRY} has changed"
    assert changed_source(journal({})) == changed_source(journal({"files": {}})) == unknown
    assert changed_source(journal({}, kernel="ideal")) == ""
    table = f'[kernels.mine]\nentry = "{ENTRY}"\n'
    Path("attncheck.toml").write_text(table)
    assert changed_source(journal({}, kernel="mine")) != ""
    Path("attncheck.toml").write_text(f'{table}sources = ["helper.py"]\n')
    assert changed_source(journal({}, kernel="mine")) == ""


def test_what_is_no_regular_file_is_not_read(here):
    os.mkfifo("pipe")
    names = ("/dev/zero", str(here / "pipe"), "a\0b", "lone \ud800", str(here))
    assert set(file_hashes(names)["files"].values()) == {""}


@pytest.mark.parametrize("pattern", [".", "./", "csrc/**", "csrc", "**/*.cu", "csrc/*/a.cu"])
def test_each_source_is_part_of_the_fingerprint(here, pattern):
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

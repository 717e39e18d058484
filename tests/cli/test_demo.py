"""``attncheck demo``: the fault it reports is the fault that was planted."""

import importlib
import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest

from attncheck.cli.demo import search_tile_edges, search_with_hypothesis
from attncheck.reporting.exit_codes import INCOMPLETE
from attncheck.subjects.load import load_subject
from attncheck.verify.environment import prepare

verb = importlib.import_module("attncheck.cli.demo")  # the room's name is the command's

WRONG = "shares its weight among 64 keys, some without values, where it should have 32"


@pytest.fixture
def output(tmp_path, attncheck):
    """Standard output of the verb at 80 columns, run in an empty folder."""
    env = {k: v for k, v in os.environ.items() if k not in {"FORCE_COLOR", "TRITON_INTERPRET"}}
    result = attncheck("demo", "--device", "cpu", cwd=tmp_path, env=env | {"COLUMNS": "80"})
    assert result.returncode == 0, result.stderr
    return result.stdout


def flat(text):
    """The text without line breaks."""
    return " ".join(text.split())


def test_demo_finds_names_and_reproduces_the_planted_fault(
    output, tmp_path, attncheck, warm_python
):
    lines = output.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    usual = [line for line in lines if "off by" in line]
    assert len(usual) == 4
    assert all(line.startswith("   passes ") for line in usual)
    assert WRONG in flat(output)
    assert f"in line {planted_line()}: {verb.PLANTED}." in flat(output)
    assert {path.name for path in tmp_path.iterdir()} == {"reports"}

    (command,) = re.findall(r"^Reproduce: attncheck (repro [a-z2-7]{10})$", output, re.M)
    again = attncheck(*command.split(), cwd=tmp_path)
    assert again.returncode == 1, again.stderr
    assert again.stdout.startswith("FAIL structure decode: ")
    assert WRONG in again.stdout

    (script,) = re.findall(r"^Without attncheck: python (\S+)$", output, re.M)
    assert "import attncheck" not in (tmp_path / script).read_text()
    standalone = warm_python.run(script, cwd=tmp_path)
    assert standalone.returncode == 1, standalone.stderr
    assert standalone.stdout.startswith("FAIL decode")


def planted_line():
    lines = verb.source().splitlines()
    assert sum(verb.PLANTED in line for line in lines) == 1
    return next(number for number, line in enumerate(lines, 1) if verb.PLANTED in line)


@pytest.fixture
def fixed_kernel(tmp_path):
    """SPEC of the demo's kernel with its planted fault fixed."""
    path = tmp_path / "mended.py"
    path.write_text(verb.source().replace(verb.PLANTED, verb.MENDED))
    prepare("cpu")
    return f"{path}::attention"


def test_fixed_kernel_passes_the_same_questions(fixed_kernel):
    """If this fails, the demo finds some other fault than the one it planted."""
    subject = load_subject(fixed_kernel)
    assert search_tile_edges(subject, "cpu") is None
    # Under the faulty kernel's name: for another name Hypothesis would draw other problems.
    assert search_with_hypothesis(verb.KERNEL, subject, "cpu", most=60) is None


def test_tile_edge_search_finds_the_fault():
    prepare("cpu")
    finding = search_tile_edges(load_subject(verb.KERNEL), "cpu")
    assert finding is not None
    assert WRONG in finding.smallest.judgement.reason
    assert finding.smallest.case["problem"]["kv"] == 32


def test_missing_hypothesis_names_the_extra(monkeypatch, capsys):
    prepare("cpu")
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    finding = verb._find(load_subject(verb.KERNEL), "cpu", quiet=True)
    assert finding.after == 0
    assert "pip install 'attncheck[properties]'" in flat(capsys.readouterr().out)


def test_demo_that_finds_nothing_exits_incomplete(
    monkeypatch, tmp_path, fixed_kernel, attncheck, capsys
):
    from attncheck.cli import attncheck as command

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verb, "_usual_test", lambda _: [])
    monkeypatch.setattr(verb, "_find", lambda *_, **__: None)
    with command.make_context("attncheck", ["demo", "--device", "cpu"]) as context:
        assert command.invoke(context) == INCOMPLETE
    assert "a fault of attncheck" in capsys.readouterr().out


def test_kernel_file_option_writes_the_kernel(tmp_path, attncheck):
    result = attncheck("demo", "--kernel-file", "wrong.py", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "Written to wrong.py. Next: attncheck check wrong.py::attention\n"
    assert (tmp_path / "wrong.py").read_text() == verb.source()
    refused = attncheck("demo", "--kernel-file", "wrong.py/x.py", cwd=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1


def test_kernel_does_not_depend_on_attncheck():
    """The kernel works in a file by itself, and its source does not reveal the fault."""
    source = verb.source()
    assert not re.search(r"^\s*(?:import|from) attncheck", source, re.M)
    spec = importlib.util.find_spec("attncheck.demo.flash_attention")
    assert Path(spec.origin).read_text() == source
    assert "32" not in source.replace("float32", "").replace(verb.PLANTED, "")

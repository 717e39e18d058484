"""``attncheck demo``: the fault that was planted is the one that is found."""

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
def told(tmp_path, attncheck):
    """What the verb says of itself on 80 columns, in an empty folder."""
    env = {k: v for k, v in os.environ.items() if k not in {"FORCE_COLOR", "TRITON_INTERPRET"}}
    done = attncheck("demo", "--device", "cpu", cwd=tmp_path, env=env | {"COLUMNS": "80"})
    assert done.returncode == 0, done.stderr
    return done.stdout


def flat(text):
    """Without the breaks of its lines."""
    return " ".join(text.split())


def test_it_catches_names_and_reproduces_what_was_planted(told, tmp_path, attncheck, warm_python):
    lines = told.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    usual = [line for line in lines if "off by" in line]
    assert len(usual) == 4
    assert all(line.startswith("   passes ") for line in usual)
    assert WRONG in flat(told)
    assert f"in line {planted_line()}: {verb.PLANTED}." in flat(told)
    assert {path.name for path in tmp_path.iterdir()} == {"reports"}

    (command,) = re.findall(r"^Reproduce: attncheck (repro [a-z2-7]{10})$", told, re.M)
    again = attncheck(*command.split(), cwd=tmp_path)
    assert again.returncode == 1, again.stderr
    assert again.stdout.startswith("FAIL structure decode: ")
    assert WRONG in again.stdout

    (script,) = re.findall(r"^Without attncheck: python (\S+)$", told, re.M)
    assert "import attncheck" not in (tmp_path / script).read_text()
    alone = warm_python.run(script, cwd=tmp_path)
    assert alone.returncode == 1, alone.stderr
    assert alone.stdout.startswith("FAIL decode")


def planted_line():
    lines = verb.source().splitlines()
    assert sum(verb.PLANTED in line for line in lines) == 1
    return next(number for number, line in enumerate(lines, 1) if verb.PLANTED in line)


@pytest.fixture
def mended(tmp_path):
    """The kernel with its fault mended, and nothing else."""
    path = tmp_path / "mended.py"
    path.write_text(verb.source().replace(verb.PLANTED, verb.MENDED))
    prepare("cpu")
    return f"{path}::attention"


def test_the_mended_kernel_passes_the_same_questions(mended):
    """So that what is found is what was planted."""
    subject = load_subject(mended)
    assert search_tile_edges(subject, "cpu") is None
    # Under the planted one's name: of another Hypothesis would draw other problems.
    assert search_with_hypothesis(verb.KERNEL, subject, "cpu", most=60) is None


def test_without_hypothesis_it_is_found_at_the_edges_of_tiles():
    prepare("cpu")
    found = search_tile_edges(load_subject(verb.KERNEL), "cpu")
    assert found is not None
    assert WRONG in found.smallest.judgement.reason
    assert found.smallest.case["problem"]["kv"] == 32


def test_the_extra_is_named_where_it_is_missing(monkeypatch, capsys):
    prepare("cpu")
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    found = verb._find(load_subject(verb.KERNEL), "cpu", quiet=True)
    assert found.after == 0
    assert "pip install 'attncheck[properties]'" in flat(capsys.readouterr().out)


def test_what_is_not_caught_has_its_own_code(monkeypatch, tmp_path, mended, attncheck, capsys):
    from attncheck.cli import attncheck as command

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verb, "_usual_test", lambda _: [])
    monkeypatch.setattr(verb, "_find", lambda *_, **__: None)
    with command.make_context("attncheck", ["demo", "--device", "cpu"]) as context:
        assert command.invoke(context) == INCOMPLETE
    assert "a fault of attncheck" in capsys.readouterr().out


def test_the_kernel_can_be_taken_home(tmp_path, attncheck):
    done = attncheck("demo", "--kernel-file", "wrong.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "Written to wrong.py. Next: attncheck check wrong.py::attention\n"
    assert (tmp_path / "wrong.py").read_text() == verb.source()
    refused = attncheck("demo", "--kernel-file", "wrong.py/x.py", cwd=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1


def test_the_kernel_needs_nothing_of_attncheck():
    """It stands alone in a file, and its own text does not tell where the fault is."""
    source = verb.source()
    assert not re.search(r"^\s*(?:import|from) attncheck", source, re.M)
    spec = importlib.util.find_spec("attncheck.demo.flash_attention")
    assert Path(spec.origin).read_text() == source
    assert "32" not in source.replace("float32", "").replace(verb.PLANTED, "")

"""Scoring of mutants (caught, missed, stillborn, crashed, hung), their table and their report."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from attncheck.core.errors import UsageError
from attncheck.faults import mutant_scoring
from attncheck.faults.mutant_scoring import MutantScorer, MutantTable, mutant_units, read_table
from attncheck.faults.mutation import Mutant
from attncheck.faults.score_report import mutant_report
from attncheck.records.fault_scores import MutantScore
from attncheck.reporting import exit_codes, rendering
from attncheck.workers.journal_format import JournalContent
from attncheck.workers.units import Unit, UnitResult

KERNEL = """
import torch


def attention(query, key, value, is_causal=False, scale=None, enable_gqa=False):
    unused = 1 + 2
    if query.dtype == torch.float64:
        scale = scale + 1
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query.float() @ key.float().mT * (scale or query.shape[-1] ** -0.5)
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    weights = torch.softmax(scores, -1)
    return (weights @ value.float()).to(query.dtype)
"""
TABLE = """
kernels = ["mine.py::attention"]

[[equivalent]]
mutants = ["mine:*:6:*"]
because = "nothing reads it"

[[families]]
name = "scale"
code = 'scale or'
operators = ["flip-operator"]
models = ["scale-*"]
kinds = ["factor"]
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(KERNEL)
    (tmp_path / "mutants.toml").write_text(TABLE)
    return f"{tmp_path / 'mine.py'}::attention"


def score_mutants(mine, pattern, tool="check", most=None):
    units = mutant_units([mine], tool=tool, most=None, names=[pattern])[:most]
    return [MutantScorer().do(unit).facts["score"] for unit in units]


@pytest.mark.parametrize("tool", ["check", "smoke"])
def test_mutant_with_a_wrong_mask_is_caught(mine, tool):
    (score,) = score_mutants(mine, "mine:drop-mask:14:*", tool)
    assert score["outcome"] == "caught"
    assert score["first"]
    assert score["questions"] > 0
    if tool == "check":
        assert score["shown"]
        assert score["peers"]["allclose(1e-2)"]


def test_mutant_that_no_question_reaches_is_missed_with_identical_bits(mine):
    """The mutated line runs only for fp64, which no question uses."""
    (score,) = score_mutants(mine, "mine:flip-operator:8:*", most=1)
    assert (score["outcome"], score["identical"]) == ("missed", True)
    assert not any(score["peers"].values())


def test_mutant_that_raises_at_once_is_stillborn(mine):
    (score,) = score_mutants(mine, "mine:flip-operator:9:*")  # group = heads * kv_heads
    assert score["outcome"] == "stillborn"
    assert "RuntimeError" in score["reason"]


def test_mutant_that_writes_to_its_inputs_is_not_stillborn(tmp_path):
    path = tmp_path / "writes.py"
    path.write_text(KERNEL.replace("unused = 1 + 2", "query.detach().mul_(2)"))
    job = mutant_scoring._Job(None, path, "attention", "check")
    assert job._immediate_error(f"{path}::attention") == ""


def test_mutant_argued_equivalent_in_the_table_is_not_scored(mine):
    (score,) = score_mutants(mine, "mine:drop-term:6:*", most=1)
    assert (score["outcome"], score["reason"]) == ("equivalent", "nothing reads it")


def test_argument_in_the_table_does_not_excuse_a_caught_mutant():
    """Caught though argued equivalent: the argument is wrong or the check is, and it must show."""
    table = MutantTable(equivalent=(mutant_scoring.Argument(mutants=("m",), because="why"),))
    facts = {"mutant": "m", "kernel": "k", "operator": "o", "line": 1, "diff": "", "tool": "check"}
    caught = MutantScore(**facts, outcome="caught")
    assert mutant_scoring.settled(caught, table) == caught
    missed = MutantScore(**facts, outcome="missed")
    assert mutant_scoring.settled(missed, table).outcome == "equivalent"
    known = mutant_scoring.settled(missed, MutantTable(missed=table.equivalent))
    assert (known.outcome, known.reason) == ("missed", "why")


def test_diagnosis_is_rated_by_the_family_of_the_table(mine):
    (score,) = score_mutants(mine, "mine:flip-operator:11:*", most=1)
    assert score["family"] == "scale"
    assert score["named"] != "unjudged"
    family = read_table(Path(mine.partition("::")[0]).parent).families[0]
    facts = {"mutant": "m", "kernel": "k", "operator": "o", "line": 1, "diff": "", "tool": "check"}
    score = MutantScore(**facts, outcome="caught", status="fail", level="named", certain=1)

    def rate(of=family, **facts):
        return mutant_scoring.rate_diagnosis(msgspec.structs.replace(score, **facts), of).named

    assert rate(models=("scale-twice", "mask-ignored")) == "right"
    assert rate(models=("mask-ignored", "scale-twice"), certain=2) == "right"
    assert rate(models=("mask-ignored",), kind="mask") == "wrong"
    assert rate(models=("sum-missing",), kind="factor") == "neighbour"
    assert rate(models=("scale-twice",), of=None) == "unjudged"
    # A diagnosis without certainty counts for nothing, even if it is right.
    assert rate(models=("scale-twice",), level="unknown", certain=0) == "none"
    assert rate(models=(), level="family", certain=0, kind="factor") == "family"
    assert rate(models=(), level="family", certain=0, kind="mask") == "wrong"
    assert rate(models=(), level="family", certain=0, kind="mask", of=None) == "unjudged"
    # A wrong LSE alone is observed, not guessed; a proof holds whatever was changed.
    assert rate(models=(), level="family", certain=0, kind="lse") == "family"
    assert rate(models=("free-memory-read",), level="proven", of=None) == "proven"
    assert rate(status="crash") == ""


def test_write_out_of_bounds_is_diagnosed_without_calling_the_kernel_again():
    """The kernel passed is None: a search for other causes, which would call it, fails the test."""
    failed = SimpleNamespace(judgement=SimpleNamespace(rule="memory"))
    facts = {}
    mutant_scoring._Job._diagnose(failed, None, None, lambda **fields: facts.update(fields))
    assert (facts["level"], facts["models"], facts["certain"]) == ("proven", ["memory"], 1)


def test_mutant_that_kills_its_process_or_hangs_is_caught(monkeypatch):
    monkeypatch.setattr(mutant_scoring, "_PATIENCE", 0.5)

    def crashes(tell):
        tell(questions=3)
        os.kill(os.getpid(), signal.SIGKILL)

    facts = mutant_scoring._run_in_fork(crashes)
    assert (facts["outcome"], facts["status"], facts["questions"]) == ("caught", "crash", 3)
    facts = mutant_scoring._run_in_fork(lambda _: time.sleep(100))
    assert (facts["outcome"], facts["status"]) == ("caught", "timeout")


def test_killed_mutant_leaves_no_temporary_folder(mine, tmp_path, monkeypatch):
    folders = tmp_path / "temporary"
    folders.mkdir()
    monkeypatch.setattr(mutant_scoring.tempfile, "tempdir", str(folders))

    def run(_, folder, tell):
        assert folder.parent == folders
        tell(questions=1)
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(mutant_scoring._Job, "run", run)
    assert {each["status"] for each in score_mutants(mine, "mine:flip-operator:11:*")} == {"crash"}
    assert [*folders.iterdir()] == []


def test_exception_of_attncheck_itself_is_not_a_catch():
    """Otherwise a broken scorer would catch every mutant."""

    def broken(_):
        raise AssertionError("ours")

    assert mutant_scoring._run_in_fork(broken) == {"reason": "AssertionError('ours')"}


def test_bad_kernel_pattern_or_table_is_refused(mine, tmp_path):
    for spec, message in (
        ("package:name", "must be FILE.py::NAME"),
        (f"{tmp_path}/none.py::f", "there is no file"),
    ):
        with pytest.raises(UsageError, match=message):
            mutant_units([spec], tool="check", most=None, names=[])
    with pytest.raises(UsageError, match="no mutant"):
        mutant_units([mine], tool="check", most=None, names=["mine:none:*"])
    (tmp_path / "sub").mkdir()
    assert read_table(tmp_path / "sub") == MutantTable()
    (tmp_path / "sub" / "mutants.toml").write_text("kernel = 3")
    read_table.cache_clear()
    with pytest.raises(UsageError, match=r"mutants\.toml"):
        read_table(tmp_path / "sub")


def test_limit_takes_the_first_mutants_of_the_full_order(mine):
    every, ten = (mutant_units([mine], tool="check", most=n, names=[]) for n in (None, 10))
    assert every[:10] == ten


def test_table_of_examples_strangers_is_up_to_date(pytestconfig):
    folder = pytestconfig.rootpath / "examples" / "strangers"
    specs = mutant_scoring.kernels_of_table(folder / "mutants.toml")
    assert {Path(spec.partition("::")[0]).name for spec in specs} == {
        path.name for path in folder.glob("*.py")
    }
    units = mutant_units(specs, tool="check", most=None, names=[])
    assert len(units) == len({unit.id for unit in units}) > 500
    table = read_table(folder)
    every = [unit.kernel.rpartition("@")[0] for unit in units]
    # An argument that matches no mutant was written for an older source.
    for pattern in (each for argument in table.equivalent for each in argument.mutants):
        assert any(mutant_scoring.fnmatch.fnmatchcase(name, pattern) for name in every), pattern


def report_of(**outcomes):
    units = [
        Unit(kind="fault", stage="contract", kernel=f"k:o:1:{name}@mutant", device="cpu")
        for name in outcomes
    ]
    results = {}
    for unit, (name, facts) in zip(units, outcomes.items(), strict=True):
        score = {"mutant": f"k:o:1:{name}", "kernel": "k", "operator": "o", "line": 1}
        score |= {"diff": "- a\n+ b", "tool": "check", **facts}
        results[unit.id] = UnitResult(
            unit=unit.id, facts={"score": score} if facts else {}, harness="lost"
        )
    content = JournalContent(head={}, results=results)
    return mutant_report(content, units, tool="check", command="attncheck faults --mutants")


def test_report_lists_missed_mutants_and_questions_until_each_catch():
    report = report_of(
        a={"outcome": "caught", "questions": 1, "named": "right", "peers": {"2×": False}},
        b={"outcome": "caught", "questions": 3, "named": "wrong", "models": ["x"], "certain": 1},
        c={"outcome": "missed", "questions": 50, "peers": {"2×": True}},
        d={"outcome": "stillborn", "reason": "TypeError"},
    )
    assert report.curve == (1, 1, 2)
    assert exit_codes.exit_code(report) == exit_codes.FAILED
    text = rendering.render(report, "md")
    assert "2 of 3 mutants caught, 1 of 2 named, 1 wrongly named with certainty." in text
    assert "k:o:1:c" in text
    assert "+ b" in text


def test_exit_code_of_caught_stillborn_and_lost_mutants():
    assert exit_codes.exit_code(report_of(a={"outcome": "caught", "questions": 1})) == 0
    assert exit_codes.exit_code(report_of(a={"outcome": "stillborn"})) == exit_codes.UNTESTED
    lost = report_of(a={"outcome": "caught", "questions": 1}, b={})
    assert lost.scores[1].reason == "lost"
    assert exit_codes.exit_code(lost) == exit_codes.INCOMPLETE


def test_family_matches_both_code_and_operator(mine):
    table = read_table(Path(mine.partition("::")[0]).parent)

    def family(operator, code):
        mutant = Mutant(id="m", operator=operator, line=1, text="", diff="", code=code)
        match = table.family(mutant)
        return match and match.name

    assert family("flip-operator", "x = scale or 1") == "scale"
    assert family("drop-term", "x = scale or 1") is None
    assert family("flip-operator", "x = 1") is None

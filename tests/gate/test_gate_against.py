"""``gate --against``: asks both commits' kernels and compares cases; only this commit counts."""

import json
from types import SimpleNamespace

import pytest
from msgspec.structs import replace
from tests.gate.gate_driver import choices, git

from attncheck.cases.tier import tier_named
from attncheck.core.errors import UsageError
from attncheck.core.mod_spec import Spec
from attncheck.gate.bound_stage import baseline_units
from attncheck.gate.gate_report import build_report
from attncheck.gate.gate_worker import GateWorker
from attncheck.gate.other_commit import commit_tree
from attncheck.gate.plan import describe_units
from attncheck.gate.planning import BaselineCases, Choices
from attncheck.gate.property_stage import KnownFailures
from attncheck.inputs.problem import Case, Problem
from attncheck.reporting.gate_verdict import Policy, gate_exit_code
from attncheck.workers.journal_format import JournalContent
from attncheck.workers.units import Shard, Unit, UnitResult

KERNEL = """\
import math

import torch


def attention(query, key, value, *, is_causal=False, scale=None):
    scores = query.float() @ key.float().mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).tril().logical_not()
        scores = scores.masked_fill(hidden, -math.inf)
    weights = torch.softmax(scores, -1)
    return (weights @ value.float()).to(query.dtype)
"""
REFACTORED = KERNEL.replace("weights", "shares")
LOSES = KERNEL.replace("(weights @", "(weights.bfloat16().float() @")
TABLE = """\
[kernels.mine]
entry = "mine.py::attention"
dtypes = ["bf16"]
promises = ["repeat"]
"""


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """One commit with the kernel and its table; the folder is the working directory."""
    root, temporary = tmp_path / "repository", tmp_path / "temporary"
    root.mkdir()
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    git(tmp_path, "init", "--quiet", "--initial-branch=main", str(root))
    (root / "mine.py").write_text(KERNEL)
    (root / "attncheck.toml").write_text(TABLE)
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "The kernel")
    monkeypatch.chdir(root)
    yield root
    assert not list(temporary.glob("attncheck-*"))


CASES = tuple(
    Case(problem=Problem(batch=2, heads=2, query=64, kv=kv, mask=Spec.of("causal"), seed=kv))
    for kv in (64, 96)
)


def run_both_commits(tree, kernel="mine"):
    """The journal of a gate of two cases on both commits; the kernel runs in this process."""
    gate_choices = choices(dtypes="bf16", stages="baseline", tree=tree)
    (describe_unit,) = describe_units([kernel], device="cpu", tier="smoke", convention="")
    units = []
    for case in CASES:
        unit = replace(describe_unit, kind="ask", stage="baseline", case=case.to_json())
        units += [unit, replace(unit, commit=tree.commit)]
    facts = {"kernel": kernel, "name": kernel, "summary": ""}
    content = JournalContent(head={**gate_choices.plan(), "tier": "smoke"})
    content.units = {unit.id: unit for unit in (describe_unit, *units)}
    gate = GateWorker(gate_choices, KnownFailures(()))
    content.results = {describe_unit.id: UnitResult(unit=describe_unit.id, facts=facts)}
    content.results |= {unit.id: gate.do(unit) for unit in units}
    gate.close()
    return content


def test_accepted_flaky_case_is_within_rounding(repository):
    with commit_tree("main") as tree:
        content = run_both_commits(tree)
    for id_, done in content.results.items():
        if done.answers and not content.units[id_].commit:
            answers = (replace(a, record=replace(a.record, status="flaky")) for a in done.answers)
            content.results[id_] = replace(done, answers=tuple(answers))

    def standings(command):
        report = build_report(content, command=command)
        return {change.standing for change in report.changes}, gate_exit_code(
            report, Policy(flaky=2)
        )

    assert standings("attncheck gate mine --flaky 1") == ({"worse"}, 1)
    assert standings("attncheck gate mine --flaky 2") == ({"within rounding"}, 0)


def test_refactoring_that_changes_no_bit_is_identical(repository):
    (repository / "mine.py").write_text(REFACTORED)
    with commit_tree("main") as tree:
        content = run_both_commits(tree)
    report = build_report(content)
    assert [change.standing for change in report.changes] == ["identical"] * 2
    assert report.baseline == f"commit {tree.commit[:12]}"
    # The other commit's answers are not counted.
    assert len(report.answers) == sum(report.planned.values()) == 2
    assert {answer.record.environment for answer in report.answers} == set(report.environments)
    new, old = list(content.units.values())[1:3]
    assert (new.commit, old.commit) == ("", tree.commit)
    assert all(Shard(n, 5).has(new) == Shard(n, 5).has(old) for n in range(1, 6))


def test_baseline_units_alternate_between_both_commits(monkeypatch):
    other = SimpleNamespace(commit="0" * 40)
    planning = SimpleNamespace(
        choices=SimpleNamespace(
            tree=other, baseline_cases=None, dtypes=(), tier=tier_named("smoke")
        ),
        refused=[],
    )
    unit = Unit(kind="ask", stage="bounds", kernel="mine", device="cpu", case=CASES[0].to_json())
    monkeypatch.setattr("attncheck.gate.bound_stage.bound_units", lambda _: iter([unit] * 3))
    sides = [each.commit for each in baseline_units(planning)]
    assert sides == ["", other.commit] * 3


def test_lost_precision_is_worse(repository):
    (repository / "mine.py").write_text(LOSES)
    with commit_tree("main") as tree:
        report = build_report(run_both_commits(tree))
    assert {change.standing for change in report.changes} == {"worse"}
    assert all(answer.record.status == "pass" for answer in report.answers)


@pytest.mark.parametrize("absent", ["file", "name"])
def test_kernel_absent_from_the_commit_is_new(repository, absent):
    (repository / "mine.py").rename(repository / "other.py")
    if absent == "name":
        (repository / "mine.py").write_text(KERNEL.replace("def attention", "def newer"))
    kernel = "other.py::attention" if absent == "file" else "mine.py::newer"
    with commit_tree("main") as tree:
        report = build_report(run_both_commits(tree, kernel))
    change = report.changes[0]
    assert {each.standing for each in report.changes} == {"new"}
    reason = "no file other.py" if absent == "file" else "mine.py has no 'newer'"
    assert reason in change.reason
    assert not report.harness


def test_module_loaded_from_the_repository_instead_of_the_commit_is_an_error(repository):
    """This happens where the package is installed such that this repository precedes the tree."""
    (repository / "mine.py").write_text(
        f"import sys\nsys.path.insert(0, {str(repository)!r})\nimport helper_module\n{KERNEL}"
    )
    (repository / "helper_module.py").write_text("NUMBER = 1\n")
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "-m", "It imports from a fixed folder")
    with commit_tree("main") as tree:
        content = run_both_commits(tree)
    errors = [done.facts.get("usage", "") for done in content.results.values()]
    assert any("was loaded in place of main's" in each for each in errors)


def test_failures_of_the_other_commit_do_not_fail_this_one(repository):
    git(repository, "rm", "--quiet", "mine.py")
    (repository / "mine.py").write_text(KERNEL.replace("tril()", "tril(1)"))
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "-m", "A fault")
    (repository / "mine.py").write_text(KERNEL)
    with commit_tree("main") as tree:
        content = run_both_commits(tree)
    report = build_report(content)
    assert {answer.record.status for answer in report.answers} == {"pass"}
    assert "better" in {change.standing for change in report.changes}
    other_results = [content.results[id_] for id_, unit in content.units.items() if unit.commit]
    assert any(answer.record.status == "fail" for done in other_results for answer in done.answers)
    assert not [
        done for done in other_results if done.units or any(a.failure for a in done.answers)
    ]


def test_choices_with_a_tree_survive_json(repository):
    with commit_tree("main") as tree:
        gate_choices = choices(
            tree=tree, baseline_cases=BaselineCases(digest="0", cases=(("k", "d", "v", {"a": 1}),))
        )
    text = json.dumps(gate_choices.options())
    assert Choices.of(json.loads(text)) == gate_choices


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("mine", "--against", "gone"), "no such commit"),
        (("ideal", "--against", "main"), "is attncheck's own"),
        (("mine", "--against", "main", "--skip", "baseline"), "it is left out"),
        (("mine", "--against", "main", "--cluster", "auto"), "leave --cluster out"),
        (("mine", "--sanitizer", "--stage", "bounds"), "it is left out"),
    ],
)
def test_against_rejects_impossible_comparisons_before_asking(repository, words, message):
    from click.testing import CliRunner

    from attncheck.cli.gate import gate

    result = CliRunner().invoke(gate, [*words, "--device", "cpu", "-q"])
    assert isinstance(result.exception, UsageError)
    assert message in str(result.exception)
    assert not (repository / "reports").exists()

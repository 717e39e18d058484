"""A gate beside another commit: whose kernels are asked, how cases stand, and what is counted."""

import json
from types import SimpleNamespace

import pytest
from msgspec.structs import replace
from tests.gate.driven import choices, git

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
    scores = query.float() @ key.float().mT * (scale or query.shape[-1] ** -0.5)
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


def beside(there, kernel="mine"):
    """The journal of a gate of two cases, the kernel here in this process."""
    chosen = choices(dtypes="bf16", stages="baseline", tree=there)
    (first,) = describe_units([kernel], device="cpu", tier="smoke", convention="")
    units = []
    for case in CASES:
        here = replace(first, kind="ask", stage="baseline", case=case.to_json())
        units += [here, replace(here, commit=there.commit)]
    facts = {"kernel": kernel, "name": kernel, "summary": ""}
    content = JournalContent(head={**chosen.plan(), "tier": "smoke"})
    content.units = {unit.id: unit for unit in (first, *units)}
    gate = GateWorker(chosen, KnownFailures(()))
    content.results = {first.id: UnitResult(unit=first.id, facts=facts)}
    content.results |= {unit.id: gate.do(unit) for unit in units}
    gate.close()
    return content


def test_what_may_be_flaky_is_not_worse(repository):
    with commit_tree("main") as there:
        content = beside(there)
    for id_, done in content.results.items():
        if done.answers and not content.units[id_].commit:
            answers = (replace(a, record=replace(a.record, status="flaky")) for a in done.answers)
            content.results[id_] = replace(done, answers=tuple(answers))

    def standings(command):
        found = build_report(content, command=command)
        return {change.standing for change in found.changes}, gate_exit_code(found, Policy(flaky=2))

    assert standings("attncheck gate mine --flaky 1") == ({"worse"}, 1)
    assert standings("attncheck gate mine --flaky 2") == ({"within rounding"}, 0)


def test_a_change_that_changes_no_bit_is_identical(repository):
    (repository / "mine.py").write_text(REFACTORED)
    with commit_tree("main") as there:
        content = beside(there)
    found = build_report(content)
    assert [change.standing for change in found.changes] == ["identical"] * 2
    assert found.baseline == f"commit {there.commit[:12]}"
    # What the other commit answers is counted nowhere.
    assert len(found.answers) == sum(found.planned.values()) == 2
    assert {answer.record.environment for answer in found.answers} == set(found.environments)
    here, before = list(content.units.values())[1:3]
    assert (here.commit, before.commit) == ("", there.commit)
    assert all(Shard(n, 5).has(here) == Shard(n, 5).has(before) for n in range(1, 6))


def test_every_measured_case_is_asked_of_both(monkeypatch):
    """As the plan has it: one right after the other."""
    found = SimpleNamespace(commit="0" * 40)
    planning = SimpleNamespace(
        choices=SimpleNamespace(
            tree=found, baseline_cases=None, dtypes=(), tier=tier_named("smoke")
        ),
        refused=[],
    )
    unit = Unit(kind="ask", stage="bounds", kernel="mine", device="cpu", case=CASES[0].to_json())
    monkeypatch.setattr("attncheck.gate.bound_stage.bound_units", lambda _: iter([unit] * 3))
    sides = [each.commit for each in baseline_units(planning)]
    assert sides == ["", found.commit] * 3


def test_a_loss_is_worse(repository):
    (repository / "mine.py").write_text(LOSES)
    with commit_tree("main") as there:
        found = build_report(beside(there))
    assert {change.standing for change in found.changes} == {"worse"}
    assert all(answer.record.status == "pass" for answer in found.answers)


@pytest.mark.parametrize("what", ["file", "name"])
def test_what_the_commit_has_not_is_new(repository, what):
    (repository / "mine.py").rename(repository / "other.py")
    if what == "name":
        (repository / "mine.py").write_text(KERNEL.replace("def attention", "def newer"))
    kernel = "other.py::attention" if what == "file" else "mine.py::newer"
    with commit_tree("main") as there:
        found = build_report(beside(there, kernel))
    change = found.changes[0]
    assert {each.standing for each in found.changes} == {"new"}
    said = "no file other.py" if what == "file" else "mine.py has no 'newer'"
    assert said in change.reason
    assert not found.harness


def test_a_module_of_the_repository_in_place_of_the_commits_is_refused(repository):
    """As where a package is installed so that it is found here first."""
    (repository / "mine.py").write_text(
        f"import sys\nsys.path.insert(0, {str(repository)!r})\nimport beside_it\n{KERNEL}"
    )
    (repository / "beside_it.py").write_text("NUMBER = 1\n")
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "-m", "It looks for modules where they are not")
    with commit_tree("main") as there:
        content = beside(there)
    said = [done.facts.get("usage", "") for done in content.results.values()]
    assert any("was loaded in place of main's" in each for each in said)


def test_a_kernel_that_fails_there_fails_nothing_here(repository):
    git(repository, "rm", "--quiet", "mine.py")
    (repository / "mine.py").write_text(KERNEL.replace("tril()", "tril(1)"))
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "-m", "A fault")
    (repository / "mine.py").write_text(KERNEL)
    with commit_tree("main") as there:
        content = beside(there)
    found = build_report(content)
    assert {answer.record.status for answer in found.answers} == {"pass"}
    assert "better" in {change.standing for change in found.changes}
    before = [content.results[id_] for id_, unit in content.units.items() if unit.commit]
    assert any(answer.record.status == "fail" for done in before for answer in done.answers)
    assert not [done for done in before if done.units or any(a.failure for a in done.answers)]


def test_a_tree_travels_as_text(repository):
    with commit_tree("main") as there:
        chosen = choices(
            tree=there, baseline_cases=BaselineCases(digest="0", cases=(("k", "d", "v", {"a": 1}),))
        )
    text = json.dumps(chosen.options())
    assert Choices.of(json.loads(text)) == chosen


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("mine", "--against", "gone"), "no such commit"),
        (("ideal", "--against", "main"), "is attncheck's own"),
        (("mine", "--against", "main", "--skip", "baseline"), "it is left out"),
        (("mine", "--against", "main", "--cluster", "auto"), "leave --cluster out"),
        (("mine", "--sanitizer", "--stage", "bounds"), "it is left out"),
    ],
)
def test_what_cannot_be_compared_is_said_before_anything_is_asked(repository, words, said):
    from click.testing import CliRunner

    from attncheck.cli.gate import gate

    result = CliRunner().invoke(gate, [*words, "--device", "cpu", "-q"])
    assert isinstance(result.exception, UsageError)
    assert said in str(result.exception)
    assert not (repository / "reports").exists()

"""Each stage finds the kernel that is wrong there, and a right one passes all."""

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from tests.gate.driven import answers, choices, drive, named

from attncheck.core.mod_spec import Spec
from attncheck.diagnose.reproduce import new_failure
from attncheck.fault_models.fault_model import FAMILIES
from attncheck.gate.bound_stage import REUSE_SUFFIX
from attncheck.gate.gate_report import build_report
from attncheck.gate.gate_worker import GateWorker, work
from attncheck.gate.plan import describe_units, replay_units
from attncheck.gate.property_stage import KNOWN, KnownFailures
from attncheck.inputs.problem import Case, Problem
from attncheck.records.failure_causes import group_by_cause
from attncheck.records.failures import keep_failure, load_failure
from attncheck.records.json_reports import load_report, report_json
from attncheck.records.problem_summary import problem_of
from attncheck.records.record import FAILED_STATUSES
from attncheck.records.run_reports import STAGES, GateReport
from attncheck.reporting.gate_document import not_covered
from attncheck.suite.known_failures import KnownFailure
from attncheck.verify.run_case import blank_record
from attncheck.workers.journal_format import JournalContent
from attncheck.workers.units import Unit, UnitResult

pytestmark = pytest.mark.usefixtures("forked_workers", "shared_evidence")

TUTORIAL = Path(__file__).parents[1] / "data" / "tutorial_kernels.py"


def wrong(results):
    return [a for a in answers(results) if a.record.status in FAILED_STATUSES]


@pytest.mark.parametrize(
    ("stage", "kernel"),
    [
        ("contract", "of_another_dtype"),
        ("probes", "sees_the_next_key"),
        ("bounds", "sees_the_next_key"),
        ("properties", "sees_the_next_key"),
        ("memory", "reads_as_if_contiguous"),
        ("determinism", "never_the_same"),
        ("baseline", "sees_the_next_key"),
    ],
)
def test_each_stage_finds_its_planted_fault(stage, kernel):
    _, results = drive(named(kernel), first=True, stages=stage)
    found = wrong(results)
    assert found, stage
    assert all(answer.stage == stage for answer in found)


@pytest.mark.parametrize("stage", ["contract", "memory", "determinism"])
def test_a_right_kernel_passes(stage):
    _, results = drive(named("right"), stages=stage)
    found = answers(results)
    assert not wrong(results), [a.record.reason or a.record.judgement for a in wrong(results)]
    assert any(answer.record.status == "pass" for answer in found)


def test_a_kernel_is_loaded_before_anything_is_asked():
    (unit,) = describe_units([named("right")], device="cpu", tier="smoke", convention="")
    gate = work(ahead=msgspec.json.encode(unit).decode(), **choices().options())
    loaded = gate._hosts.of(unit)
    assert gate.do(unit).facts["name"]
    assert gate._hosts.of(unit) is loaded
    gate.close()
    (missing,) = describe_units(["nowhere.py::none"], device="cpu", tier="smoke", convention="")
    gate = work(ahead=msgspec.json.encode(missing).decode(), **choices().options())
    assert "nowhere.py" in gate.do(missing).facts["usage"]


def test_of_what_is_asked_again_the_verdict_is_enough():
    gate = GateWorker(choices(), KnownFailures(()))
    (unit,) = describe_units([named("right")], device="cpu", tier="smoke", convention="")
    asked = replace(
        unit,
        kind="ask",
        stage="bounds",
        variant="full",
        case=Case(problem=Problem(query=4)).to_json(),
    )
    for variant, brief in (("full", False), (f"full {REUSE_SUFFIX}", True)):
        (answer,) = gate.do(replace(asked, variant=variant)).answers
        assert (answer.record.status, answer.record.out is None) == ("pass", brief)


def test_a_failure_is_kept_made_smaller_and_asked_again(tmp_path):
    kernel = named("sees_the_next_key")
    _, results = drive(kernel, first=True, stages="bounds", failures=str(tmp_path))
    first, smallest = wrong(results)
    assert smallest.smallest_of == first.record.case_id
    small = Case.from_json(smallest.record.case).problem
    assert (small.batch, small.heads, small.query, small.kv) == (1, 1, 1, 2)
    assert small.distribution == "normal"
    kept = load_failure(tmp_path / f"{smallest.failure}.json")
    assert kept.record.case_id == smallest.record.case_id
    how = {"device": "cpu", "convention": "", "tier": "smoke", "stages": STAGES}
    again = replay_units([kernel], tmp_path, **how)
    assert {Case.from_json(unit.case).id for unit in again} == {
        first.record.case_id,
        smallest.record.case_id,
    }
    assert replay_units(["ideal"], tmp_path, **how) == []
    assert replay_units([kernel], tmp_path, **how | {"stages": ("probes",)}) == []


@pytest.mark.parametrize(
    ("kernel", "models"),
    [
        ("sees_the_next_key", {"mask-one-key-wider"}),
        ("sees_the_next_key_or_doubles", {"mask-one-key-wider", ""}),
    ],
)
def test_each_fault_is_one_cause_that_explains_all_it_does(kernel, models):
    _, results = drive(named(kernel), stages="bounds")
    failed = [answer.record for answer in wrong(results)]
    groups = group_by_cause(failed)
    assert {group.model for group in groups} == models
    assert sum(len(group.members) for group in groups) == len(failed) > 5
    # What is off by a factor that is fitted has no name, and a kind.
    kinds = {failed[group.members[0]].diagnosis.family for group in groups if not group.model}
    assert kinds <= {FAMILIES["factor"]}
    for group in groups:
        masks = {problem_of(failed[i]).mask["name"] == "full" for i in group.members}
        # None is explained by a mask that its problem does not have.
        assert not group.model or masks == {False}


def test_a_failure_is_made_smaller_without_becoming_another_one():
    """Without its mask the Case fails by the same rule, for another reason."""
    problem = Problem(query=33, kv=33, heads=2, head_dim=32, mask=Spec.of("causal"), dtype="fp32")
    unit = Unit(
        kind="shrink",
        stage="bounds",
        kernel=named("sees_the_next_key_or_doubles"),
        device="cpu",
        tier="smoke",
        case=Case(problem=problem).to_json(),
    )
    gate = GateWorker(choices(), KnownFailures(()))
    ((answer,),) = [gate.do(unit).answers]
    gate.close()
    small = Case.from_json(answer.record.case).problem
    assert (small.mask, small.query, small.kv) == (Spec.of("causal"), 1, 2)
    assert answer.record.diagnosis.ranked[0].model == "mask-one-key-wider"


def test_a_failure_file_that_is_none_stops_nothing(tmp_path):
    (tmp_path / "aaaaaaaaaa.json").write_text("{")
    how = {"device": "cpu", "convention": "", "tier": "smoke", "stages": STAGES}
    assert replay_units(["ideal"], tmp_path, **how) == []


def test_what_can_be_asked_no_more_is_not_asked_again(tmp_path):
    problem = Problem(query=4)
    good = kept(Case(problem=problem, question="prefill_rows", parameters={"rows": 2}), tmp_path)
    kept(Case(problem=problem, question="prefill_rows", parameters={"gone": 2}), tmp_path)
    kept(Case(problem=problem, question="empty_rows"), tmp_path)  # each of its rows sees a key
    how = {"device": "cpu", "convention": "", "tier": "smoke", "stages": STAGES}
    assert [unit.case for unit in replay_units(["ideal"], tmp_path, **how)] == [good]


def kept(case, folder):
    """Keep it as a failure of the ideal kernel; its JSON."""
    record = blank_record(case, kernel="ideal", reason="planted")
    keep_failure(new_failure(record, kernel="ideal", device="cpu", convention="", test=""), folder)
    return case.to_json()


def test_a_question_that_cannot_be_asked_is_no_matter_of_usage():
    case = Case(problem=Problem(query=4), question="compare").to_json() | {"question": "gone"}
    unit = Unit(kind="ask", stage="bounds", kernel="ideal", device="cpu", case=case)
    done = GateWorker(choices()).do(unit)
    assert "usage" not in done.facts
    assert "ask of ideal: question 'gone' is not known" in done.harness


def test_a_kernel_that_is_not_there_is_a_matter_of_usage():
    unit = Unit(kind="describe", stage="contract", kernel=named("nobody"), device="cpu")
    done = GateWorker(choices()).do(unit)
    assert "nobody" in done.facts["usage"]


def test_known_failures_warn_and_others_fail():
    known = KnownFailures()
    entry = next(each for each in known.entries if each.device == "cpu" and not each.depends_on)
    case = entry.case
    unit = Unit(
        kind="ask",
        stage="memory",
        kernel=entry.kernel,
        device="cpu",
        variant=entry.families[0],
        case=case.to_json(),
    )
    record = blank_record(case, kernel=entry.kernel)
    said = known.excuse(record, unit, case)
    assert said.status == "warn"
    assert said.reason.startswith(KNOWN)
    assert KnownFailures(()).excuse(record, unit, case).status == record.status
    for lost in ("crash", "timeout", "oom"):
        gone = replace(record, status=lost)
        assert known.excuse(gone, unit, case) is gone
        drawn = replace(unit, test=entry.test)
        assert known.excuse(gone, drawn, case) is gone


@pytest.mark.parametrize(
    ("question", "changes", "status"),
    [
        ("compare", {}, "warn"),
        ("compare", {"query": 4}, "fail"),
        ("hidden_keys_huge", {"query": 4}, "warn"),
        ("hidden_keys_huge", {"query": 4, "dtype": "fp32"}, "fail"),
        ("hidden_keys_huge", {"query": 4, "mask": {"name": "sliding_window", "window": 1}}, "fail"),
    ],
)
def test_outside_of_properties_an_entry_is_about_its_case_or_its_question(
    question, changes, status
):
    row = {} if question == "compare" else {"row": 0}
    problem = {"query": 2, "kv": 4, "dtype": "fp16", "mask": {"name": "causal"}}
    case, other = (
        Case.from_json({"problem": each, "question": question, "parameters": row})
        for each in (problem, problem | changes)
    )
    entry = KnownFailure(
        test="test_x.py::*",
        kernel="mine",
        reason="theirs.",
        case=case,
        dtypes=("fp16", "bf16"),
        families=("causal",),
        where="entry 1",
    )
    unit = Unit(kind="ask", stage="memory", kernel="mine", device="cpu", case=other.to_json())
    record = blank_record(other, kernel="mine", status="fail")
    assert KnownFailures((entry,)).excuse(record, unit, other).status == status


def test_a_run_that_was_ended_says_what_is_missing_of_which_kernel(tmp_path):
    path = f"{tmp_path}/kernel.py::attention"
    kernels = {path: {"kernel": path, "name": "kernel.py::attention"}}
    content = JournalContent(why="--max-time 5s is over")
    for kernel in (path, f"{tmp_path}/other.py::attention"):
        (unit,) = describe_units([kernel], device="cpu", tier="smoke", convention="")
        content.units[unit.id] = unit
        if kernel in kernels:
            content.results[unit.id] = UnitResult(unit=unit.id, facts=kernels[kernel])
            for stage, commit in (("memory", ""), ("memory", "a1"), ("baseline", "")):
                case = Case(problem=Problem(query=4)).to_json()
                left = Unit(
                    kind="ask", stage=stage, kernel=kernel, device="cpu", case=case, commit=commit
                )
                content.units[left.id] = left
    report = build_report(content)
    lines = list(not_covered(report))
    assert "not asked of kernel.py::attention: 1 of memory, 1 of baseline" in lines
    # Without its folder: a report is passed on.
    assert "not asked of other.py::attention: anything at all" in lines
    assert load_report(report_json(report), GateReport) == report


@pytest.mark.parametrize(
    ("kernel", "causes"),
    [
        ("right", []),
        ("whole_tiles_of_128", ["the padding of the last tile of keys is not masked"]),
    ],
)
def test_a_plain_function_is_asked_within_its_claims(kernel, causes):
    _, results = drive(f"{TUTORIAL}::{kernel}", dtypes="", stages="contract,probes,memory")
    described = next(done for done in results.values() if "summary" in done.facts)
    assert "takes fp16; head_dim 16, 32, 64, 128, 256" in described.facts["summary"]
    # A smaller form of one of them is no failure of its own.
    failed = [one.record for one in answers(results) if not one.smallest_of]
    failed = [record for record in failed if record.status in FAILED_STATUSES]
    found = [group.cause for group in group_by_cause(failed)]
    assert len(found) == len(causes)
    assert all(one.startswith(cause) for one, cause in zip(found, causes, strict=True))
    passed = [one.record for one in answers(results) if one.record.status == "pass"]
    assert {problem_of(record).dtype for record in passed} == {"fp16"}


def test_a_kernel_for_decoding_is_asked_as_much_as_another():
    """What it refuses by its rows is known before it is asked: nothing of the bounds is lost."""
    _, results = drive(named("decodes"), stages="bounds")
    records = [answer.record for answer in answers(results)]
    shared = [Case.from_json(one.case).problem for one in records if one.status == "pass"]
    shared = [problem for problem in shared if problem.group > 1]
    assert len(shared) > 10
    assert max(problem.query * problem.group for problem in shared) <= 64
    assert not [one for one in records if one.reason.startswith("ValueError")]

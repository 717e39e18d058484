"""Each stage fails a kernel with a fault for it; failures are saved, shrunk and explained."""

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from tests.gate.gate_driver import answers, choices, drive, planted

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

REPLAY = {"device": "cpu", "convention": "", "tier": "smoke", "stages": STAGES}
TUTORIAL = Path(__file__).parents[1] / "data" / "tutorial_kernels.py"


def failed_answers(results):
    return [a for a in answers(results) if a.record.status in FAILED_STATUSES]


@pytest.mark.parametrize(
    ("stage", "kernel"),
    [
        ("contract", "of_another_dtype"),
        ("probes", "sees_the_next_key"),
        ("bounds", "sees_the_next_key"),
        ("properties", "sees_the_next_key"),
        ("memory", "reads_as_if_contiguous"),
        ("determinism", "nondeterministic"),
        ("baseline", "sees_the_next_key"),
    ],
)
def test_each_stage_finds_its_planted_fault(stage, kernel):
    _, results = drive(planted(kernel), first=True, stages=stage)
    failures = failed_answers(results)
    assert failures, stage
    assert all(answer.stage == stage for answer in failures)


@pytest.mark.parametrize("stage", ["contract", "memory", "determinism"])
def test_right_kernel_passes_every_stage(stage):
    _, results = drive(planted("right"), stages=stage)
    failures = failed_answers(results)
    assert not failures, [a.record.reason or a.record.judgement for a in failures]
    assert any(answer.record.status == "pass" for answer in answers(results))


def test_worker_loads_the_kernel_ahead_of_its_units():
    (unit,) = describe_units([planted("right")], device="cpu", tier="smoke", convention="")
    gate = work(ahead=msgspec.json.encode(unit).decode(), **choices().options())
    host = gate._hosts.of(unit)
    assert gate.do(unit).facts["name"]
    assert gate._hosts.of(unit) is host
    gate.close()
    (missing,) = describe_units(["nowhere.py::none"], device="cpu", tier="smoke", convention="")
    gate = work(ahead=msgspec.json.encode(missing).decode(), **choices().options())
    assert "nowhere.py" in gate.do(missing).facts["usage"]


def test_repeated_questions_keep_only_the_verdict():
    gate = GateWorker(choices(), KnownFailures(()))
    (unit,) = describe_units([planted("right")], device="cpu", tier="smoke", convention="")
    question = replace(
        unit,
        kind="ask",
        stage="bounds",
        variant="full",
        case=Case(problem=Problem(query=4)).to_json(),
    )
    for variant, brief in (("full", False), (f"full {REUSE_SUFFIX}", True)):
        (answer,) = gate.do(replace(question, variant=variant)).answers
        assert (answer.record.status, answer.record.out is None) == ("pass", brief)


def test_failure_is_saved_shrunk_and_replayed(tmp_path):
    kernel = planted("sees_the_next_key")
    _, results = drive(kernel, first=True, stages="bounds", failures=str(tmp_path))
    first, smallest = failed_answers(results)
    assert smallest.smallest_of == first.record.case_id
    small = Case.from_json(smallest.record.case).problem
    assert (small.batch, small.heads, small.query, small.kv) == (1, 1, 1, 2)
    assert small.distribution == "normal"
    saved = load_failure(tmp_path / f"{smallest.failure}.json")
    assert saved.record.case_id == smallest.record.case_id
    replays = replay_units([kernel], tmp_path, **REPLAY)
    assert {Case.from_json(unit.case).id for unit in replays} == {
        first.record.case_id,
        smallest.record.case_id,
    }
    assert replay_units(["ideal"], tmp_path, **REPLAY) == []
    assert replay_units([kernel], tmp_path, **REPLAY | {"stages": ("probes",)}) == []


@pytest.mark.parametrize(
    ("kernel", "models"),
    [
        ("sees_the_next_key", {"mask-one-key-wider"}),
        ("sees_the_next_key_or_doubles", {"mask-one-key-wider", ""}),
    ],
)
def test_failures_are_grouped_into_one_cause_per_fault(kernel, models):
    _, results = drive(planted(kernel), stages="bounds")
    failed = [answer.record for answer in failed_answers(results)]
    groups = group_by_cause(failed)
    assert {group.model for group in groups} == models
    assert sum(len(group.members) for group in groups) == len(failed) > 5
    # A fitted factor has no model, only a family.
    kinds = {failed[group.members[0]].diagnosis.family for group in groups if not group.model}
    assert kinds <= {FAMILIES["factor"]}
    for group in groups:
        unmasked = {problem_of(failed[i]).mask["name"] == "full" for i in group.members}
        # No failure is explained by a mask that its problem does not have.
        assert not group.model or unmasked == {False}


def test_scale_of_0_is_asked_of_a_kernel_without_lse_and_the_fault_is_named():
    """Problems with a loss of LSE are asked without it, since the claims say that it has none."""
    _, results = drive(planted("takes_a_scale_of_0_for_none"), stages="bounds")
    failed = [answer.record for answer in failed_answers(results)]
    assert failed
    assert {Case.from_json(record.case).problem.scale for record in failed} == {0.0}
    assert {record.diagnosis.ranked[0].model for record in failed} == {"scale-of-zero-for-none"}
    asked = [answer.record for answer in answers(results) if answer.record.status == "pass"]
    assert not any(Case.from_json(record.case).problem.dlse for record in asked)


def test_shrinking_does_not_turn_one_fault_into_another():
    """Without its mask the Case fails by the same rule, but for another reason."""
    problem = Problem(query=33, kv=33, heads=2, head_dim=32, mask=Spec.of("causal"), dtype="fp32")
    unit = Unit(
        kind="shrink",
        stage="bounds",
        kernel=planted("sees_the_next_key_or_doubles"),
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


def test_replay_skips_damaged_failure_files(tmp_path):
    (tmp_path / "aaaaaaaaaa.json").write_text("{")
    assert replay_units(["ideal"], tmp_path, **REPLAY) == []


def test_replay_skips_questions_that_no_longer_exist_or_fit(tmp_path):
    problem = Problem(query=4)
    good = save_failure(
        Case(problem=problem, question="prefill_rows", parameters={"rows": 2}), tmp_path
    )
    save_failure(Case(problem=problem, question="prefill_rows", parameters={"gone": 2}), tmp_path)
    save_failure(
        Case(problem=problem, question="empty_rows"), tmp_path
    )  # each of its rows sees a key
    assert [unit.case for unit in replay_units(["ideal"], tmp_path, **REPLAY)] == [good]


def save_failure(case, folder):
    """Saves the case as a failure of the ideal kernel, and returns the case's JSON."""
    record = blank_record(case, kernel="ideal", reason="planted")
    keep_failure(new_failure(record, kernel="ideal", device="cpu", convention="", test=""), folder)
    return case.to_json()


def test_unknown_question_is_a_harness_error_and_not_a_usage_error():
    case = Case(problem=Problem(query=4), question="compare").to_json() | {"question": "gone"}
    unit = Unit(kind="ask", stage="bounds", kernel="ideal", device="cpu", case=case)
    done = GateWorker(choices()).do(unit)
    assert "usage" not in done.facts
    assert "ask of ideal: question 'gone' is not known" in done.harness


def test_missing_kernel_is_a_usage_error():
    unit = Unit(kind="describe", stage="contract", kernel=planted("nobody"), device="cpu")
    done = GateWorker(choices()).do(unit)
    assert "nobody" in done.facts["usage"]


def test_known_failure_turns_a_failure_into_a_warning_but_never_a_crash():
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
    excused = known.excuse(record, unit, case)
    assert excused.status == "warn"
    assert excused.reason.startswith(KNOWN)
    assert KnownFailures(()).excuse(record, unit, case).status == record.status
    for lost in ("crash", "timeout", "oom"):
        lost_record = replace(record, status=lost)
        assert known.excuse(lost_record, unit, case) is lost_record
        drawn_unit = replace(unit, test=entry.test)
        assert known.excuse(lost_record, drawn_unit, case) is lost_record


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
def test_known_failure_applies_to_its_case_or_its_question_outside_properties(
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


def test_unfinished_run_lists_what_was_not_asked_of_each_kernel(tmp_path):
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
                pending = Unit(
                    kind="ask", stage=stage, kernel=kernel, device="cpu", case=case, commit=commit
                )
                content.units[pending.id] = pending
    report = build_report(content)
    lines = list(not_covered(report))
    assert "not asked of kernel.py::attention: 1 of memory, 1 of baseline" in lines
    # Without its folder, because reports are shared.
    assert "not asked of other.py::attention: anything at all" in lines
    assert load_report(report_json(report), GateReport) == report


@pytest.mark.parametrize(
    ("kernel", "causes"),
    [
        ("right", []),
        ("whole_tiles_of_128", ["the padding of the last tile of keys is not masked"]),
    ],
)
def test_plain_function_is_tested_within_its_documented_claims(kernel, causes):
    _, results = drive(f"{TUTORIAL}::{kernel}", dtypes="", stages="contract,probes,memory")
    described = next(done for done in results.values() if "summary" in done.facts)
    assert "supports fp16; head_dim 16, 32, 64, 128, 256" in described.facts["summary"]
    # A shrunk form is no failure of its own.
    failed = [x.record for x in answers(results) if not x.smallest_of]
    failed = [record for record in failed if record.status in FAILED_STATUSES]
    group_causes = [group.cause for group in group_by_cause(failed)]
    assert len(group_causes) == len(causes)
    assert all(x.startswith(cause) for x, cause in zip(group_causes, causes, strict=True))
    passed = [x.record for x in answers(results) if x.record.status == "pass"]
    assert {problem_of(record).dtype for record in passed} == {"fp16"}


def test_wrong_dtype_is_beyond_the_claims_unless_it_is_requested():
    """As in a check: what is typed is claimed."""
    for dtypes, is_claimed in (("", False), ("bf16", True)):
        _, results = drive(planted("right_in_fp32"), dtypes=dtypes, stages="contract")
        records = [answer.record for answer in answers(results)]
        failed = [record for record in records if record.status in FAILED_STATUSES]
        (one,) = [record for record in failed if "dtypes-bf16" in record.variant]
        assert (one.unclaimed is msgspec.UNSET, one.variant == "dtypes-bf16") == 2 * (is_claimed,)


def test_decode_only_kernel_gets_its_full_share_of_bound_cases():
    """Its limit on rows is known before planning, so no bound case is lost to a refusal."""
    _, results = drive(planted("decode_only"), stages="bounds")
    records = [answer.record for answer in answers(results)]
    grouped = [Case.from_json(record.case).problem for record in records if record.status == "pass"]
    grouped = [problem for problem in grouped if problem.group > 1]
    assert len(grouped) > 10
    assert max(problem.query * problem.group for problem in grouped) <= 64
    assert not [record for record in records if record.reason.startswith("ValueError")]

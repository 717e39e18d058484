"""What is asked: the same every time, each property, and by parts each question once."""

from collections import Counter
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from msgspec.structs import replace as replace_unit
from tests.gate.driven import choices, named

from attncheck.cases.covering import DIMS, EXCLUSIONS, HEADS, SHAPES, row_problem, row_values
from attncheck.cases.mask_samples import SOFTMAX
from attncheck.cases.tier import TIERS
from attncheck.core.errors import UnknownName, UsageError
from attncheck.core.mod_spec import Spec
from attncheck.core.outputs import Outputs
from attncheck.gate.bound_stage import REUSE_SUFFIX, axes_of, bound_units
from attncheck.gate.gate_worker import GateWorker
from attncheck.gate.plan import (
    covering_units,
    describe_units,
    kernel_key,
    plan_kernel,
    priority,
)
from attncheck.gate.planning import BaselineCases, CachingExecutor, Planning, parse_stages
from attncheck.gate.property_stage import KnownFailures, choose_pairs, drawn_units
from attncheck.inputs.problem import Case, Problem
from attncheck.records.baseline_entries import baseline_entries, make_baseline
from attncheck.records.run_reports import STAGES
from attncheck.subjects.ideal import Ideal
from attncheck.subjects.load import load_subject
from attncheck.suite.property_spec import properties
from attncheck.verify.environment import environment
from attncheck.verify.executor import Failure, InProcess
from attncheck.verify.run_case import new_record, run_case
from attncheck.workers.units import Shard, Unit

PLAIN = {
    "extent": "",
    "scale": "",
    "score": "none",
    "stored": "plain",
    "backward": "backward",
    "dtype": "bf16",
    "heads": "one head",
    "dims": "64",
    "distribution": "normal",
}


def planning(kernel="ideal", **options):
    options = {"dtypes": "fp32,bf16"} | options
    (unit,) = describe_units([kernel], device="cpu", tier="smoke", convention="")
    return Planning(unit, load_subject(kernel), InProcess(), choices(**options))


def plan(found):
    """All of a plan, what is drawn later in its place too."""
    units = plan_kernel(found)
    return [unit for unit in units if unit.kind != "draw" or unit.test] + covering_units(found)


@pytest.fixture(scope="module")
def whole():
    return plan(planning())


def test_the_plan_is_the_same_every_time(whole):
    assert [unit.id for unit in plan(planning())] == [unit.id for unit in whole]


def test_what_takes_seconds_to_choose_is_drawn_while_others_are_asked():
    found = planning(stages="probes,bounds,baseline")
    *probes, drawn = plan_kernel(found)
    assert {unit.stage for unit in probes} == {"probes"}
    assert (drawn.kind, drawn.stage, drawn.test, found.bounds) == ("draw", "bounds", "", None)
    units = draw(drawn, stages="probes,bounds,baseline")
    assert list(units) == covering_units(found)
    assert {unit.stage for unit in units} == {"bounds", "baseline"}
    (alone,) = plan_kernel(planning(stages="baseline"))
    assert alone == drawn
    assert {unit.stage for unit in draw(alone, stages="baseline")} == {"baseline"}


def test_what_follows_from_a_unit_is_the_same_if_that_was_lost_before():
    (describe,) = describe_units(["ideal"], device="cpu", tier="smoke", convention="")
    stages = {"stages": "bounds"}
    assert draw(describe, **stages) == draw(replace_unit(describe, alone=True), **stages)


def draw(unit, **options):
    """The units that follow from one."""
    with closing(GateWorker(choices(**{"dtypes": "fp32,bf16"} | options))) as gate:
        return gate.do(unit).units


def test_questions_of_one_kernel_key_are_told_on_a_gpu():
    def key(device="cuda", **fields):
        case = Case(problem=Problem(**{"query": 64} | fields))
        unit = Unit(kind="ask", stage="bounds", kernel="x", device=device, case=case.to_json())
        return kernel_key(unit)

    window = Spec.of("sliding_window", window=5)
    assert key() == key(query=7, heads=4, seed=3, distribution="uniform")
    assert key(mask=window) == key(mask=Spec.of("sliding_window", window=6))
    others = {"dtype": "fp16"}, {"mask": window}, {"head_dim": 32}, {"backward": True}
    assert len({key(), *(key(**fields) for fields in others)}) == 5
    assert key("cpu") == ""
    (describe,) = describe_units(["x"], device="cuda", tier="pr", convention="")
    assert kernel_key(describe) == ""
    case = Case(problem=Problem(query=64)).to_json()
    sanitizes = {"kind": "ask", "variant": "compute-sanitizer memcheck", "case": case}
    assert kernel_key(replace_unit(describe, **sanitizes)) == ""


def test_every_stage_asks_something(whole):
    assert {unit.stage for unit in whole} == set(STAGES)


def test_no_question_is_asked_twice(whole):
    assert len({unit.id for unit in whole}) == len(whole)


def test_every_property_that_concerns_the_kernel_is_drawn_from(whole):
    drawn = {unit.test for unit in whole if unit.kind == "draw"}
    able = {
        name
        for name, spec in properties().items()
        if (not spec.dtypes or {"fp32", "bf16"} & set(spec.dtypes))
        and spec.questions != ("launches",)
    }
    assert drawn == able


def test_what_is_drawn_is_the_same_every_time(whole):
    for unit in [unit for unit in whole if unit.kind == "draw"][:5]:
        first, second = (drawn_units(unit, planning(), KnownFailures(())) for _ in range(2))
        assert first == second
        assert all(Case.from_json(each.case).problem.dtype == unit.dtype for each in first)


def test_a_question_that_needs_more_than_a_layout_is_asked_in_every_plan():
    cases = [Case.from_json(unit.case) for unit in plan(planning(stages="memory"))]
    (found,) = (c for c in cases if c.question == "hidden_keys_nan" and c.problem.backward)
    assert (found.problem.score.name, found.problem.mask.name) == ("softcap", "causal")
    far = [c for c in cases if c.question == "strides_far"]
    assert [c.parameters["tensor"] for c in far] == [0, 1, 2, 3][: 3 + far[0].problem.backward]
    without = plan(restricted(lambda problem: not problem.backward, stages="memory"))
    assert not any(Case.from_json(unit.case).problem.backward for unit in without)


def test_more_sequences_than_a_grid_holds_are_asked_where_there_are_grids():
    def many(device):
        (unit,) = describe_units(["mine"], device=device, tier="smoke", convention="")
        found = Planning(unit, Elsewhere(), InProcess(), choices(stages="contract"))
        cases = [Case.from_json(each.case) for each in plan(found)]
        return [case for case in cases if case.problem.batch * case.problem.heads > 65_535]

    assert many("cpu") == []
    (case,) = many("cuda")
    assert case.question == "first_row"  # which needs no oracle, of so many heads
    small = Case(problem=case.problem.replace(head_dim=1, value_dim=1), question=case.question)
    record = run_case(Elsewhere(), small, device="cpu")
    assert (record.status, record.judgement.rule) == ("fail", "relation")


class Elsewhere(Ideal):
    """Of more sequences than a grid's axis has places it launches nothing, and says nothing."""

    def absent(self, device):
        return None

    def prepare(self, inputs):
        sizes = inputs.problem.batch, inputs.problem.heads, inputs.problem.query
        if sizes[0] * sizes[1] <= 65_535:
            return super().prepare(inputs)
        out = torch.full((*sizes, inputs.problem.value_dim), 7.0)
        dtype = inputs.problem.formats.output.torch_dtype
        return lambda: Outputs(out.to(dtype), torch.zeros(sizes))


def test_a_window_hides_something_wherever_its_pairs_count():
    for shapes in SHAPES:
        rows = [{"mask": "sliding_window", "shape": shape} | PLAIN for shape in SHAPES[shapes]]
        for row in [row for row in rows if not any(never(row) for _, never in EXCLUSIONS)]:
            problem = row_problem(row, shapes, 0)
            q_idx, kv_idx = torch.meshgrid(
                torch.arange(problem.query), torch.arange(problem.kv), indexing="ij"
            )
            zero = torch.zeros((), dtype=torch.long)
            seen = problem.mask_mod()(zero, zero, q_idx, kv_idx)
            assert bool(((q_idx >= kv_idx) & ~seen).any()), (shapes, row["shape"])
            assert row_values(row, problem, shapes)["mask"] == "sliding_window"
            one_row = problem.replace(query=1)
            assert row_values(row, one_row, shapes)["mask"] is None


def test_shards_share_the_questions_among_them(whole):
    asked = [unit for unit in whole if unit.kind == "ask"]
    parts = [[unit.id for unit in asked if Shard(n, 3).has(unit)] for n in (1, 2, 3)]
    assert sorted(id_ for part in parts for id_ in part) == sorted(unit.id for unit in asked)
    assert all(parts)


def test_another_seed_draws_other_numbers(whole):
    other = {unit.id for unit in plan(planning(seed=5)) if unit.stage == "bounds"}
    assert not other & {unit.id for unit in whole if unit.stage == "bounds"}


def test_a_stage_that_is_left_out_asks_nothing():
    assert {unit.stage for unit in plan(planning(stages="probes"))} == {"probes"}


def test_what_a_kernel_refuses_is_kept_and_said():
    found = planning(named("right"), stages="bounds")
    asked = [Case.from_json(unit.case).problem for unit in plan(found)]
    assert {problem.mask.name for problem in asked} == {"full", "causal", "causal_bottom_right"}
    assert {answer.record.variant for answer in found.refused} >= {"sliding_window", "alibi"}
    assert all(answer.record.reason for answer in found.refused)


class Restricted(Ideal):
    """Takes what ``able`` says."""

    def __init__(self, able):
        super().__init__()
        self.able = able

    def unsupported(self, problem, device):
        return super().unsupported(problem, device) or (
            None if self.able(problem) else "restricted"
        )


def restricted(able, stages="baseline", **options):
    (unit,) = describe_units(["mine"], device="cpu", tier="smoke", convention="")
    return Planning(unit, Restricted(able), InProcess(), choices(stages=stages, **options))


def plainly(problem, *masks):
    return (
        problem.operation != "softmax"
        and problem.mask.name in {"full", "causal", *masks}
        and (problem.score.name, problem.backward, problem.sink) == ("none", False, False)
        and problem.paging is None
    )


def test_a_baseline_is_asked_what_it_was_made_of_whatever_the_plan_is_now():
    before = plan(restricted(plainly, dtypes="bf16"))
    here = environment("cpu")
    records = [
        new_record(
            Restricted(plainly),
            Case.from_json(unit.case),
            device="cpu",
            variant=unit.variant,
            environment="e",
        )
        for unit in before
    ]
    baseline = BaselineCases.of(
        make_baseline(baseline_entries(records, {"e": here}), {here.id: here}, "0")
    )
    after = restricted(lambda problem: plainly(problem, "sliding_window"), dtypes="bf16")
    cases = [Case.from_json(unit.case).id for unit in plan(after)]
    assert not {Case.from_json(unit.case).id for unit in before} <= set(cases)
    after.choices = replace(after.choices, baseline_cases=baseline)
    found = [Case.from_json(unit.case).id for unit in plan(after)]
    assert {*cases, *(Case.from_json(unit.case).id for unit in before)} == set(found)
    assert len(found) == len(set(found))
    assert after.choices.plan()["baseline"] == baseline.digest


def test_a_pair_that_is_lost_where_rows_are_moved_has_a_row_of_its_own():
    def able(problem):
        return plainly(problem) and (problem.mask.name == "full" or problem.query == problem.kv)

    found = restricted(able, dtypes="bf16,fp16")
    problems = [Case.from_json(unit.case).problem for unit in bound_units(found)]
    axes = axes_of(found)
    pairs = {(p.mask.name, p.head_dim, p.value_dim) for p in problems}
    pairs |= {(p.mask.name, p.dtype, p.distribution) for p in problems}
    wanted = {(mask, *DIMS[dims]) for mask in axes["mask"] for dims in axes["dims"]}
    assert wanted <= pairs
    heads = {(p.mask.name, p.batch, p.heads, p.kv_heads) for p in problems}
    assert {(mask, *HEADS[each]) for mask in axes["mask"] for each in axes["heads"]} <= heads


def on_a_gpu(tier, **options):
    (unit,) = describe_units(["mine"], device="cuda", tier=tier, convention="")
    options = {"dtypes": "fp32,bf16", "stages": "bounds,baseline"} | options
    return Planning(unit, Elsewhere(), InProcess(), choices(tier=tier, **options))


def test_on_a_gpu_what_is_compiled_anyway_is_asked_again():
    found = on_a_gpu("pr")
    units = plan(found)
    bounds = [unit for unit in units if unit.stage == "bounds"]
    again = [unit for unit in bounds if unit.variant.endswith(REUSE_SUFFIX)]
    assert len(bounds) > TIERS["pr"].threes_gpu > len(again) > len(bounds) / 2
    # Of two stages that need them they are planned, and refusals said, once.
    assert [unit for unit in bounds if unit.variant != SOFTMAX][-1] in found.bounds
    assert len(found.refused) == len({answer.record.case_id for answer in found.refused})
    on_cpu = plan(planning(tier="pr", stages="bounds"))
    assert not any(unit.variant.endswith(REUSE_SUFFIX) for unit in on_cpu)


def test_tier_pr_has_every_problem_of_smoke():
    smoke, pr = (plan(on_a_gpu(tier, stages="bounds")) for tier in ("smoke", "pr"))
    cases = {Case.from_json(unit.case).id for unit in pr}
    missing = [unit for unit in smoke if Case.from_json(unit.case).id not in cases]
    assert not missing


def test_what_is_asked_first_is_what_the_kernel_is(whole):
    describe = describe_units(["ideal"], device="cpu", tier="smoke", convention="")
    ordered = sorted([*whole, *describe], key=priority)
    assert ordered[0].kind == "describe"
    order = [STAGES.index(unit.stage) for unit in ordered]
    assert order == sorted(order)


def test_pairs_are_chosen_evenly():
    pairs = [(dtype, family) for dtype in ("fp32", "bf16") for family in ("full", "causal")]
    used = Counter()
    for _ in range(4):
        choose_pairs(pairs, 1, used)
    assert all(used[f"{dtype} {family}"] == 1 for dtype, family in pairs)
    assert set(choose_pairs(pairs, 2, Counter())) in ({pairs[0], pairs[3]}, {pairs[1], pairs[2]})


def test_a_known_failure_is_asked_in_place_of_a_search():
    known = KnownFailures()
    entry = next(each for each in known.entries if each.device == "cpu" and not each.depends_on)
    found = planning(entry.kernel, dtypes=entry.dtypes[0], stages="properties")
    unit = next(
        each
        for each in plan(found)
        if known.of_draw(each) is not None and not known.of_draw(each).depends_on
    )
    (asked,) = drawn_units(unit, found, known)
    assert Case.from_json(asked.case).question == known.of_draw(unit).case.question


def test_stages_are_named_in_their_order():
    assert parse_stages(("memory", "probes")) == ("probes", "memory")
    assert "bounds" not in parse_stages((), ("bounds",))
    with pytest.raises(UnknownName, match="Choose from baseline"):
        parse_stages(("bound",))
    with pytest.raises(UsageError, match="no stage is left"):
        parse_stages(("bounds",), ("bounds",))


def test_a_kernel_is_asked_once_what_it_takes_and_again_where_asking_failed():
    said = [Failure(kind="error", message="it died"), None]

    class Counting(InProcess):
        def refusal(self, subject, problem, device):
            return said.pop(0)

    executor, problem = CachingExecutor(Counting()), Problem(query=4)
    problems = [problem, problem, problem, problem.replace(seed=1, distribution="uniform")]
    answers = [executor.refusal(load_subject("ideal"), each, "cpu") for each in problems]
    assert isinstance(answers[0], Failure)
    assert answers[1:] == [None, None, None]

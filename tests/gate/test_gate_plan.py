"""The plan of a gate: complete, deterministic, and without duplicates, also across shards."""

import itertools
from collections import Counter
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from msgspec.structs import replace as replace_unit
from tests.gate.gate_driver import choices, planted

from attncheck.cases.covering import DIMS, EXCLUSIONS, HEADS, SHAPES, row_problem, row_values
from attncheck.cases.mask_samples import SOFTMAX
from attncheck.cases.tier import TIERS
from attncheck.core.errors import UnknownName, UsageError
from attncheck.core.mod_spec import Spec
from attncheck.core.outputs import Outputs
from attncheck.gate.bound_stage import REUSE_SUFFIX, axes_of, bound_units, fair_sample
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


def planning_for(kernel="ideal", **options):
    options = {"dtypes": "fp32,bf16"} | options
    (unit,) = describe_units([kernel], device="cpu", tier="smoke", convention="")
    return Planning(unit, load_subject(kernel), InProcess(), choices(**options))


def full_plan(planning):
    """All units of a plan, with those that are drawn later in their place."""
    units = plan_kernel(planning)
    return [unit for unit in units if unit.kind != "draw" or unit.test] + covering_units(planning)


@pytest.fixture(scope="module")
def ideal_plan():
    return full_plan(planning_for())


def test_plan_is_deterministic(ideal_plan):
    assert [unit.id for unit in full_plan(planning_for())] == [unit.id for unit in ideal_plan]


def test_bounds_and_baseline_are_drawn_after_the_probes_are_planned():
    """Choosing them takes seconds, in which the probes can already run."""
    planning = planning_for(stages="probes,bounds,baseline")
    *probes, draw_unit = plan_kernel(planning)
    assert {unit.stage for unit in probes} == {"probes"}
    assert (draw_unit.kind, draw_unit.stage, draw_unit.test) == ("draw", "bounds", "")
    assert planning.bounds is None
    units = draw(draw_unit, stages="probes,bounds,baseline")
    assert list(units) == covering_units(planning)
    assert {unit.stage for unit in units} == {"bounds", "baseline"}
    (only,) = plan_kernel(planning_for(stages="baseline"))
    assert only == draw_unit
    assert {unit.stage for unit in draw(only, stages="baseline")} == {"baseline"}


def test_units_drawn_after_a_lost_attempt_are_the_same():
    (describe,) = describe_units(["ideal"], device="cpu", tier="smoke", convention="")
    stages = {"stages": "bounds"}
    assert draw(describe, **stages) == draw(replace_unit(describe, alone=True), **stages)


def draw(unit, **options):
    """The units that follow from ``unit``."""
    with closing(GateWorker(choices(**{"dtypes": "fp32,bf16"} | options))) as gate:
        return gate.do(unit).units


def test_kernel_key_groups_questions_that_share_a_compiled_kernel():
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


def test_every_stage_has_units(ideal_plan):
    assert {unit.stage for unit in ideal_plan} == set(STAGES)


def test_plan_has_no_unit_twice(ideal_plan):
    assert len({unit.id for unit in ideal_plan}) == len(ideal_plan)


def test_every_applicable_property_is_drawn(ideal_plan):
    drawn_properties = {unit.test for unit in ideal_plan if unit.kind == "draw"}
    applicable = {
        name
        for name, spec in properties().items()
        if (not spec.dtypes or {"fp32", "bf16"} & set(spec.dtypes))
        and spec.questions != ("launches",)
    }
    assert drawn_properties == applicable


def test_drawn_units_are_deterministic(ideal_plan):
    for unit in [unit for unit in ideal_plan if unit.kind == "draw"][:5]:
        first, second = (drawn_units(unit, planning_for(), KnownFailures(())) for _ in range(2))
        assert first == second
        assert all(Case.from_json(each.case).problem.dtype == unit.dtype for each in first)


def test_memory_stage_always_asks_about_hidden_keys_and_far_strides():
    cases = [Case.from_json(unit.case) for unit in full_plan(planning_for(stages="memory"))]
    (hidden_keys,) = (c for c in cases if c.question == "hidden_keys_nan" and c.problem.backward)
    assert (hidden_keys.problem.score.name, hidden_keys.problem.mask.name) == ("softcap", "causal")
    far = [c for c in cases if c.question == "strides_far"]
    assert [c.parameters["tensor"] for c in far] == [0, 1, 2, 3][: 3 + far[0].problem.backward]
    forward_only = full_plan(restricted(lambda problem: not problem.backward, stages="memory"))
    assert not any(Case.from_json(unit.case).problem.backward for unit in forward_only)


def test_more_sequences_than_a_grid_axis_holds_are_asked_on_a_gpu():
    def oversized_cases(device):
        (unit,) = describe_units(["mine"], device=device, tier="smoke", convention="")
        planning = Planning(unit, GridLimited(), InProcess(), choices(stages="contract"))
        cases = [Case.from_json(each.case) for each in full_plan(planning)]
        return [case for case in cases if case.problem.batch * case.problem.heads > 65_535]

    assert oversized_cases("cpu") == []
    (case,) = oversized_cases("cuda")
    assert case.question == "first_row"  # which needs no oracle for so many heads
    small = Case(problem=case.problem.replace(head_dim=1, value_dim=1), question=case.question)
    record = run_case(GridLimited(), small, device="cpu")
    assert (record.status, record.judgement.rule) == ("fail", "relation")


class GridLimited(Ideal):
    """Launches nothing, silently, for more sequences than a grid's axis can hold."""

    def absent(self, device):
        return None

    def prepare(self, inputs):
        sizes = inputs.problem.batch, inputs.problem.heads, inputs.problem.query
        if sizes[0] * sizes[1] <= 65_535:
            return super().prepare(inputs)
        out = torch.full((*sizes, inputs.problem.value_dim), 7.0)
        dtype = inputs.problem.formats.output.torch_dtype
        return lambda: Outputs(out.to(dtype), torch.zeros(sizes))


def test_window_hides_keys_in_every_row_that_counts_for_its_pairs():
    for shapes in SHAPES:
        rows = [{"mask": "sliding_window", "shape": shape} | PLAIN for shape in SHAPES[shapes]]
        for row in [row for row in rows if not any(never(row) for _, never in EXCLUSIONS)]:
            problem = row_problem(row, shapes, 0)
            q_idx, kv_idx = torch.meshgrid(
                torch.arange(problem.query), torch.arange(problem.kv), indexing="ij"
            )
            zero = torch.zeros((), dtype=torch.long)
            visible = problem.mask_mod()(zero, zero, q_idx, kv_idx)
            assert bool(((q_idx >= kv_idx) & ~visible).any()), (shapes, row["shape"])
            assert row_values(row, problem, shapes)["mask"] == "sliding_window"
            one_row = problem.replace(query=1)
            assert row_values(row, one_row, shapes)["mask"] is None


def test_shards_partition_the_questions(ideal_plan):
    questions = [unit for unit in ideal_plan if unit.kind == "ask"]
    parts = [[unit.id for unit in questions if Shard(n, 3).has(unit)] for n in (1, 2, 3)]
    assert sorted(id_ for part in parts for id_ in part) == sorted(unit.id for unit in questions)
    assert all(parts)


def test_another_seed_draws_other_bound_cases(ideal_plan):
    other = {unit.id for unit in full_plan(planning_for(seed=5)) if unit.stage == "bounds"}
    assert not other & {unit.id for unit in ideal_plan if unit.stage == "bounds"}


def test_plan_has_only_the_chosen_stages():
    assert {unit.stage for unit in full_plan(planning_for(stages="probes"))} == {"probes"}


def test_refused_values_are_kept_with_their_reasons():
    planning = planning_for(planted("right"), stages="bounds")
    problems = [Case.from_json(unit.case).problem for unit in full_plan(planning)]
    assert {problem.mask.name for problem in problems} == {"full", "causal", "causal_bottom_right"}
    assert {answer.record.variant for answer in planning.refused} >= {"sliding_window", "alibi"}
    assert all(answer.record.reason for answer in planning.refused)


class Restricted(Ideal):
    """An ideal kernel that takes only Problems for which ``able`` holds."""

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


def is_plain(problem, *masks):
    return (
        problem.operation != "softmax"
        and problem.mask.name in {"full", "causal", *masks}
        and (problem.score.name, problem.backward, problem.sink) == ("none", False, False)
        and problem.paging is None
    )


def test_baseline_cases_are_asked_even_if_the_plan_has_changed():
    old_plan = full_plan(restricted(is_plain, dtypes="bf16"))
    here = environment("cpu")
    records = [
        new_record(
            Restricted(is_plain),
            Case.from_json(unit.case),
            device="cpu",
            variant=unit.variant,
            environment="e",
        )
        for unit in old_plan
    ]
    baseline_cases = BaselineCases.of(
        make_baseline(baseline_entries(records, {"e": here}), {here.id: here}, "0")
    )
    changed = restricted(lambda problem: is_plain(problem, "sliding_window"), dtypes="bf16")
    cases = [Case.from_json(unit.case).id for unit in full_plan(changed)]
    assert not {Case.from_json(unit.case).id for unit in old_plan} <= set(cases)
    changed.choices = replace(changed.choices, baseline_cases=baseline_cases)
    ids = [Case.from_json(unit.case).id for unit in full_plan(changed)]
    assert {*cases, *(Case.from_json(unit.case).id for unit in old_plan)} == set(ids)
    assert len(ids) == len(set(ids))
    assert changed.choices.plan()["baseline"] == baseline_cases.digest


def test_baseline_has_a_fair_share_of_every_dtype_and_of_forwards_and_backwards():
    units = full_plan(restricted(lambda _: True, dtypes="fp32,fp16,bf16"))
    kinds = [(problem.dtype, problem.backward) for problem in map(problem_of_unit, units)]
    dtypes = ("fp32", "fp16", "bf16")
    assert Counter(kinds) == dict.fromkeys(itertools.product(dtypes, (False, True)), 2)
    again = full_plan(restricted(lambda _: True, dtypes="fp32,fp16,bf16"))
    assert [unit.id for unit in again] == [unit.id for unit in units]


def problem_of_unit(unit):
    return Case.from_json(unit.case).problem


@pytest.mark.parametrize(
    ("kinds", "most", "chosen"),
    [
        ("aaaaaaaa", 4, [0, 2, 4, 6]),
        # An odd one goes to the first dtype, and to forwards.
        ("aaaabbbbAAAABBBB", 5, [0, 2, 6, 9, 15]),
        # What a rare dtype leaves, others use.
        ("aaaaaaaab", 4, [0, 2, 5, 8]),
        ("ab", 4, [0, 1]),
        ("", 4, []),
    ],
)
def test_fair_sample_spreads_each_share_over_the_plan(kinds, most, chosen):
    named = [(kind.lower(), kind.isupper()) for kind in kinds]
    assert fair_sample(named, most) == chosen


def test_pair_lost_by_moving_rows_gets_a_row_of_its_own():
    def able(problem):
        return is_plain(problem) and (problem.mask.name == "full" or problem.query == problem.kv)

    planning = restricted(able, dtypes="bf16,fp16")
    problems = [Case.from_json(unit.case).problem for unit in bound_units(planning)]
    axes = axes_of(planning)
    pairs = {(p.mask.name, p.head_dim, p.value_dim) for p in problems}
    pairs |= {(p.mask.name, p.dtype, p.distribution) for p in problems}
    wanted = {(mask, *DIMS[dims]) for mask in axes["mask"] for dims in axes["dims"]}
    assert wanted <= pairs
    heads = {(p.mask.name, p.batch, p.heads, p.kv_heads) for p in problems}
    assert {(mask, *HEADS[each]) for mask in axes["mask"] for each in axes["heads"]} <= heads


def gpu_planning(tier, **options):
    (unit,) = describe_units(["mine"], device="cuda", tier=tier, convention="")
    options = {"dtypes": "fp32,bf16", "stages": "bounds,baseline"} | options
    return Planning(unit, GridLimited(), InProcess(), choices(tier=tier, **options))


def test_gpu_plan_asks_again_what_is_compiled_anyway():
    planning = gpu_planning("pr")
    units = full_plan(planning)
    bounds = [unit for unit in units if unit.stage == "bounds"]
    repeated = [unit for unit in bounds if unit.variant.endswith(REUSE_SUFFIX)]
    assert len(bounds) > TIERS["pr"].threes_gpu > len(repeated) > len(bounds) / 2
    # Two stages need these units; they are planned once, and refusals are listed once.
    assert [unit for unit in bounds if unit.variant != SOFTMAX][-1] in planning.bounds
    assert len(planning.refused) == len({answer.record.case_id for answer in planning.refused})
    on_cpu = full_plan(planning_for(tier="pr", stages="bounds"))
    assert not any(unit.variant.endswith(REUSE_SUFFIX) for unit in on_cpu)


def test_tier_pr_has_every_problem_of_smoke():
    smoke, pr = (full_plan(gpu_planning(tier, stages="bounds")) for tier in ("smoke", "pr"))
    cases = {Case.from_json(unit.case).id for unit in pr}
    missing = [unit for unit in smoke if Case.from_json(unit.case).id not in cases]
    assert not missing


def test_priority_orders_describing_first_and_then_stages(ideal_plan):
    describe = describe_units(["ideal"], device="cpu", tier="smoke", convention="")
    ordered = sorted([*ideal_plan, *describe], key=priority)
    assert ordered[0].kind == "describe"
    order = [STAGES.index(unit.stage) for unit in ordered]
    assert order == sorted(order)


def test_choose_pairs_uses_every_value_evenly():
    pairs = [(dtype, family) for dtype in ("fp32", "bf16") for family in ("full", "causal")]
    used = Counter()
    for _ in range(4):
        choose_pairs(pairs, 1, used)
    assert all(used[f"{dtype} {family}"] == 1 for dtype, family in pairs)
    assert set(choose_pairs(pairs, 2, Counter())) in ({pairs[0], pairs[3]}, {pairs[1], pairs[2]})


def test_known_failure_is_asked_instead_of_drawing_cases():
    known = KnownFailures()
    entry = next(each for each in known.entries if each.device == "cpu" and not each.depends_on)
    planning = planning_for(entry.kernel, dtypes=entry.dtypes[0], stages="properties")
    unit = next(
        each
        for each in full_plan(planning)
        if known.of_draw(each) is not None and not known.of_draw(each).depends_on
    )
    (question,) = drawn_units(unit, planning, known)
    assert Case.from_json(question.case).question == known.of_draw(unit).case.question


def test_parse_stages_orders_and_validates_names():
    assert parse_stages(("memory", "probes")) == ("probes", "memory")
    assert "bounds" not in parse_stages((), ("bounds",))
    with pytest.raises(UnknownName, match="Choose from baseline"):
        parse_stages(("bound",))
    with pytest.raises(UsageError, match="no stage is left"):
        parse_stages(("bounds",), ("bounds",))


def test_caching_executor_caches_refusals_but_not_failures():
    replies = [Failure(kind="error", message="it died"), None]

    class Counting(InProcess):
        def refusal(self, subject, problem, device):
            return replies.pop(0)

    executor, problem = CachingExecutor(Counting()), Problem(query=4)
    problems = [problem, problem, problem, problem.replace(seed=1, distribution="uniform")]
    answers = [executor.refusal(load_subject("ideal"), each, "cpu") for each in problems]
    assert isinstance(answers[0], Failure)
    assert answers[1:] == [None, None, None]

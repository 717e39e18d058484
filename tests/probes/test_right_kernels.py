"""Right kernels of many designs pass every probe."""

import math

import pytest
import torch
from tests.probes.designs import Design, DesignedKernel

import attncheck
from attncheck import probes
from attncheck.core.formats import FORMATS, round_to
from attncheck.core.mod_spec import Spec
from attncheck.core.outputs import Outputs
from attncheck.inputs.input_tensors import Inputs
from attncheck.inputs.problem import USUAL_SCALE, Case, Problem
from attncheck.subjects.capabilities.subject import Tiling
from attncheck.subjects.ideal import Ideal
from attncheck.subjects.load import load_subject
from attncheck.subjects.triton_flash import Flash2
from attncheck.verify.evidence_builder import EvidenceBuilder
from attncheck.verify.run_case import mask_rows, run_case

pytestmark = pytest.mark.usefixtures("shared_evidence")

DTYPES = ("fp32", "tf32", "fp16", "bf16", "e4m3", "e5m2")
MASKS = (
    "full",
    "causal",
    "causal_bottom_right",
    "sliding_window",
    "prefix_lm",
    "document",
    "padding",
    "holes",
)
TILINGS = (
    Tiling(block_query=16, block_kv=16),
    Tiling(block_query=16, block_kv=8, reverse=True),
    Tiling(block_query=32, block_kv=4, recurrence="flash1"),
    Tiling(block_query=16, block_kv=8, lazy_rescale=8.0),
)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", probes.PROBES)
def test_exact_rule_passes_ideal_kernel(small, name, mask):
    for turn, dtype in enumerate(DTYPES):
        problem = small(mask, dtype=dtype)
        case = probes.cases(name, problem)[-1]
        inputs = probes.inputs(case)
        outputs = Ideal(TILINGS[turn % len(TILINGS)]).run(inputs)
        assert probes.check_tied_keys(inputs, outputs, mask_rows(problem)) is None, dtype


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "e4m3"])
@pytest.mark.parametrize("name", probes.PROBES)
def test_probe_run_passes_ideal_kernel(small, name, dtype):
    evidence = EvidenceBuilder(probes.case(name, small("causal", dtype=dtype)), "cpu")
    for tiling in TILINGS[: 4 if dtype != "e4m3" else 3]:
        record = run_case(
            Ideal(tiling), evidence.case, device=evidence.device, evidence=evidence, variant=name
        )
        assert (record.status, record.judgement.reason) == ("pass", "")


@pytest.mark.parametrize("sizes", [(1, 1), (3, 2), (5, 3), (80, 96)], ids=str)
def test_exact_rule_passes_with_unusual_head_dims(small, sizes):
    head_dim, value_dim = sizes
    problem = small("causal", head_dim=head_dim, value_dim=value_dim, dtype="e5m2")
    for name in probes.PROBES:
        for case in probes.cases(name, problem)[:3]:
            inputs = probes.inputs(case)
            outputs = Ideal(TILINGS[0]).run(inputs)
            assert probes.check_tied_keys(inputs, outputs, mask_rows(problem)) is None, name


@pytest.mark.parametrize("name", ["decode", "mean"])
def test_triton_kernel_passes_probes(small, name):
    problem = small("causal", heads=2, batch=1, head_dim=16, dtype="bf16")
    record = run_case(Flash2(), probes.case(name, problem), device="cpu", variant=name)
    assert record.status == "pass"


def test_single_key_with_custom_scale_passes(small):
    problem = small(kv=1, query=1, scale=0.37)
    for name in probes.PROBES:
        record = run_case(Ideal(), probes.case(name, problem), device="cpu", variant=name)
        assert record.status == "pass", name


def test_filled_empty_rows_fail(small):
    class FillsEmptyRows(Ideal):
        def prepare(self, inputs):
            call = super().prepare(inputs)

            def filled():
                outputs = call()
                outputs.out[0] += 1
                return outputs

            return filled

    record = run_case(FillsEmptyRows(), probes.case("decode", small("padding")), device="cpu")
    assert (record.status, record.judgement.rule) == ("fail", "empty rows")


@pytest.mark.parametrize("turn", [0, 1])
def test_truncated_operands_pass_only_if_declared(turn):
    # A weight one bit below 1 loses 2^-11 of itself.
    problem = Problem(heads=8, query=125, kv=250, dtype="tf32")
    case = probes.case("isolated", problem, {"turn": turn})
    kernel, inputs = Ideal(tf32="truncate"), probes.inputs(case)
    record = run_case(kernel, case, device="cpu", variant="isolated")
    assert (record.status, record.judgement.reason) == ("pass", "")
    undeclared = probes.check_tied_keys(inputs, kernel.run(inputs), mask_rows(problem))
    assert undeclared is not None


def attend_with_scaled_operands(inputs, *, share):
    """Exact attention, but q · scale^share and k · scale^(1 − share) are rounded to tf32."""
    problem = inputs.problem
    q, k, v = inputs.promoted()
    k, v = (x.repeat_interleave(problem.group, dim=1) for x in (k, v))
    left, right = problem.scale**share, problem.scale ** (1 - share)
    q, k = (round_to(x * by, FORMATS["tf32"]) for x, by in ((q, left), (k, right)))
    seen = mask_rows(problem)(range(problem.query)).expand(*q.shape[:3], problem.kv)
    scores = (q @ k.mT).masked_fill(~seen, -torch.inf)
    p = torch.softmax(scores, -1).nan_to_num(0.0)
    return Outputs((p @ v).float(), torch.logsumexp(scores, -1).float())


@pytest.mark.parametrize("share", [1.0, 0.5], ids=["q", "q and k"])
@pytest.mark.parametrize("name", probes.PROBES)
def test_scale_rounded_into_operands_passes(small, name, share):
    # Found on an H200: sdpa-math multiplies both by the root of the scale, and reads tf32.
    mask = Spec.of("and", Spec.of("causal"), Spec.of("causal_bottom_right"))
    reported = Problem(query=113, kv=66, head_dim=17, value_dim=1, dtype="tf32", mask=mask)
    for problem in (reported, small("causal", dtype="tf32", head_dim=17), small(dtype="tf32")):
        for case in probes.cases(name, problem):
            inputs = probes.inputs(case)
            outputs = attend_with_scaled_operands(inputs, share=share)
            assert probes.check_tied_keys(inputs, outputs, mask_rows(problem)) is None, case


DESIGNS = {
    "renormalised by 32 keys": Design(32, renormalises=True),
    "by 48": Design(48, renormalises=True),
    "by 96": Design(96, renormalises=True),
    "by 128": Design(128, renormalises=True),
    "by 5, without scale": Design(5, renormalises=True, scaled=False),
    "renormalised splits": Design(16, renormalises=True, splits=3),
    "splits": Design(32, splits=3),
    "base e": Design(24, base=math.e),
    "sums in fp16": Design(16, short=True),
    "renormalised sums in fp16": Design(16, renormalises=True, short=True),
}


@pytest.mark.parametrize("design", DESIGNS.values(), ids=DESIGNS)
@pytest.mark.parametrize("name", probes.PROBES)
def test_every_right_design_passes_every_probe(name, design):
    """A user's right kernel once failed: P of a tile was 1/96, although there were 128 keys."""
    kernel, dtypes = DesignedKernel(design), ("fp16", "bf16", "fp32", "e4m3", "e5m2")
    first = [*DESIGNS.values()].index(design) + list(probes.PROBES).index(name)
    # Short sums need fp16's range. Otherwise each probe and each design meets every dtype.
    for turn in (0,) if design.short else (first % 5, (first + 2) % 5):
        dtype = dtypes[turn]
        kv, mask = ((128, "causal"), (77, "full"), (131, "causal"))[turn % 3]
        problem = Problem(
            batch=2, heads=2, query=kv, kv=kv, head_dim=16, dtype=dtype, mask=Spec.of(mask)
        )
        for case in probes.cases(name, problem)[:2]:
            record = run_case(kernel, case, device="cpu")
            assert (record.status, record.reason) == ("pass", ""), dtype


@pytest.mark.parametrize("tile", [48, 128])
def test_function_that_renormalises_by_tile_passes_check(tile):
    """A plain function, of whose arithmetic nothing is declared."""
    design = Design(tile, renormalises=True)

    def attention(query, key, value, is_causal=False, scale=None, enable_gqa=False):
        batch, heads, rows, dim = query.shape
        problem = Problem(
            batch=batch, heads=heads, kv_heads=key.shape[1], query=rows, kv=key.shape[2],
            head_dim=dim, value_dim=value.shape[3], dtype="fp16",
            scale=USUAL_SCALE if scale is None else scale,
            mask=Spec.of("causal" if is_causal else "full"),
        )  # fmt: skip
        out = design.attend(Inputs(problem=problem, q=query, k=key, v=value)).out
        return out.detach()  # autograd does not know rounding to formats

    records = attncheck.check(attention, dtypes=["fp16"], device="cpu")
    assert {"pass", "unsupported"} >= {record.status for record in records}
    assert sum(record.status == "pass" for record in records) > len(records) / 2


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_factor_is_found_in_kernel_that_may_divide_first(dtype):
    """Rows of one key and of two give the exact answer in every design."""

    class Smaller(DesignedKernel):
        def prepare(self, inputs):
            right = self.design.attend(inputs)
            # Less than the roundings of P and out may add up to.
            factor = 1 - 1.5 * FORMATS[dtype].unit_roundoff
            return lambda: Outputs((right.out.float() * factor).to(right.out.dtype), right.lse)

    problem = Problem(heads=2, query=130, kv=130, head_dim=16, dtype=dtype, mask=Spec.of("causal"))
    record = run_case(
        Smaller(Design(48, renormalises=True)), probes.case("mean", problem), device="cpu"
    )
    assert (record.status, record.judgement.rule) == ("fail", "structure")
    assert "rounded once" in record.judgement.reason


@pytest.mark.parametrize("seed", [4, 5])
def test_tie_of_unequal_products_allows_for_rounding_of_its_terms(seed):
    """Torch multiplies q and k by the scale's root: 40,000 right runs had two such false alarms."""
    problem = Problem(
        heads=4,
        kv_heads=1,
        query=66,
        kv=49,
        head_dim=96,
        dtype="fp32",
        mask=Spec.of("sliding_window", window=17),
        scale=6.123724460601807,
        seed=seed,
    )
    case = Case(problem=problem, question="isolated", parameters={"turn": 4})
    assert run_case(load_subject("sdpa-math"), case, device="cpu").status == "pass"

"""With a sink, right kernels stay within the bounds, and faults of the sink exceed them."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attncheck.cases.strategies.mask_strategies import masks
from attncheck.cases.strategies.problems import problems
from attncheck.cases.strategies.score_strategies import scores
from attncheck.cases.strategies.sizes import shapes
from attncheck.core.conditions import Rows
from attncheck.core.mod_spec import Spec
from attncheck.core.outputs import Outputs
from attncheck.inputs.input_tensors import Inputs
from attncheck.inputs.problem import Case, Problem
from attncheck.oracles.row_conditions import compute_conditions
from attncheck.subjects.capabilities.subject import Subject, Tiling
from attncheck.subjects.ideal import Ideal
from attncheck.verify.evidence_builder import EvidenceBuilder, ensemble_tilings
from attncheck.verify.run_case import run_case

pytestmark = pytest.mark.usefixtures("one_thread")

EXAMPLES = 12
LOG2E = torch.tensor(math.log2(math.e), dtype=torch.float32)
SMALL = {"longest": 40, "most_heads": 4, "head_dims": (1, 16, 17)}
WITH_SINKS = problems(
    shapes=shapes(**SMALL),
    masks=masks,
    scores=st.one_of(st.just(Spec.of("none")), scores()),
    sinks=True,
)


class SinkKernel(Subject):
    """Attention over all keys at once in fp32, with each of the usual ways to include a sink.

    Args:
        way: ``log2``: sink · log2 e beside scores in log2 units; ``raw``: sink ÷ scale beside q·k;
            ``natural``: in exp; ``after``: out and LSE of the keys alone are scaled afterwards, in
            fp32; ``parts``: the keys in two parts and the sink as a third, merged by LSE.
        fault: See ``FAULTS``.
    """

    summary = "for a test"
    sinks = True

    def __init__(self, way: str = "natural", fault: str = "") -> None:
        self.name, self.way, self.fault = f"{way} {fault}", way, fault

    def unsupported(self, problem: Problem, device: str) -> str | None:
        del problem, device
        return None

    def arithmetic(self, problem: Problem, device: str):
        merged = self.way in {"after", "parts"}
        declared = replace(super().arithmetic(problem, device), splits=3 if merged else 1)
        return replace(declared, weights_scale=1.0)

    def prepare(self, inputs: Inputs):
        return lambda: self.attention(inputs)

    def sink(self, inputs: Inputs) -> torch.Tensor:
        """fp32 ``(heads, 1, 1)``, natural."""
        assert inputs.sink is not None
        sink = inputs.sink
        if self.fault == "scaled":
            sink = sink * inputs.problem.scale
        if self.fault == "head + 1":
            sink = sink.roll(-1)
        if self.fault == "taken for log2":
            sink = sink / LOG2E
        if self.fault == "ignored":
            sink = torch.full_like(sink, -math.inf)
        return sink[:, None, None]

    def attention(self, inputs: Inputs) -> Outputs:
        problem, softmax = inputs.problem, self.softmax(inputs)
        kv, apart = problem.kv, self.way in {"after", "parts"}
        cuts = (0, kv // 2, kv) if self.way == "parts" else (0, kv)
        keys = [slice(*ends) for ends in pairwise(cuts) if ends[0] < ends[1]]
        inside = self.fault == "twice" or not apart
        parts = [softmax(part, with_sink=inside) for part in keys]
        if not inside:
            parts.append(softmax(slice(0, 0), with_sink=True))
        out, lse = _merge(parts)
        if self.fault == "not in LSE":
            lse = softmax(slice(kv), with_sink=False)[1]
        if inputs.descale is not None:
            out = out * inputs.descale.v.repeat_interleave(problem.group, 1)[..., None, None]
        return Outputs(out.to(problem.formats.output.torch_dtype), lse[..., 0].float())

    def softmax(self, inputs: Inputs):
        """Returns a function from a slice of keys, with or without the sink, to out and LSE."""
        x, seen, scale, v = _products(inputs)
        sink, one = self.sink(inputs), torch.ones(())
        if inputs.problem.score.name != "none":
            x, scale = _apply_score_mod(inputs, x * scale), one
        s, sink, unit, exp = {
            "log2": lambda: (x * (scale * LOG2E), sink * LOG2E, 1 / LOG2E, torch.exp2),
            "raw": lambda: (x, sink / scale, scale, lambda d: torch.exp(d * scale)),
        }.get(self.way, lambda: (x * scale, sink, one, torch.exp))()
        s = s.masked_fill(~seen, -math.inf)
        own = sink.expand(*s.shape[:-1], 1)

        def attend(keys: slice, *, with_sink: bool):
            scores = torch.cat([s[..., keys], own], -1) if with_sink else s[..., keys]
            m = scores.amax(-1, keepdim=True)
            p = torch.where(scores == -math.inf, 0.0, exp(scores - _zero_if_infinite(m)))
            total = p.sum(-1, keepdim=True)
            values = v[..., keys, :]
            weights = Ideal().operand(p[..., : values.shape[-2]], inputs.problem.formats.weights)
            lse = torch.where(total > 0, m * unit + total.log(), -math.inf)
            return weights @ values / torch.where(total > 0, total, 1.0), lse

        return attend


def _products(inputs: Inputs):
    """q·k in fp32, the visible pairs, the factor of the scores, and V; all per query head."""
    problem = inputs.problem
    q, k, v = (t.float() for t in (inputs.q, inputs.k, inputs.v))
    if problem.dtype == "tf32":
        q, k, v = (Ideal().operand(t, problem.formats.products) for t in (q, k, v))
    k, v = (t.repeat_interleave(problem.group, 1) for t in (k, v))
    scale = torch.tensor(problem.scale, dtype=torch.float32)
    if inputs.descale is not None:
        both = (inputs.descale.q * inputs.descale.k).repeat_interleave(problem.group, 1)
        scale = scale * both[..., None, None]
    axes = (torch.arange(n) for n in (problem.batch, problem.heads, problem.query, problem.kv))
    b, h, i, j = axes
    seen = problem.mask_mod()(b[:, None, None, None], h[:, None, None], i[:, None], j)
    products = q @ k.mT
    return products, seen.expand(products.shape), scale, v


def _apply_score_mod(inputs: Inputs, s: torch.Tensor) -> torch.Tensor:
    problem = inputs.problem
    axes = (torch.arange(n) for n in s.shape)
    b, h, i, j = axes
    mod = problem.score_mod()
    return mod(s, b[:, None, None, None], h[:, None, None], i[:, None], j).float()


def _zero_if_infinite(m: torch.Tensor) -> torch.Tensor:
    return torch.where(m == -math.inf, 0.0, m)


def _merge(parts):
    """Merges parts by LSE, in fp32; a part of LSE −∞ counts for nothing."""
    if len(parts) == 1:
        return parts[0]
    lses = torch.stack([lse for _, lse in parts])
    m = _zero_if_infinite(lses.amax(0))
    weights = torch.exp(lses - m)
    total = weights.sum(0)
    out = sum(w * out for w, (out, _) in zip(weights, parts, strict=True))
    alive = total > 0
    lse = torch.where(alive, m + torch.where(alive, total, 1.0).log(), -math.inf)
    return out / torch.where(alive, total, 1.0), lse


WAYS = ("natural", "log2", "raw", "after", "parts")
FAULTS = ("ignored", "not in LSE", "scaled", "head + 1", "taken for log2", "twice")
KERNELS = {f"written: {way}": SinkKernel(way) for way in WAYS} | {
    f"ideal {tiling}": Ideal(tiling)
    for tiling in (
        *ensemble_tilings(Problem(query=1)),
        Tiling(block_query=16, block_kv=16, recurrence="flash1"),
    )
}


def _record(kernel: Subject, problem: Problem):
    evidence = EvidenceBuilder(Case(problem=problem), "cpu")
    return run_case(
        kernel, evidence.case, device=evidence.device, evidence=evidence, brief=True, timed=True
    )


@pytest.mark.parametrize("name", KERNELS)
def test_right_kernels_stay_within_the_bounds(name):
    """Includes large scores, empty rows, score mods and descales."""
    kernel = KERNELS[name]

    @settings(max_examples=EXAMPLES, deadline=None, database=None)
    @given(problem=WITH_SINKS)
    def stays_within(problem: Problem) -> None:
        if "lazy" in name and problem.formats.scaled:
            return  # a lagging maximum would leave P no room for its scale
        record = _record(kernel, problem)
        assert record.status not in {"fail", "error"}, (
            str(problem),
            record.reason,
            record.judgement,
        )

    stays_within()


USUAL = [
    Problem(dtype=dtype, mask=mask, heads=4, kv_heads=2, query=32, kv=48, head_dim=32, sink=True)
    for dtype in ("fp32", "bf16", "fp16", "e4m3")
    for mask in (Spec.of("full"), Spec.of("padding", lengths=[20]))
]


@pytest.mark.parametrize("problem", USUAL, ids=str)
@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_planted_sink_faults_fail(fault, problem):
    record = _record(SinkKernel("parts" if fault == "twice" else "log2", fault), problem)
    assert (record.status == "fail") == bool(fault), record.judgement


@pytest.mark.parametrize("fault", FAULTS)
def test_sink_faults_fail_through_lse_where_no_row_sees_a_key(fault):
    """Out is 0 whatever the sink is."""
    empty = Spec.of("sliding_window", window=0)
    problem = Problem(dtype="bf16", mask=empty, heads=4, query=8, kv=8, head_dim=16, sink=True)
    record = _record(SinkKernel("parts" if fault == "twice" else "log2", fault), problem)
    assert record.status == "fail", record.judgement
    assert record.judgement.worst.tensor == "lse"


@settings(max_examples=EXAMPLES, deadline=None, database=None)
@given(problem=WITH_SINKS)
def test_conditions_of_a_sink_have_one_extra_key_of_value_zero(problem):
    """Their maximum and total give the exact result's LSE, which includes the sink."""
    evidence = EvidenceBuilder(Case(problem=problem), "cpu")
    every = Rows(range(problem.batch * problem.heads), torch.arange(problem.query))
    known = compute_conditions(evidence.inputs, evidence.truth, every)
    assert known.has_sink
    assert known.seen[..., -1].all()
    assert known.v[:, -1].eq(0).all()
    assert known.products[..., -1].eq(0).all()
    sink = evidence.inputs.sink.double().repeat(problem.batch)
    assert torch.equal(known.scores[..., -1], sink[:, None].expand(-1, problem.query))
    finite = known.lse.isfinite()
    lse = known.maximum + known.total.log()
    close = (lse - known.lse).abs() <= 1e-12 * (1 + known.lse.abs())
    assert close[finite].all()


def test_score_error_of_a_sink_depends_on_the_sink_alone():
    """8 roundings of the sink itself and none of q·k, whatever q is."""
    from attncheck.core.declared_arithmetic import default_arithmetic
    from attncheck.judge.score_errors import score_error

    problem = Problem(query=4, kv=4, dtype="bf16", sink=True)
    evidence = EvidenceBuilder(Case(problem=problem), "cpu")
    known = compute_conditions(evidence.inputs, evidence.truth, Rows(range(1), torch.arange(4)))
    radius = score_error(known, default_arithmetic(problem.formats)).radius[..., -1]
    expected = 8 * 2.0**-24 * known.scores[..., -1].abs()
    assert torch.allclose(radius, expected, rtol=1e-5)
    larger_query = replace(known, q=known.q * 100)
    assert torch.equal(
        score_error(larger_query, default_arithmetic(problem.formats)).radius[..., -1], radius
    )

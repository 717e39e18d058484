"""Kernels that keep sums in 16 bits: only long sums of small terms reveal them."""

import os
import subprocess
import sys

import pytest
import torch

from attncheck.cases.check_cases import check_cases
from attncheck.cases.named_problems import CONTRACT, FP8, LONG, tagged
from attncheck.fault_models.steps import Steps, round_to_format
from attncheck.inputs.problem import Case, Problem
from attncheck.judge.head_precision import residual_gate
from attncheck.subjects.capabilities.subject import Tiling
from attncheck.subjects.conventions.declarations import make_subject
from attncheck.subjects.ideal import Ideal
from attncheck.subjects.load import load_subject
from attncheck.verify.run_case import run_case

pytestmark = pytest.mark.usefixtures("one_thread", "shared_evidence")

LOG2E, LN2 = 1.4426950408889634, 0.6931471805599453


class Tiled(torch.autograd.Function):
    """FlashAttention-2 in plain torch; ``kept`` is the format of each running sum."""

    @staticmethod
    def forward(ctx, q, k, v, scale, tile, kept):
        out, total = torch.zeros_like(q.float()), torch.zeros(q.shape[:3])
        maximum = torch.full(q.shape[:3], -torch.inf)
        for keys in parts(k, tile):
            scores = q.float() @ k[:, :, keys].float().mT * (scale * LOG2E)
            larger = torch.maximum(maximum, scores.amax(-1))
            weights = torch.exp2(scores - larger[..., None])
            rescale = torch.exp2(maximum - larger)
            total = rounded(total * rescale + weights.sum(-1), kept.get("total"))
            product = weights.to(v.dtype).float() @ v[:, :, keys].float()
            out = rounded(out * rescale[..., None] + product, kept.get("out"))
            maximum = larger
        out = (out / total[..., None]).to(q.dtype)
        ctx.save_for_backward(q, k, v, out, maximum * LN2 + torch.log(total))
        ctx.options = scale, tile, kept
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        scale, tile, kept = ctx.options
        dq, dk, dv = (torch.zeros(each.shape) for each in (q, k, v))
        delta = (dout.float() * out.float()).sum(-1)
        for keys in parts(k, tile):
            for rows in parts(q, tile):
                mine = q[:, :, rows].float()
                scores = mine @ k[:, :, keys].float().mT * scale
                weights = torch.exp(scores - lse[:, :, rows, None])
                dp = dout[:, :, rows].float() @ v[:, :, keys].float().mT
                ds = (weights * (dp - delta[:, :, rows, None])).to(q.dtype).float()
                dv_here = weights.to(v.dtype).float().mT @ dout[:, :, rows].float()
                dv[:, :, keys] = rounded(dv[:, :, keys] + dv_here, kept.get("dv"))
                dk[:, :, keys] = rounded(dk[:, :, keys] + ds.mT @ mine * scale, kept.get("dk"))
                dq_here = ds @ k[:, :, keys].float() * scale
                dq[:, :, rows] = rounded(dq[:, :, rows] + dq_here, kept.get("dq"))
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


def parts(tensor, tile):
    return [slice(start, start + tile) for start in range(0, tensor.shape[2], tile)]


def rounded(sums, dtype):
    return sums if dtype is None else sums.to(dtype).float()


def tiled_kernel(tile=64, **kept):
    """``F.scaled_dot_product_attention`` of full masks, with its sums ``kept`` in these formats."""

    def attention(query, key, value, *, scale=None):
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        return Tiled.apply(query, key, value, scale, tile, kept)

    return make_subject(attention, "tiled_kernel", "sdpa")


def failures(subject, questions):
    """Names of the questions that ``subject`` fails; it must pass some of them."""
    records = {
        name: run_case(subject, case, device="cpu", brief=True) for name, case in questions.items()
    }
    assert any(record.status == "pass" for record in records.values())
    return [name for name, record in records.items() if record.status == "fail"]


def check_questions(dtype="bf16"):
    return {one.name: one.case for one in check_cases(dtype)}


def gate_questions(tag, dtype="bf16"):
    fields = {name: {"heads": 1} | entry.fields for name, entry in tagged(tag).items()}
    return {name: Case(problem=Problem(dtype=dtype, **each)) for name, each in fields.items()}


@pytest.mark.parametrize("tile", [64, 128])
def test_long_sum_is_the_only_check_question_that_detects_fp16_row_sums(tile):
    assert failures(tiled_kernel(tile, total=torch.float16), check_questions()) == ["long-sum"]


@pytest.mark.parametrize("tile", [16, 64, 256])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["out", "total"])
def test_long_sum_detects_16_bit_sums_at_any_usual_tile_size(name, dtype, tile):
    long = {"long-sum": check_questions(dtype)["long-sum"]}
    for kept in (torch.bfloat16, torch.float16):
        subject = tiled_kernel(tile, **{name: kept})
        assert run_case(subject, long["long-sum"], device="cpu", brief=True).status == "fail"
    assert failures(tiled_kernel(tile), long) == []


@pytest.mark.parametrize(
    ("kept", "failing"),
    [
        ({"dq": torch.bfloat16}, ["long sum of dQ"]),
        ({"dk": torch.bfloat16}, ["long sums of dK and dV"]),
        ({"dv": torch.bfloat16}, ["long sums of dK and dV"]),
        ({}, []),
    ],
    ids=str,
)
@pytest.mark.parametrize("tile", [32, 128])
def test_contract_detects_gradients_summed_in_bf16(kept, failing, tile):
    subject = tiled_kernel(tile, **kept)
    backward = {n: case for n, case in gate_questions(CONTRACT).items() if case.problem.backward}
    assert failures(subject, backward | gate_questions(LONG)) == failing


@pytest.mark.parametrize(
    ("tile", "kept", "question"),
    [
        (512, {"out": torch.float16}, "long-sum"),
        (512, {"total": torch.float16}, "long-sum"),
        (256, {"dq": torch.bfloat16}, "long sum of dQ"),
        (512, {"dq": torch.bfloat16}, "long sum of dQ"),
    ],
    ids=str,
)
def test_faults_that_few_large_tiles_hide_in_bf16_fail_in_fp16(tile, kept, question):
    """Few tiles (or splits) mean few roundings of the sum: hence a gate asks for long sums in every
    16-bit dtype."""
    questions = {question: gate_questions(LONG, "fp16")[question]}
    questions |= {"short": Case(problem=Problem(query=16, kv=16, dtype="fp16", backward=True))}
    assert failures(tiled_kernel(tile, **kept), questions) == [question]
    assert failures(tiled_kernel(tile, **kept), gate_questions(LONG)) == []


BITS = 13  # kept by a tensor core, after the leading bit of the largest product of a step


def aligned_sum(terms, dim):
    """The sum of ``terms`` truncated to the last kept bit of the largest one."""
    largest = terms.abs().amax(dim, keepdim=True)
    unit = torch.ldexp(torch.ones_like(largest), torch.frexp(largest)[1] - 1 - BITS)
    return (torch.trunc(terms / unit) * unit).sum(dim)


class Imprecise(Ideal):
    """Sums fp8 products as Hopper does, 32 at a time, in the ``affected`` matrix products."""

    affected = ("scores", "values")

    def product(self, rows, columns):
        which = "scores" if columns.shape[-1] == self._tiling.block_kv else "values"
        if which not in self.affected:
            return super().product(rows, columns)
        total = torch.zeros(*rows.shape[:-1], columns.shape[-1])
        for inner in parts(columns[None], 32):
            terms = rows[..., inner, None] * columns[..., None, inner, :]
            total = aligned_sum(torch.cat((terms, total[..., None, :]), -2), -2)
        return total


@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
@pytest.mark.parametrize("affected", ["scores", "values"])
def test_13_bit_fp8_accumulator_fails_lse_but_is_within_bounds_for_values(dtype, affected):
    """In P·V alone it loses less than P itself loses in fp8, which is no fault."""
    subject = Imprecise(Tiling(block_query=16, block_kv=32))
    case = Case(
        problem=Problem(query=16, kv=512, head_dim=128, dtype=dtype, distribution="uniform")
    )
    assert run_case(Ideal(), case, device="cpu").status == "pass"
    subject.affected = (affected,)
    record = run_case(subject, case, device="cpu")
    if affected == "scores":
        assert (record.status, record.judgement.worst.tensor) == ("fail", "lse")
    else:
        worst = record.judgement.worst
        assert abs(worst.got - worst.exact) < worst.allowance


@pytest.mark.parametrize(("dtype", "tile"), [("e4m3", 128), ("e5m2", 32)])
def test_longer_sum_detects_bf16_sums_of_fp8_products(dtype, tile):
    case = gate_questions(FP8, dtype)["longer sum"]
    for steps, status in (
        (Steps(), "pass"),
        (Steps(kept_out=round_to_format("bf16")), "fail"),
        (Steps(kept_sum=round_to_format("bf16")), "fail"),
    ):
        subject = Ideal(Tiling(block_query=64, block_kv=tile))
        subject.steps = steps
        assert run_case(subject, case, device="cpu", brief=True).status == status


# The order in which MKL sums depends on the processor. Equal terms summed one by one, as with
# AVX-512, all round the same way, which reaches 1.0002 of the probabilistic bound: a warning. This
# setting gives the same order everywhere, but must be set before the process starts.
_ORDER = {"MKL_CBWR": "COMPATIBLE"}


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "e4m3"])
@pytest.mark.parametrize("kernel", ["ideal", "sdpa-flash", "sdpa-math", "flex"])
def test_correct_kernels_pass_long_sums(kernel, dtype, request):
    if (kernel, dtype) == ("sdpa-math", "fp32") and _ORDER.items() - os.environ.items():
        arguments = (request.node.nodeid, "-m", "slow or not slow", "-n", "0", "-q")
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *arguments],
            capture_output=True,
            text=True,
            cwd=request.config.rootpath,
            env=os.environ | _ORDER,
        )
        assert done.returncode == 0, done.stdout
        assert "1 passed" in done.stdout
        return
    for case in gate_questions(LONG, "bf16").values():
        if dtype == "e4m3" and case.problem.backward:
            continue
        converted = Case(problem=case.problem.replace(dtype=dtype))
        record = run_case(load_subject(kernel), converted, device="cpu", brief=True)
        assert record.status in {"pass", "unsupported"}, record.judgement


@pytest.mark.parametrize(
    "tiling", [{"lazy_rescale": 4.0}, {"reverse": True}, {"block_kv": 16}], ids=str
)
def test_long_sums_pass_with_other_orders_and_lazy_rescaling(tiling):
    subject = Ideal(Tiling(**({"block_query": 64, "block_kv": 64} | tiling)))
    assert failures(subject, gate_questions(LONG)) == []


def test_long_sum_passes_kernel_that_flushes_small_rescale_factors():
    """Where it matters, running sums are never rescaled by less than 2^-14, the smallest normal
    number of fp16."""

    class Flushing(Ideal):
        def rescaled(self, running, alpha):
            return running * torch.where(alpha < 2.0**-14, 0.0, alpha)

    assert failures(Flushing(), {"long-sum": check_questions()["long-sum"]}) == []


class ShortWeights(Ideal):
    """Rounds its weights to fp16 before summing them and before rounding them to bf16."""

    def exp2(self, exponent):
        return super().exp2(exponent).half().float()


class ShortSums(Ideal):
    """Rounds its running output to bf16 after every tile."""

    steps = Steps(kept_out=lambda out: out.bfloat16().float())


ORDERS = {
    "both": Ideal(reverse_sums=True, scale_first=True),
    "sums": Ideal(reverse_sums=True),
    "scale": Ideal(scale_first=True),
}


def large_scores(**options):
    sizes = {"heads": 2, "query": 64, "kv": 64, "head_dim": 64, "scale": 5.0, "dtype": "bf16"}
    return Case(problem=Problem(**(sizes | options), distribution="large_logits"))


@pytest.mark.parametrize(
    "options",
    [{}, {"dtype": "fp16"}, {"dtype": "e4m3"}, {"sink": True, "scale": 3.0}, {"scale": -5.0}],
    ids=str,
)
def test_order_of_operations_is_no_finding_at_large_scores(options):
    """A weight is off by 2^-24 times its score, which exceeds the rounding of its format there: the
    residual exceeds its gate, but is explained by the order of operations."""
    judgements = [
        run_case(kernel, large_scores(**options, seed=seed), device="cpu").judgement
        for kernel in ORDERS.values()
        for seed in range(8)
    ]
    findings = [text for each in judgements for text in (each.reason, *each.warnings)]
    assert [text for text in findings if "rounds elsewhere" in text] == []
    gate = residual_gate(options.get("dtype", "bf16"), 64)
    assert max(each.precision.residual for each in judgements) > 1.5 * gate


def test_bf16_output_sums_warn_at_large_scores():
    for seed in range(4):
        kernel = ShortSums(reverse_sums=True, scale_first=True)
        wrong = run_case(kernel, large_scores(seed=seed), device="cpu").judgement
        assert wrong.status == "warn"
        assert "rounds elsewhere than declared" in "".join((wrong.reason, *wrong.warnings))


def test_timed_kernel_is_judged_by_its_own_outputs():
    record = run_case(ORDERS["both"], large_scores(), device="cpu", timed=True)
    assert record.judgement.precision.residual > residual_gate("bf16", 64)


@pytest.mark.parametrize("keys", [4096, 16384])
def test_residual_gate_separates_orders_from_faults_in_long_sums(keys):
    case = Case(problem=Problem(heads=1, query=128, kv=keys, head_dim=64, dtype="bf16"))
    right, wrong = (run_case(each, case, device="cpu") for each in (ORDERS["sums"], ShortWeights()))
    assert (right.status, wrong.status) == ("pass", "fail")
    gate = residual_gate("bf16", keys)
    assert right.judgement.precision.residual < gate
    assert wrong.judgement.precision.residual > 3 * gate

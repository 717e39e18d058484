"""Relations about linearity in V, scaling of q, shifts of scores, and padding with zero columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from attncheck.core.formats import FORMATS, Format, round_to
from attncheck.core.mod_spec import NONE, Spec
from attncheck.core.outputs import Outputs
from attncheck.inputs.input_tensors import Descale, Inputs, round_inputs
from attncheck.inputs.problem import LARGEST_HEAD_DIM, Allowed, Parameters, Problem
from attncheck.relations.mask_visibility import rows_without_keys
from attncheck.relations.relation import (
    Finding,
    Relation,
    Results,
    change_tensors,
    compare_ends,
    compare_outputs,
    compare_within,
    of_attention,
    of_softmax,
    replace_where,
    without_sink,
)

# ------------------------------------------------------------------ V times a power of two

_POWERS_FP8 = (-1, -4)
_POWERS_FP16 = (-1, 1, -8, 8)
_POWERS = (-1, 1, -24, 24)
_LARGEST_EXPONENT_OF_V = 4  # 2^-4 ≤ |V| ≤ 2^4
_DESCALE_EXPONENT = 20  # V's descale lies within 2^±20.
_LARGEST_SCORE = 24.0
_NEVER_ENLARGING = {"none", "softcap", "chain"}  # Score mods that make no score larger.


def _unless_scores_stay_small(problem: Problem) -> str | None:
    if all(part.name in _NEVER_ENLARGING for part in problem.score.walk()):
        return None
    return "its score mod may make scores so far apart that weights are subnormal"


def _powers(problem: Problem) -> Allowed:
    storage = problem.formats.storage
    if storage.saturates:
        return {"power": _POWERS_FP8}
    return {"power": _POWERS_FP16 if storage.name == "fp16" else _POWERS}


def _scale_values(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    fmt = inputs.problem.formats.storage
    v = _make_columns_one_sign(inputs.v.double(), fmt)
    scaled = v * 2.0 ** int(parameters["power"])
    sink = inputs.sink
    if sink is not None:
        # At most the largest score; in fp16 at most the smallest, so keys keep half of the weight.
        top = -_LARGEST_SCORE if fmt.name == "fp16" else _LARGEST_SCORE
        sink = sink.clamp(-_LARGEST_SCORE, top)
    first = inputs.replace(q=_shrink_query(inputs), v=v.to(fmt.torch_dtype), sink=sink)
    if first.descale is not None:
        ends = (2.0**-_DESCALE_EXPONENT, 2.0**_DESCALE_EXPONENT)
        first = first.replace(descale=replace(first.descale, v=first.descale.v.clamp(*ends)))
    return first, first.replace(v=scaled.to(fmt.torch_dtype))


def _make_columns_one_sign(v: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return ``v`` with the sign of each column's first key throughout, and |v| clamped."""
    if fmt.saturates:
        low, high = 2.0 ** (fmt.min_exponent - min(_POWERS_FP8)), fmt.max
    else:
        low, high = 2.0**-_LARGEST_EXPONENT_OF_V, 2.0**_LARGEST_EXPONENT_OF_V
    return torch.where(v[:, :, :1] < 0, -1.0, 1.0) * v.abs().clamp(low, high)


def _shrink_query(inputs: Inputs) -> torch.Tensor:
    """Return q divided per head by a power of two so that no |score| exceeds ``_LARGEST_SCORE``."""
    q, k, _ = inputs.promoted()
    q_norm, k_norm = (x.square().sum(-1).amax(-1).sqrt() for x in (q, k))
    norms = q_norm * k_norm.repeat_interleave(inputs.problem.group, dim=1)
    _, exponent = torch.frexp(inputs.problem.scale * norms / _LARGEST_SCORE)
    factor = torch.pow(2.0, -exponent.clamp(min=0).double())[..., None, None]
    fmt = inputs.problem.formats.storage
    return round_to(inputs.q.double() * factor, fmt).to(fmt.torch_dtype)


def _compare_scaled(results: Results) -> Finding | None:
    factor = 2.0 ** results.number("power")

    def scale(run: Outputs) -> Outputs:
        return Outputs((run.out.double() * factor).to(run.out.dtype), run.lse)

    return compare_ends(results, first=scale)


VALUES_SCALED = Relation(
    name="values_scaled",
    summary="V times 2^`power` gives out times 2^`power` and the same LSE",
    runs=_scale_values,
    rule=_compare_scaled,
    unfit=of_attention(_unless_scores_stay_small),
    allowed=_powers,
)
"""Bit for bit in every kernel that gives the same bits twice, whatever its order and accumulator.

V enters only products, sums and roundings. A power of two commutes with all of them as long as no
intermediate result is subnormal or overflows; P, row sums and LSE do not depend on V. The runs are
chosen accordingly:

* A column of V has one sign and 2^-4 ≤ |V| ≤ 2^4 (in fp8: |V| / 2^4 is still normal), so that
  nothing cancels: a nonzero sum is no smaller than the part of a single key.
* q is so small that |score| ≤ 24 (Cauchy–Schwarz on the longest rows of q and k): a weight,
  relative to any maximum before or after it, is at least e^-48 > 2^-70. A key's part of O, divided
  by the row sum or not, is thus at least 2^(-70 − 4 − 24) / kv, normal in fp32 for kv < 2^28.
* Out is a mean of V: at least 2^(-4 − 8) in fp16, where 2^-14 is normal, and below 2^13. A sink is
  24 at most, like any score, and in fp16 −24, so that out is half of the mean at least.
* In fp8 V's descale lies within 2^±20; out is bf16.

A P that rounds to 0 does so in both runs.
"""

# ------------------------------------------------------------------ V as a sum

_LONGEST_RUN = 10  # 2^10 keys


def _run_lengths(problem: Problem) -> Allowed:
    powers = (2**n for n in range(_LONGEST_RUN + 1))
    return {"run": [run for run in powers if run == 1 or run < problem.kv]}


def _split_values(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    run = int(parameters["run"])
    odd = (torch.arange(inputs.problem.kv, device=inputs.device) // run % 2 == 1)[:, None]
    zero = torch.zeros_like(inputs.v)
    parts = (inputs.replace(v=replace_where(inputs.v, zero, keys)) for keys in (odd, ~odd))
    return (*parts, inputs)


def _compare_sum(results: Results) -> Finding | None:
    one, other, both = results.outputs
    errors = results.bounds()
    out = one.out.double() + other.out.double()
    allowed = torch.stack([each.out for each in errors]).sum(0)
    # LSE does not depend on V, so the first run's must equal the last one's.
    return compare_within("out", both.out, out, allowed) or compare_outputs(
        Outputs(both.out, both.lse), Outputs(both.out, one.lse), [errors[0], errors[2]]
    )


VALUES_ADDED = Relation(
    name="values_added",
    summary="V = 0 in every second `run` of keys, and V = 0 in the others: the two outs add up to "
    "that of V",
    runs=_split_values,
    rule=_compare_sum,
    promise="bounds",
    unfit=of_attention(),
    allowed=_run_lengths,
)
"""Holds for the exact results, since V is a sum of two terms and the weights do not depend on V.
Each run's out is within its own bound e of the exact one: |both − (one + other)| ≤ e₁ + e₂ + e₃, by
the triangle inequality; |LSE₃ − LSE₁| ≤ e₁ + e₃."""

# ------------------------------------------------------------------ q times a power of two

# Exponents of two, even for kernels that multiply both q and k by the square root of the scale.
_FIRST_EXPONENT = 2
_EXPONENTS = (4, 6, 10)
_LEAST_SCALE_WITH_SINK = 2.0**-60  # Kernels divide the sink by the scale.


def _exponents(problem: Problem) -> Allowed:
    smallest = 2.0 ** FORMATS["fp32"].min_exponent
    return {"exponent": [n for n in _EXPONENTS if abs(problem.scale) >= smallest * 2.0**n]}


def _unless_scale_is_ordinary(problem: Problem) -> str | None:
    if problem.formats.scaled:
        return "fp8's stored q is as large as can be"
    least = _LEAST_SCALE_WITH_SINK
    if problem.sink and not least <= abs(problem.scale) <= 1 / least:
        return f"its sink divided by scale={problem.scale:g} may be no normal number"
    return None if _exponents(problem)["exponent"] else "its scale is a subnormal number, or nearly"


def _scale_query(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    problem, factors = inputs.problem, (2.0**_FIRST_EXPONENT, 2.0 ** parameters["exponent"])
    q, k = (_zero_extremes(tensor, problem, factors[1]) for tensor in (inputs.q, inputs.k))
    return tuple(
        inputs.replace(problem=problem.replace(scale=problem.scale / factor), q=q * factor, k=k)
        for factor in factors
    )


def _zero_extremes(tensor: torch.Tensor, problem: Problem, factor: float) -> torch.Tensor:
    """Zero the elements that could become subnormal or infinite in a score; see SCALED_QUERY."""
    fmt, root = problem.formats.storage, math.sqrt(abs(problem.scale))
    lowest = max(2.0**fmt.min_exponent, 2.0 ** (fmt.significand - 64))
    highest = min(fmt.max, 2.0**59)
    size = tensor.double().abs()
    ordinary = size >= lowest * math.sqrt(factor) / min(1.0, root)
    ordinary &= size <= highest / (factor * max(1.0, root))
    return torch.where(ordinary, tensor, 0.0)


SCALED_QUERY = Relation(
    name="scaled_query",
    summary="q · 2^`exponent` with scale / 2^`exponent` keeps every bit of q · 4 with scale / 4",
    runs=_scale_query,
    unfit=of_attention(_unless_scale_is_ordinary),
    allowed=_exponents,
)
"""Holds for every right kernel: rounding commutes with powers of two where no number is subnormal
or overflows, so that each sum of products is 2^n times what it was, whatever its order, and its
product with the scale, or with scale · log2 e, is the same number. So is q times the scale. Neither
run has the Problem's own scale: callers leave out a scale of 1/√head_dim by convention, and the one
that the kernel computes itself may be rounded otherwise.

Elements of q and k for which this might fail are 0 in both runs. The others are normal numbers in
both runs, also when multiplied by √scale (torch's unfused formula does that to q and k, and √2^n is
a power of two for even n). With p significant bits they are multiples of 2^-63, as none is below
2^(p − 64): a nonzero sum of products is at least 2^-126, a normal number of fp32. None exceeds
2^59: a sum of 256 products stays below 2^127."""

# ------------------------------------------------------------------ columns of zeros

# 1 makes an even dim odd; from 8 on the columns are multiples of 16 bytes in a 16-bit dtype.
_COLUMNS = (1, 8, 16, 32, 64, 128)


def _columns(dim: int) -> Allowed:
    return {"columns": [n for n in _COLUMNS if dim + n <= LARGEST_HEAD_DIM]}


def _pad(tensor: torch.Tensor, columns: int) -> torch.Tensor:
    """Append zeros: ``(…, dim)`` → ``(…, dim + columns)``. torch's pad does not support fp8."""
    dim = tensor.shape[-1]
    wider = tensor.new_zeros((*tensor.shape[:-1], dim + columns))
    wider[..., :dim] = tensor
    return wider


def _pad_query_and_keys(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    columns = int(parameters["columns"])
    wider = inputs.problem.replace(head_dim=inputs.problem.head_dim + columns)
    padded = change_tensors(inputs, lambda tensor: _pad(tensor, columns), "q", "k")
    return inputs, inputs.replace(problem=wider, **padded)


PAD_HEAD_DIM = Relation(
    name="pad_head_dim",
    summary="`columns` columns of zeros more in q and k, at the same scale, change nothing",
    runs=_pad_query_and_keys,
    promise="bounds",
    unfit=of_attention(
        lambda p: None if _columns(p.head_dim)["columns"] else "its head_dim is the largest"
    ),
    allowed=lambda problem: _columns(problem.head_dim),
)
"""Holds for every right kernel: a product with 0 is 0. The scale is not adapted to the wider
head_dim. Compared within bounds, because a wider tile adds in another order."""


def _pad_values(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    columns = int(parameters["columns"])
    wider = inputs.problem.replace(value_dim=inputs.problem.value_dim + columns)
    return inputs, inputs.replace(problem=wider, v=_pad(inputs.v, columns))


def _compare_padded(results: Results) -> Finding | None:
    columns, errors = results.number("columns"), results.bounds()
    before, wider = results.outputs
    unpadded = (errors[0].out, errors[1].out[..., :-columns])
    # The padded columns have an error bound of 0.
    exact = [Outputs(_pad(out, columns), e.lse) for out, e in zip(unpadded, errors, strict=True)]
    return compare_outputs(wider, Outputs(_pad(before.out, columns), before.lse), exact)


PAD_VALUE_DIM = Relation(
    name="pad_value_dim",
    summary="`columns` columns of zeros more in V give exactly 0, and leave the others as they are",
    runs=_pad_values,
    rule=_compare_padded,
    promise="bounds",
    unfit=of_attention(
        lambda p: None if _columns(p.value_dim)["columns"] else "its value_dim is the largest"
    ),
    allowed=lambda problem: _columns(problem.value_dim),
)
"""Holds for every right kernel: each column of out depends on that column of V alone, and weights
are finite, so that the sum of weights times 0 is 0, of either sign. The other columns are compared
within bounds: a kernel may go through the keys in another order if its tiles are wider."""

# ------------------------------------------------------------------ a vector added to every key

_KEY_NATS = (1, -1, 30, -30, 100, -100, 400, -400)
_LARGEST_EXPONENT = 60  # |q| and |k| are at most 2^60, so that no product overflows fp32.


def _factors(problem: Problem, nats: int) -> tuple[float, float]:
    """Return (x, y) with scale · x · y near ``nats``: x is a power of two, y has three bits."""
    significand, exponent = math.frexp(abs(nats) / problem.scale)
    half = exponent // 2
    # Rounded down to eighths: one of 0.5, 0.625, 0.75 and 0.875.
    y = math.ldexp(math.floor(8 * significand) / 8, exponent - half)
    return math.ldexp(1.0, half), math.copysign(y, nats)


def _key_shifts(problem: Problem) -> Allowed:
    """Return the shifts whose factors fit the storage format; fp8 reaches them by its descale."""
    fmt, least, most = problem.formats.storage, -_LARGEST_EXPONENT, _LARGEST_EXPONENT
    if not fmt.saturates:
        least = max(least, fmt.min_exponent + fmt.significand)
        most = min(most, math.floor(math.log2(fmt.max)))

    def fits(nats: int) -> bool:
        return all(2.0**least <= abs(x) <= 2.0**most for x in _factors(problem, nats))

    return {"nats": [nats for nats in _KEY_NATS if fits(nats)]}


def _unless_shift_fits(problem: Problem) -> str | None:
    if problem.score != NONE:
        return "its score mod may make something else of a shifted score"
    if not _key_shifts(problem)["nats"]:
        return f"scale={problem.scale:g} asks for q and k beyond {problem.formats.storage.name}"
    return None


def _shift_keys(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    """Return two runs with x in one column of each head's q; that column of K holds 0, then y."""
    problem = inputs.problem
    x, y = _factors(problem, int(parameters["nats"]))
    # Bool (batch, kv_heads, 1, head_dim): one column, another one than the neighbouring heads'.
    pair = torch.arange(problem.batch)[:, None] + torch.arange(problem.kv_heads)
    own_column = pair[..., None] % problem.head_dim == torch.arange(problem.head_dim)
    own_column = own_column[:, :, None].to(inputs.device)
    q, k, v = inputs.promoted()
    q = torch.where(own_column.repeat_interleave(problem.group, dim=1), x, q)
    forward = problem.replace(backward=False, dlse=False, dcaptured=False)
    exact = Inputs(problem=forward.replace(dtype="fp64"), q=q, k=torch.where(own_column, y, k), v=v)
    shifted = _round_exact_inputs(exact, forward)
    after = inputs.replace(q=shifted.q, k=shifted.k, v=shifted.v, descale=shifted.descale)
    k = replace_where(after.k, torch.zeros_like(after.k), own_column)
    return after.replace(k=k), after


def _round_exact_inputs(exact: Inputs, problem: Problem) -> Inputs:
    """Round once; in fp8 with powers of two as descales, so the shift is exact in float64."""
    rounded = round_inputs(exact, problem)
    if rounded.descale is None:
        return rounded
    fmt, stored, scales = problem.formats.storage, {}, {}
    for name, values in exact.tensors().items():
        _, exponent = torch.frexp(getattr(rounded.descale, name))
        scales[name] = torch.pow(2.0, exponent.float())
        each = scales[name].repeat_interleave(values.shape[1] // problem.kv_heads, dim=1)
        stored[name] = round_to(values / each.double()[..., None, None], fmt).to(fmt.torch_dtype)
    return Inputs(problem=problem, **stored, descale=Descale(**scales))


def _added_vector(runs: Sequence[Inputs]) -> torch.Tensor:
    """Return scale · c for each head's keys, float64 ``(batch, heads, 1, head_dim)``."""
    before, after = (each.promoted()[1] for each in runs)
    c = (after - before)[:, :, :1].repeat_interleave(runs[0].problem.group, dim=1)
    return c * runs[0].problem.scale


def _compare_key_shift(results: Results) -> Finding | None:
    (before, after), runs = results.outputs, results.inputs
    added, lse, dq = _added_vector(runs), before.lse, before.dq
    if lse is not None:  # c is nonzero in one column only, so that q · c is exact
        lse = lse.double() + (runs[1].promoted()[0] * added).sum(-1)
    if dq is not None:  # the gradients of a row's scores sum to the gradient of its LSE
        _, dlse = runs[0].loss()
        alive = ~rows_without_keys(runs[0].problem).to(dlse.device)
        dq = dq.double() + (dlse * alive)[..., None] * added
    return compare_outputs(after, replace(before, lse=lse, dq=dq), results.errors)


KEY_SHIFT = Relation(
    name="key_shift",
    summary="a vector c added to every key of a key head, which moves all logits by about `nats`: "
    "out stays, LSE moves by scale · q · c, and gradients stay but for the loss's part of LSE",
    runs=_shift_keys,
    rule=_compare_key_shift,
    promise="bounds",
    unfit=of_attention(without_sink, _unless_shift_fits, gradients=True),
    allowed=_key_shifts,
)
"""Holds for the exact results: softmax(s + t) = softmax(s) for one number t per row, and
log Σ exp(s + t) = t + log Σ exp(s). Gradients stay too: those of a row's scores sum to 0, or to the
gradient of its LSE where the loss depends on LSE; dq then moves by scale · c times that. K + c is
exact in every format: c is nonzero only in a column where K is 0, and has three bits. q holds a
power of two there, and the scale has 24 bits, so t is exact in float64. Each run is within its own
bound: |second − first| ≤ the sum of both."""

# ------------------------------------------------------------------ a number added to every score

_LOGIT_NATS = (0, 1, -1, 40, -40, 400, -400)
_SCORE_NATS = (1, -1, 30, -30, 400, -400)


def _shift_mod(problem: Problem, nats: int) -> Spec:
    """Return a score mod that adds one number per head.

    ``nats`` 0 stands for the library's bias, for kernels that do not support expressions.
    """
    if nats == 0:
        return Spec.of("relative_bias", distance=0, seed=problem.seed)
    return Spec.of("expression", text=f"score + (h {'-' if nats < 0 else '+'} {abs(nats)})")


def _shift_logits(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    problem = inputs.problem
    added = _shift_mod(problem, int(parameters["nats"]))
    score = added if problem.score == NONE else Spec.of("chain", problem.score, added)
    return inputs, inputs.replace(problem=problem.replace(score=score))


def _compare_logit_shift(results: Results) -> Finding | None:
    (before, after), problem = results.outputs, results.inputs[0].problem
    lse = before.lse
    if lse is not None:
        shift_mod = problem.replace(score=_shift_mod(problem, results.number("nats"))).score_mod()
        head = torch.arange(problem.heads)[:, None]
        zero = torch.zeros_like(head)
        # The shift of a score of 0, float64 (heads, 1).
        shift = shift_mod(zero.double(), zero, head, zero, zero)
        lse = lse.double() + shift.to(lse.device)
    return compare_outputs(after, Outputs(before.out, lse), results.errors)


LOGIT_SHIFT = Relation(
    name="logit_shift",
    summary="a score mod that adds one number to every logit of a head, `nats` + h, leaves out and "
    "moves LSE by it",
    runs=_shift_logits,
    rule=_compare_logit_shift,
    promise="bounds",
    unfit=of_attention(without_sink),
    allowed=lambda _: {"nats": _LOGIT_NATS},
)
"""Holds for the exact results after any score mod of the Problem: softmax(s + t) = softmax(s), and
log Σ exp(s + t) = t + log Σ exp(s). t is an fp32 number: an integer or an entry of the bias table.
Each run is within its own bound, the second one's with the score mod's roundings in it:
|second − first| ≤ the sum of both."""


def _shift_scores(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    """Return two runs, whose scores and shift are multiples of one unit so that sums are exact."""
    nats, fmt = int(parameters["nats"]), inputs.problem.formats.storage
    x = inputs.scores().clamp(-fmt.max / 4, fmt.max / 4)
    _, exponent = torch.frexp(x.abs().amax() + abs(nats))
    # A sum is below 2^exponent, and rounding to units adds at most one unit.
    unit = 2.0 ** (int(exponent) + 1 - fmt.significand)
    shift = math.copysign(max(1, round(abs(nats) / unit)) * unit, nats)
    x = torch.round(x / unit) * unit
    before, after = (inputs.replace(x=each.to(fmt.torch_dtype)) for each in (x, x + shift))
    return before, after


def _compare_score_shift(results: Results) -> Finding | None:
    (before, after), runs = results.outputs, results.inputs
    lse = before.lse
    if lse is not None:
        lse = lse.double() + (runs[1].scores() - runs[0].scores())[..., 0]
    return compare_outputs(after, Outputs(before.out, lse), results.errors)


SOFTMAX_SHIFT = Relation(
    name="softmax_shift",
    summary="about `nats` added to every score leaves out, and moves LSE by exactly as much",
    runs=_shift_scores,
    rule=_compare_score_shift,
    promise="bounds",
    unfit=of_softmax(),
    allowed=lambda _: {"nats": _SCORE_NATS},
)
"""Holds for the exact results: softmax(x + c) = softmax(x) and log Σ exp(x + c) = c + log Σ exp(x).
The sums x + c are exact: x is rounded to a coarse grid first, and c is on it. Each run is within
its own bound: |second − first| ≤ the sum of both."""

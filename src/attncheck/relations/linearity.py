"""Relations about linearity, scaling and shifts: V, the scale, scores, columns of zeros."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from attncheck.core.formats import FORMATS, round_to
from attncheck.core.outputs import Outputs
from attncheck.inputs import input_tensors as inputs_room
from attncheck.inputs.input_tensors import Descale, Inputs
from attncheck.inputs.problem import LARGEST_HEAD_DIM, Parameters
from attncheck.mods import library
from attncheck.mods.spec import Spec
from attncheck.relations import mask_visibility
from attncheck.relations.relation import (
    Errors,
    Relation,
    compare_outputs,
    compare_tensors,
    of_attention,
    of_softmax,
    replace_where,
    without_sink,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from attncheck.core.formats import Format
    from attncheck.inputs.problem import Allowed, Problem
    from attncheck.relations.relation import Finding

__all__ = [
    "COLUMNS",
    "KEY_SHIFT",
    "LOGIT_SHIFT",
    "PAD_HEAD_DIM",
    "PAD_VALUE_DIM",
    "SCALED_QUERY",
    "SOFTMAX_SHIFT",
    "VALUES_ADDED",
    "VALUES_SCALED",
    "with_zero_columns",
]


_POWERS_FP8 = (-1, -4)
_POWERS_FP16 = (-1, 1, -8, 8)
_POWERS = (-1, 1, -24, 24)
_LARGEST_EXPONENT = 4  # of |V|, and of 1/|V|
_DESCALE_EXPONENT = 20  # of V's descale, either way
_LARGEST_SCORE = 24.0

# Score mods that make no score larger.
_NO_LARGER = {"none", "softcap", "chain"}


def _unfit(problem: Problem) -> str | None:
    if all(part.name in _NO_LARGER for part in problem.score.walk()):
        return None
    return "its score mod may make scores so far apart that weights are subnormal"


def _allowed(problem: Problem) -> Allowed:
    """Exponents."""
    storage = problem.formats.storage
    if storage.saturates:
        return {"power": _POWERS_FP8}
    return {"power": _POWERS_FP16 if storage.name == "fp16" else _POWERS}


def _runs(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    fmt = inputs.problem.formats.storage
    v = _of_one_sign(inputs.v.double(), fmt)
    scaled = v * 2.0 ** int(parameters["power"])
    sink = _smaller_sink(inputs)
    first = inputs.replace(q=_smaller_q(inputs), v=v.to(fmt.torch_dtype), sink=sink)
    if first.descale is not None:
        ends = (2.0**-_DESCALE_EXPONENT, 2.0**_DESCALE_EXPONENT)
        first = first.replace(descale=replace(first.descale, v=first.descale.v.clamp(*ends)))
    return first, first.replace(v=scaled.to(fmt.torch_dtype))


def _of_one_sign(v: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Each column of ``v`` with its first key's sign, and no value too small or too large."""
    if fmt.saturates:
        low, high = 2.0 ** (fmt.min_exponent - min(_POWERS_FP8)), fmt.max
    else:
        low, high = 2.0**-_LARGEST_EXPONENT, 2.0**_LARGEST_EXPONENT
    return torch.where(v[:, :, :1] < 0, -1.0, 1.0) * v.abs().clamp(low, high)


def _smaller_q(inputs: Inputs) -> torch.Tensor:
    """q, divided in each head by a power of two that keeps its scores within ``_LARGEST_SCORE``."""
    q, k, _ = inputs.promoted()
    q_norm, k_norm = (x.square().sum(-1).amax(-1).sqrt() for x in (q, k))
    norms = q_norm * k_norm.repeat_interleave(inputs.problem.group, dim=1)
    _, exponent = torch.frexp(inputs.problem.scale * norms / _LARGEST_SCORE)
    factor = torch.pow(2.0, -exponent.clamp(min=0).double())[..., None, None]
    fmt = inputs.problem.formats.storage
    return round_to(inputs.q.double() * factor, fmt).to(fmt.torch_dtype)


def _smaller_sink(inputs: Inputs) -> torch.Tensor | None:
    """No larger than a score, and in fp16 no larger than any: keys keep half of the weight."""
    if inputs.sink is None:
        return None
    fp16 = inputs.problem.formats.storage.name == "fp16"
    return inputs.sink.clamp(-_LARGEST_SCORE, -_LARGEST_SCORE if fp16 else _LARGEST_SCORE)


def _holds(
    _: Sequence[Inputs], outputs: Sequence[Outputs], parameters: Parameters, errors: Errors
) -> Finding | None:
    factor = 2.0 ** int(parameters["power"])
    before, after = outputs
    expected = Outputs((before.out.double() * factor).to(before.out.dtype), before.lse)
    if errors is None:
        return compare_outputs(after, expected, None)
    return compare_outputs(
        after, expected, [Outputs(errors[0].out * factor, errors[0].lse), errors[1]]
    )


VALUES_SCALED = Relation(
    name="values_scaled",
    summary="V times 2^`power` gives out times 2^`power` and the same LSE",
    runs=_runs,
    holds=_holds,
    unfit=of_attention(_unfit),
    allowed=_allowed,
)
"""Bit for bit in every kernel that gives the same bits twice, whatever its order and accumulator.

What V enters are products, sums and roundings, and a power of two passes through all of them where
no number that V is part of is subnormal or overflows; P, row sums and LSE do not know V. So the
runs are chosen:

* A column of V has one sign and 2^-4 ≤ |V| ≤ 2^4 (in fp8: no less than is normal still when divided
  by 2^4), so that nothing cancels: what is not 0 is no smaller than one key's part of it.
* q is so small that |score| ≤ 24 (Cauchy–Schwarz on the longest rows of q and k): a weight,
  relative to any maximum before or after it, is at least e^-48 > 2^-70. A key's part of O, divided
  by the row sum or not, is thus at least 2^(-70 − 4 − 24) / kv, normal in fp32 for kv < 2^28.
* Out is a mean of V: at least 2^(-4 − 8) in fp16, where 2^-14 is normal, and below 2^13. A sink is
  24 at most, like any score, and in fp16 −24, so that out is half of the mean at least.
* In fp8 V's descale lies within 2^±20; out is bf16.

A P that rounds to 0 does so in both runs.
"""


_LONGEST = 10  # 2^10 keys in a row


def _allowed_of_values_added(problem: Problem) -> Allowed:
    powers = (2**n for n in range(_LONGEST + 1))
    return {"run": [run for run in powers if run == 1 or run < problem.kv]}


def _runs_of_values_added(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    run = int(parameters["run"])
    odd = torch.arange(inputs.problem.kv, device=inputs.device) // run % 2 == 1

    def without(keys: torch.Tensor) -> Inputs:
        zero = torch.zeros_like(inputs.v)
        return inputs.replace(v=replace_where(inputs.v, zero, keys[:, None]))

    return without(odd), without(~odd), inputs


def _holds_of_values_added(
    _: Sequence[Inputs], outputs: Sequence[Outputs], __: Parameters, errors: Errors
) -> Finding | None:
    one, other, both = outputs
    assert errors is not None, "asked within bounds"
    out = one.out.double() + other.out.double()
    found = compare_tensors("out", both.out, out, torch.stack([each.out for each in errors]).sum(0))
    if found:
        return found
    # V is no part of LSE: the first run's is the last one's.
    return compare_outputs(
        Outputs(both.out, both.lse), Outputs(both.out, one.lse), [errors[0], errors[2]]
    )


VALUES_ADDED = Relation(
    name="values_added",
    summary="V = 0 in every second `run` of keys, and V = 0 in the others: the two outs add up to "
    "that of V",
    runs=_runs_of_values_added,
    holds=_holds_of_values_added,
    promise="bounds",
    unfit=of_attention(),
    allowed=_allowed_of_values_added,
)
"""Holds of the exact results, as V splits into two summands and the weights do not know it. Each
kernel's out is within its own bound e of them: |both − (one + other)| ≤ e₁ + e₂ + e₃, by the
triangle inequality; |LSE₃ − LSE₁| ≤ e₁ + e₃."""


# Even, for kernels that multiply q and k by the root of the scale each.
_FIRST = 2
_EXPONENTS = (4, 6, 10)
_FP32 = FORMATS["fp32"]
_LEAST_WITH_SINK = 2.0**-60  # of the scale, by which kernels divide a sink


def _exponents(problem: Problem) -> Mapping[str, Sequence[int]]:
    smallest = 2.0**_FP32.min_exponent
    return {"exponent": [n for n in _EXPONENTS if problem.scale >= smallest * 2.0**n]}


def _unfit_of_scaled_query(problem: Problem) -> str | None:
    if problem.formats.scaled:
        return "fp8's stored q is as large as can be"
    if problem.sink and not _LEAST_WITH_SINK <= problem.scale <= 1 / _LEAST_WITH_SINK:
        return f"its sink divided by scale={problem.scale:g} may be no normal number"
    return None if _exponents(problem)["exponent"] else "its scale is a subnormal number, or nearly"


def _runs_of_scaled_query(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    problem, factors = inputs.problem, (2.0**_FIRST, 2.0 ** parameters["exponent"])
    q, k = (_ordinary(tensor, problem, factors[1]) for tensor in (inputs.q, inputs.k))
    return tuple(
        inputs.replace(problem=problem.replace(scale=problem.scale / factor), q=q * factor, k=k)
        for factor in factors
    )


def _ordinary(tensor: torch.Tensor, problem: Problem, factor: float) -> torch.Tensor:
    """0 for what might become subnormal or infinite on the way to a score; see SCALED_QUERY."""
    fmt, root = problem.formats.storage, math.sqrt(problem.scale)
    lowest = max(2.0**fmt.min_exponent, 2.0 ** (fmt.significand - 64))
    highest = min(fmt.max, 2.0**59)
    size = tensor.double().abs()
    ordinary = size >= lowest * math.sqrt(factor) / min(1.0, root)
    ordinary &= size <= highest / (factor * max(1.0, root))
    return torch.where(ordinary, tensor, 0.0)


def _holds_of_scaled_query(
    _: Sequence[Inputs], outputs: Sequence[Outputs], __: Parameters, errors: Errors
) -> Finding | None:
    before, scaled = outputs
    return compare_outputs(scaled, before, errors)


SCALED_QUERY = Relation(
    name="scaled_query",
    summary="q · 2^`exponent` with scale / 2^`exponent` keeps every bit of q · 4 with scale / 4",
    runs=_runs_of_scaled_query,
    holds=_holds_of_scaled_query,
    unfit=of_attention(_unfit_of_scaled_query),
    allowed=_exponents,
)
"""Holds for every right kernel: rounding commutes with powers of two where no number is subnormal
or overflows, so that each sum of products is 2^n times what it was, whatever its order, and its
product with the scale, or with scale · log2 e, is the same number. As of q times the scale. Neither
run has the Problem's own scale: where that is 1/√head_dim, a convention leaves it out, and the
kernel's own may be rounded otherwise.

Elements of q and k for which this might not be so are 0 in both runs. Kept are those that are
normal numbers in both also when multiplied by √scale (torch's unfused formula does that to q and k,
and √2^n is a power of two for even n). With p significant bits they are multiples of 2^-63, as none
is below 2^(p − 64): a sum of products, when not 0, is at least 2^-126, a normal number of fp32. And
none passes 2^59: a sum of 256 products stays below 2^127."""


# 1 makes an odd dim of an even one; from 8 on they are 16 bytes of a 16-bit dtype.
COLUMNS = (1, 8, 16, 32, 64, 128)


def with_zero_columns(tensor: torch.Tensor, columns: int) -> torch.Tensor:
    """``(…, dim)`` → ``(…, dim + columns)``."""
    dim = tensor.shape[-1]
    wider = tensor.new_zeros((*tensor.shape[:-1], dim + columns))
    wider[..., :dim] = tensor
    return wider


def _allowed_of_pad_head_dim(problem: Problem) -> Mapping[str, Sequence[int]]:
    return {"columns": [n for n in COLUMNS if problem.head_dim + n <= LARGEST_HEAD_DIM]}


def _unfit_of_pad_head_dim(problem: Problem) -> str | None:
    return None if _allowed_of_pad_head_dim(problem)["columns"] else "its head_dim is the largest"


def _runs_of_pad_head_dim(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    columns = int(parameters["columns"])
    wider = inputs.problem.replace(head_dim=inputs.problem.head_dim + columns)
    q, k = (with_zero_columns(tensor, columns) for tensor in (inputs.q, inputs.k))
    return inputs, inputs.replace(problem=wider, q=q, k=k)


def _holds_of_pad_head_dim(
    _: Sequence[Inputs], outputs: Sequence[Outputs], __: Parameters, errors: Errors
) -> Finding | None:
    before, wider = outputs
    return compare_outputs(wider, before, errors)


PAD_HEAD_DIM = Relation(
    name="pad_head_dim",
    summary="`columns` columns of zeros more in q and k, at the same scale, change nothing",
    runs=_runs_of_pad_head_dim,
    holds=_holds_of_pad_head_dim,
    promise="bounds",
    unfit=of_attention(_unfit_of_pad_head_dim),
    allowed=_allowed_of_pad_head_dim,
)
"""Holds for every right kernel: a product with 0 is 0. The scale stays as it was, and is not
1/√head_dim then. Within bounds: a wider tile adds in another order."""


def _allowed_of_pad_value_dim(problem: Problem) -> Mapping[str, Sequence[int]]:
    return {"columns": [n for n in COLUMNS if problem.value_dim + n <= LARGEST_HEAD_DIM]}


def _unfit_of_pad_value_dim(problem: Problem) -> str | None:
    return None if _allowed_of_pad_value_dim(problem)["columns"] else "its value_dim is the largest"


def _runs_of_pad_value_dim(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    columns = int(parameters["columns"])
    wider = inputs.problem.replace(value_dim=inputs.problem.value_dim + columns)
    return inputs, inputs.replace(problem=wider, v=with_zero_columns(inputs.v, columns))


def _holds_of_pad_value_dim(
    _: Sequence[Inputs], outputs: Sequence[Outputs], parameters: Parameters, errors: Errors
) -> Finding | None:
    assert errors is not None, "asked within bounds"
    columns = int(parameters["columns"])

    def with_exact_zeros(of: Outputs) -> Outputs:
        own = of.out if of is not errors[1] else of.out[..., :-columns]
        return Outputs(with_zero_columns(own, columns), of.lse)

    before, wider = outputs
    return compare_outputs(
        wider, with_exact_zeros(before), [with_exact_zeros(error) for error in errors]
    )


PAD_VALUE_DIM = Relation(
    name="pad_value_dim",
    summary="`columns` columns of zeros more in V give exactly 0, and leave the others as they are",
    runs=_runs_of_pad_value_dim,
    holds=_holds_of_pad_value_dim,
    promise="bounds",
    unfit=of_attention(_unfit_of_pad_value_dim),
    allowed=_allowed_of_pad_value_dim,
)
"""Holds for every right kernel: each column of out is of the same column of V alone, and weights
are finite, so that Σ of weights times 0 is 0, of either sign. Within bounds in the other columns: a
wider tile may come with another order of the keys."""


_NATS = (1, -1, 30, -30, 100, -100, 400, -400)
_LARGEST_EXPONENT_of_key_shift = 60  # of a number of q or k: no product overflows fp32


def _factors(problem: Problem, nats: int) -> tuple[float, float]:
    """(x, y) with scale · x · y near ``nats``: x is a power of two, y has three bits."""
    significand, exponent = math.frexp(abs(nats) / problem.scale)
    half = exponent // 2
    # By eighths, down: one of 0.5, 0.625, 0.75 and 0.875.
    y = math.ldexp(math.floor(8 * significand) / 8, exponent - half)
    return math.ldexp(1.0, half), math.copysign(y, nats)


def _held(fmt: Format, number: float) -> bool:
    """Whether the format has ``number``, with room to spare; fp8 has it by its descale."""
    least, most = -_LARGEST_EXPONENT_of_key_shift, _LARGEST_EXPONENT_of_key_shift
    if not fmt.saturates:
        least = max(least, fmt.min_exponent + fmt.significand)
        most = min(most, math.floor(math.log2(fmt.max)))
    return 2.0**least <= abs(number) <= 2.0**most


def _allowed_of_key_shift(problem: Problem) -> Allowed:
    fmt = problem.formats.storage
    return {
        "nats": [n for n in _NATS if all(_held(fmt, number) for number in _factors(problem, n))]
    }


def _unfit_of_key_shift(problem: Problem) -> str | None:
    if problem.score != library.NONE:
        return "its score mod may make something else of a shifted score"
    if not _allowed_of_key_shift(problem)["nats"]:
        return f"scale={problem.scale:g} asks for q and k beyond {problem.formats.storage.name}"
    return None


def _runs_of_key_shift(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    """The column of its own that each key head has for the shift: x in q, 0 and then y in K."""
    problem = inputs.problem
    x, y = _factors(problem, int(parameters["nats"]))
    own = _own_column(problem).to(inputs.device)
    q, k, v = inputs.promoted()
    q = torch.where(own.repeat_interleave(problem.group, dim=1), x, q)
    forward = problem.replace(backward=False, dlse=False, dcaptured=False)
    exact = Inputs(problem=forward.replace(dtype="fp64"), q=q, k=torch.where(own, y, k), v=v)
    shifted = _rounded(exact, forward)
    after = inputs.replace(q=shifted.q, k=shifted.k, v=shifted.v, descale=shifted.descale)
    k = replace_where(after.k, torch.zeros_like(after.k), own)
    return after.replace(k=k), after


def _own_column(problem: Problem) -> torch.Tensor:
    """Bool ``(batch, kv_heads, 1, head_dim)``: a column that a neighbour has not."""
    pair = torch.arange(problem.batch)[:, None] + torch.arange(problem.kv_heads)
    own = pair[..., None] % problem.head_dim == torch.arange(problem.head_dim)
    return own[:, :, None]


def _rounded(exact: Inputs, problem: Problem) -> Inputs:
    """Rounded once; in fp8 with powers of two as descales: the shift is a float64 number."""
    rounded = inputs_room.round_inputs(exact, problem)
    if rounded.descale is None:
        return rounded
    fmt, stored, scales = problem.formats.storage, {}, {}
    for name, values in exact.tensors().items():
        _, exponent = torch.frexp(getattr(rounded.descale, name))
        scales[name] = torch.pow(2.0, exponent.float())
        each = scales[name].repeat_interleave(values.shape[1] // problem.kv_heads, dim=1)
        stored[name] = round_to(values / each.double()[..., None, None], fmt).to(fmt.torch_dtype)
    return Inputs(problem=problem, **stored, descale=Descale(**scales))


def _added(runs: Sequence[Inputs]) -> torch.Tensor:
    """Scale · c of each head's keys, float64 ``(batch, heads, 1, head_dim)``."""
    before, after = (each.promoted()[1] for each in runs)
    c = (after - before)[:, :, :1].repeat_interleave(runs[0].problem.group, dim=1)
    return c * runs[0].problem.scale


def _shift(runs: Sequence[Inputs]) -> torch.Tensor:
    """The shift, float64 ``(batch, heads, query)``: q and c meet in one column, exactly."""
    return (runs[1].promoted()[0] * _added(runs)).sum(-1)


def _gradient_shift(runs: Sequence[Inputs]) -> torch.Tensor:
    """What is added to dq, as q in shape: a row's gradients of scores sum to that of its LSE."""
    _, dlse = runs[0].loss()
    alive = ~mask_visibility.rows_without_keys(runs[0].problem).to(dlse.device)
    return (dlse * alive)[..., None] * _added(runs)


def _holds_of_key_shift(
    runs: Sequence[Inputs], outputs: Sequence[Outputs], _: Parameters, errors: Errors
) -> Finding | None:
    before, after = outputs
    lse = None if before.lse is None else before.lse.double() + _shift(runs)
    dq = None if before.dq is None else before.dq.double() + _gradient_shift(runs)
    return compare_outputs(after, replace(before, lse=lse, dq=dq), errors)


KEY_SHIFT = Relation(
    name="key_shift",
    summary="a vector c added to every key of a key head, which moves all logits by about `nats`: "
    "out stays, LSE moves by scale · q · c, and gradients stay but for the loss's part of LSE",
    runs=_runs_of_key_shift,
    holds=_holds_of_key_shift,
    promise="bounds",
    unfit=of_attention(without_sink, _unfit_of_key_shift, gradients=True),
    allowed=_allowed_of_key_shift,
)
"""Holds of the exact results: softmax(s + t) = softmax(s) for a number t of the row's own, and
log Σ exp(s + t) = t + log Σ exp(s). Gradients stay too: those of a row's scores sum to 0; or, where
the loss has a part of LSE, to that, which moves q's by scale · c times it. K + c is a number of
every format, since a column of K that is 0 holds c alone: a number of three bits. q has a power of
two there and scale 24 bits, so t is a float64 number. Each run is within its own bound:
|second − first| ≤ the sum of both."""


_NATS_of_logit_shift = (0, 1, -1, 40, -40, 400, -400)


def _allowed_of_logit_shift(_: Problem) -> Allowed:
    """Whole numbers; 0 stands for the library's bias, which kernels take that know no text."""
    return {"nats": _NATS_of_logit_shift}


def _added_of_logit_shift(problem: Problem, nats: int) -> Spec:
    """What adds a number of the head's own."""
    if nats == 0:
        return Spec.of("relative_bias", distance=0, seed=problem.seed)
    return Spec.of("expression", text=f"score + (h {'-' if nats < 0 else '+'} {abs(nats)})")


def _runs_of_logit_shift(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    problem = inputs.problem
    added = _added_of_logit_shift(problem, int(parameters["nats"]))
    score = added if problem.score == library.NONE else Spec.of("chain", problem.score, added)
    return inputs, inputs.replace(problem=problem.replace(score=score))


def _holds_of_logit_shift(
    runs: Sequence[Inputs], outputs: Sequence[Outputs], parameters: Parameters, errors: Errors
) -> Finding | None:
    before, after = outputs
    lse = before.lse
    if lse is not None:
        lse = lse.double() + _shift_of_logit_shift(runs[0].problem, int(parameters["nats"])).to(
            lse.device
        )
    return compare_outputs(after, Outputs(before.out, lse), errors)


def _shift_of_logit_shift(problem: Problem, nats: int) -> torch.Tensor:
    """What is added to 0, float64 ``(heads, 1)``."""
    added = library.build_score(_added_of_logit_shift(problem, nats), problem.dimensions)
    head = torch.arange(problem.heads)[:, None]
    zero = torch.zeros_like(head)
    return added(zero.double(), zero, head, zero, zero)


LOGIT_SHIFT = Relation(
    name="logit_shift",
    summary="a score mod that adds one number to every logit of a head, `nats` + h, leaves out and "
    "moves LSE by it",
    runs=_runs_of_logit_shift,
    holds=_holds_of_logit_shift,
    promise="bounds",
    unfit=of_attention(without_sink),
    allowed=_allowed_of_logit_shift,
)
"""Holds of the exact results after any score mod of the Problem's: softmax(s + t) = softmax(s), and
log Σ exp(s + t) = t + log Σ exp(s). The number t is an fp32 number: whole, or of the bias's table.
Each run is within its own bound, the second one's with the score mod's roundings in it:
|second − first| ≤ the sum."""


_NATS_of_softmax_shift = (1, -1, 30, -30, 400, -400)


def _allowed_of_softmax_shift(_: Problem) -> Allowed:
    return {"nats": _NATS_of_softmax_shift}


def _runs_of_softmax_shift(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    """Scores and shift are multiples of one unit, few enough for the largest sum to be a number."""
    nats, fmt = int(parameters["nats"]), inputs.problem.formats.storage
    x = inputs.scores().clamp(-fmt.max / 4, fmt.max / 4)
    _, exponent = torch.frexp(x.abs().amax() + abs(nats))
    # A sum is below 2^exponent, and rounding to units adds one of them at most.
    unit = 2.0 ** (int(exponent) + 1 - fmt.significand)
    shift = math.copysign(max(1, round(abs(nats) / unit)) * unit, nats)
    x = torch.round(x / unit) * unit
    before, after = (inputs.replace(x=each.to(fmt.torch_dtype)) for each in (x, x + shift))
    return before, after


def _holds_of_softmax_shift(
    runs: Sequence[Inputs], outputs: Sequence[Outputs], _: Parameters, errors: Errors
) -> Finding | None:
    before, after = outputs
    shift = (runs[1].scores() - runs[0].scores())[..., 0]
    lse = None if before.lse is None else before.lse.double() + shift
    return compare_outputs(after, Outputs(before.out, lse), errors)


SOFTMAX_SHIFT = Relation(
    name="softmax_shift",
    summary="about `nats` added to every score leaves out, and moves LSE by exactly as much",
    runs=_runs_of_softmax_shift,
    holds=_holds_of_softmax_shift,
    promise="bounds",
    unfit=of_softmax(),
    allowed=_allowed_of_softmax_shift,
)
"""Holds of the exact results: softmax(x + c) = softmax(x), and log Σ exp(x + c) = c + log Σ exp(x).
The sums x + c are exact: x is rounded to a coarse grid first, and c is on it. Each run is within
its own bound: |second − first| ≤ the sum of both."""

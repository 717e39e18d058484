"""Relations with a known result and no second run: one key's value, a mean of values, zeros."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from attncheck.core.draws import Draws
from attncheck.core.formats import FORMATS, round_to
from attncheck.core.mod_spec import NONE, Spec
from attncheck.core.outputs import Outputs
from attncheck.inputs.input_tensors import Inputs, round_inputs
from attncheck.inputs.problem import Parameters, Problem
from attncheck.relations.mask_visibility import visible_blocks
from attncheck.relations.relation import (
    Finding,
    Relation,
    Results,
    compare_outputs,
    compare_values,
    of_attention,
    replace_where,
    without_sink,
)

# ------------------------------------------------------------------ one key's value

_PAIR_BITS = 2 * FORMATS["tf32"].significand  # A sum of two tf32 numbers holds so many bits.
_DROPPED_BITS = FORMATS["fp32"].significand - _PAIR_BITS


def round_as_read(v: torch.Tensor, problem: Problem) -> torch.Tensor:
    """Return V ``(batch, kv_heads, kv, value_dim)`` rounded as P·V reads it, in its storage dtype.

    A rounded value with a weight of exactly 1 is exactly the result. V is rounded to the products'
    format, such as tf32; in fp32 to 22 bits toward zero, because correct kernels may multiply fp32
    numbers as sums of two tf32 numbers, which hold no more (CUTLASS's 3×TF32, and with it torch's
    memory-efficient attention).
    """
    if problem.formats.products.name == "fp32":
        return (v.contiguous().view(torch.int32) & -(1 << _DROPPED_BITS)).view(torch.float32)
    return round_to(v.double(), problem.formats.products).to(v.dtype)


def _with_readable_values(inputs: Inputs, drawn: torch.Tensor) -> Inputs:
    """Return inputs whose V is ``drawn``, rounded as the product reads it.

    In fp8 V's descale becomes 1; a product with another one would be rounded to fp32 and again to
    the dtype of out.
    """
    descale = inputs.descale
    if descale is not None:
        descale = replace(descale, v=torch.ones_like(descale.v))
    return inputs.replace(v=round_as_read(drawn, inputs.problem), descale=descale)


# Score mods that leave a score of 0 at (row 0, key 0) at 0.
_KEEP_FIRST_ZERO = {"none", "alibi", "softcap", "temperature", "chain"}


def _sees_key_0_alone(mask: Spec, problem: Problem) -> bool:
    """Return whether row 0 sees key 0 and no other, as far as the mask's name tells."""
    if mask.name == "causal":
        return True
    if mask.name == "causal_bottom_right":
        return problem.query == problem.kv
    if mask.name == "sliding_window":
        return bool(mask.values["window"] >= 1)
    if mask.name == "prefix_lm":
        return bool(mask.values["prefix"] <= 1)
    return False


def _unless_first_row_sees_one(problem: Problem) -> str | None:
    if not _sees_key_0_alone(problem.mask, problem):
        return "its mask does not show row 0 key 0 alone, as far as its name tells"
    if any(part.name not in _KEEP_FIRST_ZERO for part in problem.score.walk()):
        return "its score mod moves a score of 0, so that the weight may not be exactly 1"
    return None


def _zero_first_query(inputs: Inputs, _: Parameters) -> tuple[Inputs, ...]:
    """Return inputs with V as the product reads it and a first score of 0, whose weight is exact.

    Another score's weight may differ from 1: a kernel that fuses exp2(s·c − m·c) gets exp2 of m·c's
    rounding error, up to |m·c|·2^-24, which shows in fp16 from scores of 4,096 on, in fp32 always.
    """
    first = torch.zeros(1, 1, inputs.problem.query, 1, dtype=torch.bool, device=inputs.device)
    first[:, :, 0] = True
    q = replace_where(inputs.q, torch.zeros_like(inputs.q), first)
    return (_with_readable_values(inputs, inputs.v).replace(q=q),)


def _compare_first_row(results: Results) -> Finding | None:
    (inputs,), (outputs,) = results.inputs, results.outputs
    values = inputs.v[:, :, :1].repeat_interleave(inputs.problem.group, dim=1)
    return compare_values("out", outputs.out[:, :, :1], values.to(outputs.out.dtype))


FIRST_ROW = Relation(
    name="first_row",
    summary="row 0, which sees key 0 alone, returns V's row 0 of its kv head, h // group",
    runs=_zero_first_query,
    rule=_compare_first_row,
    unfit=of_attention(without_sink, _unless_first_row_sees_one),
)
"""Holds for every right kernel: the weight is 1, in P's format exactly, and 1 · v = v.

q's row 0 is 0, and V is rounded as P·V reads it (``round_as_read``). The sign of a zero is not
compared.
"""

# ------------------------------------------------------------------ every key in its turn

_LEAST_SCORE_GAP = 128.0
"""In nats: exp(−128) is below 2^-184, and half of fp32's smallest number is 2^-150."""

_LARGEST_EXPONENT = 60


def _bits(problem: Problem) -> int:
    """Return the number of bits that a key's number takes."""
    return (problem.kv - 1).bit_length()


def _bit_cost(problem: Problem) -> float:
    """Return the power of two by which each differing bit lowers q · k."""
    return 2.0 ** math.ceil(math.log2(_LEAST_SCORE_GAP / problem.scale))


def _unless_bits_fit(problem: Problem) -> str | None:
    if problem.score != NONE:
        return "its score mod may make something else of a score"
    if problem.scale <= 0:
        return f"scale={problem.scale:g} is not positive"
    if problem.head_dim < 2 * _bits(problem):
        return f"head_dim={problem.head_dim} has no room for {_bits(problem)} bits of a key, twice"
    fmt, factor = problem.formats.storage, _bit_cost(problem)
    most = 2.0**_LARGEST_EXPONENT if fmt.saturates else min(fmt.max, 2.0**_LARGEST_EXPONENT)
    if not 1 / most <= factor <= most:
        return f"scale={problem.scale:g} asks for q beyond {fmt.name}"
    return None


def _chosen_keys(problem: Problem, turn: int, device: torch.device) -> torch.Tensor:
    """Return the chosen key of each row i, int64 ``(batch, heads, query)``; −1 if it sees none.

    Of the n keys that the row sees, it is number (i + turn) mod n.
    """
    keys = []
    for rows, visible in visible_blocks(problem, device):
        count = visible.sum(-1, keepdim=True)
        number = torch.arange(rows.start, rows.stop, device=device)[:, None] + turn
        nth = visible & (visible.cumsum(-1) == number % count.clamp(min=1) + 1)
        key = torch.where(count[..., 0] > 0, nth.byte().argmax(-1), -1)
        keys.append(key.expand(problem.batch, problem.heads, -1))
    return torch.cat(keys, dim=2)


def _single_out_keys(inputs: Inputs, parameters: Parameters) -> tuple[Inputs, ...]:
    problem, device, bits = inputs.problem, inputs.device, _bits(inputs.problem)
    chosen = _chosen_keys(problem, int(parameters["turn"]), device)
    row, key = (_digits(x, bits) for x in (chosen, torch.arange(problem.kv, device=device)))
    # The columns of K that hold no bit are ±1; q is 0 there.
    shape = (problem.batch, problem.kv_heads, problem.kv, problem.head_dim - 2 * bits)
    spare = torch.from_numpy(Draws(problem.seed).integers("one_hot spare", shape, 2)) * 2.0 - 1.0
    k = torch.cat([key, 1 - key], -1).expand(*shape[:3], -1)
    q = torch.cat([1 - row, row], -1) * -_bit_cost(problem)
    exact = Inputs(
        problem=problem.replace(dtype="fp64"),
        q=_rotate_columns(torch.nn.functional.pad(q, (0, shape[-1])), problem.group),
        k=_rotate_columns(torch.cat([k, spare.to(device)], -1), 1),
        v=inputs.v.double(),
    )
    return (_with_readable_values(round_inputs(exact, problem), inputs.v),)


def _digits(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the low ``bits`` of integers along a new last axis, float64."""
    return (numbers[..., None] >> torch.arange(bits, device=numbers.device) & 1).double()


def _rotate_columns(x: torch.Tensor, group: int) -> torch.Tensor:
    """Rotate columns by sequence and key head: each head's q has its zeros in other columns."""
    batch, heads, _, dim = x.shape
    shift = torch.arange(batch)[:, None] + torch.arange(heads) // group
    column = (torch.arange(dim) - shift[..., None]) % dim
    return x.gather(-1, column[:, :, None].to(x.device).expand(x.shape))


def _compare_chosen(results: Results) -> Finding | None:
    (inputs,), (outputs,) = results.inputs, results.outputs
    chosen = _chosen_keys(inputs.problem, results.number("turn"), inputs.device)
    v = inputs.v.to(outputs.out.dtype).repeat_interleave(inputs.problem.group, dim=1)
    value = v.gather(2, chosen.clamp(min=0)[..., None].expand(outputs.out.shape))
    finding = compare_values("out", outputs.out, value.masked_fill(chosen[..., None] < 0, 0.0))
    if finding or outputs.lse is None:
        return finding
    zeros = torch.zeros_like(outputs.lse)
    return compare_values("lse", outputs.lse, zeros.masked_fill(chosen < 0, -torch.inf))


ONE_HOT = Relation(
    name="one_hot",
    summary="a row whose other keys weigh nothing returns the value of the one key left, bit for "
    "bit, and LSE is 0",
    runs=_single_out_keys,
    rule=_compare_chosen,
    unfit=of_attention(without_sink, _unless_bits_fit),
    allowed=lambda problem: {"turn": range(problem.kv)},
)
"""Holds for every right kernel. A key's columns are the bits of its number and their complements; a
row's are −c where the key that it singles out has a 0. So q · k = −c · (bits that differ): the
score is exactly 0 for that key and at most −128 for every other one. In whatever order, scale and
base, its weight is exp(0) = 1 and theirs are below half of fp32's smallest number, so that they
become 0 once the maximum is that key's score. Out = 1 · v / 1 and LSE = 0 + log 1, without
rounding. V is first rounded as P · V reads it (``round_as_read``).

Unlike the probe ``isolated``, whose best score is large and whose values are compared within an
error, it compares every bit, in fp32 too, and singles out every visible key in turn. The sign of a
zero is not compared.
"""

# ------------------------------------------------------------------ means and zeros

_KEEP_ZERO = {"none", "softcap", "temperature", "chain"}  # score mods


def _unless_zero_stays(problem: Problem) -> str | None:
    if all(part.name in _KEEP_ZERO for part in problem.score.walk()):
        return None
    return "its score mod may move a score of 0"


def _compare_means(results: Results) -> Finding | None:
    """Compare out and LSE with means and logarithms, or with 0 and −∞ in rows that see no key."""
    (inputs,), (outputs,) = results.inputs, results.outputs
    problem = inputs.problem
    v = inputs.promoted()[2].repeat_interleave(problem.group, dim=1)
    out, lse = [], []
    for _, visible in visible_blocks(problem, inputs.device):
        count = visible.sum(-1).expand(problem.batch, problem.heads, -1)
        out.append(visible.double() @ v / count.clamp(min=1)[..., None])
        lse.append(count.double().log())
    return compare_outputs(outputs, Outputs(torch.cat(out, 2), torch.cat(lse, 2)), results.errors)


ZERO_QUERY = Relation(
    name="zero_query",
    summary="q = 0: LSE is the logarithm of the number of keys that a row sees, out the mean of "
    "their values",
    runs=lambda inputs, _: (inputs.replace(q=torch.zeros_like(inputs.q)),),
    rule=_compare_means,
    promise="bounds",
    unfit=of_attention(without_sink, _unless_zero_stays),
)
"""Holds for the exact result: n equal scores of 0 weigh 1/n each. The kernel's result is within its
bound of it. Keys are counted by the mask's callable."""

ZERO_VALUES = Relation(
    name="zero_values",
    summary="V = 0 gives exactly 0 in every row, seen keys or not",
    runs=lambda inputs, _: (inputs.replace(v=torch.zeros_like(inputs.v)),),
    rule=lambda results: compare_values("out", results.outputs[0].out, 0.0),
    unfit=of_attention(),
)
"""Holds for every right kernel: weights and row sums are finite, and a row that sees no key gives 0
too. The sign of a zero is not compared."""

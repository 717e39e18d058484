"""Fault models of the backward alone: the forward is right."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

import torch

from attncheck.fault_models.exact_attention import TRIED_TILES, ExactGradients, sum_group
from attncheck.fault_models.fault_model import Form, ModelTable, Prediction, has_mask, has_score
from attncheck.fault_models.layout_models import read_strided
from attncheck.fault_models.mask_models import mask_without, with_diagonals
from attncheck.fault_models.steps import LOG2E, Steps, round_to_format
from attncheck.fault_models.tile_models import bounded_loops, once_for_each, tile_visibility
from attncheck.inputs.problem import USUAL_SCALE
from attncheck.mods import masks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from attncheck.core.outputs import Outputs
    from attncheck.inputs.problem import Problem
    from attncheck.mods.signatures import MaskMod

_MOST_PARTS = 12  # most tiles of scores, of which one is left out of dQ
_GRADIENTS = ("dq", "dk", "dv", "dsink")


MODELS = ModelTable("gradient", of="backward")

_model = MODELS.model

MODELS.add(
    "delta-missing",
    "delta is missing: dS is P · dP, not P · (dP − delta)",
    steps=(
        Steps(delta=lambda delta, _dlse: torch.zeros_like(delta)),
        Steps(delta=lambda _delta, dlse: -dlse),
    ),
)
MODELS.add(
    "delta-sign",
    "delta has the wrong sign: dS is P · (dP + delta)",
    steps=(
        Steps(delta=lambda delta, dlse: -(delta - dlse)),
        Steps(delta=lambda delta, dlse: -delta - dlse),
    ),
)


@_model()
def delta_not_summed(grad: ExactGradients) -> Iterator[Form]:
    """Delta is the largest product of dO and O, not the sum of them."""
    delta = (grad.dout * grad.call.parts.out).amax(-1)
    # Padded columns are 0: they matter in a maximum, though not in a sum.
    for one in (delta, delta.clamp(min=0.0)):
        yield grad.gradients(delta=one)


@_model()
def ds_factor_missing(grad: ExactGradients) -> Iterator[Form]:
    """DS is P alone, or dP − delta alone, not their product."""
    p, off = grad.weights(), grad.dp - grad.off
    seen = grad.call.seen
    for ds in (p, off, torch.where(seen, off, 0.0)):
        yield grad.of_scores(ds)


MODELS.add(
    "dlse-ignored",
    "the gradient that arrives by LSE is ignored",
    applies=lambda problem: problem.dlse,
    steps=Steps(delta=lambda delta, _dlse: delta),
)
MODELS.add(
    "dlse-sign",
    "the gradient that arrives by LSE has the wrong sign",
    applies=lambda problem: problem.dlse,
    steps=(
        Steps(delta=lambda delta, dlse: delta + dlse),
        Steps(delta=lambda delta, dlse: delta - dlse * LOG2E),
        Steps(delta=lambda delta, dlse: delta - dlse / LOG2E),
    ),
)


@_model(order=2)
def dout_scaled(grad: ExactGradients) -> Iterator[Form]:
    """All gradients are off by one factor."""

    def at(share: float) -> Outputs:
        return grad.times(1.0 + share, *_GRADIENTS)

    yield Prediction(
        outputs=at(0.1), family=at, start=0.1, parameter="factor", shown=lambda x: 1.0 + x
    )


for _name, _sentence, _scaled in (
    ("dk-without-scale", "dK is not multiplied by the scale", ("dq",)),
    ("dq-without-scale", "dQ is not multiplied by the scale", ("dk",)),
    ("dq-dk-without-scale", "neither dQ nor dK is multiplied by the scale", ()),
):
    MODELS.add(_name, _sentence, steps=Steps(scaled_gradients=_scaled))
# In one kernel alone it equals one of the two models before it.
MODELS["dq-dk-without-scale"] = replace(MODELS["dq-dk-without-scale"], of_one_kernel=False)


@_model()
def gradient_units(grad: ExactGradients) -> Iterator[Form]:
    """DQ or dK is off by its sign, by log2 e, or multiplied by the scale once too often, or divided
    by it.
    """
    # dS in base 2 misses ln 2; the scale may be in q already.
    scale = grad.call.scale
    factors = (-1.0, LOG2E, 1.0 / LOG2E, scale, 1.0 / scale**2 if scale else 0.0)
    for names, factor in product((("dq",), ("dk",), ("dq", "dk"), ("dv",)), factors):
        yield grad.times(factor, *names), {"of": ", ".join(names)}


@_model()
def gradient_missing(grad: ExactGradients) -> Iterator[Form]:
    """A gradient is 0, or some of it is."""
    some = (("dq",), ("dk",), ("dv",), ("dsink",), ("dq", "dk"), ("dk", "dv"), ("dq", "dk", "dv"))
    for names in some:
        yield grad.times(0.0, *names), {"of": ", ".join(names)}


@_model(applies=has_mask())
def backward_mask_ignored(grad: ExactGradients) -> Iterator[Form]:
    """The backward ignores the mask."""
    call = grad.call
    ones = torch.ones_like(call.seen)
    yield grad.seeing(ones)
    yield grad.seeing((call.parts.lse > -math.inf)[..., None].expand(call.shape))
    # Hidden scores may be 0, as with a multiplied mask; or only whole tiles are hidden.
    yield grad.gradients(weights=grad.weights(s=torch.where(call.seen, call.s, 0.0), seen=ones))
    for rows, size in call.any_tiles:
        yield grad.seeing(tile_visibility(call, rows, size)[0]), {"tile": size}
    # Or exp overflows to fp32's largest number.
    largest = torch.finfo(torch.float32).max
    yield grad.gradients(weights=grad.weights(seen=ones).clamp(max=largest))


MODELS.add(
    "backward-mask-top-left",
    "the causal mask of the backward is aligned at the top left, and the forward's at the bottom "
    "right",
    applies=lambda p: p.query != p.kv and has_mask("causal_bottom_right", "bottom_right")(p),
    steps=(
        Steps(backward_mask=mask_without("causal_bottom_right", instead=masks.causal).mask),
        Steps(backward_mask=with_diagonals(lambda own, _dims: [0] * len(own)).mask),
    ),
)


def _and_causal(later: Callable[[Problem], int]) -> Steps:
    """Return Steps whose backward adds a causal mask, shifted by ``later`` keys."""

    def mask(problem: Problem, device: str) -> MaskMod:
        own, more = problem.mask_mod(device), later(problem)
        return lambda b, h, i, j: own(b, h, i, j) & (i + more >= j)

    return Steps(backward_mask=mask)


MODELS.add(
    "backward-causal-always",
    "the backward applies a causal mask that nobody asked for",
    steps=(_and_causal(lambda _: 0), _and_causal(lambda problem: problem.kv - problem.query)),
)


@_model(applies=has_mask())
def backward_mask_shifted(grad: ExactGradients) -> Iterator[Form]:
    """The mask of the backward is one key off."""
    for rows in (1, -1):
        yield grad.seeing(grad.call.visible(grad.call.mask, i=rows))


MODELS.add(
    "backward-window-ignored",
    "the backward ignores the window, and is causal alone",
    applies=has_mask("sliding_window"),
    steps=Steps(backward_mask=mask_without("sliding_window", instead=masks.causal).mask),
)
MODELS.add(
    "slope-missing",
    "the derivative of the score mod is missing",
    applies=has_score(),
    steps=(
        Steps(slope=lambda _problem: False),
        Steps(slope=lambda problem: not has_score("softcap")(problem)),
    ),
)


@_model(applies=has_score())
def backward_score_mod_ignored(grad: ExactGradients) -> Iterator[Form]:
    """The backward ignores the score mod."""
    # The forward's LSE belongs to modified scores, so that P does not add up to 1.
    weights = grad.weights(s=grad.call.x)
    yield grad.gradients(weights=weights, slopes=torch.ones_like(grad.slopes))
    yield grad.gradients(weights=weights)


@_model(
    applies=lambda problem: problem.group > 1,
    steps=Steps(group_heads=lambda p: torch.arange(p.heads).view(p.kv_heads, -1)[:, -1:]),
)
def group_last_head(grad: ExactGradients) -> Iterator[Form]:
    """DK and dV of a key head are those of one query head of its group, not the sum."""
    group = grad.call.problem.group
    # The last head to store wins, or the first, to which nothing is added.
    for number in (group - 1, 0):
        mine = {name: x[:, number::group] for name, x in grad.of_heads.items()}
        yield replace(grad.exact, **mine), {"head": number}
        for name, gradient in mine.items():
            yield replace(grad.exact, **{name: gradient}), {"head": number, "of": name}
    yield grad.times(1.0 / group, "dk", "dv"), {"head": "mean"}


MODELS.add(
    "backward-lse-base-2",
    "the backward takes a natural LSE for one to base 2, or the reverse",
    steps=(Steps(backward_lse=1.0 / LOG2E), Steps(backward_lse=LOG2E)),
)


@_model()
def backward_scale(grad: ExactGradients) -> Iterator[Form]:
    """The backward has another scale in its weights."""
    call = grad.call
    if not call.scale:
        return
    # The factor may be missing or applied twice when P is recomputed.
    both = call.scale * LOG2E
    # Or the backward divides by it.
    factors = (call.scale, 1.0 / call.scale, LOG2E, 1.0 / LOG2E, 1.0 / both, both**-2)
    for factor in (*factors, call.scale**-2):
        yield grad.gradients(weights=grad.weights(s=call.modified(call.x * factor)))
    # Or it has the default one, in its weights, in dQ and dK, or in all of them.
    factor = call.problem.replace(scale=USUAL_SCALE).scale / call.scale
    own, others = grad.exact, grad.weights(s=call.modified(call.x * factor))
    for weights in (others, None):
        one = own if weights is None else grad.gradients(weights=weights)
        tensors = one.tensors()
        scaled = {name: tensors[name] * factor for name in ("dq", "dk")}
        yield replace(one, **scaled), {"instead": "the default"}
    yield grad.gradients(weights=others), {"instead": "the default"}


@_model(order=1, family="precision")
def backward_scores_rounded(grad: ExactGradients) -> Iterator[Form]:
    """The backward rounds scores to too few bits."""
    call = grad.call
    # The rounded scores may be natural, or to base 2.
    for name, unit in product(("fp16", "bf16"), (1.0, LOG2E)):
        s = call.modified(round_to_format(name)(call.x * unit) / unit)
        yield grad.gradients(weights=grad.weights(s=s)), {"format": name}


@_model(order=1, family="precision")
def gradient_rounded(grad: ExactGradients) -> Iterator[Form]:
    """A gradient, or what it is a product of, is rounded to too few bits."""
    call, exact = grad.call, grad.exact
    p = grad.weights()
    dz = p * (grad.dp - grad.off)
    dx = dz * grad.slopes
    for name in ("fp16", "bf16"):
        rounded = round_to_format(name)
        yield grad.gradients(weights=rounded(p)), {"format": name, "of": "P"}
        yield replace(exact, dv=grad.gradients(weights=rounded(p)).dv), {"format": name, "of": "P"}
        yield grad.gradients(dp=rounded(grad.dp)), {"format": name, "of": "dP"}
        yield grad.gradients(delta=rounded(grad.delta)), {"format": name, "of": "delta"}
        yield grad.of_scores(rounded(dz)), {"format": name, "of": "dS"}
        # A tile's term may be rounded, or the running sum; before the scale, or after it. torch's
        # autograd adds up rounded gradients of slices, the last slice first.
        products = {"dq": (dx, call.k, call.key_tiles)}
        products["dk"] = (dx.mT, call.q, call.row_tiles)
        products["dv"] = (p.mT, grad.dout, call.row_tiles)
        for of, (weights, values, sizes) in products.items():
            units = (1.0,) if of == "dv" else dict.fromkeys((call.scale, 1.0))
            for size, unit, way in product(sizes, units, ("terms", "sums", "slices")):
                sums = torch.zeros_like(weights[..., :1] * values[..., :1, :])
                starts = range(0, values.shape[2], size)
                for at in reversed(starts) if way == "slices" else starts:
                    part = weights[..., at : at + size] @ values[..., at : at + size, :] * unit
                    sums = sums + (part if way == "sums" else rounded(part))
                    sums = sums if way == "terms" else rounded(sums)
                whole = sums if of == "dv" else sums * (call.scale / unit)
                whole = whole if of == "dq" else sum_group(whole, call.problem.group)
                yield replace(exact, **{of: whole}), {"format": name, "of": of, "tile": size}


@_model(order=1)
def dq_tile_dropped(grad: ExactGradients) -> Iterator[Form]:
    """A tile of keys adds nothing to dQ."""
    call, exact = grad.call, grad.exact
    for size in call.key_tiles:
        count = -(-call.problem.kv // size)
        for number in dict.fromkeys((0, count - 1)):
            dropped = grad.seeing(call.seen & (call.j // size != number))
            parameters = {"tile": size, "number": number}
            yield replace(exact, dq=dropped.dq), parameters
            yield dropped, parameters
        # If atomic additions are plain stores, only the last one stays.
        only = grad.seeing(call.seen & (call.j // size == count - 1))
        yield replace(exact, dq=only.dq), {"tile": size}
    for rows, size in call.tiles:
        blocks, count = -(-call.problem.query // rows), -(-call.problem.kv // size)
        if 1 < blocks * count <= _MOST_PARTS:
            for block, number in product(range(blocks), range(count)):
                dropped_part = (call.i // rows == block) & (call.j // size == number)
                parameters = {"tile": size, "number": number, "rows": block * rows}
                yield replace(exact, dq=grad.seeing(call.seen & ~dropped_part).dq), parameters


@_model(order=1)
def dk_rows_dropped(grad: ExactGradients) -> Iterator[Form]:
    """A tile of rows adds nothing to dK and dV."""
    call, exact = grad.call, grad.exact
    for size in call.row_tiles:
        count = -(-call.problem.query // size)
        for number in dict.fromkeys((0, count - 1)):
            dropped = grad.seeing(call.seen & (call.i // size != number))
            parameters = {"tile": size, "number": number}
            yield replace(exact, dk=dropped.dk, dv=dropped.dv), parameters
            yield replace(exact, dk=dropped.dk), parameters
            yield replace(exact, dv=dropped.dv), parameters


@_model(order=1)
def backward_loop_too_short(grad: ExactGradients) -> Iterator[Form]:
    """A loop of the backward begins too late or ends too early: keys, or rows, have no part."""
    call, step = grad.call, TRIED_TILES[0]
    for of, index in {"keys": call.j, "rows": call.i}.items():
        length = index.numel()
        # Only the first or the last one is lost, or whole tiles.
        lost_parts = {"the first": index < 1, "the last": index >= length - 1}
        # A loop that ends behind the last key or row is right.
        lost_parts |= {f"from {end}": index >= end for end in range(step, length + step, step)}
        lost_parts |= {f"up to {end}": index < end for end in range(step, length, step)}
        for name, lost in lost_parts.items():
            word = name if name.startswith("the") else name.split()[0]
            yield grad.seeing(call.seen & ~lost), {"of": of, "which": word}
    of_keys = once_for_each(lambda visited: grad.seeing(call.seen & visited))
    for visited, parameters in bounded_loops(call):
        yield of_keys(visited), {"of": "keys", **parameters}
    last = call.i[..., 0] == call.problem.query - 1
    yield grad.gradients(delta=torch.where(last, 0.0, grad.delta)), {"of": "delta"}
    # A tile of keys begins with the first row that sees any of it, rounded up to a tile.
    firsts: dict[int, Tensor] = {}
    for rows, size in call.any_tiles:
        if size not in firsts:
            some = tile_visibility(call, 1, size)[0]
            firsts[size] = torch.where(some, call.i, call.problem.query).amin(2, keepdim=True)
        visited = call.i >= (firsts[size] + rows - 1) // rows * rows
        parameters = {"tile": size, "rows": rows}
        yield of_keys(visited), {"of": "rows", "begins with": "the next tile", **parameters}
        # Or it begins, or ends, with the rows that see one key of it.
        tile, block = call.j.flatten() // size * size, call.i // rows * rows
        ending = (tile + size - 1).clamp(max=call.problem.kv - 1)
        first = torch.where(call.seen[..., ending], call.i, call.problem.query).amin(
            2, keepdim=True
        )
        last = torch.where(call.seen[..., tile], call.i, -1).amax(2, keepdim=True)
        of_last = of_keys(block + rows > first)
        yield of_last, {"of": "rows", "begins with": "those of its last key", **parameters}
        of_first = of_keys(block <= last)
        yield of_first, {"of": "rows", "ends with": "those of its first key", **parameters}


@_model()
def last_row_again(grad: ExactGradients) -> Iterator[Form]:
    """The last row counts again in dK and dV for each row of padding in its tile: places behind it
    are clamped, and not masked.
    """
    call, exact = grad.call, grad.exact
    last = call.i == call.problem.query - 1
    for size in call.row_tiles:
        times = torch.where(last, float(1 + -call.problem.query % size), 1.0)
        again = grad.gradients(weights=grad.weights() * times)
        parameters = {"rows": size}
        yield replace(exact, dk=again.dk, dv=again.dv), parameters
        yield replace(exact, dk=again.dk), parameters
        yield replace(exact, dv=again.dv), parameters
        yield again, parameters  # dQ is added to, too.


@_model(applies=lambda problem: problem.sink)
def dsink_not_summed(grad: ExactGradients) -> Iterator[Form]:
    """The gradient of a sink is that of one sequence, or one tile of rows, not the sum."""
    exact, call = grad.exact, grad.call
    assert call.sink is not None, "asked of what has one"
    of_sink = torch.exp(call.sink - call.parts.lse)
    # (batch, heads, rows)
    terms = torch.where(of_sink > 0, of_sink * -grad.off[..., 0], 0.0)
    of_sequences = terms.sum(2)
    last = call.problem.batch - 1
    for name, number in {"the first": 0, "the last": last}.items():
        yield replace(exact, dsink=of_sequences[number]), {"of": "sequences", "which": name}
    yield replace(exact, dsink=of_sequences.mean(0)), {"of": "sequences", "which": "their mean"}
    for size in call.row_tiles:
        last = (call.problem.query - 1) // size
        for name, number in {"the first": 0, "the last": last}.items():
            part = terms[..., number * size : (number + 1) * size].sum((0, 2))
            yield replace(exact, dsink=part), {"of": "rows", "which": name, "tile": size}


@_model(applies=lambda problem: problem.sink)
def backward_sink_ignored(grad: ExactGradients) -> Iterator[Form]:
    """The backward's weights lack the sink: its LSE is that of the keys alone."""
    call = grad.call
    assert call.sink is not None, "asked of what has one"
    lse = call.softmax(call.z, sink=None).lse
    outputs = grad.gradients(weights=grad.weights(lse=lse))
    yield outputs
    # The sink's own weight may be of that LSE, too; where it is the only key, it is infinite.
    of_sink = torch.where(lse == -math.inf, 0.0, (call.sink - lse).exp())
    yield replace(outputs, dsink=(of_sink * -grad.off[..., 0]).sum((0, 2)))


@_model(applies=has_score())
def slope_of_another_score(grad: ExactGradients) -> Iterator[Form]:
    """The score mod's derivative is taken at another score: at the modified one, or before the
    scale.
    """
    call = grad.call
    scores = {"the modified score": call.s, "the product without the scale": call.qk}
    scores["the score in base 2"] = call.x * LOG2E
    for at, x in scores.items():
        yield grad.gradients(slopes=grad.slopes_at(x)), {"at": at}


@_model(applies=lambda p: p.kv_heads > 1)
def backward_kv_heads(grad: ExactGradients) -> Iterator[Form]:
    """The backward reads another key head."""
    call, problem = grad.call, grad.call.problem
    _, k, v = call.inputs.promoted()
    h = call.h.flatten()
    for name, heads in {
        "interleaved": h % problem.kv_heads,
        "first": 0 * h,
        "by place in the group": (h % problem.group) % problem.kv_heads,
    }.items():
        s = call.modified(call.q @ k[:, heads].mT * call.scale)
        dp = grad.dout @ v[:, heads].mT
        outputs = grad.gradients(weights=grad.weights(s=s), dp=dp, k=k[:, heads])
        yield outputs, {"head": name}


@_model()
def delta_of_another_row(grad: ExactGradients) -> Iterator[Form]:
    """Delta is that of another row."""
    # A tile of rows may begin one row off.
    for later in (1, -1):
        yield grad.gradients(delta=grad.delta.roll(later, -1))
    # Or delta may be that of the first column alone.
    yield grad.gradients(delta=grad.dout[..., 0] * grad.call.parts.out[..., 0]), {"of": "column 0"}
    # Or an index or a stride may be missing where its kernel reads O and dO.
    out, dout = (x.contiguous() for x in (grad.call.parts.out, grad.dout))
    b, h, i, _ = dout.stride()
    columns = dout.shape[3]
    for of, stride in {
        "not times the columns": (b // columns, h // columns, 1, 1),
        "without head": (0, 0, i, 1),
        "without row": (b, h, 0, 1),
        "without column": (b, h, i, 0),
    }.items():
        delta = (read_strided(out, stride)[0] * read_strided(dout, stride)[0]).sum(-1)
        yield grad.gradients(delta=delta), {"of": of}


@_model(applies=has_mask())
def backward_empty_rows_nan(grad: ExactGradients) -> Iterator[Form]:
    """Rows that see no key make gradients NaN or infinite."""
    exact, dead = grad.exact, grad.call.parts.lse == -math.inf
    if not bool(dead.any()):
        return
    dq = nan_where(dead[..., None], exact.dq)
    of_keys = dead.any(-1).view(dead.shape[0], grad.call.problem.kv_heads, -1).any(-1)
    dk, dv = (nan_where(of_keys[..., None, None], x) for x in (exact.dk, exact.dv))
    yield replace(exact, dq=dq)
    yield replace(exact, dq=dq, dk=dk, dv=dv)
    yield replace(exact, dk=dk, dv=dv)
    yield replace(exact, dv=dv)
    # Weights of these rows are exp(score − LSE) = ∞, and make dS NaN if they enter it.
    infinite = (grad.weights() + torch.where(dead, math.inf, 0.0)[..., None]).mT @ grad.dout
    infinite = sum_group(infinite, grad.call.problem.group)
    yield replace(exact, dv=infinite)
    yield replace(exact, dq=dq, dk=dk, dv=infinite)


def nan_where(here: Tensor, gradient: Tensor | None) -> Tensor:
    """Return a gradient with NaN in some places."""
    assert gradient is not None, "of a backward"
    return torch.where(here, math.nan, gradient)


@_model()
def backward_tail_nan(grad: ExactGradients) -> Iterator[Form]:
    """The padding of the last tile of keys makes dQ NaN: exp overflows."""
    # Padding scores 0, and exp(0 − LSE) is ∞ in fp32 in these rows.
    low = grad.call.parts.lse < -math.log(torch.finfo(torch.float32).max)
    yield replace(grad.exact, dq=nan_where(low[..., None], grad.exact.dq))

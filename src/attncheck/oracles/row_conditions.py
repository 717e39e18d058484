"""Exact quantities of rows that the bounds need, in float64, and the choice of rows.

The mask and the score mod are the original callables, as everywhere among the oracles. Unlike the
oracles this holds every key of its rows at once, so rows come in pieces.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from attncheck.core.conditions import Conditions, GradientConditions, Rows, WeightedRows
from attncheck.core.mod_spec import FULL, NONE
from attncheck.core.outputs import Outputs
from attncheck.inputs.input_tensors import Inputs
from attncheck.inputs.problem import Problem
from attncheck.oracles.float64_numbers import Float64
from attncheck.oracles.mod_calls import Indices, call_mask, call_score_mod

# (row, key) pairs of one piece. A bound holds some twenty float64 arrays of them: 80 MB on a CPU,
# 2.7 GB on a GPU; and each further arithmetic up to ten more.
_CPU_PAIRS, _GPU_PAIRS = 2**19, 2**24
# As many times the pairs where three such arrays are held: with fewer a GPU waits for Python.
_FEW_ARRAYS = 4

# Multiplications of q·k and P·V up to which all rows are sampled: on a CPU 4 heads of 512 · 512 at
# 64 dimensions, on a GPU 4 of 2048 · 2048 at 128.
_CPU_WHOLE, _GPU_WHOLE = 2**27, 2**32
_FEWEST_ROWS = 32
_TILES = (16, 32, 64, 128, 256)

_STEP = 2.0**-17  # of a difference quotient: the cube root of float64's unit roundoff


def compute_conditions(inputs: Inputs, truth: Outputs, rows: Rows) -> Conditions:
    """The Conditions of ``rows``, on the inputs' device.

    Args:
        truth: The oracle's result on them, where ``out`` and ``lse`` are taken from.
        rows: Which rows; their query indices may lie on any device.
    """
    problem = inputs.problem
    rows = Rows(rows.heads, rows.query.to(inputs.device))
    if problem.operation == "softmax":
        assert inputs.x is not None, "Inputs of a softmax have their scores"
        q, k, v = _empty(inputs, rows)
        products = _at_rows(inputs.x, rows).double()
        scores, by_mask = products, torch.ones_like(products, dtype=torch.bool)
    else:
        q, k, v = _promoted(inputs, rows)
        products = (q @ k.mT).mul_(problem.scale)
        scores, by_mask = products, mask_visibility(problem, rows)
        if problem.score != NONE:
            scores = _scored(inputs, products, rows)
        # Rows that see such a number have no finite result and no bound; others must not see it.
        k, v = (x.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0) for x in (k, v))
    # A sink is one key more for the bounds: its q·k and its value are 0.
    if inputs.sink is not None:
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, 1)) for x in (k, v))
        products = torch.nn.functional.pad(products, (0, 1))
        scores = torch.cat([scores, _sinks(inputs.sink, rows)], -1)
    attended = by_mask & ~torch.isneginf(scores)
    same = scores is products
    if not same:
        products = torch.where(by_mask & ~torch.isneginf(products), products, 0.0)
    # Passes are what this costs: none is made for keys that are hidden where none is.
    whole = bool(attended.all())
    if whole:
        maximum = scores.amax(-1)
        weights = scores - maximum[..., None]
    else:
        scores = torch.where(attended, scores, 0.0)
        weights = torch.where(attended, scores, -math.inf)
        maximum = torch.where(attended.any(-1), weights.amax(-1), 0.0)
        weights.sub_(maximum[..., None])
    weights.exp_()
    assert truth.lse is not None, "the oracle always gives LSE"
    return Conditions(
        rows=rows,
        q=q,
        k=k,
        v=v,
        scale=problem.scale,
        products=scores if same else products,
        scores=scores,
        seen=attended,
        sees_all=whole,
        maximum=maximum,
        total=weights.sum(-1),
        out=_at_rows(truth.out, rows),
        lse=_at_rows(truth.lse, rows),
        given_scores=problem.operation == "softmax",
        has_score_mod=problem.score != NONE,
        has_sink=problem.sink,
    )


def weigh_rows(inputs: Inputs, truth: Outputs, rows: Rows) -> WeightedRows:
    """Return the weights of ``rows``, of an attention without a score mod and without a sink.

    What sums need of ``compute_conditions``, in fewer passes over all pairs, which end with the
    last key that one of the rows sees.

    Args:
        truth: As of ``compute_conditions``; finite.
        rows: The same.
    """
    problem = inputs.problem
    rows = Rows(rows.heads, rows.query.to(inputs.device))
    (q, k, v), hidden = _promoted(inputs, rows), None
    keys = problem.kv
    if problem.mask != FULL:
        seen = mask_visibility(problem, rows)
        keys = _last_seen(seen) + 1
        hidden = seen[..., :keys].logical_not_()
    # The scale in the product: a pass less than behind it.
    scores = torch.baddbmm(q.new_empty(()), q, k[:, :keys].mT, beta=0, alpha=problem.scale)
    if hidden is not None:
        scores.masked_fill_(hidden, -math.inf)
    least, maximum = torch.aminmax(scores, dim=-1)
    # An infinite number may hide keys too.
    if hidden is not None or bool((least == -math.inf).any()):
        hidden = scores == -math.inf
        count = keys - hidden.sum(-1, keepdim=True).double()
        maximum = maximum.masked_fill(count[..., 0] == 0, 0.0)
    else:
        count = scores.new_full((*scores.shape[:2], 1), keys)
    weights = scores.sub_(maximum[..., None]).exp_()
    assert truth.lse is not None, "the oracle always gives LSE"
    return WeightedRows(
        q=q,
        k=k.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0),
        v=v.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0),
        scale=problem.scale,
        weights=weights,
        hidden=hidden,
        count=count,
        maximum=maximum,
        total=weights.sum(-1),
        out=_at_rows(truth.out, rows),
        lse=_at_rows(truth.lse, rows),
    )


def _last_seen(seen: Tensor) -> int:
    """Return the last key that one of the rows sees; the first where none sees any."""
    some = seen.flatten(0, -2).any(0)
    return int((some * torch.arange(len(some), device=some.device)).max())


def mask_visibility(problem: Problem, rows: Rows) -> Tensor:
    """Mask visibility of the rows, bool ``(heads, rows, kv)``; of a softmax everything.

    As in Conditions a sink is the last key.
    """
    shape = (len(rows.heads), len(rows.query), problem.kv)
    if problem.operation == "softmax":
        return torch.ones(shape, dtype=torch.bool, device=rows.query.device)
    mask = problem.mask_mod(str(rows.query.device))
    seen = torch.empty(shape, dtype=torch.bool, device=rows.query.device)
    for part, at in row_indices(problem, rows):
        seen[part] = call_mask(mask, at)[0]
    return torch.nn.functional.pad(seen, (0, 1), value=True) if problem.sink else seen


def all_rows(
    problem: Problem, device: torch.device | str, *, few_arrays: bool = False
) -> Iterator[Rows]:
    """All rows of a Problem, in pieces that fit into memory.

    Args:
        few_arrays: Whether for ``weigh_rows``, which holds less than a bound does.
    """
    return _pieces(problem, torch.arange(problem.query, device=device), few_arrays=few_arrays)


def some_rows(problem: Problem, wanted: Tensor) -> Iterator[Rows]:
    """Yield the ``wanted`` rows, ``(heads, query)`` bool, in pieces that fit into memory.

    On a GPU those rows of every head: pieces of one head each would not keep it busy.
    """
    if wanted.device.type != "cpu":
        yield from _pieces(problem, wanted.any(0).nonzero()[:, 0])
        return
    for head in wanted.any(-1).nonzero()[:, 0].tolist():
        (query,) = wanted[head].nonzero(as_tuple=True)
        for some in torch.split(query, max(1, _CPU_PAIRS // problem.kv)):
            yield Rows(range(head, head + 1), some)


def sampled_rows(problem: Problem, device: torch.device | str) -> list[Rows]:
    """All rows of a small Problem, and some rows of every head of a large one, in pieces.

    Always the same of a Problem and a kind of device: the first row and the last, those where the
    number of visible keys takes a turn, those beside the ends of tiles of 16–256 rows, and rows
    evenly spread between them. Where the turns and ends would be more than half, evenly spread
    ones of them.
    """
    device = torch.device(device)
    if samples_all_rows(problem, device):
        return list(all_rows(problem, device))
    # Half of them where faults hide, half evenly spread.
    count = max(_FEWEST_ROWS, _whole(device) // _work(problem, 1))
    last = problem.query - 1
    ends = {row for size in _TILES for row in (size - 1, size, last // size * size)}
    special = sorted({row for row in ends | _turns(problem, device) if 0 < row < last})
    chosen = {0, last, *_spread(special, count // 2 - 2)}
    others = [row for row in range(problem.query) if row not in chosen]
    chosen.update(_spread(others, count - len(chosen)))
    return list(_pieces(problem, torch.tensor(sorted(chosen), device=device)))


def samples_all_rows(problem: Problem, device: torch.device | str) -> bool:
    """Return whether ``sampled`` takes all rows: the Problem is small, or has few rows."""
    few = problem.query <= _FEWEST_ROWS
    return few or _work(problem, problem.query) <= _whole(torch.device(device))


def _whole(device: torch.device) -> int:
    return _CPU_WHOLE if device.type == "cpu" else _GPU_WHOLE


def _work(problem: Problem, rows: int) -> int:
    """Multiplications of that many rows of every head."""
    softmax = problem.operation == "softmax"
    width = 1 if softmax else problem.head_dim + problem.value_dim
    return problem.batch * problem.heads * rows * problem.kv * width


def _spread(of: list[int], count: int) -> list[int]:
    """``count`` of the numbers, or all, evenly spread."""
    if len(of) <= count:
        return of
    return [of[(2 * i + 1) * len(of) // (2 * count)] for i in range(count)]


def _turns(problem: Problem, device: torch.device) -> set[int]:
    """Rows at which the number of visible keys, of any head, does not go on as it did."""
    if problem.operation == "softmax":
        return set()
    mask, every = problem.mask_mod(str(device)), range(problem.kv)
    heads = range(problem.batch), range(problem.heads)
    pairs = _CPU_PAIRS if device.type == "cpu" else _GPU_PAIRS
    step = max(1, pairs // (problem.kv * problem.batch * problem.heads))
    counts = []
    for start in range(0, problem.query, step):
        rows = range(start, min(start + step, problem.query))
        seen = call_mask(mask, Indices.of(*heads, rows, every, device))
        number = seen.sum(-1) * (problem.kv // seen.shape[-1])
        counts.append(number.expand(*number.shape[:2], len(rows)).flatten(0, 1))
    # A turn is where the second difference is not 0: a mask starts, stops or jumps.
    # A mask may agree between heads in one part and not in another.
    most = max(len(part) for part in counts)
    growth = torch.cat([part.expand(most, -1) for part in counts], dim=-1).diff(dim=-1)
    turns = (growth.diff(dim=-1) != 0).any(0).nonzero().flatten().tolist()
    return {row + beside for row in turns for beside in (1, 2)}  # the last before, the first after


def _pieces(problem: Problem, query: Tensor, *, few_arrays: bool = False) -> Iterator[Rows]:
    """Rows ``query`` of every head, in pieces that fit into memory, on the device of ``query``.

    Args:
        few_arrays: As of ``all_rows``.
    """
    most = _CPU_PAIRS if query.device.type == "cpu" else _GPU_PAIRS
    # The largest of what the bounds multiply out: a row by its keys, or by its values.
    # All heads of few rows, or few heads of all rows, whichever fits.
    width = max(problem.kv, problem.value_dim)
    step = min(len(query), max(1, most // width))
    together = max(1, most // (width * step)) if step == len(query) else 1
    if few_arrays and step < len(query):
        # The same rows of several heads; arrays of keys, which are fewer of each, stay smaller.
        together = max(1, min(_FEW_ARRAYS, step // (problem.head_dim + problem.value_dim)))
    count = problem.batch * problem.heads
    for start in range(0, count, together):
        for first in range(0, len(query), step):
            yield Rows(range(start, min(start + together, count)), query[first : first + step])


def row_indices(problem: Problem, rows: Rows) -> Iterator[tuple[slice, Indices]]:
    """Yield where the rows lie, one sequence at a time: a slice of the heads, and indices."""
    device, first = rows.query.device, rows.heads.start
    for b in range(first // problem.heads, (rows.heads.stop - 1) // problem.heads + 1):
        start = max(first, b * problem.heads)
        stop = min(rows.heads.stop, (b + 1) * problem.heads)
        heads = torch.arange(start - b * problem.heads, stop - b * problem.heads, device=device)
        at = Indices(
            b=torch.full((1, 1, 1, 1), b, device=device),
            h=heads.view(1, -1, 1, 1),
            q_idx=rows.query.view(1, 1, -1, 1),
            kv_idx=torch.arange(problem.kv, device=device).view(1, 1, 1, -1),
        )
        yield slice(start - first, stop - first), at


def score_slopes(inputs: Inputs, known: Conditions) -> Tensor:
    """The score mod's derivative at the products, ``(heads, rows, kv)``; 1 where there is none.

    A central difference of the original callable: its relative error is some 2^-35 of a smooth mod.
    Of a sink 1, as without a mod.
    """
    if not known.has_score_mod:
        return torch.ones_like(known.products)
    kv = inputs.problem.kv
    products = known.products[..., :kv]
    step = _STEP * products.abs().clamp(min=1.0)
    ends = [_scored(inputs, products + sign * step, known.rows) for sign in (1, -1)]
    slope = torch.where(known.seen[..., :kv], (ends[0] - ends[1]) / (2 * step), 0.0)
    return torch.nn.functional.pad(slope, (0, 1), value=1.0) if known.has_sink else slope


def _scored(inputs: Inputs, products: Tensor, rows: Rows) -> Tensor:
    """Scores of the rows, by the original score mod."""
    mod = inputs.problem.score_mod(str(inputs.device))
    scores = torch.empty_like(products)
    for part, at in row_indices(inputs.problem, rows):
        # A copy goes in: a score mod may write to what it is given.
        scores[part] = call_score_mod(mod, products[part][None].clone(), at)[0]
    return scores


def _sinks(sink: Tensor, rows: Rows) -> Tensor:
    """Each row's own, float64 ``(heads, rows, 1)``."""
    heads = torch.arange(rows.heads.start, rows.heads.stop, device=sink.device) % len(sink)
    return sink.double()[heads, None, None].expand(-1, len(rows.query), 1)


def _promoted(inputs: Inputs, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """The float64 q of the rows, and k and v of their key heads, ``(heads, …, dim)``."""
    problem, device = inputs.problem, inputs.device
    # Only the key heads of these rows are promoted to float64.
    heads = torch.arange(rows.heads.start, rows.heads.stop, device=device)
    key_heads = heads // problem.group  # batch · heads + head, the same with kv_heads
    # Promoted first: not every device picks rows of fp8's numbers.
    q = inputs.q.flatten(0, 1)[rows.heads.start : rows.heads.stop].double()[:, rows.query]
    # Of Python's numbers: a GPU would be waited for.
    first, last = rows.heads.start // problem.group, (rows.heads.stop - 1) // problem.group + 1
    k, v = (x.flatten(0, 1)[first:last].double()[key_heads - first] for x in (inputs.k, inputs.v))
    if inputs.descale is None:
        return q, k, v
    scales = (inputs.descale.q, inputs.descale.k, inputs.descale.v)
    of_q, of_k, of_v = (x.flatten()[key_heads].double()[:, None, None] for x in scales)
    return q * of_q, k * of_k, v * of_v


def _empty(inputs: Inputs, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """The q, k and v of a softmax: their last axis is 0."""
    heads, kv = len(rows.heads), inputs.problem.kv
    q, k, v = (
        torch.empty((heads, length, 0), dtype=torch.float64, device=inputs.device)
        for length in (len(rows.query), kv, kv)
    )
    return q, k, v


def _at_rows(x: Tensor, rows: Rows) -> Tensor:
    """``x`` ``(batch, heads, query, …)`` at the rows, ``(heads, rows, …)``."""
    return x.flatten(0, 1)[rows.heads.start : rows.heads.stop][:, rows.query]


def compute_gradient_conditions(inputs: Inputs, truth: Outputs, rows: Rows) -> GradientConditions:
    """The GradientConditions of ``rows``, on the inputs' device.

    Args:
        truth: The oracle's result on them, where ``out`` and ``lse`` are taken from.
        rows: Which rows; their query indices may lie on any device.
    """
    known = compute_conditions(inputs, truth, rows)
    dout, dlse = (_at_rows(x, known.rows) for x in inputs.loss())
    alive = known.seen.any(-1)
    dlse = torch.where(alive, dlse, 0.0)
    delta = torch.where(alive, (dout * known.out).sum(-1), 0.0)
    value_products = dout @ known.v.mT
    # P from the row's own maximum: exp(score − LSE) would lose more digits.
    shares = torch.exp(known.scores - known.maximum[..., None])
    shares = shares / torch.where(alive, known.total, 1.0)[..., None]
    slope = autograd_slopes(inputs, known)
    dx = shares * (value_products - (delta - dlse)[..., None]) * slope
    dx = torch.where(known.seen, dx, 0.0)
    return GradientConditions(
        known=known,
        dout=dout,
        dlse=dlse,
        delta=delta,
        value_products=value_products,
        slope=slope,
        dx=dx,
        dq=known.scale * (dx @ known.k),
    )


def autograd_slopes(inputs: Inputs, known: Conditions) -> Tensor:
    """The score mod's derivative at the products, by torch's autograd; 0 where not seen.

    ``(heads, rows, kv)``; 1 where there is no mod, and of a sink.
    """
    if not known.has_score_mod:
        return known.seen.to(torch.float64)
    kv = inputs.problem.kv
    products, seen = known.products[..., :kv], known.seen[..., :kv]
    mod, numbers = inputs.problem.score_mod(str(inputs.device)), Float64(inputs.device)
    slope = torch.empty_like(products)
    for part, at in row_indices(inputs.problem, known.rows):
        slope[part] = numbers.score_slope(mod, products[part][None], at)[0]
    slope = torch.where(seen, slope, 0.0)
    return torch.nn.functional.pad(slope, (0, 1), value=1.0) if known.has_sink else slope

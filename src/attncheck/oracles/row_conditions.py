"""Exact quantities of rows that the bounds need, in float64, and the choice of rows.

The mask and the score mod are the original callables, as in all oracles. Unlike the oracles this
module holds every key of its rows at once, so rows come in pieces.
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

# (row, key) pairs of one piece. A bound holds some twenty float64 arrays of them, 80 MB on a CPU,
# 2.7 GB on a GPU, and up to ten more for each further arithmetic.
_CPU_PAIRS, _GPU_PAIRS = 2**19, 2**24
# Pieces are up to this many times larger if only three such arrays are held: with smaller pieces a
# GPU waits for Python.
_FEW_ARRAYS = 4

# Multiplications of q·k and P·V up to which all rows are sampled: on a CPU 4 heads of 512 · 512 at
# 64 dimensions, on a GPU 4 of 2048 · 2048 at 128.
_CPU_WHOLE, _GPU_WHOLE = 2**27, 2**32
_FEWEST_ROWS = 32  # Rows of each head to sample at least.
_TILES = (16, 32, 64, 128, 256)  # Usual numbers of rows in a tile, at whose ends rows are sampled.

_STEP = 2.0**-17  # Step of a difference quotient, about the cube root of float64's unit roundoff.


def compute_conditions(inputs: Inputs, truth: Outputs, rows: Rows) -> Conditions:
    """Return the Conditions of ``rows``, on the inputs' device.

    Args:
        truth: The oracle's result for ``inputs``, from which ``out`` and ``lse`` are taken.
        rows: The rows; their query indices may lie on any device.
    """
    problem = inputs.problem
    rows = Rows(rows.heads, rows.query.to(inputs.device))
    if problem.operation == "softmax":
        assert inputs.x is not None, "Inputs of a softmax have their scores"
        q, k, v = _empty_operands(inputs, rows)
        products = _at_rows(inputs.x, rows).double()
        scores, by_mask = products, torch.ones_like(products, dtype=torch.bool)
    else:
        q, k, v = _promote(inputs, rows)
        products = (q @ k.mT).mul_(problem.scale)
        scores, by_mask = products, mask_visibility(problem, rows)
        if problem.score != NONE:
            scores = _score(inputs, products, rows)
        # Rows that see a non-finite number have no bound; others must not be affected by it.
        k, v = (x.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0) for x in (k, v))
    # For the bounds a sink is one more key, whose q·k and value are 0.
    if inputs.sink is not None:
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, 1)) for x in (k, v))
        products = torch.nn.functional.pad(products, (0, 1))
        scores = torch.cat([scores, _row_sinks(inputs.sink, rows)], -1)
    attended = by_mask & ~torch.isneginf(scores)
    unmodified = scores is products
    if not unmodified:
        products = torch.where(by_mask & ~torch.isneginf(products), products, 0.0)
    # Passes over memory are the cost: skip those for hidden keys if no key is hidden.
    if bool(attended.all()):
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
        products=scores if unmodified else products,
        scores=scores,
        seen=attended,
        maximum=maximum,
        total=weights.sum(-1),
        out=_at_rows(truth.out, rows),
        lse=_at_rows(truth.lse, rows),
        given_scores=problem.operation == "softmax",
        has_score_mod=problem.score != NONE,
        has_sink=problem.sink,
    )


def weigh_rows(inputs: Inputs, truth: Outputs, rows: Rows) -> WeightedRows:
    """Return the weights of ``rows``, for attention without a score mod and without a sink.

    These are the parts of ``compute_conditions`` that row sums need, in fewer passes over all
    pairs; keys after the last one that any of the rows sees are left out.

    Args:
        truth: The oracle's result for ``inputs``, finite.
        rows: The rows; their query indices may lie on any device.
    """
    problem = inputs.problem
    rows = Rows(rows.heads, rows.query.to(inputs.device))
    (q, k, v), hidden = _promote(inputs, rows), None
    keys = problem.kv
    if problem.mask != FULL:
        seen = mask_visibility(problem, rows)
        keys = _last_seen(seen) + 1
        hidden = seen[..., :keys].logical_not_()
    # Scaling within the product saves a pass.
    scores = torch.baddbmm(q.new_empty(()), q, k[:, :keys].mT, beta=0, alpha=problem.scale)
    if hidden is not None:
        scores.masked_fill_(hidden, -math.inf)
    least, maximum = torch.aminmax(scores, dim=-1)
    # Infinite q or k may hide keys too.
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
    """Return the last key that any row sees; 0 if none sees any."""
    some = seen.flatten(0, -2).any(0)
    return int((some * torch.arange(len(some), device=some.device)).max())


def mask_visibility(problem: Problem, rows: Rows) -> Tensor:
    """Return the mask's visibility of the rows, bool ``(heads, rows, kv)``; True for a softmax.

    As in Conditions, a sink is the last key.
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
    """Yield all rows of a Problem, in pieces that fit into memory.

    Args:
        few_arrays: Whether the pieces are for ``weigh_rows``, which holds fewer arrays than bounds.
    """
    return _pieces(problem, torch.arange(problem.query, device=device), few_arrays=few_arrays)


def some_rows(problem: Problem, wanted: Tensor) -> Iterator[Rows]:
    """Yield the ``wanted`` rows, ``(heads, query)`` bool, in pieces that fit into memory.

    On a GPU a row wanted in one head is yielded for every head: pieces of one head each would not
    keep it busy.
    """
    if wanted.device.type != "cpu":
        yield from _pieces(problem, wanted.any(0).nonzero()[:, 0])
        return
    for head in wanted.any(-1).nonzero()[:, 0].tolist():
        (query,) = wanted[head].nonzero(as_tuple=True)
        for some in torch.split(query, max(1, _CPU_PAIRS // problem.kv)):
            yield Rows(range(head, head + 1), some)


def sampled_rows(problem: Problem, device: torch.device | str) -> list[Rows]:
    """Return all rows of a small Problem, and some rows of every head of a large one, in pieces.

    Rows depend only on the Problem and the type of device: the first and the last row, rows where
    the number of visible keys stops growing evenly, rows at the ends of tiles of 16–256 rows, and
    other rows evenly spread. If turns and ends are more than half, evenly spread ones are taken.
    """
    device = torch.device(device)
    if samples_all_rows(problem, device):
        return list(all_rows(problem, device))
    # Half of the rows are where faults are likely, half evenly spread.
    count = max(_FEWEST_ROWS, _largest_full_work(device) // _work(problem, 1))
    last = problem.query - 1
    ends = {row for size in _TILES for row in (size - 1, size, last // size * size)}
    special = sorted({row for row in ends | _turns(problem, device) if 0 < row < last})
    chosen = {0, last, *_pick_evenly(special, count // 2 - 2)}
    others = [row for row in range(problem.query) if row not in chosen]
    chosen.update(_pick_evenly(others, count - len(chosen)))
    return list(_pieces(problem, torch.tensor(sorted(chosen), device=device)))


def samples_all_rows(problem: Problem, device: torch.device | str) -> bool:
    """Return whether ``sampled_rows`` takes all rows: the Problem is small, or has few rows."""
    few = problem.query <= _FEWEST_ROWS
    return few or _work(problem, problem.query) <= _largest_full_work(torch.device(device))


def _largest_full_work(device: torch.device) -> int:
    return _CPU_WHOLE if device.type == "cpu" else _GPU_WHOLE


def _work(problem: Problem, rows: int) -> int:
    """Return the number of multiplications for ``rows`` rows of every head."""
    softmax = problem.operation == "softmax"
    width = 1 if softmax else problem.head_dim + problem.value_dim
    return problem.batch * problem.heads * rows * problem.kv * width


def _pick_evenly(numbers: list[int], count: int) -> list[int]:
    """Return ``count`` evenly spread numbers of the list, or all of them if it is shorter."""
    if len(numbers) <= count:
        return numbers
    return [numbers[(2 * i + 1) * len(numbers) // (2 * count)] for i in range(count)]


def _turns(problem: Problem, device: torch.device) -> set[int]:
    """Return rows around which, in any head, the number of visible keys changes its growth."""
    if problem.operation == "softmax":
        return set()
    mask, all_keys = problem.mask_mod(str(device)), range(problem.kv)
    heads = range(problem.batch), range(problem.heads)
    pairs = _CPU_PAIRS if device.type == "cpu" else _GPU_PAIRS
    step = max(1, pairs // (problem.kv * problem.batch * problem.heads))
    counts = []
    for start in range(0, problem.query, step):
        rows = range(start, min(start + step, problem.query))
        seen = call_mask(mask, Indices.of(*heads, rows, all_keys, device))
        number = seen.sum(-1) * (problem.kv // seen.shape[-1])
        counts.append(number.expand(*number.shape[:2], len(rows)).flatten(0, 1))
    # A turn is where the second difference is not 0: a mask starts, stops or jumps. Parts of a
    # mask may differ in whether all heads agree, so they are expanded to the most heads.
    most = max(len(part) for part in counts)
    growth = torch.cat([part.expand(most, -1) for part in counts], dim=-1).diff(dim=-1)
    turns = (growth.diff(dim=-1) != 0).any(0).nonzero().flatten().tolist()
    return {row + offset for row in turns for offset in (1, 2)}  # the last before, the first after


def _pieces(problem: Problem, query: Tensor, *, few_arrays: bool = False) -> Iterator[Rows]:
    """Yield rows ``query`` of every head, in pieces that fit into memory, on ``query``'s device.

    Args:
        few_arrays: See ``all_rows``.
    """
    most = _CPU_PAIRS if query.device.type == "cpu" else _GPU_PAIRS
    # The bounds' largest arrays are rows by keys, or rows by value columns. A piece has several
    # heads if all rows of a head fit into it, else some rows of one head.
    width = max(problem.kv, problem.value_dim)
    step = min(len(query), max(1, most // width))
    together = max(1, most // (width * step)) if step == len(query) else 1
    if few_arrays and step < len(query):
        # Some rows of several heads; arrays of q, k and v have to stay smaller than those of pairs.
        together = max(1, min(_FEW_ARRAYS, step // (problem.head_dim + problem.value_dim)))
    count = problem.batch * problem.heads
    for start in range(0, count, together):
        for first in range(0, len(query), step):
            yield Rows(range(start, min(start + together, count)), query[first : first + step])


def row_indices(problem: Problem, rows: Rows) -> Iterator[tuple[slice, Indices]]:
    """Yield a slice of ``rows.heads`` and the rows' indices, one sequence at a time."""
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
    """Return the score mod's derivative at the products, ``(heads, rows, kv)``; 1 without a mod.

    It is a central difference of the original callable, with a relative error of some 2^-35 for a
    smooth mod. For a sink it is 1.
    """
    if not known.has_score_mod:
        return torch.ones_like(known.products)
    kv = inputs.problem.kv
    products = known.products[..., :kv]
    step = _STEP * products.abs().clamp(min=1.0)
    ends = [_score(inputs, products + sign * step, known.rows) for sign in (1, -1)]
    slope = torch.where(known.seen[..., :kv], (ends[0] - ends[1]) / (2 * step), 0.0)
    return torch.nn.functional.pad(slope, (0, 1), value=1.0) if known.has_sink else slope


def _score(inputs: Inputs, products: Tensor, rows: Rows) -> Tensor:
    """Return the scores of the rows by the original score mod."""
    mod = inputs.problem.score_mod(str(inputs.device))
    scores = torch.empty_like(products)
    for part, at in row_indices(inputs.problem, rows):
        # A score mod may write to its argument, so it gets a copy.
        scores[part] = call_score_mod(mod, products[part][None].clone(), at)[0]
    return scores


def _row_sinks(sink: Tensor, rows: Rows) -> Tensor:
    """Return each row's sink, float64 ``(heads, rows, 1)``."""
    heads = torch.arange(rows.heads.start, rows.heads.stop, device=sink.device) % len(sink)
    return sink.double()[heads, None, None].expand(-1, len(rows.query), 1)


def _promote(inputs: Inputs, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Return the float64 q of the rows, and k and v of their key heads, ``(heads, …, dim)``."""
    problem, device = inputs.problem, inputs.device
    # Only the key heads of these rows are promoted to float64.
    heads = torch.arange(rows.heads.start, rows.heads.stop, device=device)
    key_heads = heads // problem.group  # batch · heads + head, the same with kv_heads
    # Promoted before indexing, which not every device supports for fp8.
    q = inputs.q.flatten(0, 1)[rows.heads.start : rows.heads.stop].double()[:, rows.query]
    # Python numbers as bounds: reading them from a tensor would wait for the GPU.
    first, last = rows.heads.start // problem.group, (rows.heads.stop - 1) // problem.group + 1
    k, v = (x.flatten(0, 1)[first:last].double()[key_heads - first] for x in (inputs.k, inputs.v))
    if inputs.descale is None:
        return q, k, v
    scales = (inputs.descale.q, inputs.descale.k, inputs.descale.v)
    of_q, of_k, of_v = (x.flatten()[key_heads].double()[:, None, None] for x in scales)
    return q * of_q, k * of_k, v * of_v


def _empty_operands(inputs: Inputs, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Return the q, k and v of a softmax, which have no columns."""
    heads, kv = len(rows.heads), inputs.problem.kv
    q, k, v = (
        torch.empty((heads, length, 0), dtype=torch.float64, device=inputs.device)
        for length in (len(rows.query), kv, kv)
    )
    return q, k, v


def _at_rows(x: Tensor, rows: Rows) -> Tensor:
    """Return the rows of ``x``, ``(batch, heads, query, …)``, as ``(heads, rows, …)``."""
    return x.flatten(0, 1)[rows.heads.start : rows.heads.stop][:, rows.query]


def compute_gradient_conditions(inputs: Inputs, truth: Outputs, rows: Rows) -> GradientConditions:
    """Return the GradientConditions of ``rows``, on the inputs' device.

    Args:
        truth: The oracle's result for ``inputs``, from which ``out`` and ``lse`` are taken.
        rows: The rows; their query indices may lie on any device.
    """
    known = compute_conditions(inputs, truth, rows)
    dout, dlse = (_at_rows(x, known.rows) for x in inputs.loss())
    alive = known.seen.any(-1)
    dlse = torch.where(alive, dlse, 0.0)
    delta = torch.where(alive, (dout * known.out).sum(-1), 0.0)
    value_products = dout @ known.v.mT
    # P is computed from the row's maximum: exp(score − LSE) would lose more digits.
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
    """Return the score mod's derivative at the products, by torch's autograd; 0 where not seen.

    ``(heads, rows, kv)``; 1 without a mod, and for a sink.
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

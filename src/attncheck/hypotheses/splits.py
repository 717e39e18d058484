"""Faults of splits of the keys and of how they are merged."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from attncheck.hypotheses.model import Variant, attention, model
from attncheck.hypotheses.tiles import tile_sight
from attncheck.outputs import Outputs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from attncheck.hypotheses.given import Given
    from attncheck.problem import Problem

_LOG2E = math.log2(math.e)
_COUNTS = (2, 3, 4, 7, 8)


def _splits(given: Given) -> Iterator[tuple[dict[str, int], Tensor, Tensor]]:
    """Ways to cut the keys: what each part gives, ``(parts, batch, heads, rows[, value_dim])``.

    The last part is the sink, where there is one.
    """
    kv = given.problem.kv
    cuts: dict[tuple[int, ...], tuple[int, int]] = {}
    for size in given.key_tiles:
        blocks = -(-kv // size)
        for count in dict.fromkeys((*_COUNTS, blocks)):
            if 1 < count <= blocks:
                edges = tuple(min(kv, blocks * n // count * size) for n in range(count + 1))
                cuts.setdefault(edges, (count, size))
        if blocks > 1:  # a first tile, and all others
            cuts.setdefault((0, size, kv), (2, size))
    for edges, (count, size) in cuts.items():
        outs, lses = [], []
        for start, stop in pairwise(edges):
            part = given.softmax(given.z[..., start:stop], given.v[:, :, start:stop], sink=None)
            outs.append(part.out)
            lses.append(part.lse)
        if given.sink is not None:
            lses.append(given.sink.expand(lses[0].shape))
            outs.append(torch.zeros_like(outs[0]))
        yield {"splits": count, "tile": size}, torch.stack(outs), torch.stack(lses)


def _merged(outs: Tensor, lses: Tensor, base: float = 1.0) -> Outputs:
    """Merged by LSE, times ``base``."""
    lse = (lses * base).logsumexp(0)
    shift = torch.where(lse == -math.inf, 0.0, lse)
    weights = (lses * base - shift).exp()
    return Outputs((weights[..., None] * outs).sum(0), lse)


def _more_keys(problem: Problem) -> bool:
    return problem.operation == "attention" and problem.kv > 1


def _averaged_at_all(problem: Problem) -> bool:
    return _more_keys(problem) or (problem.operation == "attention" and problem.sink)


@model(
    "splits-averaged",
    "splits of the keys are averaged, not weighted by their sums",
    group="splits",
    applies=_averaged_at_all,
)
def _averaged(given: Given) -> Iterator[Variant]:
    exact = given.parts.lse
    if given.sink is not None:  # of one split, too: the sink has no part in what is averaged
        yield Variant(
            outputs=Outputs(given.softmax(given.z, sink=None).out, exact), parameters={"splits": 1}
        )
    for parameters, outs, lses in _splits(given):
        # The sink is one of them, or has no part in it.
        for some in dict.fromkeys((len(outs), parameters["splits"])):
            there = lses[:some] != -math.inf
            alive = there.sum(0).clamp(min=1)[..., None]
            for out in (outs[:some].mean(0), outs[:some].sum(0) / alive):
                for lse in (exact, lses[:some].mean(0)):
                    yield Variant(outputs=Outputs(out, lse), parameters=parameters)


@model(
    "split-merge-base",
    "splits of the keys are merged by powers of another base than their LSE is of",
    group="splits",
    applies=_more_keys,
)
def _base(given: Given) -> Iterator[Variant]:
    exact = given.parts.lse
    for parameters, outs, lses in _splits(given):
        for base in (_LOG2E, 1.0 / _LOG2E):
            found = _merged(outs, lses, base)
            largest = lses.amax(0)
            safe = torch.where(largest == -math.inf, 0.0, largest)
            mixed = safe + ((lses - safe) * base).exp().sum(0).log()
            assert found.lse is not None, "as it was made"
            for lse in (found.lse, found.lse / base, mixed, exact):
                yield Variant(outputs=Outputs(found.out, lse), parameters=parameters)


@model(
    "lse-of-one-split",
    "LSE is that of one split of the keys",
    group="splits",
    applies=_more_keys,
)
def _one(given: Given) -> Iterator[Variant]:
    out = given.parts.out
    for parameters, _, lses in _splits(given):
        for lse in (lses[0], lses[-1], lses.amax(0)):
            yield Variant(outputs=Outputs(out, lse), parameters=parameters)


@model(
    "split-dropped",
    "a split of the keys is left out",
    group="splits",
    applies=_more_keys,
    order=1,
)
def _dropped(given: Given) -> Iterator[Variant]:
    for parameters, outs, lses in _splits(given):
        for gone in range(parameters["splits"]):
            left = [n for n in range(len(outs)) if n != gone]
            found = _merged(outs[left], lses[left])
            yield Variant(outputs=found, parameters=parameters | {"number": gone})


@model(
    "empty-split-nan",
    "a split of the keys in which a row sees none makes it NaN",
    group="splits",
    applies=attention,
)
def _nan(given: Given) -> Iterator[Variant]:
    exact = given.parts.outputs
    assert exact.lse is not None, "of attention"
    for parameters, _, lses in _splits(given):
        empty = (lses == -math.inf).any(0)
        out = torch.where(empty[..., None], math.nan, exact.out)
        for lse in (torch.where(empty, math.nan, exact.lse), exact.lse):
            yield Variant(outputs=Outputs(out, lse), parameters=parameters)
    for parameters, empty in _halves(given):
        out = torch.where(empty[..., None], math.nan, exact.out)
        yield Variant(
            outputs=Outputs(out, torch.where(empty, math.nan, exact.lse)), parameters=parameters
        )


def _halves(given: Given) -> Iterator[tuple[dict[str, int], Tensor]]:
    """Rows that see nothing in one half of a tile, its padding too: of any, or of one in sight."""
    for rows, size in given.tiles:
        count = -(-given.problem.kv // size)
        shape = (*given.shape[:3], count, 2, size // 2)
        pad = torch.zeros((*given.shape[:3], count * size - given.problem.kv), dtype=torch.bool)
        halves = torch.cat([given.seen, pad], -1).view(shape)
        sight = torch.cat([tile_sight(given, rows, size)[0], pad], -1).view(shape)
        visited = sight.flatten(-2).any(-1)
        blind = ~halves.any(-1).all(-1)
        for empty in (blind.any(-1), (blind & visited).any(-1)):
            yield {"splits": 2 * count, "tile": size}, empty

"""Explain a kernel's wrong result by fault models."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from attncheck.core.errors import AttncheckError
from attncheck.fault_models import FAULT_MODELS, ORDER, ExactAttention, FaultModel
from attncheck.fault_models.exact_attention import TRIED_TILES
from attncheck.judge.fault_explanation import (
    FaultExplanation,
    FaultPrediction,
    ObservedError,
    count_ties,
    rank_explanations,
    words_of,
)
from attncheck.records.record import TileMap
from attncheck.verify.allowances import deterministic_bounds, gradient_allowance

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from torch import Tensor

    from attncheck.core.declared_arithmetic import Arithmetic
    from attncheck.core.outputs import Outputs
    from attncheck.core.tensor_names import TensorName
    from attncheck.inputs.problem import Problem
    from attncheck.verify.evidence_builder import EvidenceBuilder
    from attncheck.verify.executor import Execution

MOST_CELLS = 16  # most cells of a map along each axis

_MOST_KEYS = 1024  # most keys of a problem that gets a map


def tile_map(call: ExactAttention, error: ObservedError) -> TileMap | None:
    """Return the map of a kernel's error; None where it is not finite, or has only one cell.

    With exact weights w of a row, the kernel's output is Σ (w + δ) v, and its row sum by LSE (1 if
    it gives none) is 1 + Σ δ. Of all δ that solve this, which are many for more keys than columns,
    the smallest is taken, by the pseudo-inverse ``[v 1]⁺``, once for a head.
    """
    problem = call.problem
    out, lse = error.got["out"], error.got.get("lse")
    if not call.whole or problem.kv > _MOST_KEYS or not error.wrong:
        return None
    exact = call.parts
    grown = torch.ones_like(exact.total)
    if lse is not None:
        grown = (lse - exact.lse).exp()
        # A row without keys has LSE −∞ on both sides, whose difference is NaN.
        grown = torch.where(exact.dead, 1.0, grown)
    moved = out * grown[..., None] - exact.out
    target = torch.cat([moved, (grown - 1.0)[..., None]], -1)
    v = call.v.expand(problem.batch, problem.heads, -1, -1)
    if not bool(target.isfinite().all()) or not bool(v.isfinite().all()):
        return None
    # Scale v to the column of ones: the pseudo-inverse drops relatively small singular values.
    unit = v.abs().amax(dim=(-2, -1), keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    columns = torch.cat([v / unit, torch.ones_like(v[..., :1])], -1)
    target = torch.cat([target[..., :-1] / unit, target[..., -1:]], -1)
    change = (target @ torch.linalg.pinv(columns)).abs().sum(dim=(0, 1))  # (rows, kv)
    tile = call.tiles[0] if len(call.tiles) == 1 else (1, 1)
    rows, keys = (_step(n, t) for n, t in zip(change.shape, tile, strict=True))
    values = _cells(change, rows, keys)
    one = len(values) * len(values[0]) == 1
    return None if one else TileMap(rows=rows, keys=keys, values=values)


def _step(size: int, tile: int) -> int:
    """Return the side of a cell: the fewest tiles such that ``MOST_CELLS`` cells cover ``size``."""
    tile = tile if tile < size else 1
    return tile * math.ceil(math.ceil(size / tile) / MOST_CELLS)


def _cells(change: Tensor, rows: int, keys: int) -> tuple[tuple[float, ...], ...]:
    """Return the sum in each cell, as a share of the largest, rounded to two digits."""
    sums = [
        [change[i : i + rows, j : j + keys].sum() for j in range(0, change.shape[1], keys)]
        for i in range(0, change.shape[0], rows)
    ]
    largest = max((float(cell) for line in sums for cell in line), default=0.0)
    unit = largest if largest > 0 else 1.0
    return tuple(tuple(float(f"{float(cell) / unit:.2g}") for cell in line) for line in sums)


NO_FIT = (AttncheckError, RuntimeError, IndexError, ValueError, TypeError, ArithmeticError)
"""Exceptions that a model may raise on a Problem that it does not suit."""

_AT_A_TIME = 2**17  # most (row, key) pairs that models predict; of larger problems some rows
_WHOLE = 2**19  # most pairs for models of a backward, which need all rows
_FEWEST_ROWS = 16


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Response:
    """A kernel's result in one call, compared with the exact one."""

    error: ObservedError
    call: ExactAttention
    arithmetic: Arithmetic


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Findings:
    """The fault models' explanations of a kernel's error on one Case."""

    ranking: list[FaultExplanation]  # models that explain any of the error, the best first
    tried: int  # number of models that were tried
    tiles: TileMap | None  # the size of the error by tiles
    # Whether all outputs except LSE are finite. Of NaN and infinities only the place is known, and
    # several models may have them there.
    finite: bool
    response: Response | None = None
    varies: bool = False  # whether two calls with different contents of free memory differ

    @property
    def equals(self) -> list[str]:
        """Return the names of models that explain all of the error equally well."""
        return [one.name for one in self.ranking[: count_ties(self.ranking)]]


Forms = dict[object, set[object]]
"""Forms of a model by their parameters that are words, each with the tiles that it may have."""


def judged_predictions(response: Response, model: FaultModel) -> list[tuple[FaultPrediction, bool]]:
    """Return every prediction of ``model`` for a problem, and whether all of the result agrees."""
    error, problem = response.error, response.call.problem
    of = "forward" if error.forward else "backward"
    if not model.applies(problem) or (error.proven and model.of != of):
        return []
    return [(one, error.agrees(one)) for one in _predictions(response.call, [model])]


def forms_of(fitting: Iterable[FaultPrediction], problem: Problem) -> Forms:
    """Return these forms by their words: numbers except a tile depend on the problem's sizes."""
    forms: Forms = {}
    for one in fitting:
        forms.setdefault(words_of(one.parameters), set()).update(_equivalent_tiles(one, problem))
    return forms


def _equivalent_tiles(one: FaultPrediction, problem: Problem) -> Iterable[object]:
    """Return the tiles that fit a form: if one holds all keys, every larger one fits as well.

    With splits the tile is None, since their number and their cuts depend on the length.
    """
    tile = None if "splits" in one.parameters else one.parameters.get("tile")
    if not isinstance(tile, int) or tile < problem.kv:
        return (tile,)
    return range(tile, max(tile, _MOST_KEYS) + 1, TRIED_TILES[0])


def form_tiles(response: Response, model: FaultModel, *, split: bool = True) -> dict[object, bool]:
    """Return each form of ``model`` with each of its tiles, and whether that fits the result.

    A form or tile that is missing predicts the exact result: without a padded last tile there is no
    fault in its tail, say.

    Args:
        split: Whether to include forms of a kernel that splits the keys.
    """
    tiles: dict[object, bool] = {}
    for one, fits in judged_predictions(response, model):
        if "splits" in one.parameters and not split:
            continue
        tile = one.parameters.get("tile")
        # Without a tile of keys, rows are an offset, which depends on the problem.
        rows = None if tile is None else one.parameters.get("rows")
        form = words_of(one.parameters), tile, rows
        tiles[form] = tiles.get(form, False) or fits
    return tiles


def explain(
    result: Execution,
    evidence: EvidenceBuilder,
    *,
    proven: bool = False,
    among: Collection[str] = FAULT_MODELS,
) -> Findings | None:
    """Return the fault models' findings on a result; None where it is right to the last bit.

    Args:
        proven: Whether to explain only errors beyond their bound.
    """
    problem = evidence.case.problem
    response = observed_error(result, evidence)
    error, call = response.error, response.call
    if proven and not error.proven:
        return None
    # Models of a backward need all rows at once, which takes too long for a large problem.
    if not error.wrong or (not error.forward and pair_count(problem) > _WHOLE):
        return None
    of = "forward" if error.forward else "backward"
    models = [m for m in map(FAULT_MODELS.__getitem__, among) if m.of == of and m.applies(problem)]
    ranking = rank_explanations(error, _predictions(call, models))
    tiles = tile_map(call, error) if error.forward else None
    # An LSE of −∞ is right where a row sees no key.
    finite = all(bool(x.isfinite().all()) for name, x in error.got.items() if name != "lse")
    return Findings(
        ranking=ranking, tried=len(models), tiles=tiles, finite=finite, response=response
    )


def passing_response(evidence: EvidenceBuilder, failing: Response) -> Response:
    """Return the exact result as a Response with twice the allowance, for a kernel that passed.

    Like the kernel's ``failing`` Response it has an LSE only if the kernel returns one.
    """
    exact, arithmetic = float64_tensors(evidence.truth), failing.arithmetic
    allowed = float64_tensors(deterministic_bounds(evidence.evidence, arithmetic))
    # A passing result says nothing of a tensor that the kernel does not return: where V is 1 out is
    # right with any scale, and the exact LSE would refute that the scale is wrong.
    passed = {"out", "lse"} & failing.error.got.keys()
    allowed = {name: 2 * bound for name, bound in allowed.items() if name in passed}
    error = ObservedError({name: exact[name] for name in allowed}, exact, allowed)
    return Response(error=error, call=ExactAttention(evidence.inputs), arithmetic=arithmetic)


def observed_error(result: Execution, evidence: EvidenceBuilder) -> Response:
    """Return a result compared with the exact one; only some rows of a large problem."""
    problem = evidence.case.problem
    got, exact = float64_tensors(result.outputs), float64_tensors(evidence.truth)
    allowed = float64_tensors(deterministic_bounds(evidence.evidence, result.arithmetic))
    if problem.backward:
        bounds = gradient_allowance(evidence.evidence, result.arithmetic, result.outputs).bounds
        allowed |= {name: bound.cpu() for name, bound in bounds.items()}
    # NaN in out makes every gradient NaN, which no model of a backward can explain.
    if not problem.backward or got["out"].isnan().any():
        got = {name: tensor for name, tensor in got.items() if name in ("out", "lse")}
    spacing = {name: torch.finfo(x.dtype).eps for name, x in result.outputs.tensors().items()}
    error = ObservedError(got, exact, allowed, spacing)
    rows = None if not error.forward else _rows(problem, got["out"], exact["out"], allowed["out"])
    if rows is not None:
        some = [_of_rows(tensors, rows) for tensors in (got, exact, allowed)]
        error = ObservedError(some[0], some[1], some[2], spacing)
    tiling = result.tiling
    tile = (tiling.block_query, tiling.block_kv) if tiling else None
    return Response(
        error=error,
        call=ExactAttention(evidence.inputs, rows=rows, tile=tile),
        arithmetic=result.arithmetic,
    )


def float64_tensors(outputs: Outputs) -> dict[TensorName, Tensor]:
    """Return outputs by name, on the CPU, in float64."""
    return {name: x.detach().cpu().double() for name, x in outputs.tensors().items()}


def _of_rows(tensors: dict[TensorName, Tensor], rows: Tensor) -> dict[TensorName, Tensor]:
    return {n: x[:, :, rows] for n, x in tensors.items() if n in {"out", "lse"}}


def pair_count(problem: Problem) -> int:
    """Return the (row, key) pairs of all heads."""
    return problem.batch * problem.heads * problem.query * problem.kv


def _rows(problem: Problem, got: Tensor, exact: Tensor, allowed: Tensor) -> Tensor | None:
    """Return the worst rows of a large problem and some evenly spaced others; None for all rows."""
    if pair_count(problem) <= _AT_A_TIME:
        return None
    most = max(_FEWEST_ROWS, _AT_A_TIME * problem.query // pair_count(problem))
    if most >= problem.query:
        return None
    off = ((got - exact).abs() / allowed.clamp(min=torch.finfo(torch.float32).tiny)).nan_to_num(
        nan=torch.inf
    )
    # Half of each, because a model must also fit rows where the kernel is right.
    worst = off.amax(dim=(0, 1, 3)).argsort(descending=True)[: most // 2]
    spread = torch.linspace(0, problem.query - 1, most - most // 2).long()
    return torch.tensor(sorted({*worst.tolist(), *spread.tolist()}))


def _predictions(call: ExactAttention, models: list[FaultModel]) -> Iterator[FaultPrediction]:
    """Yield the predictions of each model that suits this problem."""
    for model in models:
        with contextlib.suppress(*NO_FIT), torch.no_grad():
            for one in model.predictions(call):
                family = None if one.family is None else partial(_family_tensors, one.family)
                yield FaultPrediction(
                    name=model.id,
                    tensors=one.outputs.tensors(),
                    parameters=one.parameters,
                    order=ORDER[model.id],
                    family=family,
                    start=one.start,
                    parameter=one.parameter,
                    shown=one.shown,
                    free=one.free,
                    ties=one.ties,
                    rounds=model.family == "precision",
                )


def _family_tensors(family: Callable[[float], Outputs], size: float) -> dict[TensorName, Tensor]:
    return family(size).tensors()

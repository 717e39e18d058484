"""What fault models say of a result that is there."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from attncheck.errors import AttncheckError
from attncheck.examine.allowances import certain
from attncheck.examine.gradient_allowances import gradient_allowance
from attncheck.examine.tile_map import tile_map
from attncheck.hypotheses import MODELS, ORDER, Given
from attncheck.judge.diagnose import Error, Explained, Hypothesis
from attncheck.judge.diagnosis_ranking import ranked

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from torch import Tensor

    from attncheck.examine.evidence import Evidence
    from attncheck.examine.executor import Execution
    from attncheck.outputs import Outputs
    from attncheck.problem import Problem
    from attncheck.record import TileMap
    from attncheck.tensor_names import TensorName

__all__ = ["NO_FIT", "Findings", "consistent", "explained", "pairs", "tensors_of"]

NO_FIT = (AttncheckError, RuntimeError, IndexError, ValueError, TypeError)
"""What a model may raise that cannot be asked of a Problem."""

_AT_A_TIME = 2**17  # pairs that a model predicts: of more, some rows
_WHOLE = 2**19  # of a backward, which needs all rows
_FEWEST_ROWS = 16


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Findings:
    """What fault models say of a kernel on one Case.

    Attributes:
        ranking: All that explain anything, the best first.
        tried: How many there were.
        tiles: Where the error is by tiles.
        finite: Whether all that it gave is, LSE aside. NaN and infinities say where they are, and
            no more: several models may have them there.
    """

    ranking: list[Explained]
    tried: int
    tiles: TileMap | None
    finite: bool


def explained(result: Execution, evidence: Evidence, *, proven: bool = False) -> Findings | None:
    """What fault models say of what a kernel gave; None where it is right to the last bit.

    Args:
        result: What it gave, the tiling and the arithmetic that it declares.
        evidence: The Case, its exact result and what is allowed.
        proven: Whether only what is beyond its bound is asked about.
    """
    problem = evidence.case.problem
    error, given = _beside(result, evidence)
    if proven and not error.proven:
        return None
    if not error.wrong or (not error.forward and pairs(problem) > _WHOLE):
        return None
    of = "forward" if error.forward else "backward"
    models = [m for m in MODELS.values() if m.of == of and m.applies(problem)]
    ranking = ranked(error, _hypotheses(given, models))
    tiles = tile_map(given, error.got, error) if error.forward else None
    finite = all(bool(x.isfinite().all()) for name, x in error.got.items() if name != "lse")
    return Findings(ranking=ranking, tried=len(models), tiles=tiles, finite=finite)


def consistent(result: Execution, evidence: Evidence, among: Collection[str]) -> set[str]:
    """Which fault models give what a kernel gave, be it wrong or right.

    Arguments as of ``explained``. One that says nothing of the Problem says that it is right.
    """
    error, given = _beside(result, evidence)
    if error.wrong and not error.forward and pairs(evidence.case.problem) > _WHOLE:
        return set(among)
    found = set()
    for model in (MODELS[name] for name in among):
        applies = model.applies(evidence.case.problem)
        forms = list(_hypotheses(given, [model])) if applies else []
        if any(error.agrees(one) for one in forms) or not (forms or error.proven):
            found.add(model.id)
    return found


def _beside(result: Execution, evidence: Evidence) -> tuple[Error, Given]:
    """What it gave beside the exact result: of a large problem some rows."""
    problem = evidence.case.problem
    got, exact = tensors_of(result.outputs), tensors_of(evidence.truth)
    allowed = tensors_of(certain(evidence, result.arithmetic))
    if problem.backward:
        bounds = gradient_allowance(evidence, result.arithmetic, result.outputs).bounds
        allowed |= {name: bound.cpu() for name, bound in bounds.items()}
    if not problem.backward or got["out"].isnan().any():
        got = {name: tensor for name, tensor in got.items() if name in ("out", "lse")}
    given_as = result.outputs.tensors()
    spacing = {name: torch.finfo(x.dtype).eps for name, x in given_as.items()}
    error = Error(got, exact, allowed, spacing)
    rows = None if not error.forward else _rows(problem, got["out"], exact["out"], allowed["out"])
    if rows is not None:
        some = [_of_rows(tensors, rows) for tensors in (got, exact, allowed)]
        error = Error(some[0], some[1], some[2], spacing)
    tiling = result.tiling
    tile = (tiling.block_query, tiling.block_kv) if tiling else None
    return error, Given(evidence.inputs, rows=rows, tile=tile)


def tensors_of(outputs: Outputs) -> dict[TensorName, Tensor]:
    """On the CPU, in float64."""
    return {name: x.detach().cpu().double() for name, x in outputs.tensors().items()}


def _of_rows(tensors: dict[TensorName, Tensor], rows: Tensor) -> dict[TensorName, Tensor]:
    return {n: x[:, :, rows] for n, x in tensors.items() if n in {"out", "lse"}}


def pairs(problem: Problem) -> int:
    """(row, key) pairs of all heads."""
    return problem.batch * problem.heads * problem.query * problem.kv


def _rows(problem: Problem, got: Tensor, exact: Tensor, allowed: Tensor) -> Tensor | None:
    """Of a large problem the worst rows and some of all others; None for every row."""
    if pairs(problem) <= _AT_A_TIME:
        return None
    most = max(_FEWEST_ROWS, _AT_A_TIME * problem.query // pairs(problem))
    if most >= problem.query:
        return None
    off = ((got - exact).abs() / allowed.clamp(min=torch.finfo(torch.float32).tiny)).nan_to_num(
        nan=torch.inf
    )
    worst = off.amax(dim=(0, 1, 3)).argsort(descending=True)[: most // 2]
    spread = torch.linspace(0, problem.query - 1, most - most // 2).long()
    return torch.tensor(sorted({*worst.tolist(), *spread.tolist()}))


def _hypotheses(given: Given, models: list[Any]) -> Iterator[Hypothesis]:
    """What each model predicts; what it cannot be asked of this problem is left out."""
    for model in models:
        with contextlib.suppress(*NO_FIT), torch.no_grad():
            for one in model.variants(given):
                family = one.family
                yield Hypothesis(
                    name=model.id,
                    tensors=one.outputs.tensors(),
                    parameters=one.parameters,
                    order=ORDER[model.id],
                    family=None if family is None else _family(family),
                    start=one.start,
                    parameter=one.parameter,
                    free=one.free,
                )


def _family(family: Any) -> Any:
    return lambda size: family(size).tensors()

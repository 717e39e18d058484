"""Does an expression say what its callable says? Asked on sampled indices."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import torch

from attncheck.draws import Draws
from attncheck.errors import TraceError
from attncheck.mods.expression import Expression
from attncheck.mods.places import described, failed_at
from attncheck.source_files import brief

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from attncheck.mods.expression import Captured
    from attncheck.mods.spec import Dimensions

__all__ = ["disagreements"]


def disagreements(
    expression: Expression,
    mod: Callable[..., Tensor],
    dimensions: Dimensions,
    *,
    samples: int = 1024,
    seed: int = 0,
    device: str = "cpu",
) -> int:
    """At how many sampled indices ``expression`` and ``mod`` differ (NaN equals NaN).

    Sampled are the corners of the index ranges, ``samples`` draws, half of them near the
    diagonal, and the places where a comparison with one of the expression's whole numbers (of a
    captured tensor: the first few) can change: kv_idx or kv_idx − q_idx next to ± the number.
    Scores are compared exactly, in float64.

    Args:
        expression: What was traced.
        mod: What it was traced from.
        dimensions: The index ranges.
        samples: How many tuples to draw.
        seed: Which draw.
        device: Where the tensors are that both capture.

    Raises:
        TraceError: if one of them fails at these indices, as when a captured tensor is too short,
            or if the callable does not give one value an index.
    """
    whole = [number for value in expression.captured for number in _whole(value)]
    indices = _indices(dimensions, whole, samples, Draws(seed))
    inputs = [torch.from_numpy(column) for column in indices.T.copy()]
    is_score = expression.structure.inputs[0] == "score"
    if is_score:
        scores = 8.0 * Draws(seed).normal("agreement/score", (len(indices),))
        inputs.insert(0, torch.from_numpy(scores))
    name = described("score mod" if is_score else "mask", mod)
    if torch.device(device).type != "cpu":
        # A GPU that reads beyond a tensor is lost to this process: fail here, where it is caught.
        _values(name, _on_cpu(expression).evaluate, inputs)
        inputs = [values.to(device) for values in inputs]
    meant = _values(name, mod, inputs)
    said = _values(name, expression.evaluate, inputs)
    both_nan = torch.isnan(said) & torch.isnan(meant)
    return int((~((said == meant) | both_nan)).sum())


def _values(name: str, mod: Callable[..., Tensor], inputs: list[Tensor]) -> Tensor:
    """What ``mod`` gives at ``inputs``, one value each."""
    try:
        with torch.no_grad():
            values = mod(*inputs)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  (somebody's code: SystemExit, too)
        kind, colon, text = brief(error).partition(": ")
        raise TraceError(
            f"{name} raised {kind} at an index of its Problem{colon}{text}{failed_at(error)}."
        ) from None
    count = len(inputs[0])
    if not isinstance(values, torch.Tensor) or values.shape not in {(), (1,), (count,)}:
        given = tuple(values.shape) if isinstance(values, torch.Tensor) else repr(values)
        raise TraceError(f"{name} gives {given} for {count} indices: it must give one value each.")
    return values.expand(count)


def _on_cpu(expression: Expression) -> Expression:
    captured = tuple(v.cpu() if isinstance(v, torch.Tensor) else v for v in expression.captured)
    return Expression(expression.structure, captured)


def _whole(value: Captured) -> list[int]:
    """The whole numbers that a comparison may be made with; of a tensor the first few."""
    if isinstance(value, torch.Tensor):
        numbers = [] if value.is_floating_point() else torch.unique(value)[:_OF_A_TENSOR].tolist()
    else:
        numbers = [value] if isinstance(value, int) else []
    return [int(n) for n in numbers if abs(n) < 2**31]


_OF_A_TENSOR = 16


def _indices(
    dimensions: Dimensions, whole: list[int], samples: int, draws: Draws
) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Index tuples (b, h, q_idx, kv_idx), one a row."""
    sizes = (dimensions.batch, dimensions.heads, dimensions.query, dimensions.kv)
    # The last corner first: index 0, the trace's example, is what a mod may have read wrongly.
    corners = list(itertools.product(*(sorted({0, size - 1}, reverse=True) for size in sizes)))
    columns = [
        draws.integers(f"agreement/{name}", (samples,), size)
        for name, size in zip(("b", "h", "q_idx", "kv_idx"), sizes, strict=True)
    ]
    near = draws.integers("agreement/near", (samples,), 9) - 4
    half = samples // 2
    columns[3][:half] = columns[2][:half] + near[:half]
    drawn = np.stack(columns, axis=1)
    edges = _edges(drawn[: max(1, samples // 8)], whole)
    every = np.concatenate([np.array(corners, np.int64), drawn, edges])
    inside = (every[:, 3] >= 0) & (every[:, 3] < dimensions.kv)
    return every[inside]


def _edges(
    drawn: np.ndarray[tuple[int, int], np.dtype[np.int64]], whole: list[int]
) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """``drawn`` with the key moved next to each number, and to its distance from the row."""
    edges = [drawn[:0]]
    for number, step in itertools.product(whole, (-1, 0, 1)):
        for start in (0, drawn[:, 2]):
            for sign in (-1, 1):
                moved = drawn.copy()
                moved[:, 3] = start + sign * (number + step)
                edges.append(moved)
    return np.concatenate(edges)

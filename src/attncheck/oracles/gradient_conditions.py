"""What the bounds of gradients have to know of rows, in float64 beside the oracle's result."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attncheck.conditions import GradientConditions, Rows
from attncheck.oracles.conditions import conditions, places
from attncheck.oracles.numbers import Float64

if TYPE_CHECKING:
    from torch import Tensor

    from attncheck.conditions import Conditions
    from attncheck.inputs import Inputs
    from attncheck.outputs import Outputs

__all__ = ["gradient_conditions", "slope_of"]


def gradient_conditions(inputs: Inputs, truth: Outputs, rows: Rows) -> GradientConditions:
    """The GradientConditions of ``rows``, on the inputs' device.

    Args:
        inputs: Of a Problem with a backward.
        truth: The oracle's result on them, where ``out`` and ``lse`` are taken from.
        rows: Which rows; their query indices may lie on any device.
    """
    known = conditions(inputs, truth, rows)
    heads = slice(rows.heads.start, rows.heads.stop)
    dout, dlse = (x.flatten(0, 1)[heads][:, known.rows.query] for x in inputs.loss())
    alive = known.seen.any(-1)
    dlse = torch.where(alive, dlse, 0.0)
    delta = torch.where(alive, (dout * known.out).sum(-1), 0.0)
    value_products = dout @ known.v.mT
    shares = torch.exp(known.scores - known.maximum[..., None])
    shares = shares / torch.where(alive, known.total, 1.0)[..., None]
    slope = slope_of(inputs, known)
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


def slope_of(inputs: Inputs, known: Conditions) -> Tensor:
    """The score mod's derivative at the products, by torch's autograd; 0 where not seen.

    ``(heads, rows, kv)``; 1 where there is no mod, and of a sink.
    """
    if not known.has_score_mod:
        return known.seen.to(torch.float64)
    kv = inputs.problem.kv
    products, seen = known.products[..., :kv], known.seen[..., :kv]
    mod, numbers = inputs.problem.score_mod(str(inputs.device)), Float64(inputs.device)
    slope = torch.empty_like(products)
    for part, at in places(inputs.problem, known.rows):
        slope[part] = numbers.score_slope(mod, products[part][None], at)[0]
    slope = torch.where(seen, slope, 0.0)
    return torch.nn.functional.pad(slope, (0, 1), value=1.0) if known.has_sink else slope

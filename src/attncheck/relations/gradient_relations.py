"""Relations about gradients, and about key heads that several query heads share."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from attncheck.inputs.input_tensors import Descale
from attncheck.relations.relation import (
    Errors,
    Finding,
    Relation,
    compare_outputs,
    compare_values,
    compare_within,
    map_outputs,
    of_attention,
    of_gradients,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attncheck.core.outputs import Outputs, TensorName
    from attncheck.inputs.input_tensors import Inputs
    from attncheck.inputs.problem import Parameters, Problem

__all__ = ["EULER", "GQA_REPEAT", "GROUP_SUMS", "LSE_LOSS", "ZERO_LOSS"]


def _nothing(inputs: Inputs, _: Parameters) -> tuple[Inputs, ...]:
    dout, dlse = (None if one is None else torch.zeros_like(one) for one in _loss(inputs))
    return (inputs.replace(dout=dout, dlse=dlse),)


def _loss(inputs: Inputs) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return inputs.dout, inputs.dlse


def _all_zero(
    _: Sequence[Inputs], outputs: Sequence[Outputs], __: Parameters, errors: Errors
) -> Finding | None:
    (given,) = outputs
    return next(filter(None, (_zero(name, given, errors) for name in given.gradients())), None)


def _zero(name: TensorName, given: Outputs, errors: Errors) -> Finding | None:
    """What is not 0, where the bounds know anything: what overflows may be NaN."""
    assert errors is not None, "asked within bounds"
    tensor, known = given.tensors()[name], errors[0].tensors()[name].isfinite()
    nothing = torch.zeros_like(tensor)
    found = compare_values(name, torch.where(known, tensor, nothing), nothing)
    return found and replace(found, compared=int(known.sum()))


ZERO_LOSS = Relation(
    name="zero_loss",
    summary="a loss that depends on neither out nor LSE has gradients of exactly 0",
    runs=_nothing,
    holds=_all_zero,
    promise="bounds",
    unfit=of_gradients(),
)
"""Holds for every right kernel: each gradient is a sum of products with dOut or dLSE. It is asked
where those have a finite bound: what overflows, or a slope that is infinite, times 0 is NaN. What
is left in it is a buffer's that was not cleared, or of another call. The sign of a zero is open."""


def _of_lse(inputs: Inputs, __: Parameters) -> tuple[Inputs, ...]:
    dout, _ = _loss(inputs)
    return (inputs.replace(dout=None if dout is None else torch.zeros_like(dout)),)


def _no_values(
    _: Sequence[Inputs], outputs: Sequence[Outputs], __: Parameters, errors: Errors
) -> Finding | None:
    (given,) = outputs
    return None if given.dv is None else _zero("dv", given, errors)


def _without_lse(problem: Problem) -> str | None:
    return None if problem.dlse else "its loss does not depend on LSE"


LSE_LOSS = Relation(
    name="lse_loss",
    summary="a loss that depends on LSE alone has a gradient of exactly 0 in v",
    runs=_of_lse,
    holds=_no_values,
    promise="bounds",
    unfit=of_gradients(_without_lse),
)
"""Holds for every right kernel: LSE is a function of q and k, and dV = Pᵀ · dOut is a sum of zeros.
Asked as ``ZERO_LOSS`` is."""


def _runs(inputs: Inputs, _: Parameters) -> tuple[Inputs, ...]:
    return (inputs,)


def _holds(
    runs: Sequence[Inputs], outputs: Sequence[Outputs], _: Parameters, errors: Errors
) -> Finding | None:
    (inputs,), (given,) = runs, outputs
    assert errors is not None, "asked within bounds"
    (allowed,) = errors
    if given.dq is None or given.dk is None or allowed.dq is None or allowed.dk is None:
        return None
    q, k, _v = inputs.promoted()
    group = inputs.problem.group
    of_rows, of_keys = _sums(q * given.dq.double(), group), _sums(k * given.dk.double(), 1)
    may = _sums(q.abs() * allowed.dq, group) + _sums(k.abs() * allowed.dk, 1)
    # What adding up in float64 may lose of either sum.
    terms = max(q[0, 0].numel() * group, k[0, 0].numel())
    lost = _sums((q * given.dq.double()).abs(), group) + _sums((k * given.dk.double()).abs(), 1)
    # 0 · ∞: of what nothing is known, any sum may be right.
    may = (may + terms * 2.0**-52 * lost).nan_to_num(nan=torch.inf, posinf=torch.inf)
    return compare_within("dk", of_keys, of_rows, may)


def _sums(products: torch.Tensor, group: int) -> torch.Tensor:
    """``(batch, kv_heads, 1, 1)``: over all that belongs to a key head."""
    batch, heads = products.shape[:2]
    return products.reshape(batch, heads // group, -1).sum(-1)[..., None, None]


EULER = Relation(
    name="euler",
    summary="the sum of q · dq over all rows that read a key head is that of k · dk over its keys",
    runs=_runs,
    holds=_holds,
    promise="bounds",
    unfit=of_gradients(),
)
"""Holds of the exact gradients: both are Σ_ij dX_ij · scale · q_i · k_j (Euler's theorem of
homogeneous functions, once in q and once in k). A factor that one of the two lacks, such as the
scale, shows without any oracle. Each product may be off by its own bound: the sums by the sum of
those, which in 16 bits is much: it tells most in fp32. The element that a finding names is the key
head's first; its value is the whole sum."""


def _unfit(problem: Problem) -> str | None:
    return None if problem.group > 1 else "each of its query heads has a key head of its own"


def _runs_of_gqa_repeat(inputs: Inputs, _: Parameters) -> tuple[Inputs, ...]:
    problem, scales = inputs.problem, inputs.descale

    def repeated(tensor: torch.Tensor) -> torch.Tensor:
        """Head h // group for each h; by a view, since fp8 tensors know few operations."""
        batch, kv_heads, *rest = tensor.shape
        shape = (batch, kv_heads, problem.group, *rest)
        return tensor.unsqueeze(2).expand(shape).reshape(batch, problem.heads, *rest)

    each = scales and Descale(q=repeated(scales.q), k=repeated(scales.k), v=repeated(scales.v))
    copies = inputs.replace(
        problem=problem.replace(kv_heads=problem.heads),
        k=repeated(inputs.k),
        v=repeated(inputs.v),
        descale=each,
    )
    return copies, inputs


def _holds_of_gqa_repeat(
    _: Sequence[Inputs], outputs: Sequence[Outputs], __: Parameters, errors: Errors
) -> Finding | None:
    # What copies of a key head have for gradients is for ``GROUP_SUMS`` to add up.
    copies, grouped = (replace(each, dk=None, dv=None) for each in outputs)
    return compare_outputs(grouped, copies, errors)


def _sums_hold(
    runs: Sequence[Inputs], outputs: Sequence[Outputs], _: Parameters, errors: Errors
) -> Finding | None:
    problem = runs[1].problem
    assert errors is not None, "asked within bounds"

    def summed(name: TensorName, tensor: torch.Tensor) -> torch.Tensor:
        if name not in ("dk", "dv"):
            return tensor
        batch, _heads, *rest = tensor.shape
        each = tensor.double().view(batch, problem.kv_heads, problem.group, *rest)
        return each.sum(2)

    def like_groups(one: Outputs) -> Outputs:
        return map_outputs(one, lambda tensor: tensor, summed)

    copies, grouped = outputs
    return compare_outputs(grouped, like_groups(copies), [like_groups(errors[0]), errors[1]])


GQA_REPEAT = Relation(
    name="gqa_repeat",
    summary="grouped query heads give what they give with their key head repeated for each",
    runs=_runs_of_gqa_repeat,
    holds=_holds_of_gqa_repeat,
    promise="batch",
    unfit=of_attention(_unfit, gradients=True),
)
"""Holds for every right kernel within bounds: head h reads key head h // group. To the last bit
where a head's bits depend on its own q, k and v alone; a kernel that packs a group's heads into the
rows of one tile, or splits keys by the number of key heads, does not promise it."""


GROUP_SUMS = Relation(
    name="group_sums",
    summary="the gradients of a shared key head are the sums of those of its copies",
    runs=_runs_of_gqa_repeat,
    holds=_sums_hold,
    promise="bounds",
    unfit=of_gradients(_unfit),
)
"""Holds of the exact gradients: a loss that reads one key through several copies changes with it by
the sum of what it changes by with each. Each run is within its own bound, and a sum of gradients
within the sum of theirs."""

"""Relations about gradients and about key heads that several query heads share."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from attncheck.core.tensor_names import TensorName
from attncheck.inputs.input_tensors import Descale, Inputs
from attncheck.inputs.problem import Parameters, Problem
from attncheck.relations import relation
from attncheck.relations.relation import Finding, Results

# ------------------------------------------------------------------ losses without out or LSE


def _zero_loss(*names: str, inputs: Inputs) -> tuple[Inputs, ...]:
    return (inputs.replace(**relation.change_tensors(inputs, torch.zeros_like, *names)),)


def _compare_zero(results: Results, *names: TensorName) -> Finding | None:
    """Return a Finding for gradients that are not 0, where their bounds are finite."""
    ((outputs,), (errors,)) = results.outputs, results.bounds()
    gradients = outputs.gradients()
    for name in names or gradients:
        if name in gradients:
            finite = errors.tensors()[name].isfinite()
            finding = relation.compare_values(name, gradients[name], 0.0, finite)
            if finding:
                return finding
    return None


ZERO_LOSS = relation.Relation(
    name="zero_loss",
    summary="a loss that depends on neither out nor LSE has gradients of exactly 0",
    runs=lambda inputs, _: _zero_loss("dout", "dlse", inputs=inputs),
    rule=_compare_zero,
    promise="bounds",
    unfit=relation.of_gradients(),
)
"""Holds for every right kernel: each gradient is a sum of products with dOut or dLSE. Only elements
with a finite bound are compared: an overflow or an infinite slope times 0 is NaN. A nonzero element
comes from a buffer that was not cleared or from another call. The sign of a zero is left open."""

LSE_LOSS = relation.Relation(
    name="lse_loss",
    summary="a loss that depends on LSE alone has a gradient of exactly 0 in v",
    runs=lambda inputs, _: _zero_loss("dout", inputs=inputs),
    rule=lambda results: _compare_zero(results, "dv"),
    promise="bounds",
    unfit=relation.of_gradients(lambda p: None if p.dlse else "its loss does not depend on LSE"),
)
"""Holds for every right kernel: LSE is a function of q and k, and dV = Pᵀ · dOut is a sum of zeros.
As in ``ZERO_LOSS``, only elements with a finite bound are compared."""

# ------------------------------------------------------------------ scores as products


def _compare_product_sums(results: Results) -> Finding | None:
    (inputs,), (outputs,), (allowed,) = results.inputs, results.outputs, results.bounds()
    if outputs.dq is None or outputs.dk is None or allowed.dq is None or allowed.dk is None:
        return None
    q, k, _ = inputs.promoted()
    dq, dk, group = outputs.dq.double(), outputs.dk.double(), inputs.problem.group
    of_rows, of_keys = partial(_sum_key_heads, group=group), partial(_sum_key_heads, group=1)
    error = of_rows(q.abs() * allowed.dq) + of_keys(k.abs() * allowed.dk)
    # The rounding error of both sums in float64.
    terms = max(q[0, 0].numel() * group, k[0, 0].numel())
    rounding = of_rows((q * dq).abs()) + of_keys((k * dk).abs())
    # 0 · ∞ is NaN: where a bound is infinite, any sum may be right.
    error = (error + terms * 2.0**-52 * rounding).nan_to_num(nan=torch.inf, posinf=torch.inf)
    return relation.compare_within("dk", of_keys(k * dk), of_rows(q * dq), error)


def _sum_key_heads(products: torch.Tensor, group: int) -> torch.Tensor:
    """Sum over all elements of each key head's ``group`` heads, to ``(batch, kv_heads, 1, 1)``."""
    batch, heads = products.shape[:2]
    return products.reshape(batch, heads // group, -1).sum(-1)[..., None, None]


EULER = relation.Relation(
    name="euler",
    summary="the sum of q · dq over all rows that read a key head is that of k · dk over its keys",
    runs=lambda inputs, _: (inputs,),
    rule=_compare_product_sums,
    promise="bounds",
    unfit=relation.of_gradients(),
)
"""Holds for the exact gradients: both are Σ_ij dX_ij · scale · q_i · k_j (Euler's theorem on
homogeneous functions, once in q and once in k). Finds a factor that one of the two lacks, such as
the scale, without any oracle. Each product may be off by its own bound, and the sums by the sum of
these bounds, which is large in 16 bits: the relation is sharpest in fp32. A finding names the first
element of the key head; its value is the whole sum."""

# ------------------------------------------------------------------ shared key heads


def _unless_grouped(problem: Problem) -> str | None:
    return None if problem.group > 1 else "each of its query heads has a key head of its own"


def _copy_key_heads(inputs: Inputs, _: Parameters) -> tuple[Inputs, ...]:
    problem, scales = inputs.problem, inputs.descale

    def repeat(tensor: torch.Tensor) -> torch.Tensor:
        """Return key head h // group for each h, as an expanded view, which fp8 supports too."""
        batch, kv_heads, *rest = tensor.shape
        shape = (batch, kv_heads, problem.group, *rest)
        return tensor.unsqueeze(2).expand(shape).reshape(batch, problem.heads, *rest)

    copies = inputs.replace(
        problem=problem.replace(kv_heads=problem.heads),
        **relation.change_tensors(inputs, repeat, "k", "v"),
        descale=scales and Descale(q=repeat(scales.q), k=repeat(scales.k), v=repeat(scales.v)),
    )
    return copies, inputs


def _compare_copies(results: Results) -> Finding | None:
    # GROUP_SUMS compares dk and dv, as it adds up the gradients of the copies.
    return relation.compare_ends(results, first=lambda run: replace(run, dk=None, dv=None))


def _compare_sums(results: Results) -> Finding | None:
    problem = results.inputs[1].problem

    def add_up(name: TensorName, tensor: torch.Tensor) -> torch.Tensor:
        if name not in ("dk", "dv"):
            return tensor
        batch, _heads, *rest = tensor.shape
        return tensor.double().view(batch, problem.kv_heads, problem.group, *rest).sum(2)

    return relation.compare_ends(results, first=relation.each_tensor(lambda x: x, add_up))


GQA_REPEAT = relation.Relation(
    name="gqa_repeat",
    summary="grouped query heads give what they give with their key head repeated for each",
    runs=_copy_key_heads,
    rule=_compare_copies,
    promise="group",
    unfit=relation.of_attention(_unless_grouped, gradients=True),
)
"""Holds for every right kernel within bounds: head h reads key head h // group. Holds bitwise where
a head's bits depend on its own q, k and v only; a kernel that packs a group's heads into the rows
of one tile, or splits keys by the number of key heads, does not promise it."""

GROUP_SUMS = relation.Relation(
    name="group_sums",
    summary="the gradients of a shared key head are the sums of those of its copies",
    runs=_copy_key_heads,
    rule=_compare_sums,
    promise="bounds",
    unfit=relation.of_gradients(_unless_grouped),
)
"""Holds for the exact gradients: the gradient of a key that a loss reads through several copies is
the sum of the copies' gradients. Each run is within its own bound, and a sum of gradients within
the sum of their bounds."""

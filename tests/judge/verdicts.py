"""Verdicts on hand-made tensors; the outputs of further ideal kernels are passed in."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from attncheck.core.judgement import Judgement
from attncheck.core.outputs import Outputs
from attncheck.judge.verdict import (
    KernelResult,
    heads_with_ensemble,
    heads_with_other_order,
    judge_heads,
    needs_other_orders,
)
from attncheck.judge.verdict import decide as decide_on

__all__ = ["decide", "kernel_result"]


def kernel_result(*, truth: Outputs, **fields: Any) -> KernelResult:
    """A KernelResult with the exact out and LSE of ``truth``."""
    return KernelResult(exact_out=truth.out, exact_lse=truth.lse, **fields)


def decide(
    *,
    ensemble: Callable[[], Iterable[torch.Tensor]] | None = None,
    other_orders: Iterable[torch.Tensor] = (),
    **fields: Any,
) -> Judgement:
    """The verdict on ``kernel_result(**fields)``, with further ideal kernels only where needed."""
    result = kernel_result(**fields)
    heads = judge_heads(result)
    if ensemble is not None and heads.needs_ensemble:
        heads = heads_with_ensemble(result, heads, ensemble())
    for out in other_orders if needs_other_orders(result, heads) else ():
        heads = heads_with_other_order(result, heads, out)
    return decide_on(result, heads)

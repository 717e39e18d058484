"""A row that sees one key returns its value: causal's first row is V's first row."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, cast

import torch

from attncheck.relations.fills import replaced
from attncheck.relations.finding import Finding, wrong
from attncheck.relations.fit import of_attention, without_sink
from attncheck.relations.relation import Errors, Parameters, Relation
from attncheck.relations.single_weights import as_read

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attncheck.inputs import Inputs
    from attncheck.mods.spec import Spec
    from attncheck.outputs import Outputs
    from attncheck.problem import Problem

__all__ = ["FIRST_ROW"]

# Score mods that leave a score of 0 at (row 0, key 0) at 0.
_KEEP_ZERO = {"none", "alibi", "softcap", "temperature", "chain"}


def _sees_key_0_alone(mask: Spec, problem: Problem) -> bool:
    """Whether row 0 sees key 0 and no other, as far as the mask's name tells."""
    if mask.name == "causal":
        return True
    if mask.name == "causal_bottom_right":
        return problem.query == problem.kv
    if mask.name == "sliding_window":
        return cast("int", mask.values["window"]) >= 1
    if mask.name == "prefix_lm":
        return cast("int", mask.values["prefix"]) <= 1
    return False


def _unfit(problem: Problem) -> str | None:
    if not _sees_key_0_alone(problem.mask, problem):
        return "its mask does not show row 0 key 0 alone, as far as its name tells"
    if any(part.name not in _KEEP_ZERO for part in problem.score.walk()):
        return "its score mod moves a score of 0, so that the weight may not be exactly 1"
    return None


def _runs(inputs: Inputs, _: Parameters) -> tuple[Inputs, ...]:
    """V as the product reads it, and a first score of 0, whose exponential is 1 at once.

    Of another score it may not be: a kernel that fuses exp2(s·c − m·c) gets exp2 of m·c's rounding
    error, up to |m·c|·2^-24, which shows in fp16 from scores of 4,096 on and in fp32 always.

    In fp8 V's descale becomes 1, for the product with another would be rounded twice: to fp32, and
    to out.
    """
    descale = inputs.descale
    if descale is not None:
        descale = dataclasses.replace(descale, v=torch.ones_like(descale.v))
    v = as_read(inputs.v, inputs.problem)
    first = torch.zeros(1, 1, inputs.problem.query, 1, dtype=torch.bool, device=inputs.device)
    first[:, :, 0] = True
    q = replaced(inputs.q, torch.zeros_like(inputs.q), first)
    return (inputs.replace(q=q, v=v, descale=descale),)


def _holds(
    runs: Sequence[Inputs], outputs: Sequence[Outputs], __: Parameters, ___: Errors
) -> Finding | None:
    (inputs,), (given,) = runs, outputs
    values = inputs.v[:, :, :1].repeat_interleave(inputs.problem.group, dim=1)
    return wrong("out", given.out[:, :, :1], values.to(given.out.dtype))


FIRST_ROW = Relation(
    name="first_row",
    summary="row 0, which sees key 0 alone, returns V's row 0 of its kv head, h // group",
    runs=_runs,
    holds=_holds,
    unfit=of_attention(without_sink, _unfit),
)
"""Holds for every right kernel: the weight is 1, in P's format exactly, and 1 · v = v.

q's row 0 is 0, and V is rounded to what P·V reads of it (``single_weights``). The sign of a zero is
left open.
"""

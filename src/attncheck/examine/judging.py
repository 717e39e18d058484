"""Brings the judge what it decides by: a kernel's outputs, the truth, and the evidence."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, TypedDict

from attncheck.examine.allowances import budget
from attncheck.examine.gradient_allowances import gradient_allowance
from attncheck.judge.arithmetic import FP32
from attncheck.judge.verdict import decide
from attncheck.subjects.ideal import Ideal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch

    from attncheck.examine.evidence import Evidence
    from attncheck.examine.executor import Execution
    from attncheck.judge.arithmetic import Arithmetic
    from attncheck.judgement import BlindSpot, Judgement, Place
    from attncheck.subjects.contract import Tiling
    from attncheck.tensor_names import TensorName

__all__ = ["judged"]


def judged(
    result: Execution,
    evidence: Evidence,
    *,
    structure: str = "",
    ideal: bool = True,
    brief: bool = False,
) -> Judgement:
    """The verdict on what a kernel gave on the Case of ``evidence``.

    Args:
        result: What it gave, and the arithmetic and tiling that it declares.
        evidence: The Case. What is costly is kept in it, once per arithmetic or tiling.
        structure: What an exact probe found wrong, in one line; empty where nothing.
        ideal: Whether it is compared with ideal kernels too; of a probe it is not.
        brief: Whether nobody asks what a pass rests on: then only a failure says what its allowance
            is made of, and nothing what the Case could not have shown.
    """
    facts = functools.partial(_decided, result, evidence, structure=structure, ideal=ideal)
    if not brief:
        blind_spot = evidence.blind_spot(
            result.arithmetic, exposes_lse=result.outputs.lse is not None
        )
        return facts(budgeted=True, blind_spot=blind_spot)
    found = facts(budgeted=False, blind_spot=None)
    return facts(budgeted=True, blind_spot=None) if found.status == "fail" else found


def _decided(
    result: Execution,
    evidence: Evidence,
    *,
    structure: str,
    ideal: bool,
    budgeted: bool,
    blind_spot: BlindSpot | None,
) -> Judgement:
    outputs, arithmetic, tiling = result.outputs, result.arithmetic, result.tiling

    gradients = (
        gradient_allowance(evidence, arithmetic, outputs)
        if evidence.case.problem.backward
        else None
    )

    def parts(tensor: TensorName, place: Place) -> dict[str, float]:
        if gradients is not None and tensor in gradients.bounds:
            return gradients.budget(tensor, place)
        return budget(evidence, arithmetic, place)  # dim −1 says which

    return decide(
        out=outputs.out,
        lse=outputs.lse,
        truth=evidence.truth,
        alive=evidence.alive,
        allowance=evidence.allowance(arithmetic),
        arithmetic=arithmetic,
        generic=evidence.generic,
        blind_spot=blind_spot,
        tiles=(tiling.block_query, tiling.block_kv) if tiling else None,
        structure=structure,
        budget=parts if budgeted else None,
        other_lse=(lambda: _tighter(evidence, arithmetic)) if budgeted else None,
        gradients=() if gradients is None else gradients.compared(outputs, evidence),
        **(_ideals(evidence, arithmetic, tiling) if ideal else {}),
    )


class _Ideals(TypedDict, total=False):
    ideal: torch.Tensor
    ensemble: Callable[[], Iterator[torch.Tensor]]


def _ideals(evidence: Evidence, arithmetic: Arithmetic, tiling: Tiling | None) -> _Ideals:
    """Ideal kernels of this arithmetic; none where it rounds something that they do not."""
    problem, truncates = evidence.case.problem, arithmetic.truncates
    own = Ideal(tiling)
    same = ("products", "weights", "weights_scale", "sums_rounded_weights", "scaled_query")
    theirs = own.arithmetic(problem, evidence.device)
    if any(getattr(arithmetic, name) != getattr(theirs, name) for name in same):
        return {}
    at = own.tiling(problem, evidence.device)
    return {
        "ideal": evidence.ideal_outputs(at, truncates=truncates).out,
        "ensemble": lambda: (one.out for one in evidence.ensemble(truncates=truncates)),
    }


def _tighter(evidence: Evidence, arithmetic: Arithmetic) -> Mapping[str, torch.Tensor]:
    """LSE's allowance with fp32 sums, where shorter ones are assumed: LSE tells them apart."""
    other = replace(arithmetic, scores=FP32, values=FP32)
    return {} if other == arithmetic else {str(other): evidence.allowance(other).lse}

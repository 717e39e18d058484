"""A Problem's mods as our kernels take them: traced expressions, and the tiles to visit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attncheck.core.errors import TraceError
from attncheck.core.mod_spec import NONE
from attncheck.mods import captured_reads as captured
from attncheck.mods import trace
from attncheck.mods.block_mask import block_mask, list_visits
from attncheck.mods.trace import trace_derivative
from attncheck.subjects.conventions.call_tensors import ModKey, once_for_mods

if TYPE_CHECKING:
    from attncheck.inputs.problem import Problem
    from attncheck.kernels.gradient_terms import CapturedReads
    from attncheck.kernels.launch import VisitList
    from attncheck.mods.expression import Expression
    from attncheck.mods.to_triton import TritonMod


def mask_expression(problem: Problem, device: str) -> Expression:
    """The mask as traced, its captured tensors on ``device``, checked on sampled indices.

    Raises TraceError where the trace and the callable disagree: then neither the kernel nor the
    mask is wrong, but the trace.
    """
    return _mask(ModKey.of(problem, device, "mask"))


def score_expression(problem: Problem, device: str) -> Expression:
    """The score mod as traced, checked like the mask."""
    return _score(ModKey.of(problem, device, "score"))


def slope_expression(problem: Problem, device: str) -> Expression:
    """The score mod's derivative with respect to the score, its captured tensors on ``device``.

    It is made of the trace of torch's own derivative, and the score mod's trace is what is checked:
    rounding may tell the two derivatives apart.
    """
    return _slope(ModKey.of(problem, device, "score"))


def triton_mask(problem: Problem, device: str) -> TritonMod:
    """The mask as our kernels take it."""
    return _print_mod(mask_expression(problem, device), problem)


def triton_score(problem: Problem, device: str) -> TritonMod | None:
    """The score mod as our kernels take it; None if it leaves scores as they are."""
    return None if problem.score == NONE else _print_mod(score_expression(problem, device), problem)


def triton_slope(problem: Problem, device: str) -> TritonMod | None:
    """The score mod's derivative, likewise."""
    return None if problem.score == NONE else _print_mod(slope_expression(problem, device), problem)


def _print_mod(expression: Expression, problem: Problem) -> TritonMod:
    from attncheck.mods.to_triton import SHORT, to_triton

    return to_triton(expression, short=max(problem.query, problem.kv) <= SHORT)


def captured_reads(problem: Problem, device: str) -> CapturedReads:
    """The score mod's reads of tensors, and its derivatives there, for a kernel of ours."""
    return _reads(ModKey.of(problem, device, "score"))


@once_for_mods
def _mask(key: ModKey) -> Expression:
    mod = key.problem.mask_mod(key.device)
    return _checked(trace.trace_mask(mod, key.device), mod, key, "mask")


@once_for_mods
def _score(key: ModKey) -> Expression:
    mod = key.problem.score_mod(key.device)
    return _checked(trace.trace_score(mod, key.device), mod, key, "score mod")


@once_for_mods
def _slope(key: ModKey) -> Expression:
    # Unchecked: rounding may tell it from torch's own derivative.
    return trace_derivative(key.problem.score_mod(key.device), key.device)


@once_for_mods
def _reads(key: ModKey) -> CapturedReads:
    from attncheck.kernels.gradient_terms import CapturedReads
    from attncheck.mods.to_triton import to_triton

    reads = captured.trace_reads(key.problem.score_mod(key.device), key.device)
    return CapturedReads(
        tuple((to_triton(read.slope), to_triton(read.place), read.start) for read in reads),
        sum(tensor.numel() for tensor in captured.read_tensors(reads)),
    )


def _checked(expression: Expression, mod: Any, key: ModKey, kind: str) -> Expression:
    # The trace is the one thing that kernel and mask share: it is checked wherever it is used.
    wrong = trace.count_disagreements(expression, mod, key.problem.dimensions, device=key.device)
    if wrong:
        raise TraceError(
            f"the trace of {kind} {str(key.specs[0])!r} differs from it at {wrong} sampled indices "
            f"of {key.problem}."
        )
    return expression


def visited_tiles(
    problem: Problem, block_query: int, block_kv: int, device: str, *, by_keys: bool = False
) -> VisitList:
    """The tiles of ``problem`` that its mask does not hide wholly, for blocks of these sizes.

    Found by calling the mask itself, on ``device``, at every index.

    Args:
        block_query: Query rows of a tile.
        block_kv: Keys of one.
        by_keys: By blocks of keys: which blocks of query rows each of them has to visit.
    """
    return _visits(ModKey.of(problem, device, "mask"), block_query, block_kv, by_keys=by_keys)


@once_for_mods
def _visits(key: ModKey, block_query: int, block_kv: int, *, by_keys: bool) -> VisitList:
    from attncheck.kernels.launch import VisitList

    # By the callable, not the trace: a wrong trace must not hide the tiles that show it.
    tiles = block_mask(
        key.problem.mask_mod(key.device),
        key.dimensions,
        block_query=block_query,
        block_kv=block_kv,
        device=key.device,
    )
    return VisitList(*list_visits(tiles.transposed() if by_keys else tiles))

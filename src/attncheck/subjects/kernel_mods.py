"""Converts a Problem's mods for attncheck's kernels: traced expressions, and tiles to visit."""

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
    """Return the traced mask, its captured tensors on ``device``, checked at sampled indices.

    Raises TraceError if trace and callable disagree, which is a fault of the trace and not of the
    kernel or the mask.
    """
    return _mask(ModKey.of(problem, device, "mask"))


def score_expression(problem: Problem, device: str) -> Expression:
    """Return the traced score mod, checked like the mask."""
    return _score(ModKey.of(problem, device, "score"))


def slope_expression(problem: Problem, device: str) -> Expression:
    """Return the score mod's derivative by the score, its captured tensors on ``device``.

    It comes from the trace of torch's own derivative. Only the score mod's trace is checked,
    because the two derivatives may differ by rounding.
    """
    return _slope(ModKey.of(problem, device, "score"))


def triton_mask(problem: Problem, device: str) -> TritonMod:
    """Return the mask as a Triton function."""
    return _print_mod(mask_expression(problem, device), problem)


def triton_score(problem: Problem, device: str) -> TritonMod | None:
    """Return the score mod as a Triton function; None if there is none."""
    return None if problem.score == NONE else _print_mod(score_expression(problem, device), problem)


def triton_slope(problem: Problem, device: str) -> TritonMod | None:
    """Return the score mod's derivative as a Triton function; None if there is no score mod."""
    return None if problem.score == NONE else _print_mod(slope_expression(problem, device), problem)


def _print_mod(expression: Expression, problem: Problem) -> TritonMod:
    from attncheck.mods.to_triton import SHORT, to_triton

    return to_triton(expression, short=max(problem.query, problem.kv) <= SHORT)


def captured_reads(problem: Problem, device: str) -> CapturedReads:
    """Return the score mod's reads of tensors and its derivatives by them, for a Triton kernel."""
    return _reads(ModKey.of(problem, device, "score"))


@once_for_mods
def _mask(key: ModKey) -> Expression:
    mod = key.problem.mask_mod(key.device)
    return _check(trace.trace_mask(mod, key.device), mod, key, "mask")


@once_for_mods
def _score(key: ModKey) -> Expression:
    mod = key.problem.score_mod(key.device)
    return _check(trace.trace_score(mod, key.device), mod, key, "score mod")


@once_for_mods
def _slope(key: ModKey) -> Expression:
    # Unchecked, because it may differ from torch's own derivative by rounding.
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


def _check(expression: Expression, mod: Any, key: ModKey, kind: str) -> Expression:
    # Every trace is checked, because a wrong one would look like a fault of the kernel.
    wrong = trace.count_disagreements(expression, mod, key.problem.dimensions, device=key.device)
    if wrong:
        raise TraceError(
            f"the trace of {kind} {str(key.specs[0])!r} differs from it at {wrong} sampled indices "
            f"of {key.problem}."
        )
    return expression


def visited_tiles(
    problem: Problem,
    block_query: int,
    block_kv: int,
    device: str,
    *,
    by_keys: bool = False,
    groups: int = 1,
) -> VisitList:
    """Return the tiles of ``problem`` that its mask does not hide wholly.

    The mask itself is called at every index, on ``device``.

    Args:
        block_query: Query rows of a tile; with ``groups``, of one group.
        block_kv: Keys of a tile.
        by_keys: Whether to list blocks of query rows for each block of keys, not the reverse.
        groups: Groups of rows that visit their tiles together: a block of the list has
            ``groups`` times ``block_query`` rows.
    """
    key = ModKey.of(problem, device, "mask")
    return _visits(key, block_query, block_kv, by_keys=by_keys, groups=groups)


@once_for_mods
def _visits(
    key: ModKey, block_query: int, block_kv: int, *, by_keys: bool, groups: int
) -> VisitList:
    from attncheck.kernels.launch import VisitList

    # The callable is used and not the trace, which might be wrong and hide tiles that show it.
    tiles = block_mask(
        key.problem.mask_mod(key.device),
        key.dimensions,
        block_query=block_query,
        block_kv=block_kv,
        device=key.device,
    )
    visits = list_visits(tiles.transposed() if by_keys else tiles, groups)
    return VisitList(*visits, groups=groups)

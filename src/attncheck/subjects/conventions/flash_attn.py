"""Any function in the convention of flash-attn's ``flash_attn_func``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.subjects.conventions.calling import Calling, convention_of
from attncheck.subjects.conventions.diagonals import band
from attncheck.subjects.conventions.layouts import bshd
from attncheck.subjects.conventions.windowed import EMPTY_LSE, LSE_FLAGS, SPELLINGS, windowed

if TYPE_CHECKING:
    from attncheck.subjects.conventions.arguments import Arguments, Asked

__all__ = ["FLASH_ATTN", "SIGNS"]

SIGNS = {"softmax_scale", "window_size", "alibi_slopes"}
"""Names that only functions in the style of flash-attn have."""


def arguments(asked: Asked) -> Arguments | str:
    """The convention's arguments for a Problem, or why it has none."""
    problem = asked.problem
    seen = band(problem.mask, problem.dimensions)
    return windowed(asked, seen, [(problem.query, problem.kv)])


def _claims(names: frozenset[str], dotted: str) -> bool:
    return bool(names & SIGNS) or "flash_attn" in dotted


FLASH_ATTN = convention_of(
    Calling(
        name="flash_attn",
        summary="a function of q, k, v (batch, length, heads, dim), called like flash_attn_func",
        spellings=SPELLINGS,
        arguments=arguments,
        layout=bshd,
        claims=_claims,
        by_name=LSE_FLAGS | {"sinks"},
        most=4,
        bottom_right=True,
        empty_lse=EMPTY_LSE,
    )
)

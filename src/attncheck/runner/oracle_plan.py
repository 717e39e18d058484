"""On which Problems the oracles are compared with the exact result."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.distributions import DISTRIBUTIONS
from attncheck.errors import UnknownName
from attncheck.mods.library import FULL
from attncheck.mods.spec import Spec
from attncheck.runner.plan import plan
from attncheck.runner.variants import VARIANTS, Variant

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attncheck.runner.plan import Cell

__all__ = ["CERTIFIED_VARIANTS", "DEFAULT_VARIANTS", "SHARP", "oracle_plan"]

SHARP = Variant(
    name="sharp",
    summary="every key, every score times 16: beyond the exponents of fp64",
    mods=lambda _: (FULL, Spec.of("temperature", temperature=2.0**-4)),
)
"""No kernel is measured on it: what it shows is where the naive softmax ends."""

DEFAULT_VARIANTS = ("full", "causal", SHARP.name, "softmax")

CERTIFIED_VARIANTS = ("full", "causal", "alibi", "softcap", SHARP.name, "softmax")
"""Proven by default: score mods too, whose own roundings are the oracle's as well."""


def oracle_plan(
    *,
    variants: Sequence[str],
    distributions: Sequence[str],
    dtype: str,
    shape: str,
    seed: int,
    default: Sequence[str] = DEFAULT_VARIANTS,
) -> list[Cell]:
    """Each variant on each distribution, in the order in which a report shows them.

    Args:
        variants: Names of ``runner.variants.VARIANTS``, or ``sharp``; none: those of ``default``.
        distributions: Names; none: all. Of softmax those that it has.
        dtype: Of the inputs.
        shape: As typed.
        seed: Which draw.
        default: Names of variants.

    Raises UnknownName or ProblemError for what cannot be, before anything is computed.
    """
    known = VARIANTS | {SHARP.name: SHARP}
    cells: list[Cell] = []
    for name in variants or default:
        if name not in known:
            raise UnknownName("variant", name, known)
        every = tuple(distributions or DISTRIBUTIONS)
        existing = tuple(d for d in every if known[name].exists(dtype, d))
        # By name it must exist: the Problem says why it does not.
        must = bool(variants) and (bool(distributions) or not existing)
        for distribution in every if must else existing:
            cells += plan(
                dtypes=(dtype,),
                variants=() if name == SHARP.name else (name,),
                own=SHARP if name == SHARP.name else None,
                shapes=(shape,),
                distributions=(distribution,),
                seed=seed,
            )
    return list(dict.fromkeys(cells))

"""How much a gate asks: smoke, pr, nightly."""

from __future__ import annotations

from dataclasses import dataclass

from attncheck.core.errors import UnknownName

__all__ = ["TIERS", "GateTier", "default_tier", "tier_named"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GateTier:
    """How many Cases each stage asks, and how large.

    Attributes:
        name: On the command line.
        strength: The bounds cover every choice of so many axes together.
        sizes: Lengths of the bounds' shapes: a name of ``axes.SHAPES``; on a GPU ``sizes_gpu``.
        sizes_gpu: See ``sizes``.
        wide: Whether the bounds have every value of an axis, or the ones that find most.
        combinations: In how many (dtype, family) each property is asked; 0 for every one.
        drawn: Cases that Hypothesis draws for each of them.
        each_dtype: Whether every probe is asked in every dtype, or each in one.
        layouts: On how many problems a question about memory or determinism is asked.
        measured: Cases that are measured for a baseline; 0 for all that the bounds ask.
        shrinking: Seconds that the search for a smaller Case may take.
        shrinks: How many failures of a kernel are made smaller.
        draws_anew: Whether each run draws other numbers.
    """

    name: str
    strength: int
    sizes: str
    sizes_gpu: str
    wide: bool
    combinations: int
    drawn: int
    each_dtype: bool
    layouts: int
    measured: int
    shrinking: float
    shrinks: int
    draws_anew: bool = False

    def sizes_on(self, device: str) -> str:
        """Which shapes, on ``cpu`` or ``cuda``."""
        return self.sizes if device == "cpu" else self.sizes_gpu


# smoke and pr gate a change: what they ask is the same every time, so that none fails for what it
# did not bring. nightly, where nobody waits, draws anew.
TIERS: dict[str, GateTier] = {
    tier.name: tier
    for tier in (
        GateTier(
            name="smoke",
            strength=2,
            sizes="small",
            sizes_gpu="medium",
            wide=False,
            combinations=1,
            drawn=1,
            each_dtype=False,
            layouts=1,
            measured=12,
            shrinking=10.0,
            shrinks=3,
        ),
        GateTier(
            name="pr",
            strength=3,
            sizes="medium",
            sizes_gpu="medium",
            wide=False,
            combinations=3,
            drawn=1,
            each_dtype=True,
            layouts=2,
            measured=60,
            shrinking=20.0,
            shrinks=8,
        ),
        GateTier(
            name="nightly",
            strength=3,
            sizes="medium",
            sizes_gpu="large",
            wide=True,
            combinations=0,
            drawn=4,
            each_dtype=True,
            layouts=5,
            measured=0,
            shrinking=60.0,
            shrinks=40,
            draws_anew=True,
        ),
    )
}


def tier_named(name: str) -> GateTier:
    """The tier called ``name``; raises UnknownName with the valid names."""
    if name not in TIERS:
        raise UnknownName("tier", name, TIERS)
    return TIERS[name]


def default_tier(device: str) -> str:
    """What is asked where nobody says: little on a CPU, where Triton is interpreted."""
    return "smoke" if device == "cpu" else "pr"

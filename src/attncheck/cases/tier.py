"""Tiers: how many problems a run covers, and how large they are."""

from __future__ import annotations

from dataclasses import dataclass

from attncheck.core.errors import UnknownName

__all__ = [
    "GATE_TIERS",
    "TIERS",
    "GateTier",
    "Tier",
    "default_tier",
    "gate_tier_named",
    "tier_named",
]


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
GATE_TIERS: dict[str, GateTier] = {
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


def gate_tier_named(name: str) -> GateTier:
    """The tier called ``name``; raises UnknownName with the valid names."""
    if name not in GATE_TIERS:
        raise UnknownName("tier", name, GATE_TIERS)
    return GATE_TIERS[name]


def default_tier(device: str) -> str:
    """What is asked where nobody says: little on a CPU, where Triton is interpreted."""
    return "smoke" if device == "cpu" else "pr"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """How many problems each property draws, and how large.

    Attributes:
        name: On the command line.
        examples: Problems a property draws for each kernel, dtype and mask family.
        examples_interpreted: The same where Triton is interpreted: nine tenths of the time.
        examples_gpu: The same on a GPU.
        longest: Largest query and kv length on a CPU, where Triton is interpreted.
        longest_gpu: The same on a GPU.
        most_heads: Largest batch · heads on a CPU: what an interpreted kernel's time is made of.
        repeats_gpu: How often a drawn problem is asked on a GPU, each time with other numbers:
            there a structure costs a compilation, and another problem of it nearly nothing.
        profile: The Hypothesis profile, unless another is asked for.
    """

    name: str
    examples: int
    examples_interpreted: int
    examples_gpu: int
    longest: int
    longest_gpu: int
    most_heads: int
    repeats_gpu: int
    profile: str

    def examples_on(self, device: str, *, triton: bool) -> int:
        """Problems that are drawn on ``cpu`` or ``cuda`` for a kernel, perhaps of Triton."""
        if device != "cpu":
            return self.examples_gpu
        return self.examples_interpreted if triton else self.examples

    def sizes_on(self, device: str) -> dict[str, int]:
        """How large on ``cpu`` or ``cuda``: keywords of ``strategies.shapes``."""
        if device == "cpu":
            return {"longest": self.longest, "most_heads": self.most_heads}
        return {"longest": self.longest_gpu}

    def repeats_on(self, device: str) -> int:
        """How often a drawn problem is asked on ``cpu`` or ``cuda``."""
        return 1 if device == "cpu" else self.repeats_gpu


# Hypothesis' first example is always the plainest, so that of two one is drawn.
# smoke and pr gate a change: what they draw is the same every time, so that none fails for what
# it did not bring. nightly, where nobody waits, draws anew.
TIERS: dict[str, Tier] = {
    tier.name: tier
    for tier in (
        Tier(
            name="smoke",
            examples=4,
            examples_interpreted=2,
            examples_gpu=2,
            longest=70,
            longest_gpu=300,
            most_heads=4,
            repeats_gpu=2,
            profile="attncheck-ci",
        ),
        Tier(
            name="pr",
            examples=25,
            examples_interpreted=15,
            examples_gpu=2,
            longest=130,
            longest_gpu=400,
            most_heads=8,
            repeats_gpu=4,
            profile="attncheck-ci",
        ),
        Tier(
            name="nightly",
            examples=200,
            examples_interpreted=100,
            examples_gpu=50,
            longest=300,
            longest_gpu=4096,
            most_heads=8,
            repeats_gpu=8,
            profile="attncheck-nightly",
        ),
    )
}


def tier_named(name: str) -> Tier:
    """The tier called ``name``; raises UnknownName with the valid names."""
    if name not in TIERS:
        raise UnknownName("tier", name, TIERS)
    return TIERS[name]

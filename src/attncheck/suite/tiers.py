"""How hard a kernel is asked: smoke, pr, nightly."""

from __future__ import annotations

from dataclasses import dataclass

from attncheck.core.errors import UnknownName

__all__ = ["TIERS", "Tier", "tier_named"]


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

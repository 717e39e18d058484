"""Tiers: how many problems a run checks a kernel on, and how large they are."""

from __future__ import annotations

from dataclasses import dataclass

from attncheck.core.errors import look_up


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """Amount of work in the property suite and in each stage of a gate."""

    name: str  # on the command line
    examples: int  # problems that a property draws for each kernel, dtype and mask family
    examples_interpreted: int  # the same if Triton is interpreted, which takes 9/10 of the time
    examples_gpu: int  # the same on a GPU
    longest: int  # largest query and kv length on a CPU, where Triton is interpreted
    longest_gpu: int  # the same on a GPU
    # Largest batch · heads on a CPU; an interpreted kernel's time is proportional to it.
    most_heads: int
    # How often a drawn problem is asked on a GPU, each time with other numbers: there a compilation
    # is expensive, and another problem for the same compiled kernel costs nearly nothing.
    repeats_gpu: int
    profile: str  # the Hypothesis profile, unless another is asked for
    strength: int = 2  # the bounds cover every combination of values of this many axes
    sizes: str = "small"  # lengths of the bounds' problems on a CPU: a name of ``covering.SHAPES``
    sizes_gpu: str = "medium"  # the same on a GPU
    # The smallest number of problems that cover every triple of plain values on a GPU, where a
    # compiled kernel is called again at little cost; 0 for a minimal cover, whatever is compiled.
    threes_gpu: int = 0
    # Whether the bounds use every value of an axis, or only the values that find most faults.
    all_values: bool = False
    combinations: int = 1  # number of (dtype, family) that a gate asks each property in; 0: all
    draws: int = 1  # cases that a gate draws for each (dtype, family)
    # Whether a gate asks every probe in every dtype, or each in one; and whether pytest asks each
    # property of built-in kernels in every (dtype, family), or in a covering of them.
    each_dtype: bool = False
    layouts: int = 1  # number of problems for each question about memory or determinism
    measured: int = 12  # cases that are measured for a baseline; 0 for all cases of the bounds
    shrink_seconds: float = 10.0  # how long the search for a smaller failing case may take
    shrinks: int = 3  # how many failures of a kernel are made smaller
    random: bool = False  # whether each run of a gate uses another random seed

    def examples_on(self, device: str, *, triton: bool) -> int:
        """Return how many problems are drawn for a kernel on ``cpu`` or ``cuda``."""
        if device != "cpu":
            return self.examples_gpu
        return self.examples_interpreted if triton else self.examples

    def lengths_on(self, device: str) -> dict[str, int]:
        """Return the largest sizes on ``cpu`` or ``cuda``, as keywords of ``strategies.shapes``."""
        if device == "cpu":
            return {"longest": self.longest, "most_heads": self.most_heads}
        return {"longest": self.longest_gpu}

    def repeats_on(self, device: str) -> int:
        """Return how often a drawn problem is asked on ``cpu`` or ``cuda``."""
        return 1 if device == "cpu" else self.repeats_gpu

    def sizes_on(self, device: str) -> str:
        """Return which of ``covering.SHAPES`` the bounds use on ``cpu`` or ``cuda``."""
        return self.sizes if device == "cpu" else self.sizes_gpu


# Hypothesis' first example is always the plainest, so that of two examples one is random.
# smoke and pr gate a change: they ask the same problems every time, so that a change fails only
# for faults that it brings. nightly draws new problems in each run.
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
            strength=3,
            sizes="medium",
            threes_gpu=1600,
            combinations=3,
            each_dtype=True,
            layouts=2,
            measured=60,
            shrink_seconds=20.0,
            shrinks=8,
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
            strength=3,
            sizes="medium",
            sizes_gpu="large",
            all_values=True,
            combinations=0,
            draws=4,
            each_dtype=True,
            layouts=5,
            measured=0,
            shrink_seconds=60.0,
            shrinks=40,
            random=True,
        ),
    )
}


def tier_named(name: str) -> Tier:
    """Return the tier called ``name``; raises UnknownName with the valid names."""
    return look_up("tier", name, TIERS)


def default_tier(device: str) -> str:
    """Return the default tier of a gate: a small one on a CPU."""
    # Triton is interpreted there, some hundred times slower than on a GPU.
    return "smoke" if device == "cpu" else "pr"

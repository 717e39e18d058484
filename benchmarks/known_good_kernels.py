"""Right kernels that attncheck has no names for: the ideal one at several tilings."""

from __future__ import annotations

from attncheck.subjects.capabilities.subject import Tiling
from attncheck.subjects.ideal import Ideal

__all__ = ["Lazy", "Reversed", "Tall", "Tiny"]


class Tiny(Ideal):
    """Tiles of a warp's product."""

    name, summary = "ideal 16×16", "the ideal kernel, small tiles"

    def __init__(self) -> None:
        super().__init__(Tiling(block_query=16, block_kv=16))


class Tall(Ideal):
    """More rows than keys."""

    name, summary = "ideal 128×32", "the ideal kernel, tall tiles"

    def __init__(self) -> None:
        super().__init__(Tiling(block_query=128, block_kv=32))


class Reversed(Ideal):
    """From the last key to the first."""

    name, summary = "ideal 64×64 reversed", "the ideal kernel, the last key first"

    def __init__(self) -> None:
        super().__init__(Tiling(block_query=64, block_kv=64, reverse=True))


class Lazy(Ideal):
    """A maximum that may lag by what FlashAttention-4 lets it."""

    name, summary = "ideal 32×16 lazy", "the ideal kernel, rescaled seldom"

    def __init__(self) -> None:
        super().__init__(Tiling(block_query=32, block_kv=16, lazy_rescale=8.0))

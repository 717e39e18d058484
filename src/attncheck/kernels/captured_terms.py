"""Gradients of the numbers that a score mod reads from tensors: what each tile adds to them.

The function that does it is printed for a list of reads, as score mods are, and a kernel takes it
as a ``tl.constexpr`` argument: it calls the slopes and places of the reads by name, so that Triton
sees the text of each.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The body of a Triton function is another language: its arguments have no Python types.

from __future__ import annotations

import hashlib
import linecache
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from attncheck.kernels.gradient_tile import score_gradients

if TYPE_CHECKING:
    import torch

    from attncheck.mods.to_triton import TritonMod

__all__ = ["CapturedReads"]


@dataclass(frozen=True, slots=True, eq=False)
class CapturedReads:
    """What a score mod reads from float tensors, as ``mods.captured.reads`` has it.

    Attributes:
        reads: Of each read the derivative of the score mod with respect to the number read; which
            number of its tensor that is; and where that tensor's numbers begin among all.
        numbers: How many there are of all tensors.
    """

    reads: tuple[tuple[TritonMod, TritonMod, int], ...]
    numbers: int

    def function(self) -> Any:
        """What a kernel calls for a tile: a ``@triton.jit`` function.

        ``(x, p, dp, delta, b, h, rows, keys, arguments)``, as ``score_gradients`` has them, adds to
        the gradients; the same object for reads of the same structures.
        """
        return _function(tuple((slope.function, place.function) for slope, place, _ in self.reads))

    def arguments(self, gradients: torch.Tensor) -> tuple[Any, ...]:
        """The last argument of ``function``: of each read its numbers' gradients, and its mods'.

        ``gradients``: fp32 ``(numbers,)``.
        """
        return tuple(
            (gradients[start:], slope.captured, place.captured)
            for slope, place, start in self.reads
        )


@triton.jit
def added(terms, place, gradients):
    """Adds ``terms``, a tile, to ``gradients`` at ``place``, which broadcasts to it.

    Those of one place along an axis are summed before: an addition in memory is slow, and of
    numbers that lie in one place they wait for one another.
    """
    if len(place.shape) == 0:
        terms = tl.sum(tl.sum(terms, 1), 0)
    else:
        if place.shape[0] == 1:
            terms = tl.sum(terms, 0, keep_dims=True)
        if place.shape[1] == 1:
            terms = tl.sum(terms, 1, keep_dims=True)
    tl.atomic_add(gradients + place, terms, mask=terms != 0.0, sem="relaxed")


@cache
def _function(mods: tuple[tuple[Any, Any], ...]) -> Any:
    """The function that adds each of ``mods``, pairs of a slope and a place."""
    lines = ["def captured_terms(x, p, dp, delta, b, h, rows, keys, arguments):"]
    scope: dict[str, Any] = {
        "tl": tl, "__name__": __name__, "added": added, "score_gradients": score_gradients,
    }  # fmt: skip
    for number, (slope, place) in enumerate(mods):
        scope |= {f"slope_{number}": slope, f"place_{number}": place}
        lines += [
            f"    gradients, captured, of_place = arguments[{number}]",
            "    terms = score_gradients(",
            f"        x, p, dp, delta, b, h, rows, keys, captured, slope_{number}, False",
            "    )",
            f"    place = place_{number}(x, b, h, rows, keys, of_place)",
            "    added(terms, place + tl.zeros((), tl.int32), gradients)",
        ]
    source = "\n".join([*lines, ""])
    named = "\n".join([source, *(mod.fn.__qualname__ for pair in mods for mod in pair)])
    # Triton and inspect read a function's text through linecache; no file is needed.
    digest = hashlib.sha256(named.encode()).hexdigest()[:16]
    file = f"<attncheck captured_terms {digest}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec"), scope)  # noqa: S102  (our own printed text)
    function = scope["captured_terms"]
    function.__qualname__ = f"captured_terms_{digest}"  # as to_triton does, and why
    return triton.jit(function)

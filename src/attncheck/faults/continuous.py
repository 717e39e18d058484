"""Faults of the ideal kernel that may be as small as one likes: texts with a number in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from attncheck.errors import UnknownName
from attncheck.faults.fault import Edit, Fault, Host
from attncheck.formats import DTYPES, FORMATS

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CONTINUOUS", "Continuous", "continuous_named"]

_STEPS = 4  # of an octave
_SMALLEST = 30  # octaves below 1: fp32 has 24
_ATTENTION = "subjects.ideal_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuous:
    """A fault of any size.

    Attributes:
        id: Words with hyphens.
        summary: What the kernel does wrong, in one line.
        unit: ``ε``, which is larger where the fault is; or ``bits``, of which fewer are worse.
        edits: Of a size, what is done to a copy of the ideal kernel.
    """

    id: str
    summary: str
    unit: Literal["ε", "bits"]
    edits: Callable[[float], tuple[Edit, ...]]

    def sizes(self, dtype: str) -> tuple[float, ...]:
        """From the largest fault to the smallest: quarters of an octave from 1, or whole bits.

        Bits as far as there is something to lose: of P fewer than the dtype's product reads, of an
        accumulator fewer than fp32's.
        """
        if self.unit == "ε":
            return tuple(2.0 ** (-n / _STEPS) for n in range(_SMALLEST * _STEPS))
        kept = DTYPES[dtype].weights if self.id == _WEIGHTS else FORMATS["fp32"]
        return tuple(range(1, kept.significand))

    def fault(self, size: float) -> Fault:
        """The fault of one size, for ``planted``."""
        said = f"{size:g}".replace(".", "p").replace("-", "m").replace("+", "")
        return Fault(
            id=f"{self.id}-{said}",
            category="precision",
            summary=f"{self.summary}: {self.unit} = {size:g}",
            when="always",
            seen="an error as large as that",
            sources=("by construction",),
            hosts={"ideal": Host(kernel="ideal", edits=self.edits(size))},
            discrete=False,
        )


_WEIGHTS = "weights-of-few-bits"


def _scale(size: float) -> tuple[Edit, ...]:
    return tuple(
        Edit(module=_ATTENTION, old=old, new=old.replace("scale *", f"scale * {1 + size!r} *"))
        for old in ("self.scale = problem.scale * products", "fp32(problem.scale * kernel.log2_e)")
    )


def _one_key(size: float) -> tuple[Edit, ...]:
    tiles = "        for keys in self.key_tiles():\n            seen, at = self.seen(rows, keys)\n"
    weights = "        p = self._weights(s, maximum)\n"
    factor = f"            p[..., :1] = p[..., :1] * {1 + size!r}\n"
    return (
        Edit(
            module=_ATTENTION,
            old=tiles,
            new=f"{tiles}            self.has_first_key = keys.start == 0\n",
        ),
        Edit(
            module=_ATTENTION,
            old=weights,
            new=f"{weights}        if self.has_first_key:\n{factor}",
        ),
    )


def _rounded(name: str, bits: float) -> str:
    """A statement that rounds ``name`` to so many bits (Veltkamp 1968); not what is not finite."""
    wide = f"({name}.double() * {2.0 ** (53 - bits) + 1!r})"
    value = f"({wide} - ({wide} - {name})).float()"
    return f"        {name} = torch.where({name}.isfinite(), {value}, {name})\n"


def _few_bits_of_weights(bits: float) -> tuple[Edit, ...]:
    old = (
        "        p = self.kernel.operand(p * self.factors.weights, self.problem.formats.weights)\n"
    )
    return (Edit(module=_ATTENTION, old=old, new=_rounded("p", bits) + old),)


def _few_bits_of_sums(bits: float) -> tuple[Edit, ...]:
    old = "        run.out = self.kernel.added(out, self._weighted(p, seen, v))\n"
    added = old.replace("run.out", "out")
    return (
        Edit(
            module=_ATTENTION,
            old=old,
            new=added + _rounded("out", bits) + "        run.out = out\n",
        ),
    )


CONTINUOUS = {
    one.id: one
    for one in (
        Continuous(
            id="scale-off",
            summary="the softmax scale is 1 + ε times its own",
            unit="ε",
            edits=_scale,
        ),
        Continuous(
            id="first-key-heavier",
            summary="the first key's weight is 1 + ε times its own",
            unit="ε",
            edits=_one_key,
        ),
        Continuous(
            id=_WEIGHTS,
            summary="P has few bits as P·V reads it",
            unit="bits",
            edits=_few_bits_of_weights,
        ),
        Continuous(
            id="sums-of-few-bits",
            summary="O has few bits after each tile of keys",
            unit="bits",
            edits=_few_bits_of_sums,
        ),
    )
}
"""By id."""


def continuous_named(name: str) -> Continuous:
    """The one called ``name``; raises UnknownName with the valid ones."""
    if name not in CONTINUOUS:
        raise UnknownName("continuous fault", name, CONTINUOUS)
    return CONTINUOUS[name]

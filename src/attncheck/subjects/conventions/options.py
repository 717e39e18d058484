"""What is said of a function from outside: where it differs from its convention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from attncheck.errors import UnknownName
from attncheck.subjects.capabilities import ALIGNMENTS, EMPTY_ROWS, LSE_BASES

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ALIGNMENTS", "EMPTY_ROWS", "LSE_BASES", "ConventionOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConventionOptions:
    """Facts of one kernel that its convention does not know; empty: as the convention has it.

    Attributes:
        lse: Logarithm of its LSE, a name in ``LSE_BASES``.
        empty_row: What it gives for rows that see no key, a name in ``EMPTY_ROWS``.
        causal: How its causal flag and window are aligned, a name in ``ALIGNMENTS``.
        promises: What it promises, names in ``question.PROMISES``; None: what any kernel does.
        returns_lse: True: it must give LSE; False: none is asked for, and one that it gives is
            left out; None: it is asked for where the signature has a flag for it, and taken where
            it comes.
        backward: How its gradients are had where a Problem asks for them: by ``autograd``, or by a
            function (dout, q, k, v, out, lse, and its own keywords) that gives dq, dk and dv, and
            dsink where there are sinks; None: it has none, and is not asked.

    Raises:
        UnknownName: for a name that is none of these.
    """

    lse: Literal["", "natural", "base2"] = ""
    empty_row: Literal["", "zero", "nan", "mean", "unspecified"] = ""
    causal: Literal["", "top_left", "bottom_right"] = ""
    promises: frozenset[str] | None = None
    returns_lse: bool | None = None
    backward: Literal["autograd"] | Callable[..., Any] | None = "autograd"

    def __post_init__(self) -> None:
        for name, valid in (("lse", LSE_BASES), ("empty_row", EMPTY_ROWS), ("causal", ALIGNMENTS)):
            value = getattr(self, name)
            if value and value not in valid:
                raise UnknownName(name, value, valid)
        if isinstance(self.backward, str) and self.backward != "autograd":
            raise UnknownName("backward", self.backward, ("autograd",))

"""Kinds of Problems that a kernel takes or does not, whatever their masks and sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attncheck.core.paged_layout import Paging
from attncheck.mods.spec import Spec

__all__ = ["PLAIN", "Kind"]

_PAGE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What all Problems of a property have.

    Attributes:
        paged: Keys in pages.
        sink: A sink.
        backward: Gradients are asked for.
        captured: And those of what score mods read from tensors.
    """

    paged: bool = False
    sink: bool = False
    backward: bool = False
    captured: bool = False

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of a Problem of this kind."""
        paging = Paging(size=_PAGE) if self.paged else None
        read = {"score": Spec.of("alibi"), "dcaptured": True} if self.captured else {}
        return {"paging": paging, "sink": self.sink, "backward": self.backward, **read}


PLAIN = Kind()
"""Attention without any of it."""

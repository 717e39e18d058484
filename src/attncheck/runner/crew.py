"""Lanes, wherever they are: processes that do one unit at a time, and what is heard of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attncheck.runner.interruptions import Interruptions
    from attncheck.runner.unit import Done, Unit

__all__ = ["Crew", "Limits", "News", "Work"]


class Work(Protocol):
    """What a lane's process makes once, by the factory ``module:function`` of a run."""

    def do(self, unit: Unit) -> Done:
        """What comes of ``unit``. Raising costs a new process, and twice makes a harness error."""

    def close(self) -> None:
        """Ends what it has started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Seconds that things may take.

    Attributes:
        unit: One unit, from being sent to its result, before its lane is taken for hung. Far above
            every deadline within.
        start: A lane, until it can do a unit.
        grace: Running units, where the time of a run is up.
        close: A lane, to end what it has started.
    """

    unit: float = 3600.0
    start: float = 600.0
    grace: float = 60.0
    close: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """Something of a lane.

    Attributes:
        lane: Which.
        done: The result of the unit that it did.
        lost: Why it is gone, with the unit that it did; its place is free.
    """

    lane: int
    done: Done | None = None
    lost: str = ""


class Crew(Protocol):
    """The lanes of a run, by number."""

    def staff(self, wanted: int, *, fresh: int) -> None:
        """Start lanes, up to the most that there may be.

        Args:
            wanted: How many there are to be, those that are being started counted.
            fresh: How many of them at least that have been given no unit.
        """

    def ready(self) -> Sequence[int]:
        """Lanes that can be given a unit now; those that have done none first."""

    def used(self, lane: int) -> bool:
        """Whether it has been given a unit."""

    def give(self, lane: int, unit: Unit) -> None:
        """It is to do ``unit``."""

    def drop(self, lane: int) -> None:
        """End it now, with all processes that it has started."""

    def news(self, seconds: float, interruptions: Interruptions) -> Sequence[News]:
        """What happened; waits so long for something, or for an interrupt.

        Raises:
            AttncheckError: where lanes cannot be started.
        """

"""The smallest size of a fault that one of many questions sees, by asking as few as possible."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from attncheck.sensitivity_record import Least

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Question", "least"]

Question = tuple[str, "Callable[[int], bool]"]
"""What it is called, and whether it sees the fault of a number of the scale: 0 is the largest."""


def least(questions: Sequence[Question], sizes: Sequence[float]) -> Least:
    """The smallest of ``sizes`` that a question sees, by asking as few as possible.

    Each question in turn is asked about the next size below the smallest one seen so far. One that
    sees it is asked on: twice as far each time, then by bisection between what it sees and what it
    does not. This ends once every question has been asked about the size below and sees nothing:
    both ends are confirmed, whatever the order. Seeing need not be monotone: smaller sizes than
    ``below`` that somebody sees again are not looked for.

    Args:
        questions: The most sensitive ones first, for speed alone.
        sizes: From the largest fault to the smallest.
    """
    best, who, asked = -1, "", 0
    left = deque(questions)
    waiting = len(left)
    while waiting and best + 1 < len(sizes):
        name, sees = left[0]
        asked += 1
        if not sees(best + 1):
            left.rotate(-1)
            waiting -= 1
            continue
        best, more = _lowest(sees, best + 1, len(sizes))
        who, asked = name, asked + more
        left.rotate(-1)
        waiting = len(left) - (more > 0)  # it has been asked about the size below
    return Least(
        size=sizes[best] if best >= 0 else None,
        below=sizes[best + 1] if best + 1 < len(sizes) else None,
        question=who,
        asked=asked,
    )


def _lowest(sees: Callable[[int], bool], seen: int, end: int) -> tuple[int, int]:
    """The number from ``seen`` on that a question sees, and not the next; how often it was asked.

    ``end`` is the first that there is not.
    """
    step, asked, unseen = 1, 0, end
    while seen + step < end:
        asked += 1
        if not sees(seen + step):
            unseen = seen + step
            break
        seen, step = seen + step, 2 * step
    while unseen - seen > 1:
        middle = (seen + unseen) // 2
        asked += 1
        if sees(middle):
            seen = middle
        else:
            unseen = middle
    return seen, asked

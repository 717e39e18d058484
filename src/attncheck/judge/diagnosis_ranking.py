"""Which of several wrong ways to compute explains best what a kernel gave."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from attncheck.judge.diagnose import Error, Explained, Hypothesis

__all__ = ["equals", "joint", "ranked", "told_apart"]

_ROUNDING = 0.25  # root mean square of what is left ÷ allowed, that rounding leaves, and no less


def ranked(error: Error, hypotheses: Iterable[Hypothesis]) -> list[Explained]:
    """Those that explain anything, each name in its best form, the best first.

    First what explains all; among those the plainest of what leaves about as little as the least
    does, which rounding decides and not the fault. Else by the share that is explained.
    """
    best: dict[str, Explained] = {}
    for one in _explained(error, hypotheses):
        before = best.get(one.name)
        if before is None or _better(one) < _better(before):
            best[one.name] = one
    return _in_order(best.values())


def joint(first: Sequence[Explained], *more: Sequence[Explained]) -> list[Explained]:
    """What explains several problems of one kernel: each name by the one that it explains least.

    By the one that it explains best, where it explains all of each. A name that says nothing of one
    of them is left out, unless all are.
    """
    each = [{one.name: one for one in ranking} for ranking in (first, *more)]
    everywhere = [name for name in each[0] if all(name in one for one in each)]
    found = []
    for name in everywhere:
        worst = min((one[name] for one in each), key=lambda e: (e.all, e.share))
        if worst.all:  # of an error little beyond its bound rounding is a large share
            worst = max((one[name] for one in each), key=lambda e: e.share)
        found.append(
            replace(
                worst,
                parameters=each[0][name].parameters,
                left=max(one[name].left for one in each),
            )
        )
    ranking = _in_order(found)
    return ranking or list(first)


def told_apart(ranking: Sequence[Explained], fits: Collection[str]) -> list[Explained]:
    """A ranking without those of its first, which are equal, that do not fit a further problem.

    As it is where none of them does.
    """
    tied = equals(ranking)
    left = [one for one in ranking[:tied] if one.name in fits]
    return [*(left or ranking[:tied]), *ranking[tied:]]


def _explained(error: Error, hypotheses: Iterable[Hypothesis]) -> Iterator[Explained]:
    for hypothesis in hypotheses:
        found = error.explained(hypothesis)
        if found is not None:
            yield found


def _better(one: Explained) -> tuple[bool, bool, float]:
    return not one.all, one.loose, one.left if one.all else -one.share


def _in_order(found: Iterable[Explained]) -> list[Explained]:
    some = list(found)
    least = _least(some)

    def rank(one: Explained) -> tuple[bool, bool, bool, int, float]:
        if one.all:
            close = _as_close(one, least)
            # What says nothing of some rows comes after all that predict them.
            return False, one.loose, not close, one.order if close else 0, one.left
        return True, False, False, 0, -one.share

    return sorted(some, key=rank)


def equals(ranking: Sequence[Explained]) -> int:
    """How many of a ranking, from the first on, explain all and leave as little as rounding does.

    0 where none explains all. What leaves rows free equals nothing that predicts them.
    """
    least = _least(ranking)
    loose = bool(ranking) and ranking[0].loose
    return sum(one.all and one.loose == loose and _as_close(one, least) for one in ranking)


def _least(some: Sequence[Explained]) -> float:
    """What the best leaves."""
    found = [one for one in some if one.all]
    strict = [one for one in found if not one.loose]
    return min((one.left for one in strict or found), default=0.0)


def _as_close(one: Explained, least: float) -> bool:
    return one.left <= max(2 * least, _ROUNDING)

"""One cell and one kernel of a plan, by the name that a user gives them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.core.errors import UnknownName, UsageError
from attncheck.verify.run_case import head_arrangement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attncheck.capabilities.subject import Subject
    from attncheck.runner.plan import Cell

__all__ = ["chosen"]

_Asked = tuple["Cell", "Subject"]


def chosen(name: str, pairs: Sequence[tuple[Cell, list[Subject]]]) -> tuple[Cell, Subject]:
    """The one that is called ``name``: ``KERNEL/VARIANT[/HEADS[/DTYPE]]``.

    Args:
        name: What distinguishes it may be left out at the end; a softmax has no HEADS.
        pairs: Cells with the kernels that they concern, of ``measure.pairs``.

    Raises:
        UsageError: where it names none, or several; what there is is listed.
    """
    asked = [(cell, subject) for cell, subjects in pairs for subject in subjects]
    matches = [one for one in asked if f"{_label(one)}/".startswith(f"{name}/")]
    if not matches:
        raise UnknownName("cell", name, _nearest(name, asked))
    if len(matches) > 1:
        raise UsageError(_ambiguous(name, matches))
    return matches[0]


def _parts(asked: _Asked) -> tuple[str, ...]:
    cell, subject = asked
    problem = cell.problem
    parts = (subject.name, cell.variant, head_arrangement(problem), problem.dtype)
    return tuple(part for part in parts if part)


def _label(asked: _Asked) -> str:
    return "/".join(_parts(asked))


def _nearest(name: str, asked: list[_Asked]) -> list[str]:
    """Names that are as long as what of ``name`` is known, and one part more."""
    known = [_parts(one) for one in asked]
    depth = 1
    while True:
        there = {parts: "/".join(parts[:depth]) for parts in known}
        right = [parts for parts in known if f"{name}/".startswith(f"{there[parts]}/")]
        if not right or depth > max(map(len, right)):
            return sorted(set(there.values()))
        known, depth = right, depth + 1


def _ambiguous(name: str, matches: list[_Asked]) -> str:
    labels = [_label(one) for one in matches]
    if len(set(labels)) == len(labels):
        return f"cell {name!r} is one of {', '.join(labels)}: name one of them."
    problems = ", ".join(str(cell.problem) for cell, _ in matches)
    return (
        f"cell {name!r} is one of {len(matches)} problems ({problems}): "
        "ask for one shape, one distribution and one recorded call."
    )

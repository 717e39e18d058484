"""Names that a recording gives its distribution, mask and score mod: which file they are of."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from attncheck.errors import ProblemError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["refuse_recorded", "without_recorded"]

# File, call, and the digest of its bytes.
_RECORDED = re.compile(r"(.+?):.+@[0-9a-f]{8}", re.DOTALL)


def refuse_recorded(kind: str, name: str) -> None:
    """Raises ProblemError, with the file to give, for a name of a recording that is not loaded."""
    recorded = _RECORDED.fullmatch(name)
    if recorded:
        raise ProblemError(
            f"{kind} {name!r} is of a recording: give its file {recorded[1]} with --inputs."
        )


def without_recorded(names: Iterable[str]) -> list[str]:
    """Those of ``names`` that are no recording's: the ones to choose from."""
    return [name for name in names if not _RECORDED.fullmatch(name)]

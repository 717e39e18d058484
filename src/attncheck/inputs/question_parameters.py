"""Parameters of a relation or a probe, by name, and promises that a kernel makes of its bits.

Light on purpose: capability tables are read without torch and NumPy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from attncheck.core.errors import ProblemError
from attncheck.inputs.problem import Problem

Parameters = Mapping[str, int | float]
Allowed = Mapping[str, Sequence[int]]

Promise = Literal["repeat", "batch", "group", "layout", "hidden", "nan"]
"""Promise of a kernel about its bits, beyond being right.

``repeat``: the same call gives the same bits. ``batch``: the bits of a row depend on its own
sequence and kv head alone, and on nothing else in the call nor on where in the batch it stands.
``group``: nor on how many query heads read that kv head.
``layout``: strides and pages do not change bits. ``hidden``: what the mask hides from a row moves
no bit of the row, and may overflow. ``nan``: nor does it where it is NaN, though 0 · NaN is NaN.
"""

PROMISES: tuple[Promise, ...] = ("repeat", "batch", "group", "layout", "hidden", "nan")


def fits_all(problem: Problem) -> None:
    """Return no reason against any Problem."""
    del problem


def no_parameters(problem: Problem) -> Allowed:
    """Return no parameters: there is nothing to choose."""
    del problem
    return {}


def check_parameters(question: str, parameters: Parameters, allowed: Allowed) -> None:
    """Raise ProblemError unless ``parameters`` are those ``allowed``, each one of its numbers."""
    # One too few is refused as well: a default would change what an old report means.
    if set(parameters) != set(allowed):
        needed = ", ".join(allowed) or "none"
        raise ProblemError(f"{question} has parameters {dict(parameters)}: it needs {needed}.")
    for name, value in parameters.items():
        if value not in allowed[name]:
            raise ProblemError(f"{question}.{name}={value} must be one of {list(allowed[name])}.")

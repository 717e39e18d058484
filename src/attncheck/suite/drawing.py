"""Cases of a property, drawn by Hypothesis for one kernel, without asking it any of them."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import PurePath
from typing import TYPE_CHECKING

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import FailedHealthCheck, Unsatisfiable

from attncheck.suite.asking import cases
from attncheck.suite.profiles import settings_of
from attncheck.suite.under_test import UnderTest

if TYPE_CHECKING:
    from attncheck.inputs.problem import Case, Problem
    from attncheck.suite.asking import Asked

__all__ = ["Drawing", "drawn"]

_PATIENCE = 1500  # questions without a Case; the nearest that is taken may be the 500th


class _NothingTakenError(BaseException):
    """No Exception, which Hypothesis would keep for a failure of the test."""


class Drawing(UnderTest):
    """A kernel that is asked what it takes; where it never takes anything, not for ever."""

    waited = 0

    def supports(self, problem: Problem) -> bool:
        """As of every kernel."""
        self.waited += 1
        if self.waited > _PATIENCE:
            raise _NothingTakenError
        return super().supports(problem)


def drawn(kernel: Drawing, asked: Asked, test: str, count: int, *, seed: int = 0) -> list[Case]:
    """``count`` Cases of a property for the kernel's dtype and family; fewer where it takes fewer.

    They follow from the arguments and from what the kernel takes: each kernel, dtype and family
    has Cases of its own, and the same ones next time, on any machine.

    Args:
        kernel: Which Problems it takes is asked of it, and nothing else.
        asked: The property.
        test: Its id.
        count: How many at most. Hypothesis' first is the plainest there is, and stands for itself
            only where it draws no other.
        seed: Which draw.

    Returns:
        None where the kernel takes none; ``kernel.refused`` says why.
    """
    kernel.begin()
    kernel.waited = 0
    found: dict[str, Case] = {}

    def collect(case: Case) -> None:
        kernel.waited = 0
        found.setdefault(case.id, case)

    patient = settings(
        settings_of(),
        database=None,
        phases=[Phase.generate],
        max_examples=count + 1,
        # Hundreds more would be drawn until Hypothesis gave up.
        suppress_health_check=set(HealthCheck) - {HealthCheck.filter_too_much},
    )
    chosen = f"{seed} {test} {_called(kernel.name)} {kernel.dtype} {kernel.family}"
    number = int.from_bytes(hashlib.sha256(chosen.encode()).digest()[:8], "big")
    # Where of the first few dozen most are refused, those that are not are asked.
    with suppress(FailedHealthCheck, Unsatisfiable, _NothingTakenError):
        hypothesis.seed(number)(patient(given(case=cases(kernel, asked))(collect)))()
    those = list(found.values())
    return those[1 : count + 1] or those


def _called(name: str) -> str:
    """``file.py::function`` wherever the file lies: a draw is the same in every clone."""
    file, mark, function = name.rpartition("::")
    return f"{PurePath(file).name}{mark}{function}"

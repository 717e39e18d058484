"""The search: Hypothesis draws cases of one property, for one kernel, until one fails."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import PurePath

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, event, given, settings, target
from hypothesis.errors import FailedHealthCheck, Flaky, Unsatisfiable, UnsatisfiedAssumption
from hypothesis.strategies import SearchStrategy

from attncheck.inputs.problem import Case, Problem
from attncheck.suite.pytest_options import settings_of
from attncheck.suite.under_test import UnderTest
from attncheck.suite.wrong_answers import WrongAnswer

_TILE = 16  # the smallest that kernels use
_FLAKY = "It does not fail every time: of the runs of this very case, at least one held."
_PATIENCE = 1500  # questions without a Case; the nearest that is taken may be the 500th


def search_cases(
    test: Callable[[UnderTest, Case], None],
    kernel: UnderTest,
    cases: SearchStrategy[Case],
    beside: Callable[[Case], Iterable[Case]] = lambda _: (),
) -> None:
    """Ask ``test`` of as many ``cases`` as the kernel's tier says; the smallest failure raises.

    Skips where the kernel took none of them, and said why.

    Args:
        beside: Other cases that are asked together with a drawn one.

    Raises:
        WrongAnswer: for the smallest failing Case.
    """
    __tracebackhide__ = True
    kernel.begin()

    # Where it is not random Hypothesis seeds itself by this function's source, line by line:
    # another text draws other cases in every test.
    def holds(case: Case) -> None:
        __tracebackhide__ = True
        kernel.share = 0.0
        test(kernel, case)
        for other in beside(case):
            with suppress(UnsatisfiedAssumption):  # refused as it was called: the first was not
                test(kernel, other)
        event(f"lengths {_remainders(case)} of {_TILE}")
        if kernel.share:
            target(math.log2(kernel.share), label="log2(error / bound)")

    # And by its signature: by this each kernel, dtype and family has problems of its own, and the
    # same ones next time.
    holds.__annotations__["case"] = f"{test.__name__} {kernel.name} {kernel.dtype} {kernel.family}"
    try:
        _search(holds, kernel, cases)
    except Unsatisfiable:
        if kernel.reason:
            kernel.skip()
        pytest.fail(f"nothing was tested: no problem of {kernel.family} fits", pytrace=False)
    except Flaky:
        # Then it was the drawing that differed from run to run, not the kernel.
        if kernel.failed is None:
            raise
        raise WrongAnswer(
            kernel.failed, kernel=kernel.name, device=kernel.device, remark=_FLAKY
        ) from None
    if kernel.tally.total and kernel.tally.total == kernel.tally.problems.get("inconclusive"):
        pytest.skip(f"nothing could be judged of {kernel.name}: every answer is inconclusive")


def _search(holds: Callable[[Case], None], kernel: UnderTest, cases: SearchStrategy[Case]) -> None:
    """Let Hypothesis draw; raises Unsatisfiable where the first few dozen are all refused."""
    __tracebackhide__ = True
    profile = settings.get_profile(kernel.tier.profile)
    most = kernel.tier.examples_on(kernel.device, triton=kernel.subject.triton)
    patient = settings(profile, max_examples=most)
    # This one check ends a search early where everything is refused.
    others = set(patient.suppress_health_check) - {HealthCheck.filter_too_much}
    try:
        settings(patient, suppress_health_check=others)(given(case=cases)(holds))()
    except FailedHealthCheck:
        # Hundreds more would be drawn until Hypothesis gave up; where some were taken, they are.
        if not kernel.tally.total:
            raise Unsatisfiable from None
        patient(given(case=cases)(holds))()


def _remainders(case: Case) -> str:
    whole = [not length % _TILE for length in (case.problem.query, case.problem.kv)]
    return {2: "both multiples", 1: "one multiple", 0: "no multiples"}[sum(whole)]


# ------------------------------------------------------------ drawing without asking


class _NothingTakenError(BaseException):
    """No Exception, which Hypothesis would keep for a failure of the test."""


class DrawingKernel(UnderTest):
    """A kernel that is asked what it takes; where it never takes anything, not for ever."""

    waited = 0

    def supports(self, problem: Problem) -> bool:
        """Return what ``UnderTest`` does, and give up after too many refusals in a row."""
        self.waited += 1
        if self.waited > _PATIENCE:
            raise _NothingTakenError
        return super().supports(problem)


def draw_cases(
    kernel: DrawingKernel, cases: SearchStrategy[Case], test: str, count: int, *, seed: int = 0
) -> list[Case]:
    """Draw ``count`` cases for the kernel's dtype and family; fewer where it takes fewer.

    They follow from the arguments and from what the kernel takes: each kernel, dtype and family
    has cases of its own, and the same ones next time, on any machine.

    Args:
        kernel: Which Problems it takes is asked of it, and nothing else.
        count: How many at most. Hypothesis' first is the plainest there is, and stands for itself
            only where it draws no other.

    Returns:
        None where the kernel takes none; ``kernel.reason`` says why.
    """
    kernel.begin()
    kernel.waited = 0
    by_id: dict[str, Case] = {}

    def collect(case: Case) -> None:
        kernel.waited = 0
        by_id.setdefault(case.id, case)

    patient = settings(
        settings_of(),
        database=None,
        # Nothing is asked yet: there is no failure to shrink, and none of before to repeat.
        phases=[Phase.generate],
        # One more than asked for, since the first, plainest one is left out.
        max_examples=count + 1,
        # Hundreds more would be drawn until Hypothesis gave up.
        suppress_health_check=set(HealthCheck) - {HealthCheck.filter_too_much},
    )
    # ``file.py::function`` wherever the file lies: a draw is the same in every clone.
    file, mark, function = kernel.name.rpartition("::")
    name = f"{PurePath(file).name}{mark}{function}"
    key = f"{seed} {test} {name} {kernel.dtype} {kernel.family}"
    # Python's own hash of a text is another in each process.
    number = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
    # Where of the first few dozen most are refused, those that are not are asked.
    with suppress(FailedHealthCheck, Unsatisfiable, _NothingTakenError):
        hypothesis.seed(number)(patient(given(case=cases)(collect)))()
    drawn = list(by_id.values())
    return drawn[1 : count + 1] or drawn

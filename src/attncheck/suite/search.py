"""Search with Hypothesis for a failing case of one property and one kernel."""

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

_TILE = 16  # The smallest tile size that kernels use.
_FLAKY = "It does not fail every time: of the runs of this very case, at least one held."
_PATIENCE = 1500  # Refusals in a row before giving up; moving one Problem may take 500.


def search_cases(
    test: Callable[[UnderTest, Case], None],
    kernel: UnderTest,
    cases: SearchStrategy[Case],
    beside: Callable[[Case], Iterable[Case]] = lambda _: (),
) -> None:
    """Run ``test`` on as many ``cases`` as the kernel's tier requires, and shrink a failure.

    Skips the test, with the reason, if the kernel took none of them.

    Args:
        beside: Yields further cases to ask along with a drawn one.

    Raises:
        WrongAnswer: for the smallest failing Case.
    """
    __tracebackhide__ = True
    kernel.begin()

    # In profiles that are not random, Hypothesis derives its seed from the source text of this
    # function: any change of it, even of a comment, changes the cases of all tests.
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

    # The signature is part of the seed, so that each test, kernel, dtype and family has its own
    # reproducible cases.
    holds.__annotations__["case"] = f"{test.__name__} {kernel.name} {kernel.dtype} {kernel.family}"
    try:
        _search(holds, kernel, cases)
    except Unsatisfiable:
        if kernel.reason:
            kernel.skip()
        pytest.fail(f"nothing was tested: no problem of {kernel.family} fits", pytrace=False)
    except Flaky:
        # Without a failure of the kernel, drawing itself was not reproducible.
        if kernel.failed is None:
            raise
        raise WrongAnswer(
            kernel.failed, kernel=kernel.name, device=kernel.device, remark=_FLAKY
        ) from None
    if kernel.tally.total and kernel.tally.total == kernel.tally.problems.get("inconclusive"):
        pytest.skip(f"nothing could be judged of {kernel.name}: every answer is inconclusive")


def _search(holds: Callable[[Case], None], kernel: UnderTest, cases: SearchStrategy[Case]) -> None:
    """Run Hypothesis; raise Unsatisfiable if the first few dozen cases are all refused."""
    __tracebackhide__ = True
    profile = settings.get_profile(kernel.tier.profile)
    most = kernel.tier.examples_on(kernel.device, triton=kernel.subject.triton)
    search_settings = settings(profile, max_examples=most)
    # The check filter_too_much ends a search early if everything is refused.
    others = set(search_settings.suppress_health_check) - {HealthCheck.filter_too_much}
    try:
        settings(search_settings, suppress_health_check=others)(given(case=cases)(holds))()
    except FailedHealthCheck:
        # Without the check Hypothesis would try hundreds more: only done if some were taken.
        if not kernel.tally.total:
            raise Unsatisfiable from None
        search_settings(given(case=cases)(holds))()


def _remainders(case: Case) -> str:
    are_multiples = [not length % _TILE for length in (case.problem.query, case.problem.kv)]
    return {2: "both multiples", 1: "one multiple", 0: "no multiples"}[sum(are_multiples)]


# ------------------------------------------------------------ drawing without asking


class _NothingTakenError(BaseException):
    """Ends drawing; no Exception, since Hypothesis would take that for a failure of the test."""


class DrawingKernel(UnderTest):
    """A kernel that is only asked what it takes, up to a number of refusals in a row."""

    waited = 0

    def supports(self, problem: Problem) -> bool:
        """See ``UnderTest``; gives up after too many refusals in a row."""
        self.waited += 1
        if self.waited > _PATIENCE:
            raise _NothingTakenError
        return super().supports(problem)


def draw_cases(
    kernel: DrawingKernel, cases: SearchStrategy[Case], test: str, count: int, *, seed: int = 0
) -> list[Case]:
    """Draw up to ``count`` cases for the kernel's dtype and family.

    They depend only on the arguments and on what the kernel takes, so that each kernel, dtype and
    family has its own cases, which are reproducible on any machine.

    Args:
        kernel: The kernel, which is only asked what it takes.
        count: Largest number of cases. Hypothesis' first case, the plainest, is left out unless it
            is the only one.

    Returns:
        The cases; empty if the kernel takes none, with the reason in ``kernel.reason``.
    """
    kernel.begin()
    kernel.waited = 0
    by_id: dict[str, Case] = {}

    def collect(case: Case) -> None:
        kernel.waited = 0
        by_id.setdefault(case.id, case)

    draw_settings = settings(
        settings_of(),
        database=None,
        # Nothing is asked yet, so that there are no failures to shrink or to repeat.
        phases=[Phase.generate],
        # One more than ``count``, since the first, plainest one is left out.
        max_examples=count + 1,
        # This check ends drawing early; otherwise Hypothesis would try hundreds more.
        suppress_health_check=set(HealthCheck) - {HealthCheck.filter_too_much},
    )
    # Without the folder of the file, so that draws are equal in every clone.
    file, mark, function = kernel.name.rpartition("::")
    name = f"{PurePath(file).name}{mark}{function}"
    key = f"{seed} {test} {name} {kernel.dtype} {kernel.family}"
    # Unlike hash() of a str, SHA-256 is equal in every process.
    number = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
    # If most of the first few dozen are refused, the others are used.
    with suppress(FailedHealthCheck, Unsatisfiable, _NothingTakenError):
        hypothesis.seed(number)(draw_settings(given(case=cases)(collect)))()
    drawn = list(by_id.values())
    return drawn[1 : count + 1] or drawn

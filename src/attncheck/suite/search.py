"""Hypothesis at work: Cases of one property, of one kernel, until one fails."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, event, given, settings, target
from hypothesis.errors import FailedHealthCheck, Flaky, Unsatisfiable, UnsatisfiedAssumption

from attncheck.suite.diagnosed import DoesNotHold

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hypothesis.strategies import SearchStrategy

    from attncheck.inputs.problem import Case
    from attncheck.suite.under_test import UnderTest

__all__ = ["search"]

_TILE = 16  # the smallest that kernels use
_FLAKY = "It does not fail every time: of the runs of this very case, at least one held."


def search(
    test: Callable[[UnderTest, Case], None],
    kernel: UnderTest,
    cases: SearchStrategy[Case],
    beside: Callable[[Case], Iterable[Case]] = lambda _: (),
) -> None:
    """Ask ``test`` of as many ``cases`` as the kernel's tier says; the smallest failure raises.

    Skips where the kernel took none of them, and said why.

    Args:
        test: The property.
        kernel: Of which it is asked.
        cases: What is drawn.
        beside: Other Cases that are asked together with a drawn one.

    Raises:
        DoesNotHold: for the smallest failing Case.
    """
    __tracebackhide__ = True
    kernel.begin()

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

    # Where it is not random Hypothesis draws by the source and the signature: by this each kernel,
    # dtype and family has problems of its own, and the same ones next time.
    holds.__annotations__["case"] = f"{test.__name__} {kernel.name} {kernel.dtype} {kernel.family}"
    try:
        _drawn(holds, kernel, cases)
    except Unsatisfiable:
        _nothing_tested(kernel)
    except Flaky:
        if kernel.failed is None:
            raise
        raise DoesNotHold(
            kernel.failed, kernel=kernel.name, device=kernel.device, remark=_FLAKY
        ) from None
    if kernel.tally.total and kernel.tally.total == kernel.tally.problems.get("inconclusive"):
        pytest.skip(f"nothing could be judged of {kernel.name}: every answer is inconclusive")


def _drawn(holds: Callable[[Case], None], kernel: UnderTest, cases: SearchStrategy[Case]) -> None:
    """Let Hypothesis draw; raises Unsatisfiable where the first few dozen are all refused."""
    __tracebackhide__ = True
    profile = settings.get_profile(kernel.tier.profile)
    most = kernel.tier.examples_on(kernel.device, triton=kernel.subject.triton)
    patient = settings(profile, max_examples=most)
    few = {HealthCheck.filter_too_much}
    others = set(patient.suppress_health_check) - few
    try:
        settings(patient, suppress_health_check=others)(given(case=cases)(holds))()
    except FailedHealthCheck:
        # Hundreds more would be drawn until Hypothesis gave up; where some were taken, they are.
        if not kernel.tally.total:
            raise Unsatisfiable from None
        patient(given(case=cases)(holds))()


def _remainders(case: Case) -> str:
    """Which lengths are whole tiles."""
    whole = [not length % _TILE for length in (case.problem.query, case.problem.kv)]
    return {2: "both multiples", 1: "one multiple", 0: "no multiples"}[sum(whole)]


def _nothing_tested(kernel: UnderTest) -> None:
    __tracebackhide__ = True
    if kernel.refused:
        kernel.skip()
    pytest.fail(f"nothing was tested: no problem of {kernel.family} fits", pytrace=False)

"""``@attncheck.given``: Hypothesis' decorator with the settings that kernels need."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import hypothesis

from attncheck.suite.profiles import settings_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from hypothesis.strategies import SearchStrategy

__all__ = ["given"]

_OWN = "_hypothesis_internal_settings_applied"


def given(
    *strategies: SearchStrategy[Any], **named: SearchStrategy[Any]
) -> Callable[[Callable[..., None]], Any]:
    """``hypothesis.given`` for tests of kernels: ``@attncheck.given(problems())``.

    Without a deadline, since an interpreted kernel takes as long as it takes; one failure at a
    time; no health check of slow or filtered draws. Everything else is the current profile's.
    ``@settings`` of your own stand below it, between it and the test, and then are all that holds.
    """

    def decorate(test: Callable[..., None]) -> Any:
        wrapped = hypothesis.given(*strategies, **named)(test)
        return wrapped if hasattr(test, _OWN) else settings_of()(wrapped)

    return decorate

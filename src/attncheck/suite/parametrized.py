"""Which tests a test function becomes: one for each kernel × dtype × mask family, or Problem."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from attncheck.runner.quick import questions
from attncheck.suite.marks import MARK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attncheck.suite.session import Session

__all__ = ["NOT_ASKED", "kernels", "problems"]

NOT_ASKED = "attncheck-asks-nothing"
"""Id of a property that concerns none of the kernels; it is taken out when all is collected."""


def kernels(metafunc: pytest.Metafunc, session: Session) -> None:
    """Parametrise ``kernel``: what a property asks of, or each kernel."""
    marker = metafunc.definition.get_closest_marker(MARK)
    if marker is None:
        params = [pytest.param(each, id=each.id) for each in session.plain_params()]
        metafunc.parametrize("kernel", params, indirect=True, scope="session")
        return
    params = [
        pytest.param(each, id=each.id, marks=_skips(each.refused))
        for each in session.params(marker.args[0])
    ]
    # By module, so that a file's tests stay together and in order.
    metafunc.parametrize(
        "kernel", params or [pytest.param(None, id=NOT_ASKED)], indirect=True, scope="module"
    )


def problems(metafunc: pytest.Metafunc, dtypes: Sequence[str]) -> None:
    """Parametrise ``problem``: the dozen Problems of ``attncheck check``, by their names."""
    params = [
        pytest.param(each.case.problem, id=each.name if len(dtypes) < 2 else f"{dtype}-{each.name}")
        for dtype in dtypes or ("bf16",)
        for each in questions(dtype)
        if each.case.question == "compare"
    ]
    metafunc.parametrize("problem", params, indirect=True, scope="session")


def _skips(reason: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.skip(reason=reason)] if reason else []

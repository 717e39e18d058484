"""Which collected tests are known failures, and which entries are about no test at all."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from attncheck.capabilities import named_kernels
from attncheck.core.errors import UsageError
from attncheck.records.record import FAILED_STATUSES
from attncheck.suite.known_failures import FILE, KnownFailure, read
from attncheck.suite.marks import MARK
from attncheck.suite.parametrized import NOT_ASKED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attncheck.suite.session import Param, Session
    from attncheck.suite.under_test import UnderTest

__all__ = ["ask_again", "asked", "known_failures", "param_of"]


def asked(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """``items`` without properties that concern none of the kernels."""
    return [item for item in items if not item.name.endswith(f"[{NOT_ASKED}]")]


def known_failures(
    session: pytest.Session, items: Sequence[pytest.Item], judged: Session
) -> dict[pytest.Item, KnownFailure]:
    """Those of ``items`` that are known to fail.

    Raises:
        pytest.UsageError: for a file that is none, and for an entry that is about no test though
            all that it could be about were collected: not where the command line names single
            tests, another kernel or dtype, or the device is another.
    """
    properties = [item for item in items if item.get_closest_marker(MARK)]
    known: dict[pytest.Item, KnownFailure] = {}
    for folder in sorted({item.path.parent for item in properties}):
        here = [item for item in properties if item.path.parent == folder]
        for entry in _entries(judged.options.known_failures, folder):
            those = [
                item for item in here if entry.matches(_name(item), param_of(item), judged.device)
            ]
            if not those and _whole(session, entry, here, folder) and _about(entry, judged):
                raise pytest.UsageError(
                    f"{entry.where}: test {entry.test!r} of kernel {entry.kernel!r} matches no "
                    "test that was collected: correct or remove it."
                )
            for item in those:
                known.setdefault(item, entry)
    return known


def ask_again(entry: KnownFailure, kernel: UnderTest) -> bool:
    """Ask the entry's Case: xfail where it fails still, and that is the whole test.

    Where it holds, that is a failure; but of an entry that depends on the machine it says that this
    is another one.

    Returns:
        Whether the test is done; False where it is to search, as if there were no entry.
    """
    record = kernel.answer(entry.case_in(kernel.dtype))
    if record.status in FAILED_STATUSES:
        pytest.xfail(entry.reason)
    if entry.depends_on:
        return False
    said = f" ({record.reason})" if record.reason else ""
    pytest.fail(
        f"known failure no longer fails: {kernel.name} on {kernel.device} answers {record.status}"
        f"{said} to {entry.case.problem}; remove {entry.where}.",
        pytrace=False,
    )


def param_of(item: pytest.Item) -> Param:
    """Which part of the suite a property's test is."""
    param: Param = item.callspec.params["kernel"]  # type: ignore[attr-defined]  # a Function's
    return param


def _name(item: pytest.Item) -> str:
    return f"{item.path.name}::{getattr(item, 'originalname', item.name)}"


def _entries(given: str, folder: Path) -> tuple[KnownFailure, ...]:
    path = Path(given) if given else folder / FILE
    if not given and not path.exists():
        return ()
    try:
        return read(path)
    except UsageError as error:
        raise pytest.UsageError(f"--known-failures: {error}") from None


def _whole(
    session: pytest.Session, entry: KnownFailure, here: Sequence[pytest.Item], folder: Path
) -> bool:
    """Whether all tests that the entry could be about have been collected."""
    config = session.config
    single = any("::" in argument for argument in config.args)
    if single or session.testsfailed or config.getoption("lf", default=False):
        return False
    files = {path.name for path in folder.glob("*.py") if fnmatchcase(path.name, entry.file)}
    # A name of no file is a mistake, and seen as one where the whole folder was asked for.
    return files <= {item.path.name for item in here} and (
        bool(files) or session.isinitpath(folder)
    )


def _about(entry: KnownFailure, judged: Session) -> bool:
    """Whether what was asked for is what the entry is about."""
    dtypes = judged.options.dtypes
    if entry.device not in {"", judged.device}:
        return False
    if dtypes and entry.dtypes and not set(dtypes) & set(entry.dtypes):
        return False
    if any(entry.is_of(kernel.name) for kernel in judged.kernels):
        return True
    # Left out here: a built-in kernel that cannot run on this device. Any other name is a mistake,
    # where no kernel was asked for by name.
    return not judged.options.kernels and not any(map(entry.is_of, named_kernels.builtin_names()))

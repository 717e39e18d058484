"""Known failures, which are read from a file, matched with tests, and asked in every run."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from attncheck.cases.mask_samples import SOFTMAX
from attncheck.cases.strategies import MASK_FAMILIES
from attncheck.core.errors import UsageError, require_known
from attncheck.core.formats import DTYPES
from attncheck.inputs.problem import Case
from attncheck.records.record import FAILED_STATUSES
from attncheck.subjects.capabilities import named_kernels
from attncheck.suite.pytest_options import MARK
from attncheck.suite.session import Param, Session, covering
from attncheck.suite.under_test import UnderTest

FILE = "known_failures.toml"  # Name of the file in the folder of the properties.

_NEEDED = ("test", "kernel", "reason", "case")
_FIELDS = (*_NEEDED, "dtypes", "families", "device", "depends_on")
_TEXTS = ("test", "kernel", "reason", "device", "depends_on")


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownFailure:
    """One entry ``[[failure]]``; test and kernel are patterns of ``fnmatch``."""

    test: str  # ``test_causal.py::test_attention_is_exact``
    kernel: str
    reason: str  # Whose fault it is, in one line.
    case: Case  # The smallest Case that fails.
    # dtypes, families: only these; empty for all. In a test of another dtype the Case is asked in
    # that dtype.
    dtypes: tuple[str, ...] = ()
    families: tuple[str, ...] = ()
    device: str = ""  # ``cpu`` or ``cuda``; empty for both.
    # Property of the machine that makes the Case fail; empty if it fails everywhere. If the Case of
    # an entry with such a property passes, the test searches as usual.
    depends_on: str = ""
    where: str  # The file and the entry's number in it.

    def matches(self, test: str, kernel: str, dtype: str, family: str, device: str) -> bool:
        """Return whether the entry is about ``test_causal.py::test_x`` with these parameters."""
        return (
            fnmatchcase(test, self.test)
            and self.concerns(kernel, dtype, device)
            and (not self.families or family in self.families)
        )

    def concerns(self, kernel: str, dtype: str, device: str) -> bool:
        """Return whether the entry is about tests of ``kernel`` in a dtype on a device."""
        return (
            self.is_of(kernel)
            and (not self.dtypes or dtype in self.dtypes)
            and self.device in {"", device}
        )

    def is_of(self, kernel: str) -> bool:
        """Return whether the entry is about ``kernel``."""
        return fnmatchcase(kernel, self.kernel)

    def case_in(self, dtype: str) -> Case:
        """Return the Case, in the test's ``dtype`` if the entry is about several dtypes."""
        # The Case of an entry about a single dtype is already in it.
        several = len(self.dtypes) > 1 and dtype in self.dtypes
        if not dtype or (self.dtypes and not several):
            return self.case
        problem = self.case.problem.replace(dtype=dtype)
        return Case(problem=problem, question=self.case.question, parameters=self.case.parameters)


def read_known_failures(path: Path) -> tuple[KnownFailure, ...]:
    """Return the entries of a file, in order.

    Raises:
        UsageError: in one line with the entry's number, for an invalid file.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{path}: {reason}.") from None
    entries = data.pop("failure", [])
    if data:
        raise UsageError(f"{path}: unknown key {next(iter(data))!r}: it holds [[failure]] alone.")
    if not isinstance(entries, list) or not all(isinstance(each, dict) for each in entries):
        raise UsageError(f"{path}: failure must be a list: write [[failure]].")
    return tuple(
        _entry(each, f"{path.name}, entry {number}") for number, each in enumerate(entries, 1)
    )


def _entry(data: Mapping[str, Any], where: str) -> KnownFailure:
    require_known(f"{where}: key", data, _FIELDS)
    for name in _NEEDED:
        if not data.get(name):
            raise UsageError(f"{where}: {name} is missing.")
    texts = {name: data.get(name, "") for name in _TEXTS}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise UsageError(f"{where}: {name} must be text, not {text!r}.")
    if "::" not in texts["test"]:
        raise UsageError(f"{where}: test {texts['test']!r} must be FILE.py::TEST.")
    if texts["device"]:
        require_known(f"{where}: device", [texts["device"]], ("cpu", "cuda"))
    return KnownFailure(
        **texts,
        dtypes=_name_list(data, where, "dtypes", DTYPES),
        families=_name_list(data, where, "families", (*MASK_FAMILIES, SOFTMAX)),
        case=_case(data["case"], where),
        where=where,
    )


def _name_list(data: Mapping[str, Any], where: str, key: str, valid: Any) -> tuple[str, ...]:
    names = data.get(key, [])
    if not isinstance(names, list):
        raise UsageError(f"{where}: {key} must be a list, not {names!r}.")
    require_known(f"{where}: {key}", names, valid)
    return tuple(names)


def _case(data: Any, where: str) -> Case:
    try:
        return Case.from_json(json.loads(data) if isinstance(data, str) else data)
    except (UsageError, json.JSONDecodeError) as error:
        raise UsageError(f"{where}: case: {error}") from None


def beyond_covering(
    items: Sequence[pytest.Item], known: Collection[pytest.Item]
) -> list[pytest.Item]:
    """Return the properties' tests that are not needed in a covering: see ``covering``.

    Tests that are skipped or known to fail draw nothing: they are neither returned nor part of the
    covering.
    """
    drawing = {
        item: (_name(item), param_of(item))
        for item in items
        if item.get_closest_marker(MARK)
        and not item.get_closest_marker("skip")
        and item not in known
    }
    chosen = covering(drawing)
    return [item for item in drawing if item not in chosen]


def known_failures(
    session: pytest.Session, items: Sequence[pytest.Item], judged: Session
) -> dict[pytest.Item, KnownFailure]:
    """Return those of ``items`` that are known to fail, with their entries.

    Raises:
        pytest.UsageError: for an invalid file, and for an entry that matches no test although all
            tests were collected that it could match, which is not so if the command line selects
            single tests, or the kernel, dtype or device is a different one.
    """
    properties = [item for item in items if item.get_closest_marker(MARK)]
    known: dict[pytest.Item, KnownFailure] = {}
    for folder in sorted({item.path.parent for item in properties}):
        here = [item for item in properties if item.path.parent == folder]
        for entry in _entries(judged.options.known_failures, folder):
            matches = [
                item
                for item in here
                for param in [param_of(item)]
                if entry.matches(
                    _name(item), param.kernel.name, param.dtype, param.family, judged.device
                )
            ]
            if (
                not matches
                and _all_collected(session, entry, here, folder)
                and _is_about_this_run(entry, judged)
            ):
                raise pytest.UsageError(
                    f"{entry.where}: test {entry.test!r} of kernel {entry.kernel!r} matches no "
                    "test that was collected: correct or remove it."
                )
            for item in matches:
                # If several entries match a test, the first one in the file counts.
                known.setdefault(item, entry)
    return known


def rerun_known_failure(entry: KnownFailure, kernel: UnderTest) -> bool:
    """Ask the entry's Case, and xfail the test if it still fails.

    If it passes, the test fails, unless the entry depends on the machine.

    Returns:
        False if the test has to search, as if there were no entry.
    """
    record = kernel.answer(entry.case_in(kernel.dtype))
    if record.status in FAILED_STATUSES:
        pytest.xfail(entry.reason)
    if entry.depends_on:
        return False
    reason = f" ({record.reason})" if record.reason else ""
    pytest.fail(
        f"known failure no longer fails: {kernel.name} on {kernel.device} answers {record.status}"
        f"{reason} to {entry.case.problem}; remove {entry.where}.",
        pytrace=False,
    )


def param_of(item: pytest.Item) -> Param:
    """Return the Param of a property's test."""
    param: Param = item.callspec.params["kernel"]  # type: ignore[attr-defined]  # a Function's
    return param


def _name(item: pytest.Item) -> str:
    return f"{item.path.name}::{getattr(item, 'originalname', item.name)}"


def _entries(option: str, folder: Path) -> tuple[KnownFailure, ...]:
    path = Path(option) if option else folder / FILE
    if not option and not path.exists():
        return ()
    try:
        return read_known_failures(path)
    except UsageError as error:
        raise pytest.UsageError(f"--known-failures: {error}") from None


def _all_collected(
    session: pytest.Session, entry: KnownFailure, here: Sequence[pytest.Item], folder: Path
) -> bool:
    """Return whether all tests that the entry could be about have been collected."""
    config = session.config
    single = any("::" in argument for argument in config.args)
    # If only some tests were to be collected, a missing one is no mistake.
    if single or session.testsfailed or config.getoption("lf", default=False):
        return False
    pattern = entry.test.partition("::")[0]
    files = {path.name for path in folder.glob("*.py") if fnmatchcase(path.name, pattern)}
    # An entry for a missing file is a mistake, which is only certain if the folder was collected.
    return files <= {item.path.name for item in here} and (
        bool(files) or session.isinitpath(folder)
    )


def _is_about_this_run(entry: KnownFailure, judged: Session) -> bool:
    """Return whether this run's device, dtypes and kernels include the entry's."""
    dtypes = judged.options.dtypes
    if entry.device not in {"", judged.device}:
        return False
    if dtypes and entry.dtypes and not set(dtypes) & set(entry.dtypes):
        return False
    if any(entry.is_of(kernel.name) for kernel in judged.kernels):
        return True
    # By default all built-in kernels that can run on the device are tested. An entry for one of the
    # others is no mistake, but one for an unknown name is.
    return not judged.options.kernels and not any(map(entry.is_of, named_kernels.builtin_names()))

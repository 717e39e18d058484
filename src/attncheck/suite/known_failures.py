"""Failures that are known, with a reason each: read from a file, and asked anew every time."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from attncheck.core.errors import UsageError
from attncheck.core.formats import DTYPES
from attncheck.inputs.problem import Case
from attncheck.strategies.families import MASK_FAMILIES
from attncheck.suite.marks import SOFTMAX

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from attncheck.suite.session import Param

__all__ = ["FILE", "KnownFailure", "read"]

FILE = "known_failures.toml"
"""Its name, beside the properties."""

_NEEDED = ("test", "kernel", "reason", "case")
_FIELDS = (*_NEEDED, "dtypes", "families", "device", "depends_on")
_TEXTS = ("test", "kernel", "reason", "device", "depends_on")
_DEVICES = ("", "cpu", "cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownFailure:
    """One entry ``[[failure]]``; test and kernel are patterns of ``fnmatch``.

    Attributes:
        test: ``test_causal.py::test_attention_is_exact``.
        kernel: A kernel's name, as it is asked for.
        reason: Whose fault it is, in one line.
        case: The smallest Case that fails.
        dtypes, families: Only these; empty for all. In a test of another dtype the Case is asked
            in that.
        device: ``cpu`` or ``cuda``; empty for both.
        depends_on: What of the machine makes it fail, where not every machine shows it; empty
            where every one does. Where the Case of such an entry holds, the test searches.
        where: The file and the entry's number in it.
    """

    test: str
    kernel: str
    reason: str
    case: Case
    dtypes: tuple[str, ...] = ()
    families: tuple[str, ...] = ()
    device: str = ""
    depends_on: str = ""
    where: str

    @property
    def file(self) -> str:
        """The part of ``test`` before the function's name."""
        return self.test.partition("::")[0]

    def matches(self, test: str, param: Param, device: str) -> bool:
        """Whether it is about the test ``test_causal.py::test_x`` of ``param`` on ``device``."""
        return (
            fnmatchcase(test, self.test)
            and self.is_of(param.kernel.name)
            and (not self.dtypes or param.dtype in self.dtypes)
            and (not self.families or param.family in self.families)
            and self.device in {"", device}
        )

    def is_of(self, kernel: str) -> bool:
        """Whether it is about ``kernel``."""
        return fnmatchcase(kernel, self.kernel)

    def case_in(self, dtype: str) -> Case:
        """The Case, in the ``dtype`` of the test where the entry is about several."""
        several = len(self.dtypes) > 1 and dtype in self.dtypes
        if not dtype or (self.dtypes and not several):
            return self.case
        problem = self.case.problem.replace(dtype=dtype)
        return Case(problem=problem, question=self.case.question, parameters=self.case.parameters)


def read(path: Path) -> tuple[KnownFailure, ...]:
    """The entries of a file, in order.

    Raises:
        UsageError: for what is no such file, in one line with the entry's number.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        said = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{path}: {said}.") from None
    entries = data.pop("failure", [])
    if data:
        raise UsageError(f"{path}: unknown key {next(iter(data))!r}: it holds [[failure]] alone.")
    if not isinstance(entries, list) or not all(isinstance(each, dict) for each in entries):
        raise UsageError(f"{path}: failure must be a list: write [[failure]].")
    return tuple(
        _entry(each, f"{path.name}, entry {number}") for number, each in enumerate(entries, 1)
    )


def _entry(data: Mapping[str, Any], where: str) -> KnownFailure:
    for name in data:
        if name not in _FIELDS:
            raise UsageError(f"{where}: unknown key {name!r}: choose from {', '.join(_FIELDS)}.")
    for name in _NEEDED:
        if not data.get(name):
            raise UsageError(f"{where}: {name} is missing.")
    texts = {name: data.get(name, "") for name in _TEXTS}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise UsageError(f"{where}: {name} must be text, not {text!r}.")
    if "::" not in texts["test"]:
        raise UsageError(f"{where}: test {texts['test']!r} must be FILE.py::TEST.")
    _check(where, "device", [texts["device"]], _DEVICES)
    return KnownFailure(
        **texts,
        dtypes=_names(data, where, "dtypes", DTYPES),
        families=_names(data, where, "families", (*MASK_FAMILIES, SOFTMAX)),
        case=_case(data["case"], where),
        where=where,
    )


def _names(data: Mapping[str, Any], where: str, key: str, valid: Any) -> tuple[str, ...]:
    names = data.get(key, [])
    if not isinstance(names, list):
        raise UsageError(f"{where}: {key} must be a list, not {names!r}.")
    _check(where, key, names, valid)
    return tuple(names)


def _check(where: str, key: str, names: list[Any], valid: Any) -> None:
    for name in names:
        if name not in valid:
            known = ", ".join(filter(None, valid))
            raise UsageError(f"{where}: {key} {name!r} is not known: choose from {known}.")


def _case(data: Any, where: str) -> Case:
    try:
        return Case.from_json(json.loads(data) if isinstance(data, str) else data)
    except (UsageError, json.JSONDecodeError) as error:
        raise UsageError(f"{where}: case: {error}") from None

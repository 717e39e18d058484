"""Select the faults to score: from the catalogue, or from somebody's file."""

from __future__ import annotations

import hashlib
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attncheck
from attncheck.capabilities.subject import Subject
from attncheck.core.errors import UnknownName, UsageError
from attncheck.core.source_files import import_file
from attncheck.faults.catalogue import CATEGORIES, CONTROLS, FAULTS, fault_named
from attncheck.faults.fault import Control, Fault
from attncheck.records.fault_scores import ControlScore, FaultScore
from attncheck.workers.units import Unit

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from attncheck.records.fault_scores import FaultOutcome

__all__ = [
    "FILE",
    "FaultSelection",
    "faults_of_file",
    "file_fault_reference",
    "priority",
    "select_faults",
    "select_from_file",
    "source_digest",
]


_TABLE = "FAULTS"
_SHIM = '''"""A fault of somebody's file, under a name of its own."""

from pathlib import Path

from attncheck.faults.fault_selection import faults_of_file

Planted = faults_of_file(Path({path!r}))[{name!r}]
'''


def faults_of_file(path: Path) -> dict[str, Any]:
    """The faulty kernels of a file, by id.

    Args:
        path: Of it. ``FAULTS = {"id": kernel, …}`` names them, in whatever form ``attncheck gate``
            takes a kernel; without it all of ``__all__`` are, or without that every public function
            and Subject that is defined there.

    Raises:
        UsageError: where there is no such file, importing it raises, or it has none.
    """
    what = f"--kernel-file {str(path)!r}"
    module = import_file(path, what)
    found = getattr(module, _TABLE, None)
    if found is None:
        found = _public(module)
    elif not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        kind = type(found).__name__
        raise UsageError(f'{what}: {_TABLE} is {kind}: it must be a dict, {{"id": kernel, …}}.')
    if not found:
        raise UsageError(
            f"{what} has no kernel: give it public functions or Subjects, or "
            f'{_TABLE} = {{"id": kernel, …}}.'
        )
    for name, kernel in found.items():
        _check(what, name, kernel)
    return dict(found)


def file_fault_reference(path: Path, name: str, folder: Path) -> str:
    """A kernel of the file, as ``subjects.load.load`` takes it; written below ``folder``.

    Raises:
        UnknownName: where it has none called ``name``; UsageError as ``faults_in``.
    """
    found = faults_of_file(path)
    if name not in found:
        raise UnknownName(f"fault of {path.name}", name, found)
    file = folder / "planted_of_a_file.py"
    file.write_text(_SHIM.format(path=str(path), name=name), encoding="utf-8")
    return f"{file}::Planted"


def _public(module: ModuleType) -> dict[str, Any]:
    listed = getattr(module, "__all__", None)
    if isinstance(listed, list | tuple):
        return {str(name): getattr(module, str(name), None) for name in listed}
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and _is_kernel(value) and _is_of(module, value)
    }


def _is_kernel(value: object) -> bool:
    if inspect.isclass(value):
        return issubclass(value, Subject)
    return isinstance(value, Subject) or inspect.isfunction(value)


def _is_of(module: ModuleType, value: Any) -> bool:
    """Whether it is made there, and not imported."""
    owner = value if hasattr(value, "__name__") else type(value)
    return bool(getattr(owner, "__module__", "") == module.__name__) or isinstance(value, Subject)


def _check(what: str, name: str, kernel: object) -> None:
    """Raises UsageError for an id that cannot stand in a report, and for what is no kernel."""
    if not name or "@" in name or not name.isprintable():
        raise UsageError(f"{what}: fault {name!r} must have a name of printable characters, no @.")
    if not callable(kernel) and not isinstance(kernel, Subject):
        kind = type(kernel).__name__
        raise UsageError(f"{what}: fault {name!r} is {kind}: it must be a function or a Subject.")


FILE = "file"
"""In place of a host: somebody's file has the fault."""

_NEEDS: dict[str, FaultOutcome] = {"cuda": "not asked (needs cuda)"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultSelection:
    """What is to be scored.

    Attributes:
        units: What lanes do.
        settled: Scores that need no kernel to run.
        controls: Likewise.
    """

    units: tuple[Unit, ...]
    settled: tuple[FaultScore, ...] = ()
    controls: tuple[ControlScore, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """``fault@host`` of each, in order."""
        alone = [f"{score.fault}@{score.host}" for score in self.settled]
        alone += [f"{score.control}@{score.host}" for score in self.controls]
        return (*(unit.kernel for unit in self.units), *alone)


def select_faults(
    *,
    hosts: Sequence[str],
    names: Sequence[str],
    categories: Sequence[str],
    controls: bool,
    device: str,
    tier: str,
) -> FaultSelection:
    """Faults and controls of the catalogue.

    Args:
        hosts: In which; those that have no entry for a fault are left out.
        names: Ids of faults and controls; all where none is given.
        categories: Only faults of these; all where none is given.
        controls: Whether controls are asked where neither is given.
        device: ``cpu`` or ``cuda``.
        tier: How hard.

    Raises:
        UnknownName: for a fault or category that there is not.
        UsageError: for a fault that is named and is planted in none of the hosts, or where none is
            of the categories.
    """
    wanted = _wanted(names, categories, controls=controls)
    for one in wanted if names else ():
        _check_planted(one, hosts)
    units, settled = [], []
    for host in hosts:
        for one in wanted:
            score = _settled(one, host, device, tier)
            if score is not None:
                settled.append(score)
            elif host in one.hosts:
                units.append(_unit(one, host, device, tier))
    scores = {(s.fault, s.host): s for s in settled if isinstance(s, FaultScore)}
    others = tuple(score for score in settled if isinstance(score, ControlScore))
    return FaultSelection(units=tuple(units), settled=tuple(scores.values()), controls=others)


def _wanted(
    names: Sequence[str], categories: Sequence[str], *, controls: bool
) -> list[Fault | Control]:
    for category in categories:
        if category not in CATEGORIES:
            raise UnknownName("category", category, CATEGORIES)
    found: list[Fault | Control] = [fault_named(name) for name in dict.fromkeys(names)]
    found = found or [*FAULTS.values(), *(CONTROLS.values() if controls else ())]
    if categories:
        found = [one for one in found if isinstance(one, Fault) and one.category in categories]
    if not found:
        said = ", ".join(categories) or "any"
        raise UsageError(f"none of the faults is of category {said}: attncheck faults --list.")
    return found


def _check_planted(one: Fault | Control, hosts: Sequence[str]) -> None:
    """Raises UsageError for one that is planted, and in none of ``hosts``."""
    if one.hosts and not set(hosts) & set(one.hosts):
        there = " and ".join(one.hosts)
        raise UsageError(
            f"fault {one.id!r} is not planted in host {' or '.join(hosts)}: choose {there}."
        )


def select_from_file(path: Path, *, names: Sequence[str], device: str, tier: str) -> FaultSelection:
    """The faults of somebody's file, in every dtype that they take.

    Raises:
        UsageError: where it has none, or not one of ``names``; see ``kernel_file.faults_in``.
    """
    there = faults_of_file(path)
    for name in names:
        if name not in there:
            raise UnknownName(f"fault of {path.name}", name, there)
    units = tuple(
        Unit(kind="fault", stage="contract", kernel=f"{name}@{FILE}", device=device, tier=tier)
        for name in (dict.fromkeys(names) or there)
    )
    return FaultSelection(units=units)


def source_digest(file: Path | None) -> str:
    """Sixteen hexadecimal digits of all that decides a score: attncheck itself, and the file."""
    found = hashlib.sha256()
    root = Path(attncheck.__file__).parent
    for path in [*sorted(root.rglob("*.py")), *([file] if file else [])]:
        found.update(str(path.relative_to(root) if path.is_relative_to(root) else path).encode())
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def priority(unit: Unit) -> tuple[int, ...]:
    """Controls last: all of a gate is asked of them."""
    return (unit.kernel.rpartition("@")[0] in CONTROLS,)


def _settled(
    one: Fault | Control, host: str, device: str, tier: str
) -> FaultScore | ControlScore | None:
    """Its score where no kernel is to run; None where one is."""
    said: dict[str, Any] = {"summary": one.summary, "device": device, "tier": tier}
    how = one.hosts.get(host)  # type: ignore[call-overload]  # of any word
    if how is not None:
        said |= {"host": host, "kernel": how.kernel, "dtype": how.dtypes[0]}
    needs = _NEEDS.get(how.needs, "") if how is not None and how.needs != device else ""
    if isinstance(one, Control):
        skipped = bool(needs)
        return ControlScore(control=one.id, outcome=needs, **said) if skipped else None  # type: ignore[arg-type]  # one of both
    outcome = "unplanted" if one.unplanted and not one.hosts else ""
    outcome = "equivalent" if how is not None and how.equivalent else outcome or needs
    if not outcome:
        return None
    reason = how.equivalent if how is not None else one.unplanted
    return FaultScore(
        fault=one.id,
        category=one.category,
        discrete=one.discrete,
        outcome=outcome,  # type: ignore[arg-type]  # one of them
        reason=reason,
        **said,
    )


def _unit(one: Fault | Control, host: str, device: str, tier: str) -> Unit:
    return Unit(
        kind="fault",
        stage="contract",
        kernel=f"{one.id}@{host}",
        device=device,
        tier=tier,
        dtype=one.hosts[host].dtypes[0],  # type: ignore[index]  # a word of HOSTS
    )

"""Select the faults to score, from the catalogue or from a user's file."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from attncheck.core.errors import UsageError, require_known
from attncheck.core.source_files import import_file
from attncheck.faults.catalogue import (
    CATEGORIES,
    CONTROLS,
    FAULTS,
    Control,
    Fault,
    fault_named,
)
from attncheck.records.fault_scores import ControlScore, FaultScore
from attncheck.subjects.capabilities.subject import Subject
from attncheck.workers.units import Unit

FILE = "file"  # in place of a host, for a fault in a user's file

_SHIM = '''"""A fault of somebody's file, under a name of its own."""

from pathlib import Path

from attncheck.faults.fault_selection import faults_of_file

Planted = faults_of_file(Path({path!r}))[{name!r}]
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultSelection:
    """Faults and controls that are to be scored."""

    units: tuple[Unit, ...]  # work for the workers
    settled: tuple[FaultScore, ...] = ()  # scores of faults that are known without a run
    controls: tuple[ControlScore, ...] = ()  # scores of controls that are known without a run

    @property
    def names(self) -> tuple[str, ...]:
        """Return ``fault@host`` of each fault and control, in order."""
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
    """Select faults and controls of the catalogue.

    Args:
        hosts: Hosts to plant faults in; a host without an entry for a fault is left out.
        names: Ids of faults and controls; empty for all.
        categories: Categories of the faults; empty for all.
        controls: Whether to add controls where neither names nor categories are given.

    Raises:
        UnknownName: for an unknown fault or category.
        UsageError: for a named fault that is planted in none of the hosts, or where no fault has
            one of the categories.
    """
    faults = _faults_and_controls(names, categories, controls=controls)
    for fault in faults if names else ():
        if fault.hosts and not set(hosts) & set(fault.hosts):
            raise UsageError(
                f"fault {fault.id!r} is not planted in host {' or '.join(hosts)}: "
                f"choose {' and '.join(fault.hosts)}."
            )
    # A fault that is planted nowhere is settled once, not once for each host.
    units, settled, controls_settled = [], {}, []
    for host in hosts:
        for fault in faults:
            score = _settled_score(fault, host, device, tier)
            if isinstance(score, FaultScore):
                settled[score.fault, score.host] = score
            elif score is not None:
                controls_settled.append(score)
            elif host in fault.hosts:
                dtype = fault.hosts[host].dtypes[0]
                units.append(_unit(f"{fault.id}@{host}", device, tier, dtype))
    return FaultSelection(
        units=tuple(units), settled=tuple(settled.values()), controls=tuple(controls_settled)
    )


def _unit(kernel: str, device: str, tier: str, dtype: str = "") -> Unit:
    return Unit(
        kind="fault", stage="contract", kernel=kernel, device=device, tier=tier, dtype=dtype
    )


def _faults_and_controls(
    names: Sequence[str], categories: Sequence[str], *, controls: bool
) -> list[Fault | Control]:
    require_known("category", categories, CATEGORIES)
    # Drop repeated names.
    faults: list[Fault | Control] = [fault_named(name) for name in dict.fromkeys(names)]
    faults = faults or [*FAULTS.values(), *(CONTROLS.values() if controls else ())]
    if categories:
        faults = [one for one in faults if isinstance(one, Fault) and one.category in categories]
    if not faults:
        which = ", ".join(categories) or "any"
        raise UsageError(f"none of the faults is of category {which}: attncheck faults --list.")
    return faults


def _settled_score(
    fault: Fault | Control, host: str, device: str, tier: str
) -> FaultScore | ControlScore | None:
    """Return the score of a fault that is known without a run; None if its kernel has to run."""
    facts: dict[str, Any] = {"device": device, "tier": tier}
    how, outcome, reason = fault.hosts.get(host), "", ""  # type: ignore[call-overload]  # any word
    if how is not None:
        facts |= {"host": host, "kernel": how.kernel, "dtype": how.dtypes[0]}
        if how.equivalent:
            outcome, reason = "equivalent", how.equivalent
        elif how.needs and how.needs != device:
            outcome = f"not asked (needs {how.needs})"
    elif isinstance(fault, Fault) and fault.unplanted:
        outcome, reason = "unplanted", fault.unplanted
    if not outcome:
        return None
    return new_score(fault, outcome=outcome, reason=reason, **facts)


def new_score(fault: Fault | Control, **facts: Any) -> FaultScore | ControlScore:
    """Return a score of ``fault``, with the fields of its entry and the given ones."""
    if isinstance(fault, Control):
        return ControlScore(control=fault.id, summary=fault.summary, **facts)
    return FaultScore(
        fault=fault.id,
        category=fault.category,
        summary=fault.summary,
        discrete=fault.discrete,
        **facts,
    )


def priority(unit: Unit) -> tuple[int, ...]:
    """Return a sort key that puts controls last, since each of them takes a whole gate."""
    return (unit.kernel.rpartition("@")[0] in CONTROLS,)


def source_digest(file: Path | None) -> str:
    """Return 16 hexadecimal digits of a hash of attncheck's sources and the user's file."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    # Entries are data, but a changed patch may change a score as much as a changed module.
    sources = [*root.rglob("*.py"), *(root / "faults" / "entries").glob("*.toml")]
    for path in [*sorted(sources), *([file] if file else [])]:
        digest.update(str(path.relative_to(root) if path.is_relative_to(root) else path).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def select_from_file(path: Path, *, names: Sequence[str], device: str, tier: str) -> FaultSelection:
    """Select the faults of a user's file, in every dtype that they support.

    Raises:
        UsageError: where the file has none, or lacks one of ``names``; see ``faults_of_file``.
    """
    faults = faults_of_file(path)
    require_known(f"fault of {path.name}", names, faults)
    units = (_unit(f"{name}@{FILE}", device, tier) for name in (dict.fromkeys(names) or faults))
    return FaultSelection(units=tuple(units))


def faults_of_file(path: Path) -> dict[str, Any]:
    """Return the faulty kernels of a file, by id.

    Args:
        path: The file. ``FAULTS = {"id": kernel, …}`` in it names them, in any form of kernel that
            ``attncheck gate`` takes; by default they are those in ``__all__``, or else all public
            functions and Subjects that are defined there.

    Raises:
        UsageError: where there is no such file, importing it raises, or it has no kernel.
    """
    what = f"--kernel-file {str(path)!r}"
    module = import_file(path, what)
    faults = getattr(module, "FAULTS", None)
    if faults is None:
        faults = _public_kernels(module)
    elif not isinstance(faults, dict) or not all(isinstance(name, str) for name in faults):
        kind = type(faults).__name__
        raise UsageError(f'{what}: FAULTS is {kind}: it must be a dict, {{"id": kernel, …}}.')
    if not faults:
        raise UsageError(
            f"{what} has no kernel: give it public functions or Subjects, or "
            'FAULTS = {"id": kernel, …}.'
        )
    for name, kernel in faults.items():
        # An id stands in reports and file names, and is followed by @ and a host.
        if not name or "@" in name or not name.isprintable():
            raise UsageError(
                f"{what}: fault {name!r} must have a name of printable characters, no @."
            )
        if not callable(kernel) and not isinstance(kernel, Subject):
            kind = type(kernel).__name__
            raise UsageError(
                f"{what}: fault {name!r} is {kind}: it must be a function or a Subject."
            )
    return dict(faults)


def _public_kernels(module: ModuleType) -> dict[str, Any]:
    listed = getattr(module, "__all__", None)
    # Names that the author lists count, even if they are imported.
    if isinstance(listed, list | tuple):
        return {str(name): getattr(module, str(name), None) for name in listed}
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (
            isinstance(value, Subject)
            or (_is_kernel(value) and getattr(value, "__module__", "") == module.__name__)
        )
    }


def _is_kernel(value: object) -> bool:
    if inspect.isclass(value):
        return issubclass(value, Subject)
    return inspect.isfunction(value)


def file_fault_reference(path: Path, name: str, folder: Path) -> str:
    """Write a module for one kernel of the file; return its name for ``subjects.load``.

    Raises:
        UnknownName: where the file has no kernel ``name``; UsageError as ``faults_of_file``.
    """
    require_known(f"fault of {path.name}", [name], faults_of_file(path))
    # The module has its own name, because the author's file may already be imported under its.
    file = folder / "planted_of_a_file.py"
    file.write_text(_SHIM.format(path=str(path), name=name), encoding="utf-8")
    return f"{file}::Planted"

"""Loads subjects by the names that users give.

A name is that of a built-in kernel; ``path/to/file.py::name`` or ``package.module:name``; a folder
of the kernels hub, ``path/to/folder`` or ``path/to/folder::name``; a name in the project's
configuration; or one of the entry-point group ``attncheck.kernels``.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from attncheck.core.errors import UnknownName, UsageError
from attncheck.core.source_files import error_line, load_member, load_module_member
from attncheck.subjects.capabilities.capability_table import AUTOGRAD, Capabilities, read_table
from attncheck.subjects.capabilities.configuration import (
    GROUP,
    entry_points,
    nearest_tables,
    read_configuration,
)
from attncheck.subjects.capabilities.named_kernels import BUILTIN, subject_named
from attncheck.subjects.capabilities.subject import Subject
from attncheck.subjects.hub_kernels import is_hub_folder, load_hub_kernel

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncheck.subjects.conventions.convention import ConventionOptions

__all__ = [
    "Candidate",
    "Entry",
    "is_reference",
    "kernel_names",
    "load_kernel",
    "load_subject",
    "unknown_kernel",
]


_FACTORY_NOTE = "needs no arguments, so it is called to make the kernel: what it makes "


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Facts of a kernel that are known before it is called."""

    entry: str  # as in ``Candidate``
    conventions: tuple[str, ...]  # those that it may follow, the likeliest first
    options: dict[str, str]  # its table's ConventionOptions, by the names of ``Terms``
    capabilities: Capabilities | None = None  # its table, if it has one


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An object from which a Subject can be made."""

    kernel: str  # the user's name for it, which errors quote
    target: object
    name: str  # its name in reports
    entry: str  # the object's name in a table; files are relative to the working directory
    capabilities: Capabilities | None = None  # its table, if it has one
    backward: Callable[..., object] | None = None  # the gradient function that its table names

    def make_subject(
        self, convention: str | None = None, options: ConventionOptions | None = None
    ) -> Subject:
        """Return the Subject, without its table.

        Args:
            convention: A name in ``conventions.CONVENTIONS``; None: the table's, or the one that
                the object's signature or name identifies.
            options: Deviations from the convention; None: the table's.

        Raises:
            UsageError: if the object does not follow the convention.
        """
        from attncheck.subjects.conventions.declarations import make_subject

        convention = convention or (self.capabilities.convention if self.capabilities else None)
        target = self._instance(convention)
        if options is None:
            options = self._options(native=isinstance(target, Subject))
        subject = make_subject(target, self.name, convention, options)
        if isinstance(subject, str):
            called = "" if target is self.target else _FACTORY_NOTE
            raise UsageError(f"kernel {self.kernel!r} {called}{subject}.")
        return subject

    def facts(self) -> Entry:
        """Return what is known of the kernel before it is called."""
        from attncheck.subjects.conventions.declarations import CONVENTIONS

        table, target = self.capabilities, self._instance(None)
        if table is not None and table.convention is not None:
            conventions: tuple[str, ...] = (table.convention,)
        else:
            # A convention that claims the object precedes those that it merely may follow.
            fitting = [each for each in CONVENTIONS.values() if each.unfit(target) is None]
            fitting.sort(key=lambda each: not each.claims(target))
            conventions = tuple(each.name for each in fitting)
        options = self._options(native=isinstance(target, Subject))
        return Entry(
            entry=self.entry,
            conventions=conventions,
            options={name: getattr(options, name) for name in ("lse", "empty_row", "causal")},
            capabilities=table,
        )

    def _instance(self, convention: str | None) -> object:
        """Return the object, or the Subject that it creates if it is a factory."""
        # In other conventions the object is the kernel itself, even if it has no parameters.
        if convention not in {None, "native"} or not _is_factory(self.target):
            return self.target
        assert callable(self.target)
        try:
            return self.target()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a user's constructor may raise anything
            reason = error_line(error)
            raise UsageError(f"kernel {self.kernel!r}: making it raised {reason}.") from error

    def _options(self, *, native: bool) -> ConventionOptions:
        """Return the table's options; for a Subject, only those that differ from the defaults."""
        from attncheck.subjects.conventions.convention import ConventionOptions

        table = self.capabilities
        if table is None:
            return ConventionOptions()
        options = ConventionOptions(
            lse=table.lse if isinstance(table.lse, str) else "",
            empty_row=table.empty_row or "",
            causal=table.causal or "",
        )
        if self.backward is not None:
            options = replace(options, backward=self.backward)
        # ``make_subject`` accepts a Subject only without options, so the defaults must be empty.
        if native:
            return replace(
                options,
                lse="" if table.lse == "natural" else options.lse,
                empty_row="" if table.empty_row == "zero" else options.empty_row,
            )
        return replace(
            options,
            promises=None if table.promises is None else frozenset(table.promises),
            returns_lse=None if table.lse is None else table.lse is not False,
            backward=None if table.backward is False else options.backward,
        )


def kernel_names() -> tuple[str, ...]:
    """Return all names for ``load_subject``; raises UsageError for an invalid configuration."""
    return (*BUILTIN, *read_configuration().kernels, *entry_points())


def load_subject(kernel: str, convention: str | None = None) -> Subject:
    """Return the subject called ``kernel``.

    Args:
        kernel: A name in ``named_kernels.BUILTIN``; ``file.py::name`` or ``package.module:name``,
            where ``name`` is a Subject, a subclass that needs no arguments, a function that returns
            one, or a function in the calling convention; ``folder`` or ``folder::name`` for
            ``load_hub_kernel``; a name in the nearest configuration (``read_configuration``) or of
            an entry point, with its table (``Declared``).
            The file is imported and finds its siblings as under ``python file.py``. If it uses
            Triton, its import decides whether it is interpreted, so call ``prepare`` first.
        convention: A name in ``conventions.CONVENTIONS``; None: the first that fits.

    Raises:
        UsageError: if there is no such subject, with the reason in one line.
    """
    return load_kernel(kernel, convention)[1]


def load_kernel(kernel: str, convention: str | None = None) -> tuple[Candidate, Subject]:
    """Return the subject called ``kernel``, as ``load_subject`` does, and its Candidate."""
    from attncheck.subjects.conventions.declarations import possible_conventions
    from attncheck.subjects.conventions.function_subject import FunctionSubject

    candidate = load_candidate(kernel, convention)
    subject = candidate.make_subject(convention)
    if kernel in BUILTIN:
        return candidate, subject
    # The table names the kernel, so the Subject needs no name of its own.
    if candidate.capabilities is not None:
        from attncheck.subjects.capabilities.declared import Declared

        _check_text(subject, kernel, "summary", "one line on it")
        return candidate, Declared(subject, candidate.capabilities, candidate.name)
    if isinstance(subject, FunctionSubject):
        subject.conventions = (
            (convention,) if convention else possible_conventions(candidate.target)
        )
    _check_text(subject, kernel, "name", "what reports call it")
    _check_text(subject, kernel, "summary", "one line on it")
    if subject.name in BUILTIN:
        raise UsageError(
            f"kernel {kernel!r} is called {subject.name!r}, as a kernel of attncheck's is: "
            "give it a name of its own."
        )
    return candidate, subject


def load_candidate(kernel: str, convention: str | None = None) -> Candidate:
    """Import the object that ``kernel`` names; raises UsageError as ``load_subject`` does."""
    if kernel in BUILTIN:
        _check_builtin(kernel, convention)
        return Candidate(kernel=kernel, target=subject_named(kernel), name=kernel, entry=kernel)
    if convention is not None and (is_reference(kernel) or kernel in kernel_names()):
        from attncheck.subjects.conventions.declarations import convention_named

        convention_named(convention)  # raises before a user's file is imported
    if is_reference(kernel):
        target = _import_reference(kernel, f"kernel {kernel!r}")
        return Candidate(kernel=kernel, target=target, name=kernel, entry=kernel)
    # The project's own table precedes a package's entry point.
    project, points = read_configuration(), entry_points().get(kernel, ())
    table, what, folder = project.kernels.get(kernel), f"kernel {kernel!r}", project.folder
    if table is not None:
        entry = _from_folder(table.entry, folder)
        target = _import_entry(entry, folder, what)
    # Two packages with the same name are an error: installation order must not decide.
    elif len(points) > 1:
        values = " and ".join(sorted(point.value for point in points))
        raise UsageError(f"{what} is several entry points: {values}; uninstall all but one.")
    elif points:
        value, folder = points[0].value, Path.cwd()
        what = f"{what} (entry point {value})"
        entry = value.partition("[")[0].strip()  # without extras
        target = load_module_member(entry, what)
        # Published may be a table, whose entry is a name or the kernel itself.
        if isinstance(published := target, Mapping):
            place = f"entry point {kernel!r} of {GROUP} ({value})"
            target = published.get("entry")
            if target is None or isinstance(target, str):
                table = read_table(dict(published), place)
                entry = table.entry
                target = _import_entry(entry, folder, what)
            else:
                table = read_table({**published, "entry": value}, place)
    else:
        raise unknown_kernel(kernel)
    return Candidate(
        kernel=kernel,
        target=target,
        name=kernel,
        entry=entry,
        capabilities=table,
        backward=None if table is None else _import_backward(table, folder, what),
    )


# ------------------------------------------------------------------ importing entries


def is_reference(kernel: str) -> bool:
    """Return whether ``kernel`` refers to a file, folder or module, and is not a plain name."""
    return ":" in kernel or is_hub_folder(kernel)


def _from_folder(entry: str, folder: Path) -> str:
    """Return ``entry`` with its file, if any, joined to ``folder``."""
    file, colons, name = entry.partition("::")
    return f"{folder / file}{colons}{name}" if colons else entry


_FOLDERS: set[str] = set()  # folders of kernels' files that were imported


def _import_reference(kernel: str, what: str) -> Any:
    """Return the object of ``file.py::name``, ``folder::name`` or ``package.module:name``."""
    if is_hub_folder(kernel.partition("::")[0]):
        return load_hub_kernel(kernel, what)
    file, _, name = kernel.partition(":")
    # The commonest mistake, for which import's message would name a module "mine.py".
    if file.endswith(".py") and not name.startswith(":"):
        raise UsageError(f"{what}: a file takes two colons: {file}::{name or 'NAME'}.")
    if "::" not in kernel:
        return load_module_member(kernel, what)
    # As in ``python file.py``; it stays for imports within functions.
    folder = os.path.dirname(os.path.realpath(kernel.rpartition("::")[0]))  # noqa: PTH120  # a link to itself too
    if sys.path[:1] != [folder]:
        sys.path.insert(0, folder)
    _FOLDERS.add(folder)
    # Modules of other kernels' folders are unloaded if this kernel has siblings of their names.
    files = {name: getattr(each, "__file__", None) or "" for name, each in sys.modules.items()}
    for module, file in files.items():
        other = os.path.dirname(file)  # noqa: PTH120  # for a package, the package's own folder
        if other != folder and {other, os.path.dirname(other)} & (_FOLDERS - {folder}):  # noqa: PTH120
            top = Path(folder, module.partition(".")[0])
            if top.is_dir() or top.with_suffix(".py").is_file():
                del sys.modules[module]
    return load_member(kernel, what)


def _import_entry(entry: str, folder: Path, what: str) -> Any:
    """Return the object that a table's entry names; modules may lie in ``folder``."""
    if entry in BUILTIN:
        return subject_named(entry)
    if not is_reference(entry):
        raise UsageError(
            f"{what}: its entry {entry!r} is neither FILE.py::NAME nor package.module:NAME, nor a "
            "folder of the kernels hub."
        )
    # As if Python had been started in the project's folder.
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return _import_reference(entry, what)


def _import_backward(table: Capabilities, folder: Path, what: str) -> Callable[..., object] | None:
    """Return the function that a table's ``backward`` names; None if it names none."""
    name = table.backward
    if not isinstance(name, str) or name == AUTOGRAD:
        return None
    target = _import_entry(_from_folder(name, folder), folder, f"{what}: its backward")
    if not callable(target) or inspect.isclass(target):
        kind = type(target).__name__
        raise UsageError(f"{what}: its backward {name!r} is {kind}: it must be a function.")
    function: Callable[..., object] = target
    return function


def _is_factory(target: object) -> bool:
    """Return whether ``target`` creates a Subject: a class, or a function without arguments."""
    if isinstance(target, Subject) or not callable(target):
        return False
    if inspect.isclass(target):
        return True
    try:
        signature = inspect.signature(target)
        signature.bind()
    except (TypeError, ValueError):  # it requires arguments, or has no signature
        return False
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    return inspect.Parameter.VAR_POSITIONAL not in kinds  # ``*args`` would be a kernel's tensors


# ------------------------------------------------------------------ mistakes


def _check_builtin(kernel: str, convention: str | None) -> None:
    """Raise UsageError if a built-in kernel gets a convention or its name is ambiguous."""
    if convention not in {None, "native"}:
        raise UsageError(f"kernel {kernel!r} is attncheck's own: leave its convention out.")
    others: tuple[str, ...] = ()
    with suppress(UsageError):  # built-in kernels work despite an invalid configuration
        others = (*entry_points(), *nearest_tables()[1])
    if kernel in others:
        raise UsageError(
            f"kernel {kernel!r} is attncheck's own, and one of yours is called so too: "
            "give yours another name."
        )


def unknown_kernel(kernel: str) -> UsageError:
    """Return the error for a name of no kernel, which may be a folder, file or module instead."""
    if os.path.isdir(kernel):  # noqa: PTH112  # False for a name that is too long
        return UsageError(f"kernel {kernel!r} is a folder: name a function, FILE.py::NAME.")
    # A plain word is a misspelt name, for which a list of names is the better message.
    if "/" not in kernel and "." not in kernel:
        return UnknownName("kernel", kernel, kernel_names())
    correct = f"{kernel}::NAME" if kernel.endswith(".py") else "FILE.py::NAME"
    module, _, name = kernel.rpartition(".")
    if module and name and "/" not in kernel and not kernel.endswith(".py"):
        correct = f"{module}:{name}"
    return UsageError(
        f"kernel {kernel!r} is no kernel of attncheck's, and names no function of a file or "
        f"module: write {correct}."
    )


def _check_text(subject: Subject, kernel: str, attribute: str, what: str) -> None:
    """Raise UsageError if the Subject lacks a text ``attribute``, which reports need."""
    text = getattr(subject, attribute, None)
    if not isinstance(text, str) or not text.strip():
        kind = type(subject).__name__
        raise UsageError(
            f'kernel {kernel!r} has no {attribute}: add {attribute} = "…" ({what}) to {kind}.'
        )

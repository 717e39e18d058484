"""A subject by what a user calls it.

A kernel of attncheck's by its name; ``path/to/file.py::name`` or ``package.module:name``; a folder
of the kernels hub, ``path/to/folder`` or ``path/to/folder::name``; a name of the project's
configuration; or of the entry-point group ``attncheck.kernels``.
"""

from __future__ import annotations

import inspect
import os
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from attncheck.core.errors import UnknownName, UsageError
from attncheck.core.source_files import error_line, load_member, load_module_member
from attncheck.subjects.capabilities.capability_table import AUTOGRAD, Capabilities
from attncheck.subjects.capabilities.configuration import (
    entry_points,
    nearest_tables,
    published_kernel,
    read_configuration,
)
from attncheck.subjects.capabilities.named_kernels import BUILTIN, subject_named
from attncheck.subjects.capabilities.subject import Subject
from attncheck.subjects.hub_kernels import is_hub_folder, load_hub_kernel

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncheck.subjects.conventions.convention import ConventionOptions

__all__ = ["Candidate", "Entry", "is_reference", "kernel_names", "load_kernel", "load_subject"]


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is known of a kernel before it is tried."""

    entry: str  # as of ``Candidate``
    conventions: tuple[str, ...]  # those that it may follow, the likeliest first
    options: dict[str, str]  # what its table says of its convention, by the names of ``Terms``
    capabilities: Capabilities | None = None  # its table; None where nobody has written one


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An object that is to become a Subject."""

    kernel: str  # what the user called it; errors quote it
    target: object
    name: str  # what reports are to call it
    entry: str  # how a table names the object; a file is relative to the working directory
    capabilities: Capabilities | None = None  # its table; None where nobody has written one
    # The function of its gradients that its table names, if any.
    backward: Callable[..., object] | None = None

    def adopted(
        self, convention: str | None = None, options: ConventionOptions | None = None
    ) -> Subject:
        """Return the Subject, without its table.

        Args:
            convention: A name in ``conventions.CONVENTIONS``; None for the table's, or the one
                that the object shows.
            options: What of the convention is otherwise; None for what the table says.

        Raises:
            UsageError: where it is none of the convention.
        """
        from attncheck.subjects.conventions.declarations import adopted

        convention = convention or (self.capabilities.convention if self.capabilities else None)
        target = self._instance(convention)
        if options is None:
            options = self._options(native=isinstance(target, Subject))
        subject = adopted(target, self.name, convention, options)
        if isinstance(subject, str):
            gives = "is" if target is self.target else "called without arguments gives"
            kind = type(target).__name__
            raise UsageError(f"kernel {self.kernel!r} {gives} {kind}: it must {subject}.")
        return subject

    def facts(self) -> Entry:
        """Return what is known of it before it is tried."""
        from attncheck.subjects.conventions.declarations import CONVENTIONS

        table, target = self.capabilities, self._instance(None)
        if table is not None and table.convention is not None:
            conventions: tuple[str, ...] = (table.convention,)
        else:
            # Not what only may be: what shows that it is of one convention stands before.
            able = [each for each in CONVENTIONS.values() if each.unfit(target) is None]
            able.sort(key=lambda each: not each.claims(target))
            conventions = tuple(each.name for each in able)
        options = self._options(native=isinstance(target, Subject))
        return Entry(
            entry=self.entry,
            conventions=conventions,
            options={name: getattr(options, name) for name in ("lse", "empty_row", "causal")},
            capabilities=table,
        )

    def _instance(self, convention: str | None) -> object:
        """The object, or the Subject that it makes."""
        # Of another convention the object is the kernel itself, also one that takes no arguments.
        if convention not in {None, "native"} or not _is_factory(self.target):
            return self.target
        assert callable(self.target)
        try:
            return self.target()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # somebody's constructor
            reason = error_line(error)
            raise UsageError(f"kernel {self.kernel!r}: making it raised {reason}.") from error

    def _options(self, *, native: bool) -> ConventionOptions:
        """Options of a function; of a Subject only what differs from every Subject's."""
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
        # What every Subject does is no difference, and a Subject is adopted only without any.
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
    """Every name that ``load_subject`` knows; raises UsageError for a wrong configuration."""
    return (*BUILTIN, *read_configuration().kernels, *entry_points())


def load_subject(kernel: str, convention: str | None = None) -> Subject:
    """Return the subject called ``kernel``.

    Args:
        kernel: A name in ``named_kernels.BUILTIN``; ``file.py::name`` or ``package.module:name``,
            where ``name`` is a Subject, a subclass that needs no arguments, a function that returns
            one, or a function in the calling convention; ``folder`` or ``folder::name`` as of
            ``load_hub_kernel``; a name of the nearest configuration (``read_configuration``) or of
            an entry point, with its table (``Declared``).
            The file is imported, and finds its siblings as under ``python file.py``; one that uses
            Triton decides then whether it is interpreted, so call ``prepare`` first.
        convention: A name in ``conventions.CONVENTIONS``; None for the first that fits.

    Raises:
        UsageError: when there is no such subject, in one line that says why.
    """
    return load_kernel(kernel, convention)[1]


def load_kernel(kernel: str, convention: str | None = None) -> tuple[Candidate, Subject]:
    """Return the subject called ``kernel`` as ``load_subject``, and what it was made of."""
    from attncheck.subjects.conventions.declarations import possible_conventions
    from attncheck.subjects.conventions.function_subject import FunctionSubject

    candidate = load_candidate(kernel, convention)
    subject = candidate.adopted(convention)
    if kernel in BUILTIN:
        return candidate, subject
    # A table names the kernel: what its class is called does not matter then.
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
    """Import what ``kernel`` names; raises as ``load_subject``, for the convention's name first."""
    if kernel in BUILTIN:
        _check_builtin(kernel, convention)
        return Candidate(kernel=kernel, target=subject_named(kernel), name=kernel, entry=kernel)
    if convention is not None and (is_reference(kernel) or kernel in kernel_names()):
        from attncheck.subjects.conventions.declarations import convention_named

        convention_named(convention)  # before somebody's file is imported
    if is_reference(kernel):
        target = _import_reference(kernel, f"kernel {kernel!r}")
        return Candidate(kernel=kernel, target=target, name=kernel, entry=kernel)
    # The project's own table comes before a package's: it is nearer to who asks.
    project, points = read_configuration(), entry_points().get(kernel, ())
    table, what, folder = project.kernels.get(kernel), f"kernel {kernel!r}", project.folder
    if table is not None:
        entry = _from_folder(table.entry, folder)
        target = _import_entry(entry, folder, what)
    # Which of two packages won would depend on the order of installation.
    elif len(points) > 1:
        values = " and ".join(sorted(point.value for point in points))
        raise UsageError(f"{what} is several entry points: {values}; uninstall all but one.")
    elif points:
        value, folder = points[0].value, Path.cwd()
        what = f"{what} (entry point {value})"
        entry = value.partition("[")[0].strip()  # extras may stand behind it
        target, table = published_kernel(kernel, load_module_member(entry, what), value)
        if target is None and table is not None:
            entry = table.entry
            target = _import_entry(entry, folder, what)
    else:
        _check_spelling(kernel)
        raise UnknownName("kernel", kernel, kernel_names())
    return Candidate(
        kernel=kernel,
        target=target,
        name=kernel,
        entry=entry,
        capabilities=table,
        backward=None if table is None else _import_backward(table, folder, what),
    )


# ------------------------------------------------------------------ what an entry names


def is_reference(kernel: str) -> bool:
    """Return whether ``kernel`` is of a file, folder or module, and no name."""
    return ":" in kernel or is_hub_folder(kernel)


def _from_folder(entry: str, folder: Path) -> str:
    """An entry that is relative to ``folder``."""
    file, colons, name = entry.partition("::")
    return f"{folder / file}{colons}{name}" if colons else entry


_FOLDERS: set[str] = set()  # of kernels' files


def _import_reference(kernel: str, what: str) -> Any:
    """The object of ``file.py::name``, ``folder::name`` or ``package.module:name``."""
    if is_hub_folder(kernel.partition("::")[0]):
        return load_hub_kernel(kernel, what)
    file, _, name = kernel.partition(":")
    # The commonest slip: import would speak of a module called "mine.py".
    if file.endswith(".py") and not name.startswith(":"):
        raise UsageError(f"{what}: a file takes two colons: {file}::{name or 'NAME'}.")
    if "::" not in kernel:
        return load_module_member(kernel, what)
    # As ``python file.py`` has it, also for what its functions import only when they are called.
    folder = os.path.dirname(os.path.realpath(kernel.rpartition("::")[0]))  # noqa: PTH120  # a link to itself too
    if sys.path[:1] != [folder]:
        sys.path.insert(0, folder)
    _FOLDERS.add(folder)
    # Of several kernels in one process each has its own siblings, whatever they are called.
    files = {name: getattr(each, "__file__", None) or "" for name, each in sys.modules.items()}
    for module, file in files.items():
        other = os.path.dirname(file)  # noqa: PTH120  # of a package: its own folder
        if other != folder and {other, os.path.dirname(other)} & (_FOLDERS - {folder}):  # noqa: PTH120
            top = Path(folder, module.partition(".")[0])
            if top.is_dir() or top.with_suffix(".py").is_file():
                del sys.modules[module]
    return load_member(kernel, what)


def _import_entry(entry: str, folder: Path, what: str) -> Any:
    """The object that a table's entry names; modules are looked for in ``folder`` too."""
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
    """The function that a table's ``backward`` names; None where it names none."""
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
    """Return whether it is to be called for a Subject: a class, or a function without arguments."""
    if isinstance(target, Subject) or not callable(target):
        return False
    if inspect.isclass(target):
        return True
    try:
        signature = inspect.signature(target)
        signature.bind()
    except (TypeError, ValueError):  # it takes arguments, or nothing says what it takes
        return False
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    return inspect.Parameter.VAR_POSITIONAL not in kinds  # ``*args`` are a kernel's tensors


# ------------------------------------------------------------------ mistakes


def _check_builtin(kernel: str, convention: str | None) -> None:
    """Raise UsageError for a convention, and for a name that somebody means otherwise."""
    if convention not in {None, "native"}:
        raise UsageError(f"kernel {kernel!r} is attncheck's own: leave its convention out.")
    others: tuple[str, ...] = ()
    with suppress(UsageError):  # a file that is wrong elsewhere is no reason to refuse ours
        others = (*entry_points(), *nearest_tables()[1])
    if kernel in others:
        raise UsageError(
            f"kernel {kernel!r} is attncheck's own, and one of yours is called so too: "
            "give yours another name."
        )


def _check_spelling(kernel: str) -> None:
    """Raise UsageError for what was meant to be a file or module."""
    # A plain word can only be a misspelt name: the list of names is the better message.
    if "/" not in kernel and "." not in kernel:
        return
    correct = f"{kernel}::NAME" if kernel.endswith(".py") else "FILE.py::NAME"
    module, dot, name = kernel.rpartition(".")
    if dot and "/" not in kernel and not kernel.endswith(".py"):
        correct = f"{module}:{name}"
    raise UsageError(
        f"kernel {kernel!r} is no kernel of attncheck's, and names no function of a file or "
        f"module: write {correct}."
    )


def _check_text(subject: Subject, kernel: str, attribute: str, what: str) -> None:
    """Raise UsageError for a Subject without what reports need of it."""
    text = getattr(subject, attribute, None)
    if not isinstance(text, str) or not text.strip():
        kind = type(subject).__name__
        raise UsageError(
            f'kernel {kernel!r} has no {attribute}: add {attribute} = "…" ({what}) to {kind}.'
        )

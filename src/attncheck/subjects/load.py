"""A subject by what a user calls it.

A kernel of attncheck's by its name; ``path/to/file.py::name`` or ``package.module:name``; a name of
the project's configuration; or of the entry-point group ``attncheck.kernels``.
"""

from __future__ import annotations

import inspect
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from attncheck.capabilities import configuration, named_kernels
from attncheck.capabilities.named_kernels import (
    anchor_entry,
    import_backward,
    import_entry,
    import_reference,
    is_reference,
)
from attncheck.capabilities.subject import Subject
from attncheck.core.errors import UnknownName, UsageError
from attncheck.core.source_files import error_line, load_module_member

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncheck.capabilities.capability_table import Capabilities
    from attncheck.conventions.convention import ConventionOptions

__all__ = ["Candidate", "is_reference", "kernel_names", "load_candidate", "load_subject"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An object that is to become a Subject.

    Attributes:
        kernel: What it was asked for by; errors quote it.
        found: The object.
        name: What reports are to call it.
        entry: How a table names the object; a file is relative to the working directory.
        capabilities: Its table; None where nobody has written one.
        backward: The function of its gradients that its table names, if any.
    """

    kernel: str
    found: object
    name: str
    entry: str
    capabilities: Capabilities | None = None
    backward: Callable[..., object] | None = None

    def adopted(
        self, convention: str | None = None, options: ConventionOptions | None = None
    ) -> Subject:
        """The Subject, without its table.

        Args:
            convention: A name in ``conventions.CONVENTIONS``; None for the table's, or the one
                that the object shows.
            options: What of the convention is otherwise; None for what the table says.

        Raises:
            UsageError: where it is none of the convention.
        """
        from attncheck.conventions import declarations

        convention = convention or (self.capabilities.convention if self.capabilities else None)
        found = self._made(convention)
        if options is None:
            options = self._options(native=isinstance(found, Subject))
        subject = declarations.adopted(found, self.name, convention, options)
        if isinstance(subject, str):
            kind = type(found).__name__
            raise UsageError(f"kernel {self.kernel!r} is {kind}: it must {subject}.")
        return subject

    def conventions(self) -> tuple[str, ...]:
        """Those that it may follow, the likeliest first; none where it is no kernel."""
        from attncheck.conventions.declarations import CONVENTIONS

        table = self.capabilities
        if table is not None and table.convention is not None:
            return (table.convention,)
        found = self._made(None)
        # Not what only may be: what shows that it is of one convention stands before.
        able = [each for each in CONVENTIONS.values() if each.unfit(found) is None]
        return tuple(each.name for each in sorted(able, key=lambda each: not each.claims(found)))

    def options(self) -> ConventionOptions:
        """What its table says of its convention."""
        return self._options(native=isinstance(self._made(None), Subject))

    def _made(self, convention: str | None) -> object:
        """The object, or the Subject that it makes."""
        makes = convention in {None, "native"} and _makes_one(self.found)
        return _made(self.found, self.kernel) if makes else self.found

    def _options(self, *, native: bool) -> ConventionOptions:
        """Of a Subject only what differs from every Subject's."""
        from attncheck.conventions.convention import ConventionOptions

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
    """Every name that ``load`` knows; raises UsageError for a configuration that cannot be."""
    return (
        *named_kernels.BUILTIN,
        *configuration.read_configuration().kernels,
        *configuration.entry_points(),
    )


def load_subject(kernel: str, convention: str | None = None) -> Subject:
    """The subject called ``kernel``.

    Args:
        kernel: A name in ``builtin.SUBJECTS``; ``file.py::name`` or ``package.module:name``, where
            ``name`` is a Subject, a subclass that needs no arguments, a function that returns one,
            or a function in the calling convention; a name of the nearest configuration
            (``configured.configuration``) or of an entry point, with its table (``Declared``).
            The file is imported; one that uses Triton decides then whether it is interpreted, so
            call ``examine.environment.prepare`` first.
        convention: A name in ``conventions.CONVENTIONS``; None for the first that fits.

    Raises:
        UsageError: when there is no such subject, in one line that says why.
    """
    found = load_candidate(kernel, convention)
    subject = found.adopted(convention)
    if kernel in named_kernels.BUILTIN:
        return subject
    if found.capabilities is not None:
        from attncheck.capabilities.declared import Declared

        _check_said(subject, kernel, "summary", "one line on it")
        return Declared(subject, found.capabilities, found.name)
    _check_said(subject, kernel, "name", "what reports call it")
    _check_said(subject, kernel, "summary", "one line on it")
    if subject.name in named_kernels.BUILTIN:
        raise UsageError(
            f"kernel {kernel!r} is called {subject.name!r}, as a kernel of attncheck's is: "
            "give it a name of its own."
        )
    return subject


def load_candidate(kernel: str, convention: str | None = None) -> Candidate:
    """What ``kernel`` names, imported; raises as ``load``, the convention's name checked first."""
    if kernel in named_kernels.BUILTIN:
        _check_builtin(kernel, convention)
        subject = named_kernels.subject_named(kernel)
        return Candidate(kernel=kernel, found=subject, name=kernel, entry=kernel)
    if convention is not None and (is_reference(kernel) or kernel in kernel_names()):
        from attncheck.conventions.declarations import convention_named

        convention_named(convention)  # before somebody's file is imported
    if is_reference(kernel):
        found = import_reference(kernel, f"kernel {kernel!r}")
        return Candidate(kernel=kernel, found=found, name=kernel, entry=kernel)
    return _named(kernel)


def _named(kernel: str) -> Candidate:
    """Of the configuration or an entry point."""
    project, points = (
        configuration.read_configuration(),
        configuration.entry_points().get(kernel, ()),
    )
    table, what = project.kernels.get(kernel), f"kernel {kernel!r}"
    if table is not None:
        entry = anchor_entry(table.entry, project.folder)
        found = import_entry(entry, project.folder, what)
        backward = import_backward(table, project.folder, what)
        return Candidate(
            kernel=kernel,
            found=found,
            name=kernel,
            entry=entry,
            capabilities=table,
            backward=backward,
        )
    if len(points) > 1:
        values = " and ".join(sorted(point.value for point in points))
        raise UsageError(f"{what} is several entry points: {values}; uninstall all but one.")
    if points:
        return _published(kernel, points[0].value)
    _check_meant(kernel)
    raise UnknownName("kernel", kernel, kernel_names())


def _published(kernel: str, value: str) -> Candidate:
    """Of the entry point ``value``: ``package.module:name``, perhaps with extras after it."""
    what = f"kernel {kernel!r} (entry point {value})"
    entry = value.partition("[")[0].strip()
    found, table = configuration.published_kernel(kernel, load_module_member(entry, what), value)
    if found is None and table is not None:
        entry = table.entry
        found = import_entry(entry, Path.cwd(), what)
    backward = None if table is None else import_backward(table, Path.cwd(), what)
    return Candidate(
        kernel=kernel,
        found=found,
        name=kernel,
        entry=entry,
        capabilities=table,
        backward=backward,
    )


def _check_builtin(kernel: str, convention: str | None) -> None:
    """Raises UsageError for a convention, and for a name that somebody means otherwise."""
    if convention not in {None, "native"}:
        raise UsageError(f"kernel {kernel!r} is attncheck's own: leave its convention out.")
    others: tuple[str, ...] = ()
    with suppress(UsageError):  # a file that is wrong elsewhere is no reason to refuse ours
        others = (*configuration.entry_points(), *configuration.nearest_tables()[1])
    if kernel in others:
        raise UsageError(
            f"kernel {kernel!r} is attncheck's own, and one of yours is called so too: "
            "give yours another name."
        )


def _check_meant(kernel: str) -> None:
    """Raises UsageError for what was meant to be a file or module."""
    if "/" not in kernel and "." not in kernel:
        return
    written = f"{kernel}::NAME" if kernel.endswith(".py") else "FILE.py::NAME"
    module, dot, name = kernel.rpartition(".")
    if dot and "/" not in kernel and not kernel.endswith(".py"):
        written = f"{module}:{name}"
    raise UsageError(
        f"kernel {kernel!r} is no kernel of attncheck's, and names no function of a file or "
        f"module: write {written}."
    )


def _makes_one(found: object) -> bool:
    """Whether it is to be called for a Subject: a class, or a function without arguments."""
    if isinstance(found, Subject) or not callable(found):
        return False
    if inspect.isclass(found):
        return True
    try:
        inspect.signature(found).bind()
    except (TypeError, ValueError):  # it takes arguments, or nothing says what it takes
        return False
    return not _takes_anything(found)


def _takes_anything(found: Callable[..., object]) -> bool:
    kinds = {parameter.kind for parameter in inspect.signature(found).parameters.values()}
    return inspect.Parameter.VAR_POSITIONAL in kinds


def _check_said(subject: Subject, kernel: str, attribute: str, what: str) -> None:
    """Raises UsageError for a Subject without what reports need of it."""
    text = getattr(subject, attribute, None)
    if not isinstance(text, str) or not text.strip():
        kind = type(subject).__name__
        raise UsageError(
            f'kernel {kernel!r} has no {attribute}: add {attribute} = "…" ({what}) to {kind}.'
        )


def _made(make: object, kernel: str) -> object:
    assert callable(make)
    try:
        return make()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # somebody's constructor
        raise UsageError(f"kernel {kernel!r}: making it raised {error_line(error)}.") from error

"""A subject by its name, from a file (``path/to/file.py::name``) or a module (``module:name``)."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from attncheck.errors import UsageError
from attncheck.source_files import brief, member, member_of_module
from attncheck.subjects import builtin
from attncheck.subjects.contract import Subject

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["is_reference", "load"]


def is_reference(kernel: str) -> bool:
    """Whether ``kernel`` is of a file or module, and no name of attncheck's."""
    return ":" in kernel


def load(kernel: str, convention: str | None = None) -> Subject:
    """The subject called ``kernel``.

    Args:
        kernel: A name in ``builtin.SUBJECTS``, or ``file.py::name`` or ``package.module:name``,
            where ``name`` is a Subject, a subclass that needs no arguments, a function that returns
            one, or a function in the calling convention. The file is imported; one that uses
            Triton decides then whether it is interpreted, so call ``examine.environment.prepare``
            first.
        convention: A name in ``conventions.CONVENTIONS``; None for the first that fits.

    Raises:
        UsageError: when there is no such subject, in one line that says why.
    """
    if not is_reference(kernel):
        _check_builtin(kernel, convention)
        return builtin.subject_named(kernel)
    from attncheck.subjects.conventions import adopted, convention_named

    file, _, name = kernel.partition(":")
    if file.endswith(".py") and not name.startswith(":"):
        raise UsageError(f"kernel {kernel!r}: a file takes two colons: {file}::{name or 'NAME'}.")
    if convention is not None:
        convention_named(convention)  # before somebody's file is imported
    read = member if "::" in kernel else member_of_module
    found = read(kernel, f"kernel {kernel!r}")
    if convention in {None, "native"} and _makes_one(found):
        found = _made(found, kernel)
    subject = adopted(found, kernel, convention)
    if isinstance(subject, str):
        kind = type(found).__name__
        raise UsageError(f"kernel {kernel!r} is {kind}: it must {subject}.")
    _check_names(subject, kernel)
    return subject


def _check_builtin(kernel: str, convention: str | None) -> None:
    """Raises UsageError for what was meant to be a file or module, and for a convention."""
    if kernel not in builtin.SUBJECTS and ("/" in kernel or "." in kernel):
        written = f"{kernel}::NAME" if kernel.endswith(".py") else "FILE.py::NAME"
        module, dot, name = kernel.rpartition(".")
        if dot and "/" not in kernel and not kernel.endswith(".py"):
            written = f"{module}:{name}"
        raise UsageError(
            f"kernel {kernel!r} is no kernel of attncheck's, and names no function of a file or "
            f"module: write {written}."
        )
    if convention not in {None, "native"} and kernel in builtin.SUBJECTS:
        raise UsageError(f"kernel {kernel!r} is attncheck's own: leave its convention out.")


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


def _check_names(subject: Subject, kernel: str) -> None:
    """Reports call it by its name, and must not mistake it for a kernel of attncheck's."""
    for attribute, what in (("name", "what reports call it"), ("summary", "one line on it")):
        text = getattr(subject, attribute, None)
        if not isinstance(text, str) or not text.strip():
            kind = type(subject).__name__
            raise UsageError(
                f'kernel {kernel!r} has no {attribute}: add {attribute} = "…" ({what}) to {kind}.'
            )
    if subject.name in builtin.SUBJECTS:
        raise UsageError(
            f"kernel {kernel!r} is called {subject.name!r}, as a kernel of attncheck's is: "
            "give it a name of its own."
        )


def _made(make: object, kernel: str) -> object:
    assert callable(make)
    try:
        return make()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # somebody's constructor
        raise UsageError(f"kernel {kernel!r}: making it raised {brief(error)}.") from error

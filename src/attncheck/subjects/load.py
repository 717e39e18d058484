"""A subject by its name, or from a file: ``path/to/file.py::name``."""

from __future__ import annotations

import inspect

from attncheck.errors import UsageError
from attncheck.source_files import brief, member
from attncheck.subjects import builtin
from attncheck.subjects.contract import Subject

__all__ = ["load"]


def load(kernel: str) -> Subject:
    """The subject called ``kernel``.

    Args:
        kernel: A name in ``builtin.SUBJECTS``, or ``file.py::name``, where ``name`` is a Subject,
            a subclass that needs no arguments, or a function that returns one. The file is
            imported; one that uses Triton decides then whether it is interpreted, so call
            ``examine.environment.prepare`` first.

    Raises:
        UsageError: when there is no such subject, in one line that says why.
    """
    if "::" not in kernel:
        return builtin.subject_named(kernel)
    made = member(kernel, f"kernel {kernel!r}")
    if inspect.isclass(made) or (callable(made) and not isinstance(made, Subject)):
        made = _made(made, kernel)
    if not isinstance(made, Subject):
        raise UsageError(f"kernel {kernel!r} is {type(made).__name__}: it must be a Subject.")
    _check_names(made, kernel)
    return made


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

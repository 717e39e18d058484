"""A subject by its name, or from a file: ``path/to/file.py::name``."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from attncheck.errors import UsageError
from attncheck.subjects import builtin
from attncheck.subjects.contract import Subject

if TYPE_CHECKING:
    from types import ModuleType

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
    path, separator, name = kernel.rpartition("::")
    if not separator:
        return builtin.subject_named(kernel)
    module = _module(Path(path), kernel)
    if not hasattr(module, name):
        raise UsageError(f"kernel {kernel!r}: {path} has no {name!r}.")
    made = getattr(module, name)
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


def _module(path: Path, kernel: str) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"kernel {kernel!r}: there is no file {path}.")
    spec = importlib.util.spec_from_file_location(f"attncheck_kernel_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UsageError(f"kernel {kernel!r}: {path} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and Triton look their module up by name.
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # somebody's file: it may raise anything, SystemExit too
        raise UsageError(f"kernel {kernel!r}: importing {path} raised {_brief(error)}.") from error
    return module


def _made(make: object, kernel: str) -> object:
    assert callable(make)
    try:
        return make()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # somebody's constructor
        raise UsageError(f"kernel {kernel!r}: making it raised {_brief(error)}.") from error


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"

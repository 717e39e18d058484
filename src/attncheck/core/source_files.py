"""Import of a user's Python file, with errors of one line."""

from __future__ import annotations

import codecs
import importlib
import importlib.util
import io
import linecache
import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, TextIO
from zlib import crc32

from attncheck.core.errors import UsageError, did_you_mean
from attncheck.core.own_process import FOREIGN_CODE
from attncheck.core.sanitize_text import LONGEST

_MOST_HELD = 2**16  # characters; more are no usage message
_COMPILERS_PLACE = re.compile(r"at \d+:\d+:")  # all that the first line of Triton's errors says


class _FromSource(SourceFileLoader):
    """Compiles what the file says now.

    Cached bytecode is taken for current where the source has the same length and was written in the
    same second: a number that was changed in between would be the old one.
    """

    def get_code(self, fullname: str) -> CodeType:
        """The code of the source; no cache is read or written."""
        del fullname
        return self.source_to_code(self.get_data(self.path), self.path)


def import_file(path: Path, what: str) -> ModuleType:
    """The module that the file ``path`` is; imported anew at every call.

    What it prints goes to standard error; what it sets as torch's default dtype and device holds
    for its own import alone.

    Args:
        what: Whose file it is, which begins every error: ``kernel 'mine.py::Mine'``.

    Raises:
        UsageError: where there is no such file, or importing it raises anything but
            KeyboardInterrupt; in one line, with the line of the file where there is one.
    """
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except OSError as error:  # a name of thousands of letters
        raise UsageError(f"{what}: it cannot be read: {error.strerror}.") from None
    if is_folder:
        raise UsageError(f"{what}: {str(path)!r} is a folder: name a Python file.")
    if not is_file:
        near = did_you_mean(path.name, (one.name for one in path.parent.glob("*.py")))
        raise UsageError(f"{what}: there is no file {path}{f': {near}' if near else '.'}")
    if path.suffix != ".py":
        raise UsageError(f"{what}: {path} is not a Python file.")
    name = f"attncheck_file_{path.stem}"
    if path.stem == "__init__":  # of a package, whose modules are called after it
        name += f"{crc32(os.fsencode(path.resolve())):x}"
    loader = _FromSource(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None, "a loader was given"
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and Triton look their module up by name.
    sys.modules[spec.name] = module
    FOREIGN_CODE.set()
    try:
        with _streams_of_its_own(), _defaults_of_its_own():
            linecache.checkcache(str(path))
            loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # somebody's file: it may raise anything, SystemExit too
        text = f"{error_line(error)}{line_in_file(path, error)}"
        raise UsageError(f"{what}: importing {path} raised {text}.") from error
    return module


def load_member(text: str, what: str) -> Any:
    """Return ``NAME`` of ``FILE.py::NAME``; raises UsageError as ``import_file``, or for none."""
    file, _, name = text.rpartition("::")
    if not file or not name:
        missing = "name after" if file else "file before"
        raise UsageError(f"{what}: there is no {missing} '::'.")
    return load_attribute(import_file(Path(file), what), Path(file), name, what)


def load_module_member(text: str, what: str) -> Any:
    """``NAME`` of ``package.module:NAME``, imported as Python does it, from here or as installed.

    Its name may have dots: ``package.module:Class.method``.

    Raises:
        UsageError: where there is no such module or name, or importing it raises anything but
            KeyboardInterrupt; in one line.
    """
    module, _, names = text.partition(":")
    if not module or not names:
        missing = "name after" if module else "module before"
        raise UsageError(f"{what}: there is no {missing} ':'.")
    # ``python -m`` has the current folder on its path; a console script has not.
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # as for ``python -m``; what it imports later is found too
    FOREIGN_CODE.set()
    try:
        with _streams_of_its_own(), _defaults_of_its_own():
            member: Any = importlib.import_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # somebody's module
        raise UsageError(f"{what}: importing {module} raised {error_line(error)}.") from error
    for name in names.split("."):
        member = _member(member, name, f"{what}: {module}")
    return member


def load_attribute(module: ModuleType, path: Path, name: str, what: str) -> Any:
    """Return ``name`` of the ``module`` of file ``path``; raises UsageError where it has none."""
    return _member(module, name, f"{what}: {path}", path)


def _member(owner: object, name: str, where: str, path: Path | None = None) -> Any:
    try:
        return getattr(owner, name)
    except KeyboardInterrupt:
        raise
    except AttributeError:
        near = did_you_mean(name, (each for each in dir(owner) if not each.startswith("__")))
        raise UsageError(f"{where} has no {name!r}{f': {near}' if near else '.'}") from None
    except BaseException as error:  # somebody's __getattr__
        line = "" if path is None else line_in_file(path, error)
        text = f"{error_line(error)}{line}"
        raise UsageError(f"{where}: reading {name!r} raised {text}.") from error


def error_line(error: BaseException) -> str:
    """Return ``ValueError: the first line of what it says``; its name where it says nothing."""
    name, line = type(error).__name__, first_line(error)
    return f"{name}: {line}" if line else name


def first_line(error: BaseException) -> str:
    """Return the first line of what ``error`` says, cut where it is longer than a page shows.

    Triton's compiler says where first and, after some source, why: both are the line then.
    """
    try:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        line = lines[0] if lines else ""
        if _COMPILERS_PLACE.fullmatch(line) and len(lines) > 1:
            line = f"{line} {lines[-1]}"
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001  # somebody's __str__
        return ""
    if len(line) <= LONGEST:
        return line
    return f"{line[:LONGEST]}… ({len(line) - LONGEST:,} more characters)"


def line_in_file(path: Path, error: BaseException) -> str:
    """`` at mine.py:7``: the innermost line of the file on the way to ``error``; else nothing."""
    # The innermost frame of that file: what it called in turn is of no help to its author.
    frames = traceback.extract_tb(error.__traceback__)
    numbers = [f.lineno for f in frames if Path(f.filename).resolve() == path.resolve()]
    return f" at {path.name}:{numbers[-1]}" if numbers else ""


class DivertedOutput(io.TextIOWrapper):
    """In place of standard output, for somebody else's code: all of it goes to another stream.

    Closing it closes nothing, and a stream that cannot be written to is no reason to stop.

    Args:
        stream: Standard error, or None where there is none.
        holds: Keep what is written until ``release``, or ``_MOST_HELD`` characters.
    """

    def __init__(self, stream: TextIO | None, *, holds: bool = False) -> None:
        self._bytes = _Passing(stream, holds=holds)
        # Foreign code expects a whole stream, with a buffer, a number, and all.
        super().__init__(
            self._bytes,  # type: ignore[arg-type]  # without a buffer, as in python -u
            encoding="utf-8",
            errors="backslashreplace",
            write_through=True,
        )

    def close(self) -> None:
        """Do nothing: whoever writes next does not know of it."""

    def release(self, *, forget: bool = False) -> None:
        """Pass on what was held, or forget it; nothing is held from now on."""
        self._bytes.release(forget=forget)


class _Passing(io.RawIOBase):
    """UTF-8 bytes, as text to a stream of text."""

    def __init__(self, stream: TextIO | None, *, holds: bool) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._holds = holds

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    def fileno(self) -> int:
        if self._stream is None:
            return super().fileno()
        return self._stream.fileno()

    def write(self, data: Any) -> int:
        self._held += self._decoder.decode(bytes(data))
        if not self._holds or len(self._held) > _MOST_HELD:
            self.release()
        return len(data)

    def release(self, *, forget: bool = False) -> None:
        text, self._held, self._holds = self._held, "", False
        if forget or not text or self._stream is None:
            return
        # Somebody else's print must never end our process.
        with suppress(OSError, ValueError):  # broken, or closed: nobody hears
            self._stream.write(text)


@contextmanager
def _streams_of_its_own() -> Iterator[None]:
    """Within, nothing reaches standard output, and closing it, or standard error, closes nothing.

    SystemExit takes with it what was written: of a usage message, ours is the one line.
    """
    aside = DivertedOutput(sys.stderr, holds=True)
    try:
        with redirect_stdout(aside), redirect_stderr(aside):
            yield
    except SystemExit:
        aside.release(forget=True)
        raise
    finally:
        aside.release()


@contextmanager
def _defaults_of_its_own() -> Iterator[None]:
    """Afterwards torch's default dtype and device are what they were before."""
    import torch

    def device() -> torch.device | None:
        # torch.get_default_device() also sees a ``with torch.device(...)`` around this import.
        context = getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None)
        return getattr(getattr(context, "device_context", None), "device", None)

    dtype_before, device_before = torch.get_default_dtype(), device()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype_before)
        if device() != device_before:
            torch.set_default_device(device_before)

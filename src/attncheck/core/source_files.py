"""Import a user's Python file or module, with errors in one line."""

from __future__ import annotations

import codecs
import importlib
import importlib.util
import io
import itertools
import linecache
import os
import re
import sys
import sysconfig
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

_MOST_FRAMES = 20  # Frames of a traceback that a report has.
_MOST_HELD = 2**16  # Characters of held output; more cannot be a usage message.
_INSTALLED = tuple(
    f"{sysconfig.get_path(kind)}{os.sep}" for kind in ("stdlib", "platstdlib", "purelib", "platlib")
)
# Elsewhere than in this Python's own folders, and code that torch's compiler wrote.
_PACKAGES = re.compile(r"[/\\](?:site-packages|dist-packages|torchinductor_[^/\\]*)[/\\]")
_OURS = f"{Path(__file__).parents[1]}{os.sep}"
_TRITON_POSITION = re.compile(r"at \d+:\d+:")  # First line of Triton's compilation errors.


class _FromSource(SourceFileLoader):
    """A loader that always compiles the source and ignores cached bytecode.

    Bytecode counts as current if the source has the same length and was written in the same second,
    so that a changed number could go unnoticed.
    """

    def get_code(self, fullname: str) -> CodeType:
        """Compile the source; no cache is read or written."""
        del fullname
        return self.source_to_code(self.get_data(self.path), self.path)


def import_file(path: Path, what: str) -> ModuleType:
    """Import the file ``path`` anew, and return its module.

    Its output is diverted to standard error, and changes of torch's default dtype and device are
    reverted after the import.

    Args:
        what: Beginning of error messages: ``kernel 'mine.py::Mine'``.

    Raises:
        UsageError: in one line, if there is no such file, or importing it raises anything but
            KeyboardInterrupt, then with the line number in the file if there is one.
    """
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except OSError as error:  # for example a name that is too long
        raise UsageError(f"{what}: it cannot be read: {error.strerror}.") from None
    if is_folder:
        raise UsageError(f"{what}: {str(path)!r} is a folder: name a Python file.")
    if not is_file:
        near = did_you_mean(path.name, (one.name for one in path.parent.glob("*.py")))
        raise UsageError(f"{what}: there is no file {path}{f': {near}' if near else '.'}")
    if path.suffix != ".py":
        raise UsageError(f"{what}: {path} is not a Python file.")
    name = f"attncheck_file_{path.stem}"
    if path.stem == "__init__":  # a package, which needs a unique name
        name += f"{crc32(os.fsencode(path.resolve())):x}"
    loader = _FromSource(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None, "a loader was given"
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and Triton look up the module by its name.
    sys.modules[spec.name] = module
    FOREIGN_CODE.set()
    try:
        with _diverted_streams(), _restored_defaults():
            linecache.checkcache(str(path))
            loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # foreign code may raise anything, even SystemExit
        text = f"{error_line(error)}{line_in_file(path, error)}"
        raise UsageError(f"{what}: importing {path} raised {text}.") from error
    return module


def load_member(text: str, what: str) -> Any:
    """Return the object ``FILE.py::NAME``; raise UsageError if the file or the name is missing."""
    file, _, name = text.rpartition("::")
    if not file or not name:
        missing = "name after" if file else "file before"
        raise UsageError(f"{what}: there is no {missing} '::'.")
    return load_attribute(import_file(Path(file), what), Path(file), name, what)


def load_module_member(text: str, what: str) -> Any:
    """Return the object ``package.module:NAME``, from the current folder or an installed package.

    The name may have dots: ``package.module:Class.method``.

    Raises:
        UsageError: in one line, if there is no such module or name, or importing it raises anything
            but KeyboardInterrupt.
    """
    module, _, names = text.partition(":")
    if not module or not names:
        missing = "name after" if module else "module before"
        raise UsageError(f"{what}: there is no {missing} ':'.")
    # Unlike ``python -m``, a console script does not have the current folder on its path.
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # kept, since the module may import more later
    FOREIGN_CODE.set()
    try:
        with _diverted_streams(), _restored_defaults():
            member: Any = importlib.import_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # foreign code
        raise UsageError(f"{what}: importing {module} raised {error_line(error)}.") from error
    for name in names.split("."):
        member = _member(member, name, f"{what}: {module}")
    return member


def load_attribute(module: ModuleType, path: Path, name: str, what: str) -> Any:
    """Return an attribute of the ``module`` of file ``path``; raise UsageError if it has none."""
    return _member(module, name, f"{what}: {path}", path)


def _member(owner: object, name: str, where: str, path: Path | None = None) -> Any:
    try:
        return getattr(owner, name)
    except KeyboardInterrupt:
        raise
    except AttributeError:
        near = did_you_mean(name, (each for each in dir(owner) if not each.startswith("__")))
        raise UsageError(f"{where} has no {name!r}{f': {near}' if near else '.'}") from None
    except BaseException as error:  # a foreign __getattr__
        line = "" if path is None else line_in_file(path, error)
        text = f"{error_line(error)}{line}"
        raise UsageError(f"{where}: reading {name!r} raised {text}.") from error


def error_line(error: BaseException) -> str:
    """Return ``ValueError: first line of its text``, or only the type's name without a text."""
    name, line = type(error).__name__, first_line(error)
    return f"{name}: {line}" if line else name


def first_line(error: BaseException) -> str:
    """Return the first line of the text of ``error``, cut after ``LONGEST`` characters.

    For an error of Triton's compiler, which starts with a position, the last line is appended.
    """
    try:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        line = lines[0] if lines else ""
        if _TRITON_POSITION.fullmatch(line) and len(lines) > 1:
            line = f"{line} {lines[-1]}"
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001  # a foreign __str__
        return ""
    if len(line) <= LONGEST:
        return line
    return f"{line[:LONGEST]}… ({len(line) - LONGEST:,} more characters)"


def line_in_file(path: Path, error: BaseException) -> str:
    """Return `` at mine.py:7``, the innermost line of the file in a traceback; else nothing."""
    # Frames below those of the file do not help its author.
    frames = traceback.extract_tb(error.__traceback__)
    numbers = [f.lineno for f in frames if Path(f.filename).resolve() == path.resolve()]
    return f" at {path.name}:{numbers[-1]}" if numbers else ""


def is_installed(file: str) -> bool:
    """Return whether ``file`` is Python's own or an installed package's."""
    return file.startswith(_INSTALLED) or bool(_PACKAGES.search(file))


def is_of_kernel(file: str) -> bool:
    """Return whether ``file`` is neither installed nor attncheck's: a kernel's, or beside it."""
    return file.endswith(".py") and not file.startswith(_OURS) and not is_installed(file)


def kernel_place(error: BaseException) -> str:
    """Return `` at mine.py:7 in forward``, a traceback's innermost line of a kernel; else nothing.

    Only with the file's name: reports are passed on, and the same kernel in two folders has the
    same reasons.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if is_of_kernel(os.path.abspath(f.filename))]  # noqa: PTH100  # as imported
    return f" at {Path(own[-1].filename).name}:{own[-1].lineno} in {own[-1].name}" if own else ""


def kernel_frames(error: BaseException) -> tuple[str, ...]:
    """Return ``mine.py:7 in forward`` for each frame of a kernel, and for what it called, in order.

    Frames of attncheck and torch that called the kernel, or that stand between a kernel's call of
    torch and its execution, are left out, as they do not help its author. Repetitions of a frame
    are not counted, since a recursion's depth varies, and of many frames the last are returned.
    """
    shown, is_of_interest = [], False
    for frame in traceback.extract_tb(error.__traceback__):
        file = os.path.abspath(frame.filename)  # noqa: PTH100  # as imported
        # Torch's own frames belong to whoever called them.
        if is_of_kernel(file) or file.startswith(_OURS):
            is_of_interest = is_of_kernel(file)
        if is_of_interest:
            shown.append(f"{Path(file).name}:{frame.lineno} in {frame.name}")
    repeated = [(place, len(list(same)) > 1) for place, same in itertools.groupby(shown)]
    several = (f"{place}, repeatedly" if often else place for place, often in repeated)
    # A function may have any name: a line each, as an exception has.
    return tuple(" ".join(each.split())[:LONGEST] for each in several)[-_MOST_FRAMES:]


class DivertedOutput(io.TextIOWrapper):
    """A replacement of standard output for foreign code, which writes to another stream.

    Closing it has no effect, and write errors of the stream are ignored.

    Args:
        stream: Standard error, or None if there is none.
        holds: Whether to hold output until ``release``, or until it exceeds ``_MOST_HELD``.
    """

    def __init__(self, stream: TextIO | None, *, holds: bool = False) -> None:
        self._bytes = _TextForwarder(stream, holds=holds)
        # Foreign code expects a complete stream, with a buffer and a file number.
        super().__init__(
            self._bytes,  # type: ignore[arg-type]  # without a buffer, as in python -u
            encoding="utf-8",
            errors="backslashreplace",
            write_through=True,
        )

    def close(self) -> None:
        """Do nothing, since other code may still write to it."""

    def release(self, *, forget: bool = False) -> None:
        """Write or discard the held output; nothing is held from now on."""
        self._bytes.release(forget=forget)


class _TextForwarder(io.RawIOBase):
    """A binary stream that decodes UTF-8 and writes it to a text stream."""

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
        # A print in foreign code must never end our process.
        with suppress(OSError, ValueError):  # the stream is broken or closed
            self._stream.write(text)


@contextmanager
def _diverted_streams() -> Iterator[None]:
    """Divert standard output and standard error to our standard error, and ignore their closing.

    Output before a SystemExit is discarded, since our one-line error replaces a usage message.
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
def _restored_defaults() -> Iterator[None]:
    """Restore torch's default dtype and device on exit."""
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

"""Read files, and write files atomically."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from attncheck.core.errors import UsageError
from attncheck.core.sanitize_text import one_line


def check_names(
    directory: Path | str,
    names: Iterable[str],
    *,
    what: str = "reports",
    instead: str = "--out",
) -> None:
    """Raise UsageError unless ``write_files`` could write files of these names now.

    Args:
        directory: Folder of the files, which need not exist.
        instead: What the error advises to change.
    """
    directory = Path(directory)
    try:
        place = _nearest_directory(directory)
        # A temporary file, which vanishes when it is closed, shows whether files can be created.
        with tempfile.TemporaryFile(dir=place):
            pass
        for name in names:
            if (directory / name).is_dir():
                raise IsADirectoryError(0, f"{name} is a directory")
    except (OSError, ValueError) as error:
        raise UsageError(_refusal(directory, error, what, instead)) from None


def read_bytes(source: Path | str, name: str, kind: str, largest: int) -> bytes:
    """Return the content of a file, or a text itself, as bytes.

    Args:
        source: A Path to read, or the text as a str.
        name: The file's name, for messages.
        kind: The kind of content, for messages.
        largest: Largest number of bytes to accept, since a device may be endless.

    Raises:
        UsageError: if it cannot be read, or is too large.
    """
    try:
        if isinstance(source, str):
            raw = source.encode()
        else:
            with source.open("rb") as file:
                raw = file.read(largest + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{name} cannot be read: {one_line(reason)}.") from None
    # One byte more than allowed was read, which shows that the file is too large.
    if len(raw) > largest:
        raise UsageError(f"{name} is larger than {largest} bytes, the most that a {kind} may be.")
    return raw


def write_texts(
    texts: Mapping[str, str],
    directory: Path | str,
    *,
    what: str = "reports",
    instead: str = "--out",
) -> tuple[Path, ...]:
    """Write texts in UTF-8 as ``write_files`` does."""
    # A lone surrogate, as in a foreign file name, must not prevent the report.
    files = {name: text.encode(errors="backslashreplace") for name, text in texts.items()}
    return write_files(files, directory, what=what, instead=instead)


def write_files(
    files: Mapping[str, bytes],
    directory: Path | str,
    *,
    what: str = "reports",
    instead: str = "--out",
) -> tuple[Path, ...]:
    """Write files into ``directory``, which is created if needed.

    Each file replaces an old one atomically and keeps its permissions, so that a reader never sees
    a partial file.

    Args:
        files: Contents by name; a name may be in one subfolder.
        what: The kind of files, for error messages.
        instead: What an error advises to change.

    Raises:
        UsageError: if the directory cannot be written to.
    """
    directory = Path(directory)
    paths = {directory / name: content for name, content in files.items()}
    drafts: dict[Path, Path] = {}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path, content in paths.items():
            path.parent.mkdir(exist_ok=True)
            # In the same directory, since a rename across file systems is a copy and not atomic.
            drafts[path] = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
            with drafts[path].open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())  # a replaced file must not turn out empty after a crash
            if path.exists():
                drafts[path].chmod(path.stat().st_mode & 0o777)
        for path, draft in drafts.items():
            draft.replace(path)
    except (OSError, ValueError) as error:
        raise UsageError(_refusal(directory, error, what, instead)) from None
    finally:
        for draft in drafts.values():
            draft.unlink(missing_ok=True)
    return tuple(paths)


def _nearest_directory(directory: Path) -> Path:
    """Return ``directory``, or its nearest existing parent."""
    try:
        directory.stat()
    except FileNotFoundError:
        if directory.is_symlink() or directory.parent == directory:
            raise
        return _nearest_directory(directory.parent)
    if not directory.is_dir():
        raise NotADirectoryError(0, "Not a directory")
    return directory


def _refusal(
    directory: Path, error: OSError | ValueError, what: str = "reports", instead: str = "--out"
) -> str:
    reason = getattr(error, "strerror", None) or str(error)
    return (
        f"{what} cannot be written to {one_line(str(directory))!r}: {one_line(reason)}; "
        f"choose another {instead}."
    )

"""Reports on disk: written whole or not at all."""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from attncheck.errors import UsageError
from attncheck.reporting.as_csv import as_csv
from attncheck.reporting.as_json import as_json
from attncheck.reporting.as_markdown import as_markdown
from attncheck.reporting.inert import one_line

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attncheck.record import Report

__all__ = ["check_writable", "write", "write_texts"]

_WRITERS = {"json": as_json, "md": as_markdown, "csv": as_csv}


def check_writable(directory: Path | str, stem: str = "rmse") -> None:
    """Raise UsageError unless ``write`` could write there now; leaves nothing behind.

    A directory that does not exist yet is fine where it could be made.
    """
    directory = Path(directory)
    try:
        place = _nearest(directory)
        # No name is taken: the file is gone when it is closed, also where it could be made.
        with tempfile.TemporaryFile(dir=place):
            pass
        for suffix in _WRITERS:
            if (directory / f"{stem}.{suffix}").is_dir():
                raise IsADirectoryError(0, f"{stem}.{suffix} is a directory")
    except (OSError, ValueError) as error:
        raise UsageError(_refusal(directory, error)) from None


def write(report: Report, directory: Path | str, stem: str = "rmse") -> tuple[Path, ...]:
    """Write ``stem``.json, .md and .csv into ``directory``, which is made if need be.

    Everything is rendered before anything is written, and each file replaces the old one in one
    step: a reader finds the old report or the new one.

    Returns:
        The three paths.

    Raises:
        UsageError: where the directory cannot be written to.
    """
    texts = {f"{stem}.{suffix}": make(report) for suffix, make in _WRITERS.items()}
    return write_texts(texts, directory)


def write_texts(
    texts: Mapping[str, str],
    directory: Path | str,
    *,
    what: str = "reports",
    instead: str = "--out",
) -> tuple[Path, ...]:
    """Write each text, by its file's name, into ``directory``: as ``write`` does it.

    Args:
        texts: By name.
        directory: Made if need be.
        what: They are, for the message of an error.
        instead: What to choose another of then.
    """
    directory = Path(directory)
    paths = {directory / name: text for name, text in texts.items()}
    drafts: dict[Path, Path] = {}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path, text in paths.items():
            drafts[path] = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
            _write_through(drafts[path], text)
        for path, draft in drafts.items():
            draft.replace(path)
    except (OSError, ValueError) as error:
        raise UsageError(_refusal(directory, error, what, instead)) from None
    finally:
        for draft in drafts.values():
            draft.unlink(missing_ok=True)
    return tuple(paths)


def _write_through(path: Path, text: str) -> None:
    with path.open("x", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _nearest(directory: Path) -> Path:
    """``directory``, or where its first missing part would be made."""
    try:
        directory.stat()
    except FileNotFoundError:
        if directory.is_symlink() or directory.parent == directory:
            raise
        return _nearest(directory.parent)
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

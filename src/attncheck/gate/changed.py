"""Which kernels a change is about: those whose files git says are others since a commit."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from attncheck.capabilities.capability_table import matches_pattern
from attncheck.capabilities.configuration import read_configuration
from attncheck.core.errors import UsageError
from attncheck.core.sanitize_text import one_line

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

__all__ = ["changed"]

_SECONDS = 120


def changed(kernels: Sequence[str], ref: str) -> tuple[str, ...]:
    """Those of ``kernels`` whose ``sources`` or entry file differ from the commit ``ref``.

    What is not committed, and what git does not know yet, counts too. A kernel that says nothing
    of its sources is always one of them: nobody knows what it is made of.

    Raises:
        UsageError: outside of a repository, or for a commit that there is not.
    """
    files = frozenset(_files(ref))
    return tuple(kernel for kernel in kernels if _is_among(kernel, files))


def _is_among(kernel: str, files: Collection[Path]) -> bool:
    project = read_configuration()
    table = project.kernels.get(kernel)
    if table is None or not table.sources:
        return True
    folder = project.folder.resolve()
    inside = [f.relative_to(folder).as_posix() for f in files if f.is_relative_to(folder)]
    own = project.path is not None and project.path.name in inside  # its table may be another
    named = (path for said in (table.entry, table.backward) for path in _named(said, folder))
    return (
        own
        or any(path in files or path.resolve() in files for path in named)
        or any(matches_pattern(file, pattern) for file in inside for pattern in table.sources)
    )


def _named(said: object, folder: Path) -> Iterator[Path]:
    """Where the file of ``FILE.py::NAME`` or of ``package.module:NAME`` may be."""
    if not isinstance(said, str):
        return
    file, colons, _ = said.partition("::")
    if colons:
        yield folder / file
        return
    module, colon, _ = said.partition(":")
    if not colon:
        return
    for start in (folder, folder / "src"):
        path = start.joinpath(*module.split("."))
        yield path.with_name(f"{path.name}.py")
        yield path / "__init__.py"


def _files(ref: str) -> list[Path]:
    if ref.startswith("-") or not ref.strip():
        raise UsageError(f"--changed-since {ref!r} is no commit, branch or tag.")
    root = Path(_git("rev-parse", "--show-toplevel").removesuffix("\n")).resolve()
    # A source that was renamed is another at both names; and no configuration of git's has a say.
    known = _git("diff", "--no-renames", "--no-relative", "--name-only", "-z", ref, "--")
    new = _git("ls-files", "--others", "--exclude-standard", "-z", "--full-name", str(root))
    return [root / name for name in (known + new).split("\0") if name]


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(  # noqa: S603  # of our own making, and no shell
            ["git", *arguments],  # noqa: S607  # whichever git is here
            capture_output=True,
            check=False,
            encoding="utf-8",
            errors="surrogateescape",  # as Python names files
            stdin=subprocess.DEVNULL,
            timeout=_SECONDS,
        )
    except FileNotFoundError:
        raise UsageError("--changed-since needs git, which is not here: install it.") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"--changed-since: {one_line(str(error))}.") from None
    if done.returncode == 0:
        return done.stdout
    said = [line for line in done.stderr.splitlines() if line.strip()]
    reason = one_line(said[0]) if said else f"git ended with {done.returncode}"
    raise UsageError(f"--changed-since: {reason.rstrip('.')}.")

"""Sources of a kernel: has anything that it is made of changed, since a run or since a commit?"""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

from attncheck.core.errors import UsageError
from attncheck.gate.other_commit import run_git
from attncheck.subjects.capabilities import named_kernels
from attncheck.subjects.capabilities.capability_table import matches_pattern, pattern_files
from attncheck.subjects.capabilities.configuration import read_configuration
from attncheck.subjects.hub_kernels import is_hub_folder
from attncheck.verify.environment import package_version
from attncheck.workers.journal_format import JournalContent

# Of these another version is another judge, or another kernel.
_PACKAGES = ("attncheck", "torch", "triton", "numpy")
_MOST_FILES = 2000
_LARGEST = 2**28  # bytes of one that is read
_FILES = "files"  # of a description's facts


def source_fingerprint(kernels: Sequence[str], written: Iterable[str] = ()) -> str:
    """Return 16 hexadecimal digits of the kernels' files, their tables, and our versions.

    Of a kernel in a module nothing is known but its configured ``sources``: no kernel is imported.

    Args:
        written: Folders that a run writes to: what lies in them is no source.
    """
    apart = [Path(folder).resolve() for folder in written]
    digest = hashlib.sha256()
    for package in _PACKAGES:
        digest.update(f"{package} {package_version(package)}\n".encode())
    for kernel in kernels:
        digest.update(f"{kernel}\n".encode())
        for path in _files(kernel):
            if not any(path.resolve().is_relative_to(folder) for folder in apart):
                # With its name: two files that change places are a change, too.
                digest.update(os.fsencode(path) + _hash(path).encode())
    return digest.hexdigest()[:16]


def file_hashes(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return the SHA-256 of each file that a kernel's process has loaded, for its description.

    Files below the working directory are named from there. The names are foreign: what is no
    regular file is not read.
    """
    here = f"{Path.cwd()}{os.sep}"
    shown = (name.removeprefix(here) for name in islice(names, _MOST_FILES))
    hashes = {name.encode(errors="backslashreplace").decode(): _hash(Path(name)) for name in shown}
    return {_FILES: hashes}


def changed_source(before: JournalContent) -> str:
    """Return which source changed since ``before`` began, or is not known to; empty for none.

    No kernel is imported: files that were loaded then are read now.
    """
    described: dict[str, Mapping[str, str]] = {}
    answered: dict[str, None] = {}
    for id_, done in before.results.items():
        unit = before.units.get(id_)
        if unit is None or unit.commit:  # what another commit's files are is not for us to keep
            continue
        answered[unit.kernel] = None
        if unit.kind == "describe":
            hashes = done.facts.get(_FILES)
            described[unit.kernel] = hashes if isinstance(hashes, dict) else {}
    for hashes in described.values():
        for name, known in hashes.items():
            if not _was_temporary(Path(name)) and _hash(Path(name)) != known:
                return f"{name} has changed"
    unknown = (k for k in answered if not described.get(k) and not _is_fingerprinted(k))
    return next((f"nobody can tell whether {kernel} has changed" for kernel in unknown), "")


def _was_temporary(path: Path) -> bool:
    """Return whether it was a process's own, as torch.distributed writes a module for each."""
    return path.is_relative_to(tempfile.gettempdir()) and not os.path.lexists(path)


def _is_fingerprinted(kernel: str) -> bool:
    """Return whether the fingerprint covers a kernel without files: ours are as our version is."""
    table = read_configuration().kernels.get(kernel)
    return kernel in named_kernels.BUILTIN or (table is not None and bool(table.sources))


def _hash(path: Path) -> str:
    """Return hexadecimal digits; empty for what is no file that can be read."""
    try:
        # Reading a pipe or a device might never end.
        if not path.is_file() or path.stat().st_size > _LARGEST:
            return ""
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError):  # a name with a NUL
        return ""


def _files(kernel: str) -> Iterator[Path]:
    project = read_configuration()
    table = project.kernels.get(kernel)
    entry = kernel if table is None else table.entry
    file, colons, _ = entry.partition("::")
    if table is None and is_hub_folder(file):
        yield from islice(sorted(Path(file, "build").rglob("*")), _MOST_FILES)
    elif colons:
        yield Path(file) if table is None else project.folder / file
    if table is None or project.path is None:
        return
    # The table itself may name another function from now on.
    yield project.path
    for pattern in table.sources:
        yield from islice(pattern_files(project.folder, pattern), _MOST_FILES)


def changed_kernels(kernels: Sequence[str], ref: str) -> tuple[str, ...]:
    """Return the kernels whose ``sources`` or entry file differ from the commit ``ref``.

    What is not committed, and what git does not know yet, counts too. A kernel that says nothing
    of its sources is always one of them: nobody knows what it is made of.

    Raises:
        UsageError: outside of a repository, or for a commit that there is not.
    """
    files = frozenset(_changed_files(ref))
    return tuple(kernel for kernel in kernels if _has_changed(kernel, files))


def _has_changed(kernel: str, files: Collection[Path]) -> bool:
    project = read_configuration()
    table = project.kernels.get(kernel)
    if table is None or not table.sources:
        return True
    folder = project.folder.resolve()
    inside = [f.relative_to(folder).as_posix() for f in files if f.is_relative_to(folder)]
    own = project.path is not None and project.path.name in inside  # its table may be another
    entry_files = (
        path
        for reference in (table.entry, table.backward)
        for path in _entry_files(reference, folder)
    )
    return (
        own
        or any(path in files or path.resolve() in files for path in entry_files)
        or any(matches_pattern(file, pattern) for file in inside for pattern in table.sources)
    )


def _entry_files(reference: object, folder: Path) -> Iterator[Path]:
    """Return where the file of ``FILE.py::NAME`` or of ``package.module:NAME`` may be."""
    if not isinstance(reference, str):
        return
    file, colons, _ = reference.partition("::")
    if colons:
        yield folder / file
        return
    module, colon, _ = reference.partition(":")
    if not colon:
        return
    for start in (folder, folder / "src"):
        path = start.joinpath(*module.split("."))
        yield path.with_name(f"{path.name}.py")
        yield path / "__init__.py"


def _changed_files(ref: str) -> list[Path]:
    if ref.startswith("-") or not ref.strip():
        raise UsageError(f"--changed-since {ref!r} is no commit, branch or tag.")
    git = functools.partial(run_git, "--changed-since", Path.cwd())
    root = Path(git("rev-parse", "--show-toplevel")).resolve()
    # A source that was renamed is another at both names; and no configuration of git's has a say.
    tracked = git("diff", "--no-renames", "--no-relative", "--name-only", "-z", ref, "--")
    new = git("ls-files", "--others", "--exclude-standard", "-z", "--full-name", str(root))
    return [root / name for name in (tracked + new).split("\0") if name]

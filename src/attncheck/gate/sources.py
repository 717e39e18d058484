"""Sources of a kernel: fingerprints, changes since a commit, and the kernels of another commit.

How a gate uses it::

    with against.tree("main") as tree:  # a worktree outside of the repository
        Unit(kernel="kernels/mine.py::fwd", commit=tree.commit, …)
        side = tree.kernel("kernels/mine.py::fwd")  # there; ``missing`` says why it is not
        Host(side.kernel, folder=side.folder, paths=side.paths)
        tree.strayed(host.files())  # where its process says that it was loaded from
    ratchet.beside(before, after, environments)

A unit names the commit, and not the folder: the folder differs from run to run, and the id of a
unit must not. Whoever does a unit with a commit is told by its options where the tree lies.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from msgspec.structs import replace

from attncheck.capabilities import named_kernels
from attncheck.capabilities.capability_table import matches_pattern, pattern_files
from attncheck.capabilities.configuration import read_configuration
from attncheck.core.errors import UsageError
from attncheck.core.sanitize_text import one_line

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from attncheck.records.run_reports import Answer
    from attncheck.workers.journal_format import JournalContent

__all__ = [
    "CommitTree",
    "OtherKernel",
    "changed_kernels",
    "changed_source",
    "commit_tree",
    "file_hashes",
    "rename_kernels",
    "source_fingerprint",
]


_PACKAGES = ("attncheck", "torch", "triton", "numpy")
_MOST_FILES = 2000
_LARGEST = 2**28  # bytes of one that is read
_FILES = "files"  # of a description's facts


def source_fingerprint(kernels: Sequence[str], written: Iterable[str] = ()) -> str:
    """Return 16 hexadecimal digits of the kernels' files, their tables, and our versions.

    Of a kernel in a module nothing is known but its configured ``sources``: no kernel is imported.

    Args:
        kernels: As they are asked for.
        written: Folders that a run writes to: what lies in them is no source.
    """
    apart = [Path(folder).resolve() for folder in written]
    digest = hashlib.sha256()
    for package in _PACKAGES:
        digest.update(f"{package} {_version(package)}\n".encode())
    for kernel in kernels:
        digest.update(f"{kernel}\n".encode())
        for path in _files(kernel):
            if not any(path.resolve().is_relative_to(folder) for folder in apart):
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
    told: dict[str, Mapping[str, str]] = {}
    answered: dict[str, None] = {}
    for id_, done in before.results.items():
        unit = before.units.get(id_)
        if unit is None or unit.commit:  # what another commit's files are is not for us to keep
            continue
        answered[unit.kernel] = None
        if unit.kind == "describe":
            told[unit.kernel] = _told(done.facts)
    for hashes in told.values():
        for name, known in hashes.items():
            if not _is_over(Path(name)) and _hash(Path(name)) != known:
                return f"{name} has changed"
    unknown = (k for k in answered if not told.get(k) and not _is_told(k))
    return next((f"nobody can tell whether {kernel} has changed" for kernel in unknown), "")


def _told(facts: Mapping[str, Any]) -> Mapping[str, str]:
    hashes = facts.get(_FILES)
    return hashes if isinstance(hashes, dict) else {}


def _is_over(path: Path) -> bool:
    """Return whether it was a process's own, as torch.distributed writes a module for each."""
    return path.is_relative_to(tempfile.gettempdir()) and not os.path.lexists(path)


def _is_told(kernel: str) -> bool:
    """Return whether the fingerprint covers a kernel without files: ours are as our version is."""
    table = read_configuration().kernels.get(kernel)
    return kernel in named_kernels.BUILTIN or (table is not None and bool(table.sources))


def _hash(path: Path) -> str:
    """Return hexadecimal digits; empty for what is no file that can be read."""
    try:
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
    if colons:
        yield Path(file) if table is None else project.folder / file
    if table is None or project.path is None:
        return
    yield project.path
    for pattern in table.sources:
        yield from islice(pattern_files(project.folder, pattern), _MOST_FILES)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


_SECONDS = 120


def changed_kernels(kernels: Sequence[str], ref: str) -> tuple[str, ...]:
    """Return the kernels whose ``sources`` or entry file differ from the commit ``ref``.

    What is not committed, and what git does not know yet, counts too. A kernel that says nothing
    of its sources is always one of them: nobody knows what it is made of.

    Raises:
        UsageError: outside of a repository, or for a commit that there is not.
    """
    files = frozenset(_files_of_changed(ref))
    return tuple(kernel for kernel in kernels if _is_among(kernel, files))


def _is_among(kernel: str, files: Collection[Path]) -> bool:
    project = read_configuration()
    table = project.kernels.get(kernel)
    if table is None or not table.sources:
        return True
    folder = project.folder.resolve()
    inside = [f.relative_to(folder).as_posix() for f in files if f.is_relative_to(folder)]
    own = project.path is not None and project.path.name in inside  # its table may be another
    named = (
        path for reference in (table.entry, table.backward) for path in _named(reference, folder)
    )
    return (
        own
        or any(path in files or path.resolve() in files for path in named)
        or any(matches_pattern(file, pattern) for file in inside for pattern in table.sources)
    )


def _named(said: object, folder: Path) -> Iterator[Path]:
    """Return where the file of ``FILE.py::NAME`` or of ``package.module:NAME`` may be."""
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


def _files_of_changed(ref: str) -> list[Path]:
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
    errors = [line for line in done.stderr.splitlines() if line.strip()]
    reason = one_line(errors[0]) if errors else f"git ended with {done.returncode}"
    raise UsageError(f"--changed-since: {reason.rstrip('.')}.")


_GIT_SECONDS = 300  # that git may take to write the files of a large repository
# Of a hook that starts us: they would turn our commands on its own index.
_OF_A_HOOK = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_OBJECT_DIRECTORY")
# Nothing is fetched, nothing is asked for, and no program of the repository's is run.
_QUIET = {
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_LFS_SKIP_SMUDGE": "1",
    "GIT_OPTIONAL_LOCKS": "0",
    "LC_ALL": "C",
}
_SAFE = ("-c", "core.hooksPath=/dev/null", "-c", "protocol.allow=never")
_OURS = "attncheck"


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherKernel:
    """A kernel in the tree of another commit.

    Attributes:
        kernel: What it is called there: as here, but for a file that was named by its whole path.
        folder: The working directory that relates to the tree as ours does to the repository.
        paths: What is to stand first where Python looks for modules, in this order: without them a
            package that is installed from here in place would be found here.
        missing: Why the kernel cannot be there, in one line; empty where nothing speaks against it.
    """

    kernel: str
    folder: str
    paths: tuple[str, ...]
    missing: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitTree:
    """The files of a commit.

    Attributes:
        ref: What somebody typed.
        commit: Forty hexadecimal digits.
        repository: The folder that it is of.
        root: Where its files lie.
        here: The working directory, relative to the repository.
    """

    ref: str
    commit: str
    repository: Path
    root: Path
    here: Path

    def spelled(self) -> str:
        """Return it as text, for another process; ``read`` reads it."""
        return json.dumps({name: str(getattr(self, name)) for name in self.__slots__})

    @classmethod
    def read(cls, text: str) -> Self:
        """Return the tree that ``spelled`` said."""
        fields = json.loads(text)
        return cls(
            ref=fields["ref"],
            commit=fields["commit"],
            repository=Path(fields["repository"]),
            root=Path(fields["root"]),
            here=Path(fields["here"]),
        )

    def kernel(self, kernel: str) -> OtherKernel:
        """Return what ``kernel`` is in this tree.

        Args:
            kernel: ``file.py::name``, ``package.module:name``, or a name of the project's own
                configuration, which is then read as it was at that commit.

        Raises:
            UsageError: for a kernel of attncheck's, and for a file outside of the repository: they
                are no part of the commit.
        """
        from attncheck.capabilities.named_kernels import BUILTIN

        if kernel in BUILTIN:
            raise UsageError(
                f"kernel {kernel!r} is attncheck's own: --against compares kernels of a repository."
            )
        folder = self.root / self.here
        missing = "" if folder.is_dir() else f"{self.ref} has no folder {self.here}"
        file, colons, name = kernel.partition("::")
        if colons:
            path = self._file(file, kernel)
            inside = self.root / path
            missing = "" if inside.is_file() else f"{self.ref} has no file {path.as_posix()}"
            file = str(inside) if Path(file).is_absolute() else file
        folder = folder if folder.is_dir() else self.root
        return OtherKernel(
            kernel=f"{file}{colons}{name}",
            folder=str(folder),
            paths=self._paths(folder),
            missing=missing,
        )

    def strayed(self, files: Iterable[str]) -> str:
        """Return which of a kernel's ``files`` is not of this tree, and should be.

        Args:
            files: Of the modules that its process has loaded. What lies in neither (Python's own,
                installed packages) is nobody's fault.

        Returns:
            What is wrong, in one line; empty where nothing is.
        """
        root, repository = self.root.resolve(), self.repository.resolve()
        for file in files:
            path = Path(file).resolve()
            ours = _OURS in path.parts and (path.is_relative_to(Path(__file__).parents[1]))
            if not ours and path.is_relative_to(repository) and not path.is_relative_to(root):
                return (
                    f"{path} was loaded in place of {self.ref}'s: the package is installed so that "
                    "it is found there first"
                )
        return ""

    def _file(self, file: str, kernel: str) -> Path:
        """Return ``file`` relative to the repository."""
        path = (self.repository / self.here / file).resolve()
        if not path.is_relative_to(self.repository.resolve()):
            raise UsageError(
                f"kernel {kernel!r}: the file lies outside of the repository "
                f"{one_line(str(self.repository))}: --against has no other of it."
            )
        return path.relative_to(self.repository.resolve())

    def _paths(self, folder: Path) -> tuple[str, ...]:
        """Return where packages begin here: as for ``python -m``, at ``src`` layouts, at the root.

        A folder that has an attncheck is left out: the process that calls the kernel runs ours.
        """
        places = dict.fromkeys((folder, folder / "src", self.root / "src", self.root))
        able = (one for one in places if one.is_dir() and not (one / _OURS).is_dir())
        return tuple(map(str, able))


@contextmanager
def commit_tree(ref: str, start: Path | None = None) -> Iterator[CommitTree]:
    """Check out the commit ``ref`` into a folder of its own until the end of the block.

    A worktree of the repository that ``start`` lies in, detached and outside of it. It is removed
    at the end, also after an interrupt. Nothing is fetched; no hook of the repository's is run;
    submodules and files of LFS are not there.

    Args:
        ref: A branch, a tag or a commit.
        start: A folder (default: the working directory).

    Raises:
        UsageError: where there is no git, no repository or no such commit; in one line.
    """
    start = (start or Path.cwd()).resolve()
    repository = Path(_run_git(start, "rev-parse", "--show-toplevel"))
    commit = _commit(repository, ref)
    temporary = Path(tempfile.mkdtemp(prefix="attncheck-against-"))
    root = temporary / "tree"
    try:
        _run_git(repository, "worktree", "add", "--detach", "--quiet", str(root), commit)
        yield CommitTree(
            ref=ref,
            commit=commit,
            repository=repository,
            root=root,
            here=start.relative_to(repository.resolve()),
        )
    finally:
        _remove(repository, root)
        shutil.rmtree(temporary, ignore_errors=True)


def rename_kernels(answers: Iterable[Answer], names: Mapping[str, str]) -> tuple[Answer, ...]:
    """Return ``answers`` of a tree's kernels under the names of those that are here.

    Args:
        answers: Of that side.
        names: The name of a kernel there → here; others keep theirs.
    """
    return tuple(
        replace(a, record=replace(a.record, kernel=names.get(a.record.kernel, a.record.kernel)))
        for a in answers
    )


def _commit(repository: Path, ref: str) -> str:
    if ref.startswith("-") or not ref.strip():
        raise UsageError(f"--against {ref!r} is no commit, branch or tag.")
    try:
        return _run_git(repository, "rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}")
    except UsageError:
        shallow = _run_git(repository, "rev-parse", "--is-shallow-repository") == "true"
        hint = " (the clone is shallow: fetch it first)" if shallow else ""
        raise UsageError(
            f"--against {one_line(ref)!r}: the repository has no such commit, branch or tag{hint}."
        ) from None


def _remove(repository: Path, root: Path) -> None:
    """Remove the worktree and what the repository remembers of it, whatever happens."""
    with suppress(UsageError):  # git is gone, or the folder is
        _run_git(repository, "worktree", "remove", "--force", "--force", str(root))
    if root.exists():
        shutil.rmtree(root, ignore_errors=True)
        with suppress(UsageError):
            _run_git(repository, "worktree", "prune")


def _run_git(folder: Path, *arguments: str) -> str:
    """Return what git prints; raises UsageError, in one line, where it fails."""
    environment = {k: v for k, v in os.environ.items() if k not in _OF_A_HOOK} | _QUIET
    what = f"git {arguments[0]}"
    try:
        done = subprocess.run(  # noqa: S603  # of our own making, and no shell
            ["git", *_SAFE, "-C", str(folder), *arguments],  # noqa: S607  # whichever git is here
            capture_output=True,
            check=False,
            encoding="utf-8",
            env=environment,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=_GIT_SECONDS,
        )
    except FileNotFoundError:
        raise UsageError("--against needs git, which is not here: install it.") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"--against: {what}: {one_line(str(error))}.") from None
    if done.returncode == 0:
        return done.stdout.strip()
    errors = [line for line in done.stderr.splitlines() if line.strip()]
    reason = one_line(errors[-1]) if errors else f"exit code {done.returncode}"
    raise UsageError(f"--against: {what}: {reason.rstrip('.')}.")

"""The kernels of another commit, for ``attncheck gate --against REF``.

How a gate uses it::

    with commit_tree("main") as tree:  # a worktree outside of the repository
        Unit(kernel="kernels/mine.py::fwd", commit=tree.commit, …)
        side = tree.kernel("kernels/mine.py::fwd")  # there; ``missing`` says why it is not
        IsolatedKernel(side.kernel, folder=side.folder, paths=side.paths)
        tree.strayed(host.files())  # where its process says that it was loaded from
    compare_answers(before, after, environments)

A unit names the commit, and not the folder: the folder differs from run to run, and the id of a
unit must not. Whoever does a unit with a commit is told by its options where the tree lies.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from attncheck.core.errors import UsageError
from attncheck.core.sanitize_text import one_line
from attncheck.records.run_reports import Answer

_GIT_SECONDS = 300  # that git may take to write the files of a large repository
# Of a hook that starts us: they would turn our commands on its own index.
_HOOK_VARIABLES = (
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_INDEX_FILE",
    "GIT_PREFIX",
    "GIT_OBJECT_DIRECTORY",
)
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
_OPTION = "--against"


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherKernel:
    """A kernel in the tree of another commit."""

    kernel: str  # what it is called there: as here, but for a file that was named by its whole path
    folder: str  # the working directory that relates to the tree as ours does to the repository
    # What is to stand first where Python looks for modules, in this order: without them a package
    # that is installed from here in place would be found here.
    paths: tuple[str, ...]
    # Why the kernel cannot be there, in one line; empty where nothing speaks against it.
    missing: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitTree:
    """The files of a commit."""

    ref: str  # what somebody typed
    commit: str  # forty hexadecimal digits
    repository: Path  # the folder that it is of
    root: Path  # where its files lie
    here: Path  # the working directory, relative to the repository

    def kernel(self, kernel: str) -> OtherKernel:
        """Return what ``kernel`` is in this tree.

        Args:
            kernel: ``file.py::name``, ``package.module:name``, or a name of the project's own
                configuration, which is then read as it was at that commit.

        Raises:
            UsageError: for a kernel of attncheck's, and for a file outside of the repository: they
                are no part of the commit.
        """
        from attncheck.subjects.capabilities.named_kernels import BUILTIN

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
            # A relative name is right from the tree's folder; a whole path would lead back here.
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
            # Our own files ask both kernels: only the kernels' are to differ.
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
    repository = Path(run_git(_OPTION, start, "rev-parse", "--show-toplevel"))
    commit = _commit(repository, ref)
    # Outside of the repository, whose own tools would find every file twice.
    temporary = Path(tempfile.mkdtemp(prefix="attncheck-against-"))
    root = temporary / "tree"
    try:
        run_git(_OPTION, repository, "worktree", "add", "--detach", "--quiet", str(root), commit)
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
        return run_git(_OPTION, repository, "rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}")
    except UsageError:
        shallow = run_git(_OPTION, repository, "rev-parse", "--is-shallow-repository") == "true"
        hint = " (the clone is shallow: fetch it first)" if shallow else ""
        raise UsageError(
            f"--against {one_line(ref)!r}: the repository has no such commit, branch or tag{hint}."
        ) from None


def _remove(repository: Path, root: Path) -> None:
    """Remove the worktree and what the repository remembers of it, whatever happens."""
    with suppress(UsageError):  # git is gone, or the folder is
        # git asks for the second --force where a worktree is locked.
        run_git(_OPTION, repository, "worktree", "remove", "--force", "--force", str(root))
    if root.exists():
        shutil.rmtree(root, ignore_errors=True)
        with suppress(UsageError):
            run_git(_OPTION, repository, "worktree", "prune")


def run_git(option: str, folder: Path, *arguments: str) -> str:
    """Return what git prints, without its last line end.

    Args:
        option: Of the command line that needs it, for messages.
        folder: Where git runs.

    Raises:
        UsageError: in one line, where git fails.
    """
    environment = {k: v for k, v in os.environ.items() if k not in _HOOK_VARIABLES} | _QUIET
    what = f"{option}: git {arguments[0]}"
    try:
        done = subprocess.run(  # noqa: S603  # of our own making, and no shell
            ["git", *_SAFE, "-C", str(folder), *arguments],  # noqa: S607  # whichever git is here
            capture_output=True,
            check=False,
            encoding="utf-8",
            env=environment,
            errors="surrogateescape",  # as Python names files
            stdin=subprocess.DEVNULL,
            timeout=_GIT_SECONDS,
        )
    except FileNotFoundError:
        raise UsageError(f"{option} needs git, which is not here: install it.") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{what}: {one_line(str(error))}.") from None
    if done.returncode == 0:
        return done.stdout.removesuffix("\n")
    # git prints hints and warnings before the error itself, and how it is used after it.
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("fatal:", "error:"))] or lines
    reason = one_line(errors[-1]) if errors else f"exit code {done.returncode}"
    raise UsageError(f"{what}: {reason.rstrip('.')}.")

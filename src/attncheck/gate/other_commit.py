"""The kernels of another commit, for ``attncheck gate --against REF``.

How a gate uses it::

    with commit_tree("main") as tree:  # a worktree outside of the repository
        Unit(kernel="kernels/mine.py::fwd", commit=tree.commit, …)
        side = tree.kernel("kernels/mine.py::fwd")  # ``missing`` says why it does not exist
        IsolatedKernel(side.kernel, folder=side.folder, paths=side.paths)
        tree.strayed(host.files())  # checks which files its process has loaded
    compare_answers(before, after, environments)

A unit contains the commit instead of the folder of its files, which differs from run to run, unlike
the id of the unit. The options of a worker contain the folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from attncheck.core.errors import UsageError
from attncheck.core.sanitize_text import one_line

_GIT_SECONDS = 300  # Time limit of git, which may write the files of a large repository.
# Variables that git sets for a hook, which would redirect our commands to the hook's index.
_HOOK_VARIABLES = (
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_INDEX_FILE",
    "GIT_PREFIX",
    "GIT_OBJECT_DIRECTORY",
)
# Git must not fetch, prompt, or run programs of the repository.
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

    kernel: str  # Its name; unlike here only if it has an absolute path.
    folder: str  # The folder in the tree that corresponds to our working directory.
    # Beginning of the module search path, without which an editable install would be found first.
    paths: tuple[str, ...]
    # Why the kernel cannot exist there, in one line; empty if it may exist.
    missing: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitTree:
    """The files of a commit."""

    ref: str  # Name of the commit as typed by the user.
    commit: str  # Forty hexadecimal digits.
    repository: Path  # Folder of the repository.
    root: Path  # Folder of the commit's files.
    here: Path  # The working directory relative to the repository.

    def kernel(self, kernel: str) -> OtherKernel:
        """Return the kernel of this name in this tree.

        Args:
            kernel: ``file.py::name``, ``package.module:name``, or a name in the project's
                configuration, which is read as of that commit.

        Raises:
            UsageError: for a built-in kernel or a file outside of the repository, which are not
                part of the commit.
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
            # A relative name is valid in the tree; an absolute path would lead back here.
            file = str(inside) if Path(file).is_absolute() else file
        folder = folder if folder.is_dir() else self.root
        return OtherKernel(
            kernel=f"{file}{colons}{name}",
            folder=str(folder),
            paths=self._paths(folder),
            missing=missing,
        )

    def strayed(self, files: Iterable[str]) -> str:
        """Return an error if a kernel has loaded a file of the working tree instead of this tree.

        Args:
            files: Files of the modules that its process has loaded. Those outside of both trees,
                such as installed packages, are ignored.

        Returns:
            The error, in one line; empty for none.
        """
        root, repository = self.root.resolve(), self.repository.resolve()
        for file in files:
            path = Path(file).resolve()
            # Both processes run this attncheck: only the kernels' files must differ.
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
        """Return the folders to search for packages: ``folder``, the root, and their ``src``.

        A folder with an attncheck is left out, since the kernel's process must run this one.
        """
        candidates = dict.fromkeys((folder, folder / "src", self.root / "src", self.root))
        usable = (one for one in candidates if one.is_dir() and not (one / _OURS).is_dir())
        return tuple(map(str, usable))


@contextmanager
def commit_tree(ref: str, start: Path | None = None) -> Iterator[CommitTree]:
    """Check out the commit ``ref`` into a temporary folder for the duration of the context.

    The folder is a detached worktree, outside of the repository, which is removed at the end, also
    after an interrupt. Nothing is fetched and no hooks are run; submodules and LFS files are
    missing.

    Args:
        ref: A branch, a tag or a commit.
        start: A folder in the repository (default: the working directory).

    Raises:
        UsageError: in one line, if there is no git, no repository or no such commit.
    """
    start = (start or Path.cwd()).resolve()
    repository = Path(run_git(_OPTION, start, "rev-parse", "--show-toplevel"))
    commit = _commit(repository, ref)
    # Outside of the repository, whose tools would otherwise find every file twice.
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
    """Remove the worktree and its registration in the repository, ignoring errors."""
    with suppress(UsageError):  # git or the folder is missing
        # git asks for the second --force where a worktree is locked.
        run_git(_OPTION, repository, "worktree", "remove", "--force", "--force", str(root))
    if root.exists():
        shutil.rmtree(root, ignore_errors=True)
        with suppress(UsageError):
            run_git(_OPTION, repository, "worktree", "prune")


def run_git(option: str, folder: Path, *arguments: str) -> str:
    """Run git and return its output without the last line end.

    Args:
        option: The command-line option that needs git, for messages.
        folder: Working directory of git.

    Raises:
        UsageError: in one line, if git fails.
    """
    environment = {k: v for k, v in os.environ.items() if k not in _HOOK_VARIABLES} | _QUIET
    what = f"{option}: git {arguments[0]}"
    try:
        process = subprocess.run(  # noqa: S603  # our own arguments, without a shell
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
    if process.returncode == 0:
        return process.stdout.removesuffix("\n")
    # git may print hints before the error, and a usage message after it.
    lines = [line for line in process.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("fatal:", "error:"))] or lines
    reason = one_line(errors[-1]) if errors else f"exit code {process.returncode}"
    raise UsageError(f"{what}: {reason.rstrip('.')}.")

"""The checked-out tree of another commit: its files, the kernels in it, and its removal."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.gate.gate_driver import git

from attncheck.core.errors import UsageError
from attncheck.gate import other_commit
from attncheck.gate.other_commit import commit_tree
from attncheck.workers.units import Unit


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Two commits of a file and a package in a src layout, with a different number in each."""
    temporary, root = tmp_path / "temporary", tmp_path / "repository"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    package = root / "src" / "mypackage"
    package.mkdir(parents=True)
    (root / "kernels").mkdir()
    git(root.parent, "init", "--quiet", "--initial-branch=main", str(root))
    for number in (1, 2):
        (root / "kernels" / "mine.py").write_text(f"NUMBER = {number}\n")
        (package / "__init__.py").write_text(f"NUMBER = {number}\n")
        git(root, "add", ".")
        git(root, "commit", "--quiet", "-m", f"Number {number}")
    monkeypatch.chdir(root)
    yield root
    assert not list(temporary.iterdir())
    assert git(root, "worktree", "list").count("\n") == 1
    assert git(root, "status", "--porcelain") == ""


def test_tree_has_the_files_of_the_commit(repository):
    with commit_tree("HEAD~1") as tree:
        assert tree.commit == git(repository, "rev-parse", "HEAD~1").strip()
        assert not tree.root.is_relative_to(repository)
        side = tree.kernel("kernels/mine.py::fwd")
        assert side.kernel == "kernels/mine.py::fwd"
        assert side.missing == ""
        text = (Path(side.folder) / "kernels" / "mine.py").read_text()
        assert text == "NUMBER = 1\n"
        assert "2" in (repository / "kernels" / "mine.py").read_text()
        Unit(kind="ask", stage="baseline", kernel=side.kernel, commit=tree.commit, device="cpu")


def test_kernel_paths_are_relative_to_the_working_directory(repository, monkeypatch):
    monkeypatch.chdir(repository / "kernels")
    with commit_tree("HEAD~1") as tree:
        side = tree.kernel("mine.py::fwd")
        assert side.kernel == "mine.py::fwd"
        assert (Path(side.folder) / "mine.py").read_text() == "NUMBER = 1\n"
        whole = tree.kernel(f"{repository / 'kernels' / 'mine.py'}::fwd")
        assert Path(whole.kernel.partition("::")[0]).read_text() == "NUMBER = 1\n"


def test_tree_precedes_the_installed_package_on_the_path(repository):
    """Otherwise a package installed in place would be imported from the repository."""
    with commit_tree("HEAD~1") as tree:
        side = tree.kernel("mypackage:fwd")
        paths = os.pathsep.join((*side.paths, str(repository / "src")))
        code = "import mypackage; print(mypackage.NUMBER, mypackage.__file__)"

        def import_package(path: str) -> tuple[str, str]:
            done = subprocess.run(
                [sys.executable, "-B", "-c", code],  # -B: nothing is left in the tree
                cwd=side.folder,
                env=os.environ | {"PYTHONPATH": path},
                check=True,
                capture_output=True,
                text=True,
            )
            number, file = done.stdout.split()
            return number, file

        number, file = import_package(paths)
        assert number == "1"
        assert tree.strayed([file, os.__file__]) == ""
        number, file = import_package(
            str(repository / "src")
        )  # without the tree's paths, the repository's
        assert number == "2"
        assert "was loaded in place of HEAD~1's" in tree.strayed([os.__file__, file])


def test_attncheck_in_the_tree_does_not_shadow_the_running_one(repository):
    (repository / "src" / "attncheck").mkdir()
    (repository / "src" / "attncheck" / "__init__.py").write_text("")
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "-m", "An attncheck package")
    with commit_tree("HEAD") as tree:
        assert all(not path.endswith("src") for path in tree.kernel("mypackage:fwd").paths)


def test_kernel_file_absent_from_the_commit_is_reported_missing(repository):
    (repository / "kernels" / "new.py").write_text("")
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "-m", "New")
    with commit_tree("HEAD~1") as tree:
        assert tree.kernel("kernels/new.py::fwd").missing == "HEAD~1 has no file kernels/new.py"


@pytest.mark.parametrize("ref", ["nowhere", "--upload-pack=x", "", "HEAD~99", "\x1b[31mred"])
def test_commit_tree_rejects_unknown_refs_in_one_printable_line(repository, ref):
    with pytest.raises(UsageError) as error, commit_tree(ref):
        pass
    assert "\n" not in str(error.value)
    assert "\x1b" not in str(error.value)
    assert "--against" in str(error.value)


def test_kernel_outside_the_repository_is_rejected(repository):
    with commit_tree("HEAD") as tree:
        with pytest.raises(UsageError, match="attncheck's own"):
            tree.kernel("ideal")
        with pytest.raises(UsageError, match="lies outside of the repository"):
            tree.kernel("/elsewhere/mine.py::fwd")


def test_commit_tree_needs_git_and_a_repository(repository, tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    with pytest.raises(UsageError, match="not a git repository"), commit_tree("HEAD", tmp_path):
        pass
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "")
        with pytest.raises(UsageError, match="needs git, which is not here"), commit_tree("HEAD"):
            pass


def test_interrupt_removes_the_tree(repository):
    with pytest.raises(KeyboardInterrupt), commit_tree("HEAD") as tree:  # noqa: PT012  # the body must raise
        (tree.root / "written").write_text("by a kernel")
        raise KeyboardInterrupt


def test_tree_is_removed_when_git_worktree_remove_fails(repository, monkeypatch):
    run_git = other_commit.run_git

    def failing_remove(option: str, folder: Path, *words: str) -> str:
        if words[:2] == ("worktree", "remove"):
            raise UsageError("no")
        return run_git(option, folder, *words)

    monkeypatch.setattr(other_commit, "run_git", failing_remove)
    with commit_tree("HEAD"):
        pass


def test_commit_tree_ignores_hooks_and_git_variables_of_a_running_hook(repository, monkeypatch):
    hook = repository / ".git" / "hooks" / "post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\ntouch ran\n")
    hook.chmod(0o755)
    monkeypatch.setenv("GIT_INDEX_FILE", str(repository / ".git" / "index"))
    monkeypatch.setenv("GIT_DIR", str(repository / ".git"))
    with commit_tree("HEAD~1") as tree:
        assert not (tree.root / "ran").exists()
    monkeypatch.delenv("GIT_INDEX_FILE")
    monkeypatch.delenv("GIT_DIR")

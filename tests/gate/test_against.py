"""The tree of another commit: what lies in it, what is found there, and that nothing is left."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.gate.driven import git

from attncheck.core.errors import UsageError
from attncheck.gate import other_commit
from attncheck.gate.other_commit import commit_tree
from attncheck.workers.units import Unit


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Two commits: a file, and a package in a src layout, with another number in each."""
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


def test_the_files_are_those_of_the_commit(repository):
    with commit_tree("HEAD~1") as there:
        assert there.commit == git(repository, "rev-parse", "HEAD~1").strip()
        assert not there.root.is_relative_to(repository)
        side = there.kernel("kernels/mine.py::fwd")
        assert side.kernel == "kernels/mine.py::fwd"
        assert side.missing == ""
        text = (Path(side.folder) / "kernels" / "mine.py").read_text()
        assert text == "NUMBER = 1\n"
        assert "2" in (repository / "kernels" / "mine.py").read_text()
        Unit(kind="ask", stage="baseline", kernel=side.kernel, commit=there.commit, device="cpu")


def test_from_a_folder_within(repository, monkeypatch):
    monkeypatch.chdir(repository / "kernels")
    with commit_tree("HEAD~1") as there:
        side = there.kernel("mine.py::fwd")
        assert side.kernel == "mine.py::fwd"
        assert (Path(side.folder) / "mine.py").read_text() == "NUMBER = 1\n"
        whole = there.kernel(f"{repository / 'kernels' / 'mine.py'}::fwd")
        assert Path(whole.kernel.partition("::")[0]).read_text() == "NUMBER = 1\n"


def test_a_package_installed_in_place_is_found_in_the_tree(repository):
    """Its paths stand before those that lead to the repository."""
    with commit_tree("HEAD~1") as there:
        side = there.kernel("mypackage:fwd")
        paths = os.pathsep.join((*side.paths, str(repository / "src")))
        code = "import mypackage; print(mypackage.NUMBER, mypackage.__file__)"

        def loaded(where: str) -> tuple[str, str]:
            done = subprocess.run(
                [sys.executable, "-B", "-c", code],  # -B: nothing is left in the tree
                cwd=side.folder,
                env=os.environ | {"PYTHONPATH": where},
                check=True,
                capture_output=True,
                text=True,
            )
            number, file = done.stdout.split()
            return number, file

        number, file = loaded(paths)
        assert number == "1"
        assert there.strayed([file, os.__file__]) == ""
        number, file = loaded(str(repository / "src"))  # without them it is the other
        assert number == "2"
        assert "was loaded in place of HEAD~1's" in there.strayed([os.__file__, file])


def test_a_tree_that_has_an_attncheck_does_not_replace_ours(repository):
    (repository / "src" / "attncheck").mkdir()
    (repository / "src" / "attncheck" / "__init__.py").write_text("")
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "-m", "One of its own")
    with commit_tree("HEAD") as there:
        assert all(not path.endswith("src") for path in there.kernel("mypackage:fwd").paths)


def test_a_kernel_that_was_not_there_yet_is_missing(repository):
    (repository / "kernels" / "new.py").write_text("")
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "-m", "New")
    with commit_tree("HEAD~1") as there:
        assert there.kernel("kernels/new.py::fwd").missing == "HEAD~1 has no file kernels/new.py"


@pytest.mark.parametrize("ref", ["nowhere", "--upload-pack=x", "", "HEAD~99", "main\n"])
def test_no_such_commit(repository, ref):
    if ref == "main\n":
        ref = "\x1b[31mred"
    with pytest.raises(UsageError) as error, commit_tree(ref):
        pass
    assert "\n" not in str(error.value)
    assert "\x1b" not in str(error.value)
    assert "--against" in str(error.value)


def test_a_kernel_that_is_no_part_of_the_commit(repository):
    with commit_tree("HEAD") as there:
        with pytest.raises(UsageError, match="attncheck's own"):
            there.kernel("ideal")
        with pytest.raises(UsageError, match="lies outside of the repository"):
            there.kernel("/elsewhere/mine.py::fwd")


def test_no_git_and_no_repository(repository, tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    with pytest.raises(UsageError, match="not a git repository"), commit_tree("HEAD", tmp_path):
        pass
    with monkeypatch.context() as without:
        without.setenv("PATH", "")
        with pytest.raises(UsageError, match="needs git, which is not here"), commit_tree("HEAD"):
            pass


def test_an_interrupt_leaves_nothing(repository):
    with pytest.raises(KeyboardInterrupt), commit_tree("HEAD") as there:  # noqa: PT012  # it is what ends it
        (there.root / "written").write_text("by a kernel")
        raise KeyboardInterrupt


def test_a_git_that_cannot_remove_it_leaves_nothing_either(repository, monkeypatch):
    right = other_commit.run_git

    def broken(option: str, folder: Path, *words: str) -> str:
        if words[:2] == ("worktree", "remove"):
            raise UsageError("no")
        return right(option, folder, *words)

    monkeypatch.setattr(other_commit, "run_git", broken)
    with commit_tree("HEAD"):
        pass


def test_within_a_hook_and_with_hooks_of_its_own(repository, monkeypatch):
    hook = repository / ".git" / "hooks" / "post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\ntouch ran\n")
    hook.chmod(0o755)
    monkeypatch.setenv("GIT_INDEX_FILE", str(repository / ".git" / "index"))
    monkeypatch.setenv("GIT_DIR", str(repository / ".git"))
    with commit_tree("HEAD~1") as there:
        assert not (there.root / "ran").exists()
    monkeypatch.delenv("GIT_INDEX_FILE")
    monkeypatch.delenv("GIT_DIR")

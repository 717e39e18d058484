"""Which kernels a change is about."""

import pytest
from tests.gate.driven import git

from attncheck.core.errors import UsageError
from attncheck.gate.sources import changed_kernels
from attncheck.subjects.capabilities.capability_table import matches_pattern

TABLE = """
[kernels.one]
entry = "one.py::kernel"
sources = ["csrc/**/*.cu"]
[kernels.two]
entry = "two.py::kernel"
sources = ["two.py"]
[kernels.silent]
entry = "three.py::kernel"
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "attncheck.toml").write_text(TABLE)
    (tmp_path / "csrc" / "deep").mkdir(parents=True)
    (tmp_path / "csrc" / "deep" / "a.cu").write_text("1")
    for name in ("one", "two", "three"):
        (tmp_path / f"{name}.py").write_text("")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "all")
    monkeypatch.chdir(tmp_path)
    return tmp_path


KERNELS = ("one", "two", "silent")


def test_only_who_says_nothing_of_its_sources_where_nothing_changed(project):
    assert changed_kernels(KERNELS, "HEAD") == ("silent",)


def test_a_source_an_entry_and_a_new_file_count(project):
    (project / "csrc" / "deep" / "a.cu").write_text("2")
    assert changed_kernels(KERNELS, "HEAD") == ("one", "silent")
    git(project, "checkout", "-q", "csrc")
    (project / "one.py").write_text("2")
    assert changed_kernels(KERNELS, "HEAD") == ("one", "silent")
    git(project, "checkout", "-q", "one.py")
    (project / "csrc" / "new.cu").write_text("2")
    assert changed_kernels(KERNELS, "HEAD") == ("one", "silent")


def test_a_source_that_was_renamed_counts_at_both_names(project):
    git(project, "mv", "csrc/deep/a.cu", "a.cu")
    assert changed_kernels(KERNELS, "HEAD") == ("one", "silent")


def test_names_with_spaces_and_lines_and_a_folder_of_the_repository(project, monkeypatch):
    git(project, "config", "diff.relative", "true")
    (project / "csrc" / "deep" / "a.cu").write_text("2")
    (project / "two.py").unlink()
    (project / "below").mkdir()
    monkeypatch.chdir(project / "below")
    assert changed_kernels(KERNELS, "HEAD") == KERNELS
    git(project, "checkout", "-q", ".")
    (project / "csrc" / "new file\nof two lines.cu").write_text("")
    assert changed_kernels(KERNELS, "HEAD") == ("one", "silent")


@pytest.mark.parametrize(
    "file", ["pkg/attn.py", "pkg/attn/__init__.py", "src/pkg/attn.py", "src/pkg/attn/__init__.py"]
)
def test_the_file_of_a_module_counts(project, file):
    table = '[kernels.mine]\nentry = "pkg.attn:f"\nsources = ["csrc"]\n'
    (project / "attncheck.toml").write_text(table)
    git(project, "commit", "-qam", "another")
    assert changed_kernels(("mine",), "HEAD") == ()
    (project / file).parent.mkdir(parents=True)
    (project / file).write_text("")
    assert changed_kernels(("mine",), "HEAD") == ("mine",)


def test_another_table_is_another_kernel(project):
    (project / "attncheck.toml").write_text(TABLE + "\n")
    assert changed_kernels(KERNELS, "HEAD") == KERNELS


@pytest.mark.parametrize("ref", ["nowhere", "--output=/tmp/x", ""])
def test_what_is_no_commit_is_said(project, ref):
    with pytest.raises(UsageError, match="--changed-since"):
        changed_kernels(KERNELS, ref)


@pytest.mark.parametrize(
    ("file", "pattern", "same"),
    [
        ("csrc/a.cu", "csrc/**", True),
        ("csrc/b/a.cu", "csrc/**/*.cu", True),
        ("csrc/a.cu", "csrc/**/*.cu", True),
        ("csrc/a.cu", "csrc", True),
        ("csrc/a.cu", "./csrc/a.cu", True),
        ("csrc2/a.cu", "csrc", False),
        ("other/a.cu", "csrc/**", False),
        ("other/a.cu", ".", True),
        ("other/a.cu", "./", True),
        ("other/a\nb.cu", "other/*.cu", True),
        ("other/a.cu", "", False),
    ],
)
def test_patterns(file, pattern, same):
    assert matches_pattern(file, pattern) is same

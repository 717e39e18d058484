"""``--changed-since``: which kernels a change of files concerns."""

import pytest
from tests.gate.gate_driver import git

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


def test_without_changes_only_kernels_without_declared_sources_count(project):
    assert changed_kernels(KERNELS, "HEAD") == ("silent",)


def test_changed_source_changed_entry_and_new_file_count(project):
    (project / "csrc" / "deep" / "a.cu").write_text("2")
    assert changed_kernels(KERNELS, "HEAD") == ("one", "silent")
    git(project, "checkout", "-q", "csrc")
    (project / "one.py").write_text("2")
    assert changed_kernels(KERNELS, "HEAD") == ("one", "silent")
    git(project, "checkout", "-q", "one.py")
    (project / "csrc" / "new.cu").write_text("2")
    assert changed_kernels(KERNELS, "HEAD") == ("one", "silent")


def test_renamed_source_counts_under_its_old_name(project):
    git(project, "mv", "csrc/deep/a.cu", "a.cu")
    assert changed_kernels(KERNELS, "HEAD") == ("one", "silent")


def test_changes_are_found_from_a_subfolder_and_with_odd_file_names(project, monkeypatch):
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
def test_file_of_a_kernels_module_counts(project, file):
    table = '[kernels.mine]\nentry = "pkg.attn:f"\nsources = ["csrc"]\n'
    (project / "attncheck.toml").write_text(table)
    git(project, "commit", "-qam", "another")
    assert changed_kernels(("mine",), "HEAD") == ()
    (project / file).parent.mkdir(parents=True)
    (project / file).write_text("")
    assert changed_kernels(("mine",), "HEAD") == ("mine",)


def test_changed_capability_table_counts_for_every_kernel(project):
    (project / "attncheck.toml").write_text(TABLE + "\n")
    assert changed_kernels(KERNELS, "HEAD") == KERNELS


@pytest.mark.parametrize("ref", ["nowhere", "--output=/tmp/x", ""])
def test_changed_kernels_rejects_unknown_commits(project, ref):
    with pytest.raises(UsageError, match="--changed-since"):
        changed_kernels(KERNELS, ref)


@pytest.mark.parametrize(
    ("file", "pattern", "matches"),
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
def test_source_patterns_match_paths(file, pattern, matches):
    assert matches_pattern(file, pattern) is matches

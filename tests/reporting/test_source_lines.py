"""`locate` finds where a kernel is defined without importing its file."""

import pytest

from attncheck.reporting.ci_formats import Location, locate

SOURCE = """raise SystemExit("imported")


class Forward:
    def call(self):
        pass


def forward(q, k, v):
    return q


attention = forward
typed: object = forward
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "here" / "pkg").mkdir(parents=True)
    (tmp_path / "here" / "src" / "other").mkdir(parents=True)
    for name in ("here/myfa.py", "here/pkg/attn.py", "here/src/other/__init__.py", "outside.py"):
        (tmp_path / name).write_text(SOURCE)
    (tmp_path / "here" / "broken.py").write_text("def forward(:\n")
    (tmp_path / "here" / "deep.py").write_text("(" * 10_000)
    (tmp_path / "here" / "nul.py").write_bytes(b"\0def forward(): pass")
    (tmp_path / "here" / "forward.txt").write_text(SOURCE)
    return tmp_path / "here"


@pytest.mark.parametrize(
    ("kernel", "path", "line"),
    [
        ("myfa.py::forward", "myfa.py", 9),
        ("myfa.py::Forward", "myfa.py", 4),
        ("myfa.py::attention", "myfa.py", 13),
        ("myfa.py::typed", "myfa.py", 14),
        ("myfa.py::gone", "myfa.py", 1),
        ("./myfa.py::forward", "myfa.py", 9),
        ("pkg.attn:forward", "pkg/attn.py", 9),
        ("other:forward", "src/other/__init__.py", 9),
        ("broken.py::forward", "broken.py", 1),
        ("deep.py::forward", "deep.py", 1),
        ("nul.py::forward", "nul.py", 1),
    ],
)
def test_locate_finds_definition(folder, kernel, path, line):
    assert locate(kernel, folder) == Location(path, line)


@pytest.mark.parametrize(
    "kernel",
    [
        *("", "sdpa_flash", "gone.py::forward", "../outside.py::forward", "/etc/passwd::root"),
        *("forward.txt::forward", "pkg::forward", "a\0b.py::f", "x" * 5000 + ".py::f", "..:f"),
    ],
)
def test_locate_rejects_paths_outside_the_folder_and_non_sources(folder, kernel):
    assert locate(kernel, folder) == Location("")


def test_locate_rejects_symlink_leaving_the_folder(folder):
    (folder / "link.py").symlink_to(folder.parent / "outside.py")
    assert locate("link.py::forward", folder) == Location("")

from __future__ import annotations

import sys

import pytest

from attncheck.errors import UsageError
from attncheck.source_files import import_file, member


def test_a_file_is_a_module_that_classes_can_look_up(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("import dataclasses\n@dataclasses.dataclass\nclass Mine:\n    x: int = 3\n")
    module = import_file(path, "mod")
    assert module.Mine().x == 3
    assert sys.modules[module.__name__] is module
    assert member(f"{path}::Mine", "mod")().x == 3


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1\n\nraise ValueError('planted\\nmore')", "raised ValueError: planted at mine.py:3."),
        ("def f():\n    return 1 / 0\nf()", "ZeroDivisionError: division by zero at mine.py:2."),
        ("raise SystemExit", "raised SystemExit at mine.py:1."),
        ("def f(:", "SyntaxError: .*mine.py, line 1"),
    ],
)
def test_what_an_import_raises_is_one_line_with_its_place(tmp_path, text, says):
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(UsageError, match=f"^mod 'x': importing .*{says}") as error:
        import_file(path, "mod 'x'")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("asked", "says"),
    [("gone.py::x", "there is no file"), ("mine.txt::x", "is not a Python file")],
)
def test_a_file_that_cannot_be(tmp_path, asked, says):
    (tmp_path / "mine.txt").write_text("x = 1")
    with pytest.raises(UsageError, match=says):
        member(f"{tmp_path}/{asked}", "mod 'x'")


def test_a_name_that_is_not_there(tmp_path):
    (tmp_path / "mine.py").write_text("x = 1")
    with pytest.raises(UsageError, match=r"^mod 'y': .*mine\.py has no 'y'"):
        member(f"{tmp_path}/mine.py::y", "mod 'y'")

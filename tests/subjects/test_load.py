"""Subjects by name: attncheck's own, and those of files and modules."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.messages import one_line

from attncheck.core.errors import UnknownName, UsageError
from attncheck.subjects.capabilities import named_kernels
from attncheck.subjects.load import load_candidate, load_subject


def test_the_names_and_their_order():
    assert named_kernels.builtin_names() == (
        "triton-flash2",
        "triton-flash2-vt",
        "triton-flash2-fastacc",
        "triton-flash1",
        "triton-flash3",
        "triton-varlen",
        "triton-paged",
        "triton-decode",
        "ideal",
        "sdpa-math",
        "sdpa-flash",
        "sdpa-efficient",
        "sdpa-cudnn",
        "flex",
        "triton-softmax-naive",
        "triton-softmax-safe",
        "triton-softmax-online",
        "triton-softmax-blocked",
        "torch-softmax",
    )


@pytest.mark.parametrize("name", named_kernels.builtin_names())
def test_a_subject_knows_its_name(name):
    subject = named_kernels.subject_named(name)
    assert subject.name == name
    assert subject.summary == named_kernels.BUILTIN[name].summary
    assert "\n" not in subject.summary


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(UnknownName, match=r"kernel 'sdpa' is not known: choose from .*sdpa-math"):
        named_kernels.subject_named("sdpa")


def test_listing_them_imports_neither_torch_nor_triton():
    code = (
        "import sys; from attncheck.subjects.capabilities.named_kernels import builtin_names;"
        "builtin_names();"
        "sys.exit(bool({'torch', 'triton', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


PLANTED = Path(__file__).parents[1] / "properties" / "planted.py"
MINE = """
from attncheck.subjects.capabilities.subject import Subject
from attncheck.subjects.ideal import Ideal
class Mine(Ideal):
    {body}
"""
BARE = MINE.replace("(Ideal)", "(Subject)") + "    unsupported = prepare = None\n"


@pytest.mark.parametrize("name", ["Right", "right"])
def test_a_class_and_an_instance_of_a_file(name):
    assert load_subject(f"{PLANTED}::{name}").name == "planted-nothing"


def test_a_function_of_a_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MINE.format(body='name = "mine"') + "def make():\n    return Mine()\n")
    assert load_subject(f"{path}::make").name == "mine"


def test_a_file_imports_its_siblings(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("before", "later"):
        (tmp_path / f"planted_{name}.py").write_text("FACTOR = 2\n")
        monkeypatch.delitem(sys.modules, f"planted_{name}", raising=False)
    (tmp_path / "mine.py").write_text(
        "import planted_before\n"
        "def kernel(q, k, v):\n    import planted_later\n    return planted_later.FACTOR * q\n"
    )
    kernel = load_candidate(f"{tmp_path / 'mine.py'}::kernel").target
    assert callable(kernel)
    # Not found by ``import`` before: only as the file's own siblings.
    assert kernel(21, None, None) == 42
    assert sys.path[0] == str(tmp_path.resolve())


def test_siblings_of_one_name_are_each_kernels_own(tmp_path):
    for folder, factor in (("a", 2), ("b", 3)):
        package = tmp_path / folder / "inner"
        package.mkdir(parents=True)
        (tmp_path / folder / "beside.py").write_text(f"factor = {factor}")
        (package / "__init__.py").write_text(f"power = {factor}")
        text = "from beside import factor\nfrom inner import power\ndef kernel(q, k, v): ..."
        (tmp_path / folder / "mine.py").write_text(text)
    kernels = [load_subject(f"{tmp_path / each}/mine.py::kernel") for each in "ab"]
    names = ("factor", "power")
    found = [[each.function.__globals__[name] for name in names] for each in kernels]
    assert found == [[2, 2], [3, 3]]


@pytest.mark.parametrize("name", [".", "..", "kernels", "./kernels", "kernels/"])
def test_a_folder_is_no_kernel(name, tmp_path, monkeypatch):
    (tmp_path / "kernels").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"is a folder: name a function, FILE\.py::NAME"):
        load_subject(name)


def test_a_name_of_the_library():
    assert load_subject("ideal").name == "ideal"
    with pytest.raises(UnknownName, match="choose from"):
        load_subject("flash9")


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("x = 1", "y", "has no 'y'"),
        ("x = 1", "x", "is int, and must be a function of"),
        ("import no_such_module", "x", "ModuleNotFoundError: No module named"),
        ("def x(:", "x", "SyntaxError"),
        ("def x():\n    raise ValueError('no licence\\nat all')", "x", "ValueError: no licence"),
        ("def x():\n    return 3", "x", "is int, and must be a function of"),
        ("raise SystemExit(3)", "x", "importing .* raised SystemExit: 3"),
        (
            "import sys\ndef x():\n    sys.exit('no GPU')",
            "x",
            "making it raised SystemExit: no GPU",
        ),
        (BARE.format(body="pass"), "Mine", 'has no name: add name = "…" .* to Mine'),
        (BARE.format(body='name = " "'), "Mine", "has no name"),
        (BARE.format(body='name = "mine"'), "Mine", 'has no summary: add summary = "…" .* to Mine'),
        (BARE.format(body='name, summary = "mine", 3'), "Mine", "has no summary"),
        (MINE.format(body="pass"), "Mine", "is called 'ideal'.* give it a name of its own"),
    ],
)
def test_what_cannot_be_loaded_is_said_in_one_line(tmp_path, text, name, message):
    path = tmp_path / "mine.py"
    path.write_text(text)
    with one_line(UsageError, match=message):
        load_subject(f"{path}::{name}")


@pytest.mark.parametrize("kernel", ["nowhere.py::x", "::x"])
def test_a_file_that_is_not_there(kernel):
    with pytest.raises(UsageError, match="there is no file"):
        load_subject(kernel)


def test_an_interrupt_is_nobodys_fault(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        load_subject(f"{path}::x")


@pytest.mark.parametrize(
    ("kernel", "wanted"),
    [
        ("mine.py", r"write mine\.py::NAME\."),
        ("./folder/mine.py", r"write \./folder/mine\.py::NAME\."),
        ("./folder", r"write FILE\.py::NAME\."),
        ("package.module.fn", r"write package\.module:fn\."),
        ("mine.py:fn", r"a file takes two colons: mine\.py::fn\."),
        ("mine.py:", r"a file takes two colons: mine\.py::NAME\."),
    ],
)
def test_what_was_meant_is_said(kernel, wanted):
    with one_line(UsageError, match=wanted):
        load_subject(kernel)


def test_an_unknown_name_is_said_before_its_convention():
    with pytest.raises(UnknownName, match="choose from"):
        load_subject("flash9", "sdpa")

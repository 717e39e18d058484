"""Loading of Subjects by name: built-in kernels, and those of files and modules."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.messages import one_line

from attncheck.core.errors import UnknownName, UsageError
from attncheck.subjects.capabilities import named_kernels
from attncheck.subjects.load import load_candidate, load_subject


def test_builtin_names_and_their_order():
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
def test_builtin_kernel_has_its_name_and_a_one_line_summary(name):
    subject = named_kernels.subject_named(name)
    assert subject.name == name
    assert subject.summary == named_kernels.BUILTIN[name].summary
    assert "\n" not in subject.summary


def test_unknown_builtin_name_lists_the_known_ones():
    with pytest.raises(UnknownName, match=r"kernel 'sdpa' is not known: choose from .*sdpa-math"):
        named_kernels.subject_named("sdpa")


def test_listing_builtin_names_imports_neither_torch_nor_triton():
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
def test_class_or_instance_of_a_file_is_loaded(name):
    assert load_subject(f"{PLANTED}::{name}").name == "planted-nothing"


def test_factory_function_of_a_file_is_called(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MINE.format(body='name = "mine"') + "def make():\n    return Mine()\n")
    assert load_subject(f"{path}::make").name == "mine"


def test_kernel_file_imports_its_siblings_early_and_late(tmp_path, monkeypatch):
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
    # The modules can be found only as siblings of the file.
    assert kernel(21, None, None) == 42
    assert sys.path[0] == str(tmp_path.resolve())


def test_siblings_with_one_name_in_two_folders_are_kept_apart(tmp_path):
    for folder, factor in (("a", 2), ("b", 3)):
        package = tmp_path / folder / "inner"
        package.mkdir(parents=True)
        (tmp_path / folder / "beside.py").write_text(f"factor = {factor}")
        (package / "__init__.py").write_text(f"power = {factor}")
        text = "from beside import factor\nfrom inner import power\ndef kernel(q, k, v): ..."
        (tmp_path / folder / "mine.py").write_text(text)
    kernels = [load_subject(f"{tmp_path / each}/mine.py::kernel") for each in "ab"]
    names = ("factor", "power")
    values = [[each.function.__globals__[name] for name in names] for each in kernels]
    assert values == [[2, 2], [3, 3]]


@pytest.mark.parametrize("name", [".", "..", "kernels", "./kernels", "kernels/"])
def test_folder_is_refused_as_a_kernel(name, tmp_path, monkeypatch):
    (tmp_path / "kernels").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"is a folder: name a function, FILE\.py::NAME"):
        load_subject(name)


@pytest.mark.parametrize("convention", [None, "sdpa"])
def test_unknown_kernel_is_refused_with_or_without_a_convention(convention):
    with pytest.raises(UnknownName, match="choose from"):
        load_subject("flash9", convention)


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
def test_unloadable_file_is_refused_in_one_line(tmp_path, text, name, message):
    path = tmp_path / "mine.py"
    path.write_text(text)
    with one_line(UsageError, match=message):
        load_subject(f"{path}::{name}")


@pytest.mark.parametrize("kernel", ["nowhere.py::x", "::x"])
def test_missing_file_is_refused(kernel):
    with pytest.raises(UsageError, match="there is no file"):
        load_subject(kernel)


def test_keyboard_interrupt_while_loading_is_passed_on(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        load_subject(f"{path}::x")


@pytest.mark.parametrize(
    ("kernel", "hint"),
    [
        ("mine.py", r"write mine\.py::NAME\."),
        ("./folder/mine.py", r"write \./folder/mine\.py::NAME\."),
        ("./folder", r"write FILE\.py::NAME\."),
        ("package.module.fn", r"write package\.module:fn\."),
        ("mine.py:fn", r"a file takes two colons: mine\.py::fn\."),
        ("mine.py:", r"a file takes two colons: mine\.py::NAME\."),
    ],
)
def test_malformed_name_gets_a_hint_of_the_right_spelling(kernel, hint):
    with one_line(UsageError, match=hint):
        load_subject(kernel)

import io
import os
import sys

import pytest
import torch
from tests.messages import one_line

from attncheck.core.errors import UsageError
from attncheck.core.source_files import DivertedOutput, error_line, import_file, load_member


def test_a_file_is_a_module_that_classes_can_look_up(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("import dataclasses\n@dataclasses.dataclass\nclass Mine:\n    x: int = 3\n")
    module = import_file(path, "mod")
    assert module.Mine().x == 3
    assert sys.modules[module.__name__] is module
    assert load_member(f"{path}::Mine", "mod")().x == 3


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
    with one_line(UsageError, match=f"^mod 'x': importing .*{says}"):
        import_file(path, "mod 'x'")


@pytest.mark.parametrize(
    ("asked", "says"), [("gone.py::x", "there is no file"), ("mine.txt::x", "is not a Python file")]
)
def test_a_file_that_cannot_be(tmp_path, asked, says):
    (tmp_path / "mine.txt").write_text("x = 1")
    with pytest.raises(UsageError, match=says):
        load_member(f"{tmp_path}/{asked}", "mod 'x'")


def test_a_name_that_is_not_there(tmp_path):
    (tmp_path / "mine.py").write_text("x = 1")
    with pytest.raises(UsageError, match=r"^mod 'y': .*mine\.py has no 'y'"):
        load_member(f"{tmp_path}/mine.py::y", "mod 'y'")


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("mine.py::", "there is no name after '::'"),
        ("::x", "there is no file before '::'"),
        ("folder.py::x", "'folder.py' is a folder"),
        ("flder.py::x", r"there is no file flder.py: did you mean 'folder.py'\?"),
    ],
)
def test_half_a_reference_and_a_folder(tmp_path, monkeypatch, asked, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(UsageError, match=f"^mod 'x': {says}"):
        load_member(asked, "mod 'x'")


def test_a_getattr_of_the_module_may_raise_anything(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def __getattr__(name):\n    raise ValueError('planted')\n")
    with pytest.raises(UsageError, match=r": reading 'x' raised ValueError: planted at mine"):
        load_member(f"{path}::x", "mod 'y'")
    path.write_text("import sys\ndef __getattr__(name):\n    sys.exit(0)\n")
    with pytest.raises(UsageError, match=r": reading 'x' raised SystemExit: 0 at mine.py:3"):
        load_member(f"{path}::x", "mod 'y'")


@pytest.mark.parametrize("raised", ["RuntimeError", "SystemExit"])
def test_an_error_that_cannot_be_said_has_a_name(tmp_path, raised):
    path = tmp_path / "mine.py"
    path.write_text(
        f"class Mute(Exception):\n    def __str__(self):\n        raise {raised}\nraise Mute"
    )
    with pytest.raises(UsageError, match=r"raised Mute at mine\.py:4\.$"):
        import_file(path, "mod 'x'")
    assert error_line(ValueError("a\nb")) == "ValueError: a"


def test_a_compilers_error_has_its_place_and_its_reason():
    text = "at 55:8:\n\n    seen = seen & near\n    ^\nMismatched type for seen"
    assert error_line(TypeError(text)) == "TypeError: at 55:8: Mismatched type for seen"
    assert error_line(TypeError("at 55:8:")) == "TypeError: at 55:8:"


def test_what_an_import_prints_is_not_on_standard_output(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        "import os, sys\n"
        "print('seen')\n"
        "sys.stdout.buffer.write('γ'.encode())\n"
        "sys.stdout.reconfigure(line_buffering=True)\n"
        "sys.stdout.close()\n"
        "sys.stderr.close()\n"
        "print(' later', flush=True)\n"
        "stream = sys.stdout\n"
    )
    before = sys.stdout, sys.stderr
    module = import_file(tmp_path / "mine.py", "mod 'x'")
    assert (sys.stdout, sys.stderr) == before
    print("ours")  # noqa: T201  # what was closed is not ours
    module.stream.write("kept by a logger")
    assert capsys.readouterr() == ("ours\n", "seen\nγ later\nkept by a logger")


@pytest.mark.parametrize(
    ("end", "seen"),
    [
        ("import argparse\nargparse.ArgumentParser(prog='p').parse_args(['--nope'])", ""),
        ("raise ValueError('planted')", "printed\n"),
        ("print('x' * 100_000)\nraise SystemExit(0)", "printed\n" + "x" * 100_000 + "\n"),
    ],
)
def test_a_usage_message_of_the_file_is_dropped_and_nothing_else(tmp_path, capsys, end, seen):
    (tmp_path / "mine.py").write_text(f"print('printed')\n{end}\n")
    with pytest.raises(UsageError):
        import_file(tmp_path / "mine.py", "mod 'x'")
    assert capsys.readouterr() == ("", seen)


def test_no_stream_a_closed_one_and_a_split_character_are_no_error():
    closed = io.StringIO()
    closed.close()
    for stream in (None, closed):
        print("lost", file=DivertedOutput(stream))
    stream = io.StringIO()
    aside = DivertedOutput(stream)
    for byte in "γ".encode():
        aside.buffer.write(bytes([byte]))
    assert stream.getvalue() == "γ"


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_torchs_defaults_are_the_files_own(tmp_path, fails, inside):
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "torch.set_default_dtype(torch.float64)\n"
        "torch.set_default_device('meta')\n"
        "made = torch.ones(2)\n" + "1 / 0\n" * fails
    )
    device = torch.device("cpu") if inside else torch.device("meta")
    with device:
        if fails:
            with pytest.raises(UsageError):
                import_file(tmp_path / "mine.py", "mod 'x'")
        else:
            made = import_file(tmp_path / "mine.py", "mod 'x'").made
            assert (made.dtype, made.device.type) == (torch.float64, "meta")
        assert (torch.ones(2).dtype, torch.ones(2).device) == (torch.float32, device)
    assert (torch.ones(2).dtype, torch.ones(2).device.type) == (torch.float32, "cpu")


def test_a_number_changed_within_a_second_is_the_new_one(tmp_path):
    """Cached bytecode knows a source by its length and the second it was written in."""
    path = tmp_path / "mine.py"
    path.write_text("number = 1\n")
    first = import_file(path, "mine")
    written = path.stat()
    path.write_text("number = 2\n")
    os.utime(path, ns=(written.st_atime_ns, written.st_mtime_ns))
    assert (first.number, import_file(path, "mine").number) == (1, 2)
    assert not (tmp_path / "__pycache__").exists()

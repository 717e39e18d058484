"""Python files given by the user: importing them, loading a member, and errors with their place."""

import io
import os
import sys

import pytest
import torch
from tests.messages import one_line

from attncheck.core.errors import UsageError
from attncheck.core.source_files import DivertedOutput, error_line, import_file, load_member


def test_imported_file_is_in_sys_modules(tmp_path):
    """A dataclass looks up its module there while the file is imported."""
    path = tmp_path / "mine.py"
    path.write_text("import dataclasses\n@dataclasses.dataclass\nclass Mine:\n    x: int = 3\n")
    module = import_file(path, "mod")
    assert module.Mine().x == 3
    assert sys.modules[module.__name__] is module
    assert load_member(f"{path}::Mine", "mod")().x == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n\nraise ValueError('planted\\nmore')", "raised ValueError: planted at mine.py:3."),
        ("def f():\n    return 1 / 0\nf()", "ZeroDivisionError: division by zero at mine.py:2."),
        ("raise SystemExit", "raised SystemExit at mine.py:1."),
        ("def f(:", "SyntaxError: .*mine.py, line 1"),
    ],
)
def test_error_of_an_import_is_one_line_with_its_place(tmp_path, text, message):
    path = tmp_path / "mine.py"
    path.write_text(text)
    with one_line(UsageError, match=f"^mod 'x': importing .*{message}"):
        import_file(path, "mod 'x'")


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("gone.py::x", "there is no file"),
        ("mine.txt::x", "mine.txt is not a Python file"),
        ("mine.py::y", "mine.py has no 'y'"),
        ("mine.py::", "there is no name after '::'"),
        ("::x", "there is no file before '::'"),
        ("folder.py::x", "'folder.py' is a folder"),
        ("flder.py::x", r"there is no file flder.py: did you mean 'folder.py'\?"),
    ],
)
def test_reference_to_nothing_is_rejected_with_the_reason(
    tmp_path, monkeypatch, reference, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.py").mkdir()
    for name in ("mine.py", "mine.txt"):
        (tmp_path / name).write_text("x = 1")
    with pytest.raises(UsageError, match=f"^mod 'x': {message}"):
        load_member(reference, "mod 'x'")


@pytest.mark.parametrize(
    ("call", "error"),
    [("ValueError('planted')", "ValueError: planted"), ("SystemExit(0)", "SystemExit: 0")],
)
def test_error_of_a_modules_getattr_is_reported(tmp_path, call, error):
    path = tmp_path / "mine.py"
    path.write_text(f"def __getattr__(name):\n    raise {call}\n")
    with pytest.raises(UsageError, match=f": reading 'x' raised {error} at mine.py:2"):
        load_member(f"{path}::x", "mod 'y'")


@pytest.mark.parametrize("raised", ["RuntimeError", "SystemExit"])
def test_error_whose_str_raises_is_reported_by_its_class(tmp_path, raised):
    path = tmp_path / "mine.py"
    path.write_text(
        f"class Mute(Exception):\n    def __str__(self):\n        raise {raised}\nraise Mute"
    )
    with pytest.raises(UsageError, match=r"raised Mute at mine\.py:4\.$"):
        import_file(path, "mod 'x'")


def test_error_line_has_the_first_line_of_the_message():
    assert error_line(ValueError("a\nb")) == "ValueError: a"


def test_error_line_of_a_compiler_error_has_its_place_and_its_reason():
    text = "at 55:8:\n\n    seen = seen & near\n    ^\nMismatched type for seen"
    assert error_line(TypeError(text)) == "TypeError: at 55:8: Mismatched type for seen"
    assert error_line(TypeError("at 55:8:")) == "TypeError: at 55:8:"


def test_output_of_an_import_goes_to_standard_error(tmp_path, capsys):
    """Standard output has only the report, whatever the file does with its streams."""
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
    print("ours")  # noqa: T201  # the file has closed its own streams, not ours
    module.stream.write("kept by a logger")
    assert capsys.readouterr() == ("ours\n", "seen\nγ later\nkept by a logger")


@pytest.mark.parametrize(
    ("end", "shown"),
    [
        ("import argparse\nargparse.ArgumentParser(prog='p').parse_args(['--nope'])", ""),
        ("raise ValueError('planted')", "printed\n"),
        ("print('x' * 100_000)\nraise SystemExit(0)", "printed\n" + "x" * 100_000 + "\n"),
    ],
)
def test_output_of_a_failing_import_is_shown_unless_it_is_argparses_usage(
    tmp_path, capsys, end, shown
):
    (tmp_path / "mine.py").write_text(f"print('printed')\n{end}\n")
    with pytest.raises(UsageError):
        import_file(tmp_path / "mine.py", "mod 'x'")
    assert capsys.readouterr() == ("", shown)


def test_diverted_output_to_no_stream_or_a_closed_one_is_dropped():
    closed = io.StringIO()
    closed.close()
    for stream in (None, closed):
        print("lost", file=DivertedOutput(stream))


def test_diverted_output_joins_the_bytes_of_a_character():
    stream = io.StringIO()
    diverted = DivertedOutput(stream)
    for byte in "γ".encode():
        diverted.buffer.write(bytes([byte]))
    assert stream.getvalue() == "γ"


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_torchs_defaults_set_by_a_file_end_with_its_import(tmp_path, fails, inside):
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


def test_file_changed_within_a_second_is_imported_anew(tmp_path):
    """Cached bytecode would not notice: it compares a source's length and modification second."""
    path = tmp_path / "mine.py"
    path.write_text("number = 1\n")
    first = import_file(path, "mine")
    written = path.stat()
    path.write_text("number = 2\n")
    os.utime(path, ns=(written.st_atime_ns, written.st_mtime_ns))
    assert (first.number, import_file(path, "mine").number) == (1, 2)
    assert not (tmp_path / "__pycache__").exists()

"""User kernels and mods that exit, print, warn or change the state of their process."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import signal
import sys
import time
import warnings

import click
import pytest
import torch

from attncheck.cli import attncheck as group
from attncheck.cli import main, standard_output
from attncheck.inputs.problem import Case, Problem
from attncheck.mods import mod_files
from attncheck.verify.process_effects import changed_parts, process_state

HOSTILE = """
import ctypes, os, signal, sys, time
import torch
from torch.nn.functional import scaled_dot_product_attention
_KEPT = []
def kernel(q, k, v, is_causal=False):
    out = scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    {effect}
    return out
"""
HANGS = "it did not answer with outputs in 2 s"
# Effect of the kernel, status of the first record, part of its reason, and exit code.
EFFECTS = {
    "os._exit": ("os._exit(0)", "crash", "its process ended with exit code 0", 1),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", "crash", "its process died of SIGKILL", 1),
    "SIGSEGV": ("ctypes.string_at(0)", "crash", "its process died of SIGSEGV", 1),
    "hangs": ("time.sleep(1000)", "timeout", HANGS, 1),
    "hangs holding the GIL": ("ctypes.PyDLL(None).pause()", "timeout", HANGS, 1),
    "SystemExit": ("raise SystemExit(0)", "error", "SystemExit: 0", 1),
    "fork": ("os.fork()", "pass", "", 0),
    "patches torch": ("torch.equal = torch.allclose = torch.Tensor.double = None", "pass", "", 0),
    "prints": ("[os.write(1, b'\\x1b[2JPASS' * 9999 + b'\\n') for _ in range(99)]", "pass", "", 0),
    "chdir": ("os.chdir('/')", "fail", "changed the working directory", 1),
    "default dtype": (
        "torch.set_default_dtype(torch.float64)",
        "fail",
        "changed the default dtype",
        1,
    ),
    "default device": ("torch.set_default_device('meta')", "fail", "changed the default device", 1),
    "grad mode": ("torch.set_grad_enabled(False)", "fail", "changed grad mode", 1),
    "inference mode": (
        "_KEPT.append(torch.inference_mode()) or _KEPT[-1].__enter__()",
        "fail",
        "changed inference mode",
        1,
    ),
    "random generator": ("torch.rand(3)", "fail", "changed torch's random generator", 1),
    "threads": ("torch.set_num_threads(3)", "fail", "changed the number of torch's threads", 1),
    "tf32": ("torch.backends.cuda.matmul.allow_tf32 = True", "fail", "cuda.matmul.allow_tf32", 1),
}
LOAD_EFFECTS = {
    "os._exit": ("os._exit(0)", "its process ended with exit code 0"),
    "SIGSEGV": ("ctypes.string_at(0)", "its process died of SIGSEGV"),
}

MODS = ("--shape", "1x1x3", "--kernel", "ideal", "-q", "--device", "cpu")
RMSE = ("--shape", "1x1x8x8", "--variant", "causal", "-q", "--device", "cpu")

CAUSAL = "def f(b, h, q_idx, kv_idx):\n    return q_idx >= kv_idx\n"

KERNEL = """
import sys, warnings
import torch
from attncheck.subjects.ideal import Ideal

print("imported")

class Mine(Ideal):
    name, summary = "mine", "talks"

    def __init__(self):
        print("made")
        super().__init__()

    def prepare(self, inputs):
        print("prepared")
        warnings.warn("planted")
        call = super().prepare(inputs)

        def talks():
            sys.stdout.write("called\\n")
            return call()

        return talks
"""


@pytest.fixture
def attncheck(tmp_path, monkeypatch, capsys):
    """Run the command line in this process: exit code, stdout and stderr."""
    handler, options = signal.getsignal(signal.SIGINT), sys.warnoptions
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "warnoptions", [])

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["attncheck", *map(str, arguments)])
        streams = sys.stdout, sys.stderr
        with pytest.raises(SystemExit) as end:
            main()
        assert (sys.stdout, sys.stderr) == streams
        return end.value.code, *capsys.readouterr()

    yield run
    signal.signal(signal.SIGINT, handler)
    sys.warnoptions = options
    mod_files._import_mod.cache_clear()


@pytest.fixture
def foreign(monkeypatch):
    """``foreign(callback)``: add a verb ``foreign`` that calls ``callback``."""

    def plant(callback):
        verb = standard_output.Verb("foreign", callback=callback)
        monkeypatch.setitem(group.commands, "foreign", verb)

    return plant


@pytest.mark.parametrize(
    "end", [SystemExit(), SystemExit(0), SystemExit(7), click.exceptions.Exit(0)]
)
def test_foreign_code_that_exits_is_an_error(attncheck, foreign, end):
    def ends():
        raise end

    foreign(ends)
    code, out, err = attncheck("foreign")
    assert (code, out) == (2, "")
    assert err.startswith("attncheck: test_foreign_code.py:")
    assert f" ends the process: {type(end).__name__}" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(("value", "code"), [(None, 0), (0, 0), (5, 5)])
def test_exit_code_is_the_verbs_return_value(attncheck, foreign, value, code):
    foreign(lambda: value)
    assert attncheck("foreign") == (code, "", "")


def test_mod_output_goes_to_stderr(attncheck, tmp_path):
    talks = CAUSAL.replace("return", "print('called')\n    return")
    (tmp_path / "mine.py").write_text("print('imported')\n" + talks)
    code, out, err = attncheck("mods", "mine.py", *MODS, "--format", "json")
    assert code == 0
    assert json.loads(out)["records"][0]["name"] == "f"
    assert set(err.splitlines()) == {"imported", "called"}


@pytest.mark.parametrize("fmt", ["json", "csv", "table"])
def test_kernel_output_goes_to_stderr_without_warnings(attncheck, tmp_path, fmt):
    (tmp_path / "mine.py").write_text(KERNEL)
    code, out, err = attncheck("rmse", "--kernel", "mine.py::Mine", *RMSE, "--format", fmt)
    assert code == 0
    if fmt == "json":
        assert {r["kernel"] for r in json.loads(out)["records"]} == {"mine"}
    elif fmt == "csv":
        assert {row["kernel"] for row in csv.DictReader(io.StringIO(out))} == {"mine"}
    assert "called" not in out
    # What it printed would stand between the rows: of a pass only the number of lines is shown.
    count = r"attncheck: mine\.py::Mine printed \d+ lines in all its calls"
    assert re.fullmatch(rf"{count}: attncheck check -v shows them\.\n", err)


def test_the_last_lines_that_a_failing_kernel_prints_are_shown(attncheck, tmp_path):
    (tmp_path / "mine.py").write_text(KERNEL.replace("return call()", "raise RuntimeError"))
    code, out, err = attncheck("rmse", "--kernel", "mine.py::Mine", *RMSE)
    assert code == 1
    assert "called" not in out
    lines = set(re.sub(r" \(\d+ times more\)", "", err).splitlines())
    assert lines == {"imported", "made", "prepared", "called"}


@pytest.mark.parametrize(("effect", "status", "reason", "exit_code"), EFFECTS.values(), ids=EFFECTS)
def test_effects_on_the_kernels_process_are_reported_and_contained(
    attncheck, tmp_path, effect, status, reason, exit_code
):
    before = process_state(torch.device("cpu"))
    (tmp_path / "hostile.py").write_text(HOSTILE.format(effect=effect))
    options = ["--question", "state", "--question", "plain", "--device", "cpu", "--format", "json"]
    options += ["--timeout", "2s"] if status == "timeout" else []
    start = time.monotonic()
    code, out, err = attncheck("check", "hostile.py::kernel", *options, "-q")
    assert code == exit_code, err
    first, *others = json.loads(out)["records"]
    judgement = first.get("judgement") or {}
    assert first["status"] == status
    assert reason in (first.get("reason") or judgement.get("reason", ""))
    assert status != "fail" or judgement["rule"] == "state"
    # The kernel's numbers are correct, so the plain question must not fail.
    expected = {"fail": "pass"}.get(status, status)
    assert {each["status"] for each in others} <= {expected}
    assert json.loads((tmp_path / "reports" / "check.json").read_text()) == json.loads(out)
    changed = changed_parts(before, process_state(torch.device("cpu")))
    assert [part for part in changed if part in reason] == []
    assert len(err) < 1 << 17
    assert "\x1b" not in err
    assert "attncheck_file_hostile" not in sys.modules
    missing = 2 - len(json.loads(out)["records"])
    note = f"{missing} more were not asked" if missing else ""
    assert json.loads(out).get("incomplete", "") == note
    assert missing == (status == "timeout")
    if status == "timeout":  # about a second of it is the import of torch in another process
        assert time.monotonic() - start < 8


@pytest.mark.parametrize(
    ("effect", "processes", "warns"),
    [
        ("pass", 1, False),
        ("_KEPT or _KEPT.append(torch.set_default_dtype(torch.float64))", 2, True),
    ],
)
def test_only_a_kernel_that_changed_its_process_is_run_in_another(
    attncheck, tmp_path, effect, processes, warns
):
    kernel = HOSTILE.format(effect=effect)
    (tmp_path / "mine.py").write_text(f"open('loaded', 'a').write('x')\n{kernel}")
    options = ["--question", "state", "--device", "cpu", "--format", "json", "-q"]
    code, out, err = attncheck("check", "mine.py::kernel", *options)
    assert code == 0, err
    assert (tmp_path / "loaded").read_text() == processes * "x"
    (record,) = json.loads(out)["records"]
    warning = "its first call changed the default dtype, and a further one did not"
    assert [*record["judgement"].get("warnings", ())] == [warning] * warns


@pytest.mark.parametrize(("effect", "reason"), LOAD_EFFECTS.values(), ids=LOAD_EFFECTS)
def test_file_that_ends_its_process_on_import_fails(attncheck, tmp_path, effect, reason):
    (tmp_path / "mine.py").write_text(f"import ctypes, os\n{effect}\n{CAUSAL}")
    code, out, err = attncheck("check", "mine.py::f", "--device", "cpu")
    assert code == 1, err
    assert f"crash: as it was loaded, {reason}" in out
    assert "FAIL mine.py::f: 1 of 1 question failed" in out


REPRODUCED = {name: EFFECTS[name] for name in ("os._exit", "hangs", "patches torch", "SystemExit")}


@pytest.mark.parametrize(
    ("effect", "status", "reason", "exit_code"), REPRODUCED.values(), ids=REPRODUCED
)
def test_repro_runs_the_kernel_in_another_process(
    attncheck, tmp_path, effect, status, reason, exit_code
):
    (tmp_path / "hostile.py").write_text(HOSTILE.format(effect=effect))
    case = Case(problem=Problem(query=64, kv=64, head_dim=64, heads=8, dtype="bf16"))
    (tmp_path / "case.json").write_text(json.dumps(case.to_json()))
    options = ("--kernel", "hostile.py::kernel", "--device", "cpu", "--timeout", "2s")
    code, out, err = attncheck("repro", "case.json", *options, "--script", "again.py")
    assert code == exit_code, err
    assert reason.partition(";")[0] in out
    assert "attncheck_file_hostile" not in sys.modules
    # The script is written even for a kernel that dies.
    assert "def call_" in (tmp_path / "again.py").read_text()


def test_repro_of_file_that_ends_its_process_on_import_fails(attncheck, tmp_path):
    (tmp_path / "mine.py").write_text(f"import os\nos._exit(0)\n{CAUSAL}")
    (tmp_path / "case.json").write_text(json.dumps(Case(problem=Problem(query=4)).to_json()))
    code, out, err = attncheck("repro", "case.json", "--kernel", "mine.py::f", "--device", "cpu")
    assert code == 1, err
    assert "its process ended with exit code 0 before it answered" in out


OUT_OF_BOUNDS_WRITE = """
import ctypes, torch
from torch.nn.functional import scaled_dot_product_attention
def kernel(q, k, v, is_causal=False):
    out = torch.empty_like(q).copy_(scaled_dot_product_attention(q, k, v, is_causal=is_causal))
    ctypes.memset(out.data_ptr() + out.nbytes, 65, 4096)
    return out
"""


def test_kernel_with_out_of_bounds_writes_is_stopped_after_two_questions(attncheck, tmp_path):
    (tmp_path / "mine.py").write_text(OUT_OF_BOUNDS_WRITE)
    code, out, err = attncheck(
        "check", "mine.py::kernel", "--device", "cpu", "--format", "json", "-q"
    )
    records = json.loads(out)["records"]
    assert (code, len(records)) == (1, 2), err
    for record in records:
        assert (record["status"], record["judgement"]["rule"]) == ("fail", "memory")
        assert record["judgement"]["reason"].startswith("out-of-bounds write: ")


def test_in_process_runs_the_kernel_in_this_process(attncheck, tmp_path):
    (tmp_path / "mine.py").write_text(HOSTILE.format(effect=f"assert os.getpid() == {os.getpid()}"))
    options = ("--question", "plain", "--device", "cpu", "--in-process")
    assert attncheck("check", "mine.py::kernel", *options)[0] == 0
    assert attncheck("check", "mine.py::kernel", *options[:-1])[0] == 5


@pytest.mark.parametrize(
    ("when", "stream"), [("import", "stdout"), ("import", "stderr"), ("call", "stdout")]
)
def test_foreign_code_cannot_close_our_streams(attncheck, tmp_path, when, stream):
    close = f"sys.{stream}.close()\n"
    closes = close + CAUSAL if when == "import" else CAUSAL.replace("return", f"{close}    return")
    (tmp_path / "mine.py").write_text("import sys\n" + closes)
    code, out, err = attncheck("mods", "mine.py", *MODS)
    assert (code, err) == (0, "")
    assert "1 mod: 2 equal." in out


def test_warnings_are_hidden_unless_python_shows_them(attncheck, foreign, monkeypatch):
    def warns():
        warnings.warn("planted", stacklevel=1)

    foreign(warns)
    with warnings.catch_warnings():
        assert attncheck("foreign") == (0, "", "")
    monkeypatch.setattr(sys, "warnoptions", ["error"])
    with pytest.raises(UserWarning, match="planted"):
        main()


def test_coroutine_mod_is_rejected_without_a_warning(attncheck, tmp_path):
    (tmp_path / "mine.py").write_text("async " + CAUSAL)
    with warnings.catch_warnings():
        code, out, err = attncheck("mods", "mine.py", *MODS)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "never awaited" not in err


def test_torch_defaults_set_by_a_file_do_not_reach_kernels(attncheck, tmp_path):
    sets = "import torch\ntorch.set_default_dtype(torch.float64)\n"
    score = "def s(score, b, h, q_idx, kv_idx):\n    return score + q_idx / 3\n"
    (tmp_path / "mine.py").write_text(sets + "torch.set_default_device('meta')\n" + score)
    code, out, err = attncheck("mods", "mine.py", *MODS)
    assert (code, err) == (0, "")
    assert "1 mod: 2 equal." in out


@pytest.mark.parametrize("verb", [("rmse", *RMSE), ("mods", "mine.py", "--device", "cpu")])
def test_duplicate_kernel_names_are_rejected(attncheck, tmp_path, verb):
    for name in ("mine.py", "other.py"):
        (tmp_path / name).write_text(KERNEL + CAUSAL)
    kernels = ("--kernel", "mine.py::Mine", "--kernel", "other.py::Mine")
    code, out, err = attncheck(*verb, *kernels)
    assert (code, out) == (2, "")
    assert "kernel 'other.py::Mine': another one is called 'mine' too." in err


def test_unknown_mod_result_exits_1_as_help_says(attncheck, tmp_path):
    undefined = "def s(score, b, h, q_idx, kv_idx):\n    return score / (q_idx - q_idx)\n"
    (tmp_path / "mine.py").write_text(undefined)
    code, out, _ = attncheck("mods", "mine.py", *MODS)
    assert "unknown" in out
    assert "different" not in out
    assert code == 1
    code, out, err = attncheck("mods", "--help")
    assert (code, err) == (0, "")
    assert "where nothing can be said of a value" in " ".join(out.split())

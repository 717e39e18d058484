"""``attncheck check``: verdicts, causes, ``--last-failed``, ``--watch`` and kernel output."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import msgspec
import pytest

from attncheck.cli import long_runs
from attncheck.records.json_reports import load_report
from attncheck.records.record import FAILED_STATUSES, Report
from attncheck.reporting import rendering
from attncheck.reporting.check_document import check_summary

EXAMPLE = Path(__file__).parents[2] / "examples" / "my_kernel.py"
QUICK = ("--question", "decode-causal", "--question", "causal-tall")
SMALL = ("--question", "one-hot")
KERNELS = """
import torch
from torch.nn.functional import scaled_dot_product_attention
print("imported")
def kernel(q, k, v, is_causal=False):
    print("called")
    return scaled_dot_product_attention(q, k, v, is_causal=is_causal)
def picky(q, k, v):
    raise ValueError("head_dim must be 256")
"""
ODD_KERNEL = """
from torch.nn.functional import scaled_dot_product_attention
def odd(q, k, v):
    out = scaled_dot_product_attention(q, k, v)
    return out / 2 if q.shape[-1] == 40 else out
"""


@pytest.fixture(autouse=True)
def without_columns(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest-xdist sets it in its processes


@pytest.fixture(scope="module")
def check(attncheck):
    return lambda *words, cwd: attncheck("check", *words, cwd=cwd)


def test_correct_kernel_passes_and_writes_reports(run_fresh, tmp_path):
    run = run_fresh("check", f"{EXAMPLE}::attention", *QUICK, cwd=tmp_path)
    assert (run.returncode, run.stderr) == (0, "")
    lines = run.stdout.splitlines()
    assert lines[0] == "PASS my_kernel.py::attention: 2 questions"
    assert "left to attncheck gate" not in run.stdout  # said of a whole check alone
    assert not any(" pass " in line for line in lines)
    assert sorted(p.name for p in (tmp_path / "reports").iterdir()) == ["check.json", "check.md"]
    report = load_report((tmp_path / "reports" / "check.json").read_text(), Report)
    assert [record.variant for record in report.records] == ["causal-tall", "decode-causal"]
    assert str(EXAMPLE.parent) not in (tmp_path / "reports" / "check.md").read_text()


def test_wrong_kernel_fails_with_a_reproducing_command(check, tmp_path):
    spec = f"{EXAMPLE}::sees_the_next_key"
    run = check(spec, *QUICK, "--out", "here", cwd=tmp_path)
    assert (run.returncode, run.stderr) == (1, "")
    assert "structure: batch 0, head 0, row 0: key 1 is too many" in run.stdout
    assert "FAIL my_kernel.py::sees_the_next_key: 2 of 2 questions failed" in run.stdout
    line = next(line for line in run.stdout.splitlines() if line.startswith("Reproduce: "))
    words = line.removeprefix("Reproduce: attncheck check ").split()
    assert words[0] == spec  # with its folder, as typed
    rerun = check(*words, cwd=tmp_path)
    assert rerun.returncode == 1
    assert "key 1 is too many" in rerun.stdout


FAULTY_KERNELS = """
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa
def no_mask(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    return sdpa(q, k, v, attn_mask=attn_mask, scale=scale, enable_gqa=enable_gqa)
def two_faults(q, k, v, is_causal=False, scale=None):
    out = sdpa(q, k, v, is_causal=is_causal, scale=scale)
    return out * 1.01 if not is_causal else sdpa(q, k, v, scale=scale)
"""


KERNELS_WITH_STATE = """
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa
masks, calls = {}, []
def keeps_masks(q, k, v, attn_mask=None, is_causal=False, scale=None):
    if attn_mask is not None:
        attn_mask = masks.setdefault(attn_mask.shape, attn_mask)
    return sdpa(q, k, v, attn_mask, is_causal=is_causal, scale=scale)
def tires(q, k, v):
    calls.append(1)
    out = sdpa(q, k, v)
    if len(calls) > 3:
        out += torch.arange(out.numel()).view(out.shape).sin()
    return out
"""


def test_failure_that_needs_an_earlier_call_is_reproduced_with_it(check, tmp_path):
    (tmp_path / "state.py").write_text(KERNELS_WITH_STATE)
    spec, last = "state.py::keeps_masks", ("--question", "decode-causal-lengths")
    run = check(spec, "--question", "window-lengths", *last, cwd=tmp_path)
    assert run.returncode == 1
    assert "cause      right as the first call of a process, and wrong after others" in run.stdout
    assert check(spec, *last, cwd=tmp_path).returncode == 0
    report = load_report((tmp_path / "reports" / "check.json").read_text(), Report)
    assert [record.diagnosis for record in report.records] == [msgspec.UNSET]


def test_failure_after_many_calls_has_no_command_that_would_pass(check, tmp_path):
    (tmp_path / "state.py").write_text(KERNELS_WITH_STATE)
    run = check("state.py::tires", *SMALL, cwd=tmp_path)
    assert "cause      right as the first call of a process, and wrong after others" in run.stdout
    assert "Reproduce:" not in run.stdout


def test_race_is_not_blamed_on_earlier_calls(check, tmp_path):
    """Every second call is wrong: in a new process the first is right."""
    (tmp_path / "state.py").write_text(KERNELS_WITH_STATE.replace("> 3", "% 2 == 0"))
    run = check("state.py::tires", *SMALL, "--question", "one-key", cwd=tmp_path)
    assert "cause      the same call gives something else another time" in run.stdout
    assert "first call of a process" not in run.stdout


def test_verdict_stands_where_the_kernel_cannot_be_loaded_again(check, tmp_path):
    text = f"""
import pathlib
{KERNELS_WITH_STATE.replace("> 3", "> 0")}
if pathlib.Path("loaded").exists():
    raise RuntimeError("the device is taken")
pathlib.Path("loaded").touch()
"""
    (tmp_path / "state.py").write_text(text)
    run = check("state.py::tires", *SMALL, cwd=tmp_path)
    assert (run.returncode, run.stderr) == (1, "")
    assert "unknown: none of" in run.stdout


def test_failure_of_a_first_call_is_not_blamed_on_earlier_ones(check, tmp_path):
    (tmp_path / "state.py").write_text(KERNELS_WITH_STATE.replace("> 3", "> 0"))
    run = check("state.py::tires", *SMALL, cwd=tmp_path)
    assert run.returncode == 1
    assert "unknown: none of" in run.stdout
    assert "first call of a process" not in run.stdout


@pytest.fixture(scope="module")
def no_mask(attncheck, tmp_path_factory):
    """A folder with the report of a kernel that ignores masks, and the run at 80 columns."""
    folder = tmp_path_factory.mktemp("no_mask")
    (folder / "faulty.py").write_text(FAULTY_KERNELS)
    env = os.environ | {"COLUMNS": "80"}
    return folder, attncheck("check", "faulty.py::no_mask", cwd=folder, env=env)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_first_screen_has_verdict_cause_problem_and_reproduction(no_mask, width, monkeypatch):
    """The report of one run is shown again at each width."""
    folder, run = no_mask
    assert run.returncode == 1
    monkeypatch.setenv("COLUMNS", str(width))
    report = load_report((folder / "reports" / "check.json").read_text(), Report)
    command = "attncheck check faulty.py::no_mask"
    page = partial(check_summary, command=command, quiet=False, verbose=False)
    stream = io.StringIO()
    rendering.show(report, stream=stream, document=page)
    assert stream.getvalue() == run.stdout or width != 80
    screen = stream.getvalue().splitlines()
    assert (
        screen.index("bf16") <= 12
    )  # a screen has 24 lines; what matters must fit in half of them
    assert len(screen) <= 24 or width < 80
    assert screen[0].startswith("FAIL faulty.py::no_mask: 16 of ")
    assert screen[2] == "1 cause explains 16 of 16 failures"
    assert screen[3].startswith("  cause      the mask is ignored: every row sees")
    problem = next(line for line in screen if line.startswith("  problem    "))
    assert "-causal" in problem
    assert "· bf16 causal B1" in problem
    reproduce = f"Reproduce: {command} --question {problem.split()[1]}"
    assert reproduce in screen
    assert all(len(line) <= width for line in screen if line != reproduce)
    page = (folder / "reports" / "check.md").read_text()
    assert page.index("# FAIL") < page.index("cause: the mask is ignored") < page.index("Reproduce")
    assert page.index("Reproduce") < page.index("| ones-ragged | pass |")


def test_each_cause_is_shown_with_its_own_problem(check, tmp_path):
    (tmp_path / "faulty.py").write_text(FAULTY_KERNELS)
    names = [word for name in ("plain", "causal", "sink") for word in ("--question", name)]
    run = check("faulty.py::two_faults", *names, "-q", cwd=tmp_path)
    lines = run.stdout.splitlines()
    assert lines[0] == "FAIL faulty.py::two_faults: 3 of 3 questions failed"
    assert lines[2] == "1 cause explains 1 of 3 failures; the other 2 have no certain cause"
    # A fault that has a size, such as a factor, is described by its family without a name.
    (likely,) = (line for line in lines if line.startswith("  likely"))
    assert likely.split()[1:3] == ["a", "factor:"]
    assert sorted(line.split()[1:] for line in lines if line.startswith("  failures")) == [
        ["1", "of", "3"],
        ["2", "of", "3"],
    ]
    assert sum(line.startswith("Reproduce: ") for line in lines) == 2
    assert lines[-1].startswith("Reproduce: ")  # with -q nothing follows


def test_verbose_shows_every_question_and_the_worst_element(check, tmp_path):
    run = check(f"{EXAMPLE}::sees_the_next_key", *QUICK, "--question", "plain", "-v", cwd=tmp_path)
    lines = run.stdout.splitlines()
    assert lines[0] == "FAIL my_kernel.py::sees_the_next_key: 2 of 3 questions failed"
    assert sum(line.startswith("  plain ") and " pass " in line for line in lines) == 1
    assert any(line.startswith("what is allowed there") for line in lines)


def test_last_failed_reruns_only_failed_questions(check, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(EXAMPLE.read_text())
    spec, questions = "mine.py::sees_the_next_key", ("--question", "plain", *QUICK)
    run = check(spec, *questions, "--last-failed", "-q", cwd=tmp_path)
    assert f"there is no report of {spec} in 'reports': every question is asked" in run.stderr
    assert run.stdout.startswith(f"FAIL {spec}: 2 of 3 questions failed")
    run = check(spec, *questions, "--last-failed", "-q", cwd=tmp_path)
    assert run.stderr == ""
    assert run.stdout.startswith(f"FAIL {spec}: 2 of 2 questions failed")
    assert (
        "--last-failed" not in run.stdout
    )  # the reproducing command must not depend on the last run
    path.write_text(EXAMPLE.read_text().replace("first_hidden = 2", "first_hidden = 1"))
    assert check(spec, "--last-failed", "-q", cwd=tmp_path).stdout == f"PASS {spec}: 2 questions\n"
    run = check(spec, *questions, "--last-failed", "-q", cwd=tmp_path)
    assert f"nothing of {spec} failed last time: every question is asked" in run.stderr
    assert run.stdout == f"PASS {spec}: 3 questions\n"


def test_last_failed_reruns_all_when_a_failed_question_is_gone(check, tmp_path):
    file, spec, report = tmp_path / "odd.py", "odd.py::odd", tmp_path / "reports" / "check.json"
    file.write_text(ODD_KERNEL)
    assert check(spec, "--question", "head_dims-40", "-q", cwd=tmp_path).returncode == 1
    file.write_text(ODD_KERNEL.replace("out / 2", "out"))
    run = check(spec, "--last-failed", "-q", cwd=tmp_path)
    # A question beyond the claims counts like any other once it passes.
    assert run.stdout == f"PASS {spec}: 1 question\n"
    whole = json.loads(report.read_text())
    whole["records"][0] |= {"variant": "crossed-99", "status": "crash", "judgement": None}
    report.write_text(json.dumps(whole))
    run = check(spec, "--last-failed", "-q", cwd=tmp_path)
    note = f"attncheck: {spec} has no question 'crossed-99' any more: every question is asked.\n"
    assert (run.returncode, run.stderr) == (0, note)
    assert len(load_report(report.read_text(), Report).records) > 1


def test_watch_reruns_on_change_and_ends_on_interrupt(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(EXAMPLE.read_text())
    words = [sys.executable, "-m", "attncheck", "check", "mine.py::sees_the_next_key", "--watch"]
    options = {"cwd": tmp_path, "env": os.environ, "text": True}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    watching = subprocess.Popen([*words, *QUICK[:2], "-q"], **options, **pipes)
    try:
        assert "watching ./*.py" in watching.stderr.readline()
        path.write_text(EXAMPLE.read_text().replace("first_hidden = 2", "first_hidden = 1"))
        assert "watching ./*.py" in watching.stderr.readline()
    finally:
        watching.send_signal(signal.SIGINT)
    out, errors = watching.communicate()
    assert watching.returncode == 130
    assert errors == "attncheck: no longer watching mine.py::sees_the_next_key.\n"
    verdicts = [line for line in out.splitlines() if line.startswith(("PASS", "FAIL"))]
    name = "mine.py::sees_the_next_key"
    # After the change, first the failed questions run, then all.
    assert verdicts == [f"FAIL {name}: 1 of 1 question failed", *[f"PASS {name}: 1 question"] * 2]


@pytest.mark.parametrize("spec", ["mine.py::kernel", "mine:kernel"])
def test_stdout_is_only_the_report(check, project, spec):
    run = check(
        spec, "--question", "plain", "--dtype", "fp32", "--format", "json", "-q", cwd=project
    )
    assert run.returncode == 0, run.stderr
    # A passing kernel's output is only counted.
    note = r"attncheck: the kernel printed \d+ lines in all its calls: -v shows them\.\n"
    assert re.fullmatch(note, run.stderr)
    report = json.loads(run.stdout)
    assert report == json.loads((project / "reports" / "check.json").read_text())
    (record,) = report["records"]
    assert (record["kernel"], record["status"], record["variant"]) == (spec, "pass", "plain")
    assert record["case"]["problem"]["dtype"] == "fp32"
    assert record["judgement"]["blind_spot"]["zeros"]


PRINTING_KERNEL = """
import os, subprocess, sys
from torch.nn.functional import scaled_dot_product_attention
def kernel(q, k, v):
    sys.__stdout__.write("first ")
    sys.__stdout__.flush()
    os.write(1, b"second ")  # as a library in C does, or printf on a GPU
    subprocess.run(["echo", "third"])
    return scaled_dot_product_attention(q, k, v)
"""


def test_stdout_is_only_the_report_even_for_writes_to_descriptor_1(run_fresh, tmp_path):
    (tmp_path / "prints.py").write_text(PRINTING_KERNEL)
    arguments = ("--question", "plain", "--format", "json", "-q", "-v")
    run = run_fresh("check", "prints.py::kernel", *arguments, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["records"][0]["status"] == "pass"
    # Once per call: the calls that probe capabilities, and the question.
    line = "first second third"
    assert re.fullmatch(rf"({line}\n{line} \(\d+ times more\)\n)+", run.stderr)


def test_progress_names_its_unit(monkeypatch, capsys):
    monkeypatch.setattr(long_runs, "_SECONDS_BETWEEN_LINES", 0.0)
    for unit in ("question", long_runs.TRIALS):
        with long_runs.progress(unit, 2, quiet=False) as advance:
            advance("plain")
    first, second = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"question 1 of 2, about \d+ s left \(plain\)", first)
    assert second.startswith("finding out what the kernel supports, 1 of 2, about ")


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("return scaled_dot_product_attention(q, k, v)", 0),
        ("return 2 * v", 1),
        ("import ctypes; ctypes.string_at(0)", 1),
    ],
)
def test_output_of_failing_kernel_is_shown_and_of_passing_kernel_counted(
    run_fresh, tmp_path, end, code
):
    (tmp_path / "prints.py").write_text(
        "from torch.nn.functional import scaled_dot_product_attention\n"
        "def kernel(q, k, v):\n"
        "    for i in range(50):\n"
        "        print(f'line {i}', flush=True)\n"
        f"    {end}\n"
    )
    run = run_fresh("check", "prints.py::kernel", "--question", "plain", "-q", cwd=tmp_path)
    assert run.returncode == code, run.stderr
    first, *rest = run.stderr.splitlines()
    them = "(?:them|the first 64 KiB of them)"
    count = r"the kernel printed [\d,]+ lines in all its calls"
    if code == 0:
        assert re.fullmatch(rf"attncheck: {count}: -v shows {them}\.", first)
        assert not rest
    else:
        assert re.fullmatch(rf"attncheck: {count} \(-v shows {them}\), and last:", first)
        assert rest == [f"line {i}" for i in range(30, 50)]


def test_exception_is_shown_with_frames_of_the_kernel_alone(check, tmp_path):
    body = (
        "def inner(q):\n    return q @ q\ndef kernel(q, k, v):\n    return inner(q[:, :, :, 1:])\n"
    )
    (tmp_path / "mine.py").write_text(f"import torch\n{body}")
    run = check("mine.py::kernel", "--question", "plain", "-q", "-v", cwd=tmp_path)
    lines = run.stdout.splitlines()
    first = lines.index("  raised in  mine.py:5 in kernel")
    # No frames of attncheck's before, and none of torch's and attncheck's below.
    assert [line.strip() for line in lines[first + 1 : first + 3]] == ["mine.py:3 in inner", ""]


@pytest.mark.parametrize(
    ("result", "asks_all"),
    [
        ("None", False),
        ("out[:, :, :-1]", False),
        ("out.double()", True),
        ("(out, out[:, :, 0, 0])", True),  # out could be judged, were it not for LSE
    ],
)
def test_kernel_that_returns_nothing_to_judge_is_not_asked_everything(
    check, tmp_path, result, asks_all
):
    """A wrong dtype may be right where another one is asked."""
    (tmp_path / "mine.py").write_text(f"""
from torch.nn.functional import scaled_dot_product_attention
def kernel(q, k, v, is_causal=False, scale=None):
    out = scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale)
    return {result}
""")
    run = check("mine.py::kernel", "--dtype", "fp32", cwd=tmp_path)
    count, asked, rest = re.search(r": (\d+) of (\d+) questions failed(.*)", run.stdout).groups()
    assert (run.returncode, count) == (1, asked)
    assert ("not asked" in rest) != asks_all
    assert (int(count) > 12) == asks_all
    assert run.stdout.count("  cause ") == 1


def test_kernel_raising_a_base_exception_is_recorded_as_error(check, tmp_path):
    body = "class E(BaseException):\n    def __str__(self): raise RuntimeError('planted')\n"
    (tmp_path / "raises.py").write_text(f"{body}def kernel(q, k, v): raise E\n")
    run = check("raises.py::kernel", "--question", "plain", cwd=tmp_path)
    assert (run.returncode, run.stderr) == (1, "")
    assert "error: E" in run.stdout


def test_dtypes_and_head_dim_options_are_combined(check, project):
    dtypes = ("--dtype", "fp32", "--dtype", "fp16", "--head-dim", "32")
    run = check("mine.py::kernel", "--question", "scale", "--question", "gqa", *dtypes, cwd=project)
    assert run.returncode == 5  # it supports neither
    for keyword in ("scale", "enable_gqa"):
        line = f"mine.py::kernel does not support 2 questions: takes no {keyword}"
        assert run.stdout.count(line) == 1
    assert run.stdout.startswith("NOTHING TESTED mine.py::kernel")
    report = load_report((project / "reports" / "check.json").read_text(), Report)
    problems = [record.case["problem"] for record in report.records]
    assert [problem["dtype"] for problem in problems] == ["fp32", "fp32", "fp16", "fp16"]
    assert {problem["head_dim"] for problem in problems} == {32}


def test_kernel_that_refuses_everything_exits_5(check, project):
    run = check("mine.py::picky", "--question", "plain", cwd=project)
    assert run.returncode == 5
    assert "ValueError: head_dim must be 256" in run.stdout


def test_built_in_kernel_can_be_checked(check, tmp_path):
    run = check("sdpa-math", "--question", "decode-window", "--format", "md", "-q", cwd=tmp_path)
    assert run.returncode == 0
    assert run.stdout == (tmp_path / "reports" / "check.md").read_text()
    assert run.stdout.startswith("# PASS sdpa-math: 1 question\n")


TUTORIAL = Path(__file__).parents[1] / "data" / "tutorial_kernels.py"
_CLAIMS = "supports fp16; head_dim 16, 32, 64, 128, 256; values as wide as keys; as many queries as"


@pytest.mark.parametrize(
    ("kernel", "code", "verdict", "cause"),
    [
        ("right", 0, "PASS tutorial_kernels.py::right: ", ""),
        (
            "sees_the_next_key",
            1,
            "FAIL tutorial_kernels.py::sees_the_next_key: ",
            "the causal mask is one key too wide: row i sees key i + 1",
        ),
        (
            "whole_tiles_of_128",
            1,
            "FAIL tutorial_kernels.py::whole_tiles_of_128: wrong, not refused, for lengths 1, 77,",
            "",
        ),
    ],
)
def test_tutorial_kernel_is_checked_within_its_claims(
    check, tmp_path, kernel, code, verdict, cause
):
    run = check(f"{TUTORIAL}::{kernel}", cwd=tmp_path)
    assert run.returncode == code
    page = " ".join(run.stdout.split())
    assert verdict in page
    assert cause in page
    assert ("left to attncheck gate: scale ≤ 0" in page) == (code == 0)
    # What it cannot take is mentioned once, and fails no question.
    assert page.count("InterpreterError") == 1
    report = load_report((tmp_path / "reports" / "check.json").read_text(), Report)
    (lines,) = report.claims.values()
    assert lines[0].startswith(_CLAIMS if kernel != "whole_tiles_of_128" else _CLAIMS[:63])
    failed = [one for one in report.records if one.status in FAILED_STATUSES]
    assert all(one.status == "fail" for one in failed)
    if kernel == "sees_the_next_key":
        assert {one.case["problem"]["mask"]["name"] for one in failed} <= {
            "causal",
            "causal_bottom_right",
        }
    elif kernel == "whole_tiles_of_128":
        assert {one.unclaimed.aspect for one in failed} == {"lengths"}


TWO_FAULTS = """
import torch
def kernel(q, k, v, is_causal=False):
    scores = q.float() @ k.float().mT * q.shape[3] ** -0.5
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores).tril(1) == 0, float("-inf"))
    out = (scores.softmax(-1) @ v.float()).to(q.dtype)
    return out if q.shape[2] % 64 == 0 else out * 0
"""


def test_failure_beyond_claims_does_not_hide_the_cause_within_them(check, tmp_path):
    (tmp_path / "mine.py").write_text(TWO_FAULTS)
    questions = ("--question", "decode-causal-even", "--question", "lengths-77")
    run = check("mine.py::kernel", *questions, "--dtype", "fp32", "-q", cwd=tmp_path)
    assert "  cause      the causal mask is one key too wide: row i sees key i + 1" in run.stdout

"""``attncheck rmse``, ``list`` and ``doctor``: files, exit codes and faulty kernels."""

import csv
import json

import pytest

QUICK = ("--kernel", "ideal", "--variant", "causal", "--shape", "1x2x16x8")


@pytest.fixture(scope="module")
def quick(tmp_path_factory, run_fresh):
    folder = tmp_path_factory.mktemp("quick")
    return run_fresh("rmse", *QUICK, "--dtype", "fp16", "--format", "json", cwd=folder), folder


def test_stdout_is_only_the_report(quick):
    run, folder = quick
    assert (run.returncode, run.stderr) == (0, "")
    report = json.loads(run.stdout)
    assert report == json.loads((folder / "reports" / "rmse.json").read_text())
    assert [r["heads"] for r in report["records"]] == ["MHA", "MQA"]
    assert report["command"] == f"attncheck rmse {' '.join(QUICK)} --dtype fp16 --format json"


def test_every_output_file_is_written(quick):
    _, folder = quick
    reports = folder / "reports"
    assert sorted(p.name for p in reports.iterdir()) == ["rmse.csv", "rmse.json", "rmse.md"]
    with (reports / "rmse.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["kernel"] for row in rows] == ["ideal", "ideal"]
    assert "ideal" in (reports / "rmse.md").read_text()


def test_nothing_measured_exits_5(attncheck, tmp_path):
    words = ("--kernel", "sdpa-flash", "--variant", "softcap", "--shape", "1x2x16x8", "-q")
    run = attncheck("rmse", *words, cwd=tmp_path)
    assert run.returncode == 5
    assert "unsupported" in run.stdout


def test_kernel_raising_in_one_cell_does_not_affect_others(warm_python, tmp_path):
    program = """
import sys
from attncheck.cli import main
from attncheck.subjects.torch_kernels import Sdpa
run = Sdpa.prepare
def prepare(self, inputs):
    if inputs.problem.mask.name == "causal":
        raise RuntimeError("planted\\nmore")
    return run(self, inputs)
Sdpa.prepare = prepare
sys.argv = ["attncheck", "rmse", "--kernel", "ideal", "--kernel", "sdpa-math", "--variant",
            "causal", "--variant", "full", "--shape", "1x1x16x8", "-q"]
main()
"""
    run = warm_python.run("-c", program, cwd=tmp_path)
    assert run.returncode == 1, run.stderr
    assert "RuntimeError: planted" in run.stdout
    records = json.loads((tmp_path / "reports" / "rmse.json").read_text())["records"]
    assert sorted(r["status"] for r in records) == ["error", "pass", "pass", "pass"]


def test_help_lists_exit_codes_one_per_line(attncheck, run_fresh, tmp_path):
    run = run_fresh("--help", cwd=tmp_path)
    assert (run.returncode, run.stderr) == (0, "")
    assert "\\b" not in run.stdout
    assert "\b" not in run.stdout
    codes = [line.split()[0] for line in run.stdout.partition("Exit codes:\n")[2].splitlines()]
    assert codes == ["0", "1", "2", "3", "5", "130"]
    for verb in ("rmse", "list", "doctor"):
        assert "\\b" not in attncheck(verb, "--help", cwd=tmp_path).stdout


@pytest.mark.parametrize("form", ["{option} {value}", "{option}={value}"])
def test_reported_command_contains_no_folder(attncheck, tmp_path, form):
    folder = tmp_path / "some where"
    folder.mkdir()
    (folder / "mine.py").write_text(
        "from attncheck.subjects.ideal import Ideal\n"
        "class Mine(Ideal):\n    name, summary = 'mine', 'one of mine'\n"
    )
    options = {"--kernel": f"{folder}/mine.py::Mine", "--out": str(tmp_path / "out")}
    words = []
    for option, value in options.items():
        words += form.format(option=option, value="\0").split(" ")
        words[-1] = words[-1].replace("\0", value)
    run = attncheck("rmse", *QUICK[2:], *words, "-q", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    command = json.loads((tmp_path / "out" / "rmse.json").read_text())["command"]
    kernel = form.format(option="--kernel", value="mine.py::Mine")
    assert command == f"attncheck rmse {' '.join(QUICK[2:])} {kernel} -q"
    for path in (tmp_path / "out").iterdir():
        assert "some where" not in path.read_text()


@pytest.mark.parametrize("command", [("doctor", "--json"), ("list", "--json", "--support")])
def test_json_is_alone_on_stdout(run_fresh, tmp_path, command):
    run = run_fresh(*command, cwd=tmp_path)
    assert (run.returncode, run.stderr) == (0, "")
    assert isinstance(json.loads(run.stdout), dict)


def test_doctor_self_tests_pass(attncheck, tmp_path):
    tests = json.loads(attncheck("doctor", "--json", cwd=tmp_path).stdout)["self_tests"]
    assert [t for t in tests if not t["ok"]] == []
    assert {"triton", "triton-flash2", "ideal", "flex"} <= {t["name"] for t in tests}


def test_list_shows_the_support_table(attncheck, tmp_path):
    run = attncheck("list", "--support", cwd=tmp_path)
    assert run.returncode == 0
    for word in ("triton-flash2", "sliding_window", "bf16", "one_hot", "document", "softcap"):
        assert word in run.stdout
    table = run.stdout.partition("what supports what on ")[2]
    assert "ideal                   bf16: all" in table


@pytest.mark.parametrize("method", ["absent", "unsupported", "tiling", "prepare"])
def test_kernel_with_raising_method_fails_only_its_own_cells(attncheck, tmp_path, method):
    (tmp_path / "moody.py").write_text(
        "from attncheck.subjects.ideal import Ideal\n"
        "class Moody(Ideal):\n"
        "    name, summary = 'moody', 'raises'\n"
        f"    def {method}(self, *_):\n"
        "        raise ValueError('planted')\n"
    )
    kernels = ("--kernel", "moody.py::Moody", "--kernel", "sdpa-math")
    options = ("--variant", "causal", "--shape", "1x1x16x8", "--quiet")
    run = attncheck("rmse", *kernels, *options, cwd=tmp_path)
    assert (run.returncode, run.stderr) == (1, "")
    assert "ValueError: planted" in run.stdout
    records = json.loads((tmp_path / "reports" / "rmse.json").read_text())["records"]
    assert [r["status"] for r in records] == ["error", "pass"]


def test_run_without_time_is_incomplete(attncheck, tmp_path):
    words = ("rmse", *QUICK, "--variant", "full", "--max-time", "0.001s", "-q")
    run = attncheck(*words, cwd=tmp_path)
    assert run.returncode == 3
    assert "Incomplete: stopped by --max-time 0.001s after 0 of 4 cells." in run.stdout
    report = json.loads((tmp_path / "reports" / "rmse.json").read_text())
    assert report["incomplete"] == "stopped by --max-time 0.001s after 0 of 4 cells"
    again = attncheck("rmse", "--from", "reports/rmse.json", cwd=tmp_path)
    assert again.returncode == 3
    assert "Incomplete: " in again.stdout


@pytest.mark.parametrize(
    ("words", "code"), [(("--format", "typo"), 2), (("-q",), 0)], ids=["refused", "measured"]
)
def test_compile_processes_end_before_measuring_without_a_gpu(words, code, warm_python, tmp_path):
    """They must not compete with the measurements for the cores."""
    program = f"""
import sys
from attncheck.cli import main
from attncheck.subjects.ideal import Pass
from attncheck.verify import compile_ahead
class Started:
    ended = None
    def kill(self, seconds):
        print("ended", file=sys.stderr)
def start(kernels, device):
    print("started", *kernels, file=sys.stderr)
    return [Started()]
def outputs(self, measured=Pass.outputs):
    print("measured", file=sys.stderr)
    return measured(self)
compile_ahead.start_compilers, Pass.outputs = start, outputs
sys.argv = ["attncheck", "rmse", *{(*QUICK, *words)!r}]
main()
"""
    run = warm_python.run("-c", program, cwd=tmp_path)
    assert run.returncode == code, run.stderr
    assert run.stderr.startswith("started ideal\n")
    assert "ended\n" in run.stderr.partition("measured")[0]
    assert ("measured" in run.stderr) == (code == 0)

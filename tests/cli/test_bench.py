"""``attncheck bench`` on a CPU at tiny sizes: timing, verification, and incomplete runs."""

import csv
import json
import subprocess

import pytest

KERNELS = """
import time

import torch
import torch.nn.functional as F

WAIT = 0.0


def right(q, k, v, is_causal=False, scale=None):
    time.sleep(WAIT if q.shape[2] == 48 else 0)  # not while its capabilities are tried
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale)


def fast(q, k, v, is_causal=False, scale=None):
    if q.shape[2] < 40:
        return right(q, k, v, is_causal=is_causal, scale=scale)
    return torch.zeros_like(q) + v[:, :, :1].repeat_interleave(q.shape[1] // v.shape[1], 1)
"""
QUICK = ("--shape", "2x2x48x8", "--variant", "causal", "--dtype", "fp32", "-q", "--rounds", "3")
TORCH = ("--kernel", "sdpa-math", "--kernel", "sdpa-flash")


def report(folder):
    return json.loads((folder / "reports" / "bench.json").read_text())


@pytest.fixture(scope="module")
def quick(tmp_path_factory, run_fresh):
    folder = tmp_path_factory.mktemp("quick")
    return run_fresh("bench", *TORCH, *QUICK, "--plot", "bench.svg", cwd=folder), folder


def test_kernels_are_timed_and_verified_forward_and_backward(quick):
    run, folder = quick
    assert (run.returncode, run.stderr) == (0, "")
    results = report(folder)
    (cell,) = results["cells"]
    pairs = 2 * 2 * 48 * 49 // 2
    assert (cell["work"]["pairs"], cell["work"]["forward_flops"]) == (pairs, 4.0 * pairs * 8)
    assert cell["work"]["backward_flops"] == 2.5 * cell["work"]["forward_flops"]
    for row in cell["rows"]:
        assert row["record"]["status"] == "pass"
        assert row["verified"] == "sequence 0 of 2"
        assert [len(row[name]["seconds"]) for name in ("forward", "both")] == [3, 3]
        assert row["forward"]["clock"] == "cpu"
    assert results["matmul"]["fp32"] > 0
    assert results["copy"] > 0
    assert results["baseline"] == "sdpa-flash"


def test_every_output_file_has_the_results(quick):
    run, folder = quick
    assert "interpreted" in run.stdout
    assert "÷matmul" in run.stdout
    rows = list(csv.reader((folder / "reports" / "bench.csv").read_text().splitlines()))
    assert {"sdpa-math", "sdpa-flash"} <= {row[2] for row in rows if len(row) > 2}
    assert "sdpa-flash" in (folder / "reports" / "bench.md").read_text()
    image = (folder / "bench.svg").read_text()
    assert "forward and backward" in image
    assert "measured limit" in image
    assert "mathdefault" not in image


def test_report_verb_shows_the_same_table(attncheck, quick):
    run, folder = quick
    again = attncheck("report", "reports/bench.json", cwd=folder)
    assert (again.returncode, again.stdout) == (0, run.stdout)


def test_fast_wrong_kernel_fails(attncheck, project):
    words = ("--kernel", "mine.py::fast", "--kernel", "sdpa-flash", "--forward")
    run = attncheck("bench", *QUICK, *words, cwd=project)
    assert run.returncode == 1, run.stderr
    (cell,) = report(project)["cells"]
    statuses = {row["record"]["kernel"]: row["record"]["status"] for row in cell["rows"]}
    assert statuses == {"mine.py::fast": "fail", "sdpa-flash": "pass"}
    assert cell["rows"][0]["forward"] is not None
    assert "fail ¹" in run.stdout


def test_against_compares_with_another_commit(attncheck, project):
    for words in ("init -q", "add mine.py", "commit -qm first"):
        identity = ("-c", "user.name=x", "-c", "user.email=x@x")
        subprocess.run(["git", *identity, *words.split()], cwd=project, check=True)
    (project / "mine.py").write_text(KERNELS.replace("WAIT = 0.0", "WAIT = 0.005"))
    words = ("--kernel", "mine.py::right", "--against", "HEAD", "--forward", "--rounds", "12")
    run = attncheck("bench", *QUICK, *words, cwd=project)
    assert run.returncode == 1, run.stderr
    results = report(project)
    (change,) = results["changes"]
    assert (change["kernel"], change["finding"]) == ("mine.py::right", "slower")
    assert change["ratio"] > 2
    names = [row["record"]["kernel"] for row in results["cells"][0]["rows"]]
    assert names == ["mine.py::right", "mine.py::right @HEAD"]
    assert "The chance that any of these is wrong is at most 1%" in run.stdout


def test_gate_can_end_with_a_bench(attncheck, project):
    words = ("mine.py::right", "--stage", "probes", "--dtype", "fp32", "--out", "reports", "-q")
    run = attncheck("gate", *words, "--tier", "smoke", "--bench", "--device", "cpu", cwd=project)
    assert run.returncode == 0, run.stderr
    assert "attncheck: bench: 4 cells in 20 rounds: 4 pass." in run.stderr
    assert {
        row["record"]["kernel"] for cell in report(project)["cells"] for row in cell["rows"]
    } == {"mine.py::right"}


def test_run_stopped_by_max_time_reports_finished_cells(attncheck, project):
    words = ("--kernel", "mine.py::right", "--variant", "full", "--forward", "--max-time", "4s")
    (project / "mine.py").write_text(KERNELS.replace("WAIT = 0.0", "WAIT = 0.3"))
    run = attncheck("bench", *QUICK, *words, "--variant", "alibi", "--rounds", "7", cwd=project)
    results = report(project)
    assert results["incomplete"].startswith("stopped by --max-time 4s after ")
    assert len(results["cells"]) < 3
    assert run.returncode == (3 if results["cells"] else 5)
    assert "Incomplete" in run.stdout


def test_large_problem_is_verified_on_its_last_rows(monkeypatch):
    """The exact result of every row would take too long on a CPU."""
    from attncheck.bench import measure
    from attncheck.bench.tables import bench_plan
    from attncheck.subjects.torch_kernels import Sdpa

    monkeypatch.setattr(measure, "_MOST_PAIRS", {"cpu": 64})
    (planned,) = bench_plan((), shapes=["2x2x64x8"], variants=["causal"], dtypes=["fp32"])

    class LastRow(Sdpa):
        name = "last row"

        def prepare(self, inputs):
            call = super().prepare(inputs)

            def wrong():
                outputs = call()
                outputs.out[:, :, -1] = 0
                return outputs

            return wrong

    subjects = [Sdpa("math"), LastRow("math")]
    (cell,) = measure.time_cells([planned], subjects, device="cpu", rounds=1)
    right, wrong = cell.rows
    assert (right.record.status, wrong.record.status) == ("pass", "fail")
    assert right.verified.startswith("sequence 0 of 2, rows ")
    assert right.verified.endswith("63: no gradients")


def test_kernel_that_raises_while_timed_is_dropped():
    from attncheck.bench.measure import time_cells
    from attncheck.bench.tables import bench_plan
    from attncheck.subjects.torch_kernels import Sdpa

    class Tires(Sdpa):
        name = "tires"

        def prepare(self, inputs):
            call, calls_left = super().prepare(inputs), iter(range(3))

            def tired():
                if next(calls_left, None) is None:
                    raise RuntimeError("tired")
                return call()

            return tired

    (planned,) = bench_plan((), shapes=["1x1x16x8"], variants=["full"], backward=False)
    (cell,) = time_cells([planned], [Tires("math"), Sdpa("math")], device="cpu", rounds=5)
    tires, other = cell.rows
    assert tires.record.status == "error"
    assert tires.record.reason.startswith("RuntimeError: tired at test_bench.py:")
    assert tires.forward is None
    assert len(other.forward.seconds) == 5


def test_large_problem_gradients_are_verified_on_fewer_heads(monkeypatch):
    """The exact gradients of every head would take too long on a CPU."""
    from attncheck.bench import measure
    from attncheck.bench.tables import bench_plan
    from attncheck.subjects.torch_kernels import Sdpa

    monkeypatch.setattr(measure, "_MOST_PAIRS", {"cpu": 3 * 2 * 64 * 64})
    (planned,) = bench_plan((), shapes=["2x4/2x64x8"], variants=["causal"], dtypes=["fp32"])

    class WrongKeys(Sdpa):
        name = "wrong keys"

        def prepare(self, inputs):
            call = super().prepare(inputs)

            def wrong():
                outputs = call()
                if outputs.dk is not None:
                    outputs.dk[:, 0] *= 1.01
                return outputs

            return wrong

    subjects = [Sdpa("math"), WrongKeys("math")]
    (cell,) = measure.time_cells([planned], subjects, device="cpu", rounds=1)
    right, wrong = cell.rows
    assert (right.record.status, wrong.record.status) == ("pass", "fail")
    assert wrong.record.judgement.worst.tensor == "dk"
    assert right.verified == "sequence 0 of 2, heads 0–1 of 4"

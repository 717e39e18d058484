"""``attncheck faults``: scores, exit codes, refusals, and resumed runs."""

import json
import os
import types
from pathlib import Path

import msgspec
import pytest
import torch

from attncheck.cli.faults import planted_header
from attncheck.cli.long_runs import worker_places
from attncheck.faults.fault_selection import select_from_file
from attncheck.records.fault_scores import FaultScore
from attncheck.workers.journal import Journal
from attncheck.workers.units import UnitResult

FAULTY_KERNELS = Path(__file__).parents[1] / "faults" / "faulty_kernels.py"


@pytest.fixture
def run(attncheck, tmp_path):
    """``run(word, …)`` in an empty folder."""

    def run(*words):
        return attncheck("faults", *words, cwd=tmp_path)

    return run


def outcomes(folder):
    report = json.loads((folder / "r.json").read_text())
    return {score["fault"]: score["outcome"] for score in report["scores"]}


def test_kernel_file_is_scored(run, tmp_path):
    words = ["--kernel-file", str(FAULTY_KERNELS), "--fault", "next key", "--fault", "none"]
    result = run(*words, "--device", "cpu", "--json", "r.json", "--md", "r.md", "-q")
    assert result.returncode == 1, result.stderr
    assert outcomes(tmp_path) == {"next key": "caught", "none": "missed"}
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["command"].startswith("attncheck faults --kernel-file faulty_kernels.py")
    assert "| next key |" in (tmp_path / "r.md").read_text()
    assert "1 of 2 faults caught." in result.stdout


def test_kernel_that_exits_its_process_is_caught_as_crash(run, tmp_path):
    words = ["--kernel-file", str(FAULTY_KERNELS), "--fault", "exit", "--jobs", "1"]
    result = run(*words, "--device", "cpu", "--json", "r.json", "-q")
    assert result.returncode == 0, result.stderr
    (score,) = json.loads((tmp_path / "r.json").read_text())["scores"]
    assert score["caught"]["first"]["status"] == "crash"


def test_interrupted_run_resumes(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    selection = select_from_file(
        FAULTY_KERNELS, names=["next key", "exit"], device="cpu", tier="smoke"
    )
    head = planted_header(selection, device="cpu", tier="smoke", file=FAULTY_KERNELS)
    first = FaultScore(fault="exit", category="own", host="file", outcome="caught", problems=4321)
    with Journal.open(Path("reports/faults/results.jsonl"), head, resume=False) as journal:
        journal.write_queued(selection.units)
        unit = selection.units[1]
        journal.write_start(unit)
        facts = {"score": msgspec.to_builtins(first), "kind": "fault"}
        journal.write_result(UnitResult(unit=unit.id, facts=facts))
        journal.end("interrupted")
    words = ["--kernel-file", str(FAULTY_KERNELS), "--fault", "next key", "--fault", "exit"]
    result = run(*words, "--device", "cpu", "--json", "r.json", "-q")
    assert result.returncode == 0, result.stderr
    assert "goes on with reports/faults/results.jsonl, 1 of 2 done" in result.stderr
    assert outcomes(tmp_path) == {"next key": "caught", "exit": "caught"}
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["scores"][-1]["problems"] == 4321  # the finished score is reused


def test_unfinished_other_run_is_not_overwritten(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    selection = select_from_file(FAULTY_KERNELS, names=["exit"], device="cpu", tier="smoke")
    head = planted_header(selection, device="cpu", tier="smoke", file=FAULTY_KERNELS)
    with Journal.open(Path("reports/faults/results.jsonl"), head, resume=False) as journal:
        journal.write_queued(selection.units)
        journal.end("interrupted")
    result = run("--kernel-file", str(FAULTY_KERNELS), "--fault", "none", "--device", "cpu", "-q")
    assert result.returncode == 3
    assert "holds another run" in result.stderr
    assert "--fresh" in result.stderr


def test_max_time_leaves_the_rest_unscored(run):
    words = ["--kernel-file", str(FAULTY_KERNELS), "--fault", "none", "--device", "cpu", "-q"]
    result = run(*words, "--max-time", "0.001")
    assert result.returncode == 3
    assert "time is up at 0 of 1: the same command goes on" in result.stderr
    assert "1 have no score: time is up." in " ".join(result.stdout.split())


def test_list_names_the_hosts_of_each_fault(run):
    result = run("--list", "--host", "ideal", "--device", "cpu")
    assert result.returncode == 0, result.stderr
    (line,) = [
        each for each in result.stdout.splitlines() if each.startswith("missing-alpha-on-acc ")
    ]
    assert line.startswith("missing-alpha-on-acc (online softmax; ideal and triton): the output so")


KERNEL = """
def attention(query, key, value, is_causal=False):
    import torch.nn.functional

    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value + 0.5 - 0.5 * 1.0, is_causal=is_causal
    )
"""


def test_mutants_of_a_kernel_are_scored(run, tmp_path):
    (tmp_path / "mine.py").write_text(KERNEL)
    mutants = ["--mutants", "mine.py::attention"]
    listed = run(*mutants, "--list").stdout.splitlines()
    assert "mine:drop-term:6:20" in listed
    options = ["--fault", "mine:drop-term:6:20", "--json", "r.json", "--jobs", "1", "-q"]
    result = run(*mutants, *options)
    assert result.returncode == 0, result.stderr
    (score,) = json.loads((tmp_path / "r.json").read_text())["scores"]
    assert (score["outcome"], score["tool"]) == ("caught", "check")
    assert "1 of 1 mutants caught, 0 of 1 named." in result.stdout


@pytest.mark.parametrize(
    ("cores", "gpus", "memory", "count"),
    [
        (16, 1, 141, 16),
        (16, 1, 24, 4),
        (8, 1, 141, 8),
        (64, 2, 80, 32),
        (16, 1, 79, 16),
        (2, 1, 80, 2),
    ],
)
def test_gpu_worker_count_is_limited_by_cores_and_memory(cores, gpus, memory, count, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    card = types.SimpleNamespace(total_memory=memory << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    places = worker_places(None, "cuda")
    assert len(places) == count
    assert {place.gpu for place in places} == {str(n) for n in range(min(gpus, count))}
    assert len(worker_places(3, "cuda")) == 3
    assert len(worker_places(None, "cpu")) == min(cores, 4)

"""``attncheck faults``: scores, exit codes, what it refuses, and a run that goes on."""

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

OWN = Path(__file__).parents[1] / "faults" / "faulty_kernels.py"


@pytest.fixture
def run(attncheck, tmp_path):
    """``run(word, …)`` in an empty folder."""

    def run(*words):
        return attncheck("faults", *words, cwd=tmp_path)

    return run


def outcomes(folder):
    report = json.loads((folder / "r.json").read_text())
    return {score["fault"]: score["outcome"] for score in report["scores"]}


def test_a_file_of_faults_is_scored(run, tmp_path):
    """One is caught; one is no fault."""
    words = ["--kernel-file", str(OWN), "--fault", "next key", "--fault", "none"]
    done = run(*words, "--device", "cpu", "--json", "r.json", "--md", "r.md", "-q")
    assert done.returncode == 1, done.stderr
    assert outcomes(tmp_path) == {"next key": "caught", "none": "missed"}
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["command"].startswith("attncheck faults --kernel-file faulty_kernels.py")
    assert "| next key |" in (tmp_path / "r.md").read_text()
    assert "1 of 2 faults caught." in done.stdout


def test_a_kernel_that_ends_its_process_is_asked_in_one_of_its_own(run, tmp_path):
    words = ["--kernel-file", str(OWN), "--fault", "exit", "--jobs", "1"]
    done = run(*words, "--device", "cpu", "--json", "r.json", "-q")
    assert done.returncode == 0, done.stderr
    (score,) = json.loads((tmp_path / "r.json").read_text())["scores"]
    assert score["caught"]["first"]["status"] == "crash"


def test_a_run_goes_on_where_it_was(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    these = select_from_file(OWN, names=["next key", "exit"], device="cpu", tier="smoke")
    head = planted_header(these, device="cpu", tier="smoke", file=OWN)
    first = FaultScore(fault="exit", category="own", host="file", outcome="caught", problems=4321)
    with Journal.open(Path("reports/faults/results.jsonl"), head, resume=False) as journal:
        journal.queued(these.units)
        unit = these.units[1]
        journal.begun(unit)
        facts = {"score": msgspec.to_builtins(first), "kind": "fault"}
        journal.done(UnitResult(unit=unit.id, facts=facts))
        journal.end("interrupted")
    words = ["--kernel-file", str(OWN), "--fault", "next key", "--fault", "exit"]
    done = run(*words, "--device", "cpu", "--json", "r.json", "-q")
    assert done.returncode == 0, done.stderr
    assert "goes on with reports/faults/results.jsonl, 1 of 2 done" in done.stderr
    assert outcomes(tmp_path) == {"next key": "caught", "exit": "caught"}
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["scores"][-1]["problems"] == 4321  # what was done is not done again


def test_another_run_that_is_not_finished_is_left_alone(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    these = select_from_file(OWN, names=["exit"], device="cpu", tier="smoke")
    head = planted_header(these, device="cpu", tier="smoke", file=OWN)
    with Journal.open(Path("reports/faults/results.jsonl"), head, resume=False) as journal:
        journal.queued(these.units)
        journal.end("interrupted")
    done = run("--kernel-file", str(OWN), "--fault", "none", "--device", "cpu", "-q")
    assert done.returncode == 3
    assert "holds another run" in done.stderr
    assert "--fresh" in done.stderr


def test_time_that_is_up_leaves_the_rest_unscored(run):
    words = ["--kernel-file", str(OWN), "--fault", "none", "--device", "cpu", "-q"]
    done = run(*words, "--max-time", "0.001")
    assert done.returncode == 3
    assert "time is up at 0 of 1: the same command goes on" in done.stderr
    assert "1 have no score: time is up." in " ".join(done.stdout.split())


def test_the_list_says_where_each_is_planted(run):
    done = run("--list", "--host", "ideal", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    (line,) = [
        each for each in done.stdout.splitlines() if each.startswith("missing-alpha-on-acc ")
    ]
    assert line.startswith("missing-alpha-on-acc (online softmax; ideal and triton): the output so")


STRANGER = """
def attention(query, key, value, is_causal=False):
    import torch.nn.functional

    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value + 0.5 - 0.5 * 1.0, is_causal=is_causal
    )
"""


def test_mutants_of_a_file_are_scored(run, tmp_path):
    (tmp_path / "mine.py").write_text(STRANGER)
    mutants = ["--mutants", "mine.py::attention"]
    listed = run(*mutants, "--list").stdout.splitlines()
    assert "mine:drop-term:6:20" in listed
    asked = ["--fault", "mine:drop-term:6:20", "--json", "r.json", "--jobs", "1", "-q"]
    done = run(*mutants, *asked)
    assert done.returncode == 0, done.stderr
    (score,) = json.loads((tmp_path / "r.json").read_text())["scores"]
    assert (score["outcome"], score["tool"]) == ("caught", "check")
    assert "1 of 1 mutants caught, 0 of 1 named." in done.stdout


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
def test_workers_of_a_gpu_are_as_many_as_there_are_cores_and_memory_for(
    cores, gpus, memory, count, monkeypatch
):
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

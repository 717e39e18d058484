"""``in_processes.py``: tasks in several processes, a time limit, and the choice of GPUs."""

import json
import math
import multiprocessing
import os

import pytest
from in_processes import _choose_gpu, finished, write_json


@pytest.mark.parametrize("processes", [1, 2])
def test_every_task_is_done_once(processes, monkeypatch):
    for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
        monkeypatch.setenv(name, "1")  # ``finished`` sets them; pytest restores them
    # Another process can import math.sqrt, but no function of this file.
    results = finished(math.sqrt, [n * n for n in range(9)], processes=processes, seconds=math.inf)
    assert sorted(results) == list(range(9))


def test_no_task_is_begun_after_the_time_limit():
    assert list(finished(math.sqrt, range(9), processes=1, seconds=-1.0)) == []


def test_one_process_yields_each_result_before_the_next_task():
    begun = []

    def work(number):
        begun.append(number)
        return number

    results = finished(work, range(3), processes=1, seconds=math.inf)
    assert next(results) == 0
    assert begun == [0]


def test_written_file_replaces_the_old_one_and_leaves_no_other(tmp_path):
    path = tmp_path / "new" / "rows.json"
    write_json(path, {"rows": [1.5, math.inf]})
    write_json(path, {"rows": []})
    assert json.loads(path.read_text()) == {"rows": []}
    assert [p.name for p in path.parent.iterdir()] == ["rows.json"]


def test_processes_use_the_gpus_round_robin(monkeypatch):
    begun, chosen = multiprocessing.Value("i", 0), []
    for _ in range(5):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        _choose_gpu(begun, ["4", "6"])
        chosen.append(os.environ["CUDA_VISIBLE_DEVICES"])
    assert chosen == ["4", "6", "4", "6", "4"]


@pytest.mark.parametrize("gpus", [[], ["0"]])
def test_no_gpu_is_chosen_where_there_are_not_several(monkeypatch, gpus):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    _choose_gpu(multiprocessing.Value("i", 0), gpus)
    assert "CUDA_VISIBLE_DEVICES" not in os.environ

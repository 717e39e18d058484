"""Work in processes is all done, or what is not done is not begun."""

import json
import math
import multiprocessing
import os

import pytest
from in_processes import _choose_gpu, finished, write_json


def squared(number):
    return number * number


@pytest.mark.parametrize("processes", [1, 2])
def test_every_task_is_done_once(processes, monkeypatch):
    for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
        monkeypatch.setenv(name, "1")  # what it sets for its processes is undone here
    # math.sqrt: a function that another process can import, as this test's own it cannot.
    done = finished(math.sqrt, [n * n for n in range(9)], processes=processes, seconds=math.inf)
    assert sorted(done) == list(range(9))


def test_nothing_is_begun_after_the_time_is_over():
    assert list(finished(squared, range(9), processes=1, seconds=-1.0)) == []


def test_what_one_process_does_comes_as_it_is_done():
    begun = []

    def work(number):
        begun.append(number)
        return number

    parts = finished(work, range(3), processes=1, seconds=math.inf)
    assert next(parts) == 0
    assert begun == [0]


def test_a_file_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "new" / "found.json"
    write_json(path, {"rows": [1.5, math.inf]})
    write_json(path, {"rows": []})
    assert json.loads(path.read_text()) == {"rows": []}
    assert [p.name for p in path.parent.iterdir()] == ["found.json"]


def test_processes_take_the_gpus_in_turn(monkeypatch):
    begun, seen = multiprocessing.Value("i", 0), []
    for _ in range(5):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        _choose_gpu(begun, ["4", "6"])
        seen.append(os.environ["CUDA_VISIBLE_DEVICES"])
    assert seen == ["4", "6", "4", "6", "4"]


@pytest.mark.parametrize("gpus", [[], ["0"]])
def test_without_a_choice_nothing_is_set(monkeypatch, gpus):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    _choose_gpu(multiprocessing.Value("i", 0), gpus)
    assert "CUDA_VISIBLE_DEVICES" not in os.environ

"""Each process of pytest-xdist has a GPU of its own."""

from __future__ import annotations

import os

import pytest
import torch

from attncheck.suite.pytest_options import choose_gpu


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What became the current device, where CUDA was used already."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return chosen


@pytest.mark.parametrize(("worker", "gpu"), [("gw0", "0"), ("gw3", "3"), ("gw6", "2")])
def test_they_take_turns(monkeypatch, four_gpus, worker: str, gpu: str) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
    choose_gpu()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == gpu


def test_of_those_that_are_visible(monkeypatch, four_gpus) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5,3,1")
    choose_gpu()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "5"


def test_where_cuda_was_used_it_becomes_the_current_one(monkeypatch, four_gpus) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw5")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    choose_gpu()
    assert four_gpus == [1]
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_a_process_alone_sees_them_all(monkeypatch, four_gpus) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "")
    choose_gpu()
    assert "CUDA_VISIBLE_DEVICES" not in os.environ

"""Limits and clock of the machine; the NVML library of the driver is simulated."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

from attncheck.bench import machine
from attncheck.bench.machine import machine_limits, sm_clock


def test_machine_limits_measures_products_and_copy(monkeypatch):
    monkeypatch.setattr(machine, "_PRODUCT", {"cpu": 64})
    monkeypatch.setattr(machine, "_COPIED", {"cpu": 1 << 16})
    rates, copied = machine_limits(["fp32", "bf16"], "cpu")
    assert list(rates) == ["fp32", "bf16"]
    assert min(*rates.values(), copied) > 0


def test_dtype_without_a_product_is_omitted(monkeypatch):
    def fail(*_):
        raise RuntimeError("not implemented")

    monkeypatch.setattr(machine, "_COPIED", {"cpu": 1 << 16})
    monkeypatch.setattr(machine, "_product", fail)
    assert machine_limits(["e5m2"], "cpu")[0] == {}


@pytest.fixture
def driver(monkeypatch):
    """A simulated NVML whose clock starts at 1,980 MHz and rises by 15 MHz with each reading."""
    state = SimpleNamespace(name=b"", mhz=1965, lookup_error=0)

    def by_uuid(name, handle):
        state.name = name
        return state.lookup_error

    def clock(handle, which, value):
        assert which == 1
        state.mhz += 15
        value._obj.value = state.mhz
        return 0

    library = SimpleNamespace(
        nvmlInit_v2=lambda: 0,
        nvmlDeviceGetHandleByUUID=by_uuid,
        nvmlDeviceGetClockInfo=clock,
    )
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="12-34")
    )
    return state


def test_sm_clock_reads_the_gpu_that_torch_uses(driver):
    now = sm_clock("cuda")
    assert driver.name == b"GPU-12-34"
    assert (now(), now()) == (1980, 1995)


def test_sm_clock_is_none_on_a_cpu_or_without_a_working_nvml(driver, monkeypatch):
    assert sm_clock("cpu")() is None
    driver.lookup_error = 6
    assert sm_clock("cuda")() is None

    def absent(_):
        raise OSError("no such file")

    monkeypatch.setattr(ctypes, "CDLL", absent)
    assert sm_clock("cuda")() is None

"""What the machine does at best; the driver's library is played by a stand-in."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

from attncheck.bench import machine
from attncheck.bench.machine import machine_limits, sm_clock


def test_products_and_a_copy_have_a_rate(monkeypatch):
    monkeypatch.setattr(machine, "_PRODUCT", {"cpu": 64})
    monkeypatch.setattr(machine, "_COPIED", {"cpu": 1 << 16})
    rates, copied = machine_limits(["fp32", "bf16"], "cpu")
    assert list(rates) == ["fp32", "bf16"]
    assert min(*rates.values(), copied) > 0


def test_a_dtype_without_a_product_is_left_out(monkeypatch):
    def refuses(*_):
        raise RuntimeError("not implemented")

    monkeypatch.setattr(machine, "_COPIED", {"cpu": 1 << 16})
    monkeypatch.setattr(machine, "_product", refuses)
    assert machine_limits(["e5m2"], "cpu")[0] == {}


@pytest.fixture
def driver(monkeypatch):
    """Its library, whose clock counts up by 15 MHz from 1,980 on."""
    told = SimpleNamespace(name=b"", mhz=1965, init=0, found=0)

    def by_name(name, handle):
        told.name = name
        return told.found

    def clock(handle, which, value):
        assert which == 1
        told.mhz += 15
        value._obj.value = told.mhz
        return 0

    library = SimpleNamespace(
        nvmlInit_v2=lambda: told.init,
        nvmlDeviceGetHandleByUUID=by_name,
        nvmlDeviceGetClockInfo=clock,
    )
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="12-34")
    )
    return told


def test_the_clock_is_that_of_the_gpu_that_torch_uses(driver):
    now = sm_clock("cuda")
    assert driver.name == b"GPU-12-34"
    assert (now(), now()) == (1980, 1995)


def test_nobody_says_what_the_clock_is(driver, monkeypatch):
    assert sm_clock("cpu")() is None
    driver.found = 6
    assert sm_clock("cuda")() is None

    def absent(_):
        raise OSError("no such file")

    monkeypatch.setattr(ctypes, "CDLL", absent)
    assert sm_clock("cuda")() is None

"""Which faults are scored where, and what needs no kernel to run."""

from __future__ import annotations

import pytest

from attncheck.core.errors import UsageError
from attncheck.faults import catalogue
from attncheck.faults.catalogue import Control, Fault, Host
from attncheck.faults.fault_selection import priority, select_faults

RIGHT = Host(kernel="ideal", dtypes=("fp16", "bf16"))


def fault(name, **hosts):
    return Fault(
        id=name,
        category="gqa",
        summary="s",
        when="w",
        seen="s",
        reports="x",
        **hosts,
        unplanted="" if hosts else "nothing makes it",
    )


@pytest.fixture
def few(monkeypatch):
    """A catalogue of one fault of each kind, and a control."""
    faults = (
        fault("both", ideal=RIGHT, triton=RIGHT),
        fault("triton-alone", triton=RIGHT),
        fault("none", ideal=Host(kernel="ideal", equivalent="the same bits")),
        fault("gpu", triton=Host(kernel="triton-flash2", needs="cuda")),
        fault("nowhere"),
    )
    monkeypatch.setattr(catalogue, "FAULTS", {one.id: one for one in faults})
    controls = {"control": Control(id="control", summary="s", why="w", ideal=RIGHT)}
    monkeypatch.setattr("attncheck.faults.fault_selection.FAULTS", catalogue.FAULTS)
    monkeypatch.setattr("attncheck.faults.fault_selection.CONTROLS", controls)
    monkeypatch.setattr(catalogue, "CONTROLS", controls)


def of(hosts, *, names=(), categories=(), controls=True, device="cpu"):
    return select_faults(
        hosts=hosts,
        names=names,
        categories=categories,
        controls=controls,
        device=device,
        tier="smoke",
    )


def test_each_is_asked_where_it_is_planted(few):
    these = of(("ideal", "triton"))
    kernels = ["both@ideal", "control@ideal", "both@triton", "triton-alone@triton"]
    assert [unit.kernel for unit in these.units] == kernels
    assert {unit.dtype for unit in these.units} == {"fp16"}
    assert len({unit.id for unit in these.units}) == len(kernels)
    settled = {(score.fault, score.host): score.outcome for score in these.settled}
    assert settled == {
        ("none", "ideal"): "equivalent",
        ("nowhere", ""): "unplanted",
        ("gpu", "triton"): "not asked (needs cuda)",
    }


def test_what_needs_a_gpu_is_asked_on_one(few):
    kernels = [unit.kernel for unit in of(("triton",), device="cuda").units]
    assert kernels == ["both@triton", "triton-alone@triton", "gpu@triton"]


def test_controls_are_asked_last(few):
    units = of(("ideal", "triton")).units
    assert sorted(units, key=priority)[-1].kernel == "control@ideal"


def test_a_fault_that_is_named_and_is_planted_elsewhere_is_refused(few):
    with pytest.raises(UsageError, match="'triton-alone' is not planted in host ideal: choose t"):
        of(("ideal",), names=["triton-alone"])
    assert of(("ideal",), names=["nowhere"]).settled[0].reason == "nothing makes it"


def test_a_category_leaves_controls_out(few):
    assert "control@ideal" not in of(("ideal",), categories=["gqa"]).names
    with pytest.raises(UsageError, match="none of the faults is of category softcap"):
        of(("ideal",), categories=["softcap"])

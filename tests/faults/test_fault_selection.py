"""Which faults are scored in which host, and which outcomes need no run of a kernel."""

from __future__ import annotations

import pytest

from attncheck.core.errors import UsageError
from attncheck.faults import catalogue
from attncheck.faults.catalogue import Control, Fault, Host
from attncheck.faults.fault_selection import priority, select_faults

PLANTED = Host(kernel="ideal", dtypes=("fp16", "bf16"))


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


@pytest.fixture(autouse=True)
def _small_catalogue(monkeypatch):
    """One fault of each kind, and a control."""
    faults = (
        fault("both", ideal=PLANTED, triton=PLANTED),
        fault("triton-alone", triton=PLANTED),
        fault("none", ideal=Host(kernel="ideal", equivalent="the same bits")),
        fault("gpu", triton=Host(kernel="triton-flash2", needs="cuda")),
        fault("nowhere"),
    )
    monkeypatch.setattr(catalogue, "FAULTS", {each.id: each for each in faults})
    controls = {"control": Control(id="control", summary="s", why="w", ideal=PLANTED)}
    monkeypatch.setattr("attncheck.faults.fault_selection.FAULTS", catalogue.FAULTS)
    monkeypatch.setattr("attncheck.faults.fault_selection.CONTROLS", controls)
    monkeypatch.setattr(catalogue, "CONTROLS", controls)


def select(hosts, *, names=(), categories=(), controls=True, device="cpu"):
    return select_faults(
        hosts=hosts,
        names=names,
        categories=categories,
        controls=controls,
        device=device,
        tier="smoke",
    )


def test_faults_are_scored_in_every_host_they_are_planted_in():
    selection = select(("ideal", "triton"))
    kernels = ["both@ideal", "control@ideal", "both@triton", "triton-alone@triton"]
    assert [unit.kernel for unit in selection.units] == kernels
    assert {unit.dtype for unit in selection.units} == {"fp16"}
    assert len({unit.id for unit in selection.units}) == len(kernels)
    settled = {(score.fault, score.host): score.outcome for score in selection.settled}
    assert settled == {
        ("none", "ideal"): "equivalent",
        ("nowhere", ""): "unplanted",
        ("gpu", "triton"): "not asked (needs cuda)",
    }


def test_fault_that_needs_a_gpu_is_scored_on_cuda():
    kernels = [unit.kernel for unit in select(("triton",), device="cuda").units]
    assert kernels == ["both@triton", "triton-alone@triton", "gpu@triton"]


def test_controls_have_the_lowest_priority():
    units = select(("ideal", "triton")).units
    assert sorted(units, key=priority)[-1].kernel == "control@ideal"


def test_named_fault_that_is_not_planted_in_the_host_is_refused():
    with pytest.raises(UsageError, match="'triton-alone' is not planted in host ideal: choose t"):
        select(("ideal",), names=["triton-alone"])
    assert select(("ideal",), names=["nowhere"]).settled[0].reason == "nothing makes it"


def test_selection_by_category_leaves_controls_out():
    assert "control@ideal" not in select(("ideal",), categories=["gqa"]).names
    with pytest.raises(UsageError, match="none of the faults is of category softcap"):
        select(("ideal",), categories=["softcap"])

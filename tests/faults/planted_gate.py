"""A fault planted and asked about by a gate in this process, up to its first wrong answer."""

from __future__ import annotations

import heapq
import tempfile
from pathlib import Path

from attncheck.faults.catalogue import fault_named
from attncheck.faults.planting import plant
from attncheck.gate.choices import Choices
from attncheck.gate.gate_worker import Gate
from attncheck.gate.plan import Known, describing, priority
from attncheck.records.record import FAILED_STATUSES


def caught(fault_id, host, *, dtype=None, stages="", tier="smoke"):
    """The Record of the first wrong answer, not made smaller; None where all is right.

    ``stages``: names between commas, all unless told. ``dtype``: the host's first unless told.
    """
    fault = fault_named(fault_id)
    options = {"tier": tier, "isolated": False, "dtypes": dtype or fault.hosts[host].dtypes[0]}
    choices = Choices.of(options | ({"stages": stages} if stages else {}))
    with tempfile.TemporaryDirectory() as folder:
        gate = Gate(choices, Known(()))
        try:
            return _first_wrong(gate, plant(fault, host, Path(folder)), tier)
        finally:
            gate.close()


def _first_wrong(gate, kernel, tier):
    queue, seen = [], set()

    def add(units):
        for unit in units:
            if unit.kind != "shrink" and unit.id not in seen:
                seen.add(unit.id)
                heapq.heappush(queue, (priority(unit), len(seen), unit))

    add(describing([kernel], device="cpu", tier=tier, convention=""))
    while queue:
        *_, unit = heapq.heappop(queue)
        done = gate.do(unit)
        assert not done.harness, done.harness
        for answer in done.answers:
            if answer.record.status in FAILED_STATUSES:
                return answer.record
        add(done.units)
    return None

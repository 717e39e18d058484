"""A gate without lanes: its work done in this process, in the order in which lanes would do it."""

import heapq
from pathlib import Path

from attncheck.gate.gate_worker import GateWorker
from attncheck.gate.plan import describe_units, priority
from attncheck.gate.planning import Choices
from attncheck.gate.property_stage import KnownFailures
from attncheck.records.record import FAILED_STATUSES

PLANTED = Path(__file__).with_name("planted_kernels.py")


def named(name):
    return f"{PLANTED}::{name}"


def choices(**options):
    usual = {"tier": "smoke", "isolated": False, "dtypes": "fp32"}
    return Choices.of(usual | options)


def drive(kernel, *, first=False, most=10_000, **options):
    """Every result by its unit's id; with ``first`` until an answer is wrong and made smaller."""
    chosen = choices(**options)
    gate, queue, units, results = GateWorker(chosen, KnownFailures(())), [], {}, {}
    tier = chosen.tier.name

    def add(new):
        for unit in new:
            if unit.id not in units:
                units[unit.id] = unit
                heapq.heappush(queue, (priority(unit), len(units), unit))

    add(describe_units([kernel], device="cpu", tier=tier, convention=""))
    while queue and len(results) < most:
        *_, unit = heapq.heappop(queue)
        done = gate.do(unit)
        assert not done.harness, done.harness
        results[unit.id] = done
        if first and any(answer.record.status in FAILED_STATUSES for answer in done.answers):
            for smaller in done.units:
                results[smaller.id] = gate.do(smaller)
            break
        add(done.units)
    gate.close()
    return units, results


def answers(results):
    return [answer for done in results.values() for answer in done.answers]

"""A gate without lanes: its work done in this process, in the order in which lanes would do it."""

import heapq
import subprocess
from pathlib import Path

from attncheck.cases.tier import tier_named
from attncheck.gate.gate_worker import GateWorker
from attncheck.gate.plan import describe_units, priority
from attncheck.gate.planning import Choices, parse_stages
from attncheck.gate.property_stage import KnownFailures
from attncheck.records.record import FAILED_STATUSES

PLANTED = Path(__file__).with_name("planted_kernels.py")


def git(folder, *words):
    """What git prints, run by somebody who signs nothing."""
    who = ("-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    command = ["git", *who, "-C", str(folder), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def named(name):
    return f"{PLANTED}::{name}"


def choices(*, tier="smoke", dtypes="fp32", stages="", **options):
    """Choices of names as they are typed, commas between them."""
    return Choices(
        tier=tier_named(tier),
        dtypes=tuple(filter(None, dtypes.split(","))),
        stages=parse_stages([name for name in stages.split(",") if name]),
        **{"isolated": False} | options,
    )


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

"""A gate without lanes: its units run in this process, in the order that lanes would use."""

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
    """Runs git as a user who signs nothing, and returns what it prints."""
    identity = ("-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    command = ["git", *identity, "-C", str(folder), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def planted(name):
    """The name of a kernel of ``planted_kernels.py``."""
    return f"{PLANTED}::{name}"


def choices(*, tier="smoke", dtypes="fp32", stages="", **options):
    """Choices as typed on the command line, with commas between names."""
    return Choices(
        tier=tier_named(tier),
        dtypes=tuple(filter(None, dtypes.split(","))),
        stages=parse_stages([name for name in stages.split(",") if name]),
        **{"isolated": False} | options,
    )


def drive(kernel, *, first=False, most=10_000, **options):
    """Results by unit id; with ``first``, up to the first wrong answer and its shrinking."""
    gate_choices = choices(**options)
    gate, queue, units, results = GateWorker(gate_choices, KnownFailures(())), [], {}, {}
    tier = gate_choices.tier.name

    def add(new_units):
        for unit in new_units:
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

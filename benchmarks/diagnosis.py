"""Does a diagnosis name the planted fault? ``python benchmarks/diagnosis.py [--host H] [ID …]``.

Each discrete fault of the catalogue that says what names it is planted, and driven through the gate
until the first wrong answer, which is made smaller. Prints a line for each and the shares that are
named first and among the first three: by the failure alone, and by it and the smallest together.
"""

from __future__ import annotations

import argparse
import heapq
import tempfile
import time
from pathlib import Path

from attncheck.faults.catalogue import FAULTS, fault_named
from attncheck.faults.planting import plant
from attncheck.gate.choices import Choices
from attncheck.gate.gate_worker import GateWorker
from attncheck.gate.plan import describe_units, priority
from attncheck.gate.property_stage import KnownFailures
from attncheck.records.record import FAILED_STATUSES, Diagnosis

LONGEST = 60.0
"""Seconds until a fault counts as not caught: how soon it is, is another benchmark's matter."""


def main():
    """Prints a line a fault, then the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ids", nargs="*")
    parser.add_argument("--host", default="ideal", choices=("ideal", "triton"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--part", default="1/1", help="n/m: each m-th fault from the n-th on")
    parser.add_argument("--alone", action="store_true", help="make no failure smaller")
    typed = parser.parse_args()
    part, parts = map(int, typed.part.split("/"))
    chosen = [fault_named(name) for name in typed.ids] or list(FAULTS.values())
    chosen = [
        f
        for f in chosen
        if f.discrete and f.named and typed.host in f.hosts and not f.hosts[typed.host].equivalent
    ]
    ranks = []
    with tempfile.TemporaryDirectory() as folder:
        for fault in chosen[part - 1 :: parts]:
            found = one(fault, typed.host, Path(folder), typed.device, shrink=not typed.alone)
            if found:
                ranks.append(found)
                print(line(fault, found), flush=True)
    for way in ("alone", "together"):
        told = [rank[way] for rank in ranks if way in rank]
        first, three = (sum(0 < r <= n for r in told) for n in (1, 3))
        print(f"{way}: {first} of {len(told)} first, {three} among the first three")


def one(fault, host, folder, device, *, shrink):
    """Ranks of the fault's names by the failure alone, and with the smallest one."""
    kernel = plant(fault, host, folder)
    dtype, start = fault.hosts[host].dtypes[0], time.perf_counter()
    choices = Choices.of({"tier": "smoke", "isolated": False, "dtypes": dtype})
    gate, queue, seen = GateWorker(choices, KnownFailures(())), [], set()

    def add(units):
        for unit in units:
            if unit.id not in seen:
                seen.add(unit.id)
                heapq.heappush(queue, (priority(unit), len(seen), unit))

    add(describe_units([kernel], device=device, tier="smoke", convention=""))
    while queue and time.perf_counter() < start + LONGEST:
        *_, unit = heapq.heappop(queue)
        done = gate.do(unit)
        bad = [answer.record for answer in done.answers if answer.record.status in FAILED_STATUSES]
        if not bad:
            add(done.units)
            continue
        smaller = [a.record for u in done.units * shrink for a in gate.do(u).answers]
        found = {"alone": rank(bad[0], fault.named), "record": bad[0], "smaller": smaller}
        if smaller:
            found["smallest"] = smaller[0]
        found["together"] = rank((smaller or bad)[0], fault.named)
        found["seconds"] = time.perf_counter() - start
        gate.close()
        return found
    gate.close()
    print(f"{fault.id}: not caught in {time.perf_counter() - start:.0f} s", flush=True)
    return None


def rank(record, named):
    """At which place one of ``named`` stands; 0 where none does."""
    found = record.diagnosis
    models = [one.model for one in found.ranked] if isinstance(found, Diagnosis) else []
    return next((n for n, model in enumerate(models, 1) if model in named), 0)


def line(fault, found):
    """What was said of one fault."""
    told = []
    for record in (found["record"], *found["smaller"]):
        diagnosis = record.diagnosis
        if isinstance(diagnosis, Diagnosis):
            said = [
                f"{e.model} {100 * e.share:.4g}%{'!' * e.explains_all}" for e in diagnosis.ranked
            ]
            told.append(f"{', '.join(said) or 'none fits'} ({diagnosis.tied} tied)")
        else:
            told.append(f"no diagnosis of {record.status} {record.case['question']}")
    ok = "ok " if found["together"] == 1 else f"{found['alone']}/{found['together']}"
    return (
        f"{ok} {fault.id} {list(fault.named)} {found['seconds']:.1f} s: {' | '.join(told)} "
        f"[{found['record'].case['question']}]"
    )


if __name__ == "__main__":
    main()

"""Does a diagnosis name the planted fault? ``python benchmarks/diagnosis.py [--host H] [ID …]``.

Each discrete fault of the catalogue that says what names it is planted, and driven through the gate
until the first wrong answer, which is made smaller. Prints a line for each and the shares that are
named first and among the first three: by the failure alone, and by it and the smallest together.

In the ideal kernel, faults that are planted by the very steps of a fault model are left out: there
planting and naming are one. In Triton's hosts every fault is a change to a source.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from attncheck.faults.catalogue import FAULTS, fault_named
from attncheck.faults.planting import plant
from attncheck.faults.scoring import GateRun, rank_of
from attncheck.records.record import FAILED_STATUSES, Diagnosis
from attncheck.workers.units import Unit

LONGEST = 60.0
"""Seconds until a fault counts as not caught: how soon it is, is another benchmark's matter."""


def main():
    """Print a line a fault, then the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ids", nargs="*")
    parser.add_argument("--host", default="triton", choices=("ideal", "triton"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--part", default="1/1", help="n/m: each m-th fault from the n-th on")
    parser.add_argument("--alone", action="store_true", help="make no failure smaller")
    typed = parser.parse_args()
    part, parts = map(int, typed.part.split("/"))
    faults = [fault_named(name) for name in typed.ids] or [
        fault for fault in FAULTS.values() if fault.discrete and fault.named
    ]
    ranks = []
    with tempfile.TemporaryDirectory() as folder:
        for fault in faults[part - 1 :: parts]:
            host = fault.hosts.get(typed.host)
            if host is None or host.equivalent or host.model:
                continue
            failure = first_failure(fault, typed, Path(folder))
            if failure:
                ranks.append({way: rank(answer, fault.named) for way, answer in failure.items()})
                print(line(fault, failure, ranks[-1]), flush=True)
    for way in ("alone", "together"):
        places = [each[way] for each in ranks]
        first, three = (sum(0 < place <= n for place in places) for n in (1, 3))
        print(f"{way}: {first} of {len(places)} first, {three} among the first three")


def first_failure(fault, typed, folder):
    """The Record of the first wrong answer, ``alone``, and the smallest one alike, ``together``."""
    start, dtype = time.perf_counter(), fault.hosts[typed.host].dtypes[0]
    unit = Unit(
        kind="fault",
        stage="contract",
        kernel=fault.id,
        device=typed.device,
        tier="smoke",
        dtype=dtype,
    )
    run = GateRun(plant(fault, typed.host, folder), unit, "")
    try:
        for answer, shrinking in run.answers():
            if answer.record.status in FAILED_STATUSES:
                smallest, _ = run.shrink(() if typed.alone else shrinking)
                return {"alone": answer.record, "together": (smallest or answer).record}
            if time.perf_counter() > start + LONGEST:
                break
    finally:
        run.close()
    print(f"{fault.id}: not caught in {time.perf_counter() - start:.0f} s", flush=True)
    return None


def rank(record, named):
    """At which place one of ``named`` stands; 0 where none does."""
    diagnosis = record.diagnosis
    return rank_of(diagnosis.ranked if isinstance(diagnosis, Diagnosis) else (), named)


def line(fault, failure, ranks):
    """What was said of one fault."""
    said = []
    for record in failure.values():
        diagnosis = record.diagnosis
        if isinstance(diagnosis, Diagnosis):
            models = ", ".join(
                f"{each.model} {100 * each.share:.4g}%{'!' * each.explains_all}"
                for each in diagnosis.ranked
            )
            said.append(f"{models or 'none fits'} ({diagnosis.tied} tied)")
        else:
            said.append(f"no diagnosis of {record.status}")
    verdict = "ok" if ranks["together"] == 1 else f"{ranks['alone']}/{ranks['together']}"
    question = failure["alone"].case["question"]
    return f"{verdict} {fault.id} {list(fault.named)}: {' | '.join(said)} [{question}]"


if __name__ == "__main__":
    main()

"""Does a diagnosis name the planted fault? ``python benchmarks/diagnosis.py [--host H] [ID …]``.

Each discrete fault of the catalogue that says what names it is planted, and driven through the gate
until the first wrong answer, which is made smaller. Prints a line for each and the shares that are
named first and among the first three: by the failure alone, and by it and the smallest together.

In the ideal kernel, faults that are planted by the very steps of a fault model are left out: there
planting and naming are one. In Triton's hosts every fault is a change to a source.

``--host strangers [--md PATH]`` plants the faults of ``stranger_faults.toml`` in the examples,
which are tiled and written otherwise than our kernels. What is to be named stood there before.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

import tomlkit

from attncheck.faults.catalogue import FAULTS, fault_named
from attncheck.faults.patching import apply_patches
from attncheck.faults.planting import plant
from attncheck.faults.scoring import GateRun, rank_of
from attncheck.records.record import FAILED_STATUSES, Diagnosis
from attncheck.workers.units import Unit

LONGEST = 60.0
"""Seconds until a fault counts as not caught: how soon it is, is another benchmark's matter."""


STRANGERS = Path(__file__).with_name("stranger_faults.toml")


@dataclass(frozen=True)
class StrangerFault:
    """A change to the text of an example.

    Attributes:
        id: ``HOST.FAULT``; ``HOST`` alone has no fault.
        named: Fault models, or signs, that a diagnosis is right to name.
        dtype: In which it is looked for.
        file: Of the example, from the root of the repository.
        table: What the kernel supports, as in ``[kernels.NAME]``.
        patches: What mends the example, and what plants the fault.
    """

    id: str
    named: tuple[str, ...]
    dtype: str
    file: str
    table: dict
    patches: tuple[str, ...]

    def plant(self, folder: Path) -> str:
        """Return the name of the changed kernel, which ``folder``'s attncheck.toml then knows."""
        name = self.id.replace(".", "-")
        text = (Path(__file__).parents[1] / self.file).read_text()
        (folder / f"{name}.py").write_text(apply_patches({name: text}, self.patches)[name])
        kernel = {"entry": f"{name}.py::attention", **self.table}
        (folder / "attncheck.toml").write_text(tomlkit.dumps({"kernels": {name: kernel}}))
        return name


def stranger_faults() -> dict[str, StrangerFault]:
    """Return the faults of strangers' kernels by id, each host without a fault before its own."""
    entries = tomllib.loads(STRANGERS.read_text())
    faults = {}
    for host, about in entries.pop("hosts").items():
        none = {"": {"named": [], "patch": ""}}
        for name, entry in (none | entries[host]).items():
            fault = StrangerFault(
                id=f"{host}.{name}".rstrip("."),
                named=tuple(entry["named"]),
                dtype=entry.get("dtype", "bf16"),
                file=about["file"],
                table=about["table"],
                patches=tuple(filter(None, (about.get("repair"), entry["patch"]))),
            )
            faults[fault.id] = fault
    return faults


def main():
    """Print a line a fault, then the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ids", nargs="*")
    parser.add_argument("--host", default="triton", choices=("ideal", "triton", "strangers"))
    parser.add_argument("--md", type=Path, help="with strangers: write a table")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--part", default="1/1", help="n/m: each m-th fault from the n-th on")
    parser.add_argument("--alone", action="store_true", help="make no failure smaller")
    typed = parser.parse_args()
    part, parts = map(int, typed.part.split("/"))
    if typed.host == "strangers":
        score_strangers(typed, part, parts)
        return
    faults = [fault_named(name) for name in typed.ids] or [
        fault for fault in FAULTS.values() if fault.discrete and fault.named
    ]
    ranks = []
    with tempfile.TemporaryDirectory() as folder:
        for fault in faults[part - 1 :: parts]:
            host = fault.hosts.get(typed.host)
            if host is None or host.equivalent or host.model:
                continue
            kernel, dtype = plant(fault, typed.host, Path(folder)), host.dtypes[0]
            failure = first_failure(fault, kernel, dtype, typed)
            if failure:
                ranks.append({way: rank(answer, fault.named) for way, answer in failure.items()})
                print(line(fault, failure, ranks[-1]), flush=True)
    for way in ("alone", "together"):
        places = [each[way] for each in ranks]
        first, three = (sum(0 < place <= n for place in places) for n in (1, 3))
        print(f"{way}: {first} of {len(places)} first, {three} among the first three")


def score_strangers(typed, part, parts):
    """Print a line a fault of a stranger's kernel, then the counts; each host is right without one.

    A fault that was not caught counts as not named.
    """
    every = stranger_faults()
    chosen = [every[name] for name in typed.ids] or list(every.values())[part - 1 :: parts]
    rows, hosts = [], {}
    for fault in chosen:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            failure = first_failure(fault, fault.plant(Path(folder)), fault.dtype, typed)
        host, _, name = fault.id.partition(".")
        if not name:
            if failure:
                print(f"{host}: wrong without a fault: {failure['alone'].reason}", flush=True)
            hosts[host] = "wrong: " + failure["alone"].reason if failure else "no failure"
            continue
        ranks = {"alone": 0, "together": 0}
        if failure:
            ranks = {way: rank(record, fault.named) for way, record in failure.items()}
            print(line(fault, failure, ranks), flush=True)
        rows.append((fault, failure, ranks))
    counts = stranger_counts(rows)
    print(counts)
    if typed.md:
        typed.md.write_text(stranger_page(rows, hosts, counts))


def stranger_counts(rows):
    """In one line, how many were named how."""
    ranks = [ranks["together"] for *_, ranks in rows]
    first, three = (sum(0 < place <= n for place in ranks) for n in (1, 3))
    unnamed = [failure for _, failure, ranks in rows if not ranks["together"]]
    wrong = sum(bool(failure) and bool(names_of(failure["together"])) for failure in unnamed)
    return (
        f"{first} of {len(rows)} named first, {three} among the first three, {wrong} named "
        f"otherwise, {len(unnamed) - wrong} not named"
    )


def stranger_page(rows, hosts, counts):
    """Those lines as Markdown."""
    lines = [
        "# Diagnosis of strangers' kernels",
        "",
        "`python benchmarks/diagnosis.py --host strangers`, on a CPU, Triton interpreted. Faults",
        "are planted in the examples by `benchmarks/stranger_faults.toml`; what is to be named was",
        "written there before it was asked.",
        "",
        f"**{counts}.**",
        "",
        "| kernel | without a fault |",
        "| --- | --- |",
        *(f"| {host} | {said} |" for host, said in hosts.items()),
        "",
        "| fault | to be named | place | named | found by |",
        "| --- | --- | ---: | --- | --- |",
    ]
    for fault, failure, ranks in rows:
        named = ", ".join(names_of(failure["together"])) if failure else "not caught"
        question = failure["together"].case["question"] if failure else "—"
        place = ranks["together"] or "—"
        to_name = " or ".join(fault.named)
        lines.append(f"| {fault.id} | {to_name} | {place} | {named or '—'} | {question} |")
    return "\n".join(lines) + "\n"


def names_of(record):
    """Fault models that a Record's diagnosis names, the best first."""
    diagnosis = record.diagnosis
    return [each.model for each in diagnosis.ranked] if isinstance(diagnosis, Diagnosis) else []


def first_failure(fault, kernel, dtype, typed):
    """The Record of the first wrong answer, ``alone``, and the smallest one alike, ``together``."""
    start = time.perf_counter()
    unit = Unit(
        kind="fault",
        stage="contract",
        kernel=fault.id,
        device=typed.device,
        tier="smoke",
        dtype=dtype,
    )
    run = GateRun(kernel, unit, "")
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

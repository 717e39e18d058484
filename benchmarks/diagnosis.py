"""Does a diagnosis name the planted fault? ``python benchmarks/diagnosis.py [--host H] [ID …]``.

Each discrete fault of the catalogue that says what names it is planted, and driven through the gate
until the first wrong answer, which is made smaller. Prints a line for each, and how many were
named, had their family named, were said to be unknown, or got a wrong name.

In the ideal kernel, faults that are planted by the very steps of a fault model are left out: there
planting and naming are one. In Triton's hosts every fault is a change to a source. ``--host
strangers`` plants the faults of ``stranger_faults.toml`` in the examples, which are tiled and
written otherwise than our kernels; what is to be named stood there before.

``--leave-out`` hides the models of the planted fault: nothing that is named is right then, and its
family at most is known. ``--report STEM`` writes STEM.json and STEM.md, with a table of which
family was planted and what was said; parts of one command add to one report.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import tomlkit

from attncheck.diagnose import diagnosis as causes
from attncheck.diagnose.explanations import explain
from attncheck.fault_models import FAULT_MODELS
from attncheck.fault_models.fault_model import FAMILIES
from attncheck.faults.catalogue import FAULTS
from attncheck.faults.patching import apply_patches
from attncheck.faults.planting import plant
from attncheck.faults.scoring import GateRun
from attncheck.records.record import FAILED_STATUSES, Diagnosis
from attncheck.workers.units import Unit

SCORES = (
    "named",
    "neighbour",
    "family",
    "proven",
    "unknown",
    "wrong family",
    "wrong name",
    "not caught",
)

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
    parser.add_argument("--leave-out", action="store_true", help="hide the planted fault's models")
    parser.add_argument("--report", type=Path, help="write a table, as JSON and as Markdown")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--part", default="1/1", help="n/m: each m-th fault from the n-th on")
    parser.add_argument("--alone", action="store_true", help="make no failure smaller")
    typed = parser.parse_args()
    part, parts = map(int, typed.part.split("/"))
    faults = every_fault(typed)
    chosen = [faults[name] for name in typed.ids] or list(faults.values())
    rows = []
    for fault in chosen[part - 1 :: parts]:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            kernel, dtype = planted(fault, typed.host, Path(folder))
            with hidden(fault.named if typed.leave_out else ()):
                failure = first_failure(fault, kernel, dtype, typed)
        if not fault.named:
            if failure:
                print(f"{fault.id}: wrong without a fault: {failure.reason}", flush=True)
            continue
        rows.append(scored(fault, failure))
        print("{score} {id} {named}: {level} {said} [{question}]".format(**rows[-1]), flush=True)
    print(counts_of(rows))
    if typed.report:
        command = f"python benchmarks/diagnosis.py --host {typed.host}"
        command += " --leave-out" if typed.leave_out else ""
        path, every = typed.report.with_suffix(".json"), {row["id"]: row for row in rows}
        if path.exists():  # of other parts, of the same command
            before = json.loads(path.read_text())
            kept = before["faults"] if before["command"] == command else ()
            every = {row["id"]: row for row in kept} | every
        rows = [every[name] for name in faults if name in every]
        document = {"command": command, "counts": counts_of(rows), "faults": rows}
        path.write_text(json.dumps(document, indent=1) + "\n")
        typed.report.with_suffix(".md").write_text(page_of(document))


def every_fault(typed):
    """What may be planted, by id."""
    if typed.host == "strangers":
        return stranger_faults()
    faults = {}
    for fault in FAULTS.values():
        host = fault.hosts.get(typed.host)
        if host is None or host.equivalent or not (fault.discrete and fault.named):
            continue
        # By a model's own steps planting and naming are one, but where it is hidden.
        if typed.leave_out or not host.model:
            faults[fault.id] = fault
    return faults


def planted(fault, host, folder):
    """The name of the kernel with the fault, and the dtype in which it is looked for."""
    if host == "strangers":
        return fault.plant(folder), fault.dtype
    return plant(fault, host, folder), fault.hosts[host].dtypes[0]


@contextlib.contextmanager
def hidden(names):
    """Within, a diagnosis tries none of these fault models."""

    def explain_by_others(*values, among=FAULT_MODELS, **named):
        return explain(*values, among=[name for name in among if name not in names], **named)

    before, causes.explain = causes.explain, explain_by_others
    try:
        yield
    finally:
        causes.explain = before


def scored(fault, record):
    """What was said of a fault, and how right that is."""
    level, said = ("not caught", "") if record is None else answer_of(record)
    models = [FAULT_MODELS[name] for name in fault.named if name in FAULT_MODELS]
    families = {model.family for model in models}
    # These two say what is wrong, and no more: gradients alone, or NaN that no input has.
    families |= {"gradient" for model in models if model.of == "backward"}
    families |= {"overflow" for model in models if "nan" in model.id.split("-")}
    families = sorted(families)
    family = FAULT_MODELS[said].family if said in FAULT_MODELS else said
    score = level
    if level == "named":
        near = "neighbour" if family in families else "wrong name"
        score = "named" if said in fault.named else near
    elif level == "family":
        score = "family" if said in families else "wrong family"
    return {
        "id": fault.id,
        "named": list(fault.named),
        "families": families,
        "level": level,
        "said": said,
        "family": family,
        "score": score,
        "question": "" if record is None else record.case["question"],
        "facts": [] if record is None else facts_of(record),
    }


def answer_of(record):
    """How sure a diagnosis is, and which model, sign or family it tells."""
    found = record.diagnosis
    if not isinstance(found, Diagnosis):
        return "unknown", ""
    if found.ranked and not found.tried:  # told by asking again, and true whatever was planted
        return "proven", found.ranked[0].model
    if found.level == "named" and found.ranked:
        return "named", found.ranked[0].model
    return found.level, next((key for key, text in FAMILIES.items() if text == found.family), "")


def facts_of(record):
    """What was seen of a failure."""
    found = record.diagnosis
    return list(found.facts) if isinstance(found, Diagnosis) else []


def counts_of(rows):
    """In one line, how many were named how."""
    count = Counter(row["score"] for row in rows)
    return f"{len(rows)} faults: " + ", ".join(f"{count[score]} {score}" for score in SCORES)


def page_of(document):
    """Those rows as Markdown, after a table of which family was planted and what was said."""
    rows = document["faults"]
    answers = sorted({answer_text(row) for row in rows})
    planted_families = sorted({family_text(row) for row in rows})
    table = Counter((family_text(row), answer_text(row)) for row in rows)
    lines = [
        "# Diagnosis of planted faults",
        "",
        f"`{document['command']}`, on a CPU, Triton interpreted.",
        "",
        f"**{document['counts']}.**",
        "",
        "A neighbour is another model of the same family. What is proven was found by asking",
        "again, in other memory or layouts, and holds whatever was planted.",
        "",
        "## Planted family and what was said",
        "",
        f"| planted | {' | '.join(answers)} |",
        f"| --- |{' ---: |' * len(answers)}",
    ]
    for family in planted_families:
        cells = (str(table[family, answer] or "·") for answer in answers)
        lines.append(f"| {family} | {' | '.join(cells)} |")
    lines += ["", "## Faults", "", "| fault | to be named | score | said | found by |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for row in rows:
        named = " or ".join(row["named"])
        lines.append(
            f"| {row['id']} | {named} | {row['score']} | {row['said'] or '—'} | "
            f"{row['question'] or '—'} |"
        )
    return "\n".join(lines) + "\n"


def family_text(row):
    """The families that were planted; of what a sign alone tells that."""
    return " or ".join(row["families"]) or "sign"


def answer_text(row):
    """What was said, as a column of the table."""
    if row["level"] in {"named", "family"}:
        return f"{row['family']}, {row['level']}"
    return row["level"]


def first_failure(fault, kernel, dtype, typed):
    """The Record of the first wrong answer, or of the smallest one alike; None of none."""
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
                return (smallest or answer).record
            if time.perf_counter() > start + LONGEST:
                break
    finally:
        run.close()
    print(f"{fault.id}: not caught in {time.perf_counter() - start:.0f} s", flush=True)
    return None


if __name__ == "__main__":
    main()

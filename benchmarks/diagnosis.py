"""Does a diagnosis name the planted fault? ``python benchmarks/diagnosis.py [--host H] [ID …]``.

Plants each discrete fault of the catalogue that has an expected name, runs the gate until the first
wrong answer, and shrinks it. Prints a line for each fault, and how many got their name, their
family, "unknown" or a wrong name.

In the ideal kernel, faults are left out that a fault model's own code plants: they would be named
by what planted them. In Triton's hosts every fault is a change of a source. ``--host strangers``
plants the faults of ``stranger_faults.toml`` in the examples, which have other tiles and another
style than our kernels; their expected names were written down before the first run.

``--leave-out`` hides the models of the planted fault: then no name is right, and at best the family
is. ``--report STEM`` writes STEM.json and STEM.md, with a table of planted families and answers;
parts of one command add to one report.
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
"""Seconds until a fault counts as not caught; the time itself is for another benchmark."""


STRANGERS = Path(__file__).with_name("stranger_faults.toml")


@dataclass(frozen=True)
class StrangerFault:
    """A change to the text of an example.

    Attributes:
        id: ``HOST.FAULT``, or ``HOST`` for the kernel without a fault.
        named: Fault models or signs that are right answers.
        dtype: The dtype of the questions.
        file: The example's path from the root of the repository.
        table: What the kernel supports, as in ``[kernels.NAME]``.
        patches: The patch that repairs the example, and the one that plants the fault.
    """

    id: str
    named: tuple[str, ...]
    dtype: str
    file: str
    table: dict
    patches: tuple[str, ...]

    def plant(self, folder: Path) -> str:
        """Write the changed kernel and its attncheck.toml to ``folder``; return its name."""
        name = self.id.replace(".", "-")
        text = (Path(__file__).parents[1] / self.file).read_text()
        (folder / f"{name}.py").write_text(apply_patches({name: text}, self.patches)[name])
        kernel = {"entry": f"{name}.py::attention", **self.table}
        (folder / "attncheck.toml").write_text(tomlkit.dumps({"kernels": {name: kernel}}))
        return name


def stranger_faults() -> dict[str, StrangerFault]:
    """Return the faults of ``stranger_faults.toml`` by id; hosts without a fault come first."""
    entries = tomllib.loads(STRANGERS.read_text())
    faults = {}
    for host, about in entries.pop("hosts").items():
        no_fault = {"": {"named": [], "patch": ""}}
        for name, entry in (no_fault | entries[host]).items():
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
    """Print a line for each fault, then the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ids", nargs="*")
    parser.add_argument("--host", default="triton", choices=("ideal", "triton", "strangers"))
    parser.add_argument("--leave-out", action="store_true", help="hide the planted fault's models")
    parser.add_argument("--report", type=Path, help="write a table, as JSON and as Markdown")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--part", default="1/1", help="n/m: each m-th fault from the n-th on")
    parser.add_argument("--alone", action="store_true", help="make no failure smaller")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    faults = every_fault(options)
    chosen = [faults[name] for name in options.ids] or list(faults.values())
    rows = []
    for fault in chosen[part - 1 :: parts]:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            kernel, dtype = plant_in(fault, options.host, Path(folder))
            with hidden(fault.named if options.leave_out else ()):
                failure = first_failure(fault, kernel, dtype, options)
        if not fault.named:
            if failure:
                print(f"{fault.id}: wrong without a fault: {failure.reason}", flush=True)
            continue
        rows.append(scored(fault, failure))
        print("{score} {id} {named}: {level} {said} [{question}]".format(**rows[-1]), flush=True)
    print(counts_of(rows))
    if options.report:
        command = f"python benchmarks/diagnosis.py --host {options.host}"
        command += " --leave-out" if options.leave_out else ""
        path, every = options.report.with_suffix(".json"), {row["id"]: row for row in rows}
        if path.exists():  # of other parts, of the same command
            before = json.loads(path.read_text())
            kept = before["faults"] if before["command"] == command else ()
            every = {row["id"]: row for row in kept} | every
        rows = [every[name] for name in faults if name in every]
        document = {"command": command, "counts": counts_of(rows), "faults": rows}
        path.write_text(json.dumps(document, indent=1) + "\n")
        options.report.with_suffix(".md").write_text(page_of(document))


def every_fault(options):
    """Return the faults that may be planted, by id."""
    if options.host == "strangers":
        return stranger_faults()
    faults = {}
    for fault in FAULTS.values():
        host = fault.hosts.get(options.host)
        if host is None or host.equivalent or not (fault.discrete and fault.named):
            continue
        # A fault that a model's own code plants is of use only where the model is hidden.
        if options.leave_out or not host.model:
            faults[fault.id] = fault
    return faults


def plant_in(fault, host, folder):
    """Plant the fault; return the name of the kernel and the dtype of the questions."""
    if host == "strangers":
        return fault.plant(folder), fault.dtype
    return plant(fault, host, folder), fault.hosts[host].dtypes[0]


@contextlib.contextmanager
def hidden(names):
    """Exclude these fault models from diagnosis within the context."""

    def explain_by_others(*values, among=FAULT_MODELS, **named):
        return explain(*values, among=[name for name in among if name not in names], **named)

    before, causes.explain = causes.explain, explain_by_others
    try:
        yield
    finally:
        causes.explain = before


def scored(fault, record):
    """Return the row of a fault: the answer, and its score."""
    level, answer = ("not caught", "") if record is None else answer_of(record)
    models = [FAULT_MODELS[name] for name in fault.named if name in FAULT_MODELS]
    families = {model.family for model in models}
    # Two families only tell what is wrong: the gradients alone, or NaN that no input has.
    families |= {"gradient" for model in models if model.of == "backward"}
    families |= {"overflow" for model in models if "nan" in model.id.split("-")}
    families = sorted(families)
    family = FAULT_MODELS[answer].family if answer in FAULT_MODELS else answer
    score = level
    if level == "named":
        near = "neighbour" if family in families else "wrong name"
        score = "named" if answer in fault.named else near
    elif level == "family":
        score = "family" if answer in families else "wrong family"
    return {
        "id": fault.id,
        "named": list(fault.named),
        "families": families,
        "level": level,
        "said": answer,
        "family": family,
        "score": score,
        "question": "" if record is None else record.case["question"],
        "facts": [] if record is None else facts_of(record),
    }


def answer_of(record):
    """Return a diagnosis's level, and the model, sign or family that it names."""
    diagnosis = record.diagnosis
    if not isinstance(diagnosis, Diagnosis):
        return "unknown", ""
    if diagnosis.ranked and not diagnosis.tried:  # proven by further runs, whatever was planted
        return "proven", diagnosis.ranked[0].model
    if diagnosis.level == "named" and diagnosis.ranked:
        return "named", diagnosis.ranked[0].model
    families = (key for key, text in FAMILIES.items() if text == diagnosis.family)
    return diagnosis.level, next(families, "")


def facts_of(record):
    """Return the facts that a diagnosis saw."""
    diagnosis = record.diagnosis
    return list(diagnosis.facts) if isinstance(diagnosis, Diagnosis) else []


def counts_of(rows):
    """Return the numbers of faults by score, in one line."""
    count = Counter(row["score"] for row in rows)
    return f"{len(rows)} faults: " + ", ".join(f"{count[score]} {score}" for score in SCORES)


def page_of(document):
    """Return a table of planted families and answers, and the rows, as Markdown."""
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
    """Return the planted families, or ``sign`` if only a sign is a right answer."""
    return " or ".join(row["families"]) or "sign"


def answer_text(row):
    """Return the answer as a column of the table."""
    if row["level"] in {"named", "family"}:
        return f"{row['family']}, {row['level']}"
    return row["level"]


def first_failure(fault, kernel, dtype, options):
    """Return the Record of the first wrong answer, shrunk if possible; None if there is none."""
    start = time.perf_counter()
    unit = Unit(
        kind="fault",
        stage="contract",
        kernel=fault.id,
        device=options.device,
        tier="smoke",
        dtype=dtype,
    )
    run = GateRun(kernel, unit, "")
    try:
        for answer, shrinking in run.answers():
            if answer.record.status in FAILED_STATUSES:
                smallest, _ = run.shrink(() if options.alone else shrinking)
                return (smallest or answer).record
            if time.perf_counter() > start + LONGEST:
                break
    finally:
        run.close()
    print(f"{fault.id}: not caught in {time.perf_counter() - start:.0f} s", flush=True)
    return None


if __name__ == "__main__":
    main()

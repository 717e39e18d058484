"""The page of a model's report: the model's drift with each kernel, and the first wrong call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.records.record import FAILED_STATUSES, UNTRUSTED_STATUSES
from attncheck.reporting import number_text
from attncheck.reporting.document import (
    DASH,
    Cell,
    Column,
    Document,
    Look,
    Note,
    Row,
    Section,
    Table,
    Verdict,
    columns,
    row,
)
from attncheck.reporting.record_text import environment_facts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncheck.records.model_report import Drift, ModelFault, ModelRecord, ModelReport, Phase

_ANSWERS: tuple[tuple[str, Phase, str], ...] = (
    ("prefill", "prefill", "logits"),
    ("decode", "decode", "logits"),
    ("gradients", "training", "gradients"),
)
_PHASES: tuple[Phase, ...] = ("prefill", "decode", "training")


def model_document(report: ModelReport) -> Document:
    """Return the page of a report: each model's kernels beside right ones, and recorded layers."""
    sections: list[Section] = []
    for name, what in report.models.items():
        records = [record for record in report.records if record.model == name]
        sections.append(Section(f"{name} · {what}", (_summary(records, report),), name=name))
        sections += [_layers(one) for one in records if one.calls]
    tested_records = [record for record in report.records if not record.for_comparison]
    return Document(
        title="Kernels in a whole model",
        verdict=_verdict(tested_records),
        command=report.command,
        facts=model_facts(report),
        sections=tuple(sections),
        notes=tuple(_notes(report)),
        closing=tuple(
            Note(f"attncheck repro {one.fault.id}", "plain", whole=True)
            for one in tested_records
            if one.fault is not None
        ),
    )


def model_facts(report: ModelReport) -> tuple[str, str]:
    """Return two lines: machine and versions, and the models' inputs."""
    prompts = number_text.plural(report.batch, "prompt")
    tokens = f"{report.dtype} · {prompts} of {report.length} tokens"
    return (
        environment_facts(report.environment, transformers=report.transformers),
        f"{tokens}, {report.steps} decoded after {'it' if report.batch == 1 else 'them'}",
    )


def _verdict(tested_records: list[ModelRecord]) -> Verdict:
    wrong = [record for record in tested_records if record.status in FAILED_STATUSES]
    if wrong:
        first = wrong[0]
        more = f"; {len(wrong) - 1} more" if len(wrong) > 1 else ""
        return Verdict("FAIL", f"{first.kernel} in {first.model}: {_place(first)}{more}", "bad")
    doubts = [record for record in tested_records if record.status in UNTRUSTED_STATUSES | {"warn"}]
    if doubts:
        first = doubts[0]
        text = f"{first.kernel} in {first.model}: {first.reason}"
        return Verdict("IN DOUBT", text, "notable")
    ran = [record for record in tested_records if record.status != "unsupported"]
    if not ran:
        return Verdict("NOTHING TESTED", "no kernel takes a model", "notable")
    kernels, models = ({getattr(one, name) for one in ran} for name in ("kernel", "model"))
    in_models = number_text.plural(len(models), "model")
    return Verdict("PASS", f"{number_text.plural(len(kernels), 'kernel')} in {in_models}", "good")


def _place(record: ModelRecord) -> str:
    """Return the place of the first fault and its reason, or only the record's reason."""
    fault = record.fault
    return record.reason if fault is None else f"{fault_place(fault)}: {fault.reason}"


def fault_place(fault: ModelFault) -> str:
    """Return ``layer 2 (model.layers.2.self_attn), decoded token 3, head 1, position 50``."""
    where = "the prompt" if not fault.step else f"decoded token {fault.step}"
    parts = [f"layer {fault.layer} ({fault.module})", where]
    if fault.backward:
        parts.append("backward")
    if fault.head is not None:
        parts += [f"head {fault.head}", f"position {fault.position}"]
    return ", ".join(parts)


def _summary(records: list[ModelRecord], report: ModelReport) -> Table:
    numbers = [text for name, *_ in _ANSWERS for text in (name, "×floor")]
    kernel = Column("kernel", words=True, cut=True, most=40)
    headings = (kernel, *columns(["verdict"], [*numbers, "KL", "words", "chance"]))
    rows = []
    reference = max(records, key=lambda record: len(record.drifts), default=None)
    if reference is not None and reference.drifts:
        name = Cell(f"{report.right} right kernels", "dim")
        floors = [cell for drift in _answers(reference) for cell in (_floor(drift), "")]
        words = Cell(_words(reference.right_diverge), "dim")
        rows.append(row(name, "", *floors, _floor(_drift(reference, "prefill", "KL")), words, ""))
    for record in records:
        name = Cell(record.kernel, "dim" if record.for_comparison else "plain")
        cells = [name, Cell(*_status(record))]
        for drift in _answers(record):
            cells += _drift_cells(drift, report.right)
        cells.append(_drift_cells(_drift(record, "prefill", "KL"), report.right)[0])
        chance = number_text.NOTHING if record.chance is None else f"{record.chance:.2f}"
        cells += [Cell(_words(record.diverges)), Cell(chance)]
        rows.append(Row(tuple(cells), tuple(_remarks(record))))
    return Table(headings, tuple(rows), keys=2)


def _answers(record: ModelRecord) -> list[Drift | None]:
    return [_drift(record, phase, where) for _, phase, where in _ANSWERS]


def _drift(record: ModelRecord, phase: Phase, where: str) -> Drift | None:
    places = (drift for drift in record.drifts if (drift.phase, drift.where) == (phase, where))
    return next(places, None)


def _floor(drift: Drift | None) -> Cell:
    return DASH if drift is None else Cell(number_text.scientific(drift.floor), "dim")


def _drift_cells(drift: Drift | None, right: int) -> list[Cell]:
    if drift is None:
        return [DASH] * 2
    look: Look = "notable" if right and not drift.as_far else "plain"
    ratio = number_text.ratio(drift.error, drift.floor)
    return [Cell(number_text.scientific(drift.error)), Cell(ratio, look)]


def _words(first: int | None) -> str:
    return number_text.NOTHING if first is None else str(first)


def _status(record: ModelRecord) -> tuple[str, Look]:
    if record.status == "unsupported":
        return "not taken", "dim"
    if record.for_comparison:
        return ("reference" if record.status == "pass" else record.status), "dim"
    looks: dict[str, Look] = {"pass": "good", "warn": "notable", "inconclusive": "notable"}
    return record.status, looks.get(record.status, "bad")


def _remarks(record: ModelRecord) -> Iterator[Note]:
    if record.fault is not None:
        yield Note(_place(record), "notable")
        yield Note(f"its tensors: {record.fault.recording}", "notable")
        if record.fault.again is False:
            text = "asked alone it gives other bits: its answer depends on the calls before"
            yield Note(text, "notable")
    elif record.reason:
        yield Note(record.reason, "notable")


def _layers(record: ModelRecord) -> Section:
    phases = [text for phase in _PHASES for text in (phase, "×floor")]
    rows = []
    for call in record.calls:
        drifts = (_drift(record, phase, f"layer {call.layer}") for phase in _PHASES)
        failed = Cell(str(call.failed), "bad" if call.failed else "plain")
        share = number_text.NOTHING if call.over_bound is None else f"{call.over_bound:.3f}"
        cells = (cell for drift in drifts for cell in _drift_cells(drift, 1))
        rows.append(row(str(call.layer), *cells, str(call.calls), failed, share))
    table = Table(
        columns((), ["layer", *phases, "calls", "failed", "err/bound"]), tuple(rows), keys=1
    )
    return Section(f"{record.model} · {record.kernel}", (table,))


def _notes(report: ModelReport) -> Iterator[str]:
    yield (
        "prefill, decode: ‖difference‖ ÷ ‖exact‖ of logits, or of the state after a layer; exact "
        "is the same model in fp64. KL: of the next word's distribution, in nats. gradients: of "
        "one step of training."
    )
    yield (
        f"×floor: ÷ the median of {report.right} right kernels, ideal ones of several tilings; "
        "coloured where none of them is as far."
    )
    yield "words: the first decoded word that is another than the exact model's, from 0."
    yield (
        "chance: of a right kernel to drift so far, by the order of all; least "
        f"{1 / (report.right + 1):.2f}."
    )
    yield (
        "failed, err/bound: every call of a layer, judged on the tensors that it received; above 1 "
        "is proof of a fault."
    )

"""Reports in any format: one document for each kind, and one writer for each format."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any, TextIO

from attncheck.core.errors import UsageError, require_known
from attncheck.core.files import check_names, write_texts
from attncheck.core.sanitize_text import one_line
from attncheck.records import fault_scores, survey_reports
from attncheck.records.bench_report import BenchReport
from attncheck.records.json_reports import report_json
from attncheck.records.model_report import ModelReport
from attncheck.records.record import Report
from attncheck.records.run_reports import BaselineComparison, GateReport, PropertyReport
from attncheck.reporting import ci_formats, score_documents, survey_documents
from attncheck.reporting.bench_document import bench_document
from attncheck.reporting.csv_text import document_csv, gate_csv, report_csv
from attncheck.reporting.gate_document import gate_document, gate_page
from attncheck.reporting.html import html_text
from attncheck.reporting.markdown import cut_markdown, markdown_text
from attncheck.reporting.measurement_document import measurement_document
from attncheck.reporting.model_document import model_document
from attncheck.reporting.mutant_document import mutant_document
from attncheck.reporting.terminal import document_lines, plain_text, print_lines, print_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import msgspec

    from attncheck.reporting.document import Document

FORMATS = ("table", "json", "md", "csv", "html")  # of every report

GATE_FORMATS = (*FORMATS, "junit", "sarif", "github")  # of a gate

LARGEST_SUMMARY = 2**20  # bytes of a step's summary; GitHub does not show larger ones

SCRIPTS = "repro"  # folder of standalone scripts, beside a gate's reports

_DOCUMENTS: dict[type, Callable[[Any], Document]] = {
    Report: measurement_document,
    BenchReport: bench_document,
    GateReport: gate_document,
    fault_scores.FaultReport: score_documents.fault_document,
    fault_scores.MutantReport: mutant_document,
    fault_scores.OwnTestsReport: score_documents.own_tests_document,
    fault_scores.SensitivityReport: score_documents.sensitivity_document,
    PropertyReport: score_documents.property_document,
    BaselineComparison: score_documents.baseline_document,
    survey_reports.OracleReport: survey_documents.oracle_document,
    survey_reports.CertificateReport: survey_documents.certificate_document,
    survey_reports.ModReport: survey_documents.mod_document,
    survey_reports.BlockReport: survey_documents.block_document,
    survey_reports.FingerprintReport: survey_documents.fingerprint_document,
    ModelReport: model_document,
}
_GATE_FILES = {
    "gate.json": "json",
    "junit.xml": "junit",
    "results.sarif": "sarif",
    "summary.md": "md",
}
_ID = re.compile(r"[a-z0-9]{1,40}")


def check_format(fmt: str, formats: tuple[str, ...] = FORMATS) -> None:
    """Raise UnknownName unless ``fmt`` is one of ``formats``."""
    require_known("format", [fmt], formats)


def render(
    report: msgspec.Struct, fmt: str, document: Callable[[Any], Document] | None = None
) -> str:
    """Return ``report`` in ``fmt``, the same on every machine (no colours).

    Args:
        fmt: One of ``FORMATS``, or for a gate of ``GATE_FORMATS``.
        document: Makes the page of ``report``; by default the function of its kind.

    Raises:
        UnknownName: if there is no such format.
    """
    check_format(fmt, GATE_FORMATS if isinstance(report, GateReport) else FORMATS)
    if fmt == "json":
        return report_json(report)
    if isinstance(report, GateReport):
        return _GATE_WRITERS[fmt](report)
    # Unlike the page's cells, a report's CSV has every number in full, each under its own name.
    if fmt == "csv" and isinstance(report, Report):
        return report_csv(report)
    writers = {"table": plain_text, "md": markdown_text, "csv": document_csv, "html": html_text}
    return writers[fmt](_document(report, document))


def gate_markdown(report: GateReport, *, largest: int = LARGEST_SUMMARY) -> str:
    """Return ``report`` as Markdown of at most ``largest`` bytes; left-out failures are counted."""
    # Failures take most of the space, so only as many of them as fit are shown in full.
    text = ""
    for most in (100, 50, 20, 10, 5, 2, 1, 0):
        where = "gate.json has all of them"
        text = markdown_text(gate_document(report, most=most, where=where, failures_first=True))
        if len(text.encode(errors="backslashreplace")) <= largest:
            return text
    # With hundreds of kernels not even the head fits.
    return cut_markdown(text, largest, f"cut after {largest:,} bytes: gate.json has everything.")


_GATE_WRITERS: dict[str, Callable[[GateReport], str]] = {
    # A page has room for drawings and scripts; a terminal for the worst five.
    "table": lambda report: plain_text(gate_document(report)),
    "html": lambda report: html_text(gate_page(report)),
    "md": gate_markdown,
    "csv": gate_csv,
    "junit": ci_formats.junit_text,
    "sarif": ci_formats.sarif_text,
    "github": ci_formats.github_text,
}


def show(
    report: msgspec.Struct,
    fmt: str = "table",
    stream: TextIO | None = None,
    document: Callable[[Any], Document] | None = None,
) -> None:
    """Write ``report`` to ``stream`` (default: standard output); for the arguments see ``render``.

    A table takes the terminal's width and colours; NO_COLOR, FORCE_COLOR and COLUMNS are heeded.
    A character that the stream cannot encode becomes a question mark.
    """
    stream = stream or sys.stdout
    if fmt == "table":
        page = _document(report, document)
        print_lines(lambda width: document_lines(page, width), stream)
    else:
        print_text(render(report, fmt, document), stream)


def _document(report: msgspec.Struct, document: Callable[[Any], Document] | None) -> Document:
    return (document or _DOCUMENTS[type(report)])(report)


_FILE_FORMATS = ("json", "md", "csv")


def check_writable(directory: Path | str, stem: str = "rmse") -> None:
    """Raise UsageError unless ``write_report`` could write to ``directory``; leave no file behind.

    A directory that does not exist yet is fine if it can be created.
    """
    check_names(directory, [f"{stem}.{suffix}" for suffix in _FILE_FORMATS])


def write_report(
    report: msgspec.Struct,
    directory: Path | str,
    stem: str,
    *,
    formats: tuple[str, ...] = _FILE_FORMATS,
    document: Callable[[Any], Document] | None = None,
) -> tuple[Path, ...]:
    """Write ``stem``.json, .md and .csv into ``directory``, which is created if missing.

    Everything is rendered before anything is written, and each file atomically replaces the old
    one, so that readers find the old report or the new one.

    Raises:
        UsageError: if the directory cannot be written to.
    """
    # Render all formats before writing any, so that an error leaves the old files unchanged.
    texts = {f"{stem}.{fmt}": render(report, fmt, document) for fmt in formats}
    return write_texts(texts, directory)


def write_gate(
    report: GateReport, directory: Path | str, scripts: Mapping[str, str]
) -> tuple[Path, ...]:
    """Write the files of a gate into ``directory``, and ``repro/ID.py`` of each script.

    Args:
        scripts: The text of a standalone script by the id of its failure.

    Raises:
        UsageError: if the directory cannot be written to, or an id is malformed.
    """
    # Ids come from a report, which may be untrusted: none may name a file elsewhere.
    for name in scripts:
        if not _ID.fullmatch(name):
            raise UsageError(f"{one_line(name)!r} is no id: it has letters and digits.")
    texts = {name: render(report, fmt) for name, fmt in _GATE_FILES.items()}
    texts["report.html"] = html_text(gate_page(report, scripts))
    texts |= {f"{SCRIPTS}/{name}.py": text for name, text in scripts.items()}
    check_names(directory, texts)  # if one file cannot be replaced, none is
    return write_texts(texts, directory)

"""Store failures as files, and find them again by their id, also in reports."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from attncheck.core import json_numbers
from attncheck.core.errors import UsageError
from attncheck.core.files import write_texts
from attncheck.core.sanitize_text import one_line
from attncheck.records.json_reports import LARGEST_GATE, load_report
from attncheck.records.problem_summary import problem_of
from attncheck.records.record import FAILED_STATUSES, Environment, Record, Report
from attncheck.records.run_reports import GateReport

FAILURE_FOLDER = "failures"  # Name of the folder of failures within the folder of reports.
MAX_STORED = 200  # Failures stored in a folder; beyond this number the oldest are removed.

_SCHEMA = 1
_LARGEST = 2**22  # Bytes of the largest failure, case or problem that is read.
_MOST_FILES = 2000  # Files that are searched for an id.
# Reports that are searched for an id, by a key that they have besides ``kernels``.
_KINDS: dict[str, type[Report | GateReport]] = {"records": Report, "answers": GateReport}
# Ids consist of ten base32 characters, unlike the path of any JSON file.
_ID = re.compile(r"[a-z2-7]{10}")
_ID_FORM = "ten of a–z and 2–7, such as qs36byvjtt"


class StoredFailure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kernel that failed one Case."""

    schema: int = _SCHEMA
    # Ten of a–z and 2–7, derived from the kernel, its calling convention, the device and the
    # Case, so that two kernels that fail one Case have different ids.
    id: str
    kernel: str  # as the user named it: a name, ``file.py::name`` or ``package.module:name``
    convention: str = ""  # name of the calling convention; empty for the first that fits
    device: str
    question: str = ""  # the Case's question, in one line
    test: str = ""  # the property's test; empty where there is none
    record: Record
    environment: Environment


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproduction:
    """A failure to reproduce."""

    case: dict[str, Any] = field(default_factory=dict)
    # kernel, convention, device: as the user gave them; empty if not recorded.
    kernel: str = ""
    convention: str = ""
    device: str = ""
    test: str = ""
    source: Path = Path()  # The file that these data are from.


def is_id(text: str) -> bool:
    """Return whether ``text`` has the form of an id of a Case or failure, rather than a path."""
    return _ID.fullmatch(text) is not None


def keep_failure(
    failed: StoredFailure, directory: Path | str = Path("reports") / FAILURE_FOLDER
) -> Path:
    """Write ``failed`` to ``directory``/ID.json atomically, replacing an older file.

    The oldest failures beyond ``MAX_STORED`` are removed.

    Raises:
        UsageError: if the directory cannot be written to, or the id is malformed.
    """
    # The id becomes a file name, which must not lead out of the folder.
    if not is_id(failed.id):
        raise UsageError(f"{one_line(failed.id)!r} is no id: it has {_ID_FORM}.")
    text = json_numbers.to_json_text(failed)
    (path,) = write_texts({f"{failed.id}.json": text}, directory, what="failures", instead="folder")
    # Without a limit, tests of a broken kernel would fill the disk.
    for old in _by_age(path.parent)[MAX_STORED:]:
        if old != path:
            old.unlink(missing_ok=True)
    return path


def load_failure(source: Path | str) -> StoredFailure:
    """Read a failure that ``keep_failure`` wrote.

    Args:
        source: A Path to read, or the JSON itself as a str.

    Raises:
        UsageError: for anything else, including another schema.
    """
    return _parse_failure(
        json_numbers.read_json(source, "failure", _LARGEST), json_numbers.source_name(source)
    )


def find_reproduction(
    wanted: str, reports: Path | str = "reports", kernel: str = ""
) -> Reproduction:
    """Return the failure that an id or a file refers to.

    Args:
        wanted: The id of a failure or of a Case, which is searched in ``reports``/failures and in
            every report of the folder; or else a file with a failure, a Case, or a Problem, of
            which the question is ``compare``.
        kernel: The kernel to select if several were asked the Case, or another one to ask it.

    Raises:
        UsageError: in one line, if there is none, or if several kernels match and none is chosen.
    """
    if not is_id(wanted):
        # Unlike Path's, these are False for a name that is too long.
        if os.path.isdir(wanted):  # noqa: PTH112
            raise UsageError(f"{one_line(wanted)!r} is a folder: name a file in it, or an id.")
        # A misspelt id has neither a dot nor a slash, which a misspelt path mostly has.
        is_file = os.path.isfile(wanted)  # noqa: PTH113
        if not {".", "/"} & set(wanted) and not is_file:
            raise UsageError(f"nothing is known of {one_line(wanted)!r}: an id has {_ID_FORM}.")
        return _read_reproduction(Path(wanted))
    reports = Path(reports)
    files = sorted(reports.rglob("*.json"))[:_MOST_FILES] if reports.is_dir() else []
    broken: list[str] = []
    candidates = [one for path in files for one in _matches_in(path, wanted, broken)]
    if not candidates:
        raise UsageError(_unknown_id_message(wanted, reports, files, broken))
    # Reports leave out the folder of a kernel's file, which a kept failure has.
    kept = [one for one in candidates if one.source.parent.name == FAILURE_FOLDER]
    known = {Path(one.kernel).name for one in kept}
    candidates = kept + [one for one in candidates if Path(one.kernel).name not in known]
    named = [one for one in candidates if one.kernel == kernel]
    # The Case may also be asked of a kernel that never failed it, for comparison.
    if kernel:
        first = candidates[0]
        return named[0] if named else Reproduction(case=first.case, source=first.source)
    kernels = list(dict.fromkeys(one.kernel for one in candidates))
    if len(kernels) > 1:
        several = ", ".join(map(one_line, kernels))
        raise UsageError(f"{wanted} was asked of {several}: choose one with --kernel.")
    return candidates[0]


def _by_age(folder: Path) -> list[Path]:
    """Return the failures in ``folder``, newest first."""

    def written_at(path: Path) -> float:
        try:
            return path.stat().st_mtime
        except OSError:  # another process has removed it
            return 0.0

    return sorted((p for p in folder.glob("*.json") if is_id(p.stem)), key=written_at, reverse=True)


def _parse_failure(data: Any, name: str) -> StoredFailure:
    if other := json_numbers.other_schema(data, _SCHEMA):
        raise UsageError(json_numbers.refusal_message(name, "failure", other))
    try:
        record = json_numbers.words_to_record_numbers(data.get("record"))
        failed = msgspec.convert(data | {"record": record}, StoredFailure)
    except (msgspec.ValidationError, RecursionError) as error:
        raise UsageError(json_numbers.refusal_message(name, "failure", str(error))) from None
    # A Case without a problem raises here and not later, when it is rendered.
    problem_of(failed.record)
    return failed


def _read_reproduction(path: Path) -> Reproduction:
    """Read a failure, Case or Problem from a file, whichever its keys show it to be."""
    data = json_numbers.read_json(path, "failure, case or problem", _LARGEST)
    name = json_numbers.source_name(path)
    keys = set(data) if isinstance(data, dict) else set()
    if "record" in keys:
        return _of_failure(_parse_failure(data, name), path)
    if {"records", "answers"} & keys:
        raise UsageError(f"{name} is a report: give the id of one of its records (case_id).")
    if "problem" in keys:
        return Reproduction(case=data, source=path)
    if "query" in keys:
        return Reproduction(case={"problem": data}, source=path)
    fact = "it has neither a record, nor a problem, nor a query length"
    raise UsageError(json_numbers.refusal_message(name, "failure, case or problem", fact))


def _of_failure(failed: StoredFailure, path: Path) -> Reproduction:
    return Reproduction(
        case=failed.record.case,
        kernel=failed.kernel,
        convention=failed.convention,
        device=failed.device,
        test=failed.test,
        source=path,
    )


def _matches_in(path: Path, wanted: str, broken: list[str]) -> Iterator[Reproduction]:
    """Yield a file's Reproductions with the id; append to ``broken`` if it cannot be read."""
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST_GATE + 1)
        # Searching the text for the id is much faster than parsing every report of the folder.
        if wanted.encode() not in text and path.stem != wanted:
            return
        if path.parent.name == FAILURE_FOLDER:
            failed = load_failure(path)
            if wanted in {failed.id, failed.record.case_id}:
                yield _of_failure(failed, path)
            return
        data = json_numbers.read_json(path, "report", LARGEST_GATE)
        keys = set(data) if isinstance(data, dict) else set()
        # Other reports, such as those of oracles, have no kernel to ask.
        kind = next((each for key, each in _KINDS.items() if {"kernels", key} <= keys), None)
        if kind is None:
            return
        report = load_report(path, kind)
    except UsageError as error:
        broken.append(str(error))
    except OSError as error:
        broken.append(f"{json_numbers.source_name(path)} cannot be read: {error.strerror}.")
    else:
        yield from _of_report(report, wanted, path)


def _of_report(report: Report | GateReport, wanted: str, path: Path) -> Iterator[Reproduction]:
    if isinstance(report, GateReport):
        answers = report.answers
        records = [a.record for a in answers if wanted in {a.failure, a.record.case_id}]
    else:
        records = [record for record in report.records if record.case_id == wanted]
    # If several kernels were asked the Case, only those that failed count.
    failed = [record for record in records if record.status in FAILED_STATUSES]
    convention = _option(report.command, "--convention")
    for record in failed or records:
        yield Reproduction(
            case=record.case,
            kernel=record.kernel,
            # The option applies to user kernels; a built-in kernel has a single convention.
            convention=convention if ":" in record.kernel else "",
            # The device on which it failed, even if this machine lacks it.
            device="cpu" if report.environments[record.environment].device == "cpu" else "cuda",
            source=path,
        )


def _option(typed: str, name: str) -> str:
    """Return the value of an option in a command line; empty if it is not given."""
    try:
        words = shlex.split(typed)
    # Unbalanced quotes, since a file may have been edited by hand.
    except ValueError:
        return ""
    for word, following in pairwise([*words, ""]):
        option, equals, value = word.partition("=")
        if option == name:
            return value if equals else following
    return ""


def _unknown_id_message(wanted: str, reports: Path, files: list[Path], broken: list[str]) -> str:
    count = sum(path.parent.name == FAILURE_FOLDER for path in files)
    where = f"{one_line(str(reports))!r}"
    looked = f"{where} holds {count} kept failures and {len(files) - count} other JSON files"
    if not reports.is_dir():
        looked = f"there is no folder {where}"
    reason = f"; {broken[0].rstrip('.')}" if broken else ""
    return f"nothing is known of {wanted!r}: {looked}{reason}. Name another folder with --reports."

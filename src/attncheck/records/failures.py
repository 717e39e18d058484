"""Failures on disk: kept one by one, and found again by their id, in reports too."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from attncheck.core import json_numbers
from attncheck.core.errors import UsageError
from attncheck.core.files import write_texts
from attncheck.core.sanitize_text import one_line
from attncheck.records.json_reports import LARGEST_REPORT, load_report
from attncheck.records.problem_summary import problem_of
from attncheck.records.record import FAILED_STATUSES, Environment, Record, Report

FAILURE_FOLDER = "failures"  # name of the folder of failures, in that of the reports
MOST_KEPT = 200  # failures that a folder keeps; the oldest goes when one more comes

_SCHEMA = 1
_LARGEST = 2**22  # bytes of one failure, case or problem
_MOST_FILES = 2000  # that are looked through for an id
# The alphabet of base 32, as short ids have it: no path looks like one.
_ID = re.compile(r"[a-z2-7]{10}")


class KeptFailure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kernel that failed one Case."""

    schema: int = _SCHEMA
    # Ten letters and digits that stand for the kernel, how it is called, the device and the Case:
    # two kernels that fail the same Case have two.
    id: str
    kernel: str  # as it was asked for: a name, ``file.py::name`` or ``package.module:name``
    convention: str = ""  # a name of a calling convention; empty for the first that fits
    device: str
    question: str = ""  # what the Case asks, in one line
    test: str = ""  # the property's test; empty where there is none
    record: Record  # what the kernel answered
    environment: Environment


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproduction:
    """A failure to reproduce."""

    case: dict[str, Any] = field(default_factory=dict)
    kernel: str = ""  # as it was asked for; empty where nothing says so, as the next two
    convention: str = ""
    device: str = ""
    test: str = ""
    source: Path = Path()  # the file that says so


def is_id(text: str) -> bool:
    """Return whether ``text`` is an id of a Case or of a failure, and not a file."""
    return _ID.fullmatch(text) is not None


def keep_failure(
    failed: KeptFailure, directory: Path | str = Path("reports") / FAILURE_FOLDER
) -> Path:
    """Write ``failed`` to ``directory``/ID.json, whole or not at all, in place of an older one.

    Of more than ``MOST_KEPT`` failures the oldest are removed.

    Raises:
        UsageError: where the directory cannot be written to, or for an id that is none.
    """
    # It becomes the name of a file, which must not lead out of the folder.
    if not is_id(failed.id):
        raise UsageError(f"{one_line(failed.id)!r} is no id: it has ten letters and digits.")
    text = json_numbers.to_json_text(failed)
    (path,) = write_texts({f"{failed.id}.json": text}, directory, what="failures", instead="folder")
    # A loop over a broken kernel keeps thousands: without a limit they fill the disk.
    for old in _by_age(path.parent)[MOST_KEPT:]:
        if old != path:
            old.unlink(missing_ok=True)
    return path


def load_failure(source: Path | str) -> KeptFailure:
    """The failure that ``keep_failure`` wrote.

    Args:
        source: A Path is read, a str is the JSON itself.

    Raises:
        UsageError: for anything else, another schema too.
    """
    return _failed(
        json_numbers.read_json(source, "failure", _LARGEST), json_numbers.source_name(source)
    )


def find_reproduction(
    wanted: str, reports: Path | str = "reports", kernel: str = ""
) -> Reproduction:
    """Return the failure that an id or a file names.

    Args:
        wanted: The id of a failure or of a Case, which is looked for in ``reports``/failures and
            in every report of the folder; else a file: a failure, a Case, or a Problem, which is
            to be compared.
        kernel: Of several that were asked the same Case, this one; one that was not is asked it
            now.

    Raises:
        UsageError: where there is none, or several kernels and none is meant; in one line.
    """
    if not is_id(wanted):
        if not Path(wanted).exists() or Path(wanted).is_dir():
            raise UsageError(
                f"{one_line(wanted)!r} is neither a file nor an id: reports show the ids of "
                "failures, of ten letters and digits."
            )
        return _of_file(Path(wanted))
    reports = Path(reports)
    files = sorted(reports.rglob("*.json"))[:_MOST_FILES] if reports.is_dir() else []
    broken: list[str] = []
    candidates = [one for path in files for one in _mentioned(path, wanted, broken)]
    if not candidates:
        raise UsageError(_unknown(wanted, reports, files, broken))
    named = [one for one in candidates if one.kernel == kernel]
    # A kernel that never failed the Case may be asked it too, to compare the two.
    if kernel:
        return (
            named[0]
            if named
            else Reproduction(case=candidates[0].case, source=candidates[0].source)
        )
    kernels = list(dict.fromkeys(one.kernel for one in candidates))
    if len(kernels) > 1:
        several = ", ".join(map(one_line, kernels))
        raise UsageError(f"{wanted} was asked of {several}: choose one with --kernel.")
    return candidates[0]


def _by_age(folder: Path) -> list[Path]:
    """Failures in ``folder``, the newest first."""

    def written_at(path: Path) -> float:
        try:
            return path.stat().st_mtime
        except OSError:  # another process was faster
            return 0.0

    return sorted((p for p in folder.glob("*.json") if is_id(p.stem)), key=written_at, reverse=True)


def _failed(data: Any, name: str) -> KeptFailure:
    if other := json_numbers.other_schema(data, _SCHEMA):
        raise UsageError(json_numbers.refusal_message(name, "failure", other))
    try:
        record = json_numbers.words_to_record_numbers(data.get("record"))
        failed = msgspec.convert(data | {"record": record}, KeptFailure)
    except (msgspec.ValidationError, RecursionError) as error:
        raise UsageError(json_numbers.refusal_message(name, "failure", str(error))) from None
    # Raises for a Case without a problem, here and not where it is shown later.
    problem_of(failed.record)
    return failed


def _of_file(path: Path) -> Reproduction:
    """Read the failure in a file, by what the file holds."""
    data = json_numbers.read_json(path, "failure, case or problem", _LARGEST)
    name = json_numbers.source_name(path)
    keys = set(data) if isinstance(data, dict) else set()
    if "record" in keys:
        return _of_failure(_failed(data, name), path)
    if "records" in keys:
        raise UsageError(f"{name} is a report: give the id of one of its records (case_id).")
    if "problem" in keys:
        return Reproduction(case=data, source=path)
    if "query" in keys:
        return Reproduction(case={"problem": data}, source=path)
    fact = "it has neither a record, nor a problem, nor a query length"
    raise UsageError(json_numbers.refusal_message(name, "failure, case or problem", fact))


def _of_failure(failed: KeptFailure, path: Path) -> Reproduction:
    return Reproduction(
        case=failed.record.case,
        kernel=failed.kernel,
        convention=failed.convention,
        device=failed.device,
        test=failed.test,
        source=path,
    )


def _mentioned(path: Path, wanted: str, broken: list[str]) -> Iterator[Reproduction]:
    """Yield what one file holds under an id; why it cannot be read goes to ``broken``."""
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST_REPORT + 1)
        # Parsing every report of a folder takes seconds; looking for ten letters does not.
        if wanted.encode() not in text and path.stem != wanted:
            return
        if path.parent.name == FAILURE_FOLDER:
            failed = load_failure(path)
            if wanted in {failed.id, failed.record.case_id}:
                yield _of_failure(failed, path)
            return
        report = load_report(path, Report)
    except UsageError as error:
        broken.append(str(error))
    except OSError as error:
        broken.append(f"{json_numbers.source_name(path)} cannot be read: {error.strerror}.")
    else:
        yield from _of_report(report, wanted, path)


def _of_report(report: Report, wanted: str, path: Path) -> Iterator[Reproduction]:
    records = [record for record in report.records if record.case_id == wanted]
    # Of a Case that several kernels were asked, those that failed are meant.
    failed = [record for record in records if record.status in FAILED_STATUSES]
    convention = _option(report.command, "--convention")
    for record in failed or records:
        yield Reproduction(
            case=record.case,
            kernel=record.kernel,
            # A built-in kernel has one convention, whatever was typed for others beside it.
            convention=convention if ":" in record.kernel else "",
            # The failure is of the device that it was seen on, whatever is here now.
            device="cpu" if report.environments[record.environment].device == "cpu" else "cuda",
            source=path,
        )


def _option(typed: str, name: str) -> str:
    """Return the value of an option in a command line; empty where it is not there."""
    try:
        words = shlex.split(typed)
    # Unbalanced quotes: a file that somebody edited may hold anything.
    except ValueError:
        return ""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        option, equals, value = word.partition("=")
        if option == name:
            return value if equals else following
    return ""


def _unknown(wanted: str, reports: Path, files: list[Path], broken: list[str]) -> str:
    kept = sum(path.parent.name == FAILURE_FOLDER for path in files)
    where = f"{one_line(str(reports))!r}"
    looked = f"{where} holds {kept} kept failures and {len(files) - kept} other JSON files"
    if not reports.is_dir():
        looked = f"there is no folder {where}"
    reason = f"; {broken[0].rstrip('.')}" if broken else ""
    return f"nothing is known of {wanted!r}: {looked}{reason}. Name another folder with --reports."

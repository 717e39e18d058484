"""The baseline: a file of what kernels could do, which later runs are compared with.

One entry a line, sorted, so that two branches change different lines and a diff reads well. Each
line has a checksum of its own, for the same reason.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
from msgspec.structs import replace

from attncheck.core import json_numbers
from attncheck.core.errors import AttncheckError, UsageError
from attncheck.core.sanitize_text import one_line
from attncheck.core.tensor_names import TensorName
from attncheck.records.record import Environment, Record, Status

_SCHEMA = 1

BASELINE_FILE = "attncheck-baseline.json"  # name of the file, in the folder of the project

LARGEST_BASELINE = 2**26  # bytes of the largest baseline that is read: some 100,000 entries

Key: TypeAlias = tuple[str, str, str]  # kernel, Case, architecture

_DIGITS = 6  # significant, of every number: a ten-thousandth of what chance moves, and short lines
# Empty too: a kernel whose bits change from call to call has no digest to keep.
_DIGEST = re.compile(r"(?:[0-9a-f]{32})?")
_PAIR: TypeAlias = tuple[str, Any]


class BaselineTensor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Kept numbers of one tensor; those of ``record.Accuracy``, and two measured."""

    rmse: float  # root mean square error
    # ideal, floor: of the ideal kernel, and of the exact result rounded; None of LSE.
    ideal: float | None = None
    floor: float | None = None
    # relative, freedom, ensemble: as of ``record.Accuracy``.
    relative: float
    freedom: float
    ensemble: tuple[float, ...]


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kernel on one Case on one architecture."""

    kernel: str  # the kernel
    # variant, dtype: what the Case is, for who reads the file.
    variant: str
    dtype: str
    case: str  # id of the Case
    # Kept whole: a plan that has changed must not silently drop a case that got worse.
    asked: dict[str, Any] = {}  # the Case: it is asked again where a plan has it no longer
    device: str  # see ``architecture``
    status: Status
    digest: str = ""  # of the bits; empty where they were not the same each time
    # What is kept of each tensor; none of a kernel that does not take the Case.
    tensors: dict[TensorName, BaselineTensor] = {}
    over_bound: float | None = None  # largest |error| ÷ deterministic bound of out
    versions: str  # key into the baseline's environments
    reason: str = ""  # why somebody accepted it in place of a better one; empty where nobody had to
    # Of a line, not of the file: two branches that add cases merge without a conflict.
    check: str = ""  # first 16 hexadecimal digits of the SHA-256 of all of the above

    @property
    def key(self) -> Key:
        """Key that it is looked up by."""
        return self.kernel, self.case, self.device

    def checked(self) -> Entry:
        """This entry with its own checksum."""
        line = _line(replace(self, check=""))
        return replace(self, check=hashlib.sha256(line.encode()).hexdigest()[:16])


class Baseline(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Results of a project's kernels at an earlier time."""

    schema: int = _SCHEMA
    attncheck: str
    environments: dict[str, Environment]  # by ``Environment.id``
    entries: tuple[Entry, ...]  # sorted by their keys


def architecture(environment: Environment) -> str:
    """Kind of device that numbers are compared on: a GPU's compute capability, or the processor."""
    return f"sm {environment.capability}" if environment.capability else environment.machine


def baseline_entries(
    records: Iterable[Record], environments: Mapping[str, Environment]
) -> tuple[Entry, ...]:
    """Return the entries of ``records``, whether right or wrong, in their order.

    Args:
        records: Answers to the question ``compare``; others are left out.
        environments: By the ids that the Records have.
    """
    # Probes and relations are right or wrong: only comparisons have an accuracy to keep.
    compared = (record for record in records if record.case.get("question") == "compare")
    return tuple(_entry(record, environments[record.environment]) for record in compared)


def make_baseline(
    kept: Iterable[Entry], environments: Mapping[str, Environment], attncheck: str
) -> Baseline:
    """The Baseline of these entries, sorted, each with its checksum.

    Args:
        kept: Each key once.
        environments: By ``Environment.id``; those that no entry names are left out.
    """
    ordered = tuple(entry.checked() for entry in sorted(kept, key=lambda entry: entry.key))
    # Entries that were replaced leave their environments behind.
    named = sorted({entry.versions for entry in ordered})
    return Baseline(
        attncheck=attncheck,
        environments={name: environments[name] for name in named},
        entries=ordered,
    )


def baseline_text(baseline: Baseline) -> str:
    """``baseline`` as JSON, one entry and one environment a line."""
    # Not json.dumps with an indent: version control merges line by line.
    environments = [
        f"{json.dumps(name)}: {_line(one)}" for name, one in baseline.environments.items()
    ]
    lines = [_line(entry) for entry in baseline.entries]
    return (
        f'{{\n"schema": {baseline.schema},\n"attncheck": {json.dumps(baseline.attncheck)},\n'
        f'"environments": {{{_lines(environments)}}},\n"entries": [{_lines(lines)}]\n}}\n'
    )


def read_baseline(source: Path | str) -> Baseline:
    """The Baseline that ``baseline_text`` wrote.

    Args:
        source: A Path is read, a str is the JSON itself.

    Raises:
        UsageError: for anything else, ``baseline invalid: …``: unreadable, cut off, another
            version, a key twice, a number that cannot be, a line that somebody changed.
    """
    try:
        data = json_numbers.read_json(source, "baseline", LARGEST_BASELINE)
        raw = source if isinstance(source, str) else source.read_text(encoding="utf-8")
        # msgspec takes the last of two equal keys; a merge by hand makes such files.
        json.loads(raw, object_pairs_hook=_each_once)
        if other := json_numbers.other_schema(data, _SCHEMA):
            raise UsageError(other)  # noqa: TRY301
        baseline = msgspec.convert(data, Baseline)
        _check(baseline)
    except (UsageError, OSError, ValueError, RecursionError) as error:
        name = json_numbers.source_name(source)
        fact = one_line(str(error)).removeprefix(f"{name} ").rstrip(".")
        raise UsageError(f"baseline invalid: {name}: {fact[:300]}.") from None
    return baseline


def _entry(record: Record, environment: Environment) -> Entry:
    problem = record.case.get("problem", {})
    over = record.judgement.out_over_bound if record.judgement else None
    return Entry(
        kernel=record.kernel,
        variant=record.variant,
        dtype=str(problem.get("dtype", "")),
        case=record.case_id,
        asked=record.case,
        device=architecture(environment),
        status=record.status,
        digest=record.digest if isinstance(record.digest, str) else "",
        tensors=_held(record),
        # Infinite where nothing is allowed, and then no number to compare with later.
        over_bound=None if over is None or not math.isfinite(over) else _short(over),
        versions=environment.id,
    ).checked()


def _held(record: Record) -> dict[TensorName, BaselineTensor]:
    if not isinstance(record.accuracy, dict):
        return {}
    gradients = record.gradients if isinstance(record.gradients, dict) else {}
    errors: dict[TensorName, Any] = {"out": record.out, **gradients}
    tensors = {}
    for name, one in record.accuracy.items():
        measured = errors.get(name)
        tensors[name] = BaselineTensor(
            rmse=_short(one.rmse),
            ideal=_short(measured.ideal_rmse) if measured else None,
            floor=_short(measured.floor_rmse) if measured else None,
            relative=_short(one.relative),
            freedom=_short(one.freedom),
            ensemble=tuple(map(_short, one.ensemble)),
        )
    return tensors


def _short(number: float) -> float:
    # Through text: what is read back is the very number that was kept.
    return float(f"{number:.{_DIGITS}g}")


def _line(struct: msgspec.Struct) -> str:
    # A lone surrogate of a foreign name is no Unicode text: its escape is.
    return json.dumps(json_numbers.to_plain_data(struct), ensure_ascii=False)


def _lines(lines: list[str]) -> str:
    return "\n" + ",\n".join(lines) + "\n" if lines else ""


def _each_once(pairs: list[_PAIR]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} is there twice")
    return fields


def _check(baseline: Baseline) -> None:
    """Raises ValueError for what the layout alone does not refuse."""
    seen: set[Key] = set()
    for name, environment in baseline.environments.items():
        if environment.id != name:
            raise ValueError(f"environment {name!r} has been changed by hand, or is damaged")
    for entry in baseline.entries:
        subject = f"the entry of kernel {entry.kernel!r}, case {entry.case!r}, {entry.device!r}"
        if entry.key in seen:
            raise ValueError(f"{subject} is there twice: delete one of the two lines")
        seen.add(entry.key)
        if entry.checked().check != entry.check:
            raise ValueError(f"{subject} has been changed by hand, or is damaged")
        if entry.versions not in baseline.environments:
            raise ValueError(f"{subject} names an environment that is not there")
        if entry.asked and not _is_asked(entry):
            raise ValueError(f"{subject} has another Case than its id says")
        if not _possible(entry):
            raise ValueError(f"{subject} has a number or digest that cannot be")


def _is_asked(entry: Entry) -> bool:
    """Return whether its Case is one, and the one whose id it has."""
    from attncheck.inputs.problem import Case

    try:
        return Case.from_json(entry.asked).id == entry.case
    except (AttncheckError, KeyError, TypeError):
        return False


def _possible(entry: Entry) -> bool:
    numbers = [entry.over_bound or 0.0]
    for held in entry.tensors.values():
        # 0.0 for None: what is not there cannot be wrong.
        numbers += [held.rmse, held.ideal or 0.0, held.floor or 0.0]
        numbers += [held.relative, held.freedom, *held.ensemble]
    finite = all(math.isfinite(number) and number >= 0 for number in numbers)
    return finite and _DIGEST.fullmatch(entry.digest) is not None

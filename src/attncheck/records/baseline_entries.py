"""The baseline: a file of kernels' measured accuracies, which later runs are compared with.

Each entry is a line with a checksum of its own, and lines are sorted, so that two branches change
different lines and diffs are readable.
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
from attncheck.records.record import Environment, Record, Status, gradients_of

_SCHEMA = 1

BASELINE_FILE = "attncheck-baseline.json"  # Name of the file in the project's folder.

LARGEST_BASELINE = 2**26  # Bytes of the largest baseline that is read: some 100,000 entries.

Key: TypeAlias = tuple[str, str, str]  # kernel, Case, architecture

_DIGITS = 6  # Significant digits of stored numbers: 10,000 times finer than random variation.
# A kernel whose bits change from call to call has an empty digest.
_DIGEST = re.compile(r"(?:[0-9a-f]{32})?")
_PAIR: TypeAlias = tuple[str, Any]


class BaselineTensor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Stored accuracy of one tensor, as in ``record.Accuracy``, and two reference errors."""

    rmse: float  # root mean square error
    # ideal, floor: RMSE of the ideal kernel, and of the rounded exact result; None for LSE.
    ideal: float | None = None
    floor: float | None = None
    # relative, freedom, ensemble: see ``record.Accuracy``.
    relative: float
    freedom: float
    ensemble: tuple[float, ...]


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kernel on one Case on one architecture."""

    kernel: str
    # variant, dtype: those of the Case, for human readers of the file.
    variant: str
    dtype: str
    case: str  # id of the Case
    # Stored so that a change of the plan does not silently drop a case that got worse.
    asked: dict[str, Any] = {}  # the Case, which is asked again even if the plan lacks it now
    device: str  # see ``architecture``
    status: Status
    digest: str = ""  # digest of the outputs' bits; empty where they vary from call to call
    # Accuracy of each tensor; empty where the kernel does not take the Case.
    tensors: dict[TensorName, BaselineTensor] = {}
    over_bound: float | None = None  # largest |error| ÷ deterministic bound of out
    versions: str  # key into the baseline's environments
    reason: str = ""  # why a worse result was accepted in place of a better one; empty otherwise
    # A checksum of each line, so that two branches that add cases merge without a conflict.
    check: str = ""  # first 16 hexadecimal digits of the SHA-256 of all of the above

    @property
    def key(self) -> Key:
        """Kernel, Case and architecture that identify the entry."""
        return self.kernel, self.case, self.device

    def checked(self) -> Entry:
        """Return the entry with its checksum filled in."""
        line = _line(replace(self, check=""))
        return replace(self, check=hashlib.sha256(line.encode()).hexdigest()[:16])


class Baseline(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Accuracies of a project's kernels in an earlier run."""

    schema: int = _SCHEMA
    attncheck: str
    environments: dict[str, Environment]  # by ``Environment.id``
    entries: tuple[Entry, ...]  # sorted by their keys


def architecture(environment: Environment) -> str:
    """Return the GPU's compute capability, or the processor's name; both decide about rounding."""
    return f"sm {environment.capability}" if environment.capability else environment.machine


def baseline_entries(
    records: Iterable[Record], environments: Mapping[str, Environment]
) -> tuple[Entry, ...]:
    """Return an entry for each Record that answers ``compare``, right or wrong, in order.

    Args:
        records: Records; those of other questions are left out.
        environments: Environments by the ids in the Records.
    """
    # Probes and relations are right or wrong; only comparisons have an accuracy to store.
    compared = (record for record in records if record.case.get("question") == "compare")
    return tuple(_entry(record, environments[record.environment]) for record in compared)


def make_baseline(
    kept: Iterable[Entry], environments: Mapping[str, Environment], attncheck: str
) -> Baseline:
    """Return the Baseline of some entries, sorted, each with its checksum.

    Args:
        kept: Entries with distinct keys.
        environments: Environments by id; those that no entry refers to are left out.
    """
    ordered = tuple(entry.checked() for entry in sorted(kept, key=lambda entry: entry.key))
    # Environments of replaced entries are no longer needed.
    named = sorted({entry.versions for entry in ordered})
    return Baseline(
        attncheck=attncheck,
        environments={name: environments[name] for name in named},
        entries=ordered,
    )


def baseline_text(baseline: Baseline) -> str:
    """Return ``baseline`` as JSON, with one entry or one environment per line."""
    # Version control merges line by line, which json.dumps with an indent would spoil.
    environments = [
        f"{json.dumps(name)}: {_line(one)}" for name, one in baseline.environments.items()
    ]
    lines = [_line(entry) for entry in baseline.entries]
    return (
        f'{{\n"schema": {baseline.schema},\n"attncheck": {json.dumps(baseline.attncheck)},\n'
        f'"environments": {{{_lines(environments)}}},\n"entries": [{_lines(lines)}]\n}}\n'
    )


def read_baseline(source: Path | str) -> Baseline:
    """Read a Baseline that ``baseline_text`` wrote.

    Args:
        source: A Path to read, or the JSON itself as a str.

    Raises:
        UsageError: ``baseline invalid: …`` if it is unreadable, truncated or of another version,
            has a duplicate key or an impossible number, or a line was changed by hand.
    """
    try:
        data = json_numbers.read_json(source, "baseline", LARGEST_BASELINE)
        raw = source if isinstance(source, str) else source.read_text(encoding="utf-8")
        # msgspec would take the last of two equal keys, which a merge by hand can produce.
        json.loads(raw, object_pairs_hook=_unique_fields)
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
        tensors=_baseline_tensors(record),
        # An infinite share, for an allowance of 0, cannot be compared later.
        over_bound=None if over is None or not math.isfinite(over) else _round(over),
        versions=environment.id,
    ).checked()


def _baseline_tensors(record: Record) -> dict[TensorName, BaselineTensor]:
    if not isinstance(record.accuracy, dict):
        return {}
    errors: dict[TensorName, Any] = {"out": record.out, **gradients_of(record)}
    tensors = {}
    for name, one in record.accuracy.items():
        measured = errors.get(name)
        tensors[name] = BaselineTensor(
            rmse=_round(one.rmse),
            ideal=_round(measured.ideal_rmse) if measured else None,
            floor=_round(measured.floor_rmse) if measured else None,
            relative=_round(one.relative),
            freedom=_round(one.freedom),
            ensemble=tuple(map(_round, one.ensemble)),
        )
    return tensors


def _round(number: float) -> float:
    # Rounded through text, so that reading the file gives exactly this number.
    return float(f"{number:.{_DIGITS}g}")


def _line(struct: msgspec.Struct) -> str:
    # A lone surrogate in a foreign name cannot be encoded, but its escape can.
    return json.dumps(json_numbers.to_plain_data(struct), ensure_ascii=False)


def _lines(lines: list[str]) -> str:
    return "\n" + ",\n".join(lines) + "\n" if lines else ""


def _unique_fields(pairs: list[_PAIR]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        duplicate = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{duplicate!r} is there twice")
    return fields


def _check(baseline: Baseline) -> None:
    """Raise ValueError for faults that the types of the fields cannot exclude."""
    keys: set[Key] = set()
    for name, environment in baseline.environments.items():
        if environment.id != name:
            raise ValueError(f"environment {name!r} has been changed by hand, or is damaged")
    for entry in baseline.entries:
        subject = f"the entry of kernel {entry.kernel!r}, case {entry.case!r}, {entry.device!r}"
        if entry.key in keys:
            raise ValueError(f"{subject} is there twice: delete one of the two lines")
        keys.add(entry.key)
        if entry.checked().check != entry.check:
            raise ValueError(f"{subject} has been changed by hand, or is damaged")
        if entry.versions not in baseline.environments:
            raise ValueError(f"{subject} names an environment that is not there")
        if entry.asked and not _has_own_case(entry):
            raise ValueError(f"{subject} has another Case than its id says")
        if not _has_valid_numbers(entry):
            raise ValueError(f"{subject} has a number or digest that cannot be")


def _has_own_case(entry: Entry) -> bool:
    """Return whether the entry's Case is valid and has the entry's id."""
    from attncheck.inputs.problem import Case

    try:
        return Case.from_json(entry.asked).id == entry.case
    except (AttncheckError, KeyError, TypeError):
        return False


def _has_valid_numbers(entry: Entry) -> bool:
    numbers = [entry.over_bound or 0.0]
    for tensor in entry.tensors.values():
        # A number that is None counts as 0.0, which is valid.
        numbers += [tensor.rmse, tensor.ideal or 0.0, tensor.floor or 0.0]
        numbers += [tensor.relative, tensor.freedom, *tensor.ensemble]
    finite = all(math.isfinite(number) and number >= 0 for number in numbers)
    return finite and _DIGEST.fullmatch(entry.digest) is not None

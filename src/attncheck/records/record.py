"""The Record: one kernel on one Case, as measured. Everything a user sees is rendered from it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from html import escape
from typing import Any, Literal

import msgspec

from attncheck.core.errors import UsageError
from attncheck.core.judgement import Judgement, Place, Unclaimed
from attncheck.core.sanitize_text import one_line
from attncheck.core.tensor_names import TensorName

__all__ = ["Record"]

Status = Literal[
    "pass",
    "warn",
    "inconclusive",
    "fail",
    "flaky",
    "unsupported",
    "error",
    "crash",
    "timeout",
    "oom",
    "oracle disagrees",
]
"""``pass`` to ``fail``: the judge's verdicts, with a judgement; ``flaky``: failed, but not when
asked again alone; ``unsupported``: the kernel refused the Case beforehand; ``error``: it raised;
``crash``, ``timeout``, ``oom``: its process died, exceeded its deadline, or ran out of memory;
``oracle disagrees``: the exact result itself is in doubt, so that the kernel is not judged."""

DEFAULT_DTYPE = "bf16"
"""The dtype of a check's questions if none is requested and the kernel takes it."""

# Without "oracle disagrees", which concerns the exact result and not the kernel.
FAILED_STATUSES: frozenset[Status] = frozenset({"fail", "error", "crash", "timeout", "oom"})
"""Statuses that count as a failure of the kernel."""

UNTRUSTED_STATUSES: frozenset[Status] = FAILED_STATUSES | {"flaky", "oracle disagrees"}
"""Statuses after which the question may not be counted as answered correctly."""


# All structs refuse unknown fields, so that a later version's report is not half understood.
class Environment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Machine and versions, on which the numbers depend besides the Case."""

    device: str  # ``cpu`` or the GPU's name
    capability: str = ""  # CUDA compute capability such as ``9.0``; empty on a CPU
    # On a CPU the vector instructions of the architecture decide about the last bits.
    machine: str  # processor architecture
    # python, torch, triton, numpy, attncheck: versions; triton is empty if not installed.
    python: str
    torch: str
    triton: str = ""
    numpy: str
    attncheck: str
    cuda: str = ""  # the CUDA version torch was built for; empty for a CPU build
    # Repairs of Triton's interpreter that were active; empty when kernels were compiled.
    # Repairs change what the interpreter computes, and so the results.
    interpreter: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """Eight hexadecimal digits by which Records refer to this environment."""
        # Eight digits are enough for the few environments of one file.
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:8]


class OutErrors(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Errors of out against the fp64 truth, over rows that see a key."""

    rmse: float
    # No kernel with this output format can have a smaller RMSE.
    floor_rmse: float  # RMSE of the truth correctly rounded to the output format
    # RMSE of the ideal kernel at the kernel's declared tile sizes, or else the default ones.
    ideal_rmse: float
    max_error: float  # largest absolute error; infinite when an element is not finite
    max_at: Place | None  # element of ``max_error``; None when there is no element
    bias: float
    # RMSE between the exact results on the inputs as stored and as drawn: the effect of rounding
    # the inputs, which is not part of the errors above.
    input_rmse: float
    elements: int
    nonfinite: int = 0  # elements that are NaN or infinite while the truth is finite
    # Their out is 0 by definition: any other value is a fault and not a rounding error.
    dead_rows: int = 0  # rows that see no key
    dead_rows_wrong: int = 0  # dead rows whose out is not exactly 0


class LseErrors(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Errors of LSE (natural log) against the fp64 truth, over rows that see a key.

    ``dead_rows_wrong`` counts rows that see no key and whose LSE is not −inf.
    """

    rmse: float
    max_error: float
    max_at: Place | None
    nonfinite: int = 0
    dead_rows_wrong: int = 0


class GradientErrors(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Errors of one gradient against the fp64 truth.

    For dq over rows that see a key, for dk and dv over keys that some row sees; elsewhere the exact
    gradient is 0.
    """

    rmse: float
    floor_rmse: float  # RMSE of the truth correctly rounded to the gradient's format
    # RMSE of the ideal kernel's backward after its own forward, at the kernel's declared tile
    # sizes, or else the default ones.
    ideal_rmse: float
    max_error: float  # largest absolute error; infinite when an element is not finite
    max_at: Place | None  # element of ``max_error``; None when there is no element
    bias: float
    elements: int
    nonfinite: int = 0  # elements that are NaN or infinite while the truth is finite


class ErrorMap(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Map of the errors in out: the largest |error| ÷ allowance of each group of rows and heads."""

    rows: int  # query rows of one cell; the last cell may have fewer
    heads: int  # query heads of one cell; the last cell may have fewer
    # One tuple for each group of heads, with one number for each group of rows: the maximum over
    # batches and head dimensions. Infinite where out is not finite, or wrong with an allowance of
    # 0.
    values: tuple[tuple[float, ...], ...]


class Explanation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fault that a kernel may have."""

    model: str  # id of the fault model
    sentence: str  # the fault in a sentence
    share: float  # share of the squared error that it explains, 0–1
    explains_all: bool  # whether the remaining error is within the bounds of rounding
    # Parameters of the fault: tile sizes, heads, or a fitted number.
    # msgspec copies the default for each Struct.
    parameters: dict[str, int | float | str] = {}
    # Parameters of the fault's other forms that explain as much, if they differ in words.
    others: tuple[dict[str, int | float | str], ...] = ()


class TileMap(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tiles of rows and keys that contribute to the error, as reconstructed from out and LSE."""

    rows: int  # query rows of one cell; the last cell may have fewer
    keys: int  # keys of one cell; the last cell may have fewer
    # One tuple for each group of rows, with one number for each group of keys: the error of those
    # keys' weights, as a share of the largest cell.
    values: tuple[tuple[float, ...], ...]


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fault models that explain the error of a kernel."""

    # The best first; empty where no fault model explains a relevant part of the error.
    ranked: tuple[Explanation, ...]
    # Several models may coincide on these problems.
    tied: int  # how many of them, from the first on, explain the error equally well
    # How many fault models were tried; 0 where the failure itself states the cause: then that is
    # the first of ``ranked``, followed by models that explain the error.
    tried: int
    problems: int = 1  # number of problems on which each model had to explain the output
    # ``named``: a model was confirmed on independent problems, or proven by repeating the call;
    # ``family``: only the kind of fault is known.
    level: Literal["named", "family", "unknown"] = "named"
    family: str = ""  # the kind of fault, in plain words
    # Observations if no model is named: wrong elements, shortest failing lengths, needed features.
    facts: tuple[str, ...] = ()
    # Map of the error by tiles; left out where it cannot be determined.
    tiles: TileMap | msgspec.UnsetType = msgspec.UNSET
    # Variant of the Record whose question suffices, asked first, for this one to fail in a new
    # process; empty if none is known, left out if it fails there alone.
    after: str | msgspec.UnsetType = msgspec.UNSET


class Accuracy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Size of the errors of one tensor, and how much of it may be chance."""

    rmse: float
    # RMSE in units of the errors of ideal kernels of several tilings; each row has its own unit
    # where roundings are independent.
    relative: float
    freedom: float  # degrees of freedom of its square: the effective number of independent errors
    # All tilings are equally valid: the differences between them are chance.
    ensemble: tuple[float, ...]  # ``relative`` of each of these ideal kernels


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kernel on one Case.

    Attributes:
        case_id, case: The Case and its short id.
        kernel: The subject's name.
        variant: The plan's name for the mask and score mod (``causal``, ``alibi``).
        heads: ``MHA``, ``GQA`` or ``MQA``; empty for softmax.
        status: See ``Status``.
        reason: Why unsupported, or what was raised, in one line; the judgement has a verdict's.
        out, lse: Errors; None where there is nothing to compare.
        gradients: Errors of each gradient by its name; left out without a backward.
        judgement: Whether the errors are due to rounding; None where the kernel was not judged.
        seconds: Median time of one call, ended by a device synchronisation, of forward and backward
            where there is one; None when not run.
        interpreted: Whether Triton's interpreter ran the kernel: its time says nothing of a GPU.
        tiling: Tile sizes of the ideal kernel, such as ``128×64``.
        environment: Key into the Report's environments.
        digest: First 32 hexadecimal digits of the SHA-256 of the outputs' bits; left out without
            outputs, or where it was not computed.
        accuracy: Accuracy of each output tensor, by its name, with which a later run is compared.
            Left out where it was not measured.
        error_map: Where the errors of out are; left out where nothing failed.
        diagnosis: What may be wrong; left out where nothing failed or no cause was looked for.
        unclaimed: The feature of the problem that exceeds the kernel's claims; left out where the
            problem is within them.
        frames: The calls through which the kernel raised, the innermost last, such as ``mine.py:7
            in forward``; left out where it did not raise.
    """

    case_id: str
    # JSON instead of a Case: reports are also read without torch or the file of a user's mods.
    case: dict[str, Any]
    kernel: str
    variant: str
    heads: str
    status: Status
    reason: str = ""
    out: OutErrors | None = None
    lse: LseErrors | None = None
    # Unset instead of None: the JSON of a forward has no field for gradients.
    gradients: dict[TensorName, GradientErrors] | msgspec.UnsetType = msgspec.UNSET
    judgement: Judgement | None = None
    seconds: float | None = None
    interpreted: bool = False
    tiling: str = ""
    # Only a key, since thousands of records share a handful of environments.
    environment: str
    digest: str | msgspec.UnsetType = msgspec.UNSET
    accuracy: dict[TensorName, Accuracy] | msgspec.UnsetType = msgspec.UNSET
    error_map: ErrorMap | msgspec.UnsetType = msgspec.UNSET
    diagnosis: Diagnosis | msgspec.UnsetType = msgspec.UNSET
    unclaimed: Unclaimed | msgspec.UnsetType = msgspec.UNSET
    frames: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET

    def __str__(self) -> str:
        """Return a line: ``mine.py::f causal: fail: bound: out[0, 3] = 0.41, but …``."""
        verdict = self.judgement or ": ".join(filter(None, (self.status, self.reason)))
        return one_line(f"{' '.join(filter(None, (self.kernel, self.variant)))}: {verdict}")

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:  # noqa: FBT001  (IPython's)
        printer.text(str(self))


def reason_of(record: Record) -> str:
    """Return what was raised or why the Case was refused, or else the judgement's reason."""
    return record.reason or (record.judgement.reason if record.judgement else "")


def gradients_of(record: Record) -> dict[TensorName, GradientErrors]:
    """Return the errors of gradients; none without a backward or without a measurement."""
    return record.gradients if isinstance(record.gradients, dict) else {}


class Report(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Records of a run, with the data that they share."""

    # Readers refuse any other number, since fields may have changed their meaning.
    schema: int = 3
    # Without paths, since a report is passed on to others.
    command: str
    environments: dict[str, Environment]
    kernels: dict[str, str]  # name of each kernel asked for → its one-line summary
    # Not among the records, which need a Case: these kernels were asked none.
    absent: dict[str, str]  # kernels that can run nothing here → why (one line each)
    # Kernels without declared capabilities → a line for each finding about the problems that they
    # take; left out where they take all that was tried.
    claims: dict[str, tuple[str, ...]] | msgspec.UnsetType = msgspec.UNSET
    # What is otherwise than in a plain function's convention, and was tested as it is; left out
    # where nothing is.
    deviation: str | msgspec.UnsetType = msgspec.UNSET
    # Why the run ended early, and how far it came; left out where it was complete.
    incomplete: str | msgspec.UnsetType = msgspec.UNSET
    records: tuple[Record, ...]

    def __str__(self) -> str:
        """Return a line for each Record."""
        return "\n".join(map(str, self.records))

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def join_reports(reports: Sequence[Report]) -> Report:
    """Join the parts of a run into one Report: records in the order given, commands in a row.

    A kernel is absent if it is absent in every report that asked for it.

    Raises:
        UsageError: where two reports measured the same kernel on the same Case and machine.
    """
    if len(reports) == 1:
        return reports[0]
    records = tuple(record for report in reports for record in report.records)
    seen: set[tuple[str, str, str]] = set()
    for record in records:
        # With the variant, since a plan may ask one Case under two names.
        place = record.kernel, record.environment, f"{record.variant} {record.case}"
        if place in seen:
            raise UsageError(
                f"{record.kernel} on {record.variant} {record.heads} is in two of the reports: "
                "give each part of a run once."
            )
        seen.add(place)
    # A kernel that ran in some part is not absent, even if other machines cannot run it.
    present = {name for report in reports for name in set(report.kernels) - set(report.absent)}
    return Report(
        command="; ".join(dict.fromkeys(report.command for report in reports)),
        environments={key: env for report in reports for key, env in report.environments.items()},
        incomplete="; ".join(report.incomplete for report in reports if report.incomplete)
        or msgspec.UNSET,
        kernels={name: text for report in reports for name, text in report.kernels.items()},
        absent={
            name: why
            for report in reports
            for name, why in report.absent.items()
            if name not in present
        },
        records=records,
    )

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
"""The judge's four, which mean that there is a judgement below; ``flaky``: failed, and did not when
it was asked once more alone; ``unsupported``: said beforehand; ``error``: raised; ``crash``,
``timeout``, ``oom``: its process died, did not come back in time, or had no memory left; ``oracle
disagrees``: the truth itself is in doubt, and nothing is said of the kernel."""

# Not "oracle disagrees": that tells of the truth, and nothing of the kernel.
FAILED_STATUSES: frozenset[Status] = frozenset({"fail", "error", "crash", "timeout", "oom"})
"""Those that fail a kernel."""

UNTRUSTED_STATUSES: frozenset[Status] = FAILED_STATUSES | {"flaky", "oracle disagrees"}
"""Those after which nobody may say that what was asked holds."""


# Here and below unknown fields are refused: a later version must not be read by half.
class Environment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings that the numbers depend on besides the Case."""

    device: str  # ``cpu`` or the GPU's own name
    capability: str = ""  # CUDA compute capability such as ``9.0``; empty on a CPU
    # Other architectures have other vector instructions, and so other bits on a CPU.
    machine: str  # processor architecture
    # python, torch, triton, numpy, attncheck: versions; triton is empty where it is missing.
    python: str
    torch: str
    triton: str = ""
    numpy: str
    attncheck: str
    cuda: str = ""  # the CUDA version torch was built for; empty without
    # Repairs of Triton's interpreter that were on; empty when kernels were compiled.
    # A repair changes what the interpreter computes: results belong to it.
    interpreter: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """Eight hexadecimal digits that stand for it, by which Records name it."""
        # Eight are enough to tell the few environments of one file apart.
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:8]


class OutErrors(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Errors of out against the fp64 truth, over rows that see a key."""

    rmse: float
    # No kernel whose output has this format can do better.
    floor_rmse: float  # the same for the truth correctly rounded to the output format
    # The same for the ideal kernel at the kernel's own tiling, or the default one.
    ideal_rmse: float
    max_error: float  # largest absolute error; infinite when an element is not finite
    max_at: Place | None  # where; None when there is no element
    bias: float
    # RMSE between the exact results on the inputs as stored and as drawn: what rounding the
    # inputs costs, whatever the kernel. Not part of any error above.
    input_rmse: float
    elements: int
    nonfinite: int = 0  # elements that are NaN or infinite while the truth is finite
    # Out is 0 there by definition: anything else is a mistake, and no rounding.
    dead_rows: int = 0  # rows that see no key
    dead_rows_wrong: int = 0  # those whose out is not exactly 0


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

    Of dq over rows that see a key, of dk and dv over keys that some row sees; elsewhere the exact
    gradient is 0.
    """

    rmse: float
    floor_rmse: float  # the same for the truth correctly rounded to the gradient's format
    # The same for the ideal kernel's backward, after its own forward, at the kernel's own tiling,
    # or the default one.
    ideal_rmse: float
    max_error: float  # largest absolute error; infinite when an element is not finite
    max_at: Place | None  # where; None when there is no element
    bias: float
    elements: int
    nonfinite: int = 0  # elements that are NaN or infinite while the truth is finite


class ErrorMap(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Map of the errors in out: the largest |error| ÷ allowance of each part of it."""

    rows: int  # query rows of one cell, the last one's may be fewer
    heads: int  # query heads of one cell, likewise
    # A line for each group of heads, of a number for each group of rows; over all batches and
    # elements of the head's vectors. Infinite where out is not finite, or wrong where nothing is
    # allowed.
    values: tuple[tuple[float, ...], ...]


class Explanation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fault that a kernel may have."""

    model: str  # its id among the fault models
    sentence: str  # what it is
    share: float  # of the squared error that it explains, 0–1
    explains_all: bool  # whether what is left is within what rounding allows
    # In which form: tile sizes, heads, or a number that was fitted.
    # msgspec makes a new one for each Struct: the default is not shared.
    parameters: dict[str, int | float | str] = {}


class TileMap(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tiles of rows and keys that the error is from, as far as out and LSE tell."""

    rows: int  # query rows of one cell, the last one's may be fewer
    keys: int  # keys of one cell, likewise
    # A line for each group of rows, of a number for each group of keys: by how much the weights
    # of those keys are off, as a share of the largest such cell.
    values: tuple[tuple[float, ...], ...]


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fault models that explain the error of a kernel."""

    # The best first; none where no fault model explains anything to speak of.
    ranked: tuple[Explanation, ...]
    # Models may coincide on these problems: then the first is no better than the next.
    tied: int  # how many of them, from the first on, explain it equally well
    # How many fault models were tried; 0 where the failure says by itself what is wrong: that is
    # first then, and models that explain its error come behind it.
    tried: int
    problems: int = 1  # on how many problems each had to explain what the kernel gave
    # ``named``: one of them was confirmed on independent problems, or is proven by asking again;
    # ``family``: no more than the kind of fault is known.
    level: Literal["named", "family", "unknown"] = "named"
    family: str = ""  # the kind of fault, in plain words
    # What was seen where nothing is named: where it is wrong, since when, without what it is right.
    facts: tuple[str, ...] = ()
    # Where the error is by tiles; left out where that cannot be told.
    tiles: TileMap | msgspec.UnsetType = msgspec.UNSET


class Accuracy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Size of the errors of one tensor, and how much of it is chance."""

    rmse: float
    # The same in units of what ideal kernels of several tilings err by, each row in its own where
    # roundings are independent.
    relative: float
    freedom: float  # degrees of freedom of its square: as how many independent errors they count
    # Other tilings are as right: how far these lie apart is chance.
    ensemble: tuple[float, ...]  # ``relative`` of each of those ideal kernels


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kernel on one Case.

    Attributes:
        case_id, case: The Case and its short id.
        kernel: The subject's name.
        variant: The plan's name for the mask and score mod (``causal``, ``alibi``).
        heads: ``MHA``, ``GQA`` or ``MQA``; empty for softmax.
        status: See ``Status``.
        reason: Why unsupported, or what was raised, in one line; a verdict's is its judgement's.
        out, lse: Errors; None where there is nothing to compare.
        gradients: Errors of each gradient by its name; left out without a backward.
        judgement: Whether these are rounding; None where the kernel was not judged.
        seconds: Median time of one call, ended by a device synchronisation, of forward and backward
            where there is one; None when not run.
        interpreted: Whether the kernel ran in Triton's interpreter: its time says nothing of a GPU.
        tiling: Tile sizes the ideal kernel was given, as ``128×64``.
        environment: Key into the Report's environments.
        digest: SHA-256 of the bits of what the kernel gave, in 32 hexadecimal digits: equal ones
            are equal bit for bit; left out where there is nothing, or nobody asked.
        accuracy: Of each tensor that it gave, by its name: what a later run is compared with. Left
            out where nobody asked.
        error_map: Where the errors of out are; left out where nothing failed.
        diagnosis: What may be wrong; left out where nothing failed, or nobody looked.
        unclaimed: Of a problem beyond what the kernel was found to take, what it has of that; left
            out of any other.
    """

    case_id: str
    # As JSON, not as a Case: a report is read where neither torch nor the mods of its file are.
    case: dict[str, Any]
    kernel: str
    variant: str
    heads: str
    status: Status
    reason: str = ""
    out: OutErrors | None = None
    lse: LseErrors | None = None
    # Unset, not None: the JSON of a forward alone has no word on gradients.
    gradients: dict[TensorName, GradientErrors] | msgspec.UnsetType = msgspec.UNSET
    judgement: Judgement | None = None
    seconds: float | None = None
    interpreted: bool = False
    tiling: str = ""
    # A key: thousands of records share a handful of environments.
    environment: str
    digest: str | msgspec.UnsetType = msgspec.UNSET
    accuracy: dict[TensorName, Accuracy] | msgspec.UnsetType = msgspec.UNSET
    error_map: ErrorMap | msgspec.UnsetType = msgspec.UNSET
    diagnosis: Diagnosis | msgspec.UnsetType = msgspec.UNSET
    unclaimed: Unclaimed | msgspec.UnsetType = msgspec.UNSET

    def __str__(self) -> str:
        """``mine.py::f causal: fail: bound: out[0, 3] = 0.41, but …``."""
        verdict = self.judgement or ": ".join(filter(None, (self.status, self.reason)))
        return one_line(f"{' '.join(filter(None, (self.kernel, self.variant)))}: {verdict}")

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:  # noqa: FBT001  (IPython's)
        printer.text(str(self))


def reason_of(record: Record) -> str:
    """Return what was raised, or why it was refused; else its verdict's reason."""
    return record.reason or (record.judgement.reason if record.judgement else "")


class Report(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Records with what they share."""

    # Readers refuse every other number: a field may have changed its meaning.
    schema: int = 3
    # Without paths, since a report is passed on: it must not tell of somebody's disk.
    command: str
    environments: dict[str, Environment]
    kernels: dict[str, str]  # name of each kernel asked for → its one-line summary
    # Here and not among the records: no Case was asked, so there is none to name.
    absent: dict[str, str]  # kernels that can run nothing here → why (one line each)
    # Kernels that nobody has declared anything of → what was found that they take, a line each;
    # left out where they take all that was tried.
    claims: dict[str, tuple[str, ...]] | msgspec.UnsetType = msgspec.UNSET
    # Why it ends early, and how far it came; left out where it does not.
    incomplete: str | msgspec.UnsetType = msgspec.UNSET
    records: tuple[Record, ...]

    def __str__(self) -> str:
        """A line for each Record."""
        return "\n".join(map(str, self.records))

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def join_reports(reports: Sequence[Report]) -> Report:
    """Join the parts of a run into one Report: records in the order given, commands in a row.

    A kernel is absent where it is in every report that asked for it.

    Raises:
        UsageError: where two reports measured the same kernel on the same Case and machine.
    """
    if len(reports) == 1:
        return reports[0]
    records = tuple(record for report in reports for record in report.records)
    seen: set[tuple[str, str, str]] = set()
    for record in records:
        # The variant too: two of a plan may ask the same Case under two names.
        place = record.kernel, record.environment, f"{record.variant} {record.case}"
        if place in seen:
            raise UsageError(
                f"{record.kernel} on {record.variant} {record.heads} is in two of the reports: "
                "give each part of a run once."
            )
        seen.add(place)
    # A kernel that some part could run is not absent, whatever the other machines lack.
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

"""The fields of a Record's Problem that reports sort by and show, read from the JSON Case."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import msgspec

from attncheck.core.errors import UsageError
from attncheck.core.mod_spec import Spec
from attncheck.core.paged_layout import Paging
from attncheck.core.sanitize_text import one_line

if TYPE_CHECKING:
    from attncheck.records.bench_report import BenchCell
    from attncheck.records.record import Record
    from attncheck.records.survey_reports import OracleOnCase


class ProblemSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a Problem that a reader sorts by; a Problem may have more."""

    batch: int
    heads: int
    kv_heads: int
    query: int
    kv: int
    head_dim: int
    value_dim: int
    dtype: str
    mask: dict[str, Any]
    score: dict[str, Any]
    scale: float
    distribution: str
    seed: int
    operation: str = "attention"
    sink: bool = False
    paging: dict[str, Any] | None = None
    backward: bool = False
    dlse: bool = False
    dcaptured: bool = False

    @property
    def shape(self) -> str:
        """All sizes except the heads, which differ between MHA and GQA: ``B1 Q128 K96 D64``.

        For a softmax the heads are included: ``B1 H1 R128 C96``, with rows and columns.
        """
        if self.operation == "softmax":
            return f"B{self.batch} H{self.heads} R{self.query} C{self.kv}"
        return f"B{self.batch} Q{self.query} K{self.kv} {self.dims}"

    @property
    def dims(self) -> str:
        """``D64``, or ``D64/32`` with another value_dim."""
        values = "" if self.value_dim == self.head_dim else f"/{self.value_dim}"
        return f"D{self.head_dim}{values}"

    @property
    def size(self) -> int:
        """Number of scores times head_dim, by which the smallest of several Problems is chosen."""
        return self.batch * self.heads * self.query * self.kv * self.head_dim

    @property
    def full_shape(self) -> str:
        """All sizes: ``B1 H4/2 Q128 K96 D64``."""
        if self.operation == "softmax":
            return self.shape
        return self.shape.replace(" Q", f" H{self.head_counts} Q", 1)

    @property
    def backward_too(self) -> str:
        """``backward``, with its further gradients; empty for a forward alone."""
        text = "" if not self.backward else "backward of out and LSE" if self.dlse else "backward"
        return f"{text} to captured numbers" if self.dcaptured else text

    @property
    def head_counts(self) -> str:
        """``4``, or ``4/2`` where query heads share key heads."""
        return str(self.heads) if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"

    @property
    def mod_names(self) -> tuple[str, ...]:
        """Names of the mask, score mod and other features: ``causal``, ``alibi``, ``backward``."""
        if self.operation == "softmax":
            return ("softmax",)
        mask, score = str(self.mask.get("name", "")), str(self.score.get("name", ""))
        parts = [mask] + ([score] if score not in {"none", ""} else [])
        parts += ["sink"] * self.sink + ["paged"] * bool(self.paging)
        return (*parts, *["backward"] * self.backward)

    @property
    def mods(self) -> tuple[str, ...]:
        """The mask, score mod, sink and pages with their parameters: ``softcap(cap=20.0)``."""
        mods = ["softmax" if self.operation == "softmax" else str(Spec.from_json(self.mask))]
        if self.score.get("name") != "none":
            mods.append(str(Spec.from_json(self.score)))
        mods += ["sink"] if self.sink else []
        return (*mods, *([str(Paging.from_json(self.paging))] if self.paging else []))

    @property
    def line(self) -> str:
        """``bf16 · B1 Q24 K24 D8 · heads 2/1 · seed 0``."""
        heads = [] if self.operation == "softmax" else [f"heads {self.head_counts}"]
        return " · ".join([self.dtype, self.shape, *heads, f"seed {self.seed}"])

    @property
    def full_line(self) -> str:
        """All fields in a line: ``bf16 causal B1 H4/2 Q128 K96 D64 normal seed 0``."""
        mods = list(self.mods)
        flags = {"backward": self.backward, "dLSE": self.dlse, "dcaptured": self.dcaptured}
        mods += [name for name, is_set in flags.items() if is_set]
        scale = "" if self.has_usual_scale else f" scale {self.scale:g}"
        parts = [self.dtype, *mods, self.full_shape, self.distribution, f"seed {self.seed}"]
        return " ".join(parts) + scale

    @property
    def has_usual_scale(self) -> bool:
        """Return whether the scale is 1/√head_dim in fp32; True for a softmax, which has none."""
        if self.operation == "softmax":
            return True
        # Rounded by struct, so that reading a report need not load NumPy.
        (usual,) = struct.unpack("<f", struct.pack("<f", self.head_dim**-0.5))
        return bool(self.scale == usual)


def problem_of(record: Record | OracleOnCase | BenchCell) -> ProblemSummary:
    """Return the Problem of ``record``; raise UsageError if its Case has none."""
    # msgspec ignores unknown fields, so that a later version's Problem can still be listed.
    try:
        return msgspec.convert(record.case.get("problem"), ProblemSummary)
    except msgspec.ValidationError as error:
        raise UsageError(
            f"record {one_line(record.case_id)!r} holds no problem: {one_line(str(error))}."
        ) from None

"""The Problem of a Record, read from the Case that it carries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from attncheck.core.errors import UsageError
from attncheck.core.sanitize_text import one_line

if TYPE_CHECKING:
    from attncheck.records.record import Record
    from attncheck.records.survey_reports import Certificate, OracleRecord

__all__ = ["ProblemSummary", "problem_of"]


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
        """Sizes but the heads, which differ between MHA and GQA: ``B1 Q128 K96 D64``.

        Of a softmax all of them: ``B1 H1 R128 C96``, rows and columns.
        """
        if self.operation == "softmax":
            return f"B{self.batch} H{self.heads} R{self.query} C{self.kv}"
        dims = str(self.head_dim)
        if self.value_dim != self.head_dim:
            dims += f"/{self.value_dim}"
        return f"B{self.batch} Q{self.query} K{self.kv} D{dims}"

    @property
    def backward_too(self) -> str:
        """``backward``, with what else there is of it; empty of a forward alone."""
        said = "" if not self.backward else "backward of out and LSE" if self.dlse else "backward"
        return f"{said} to captured numbers" if self.dcaptured else said

    @property
    def line(self) -> str:
        """``bf16 · B1 Q24 K24 D8 · heads 2/1 · seed 0``."""
        heads = [] if self.operation == "softmax" else [f"heads {self.head_counts}"]
        return " · ".join([self.dtype, self.shape, *heads, f"seed {self.seed}"])

    @property
    def head_counts(self) -> str:
        """``4``, or ``4/2`` where query heads share key heads."""
        return str(self.heads) if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"


def problem_of(record: Record | OracleRecord | Certificate) -> ProblemSummary:
    """The Problem of ``record``; raises UsageError when its Case holds none."""
    try:
        return msgspec.convert(record.case.get("problem"), ProblemSummary)
    except msgspec.ValidationError as error:
        raise UsageError(
            f"record {one_line(record.case_id)!r} holds no problem: {one_line(str(error))}."
        ) from None

"""Excerpts: some sequences, heads, rows and keys of a Problem as a Problem, with its tensors.

Indices in an excerpt's mask or score mod count from its first sequence, row and key. Masks of the
library keep a name where possible, as many kernels take only those; others become expressions.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import cast

import torch

from attncheck.core.errors import ProblemError
from attncheck.core.mod_spec import FULL, Spec
from attncheck.core.outputs import Outputs
from attncheck.core.paged_layout import Paging
from attncheck.core.tensor_names import TensorName
from attncheck.inputs.input_tensors import Descale, Inputs
from attncheck.inputs.problem import Problem

# Score mods that read no index, and those that read only the head and the distance key − row.
_NO_INDEX = {"none", "softcap", "temperature"}
_DISTANCE = {"alibi", "relative_bias"}
_OF_LOSS = {"dout", "dlse"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Excerpt:
    """The indices that an excerpt takes from a Problem; no range is empty."""

    sequences: range
    rows: range
    keys: range
    heads: range | None = None  # From head 0 on, whole groups that share a key head; None: all.

    @classmethod
    def of(
        cls,
        problem: Problem,
        *,
        sequences: range | None = None,
        rows: range | None = None,
        keys: range | None = None,
        heads: range | None = None,
    ) -> Excerpt:
        """Return an excerpt with the given ranges; axes that are not given are taken whole."""
        return cls(
            heads=heads,
            sequences=range(problem.batch) if sequences is None else sequences,
            rows=range(problem.query) if rows is None else rows,
            keys=range(problem.kv) if keys is None else keys,
        )

    @property
    def offset(self) -> int:
        """Return the index of the first row minus that of the first key."""
        return self.rows.start - self.keys.start

    @property
    def from_the_start(self) -> bool:
        """Return whether all indices are those of the whole Problem."""
        return not (self.sequences.start or self.rows.start or self.keys.start)

    def problem(self, whole: Problem) -> Problem:
        """Return the excerpt as a Problem; raise ProblemError if a mod cannot be shifted."""
        score = _shift_score(whole.score, self)
        if score is None:
            raise ProblemError(f"{whole.score} reads indices that an excerpt cannot shift.")
        heads = self._heads(whole)
        if heads < whole.heads and not _NO_INDEX.issuperset(one.name for one in score.walk()):
            raise ProblemError(f"{whole.score} may be another for another number of heads.")
        return whole.replace(
            batch=len(self.sequences),
            heads=heads,
            kv_heads=heads // whole.group,
            query=len(self.rows),
            kv=len(self.keys),
            mask=_shift_mask(whole.mask, whole, self),
            score=score,
            paging=_paging(whole.paging, self),
        )

    def _heads(self, whole: Problem) -> int:
        return whole.heads if self.heads is None else len(self.heads)

    def inputs(self, whole: Inputs) -> Inputs:
        """Return contiguous copies of the excerpt's tensors; raises ProblemError as ``problem``."""
        problem = self.problem(whole.problem)
        b, rows, keys = (slice(r.start, r.stop) for r in (self.sequences, self.rows, self.keys))
        h, of_keys = slice(problem.heads), slice(problem.kv_heads)
        scales = whole.descale
        loss = {n: x[b, h, rows].clone() for n, x in whole.tensors().items() if n in _OF_LOSS}
        return Inputs(
            problem=problem,
            q=whole.q[b, h, rows].clone(memory_format=torch.contiguous_format),
            k=whole.k[b, of_keys, keys].clone(memory_format=torch.contiguous_format),
            v=whole.v[b, of_keys, keys].clone(memory_format=torch.contiguous_format),
            descale=scales
            and Descale(**{name: getattr(scales, name)[b, of_keys] for name in ("q", "k", "v")}),
            sink=None if whole.sink is None else whole.sink[h],
            **loss,
        )

    def outputs(self, whole: Outputs, problem: Problem) -> Outputs:
        """Return the excerpt's part of the whole Problem's outputs.

        Gradients are sums over rows, so they need an excerpt with all rows of its heads.

        Args:
            problem: The excerpt as a Problem, with or without a backward.
        """
        tensors, h, of_keys = whole.tensors(), slice(problem.heads), slice(problem.kv_heads)
        b, rows = (slice(r.start, r.stop) for r in (self.sequences, self.rows))
        parts: dict[TensorName, torch.Tensor] = {}
        for name in tensors.keys() & {"out", "lse"}:
            parts[name] = tensors[name][b, h, rows]
        if problem.backward:
            parts |= {n: tensors[n] for n in tensors.keys() - parts.keys()}
            for name in parts.keys() & {"dq", "dk", "dv"}:
                parts[name] = parts[name][b, h if name == "dq" else of_keys]
            if "dsink" in parts:
                parts["dsink"] = parts["dsink"][h]
        return Outputs(**parts)


def can_excerpt(whole: Problem, excerpt: Excerpt) -> bool:
    """Return whether the mask and score mod can be shifted to the excerpt."""
    try:
        excerpt.problem(whole)
    except ProblemError:
        return False
    return True


def _paging(paging: Paging | None, at: Excerpt) -> Paging | None:
    """Return the paging, without shared pages if the excerpt leaves out the first keys."""
    return replace(paging, shared=0) if paging is not None and at.keys.start else paging


def _shift_score(score: Spec, at: Excerpt) -> Spec | None:
    if score.name == "chain":
        parts = [_shift_score(part, at) for part in score.parts]
        return None if None in parts else Spec.of("chain", *cast("list[Spec]", parts))
    if score.name == "expression":
        return _shift_expression(score, at)
    same = score.name in _NO_INDEX or (score.name in _DISTANCE and at.offset == 0)
    return score if same or at.from_the_start else None


def _shift_mask(mask: Spec, whole: Problem, at: Excerpt) -> Spec:
    if mask.name in {"and", "or", "not"}:
        return Spec.of(mask.name, *(_shift_mask(part, whole, at) for part in mask.parts))
    if mask.name in _SHIFTS:
        return _SHIFTS[mask.name](mask, at)
    if mask.name == "bottom_right":
        return _shift_bottom_right(mask, whole, at)
    if mask.name in {"causal", "causal_bottom_right"}:
        return _diagonal(at.offset + (whole.kv - whole.query) * (mask.name != "causal"), at)
    if mask == FULL or (at.from_the_start and not _depends_on_length(mask)):
        return mask
    if mask.name == "offset":
        return _shift_mask(mask.parts[0], *_unshift(whole, at, mask.values["rows"]))
    raise ProblemError(f"{mask} cannot be shifted: nothing is known of it but its name.")


def _unshift(whole: Problem, at: Excerpt, rows: int) -> tuple[Problem, Excerpt]:
    """Undo an ``offset``: return the longer Problem, and the excerpt moved ``rows`` rows down."""
    moved = range(at.rows.start + rows, at.rows.stop + rows)
    return whole.replace(query=whole.query + rows, mask=FULL), replace(at, rows=moved)


def _depends_on_length(mask: Spec) -> bool:
    """Return whether the mask reads lengths, so that an ``offset`` of it changes with them."""
    return any(part.name == "padding" or "bottom_right" in part.name for part in mask.walk())


def _diagonal(offset: int, at: Excerpt) -> Spec:
    """Return the mask in which row i sees the keys j ≤ i + offset."""
    if offset == 0:
        return Spec.of("causal")
    if offset == len(at.keys) - len(at.rows):
        return Spec.of("causal_bottom_right")
    return Spec.of("expression", text=f"{_row(offset)} >= kv_idx")


def _row(offset: int) -> str:
    return f"q_idx + {offset}" if offset > 0 else f"q_idx - {-offset}" if offset else "q_idx"


def _shift_window(mask: Spec, at: Excerpt) -> Spec:
    if at.offset == 0:
        return mask
    # All windows beyond the largest distance are equal; the number must fit in 32 bits.
    window = min(mask.values["window"], at.rows.stop + at.keys.stop)
    row = _row(at.offset)
    return Spec.of("expression", text=f"({row} >= kv_idx) & ({row} < kv_idx + {window})")


def _shift_prefix(mask: Spec, at: Excerpt) -> Spec:
    prefix = max(0, mask.values["prefix"] - at.keys.start)
    if at.offset == 0:
        return Spec.of("prefix_lm", prefix=prefix)
    return Spec.of(
        "expression", text=f"(kv_idx < {min(prefix, len(at.keys))}) | ({_row(at.offset)} >= kv_idx)"
    )


def _shift_padding(mask: Spec, at: Excerpt) -> Spec:
    lengths = mask.values["lengths"][at.sequences.start : at.sequences.stop]
    own = [max(0, min(length - at.keys.start, len(at.keys))) for length in lengths]
    return Spec.of("padding", lengths=own)


def _shift_bottom_right(mask: Spec, whole: Problem, at: Excerpt) -> Spec:
    """Return the mask of the keys up to which the excerpt's last row sees them."""
    before = at.keys.start + whole.query - at.rows.stop
    lengths = mask.values["lengths"][at.sequences.start : at.sequences.stop]
    # Without keys before the last row's own, no row sees any.
    own = [max(0, length - before) for length in lengths]
    if max(own) > len(at.keys):
        raise ProblemError(f"{mask} cannot be shifted: the excerpt ends before its last keys.")
    return Spec.of("bottom_right", *mask.parts, lengths=own)


def _shift_document(mask: Spec, at: Excerpt) -> Spec:
    """Cut off the documents before the excerpt; those wholly before it become empty."""
    lengths = mask.values["lengths"]
    ends = list(accumulate(lengths))
    if at.offset == 0:
        first = at.rows.start
        left = (end - max(end - length, first) for length, end in zip(lengths, ends, strict=True))
        return Spec.of("document", lengths=[max(0, length) for length in left])
    blocks = []
    for length, end in zip(lengths, ends, strict=True):
        rows = range(max(end - length, at.rows.start), min(end, at.rows.stop))
        keys = range(max(end - length, at.keys.start), min(end, at.keys.stop))
        if rows and keys:
            blocks.append(_block_mask(rows, keys, at))
    return Spec.of("or", *blocks) if blocks else Spec.of("not", FULL)


def _block_mask(rows: range, keys: range, at: Excerpt) -> Spec:
    """Return the mask in which ``rows`` see ``keys``, both counted in the whole Problem."""
    sides = ((rows, at.rows.start, "q_idx"), (keys, at.keys.start, "kv_idx"))
    text = " & ".join(
        f"({name} >= {which.start - first}) & ({name} < {which.stop - first})"
        for which, first, name in sides
    )
    return Spec.of("expression", text=text)


def _shift_expression(written: Spec, at: Excerpt) -> Spec:
    """Return the expression with its indices counted from the start of the whole Problem."""
    text = written.values["text"]
    starts = {"b": at.sequences.start, "q_idx": at.rows.start, "kv_idx": at.keys.start}
    for name, start in starts.items():
        if start:
            text = re.sub(rf"\b{name}\b", f"({name} + {start})", text)
    return Spec.of("expression", text=text)


_SHIFTS: dict[str, Callable[[Spec, Excerpt], Spec]] = {
    "sliding_window": _shift_window,
    "prefix_lm": _shift_prefix,
    "padding": _shift_padding,
    "document": _shift_document,
    "expression": _shift_expression,
}

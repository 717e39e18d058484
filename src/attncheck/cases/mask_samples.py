"""Samples of each mask family: small problems to find out whether a kernel supports the family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attncheck.core.formats import DTYPES
from attncheck.core.mod_spec import Spec
from attncheck.core.paged_layout import Paging
from attncheck.inputs.problem import SOFTMAX_DTYPES, Problem

SOFTMAX = "softmax"  # in place of a mask family: row softmax, which has no mask

# Multiples of a tile, no multiples, and short lengths or one row for kernels that need them.
_LENGTHS = ((64, 64), (77, 93), (16, 16), (1, 64), (1, 1))
_PAGE_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemKind:
    """Features that all problems of a property have, whatever their masks and sizes."""

    paged: bool = False  # keys in pages
    sink: bool = False
    backward: bool = False  # gradients are asked for
    captured: bool = False  # gradients of tensors that the score mod reads are asked for

    @property
    def fields(self) -> dict[str, Any]:
        """Return the fields of a Problem of this kind."""
        paging = Paging(size=_PAGE_SIZE) if self.paged else None
        captured = {"score": Spec.of("alibi"), "dcaptured": True} if self.captured else {}
        return {"paging": paging, "sink": self.sink, "backward": self.backward, **captured}


PLAIN_KIND = ProblemKind()  # attention without any of these features


def sample_problems(family: str, dtype: str, kind: ProblemKind = PLAIN_KIND) -> tuple[Problem, ...]:
    """Return problems of a mask family in ``dtype``, plainest first; none if none can exist.

    Args:
        family: A name of ``strategies.MASK_FAMILIES``, or ``SOFTMAX``.
        kind: Features that all of them have.
    """
    if family == SOFTMAX:
        exists = dtype in SOFTMAX_DTYPES and kind == PLAIN_KIND
        return (Problem(operation=SOFTMAX, query=4, kv=64, dtype=dtype),) if exists else ()
    # There are no gradients in fp8.
    if kind.backward and DTYPES[dtype].scaled:
        return ()
    # Sequences of one length have one diagonal, that of another mask, which more kernels take.
    several = family == "bottom_right"
    return tuple(
        Problem(batch=1 + several, query=query, kv=kv, dtype=dtype, mask=mask, **kind.fields)
        for query, kv in _LENGTHS
        if kv > several
        for mask in [_sample_mask(family, query, kv)]
    )


def _sample_mask(family: str, query: int, kv: int) -> Spec:
    longest, padding = max(query, kv), Spec.of("padding", lengths=[-(-3 * kv // 4)])
    causal = Spec.of("causal")
    documents = {"query_lengths": [query // 2, query - query // 2]}
    documents["kv_lengths"] = [kv // 2, kv - kv // 2]
    masks = {
        "sliding_window": Spec.of("sliding_window", window=17),
        "prefix_lm": Spec.of("prefix_lm", prefix=5),
        "padding": padding,
        "document": Spec.of("document", lengths=[longest // 2, longest - longest // 2]),
        "documents": Spec.of("documents", **documents),
        "packed": Spec.of("documents", **documents),
        "bottom_right": Spec.of("bottom_right", causal, lengths=[kv, -(-3 * kv // 4)]),
        "documents_bottom_right": Spec.of("documents_bottom_right", causal, **documents),
        # 64 cells, as many as the first sample has rows and keys.
        "neighborhood": Spec.of("neighborhood", canvas=[8, 8], kernel=[3, 3]),
        "offset": Spec.of("offset", causal, rows=3),
        "composition": Spec.of("and", causal, padding),
        "expression": Spec.of("expression", text="q_idx >= kv_idx + 3"),
    }
    # Masks without arguments have the name of their family.
    return masks[family] if family in masks else Spec.of(family)

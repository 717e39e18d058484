"""A few Problems of each mask family: does a kernel take any of them?"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attncheck.cases.strategies.problems import nearest_supported
from attncheck.core.formats import DTYPES
from attncheck.core.paged_layout import Paging
from attncheck.inputs.problem import SOFTMAX_DTYPES, Problem
from attncheck.mods.spec import Spec
from attncheck.suite.pytest_options import SOFTMAX
from attncheck.verify.executor import Executor, Failure, InProcess

if TYPE_CHECKING:
    from attncheck.capabilities.subject import Subject

__all__ = ["NOT_APPLICABLE", "PLAIN_KIND", "ProblemKind", "refusal", "sample_problems"]


_PAGE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemKind:
    """What all Problems of a property have.

    Attributes:
        paged: Keys in pages.
        sink: A sink.
        backward: Gradients are asked for.
        captured: And those of what score mods read from tensors.
    """

    paged: bool = False
    sink: bool = False
    backward: bool = False
    captured: bool = False

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of a Problem of this kind."""
        paging = Paging(size=_PAGE) if self.paged else None
        read = {"score": Spec.of("alibi"), "dcaptured": True} if self.captured else {}
        return {"paging": paging, "sink": self.sink, "backward": self.backward, **read}


PLAIN_KIND = ProblemKind()
"""Attention without any of it."""


NOT_APPLICABLE = "such problems do not concern it"

# Whole tiles, and lengths that fit none; short ones, and one row, for kernels that take no others.
_LENGTHS = ((64, 64), (77, 93), (16, 16), (1, 64), (1, 1))
_MASKS: dict[str, Spec] = {
    "full": Spec.of("full"),
    "causal": Spec.of("causal"),
    "causal_bottom_right": Spec.of("causal_bottom_right"),
    "sliding_window": Spec.of("sliding_window", window=17),
    "prefix_lm": Spec.of("prefix_lm", prefix=5),
    "neighborhood": Spec.of("neighborhood", canvas=[8, 8], kernel=[3, 3]),
    "offset": Spec.of("offset", Spec.of("causal"), rows=3),
    "expression": Spec.of("expression", text="q_idx >= kv_idx + 3"),
}


def sample_problems(family: str, dtype: str, kind: ProblemKind = PLAIN_KIND) -> tuple[Problem, ...]:
    """Problems of ``family`` in ``dtype``, plainest first; none where there can be none."""
    if family == SOFTMAX:
        able = dtype in SOFTMAX_DTYPES and kind == PLAIN_KIND
        return (Problem(operation=SOFTMAX, query=4, kv=64, dtype=dtype),) if able else ()
    if kind.backward and DTYPES[dtype].scaled:
        return ()
    return tuple(
        Problem(query=query, kv=kv, dtype=dtype, mask=_mask(family, query, kv), **kind.fields)
        for query, kv in _LENGTHS
    )


def refusal(
    subject: Subject,
    family: str,
    dtype: str,
    device: str,
    kind: ProblemKind = PLAIN_KIND,
    executor: Executor | None = None,
) -> str:
    """Why ``subject`` takes no sample of ``family`` in ``dtype``, nor one near; empty if it does.

    ``NOT_CONCERNED`` where they are no question for it. A kernel that raises when it is asked
    counts as one that takes them: then the property says what it raised.
    """
    executor = executor or InProcess()
    reasons: Counter[str] = Counter()

    def takes(problem: Problem) -> bool:
        said = executor.refusal(subject, problem, device)
        if said is None or isinstance(said, Failure):
            return True
        reasons[said] += 1
        return False

    for problem in sample_problems(family, dtype, kind):
        if not executor.concerns(subject, problem):
            continue
        if nearest_supported(problem, takes, (dtype,)) is not None:
            return ""
    # Shapes were moved until they fit: what it says only then is not about them.
    return min(reasons, key=lambda reason: reasons[reason], default=NOT_APPLICABLE)


def _mask(family: str, query: int, kv: int) -> Spec:
    if family == "document":
        total = max(query, kv)
        return Spec.of("document", lengths=[total // 2, total - total // 2])
    if family in {"documents", "packed"}:
        cut = {
            f"{name}_lengths": [n // 2, n - n // 2] for name, n in (("query", query), ("kv", kv))
        }
        return Spec.of("documents", **cut)
    padding = Spec.of("padding", lengths=[-(-3 * kv // 4)])
    if family == "composition":
        return Spec.of("and", Spec.of("causal"), padding)
    return padding if family == "padding" else _MASKS[family]

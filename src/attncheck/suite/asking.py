"""``asks``: a property of kernels as a pytest test, and the Cases that it draws."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import strategies as st

from attncheck.capabilities import named_kernels
from attncheck.inputs.problem import Case, Problem
from attncheck.strategies import parameters, problems, shapes
from attncheck.strategies.families import family_named
from attncheck.strategies.softmax import softmax_problems
from attncheck.suite.kinds import Kind
from attncheck.suite.marks import MARK, SOFTMAX
from attncheck.suite.search import search
from attncheck.suite.variations import variations
from attncheck.verify import question_fit as of_kernels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hypothesis.strategies import SearchStrategy

    from attncheck.mods.spec import Spec
    from attncheck.suite.under_test import UnderTest

__all__ = ["Asked", "asks", "cases"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a property asks.

    Attributes:
        questions: ``compare``, relations or probes; one of them is drawn.
        families: Mask families, each a test of its own; ``softmax`` for row softmax.
        dtypes: Only these; empty for all that a kernel takes.
        shapes: Keywords of ``strategies.shapes``; ``longest`` is the tier's unless it is here.
        scores: Score mods; None for none.
        problems: Other keywords of ``strategies.problems``.
        where: Which Problems the property is about; the nearest one is derived, not waited for.
    """

    questions: tuple[str, ...]
    families: tuple[str, ...]
    dtypes: tuple[str, ...] = ()
    shapes: dict[str, Any]
    scores: Callable[[], SearchStrategy[Spec]] | None = None
    problems: dict[str, Any]
    where: Callable[[Problem], bool] | None = None

    @property
    def kind(self) -> Kind:
        """What all its Problems have."""
        return Kind(
            paged="pagings" in self.problems,
            sink=self.problems.get("sinks", False) is True,
            backward=self.problems.get("backward", False),
            captured=self.problems.get("dcaptured", False),
        )

    def fits(self, question: str, problem: Problem) -> bool:
        """Whether ``question`` of ``problem`` is what the property is about."""
        problem = of_kernels.question_problem(question, problem)
        if of_kernels.unfit_reason(question, problem) is not None:
            return False
        return self.where is None or self.where(problem)


def asks(
    *questions: str,
    families: Sequence[str],
    dtypes: Sequence[str] = (),
    shapes: dict[str, Any] | None = None,
    scores: Callable[[], SearchStrategy[Spec]] | None = None,
    where: Callable[[Problem], bool] | None = None,
    **more: Any,
) -> Callable[[Callable[[UnderTest, Case], None]], Any]:
    """A property: the test runs once for each kernel × dtype × mask family.

    Hypothesis draws the rest. The test's signature is ``(kernel, case)``; arguments are those of
    ``Asked``.

    Raises:
        UnknownName: for a question or a family that there is not.
    """
    for question in questions:
        of_kernels.check_question(question)
    for family in families:
        if family != SOFTMAX:
            family_named(family)
    asked = Asked(
        questions=questions,
        families=tuple(families),
        dtypes=tuple(dtypes),
        shapes=shapes or {},
        scores=scores,
        problems=more,
        where=where,
    )

    def decorate(test: Callable[[UnderTest, Case], None]) -> Any:
        @functools.wraps(test)
        def of_kernel(kernel: UnderTest) -> None:
            __tracebackhide__ = True
            search(test, kernel, cases(kernel, asked), functools.partial(_beside, kernel, asked))

        # What pytest reads: Hypothesis gives the case.
        kernel = inspect.signature(test).parameters["kernel"]
        # Hypothesis' own plugin then prints statistics where it is asked to.
        of_kernel.is_hypothesis_test = True  # type: ignore[attr-defined]  # a function's own
        of_kernel.__signature__ = inspect.Signature([kernel])  # type: ignore[attr-defined]  # PEP 362
        return getattr(pytest.mark, MARK)(asked)(of_kernel)

    return decorate


@st.composite
def cases(draw: st.DrawFn, kernel: UnderTest, asked: Asked) -> Case:
    """Cases of a property for one kernel, dtype and family; they shrink to the plainest."""
    question = draw(st.sampled_from(asked.questions))
    problem = of_kernels.question_problem(question, draw(_problems(kernel, asked, question)))
    chosen = draw(parameters(allowed=of_kernels.allowed_parameters(question, problem)))
    return Case(problem=problem, question=question, parameters=chosen)


def _beside(kernel: UnderTest, asked: Asked, case: Case) -> Iterator[Case]:
    """What is asked together with ``case``: more on a GPU, where its kernel is compiled now."""

    def fits(question: str, problem: Problem) -> bool:
        return kernel.supports(problem) and asked.fits(question, problem)

    return variations(
        case,
        kernel.tier.repeats_on(kernel.device) - 1,
        fits=fits,
        # Ours are compiled for any length; what is known of no other kernel.
        lengths=kernel.subject.triton and kernel.name in named_kernels.BUILTIN,
        distributions=asked.problems.get("distributions", ()),
    )


def _problems(kernel: UnderTest, asked: Asked, question: str) -> SearchStrategy[Problem]:
    def fits(problem: Problem) -> bool:
        return kernel.supports(problem) and asked.fits(question, problem)

    common: dict[str, Any] = {"dtypes": (kernel.dtype,), "supports": fits, **asked.problems}
    sizes = kernel.tier.sizes_on(kernel.device)
    if kernel.family == SOFTMAX:
        return softmax_problems(longest=sizes["longest"], **common)
    return problems(
        shapes=shapes(**(sizes | asked.shapes)),
        masks=family_named(kernel.family),
        scores=asked.scores() if asked.scores else None,
        **common,
    )

"""``asks``, which turns a pytest test into a property of kernels, and the cases it draws."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from attncheck.cases.mask_samples import SOFTMAX, ProblemKind
from attncheck.cases.strategies import family_named
from attncheck.cases.strategies.problems import problems, softmax_problems
from attncheck.cases.strategies.sizes import parameters
from attncheck.cases.strategies.sizes import shapes as any_shapes
from attncheck.core.errors import AttncheckError, ProblemError, without_recorded
from attncheck.core.mod_spec import Spec
from attncheck.inputs.distributions import DISTRIBUTIONS
from attncheck.inputs.problem import Case, Problem
from attncheck.subjects.capabilities import named_kernels
from attncheck.suite.pytest_options import MARK
from attncheck.suite.search import search_cases
from attncheck.suite.under_test import UnderTest
from attncheck.verify.question_fit import question_named, question_problem

_SEEDS = 1000  # Number of seeds, as in strategies.problems.


@dataclass(frozen=True, slots=True, kw_only=True)
class PropertySpec:
    """Questions of a property, and the problems they are asked about."""

    questions: tuple[str, ...]  # ``compare``, relations or probes; one of them is drawn.
    families: tuple[str, ...]  # Mask families, each a separate test; ``softmax`` for row softmax.
    dtypes: tuple[str, ...] = ()  # Only these; empty for all that a kernel takes.
    # Keywords of ``strategies.shapes``; the default of ``longest`` is the tier's.
    shapes: dict[str, Any]
    scores: Callable[[], SearchStrategy[Spec]] | None = None  # Score mods; None for none.
    problems: dict[str, Any]  # Other keywords of ``strategies.problems``.
    # Condition on Problems; drawn ones are moved to the nearest that fulfils it.
    where: Callable[[Problem], bool] | None = None

    @property
    def kind(self) -> ProblemKind:
        """Features that all Problems of the property have."""
        return ProblemKind(
            paged="pagings" in self.problems,
            sink=self.problems.get("sinks", False) is True,
            backward=self.problems.get("backward", False),
            captured=self.problems.get("dcaptured", False),
        )

    def fits(self, question: str, problem: Problem) -> bool:
        """Return whether ``question`` can be asked of ``problem``, and ``where`` holds."""
        problem = question_problem(question, problem)
        if question_named(question).unfit(problem) is not None:
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
    """Turn a test into a property, which runs once for each kernel × dtype × mask family.

    The test's signature is ``(kernel, case)``; Hypothesis draws the cases. Arguments are the fields
    of ``PropertySpec``.

    Raises:
        UnknownName: for an unknown question or family.
    """
    for question in questions:
        question_named(question)
    for family in families:
        if family != SOFTMAX:
            family_named(family)
    spec = PropertySpec(
        questions=questions,
        families=tuple(families),
        dtypes=tuple(dtypes),
        shapes=shapes or {},
        scores=scores,
        problems=more,
        where=where,
    )

    # Names are checked above, during the import, so that a wrong one is no failed test.
    def decorate(test: Callable[[UnderTest, Case], None]) -> Any:
        @functools.wraps(test)
        def of_kernel(kernel: UnderTest) -> None:
            __tracebackhide__ = True
            search_cases(test, kernel, cases(kernel, spec), functools.partial(_more, kernel, spec))

        # The signature for pytest, without the case, which Hypothesis passes.
        kernel = inspect.signature(test).parameters["kernel"]
        # Lets Hypothesis' pytest plugin print statistics on request.
        of_kernel.is_hypothesis_test = True  # type: ignore[attr-defined]  # a function's own
        of_kernel.__signature__ = inspect.Signature([kernel])  # type: ignore[attr-defined]  # PEP 362
        return getattr(pytest.mark, MARK)(spec)(of_kernel)

    return decorate


def cases(kernel: UnderTest, spec: PropertySpec) -> SearchStrategy[Case]:
    """Return cases of a property for one kernel, dtype and family; they shrink to the plainest."""
    # Cached, since Hypothesis analyses every new strategy object.
    by_question = functools.cache(functools.partial(_problems, kernel, spec))
    return _cases(st.sampled_from(spec.questions), by_question)


@st.composite
def _cases(
    draw: st.DrawFn,
    questions: SearchStrategy[str],
    by_question: Callable[[str], SearchStrategy[Problem]],
) -> Case:
    # The question is drawn first, since it restricts the Problems.
    question = draw(questions)
    problem = question_problem(question, draw(by_question(question)))
    chosen = draw(parameters(allowed=question_named(question).allowed(problem)))
    return Case(problem=problem, question=question, parameters=chosen)


def _takes(kernel: UnderTest, spec: PropertySpec, question: str, problem: Problem) -> bool:
    return kernel.supports(problem) and spec.fits(question, problem)


def _problems(kernel: UnderTest, spec: PropertySpec, question: str) -> SearchStrategy[Problem]:
    supports = functools.partial(_takes, kernel, spec, question)
    common: dict[str, Any] = {"dtypes": (kernel.dtype,), "supports": supports, **spec.problems}
    sizes = kernel.tier.lengths_on(kernel.device)
    if kernel.family == SOFTMAX:
        return softmax_problems(longest=sizes["longest"], **common)
    return problems(
        # The property's sizes override those of the tier.
        shapes=any_shapes(**(sizes | spec.shapes)),
        masks=family_named(kernel.family),
        scores=spec.scores() if spec.scores else None,
        **common,
    )


# ------------------------------------------------------------ more cases of one structure


def _more(kernel: UnderTest, spec: PropertySpec, case: Case) -> Iterator[Case]:
    """Yield cases to ask along with ``case``, for which the kernel is already compiled on a GPU."""
    return variations(
        case,
        kernel.tier.repeats_on(kernel.device) - 1,
        fits=functools.partial(_takes, kernel, spec),
        # Built-in kernels are compiled for any length; other kernels may not be.
        lengths=kernel.subject.triton and kernel.name in named_kernels.BUILTIN,
        distributions=spec.problems.get("distributions", ()),
    )


def variations(
    case: Case,
    count: int,
    *,
    fits: Callable[[str, Problem], bool],
    lengths: bool,
    distributions: Sequence[str] = (),
) -> Iterator[Case]:
    """Yield up to ``count`` variations of ``case`` that need no further compilation.

    They have the same dtype, dims and mods, but another seed and distribution, the next parameters
    of the relation, and with ``lengths`` query and kv shorter by up to a half. They depend only on
    ``case``, so that a failure of one of them shrinks along with it.

    Args:
        fits: (question, Problem) → whether it may be asked.
        lengths: Whether to change lengths, if the mask's numbers allow it.
        distributions: Distributions to choose from (default: all).
    """
    for number in range(1, count + 1):
        values = _other_values(case.problem, number, distributions)
        sizes = _other_lengths(case.problem, number, count) if lengths else {}
        # If the mask's numbers do not allow other lengths, only the values are changed.
        for changes in (values | sizes, values):
            try:
                problem = question_problem(case.question, case.problem.replace(**changes))
            except ProblemError:  # for example documents that must cover a length
                continue
            if fits(case.question, problem):
                yield _with_next_parameters(case, problem, number)
                break


def _other_values(problem: Problem, number: int, only: Sequence[str]) -> dict[str, Any]:
    softmax = problem.operation == "softmax"
    names = list(only) or [
        name
        for name in without_recorded(DISTRIBUTIONS)
        if DISTRIBUTIONS[name].scores is not None or not softmax
    ]
    if problem.distribution not in names:
        # A recording has fixed tensors, and so no other distribution.
        names = [problem.distribution]
    index = names.index(problem.distribution)
    return {
        "seed": (problem.seed + number) % _SEEDS,
        "distribution": names[(index + number) % len(names)],
    }


def _other_lengths(problem: Problem, number: int, count: int) -> dict[str, int]:
    """Return shorter lengths, each more than half of the old one: 1 and 2 stay the same."""

    def shorten(length: int) -> int:
        return -(-length * (2 * (count + 1) - number) // (2 * (count + 1)))

    return {"query": shorten(problem.query), "kv": shorten(problem.kv)}


def _with_next_parameters(case: Case, problem: Problem, number: int) -> Case:
    chosen = {}
    for name, allowed in question_named(case.question).allowed(problem).items():
        values: list[Any] = list(allowed)
        now = case.parameters.get(name)
        index = values.index(now) if now in values else 0
        chosen[name] = values[(index + number) % len(values)]
    return Case(problem=problem, question=case.question, parameters=chosen)


# Package name of the imported properties; pytest imports them too, under other names.
_PACKAGE = "attncheck_properties"


def properties_folder() -> Path:
    """Return the folder of the properties, in the installed package or else in the clone.

    Raises:
        AttncheckError: if they are in neither.
    """
    package = Path(__file__).parents[1]
    for folder in (package / "properties", package.parents[1] / "properties"):
        if (folder / "__init__.py").is_file():
            return folder
    raise AttncheckError(f"the properties are not here: {package} has none, nor its clone.")


@cache
def properties() -> dict[str, PropertySpec]:
    """Return all properties by id, such as ``test_causal.py::test_attention_is_exact``.

    They are in the order of files and of tests in each.
    """
    folder = properties_folder()
    _import_package(folder)
    specs = {}
    for path in sorted(folder.glob("test_*.py")):
        module = importlib.import_module(f"{_PACKAGE}.{path.stem}")
        for name, test in vars(module).items():
            for mark in getattr(test, "pytestmark", ()):
                if mark.name == MARK:
                    specs[f"{path.name}::{name}"] = mark.args[0]
    return specs


def property_named(name: str) -> PropertySpec:
    """Return the property with an id.

    Raises:
        AttncheckError: if this version has none.
    """
    if name not in properties():
        raise AttncheckError(f"there is no property {name!r} in this version.")
    return properties()[name]


def _import_package(folder: Path) -> None:
    """Import the package of the properties from its folder."""
    if _PACKAGE in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(
        _PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Registered before it is executed, since its files import each other from the package.
    sys.modules[_PACKAGE] = module
    spec.loader.exec_module(module)

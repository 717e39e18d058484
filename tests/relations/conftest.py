"""Small problems with every feature, and fixtures that check relations on them."""

import pytest
import torch

from attncheck.inputs.problem import Case, Problem
from attncheck.relations import relation_named
from attncheck.subjects.load import load_subject
from attncheck.verify.relation_runs import check_relation


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """Every relation test runs on one thread."""


@pytest.fixture
def small():
    """``small(mask, **changes)``: a small attention Problem."""

    def build(mask=None, **changes):
        sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "query": 5, "kv": 7, "head_dim": 6}
        mask = {} if mask is None else {"mask": mask}
        return Problem(**(sizes | {"value_dim": 3, "dtype": "bf16"} | mask | changes))

    return build


@pytest.fixture
def softmax():
    """``softmax(**changes)``: a small softmax Problem."""

    def build(**changes):
        sizes = {"batch": 2, "heads": 2, "query": 3, "kv": 9}
        return Problem(**({"operation": "softmax", "dtype": "fp32"} | sizes | changes))

    return build


@pytest.fixture
def ask():
    """``ask(kernel, question, problem, **parameters)``: the Finding or Failure, or None.

    ``kernel`` is a subject or its name; parameters that are left out take the smallest value.
    """

    def check(kernel, question, problem, **parameters):
        subject = load_subject(kernel) if isinstance(kernel, str) else kernel
        smallest = {k: v[0] for k, v in relation_named(question).allowed(problem).items()}
        case = Case(problem=problem, question=question, parameters=smallest | parameters)
        return check_relation(subject, case)

    return check


@pytest.fixture
def extreme_parameters():
    """``extreme_parameters(question, problem)``: all parameters at their smallest, then largest."""

    def extremes(question, problem):
        allowed = relation_named(question).allowed(problem)
        return [{k: v[i] for k, v in allowed.items()} for i in ((0, -1) if allowed else (0,))]

    return extremes


@pytest.fixture
def visible():
    """``visible(problem)``: the mask's values at all indices, ``(batch, heads, query, kv)``."""

    def evaluate_mask(problem):
        sizes = (problem.batch, problem.heads, problem.query, problem.kv)
        places = torch.meshgrid(*map(torch.arange, sizes), indexing="ij")
        return problem.mask_mod()(*places).expand(sizes)

    return evaluate_mask

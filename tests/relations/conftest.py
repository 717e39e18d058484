"""Relations asked of kernels on problems that are tiny and have everything."""

import pytest
import torch

from attncheck.inputs.problem import Case, Problem
from attncheck.relations import relation_named
from attncheck.subjects.load import load_subject
from attncheck.verify.relation_runs import check_relation


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """In every test of this room."""


def _problem(mask=None, **changes):
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "query": 5, "kv": 7, "head_dim": 6}
    mask = {} if mask is None else {"mask": mask}
    return Problem(**(sizes | {"value_dim": 3, "dtype": "bf16"} | mask | changes))


@pytest.fixture
def small():
    """``small(mask, **changes)``: a Problem of attention."""
    return _problem


@pytest.fixture
def softmax():
    """``softmax(**changes)``: a Problem of a softmax."""

    def build(**changes):
        sizes = {"batch": 2, "heads": 2, "query": 3, "kv": 9}
        return Problem(**({"operation": "softmax", "dtype": "fp32"} | sizes | changes))

    return build


@pytest.fixture
def ask():
    """``ask(kernel, question, problem, **parameters)``: what is wrong, or None.

    A kernel is a subject or the name of one; parameters not given are the smallest.
    """

    def asked(kernel, question, problem, **parameters):
        subject = load_subject(kernel) if isinstance(kernel, str) else kernel
        smallest = {k: v[0] for k, v in relation_named(question).allowed(problem).items()}
        case = Case(problem=problem, question=question, parameters=smallest | parameters)
        return check_relation(subject, case)

    return asked


@pytest.fixture
def numbers():
    """``numbers(question, problem)``: the smallest and the largest of each parameter."""

    def chosen(question, problem):
        allowed = relation_named(question).allowed(problem)
        return [{k: v[i] for k, v in allowed.items()} for i in ((0, -1) if allowed else (0,))]

    return chosen


@pytest.fixture
def visible():
    """``visible(problem)``: what its mask's callable shows, ``(batch, heads, query, kv)``."""

    def shown(problem):
        sizes = (problem.batch, problem.heads, problem.query, problem.kv)
        places = torch.meshgrid(*map(torch.arange, sizes), indexing="ij")
        return problem.mask_mod()(*places).expand(sizes)

    return shown

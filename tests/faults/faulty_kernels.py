"""A user's own faults: one that is caught, one that ends its process, and a right kernel."""

import math
import os

import torch

from attncheck.core.mod_spec import FULL, NONE
from attncheck.subjects.ideal import Ideal


def sees_the_next_key(query, key, value, *, is_causal=False, scale=None):
    scores = (query.double() @ key.double().mT) * (
        query.shape[-1] ** -0.5 if scale is None else scale
    )
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(1).logical_not()
        scores = scores.masked_fill(hidden, -math.inf)
    return (torch.softmax(scores, -1) @ value.double()).to(query.dtype)


def ends_its_process(query, key, value, *, is_causal=False, scale=None):
    os._exit(7)


class Right(Ideal):
    """A right kernel for small problems only, so that a whole gate takes little time."""

    name = "right"
    summary = "the ideal kernel, of few keys"
    promises = frozenset()
    promises_gradients = backward = captured = sinks = False

    def concerns(self, problem):
        return problem.operation == "attention"

    def unsupported(self, problem, device):
        plain = problem.dtype == "fp32" and (problem.mask, problem.score) == (FULL, NONE)
        small = problem.query * problem.kv <= 256 and problem.batch * problem.heads <= 2
        kind = problem.backward or problem.paging or problem.sink
        return None if plain and small and not kind else "it is too much"


FAULTS = {"next key": sees_the_next_key, "exit": ends_its_process, "none": Right}

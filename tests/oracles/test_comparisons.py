"""The comparisons of this folder's conftest notice NaN, infinities and rows without keys."""

import math

import pytest

from attncheck import oracles
from attncheck.core.mod_spec import Spec
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Problem
from attncheck.oracles.mp_numbers import Mp
from attncheck.oracles.recurrence_steps import Result

# Rows 3 and 4 see none of the three keys.
INPUTS = draw_inputs(Problem(query=5, kv=3, head_dim=2, mask=Spec.of("sliding_window", window=1)))
MP = Mp(50)
EXACT = oracles.RECURRENCES[oracles.REFERENCE](MP, INPUTS)


def _copy() -> Result:
    return Result(EXACT.out.copy(), EXACT.lse.copy())


def test_equal_results_have_no_distance(allowance, relative_distance):
    rounded = EXACT.rounded(MP)
    assert relative_distance(MP, INPUTS, _copy(), EXACT) == -math.inf
    assert allowance(INPUTS).misses(rounded, rounded) == []
    assert allowance(INPUTS).misses_in_many_digits(MP, _copy(), EXACT) == []


@pytest.mark.parametrize(
    ("part", "at", "value"),
    [
        ("out", (0, 0, 1, 1), MP.context.nan),
        ("out", (0, 0, 4, 1), MP.context.nan),
        ("out", (0, 0, 4, 1), MP.context.one),
        ("lse", (0, 0, 1, 0), MP.context.nan),
        ("lse", (0, 0, 1, 0), MP.context.ninf),
        ("lse", (0, 0, 4, 0), MP.context.nan),
        ("lse", (0, 0, 4, 0), MP.context.one),
        ("lse", (0, 0, 4, 0), MP.context.inf),
    ],
    ids=str,
)
def test_planted_number_is_noticed_on_either_side(part, at, value, allowance, relative_distance):
    fault, bound = _copy(), allowance(INPUTS)
    getattr(fault, part)[at] = value
    for one, other in ((fault, EXACT), (EXACT, fault)):
        assert relative_distance(MP, INPUTS, one, other) > 0
        (miss,) = bound.misses_in_many_digits(MP, one, other)
        assert miss.startswith(part)
        (miss,) = bound.misses(one.rounded(MP), other.rounded(MP))
        assert miss.startswith(part)

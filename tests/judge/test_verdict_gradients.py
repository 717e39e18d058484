"""Each rule on gradients made by hand: that it fails, and that it names the element as it is."""

import math
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from tests.judge import verdicts

from attncheck.core.conditions import Rows
from attncheck.core.declared_arithmetic import default_arithmetic
from attncheck.core.formats import DTYPES
from attncheck.core.judgement import Judgement, Place
from attncheck.core.outputs import Outputs
from attncheck.core.tensor_names import AXES, GRADIENTS, TensorName
from attncheck.judge.allowance import Allowance, Sample
from attncheck.judge.verdict_rules import ComparedTensor

decide = verdicts.decide

HEADS, KV_HEADS, QUERY, KV, DIM = 4, 2, 3, 5, 8
BOUND = 2.0**-6
SHAPES: dict[TensorName, tuple[int, ...]] = {
    "dq": (1, HEADS, QUERY, DIM),
    "dk": (1, KV_HEADS, KV, DIM),
    "dv": (1, KV_HEADS, KV, DIM),
    "dsink": (HEADS,),
    "dcaptured": (7,),
}
UNREAD = 3  # a number that no row that counts reads
UNSEEN = (0, 1, 4)  # a key that no row sees


def gradients(changes: dict[tuple[TensorName, tuple[int, ...]], float]) -> list[ComparedTensor]:
    """Of a kernel that is right but for ``changes``."""
    found = []
    for name, shape in SHAPES.items():
        exact = torch.arange(1.0, math.prod(shape) + 1).view(shape).double()
        alive = torch.ones(shape[:3], dtype=torch.bool)
        if name in ("dk", "dv"):
            alive[UNSEEN] = False
            exact[UNSEEN] = 0.0
        if name == "dcaptured":
            alive = torch.arange(7) != UNREAD
            exact[UNREAD] = 0.0
        got = exact + BOUND / 32 * (exact != 0)
        for (changed, at), value in changes.items():
            if changed == name:
                got[at] = value
        found.append(
            ComparedTensor.of(name, got, exact, torch.where(exact == 0, 0.0, BOUND), alive)
        )
    return found


def verdict(
    changes: dict[Any, float] | None = None,
    gradients_instead: list[ComparedTensor] | None = None,
    **more: Any,
) -> Judgement:
    exact = Outputs(torch.ones(1, HEADS, QUERY, DIM).double(), torch.ones(1, HEADS, QUERY).double())
    out = torch.full_like(exact.out, BOUND)
    lse = torch.full_like(exact.lse, BOUND)
    sample = Sample(
        rows=Rows(range(HEADS), torch.arange(QUERY)),
        probable_out=out[0],
        probable_lse=lse[0],
        sd_out=out[0],
        sd_lse=lse[0],
    )
    return decide(
        out=exact.out,
        lse=exact.lse,
        truth=exact,
        alive=torch.ones(1, HEADS, QUERY, dtype=torch.bool),
        allowance=Allowance(out=out, lse=lse, samples=[sample]),
        arithmetic=default_arithmetic(DTYPES["bf16"]),
        generic=True,
        gradients=tuple(gradients_instead or ([] if changes is None else gradients(changes))),
        **more,
    )


def test_right_gradients_pass_and_their_shares_are_there():
    found = verdict({})
    assert (found.status, found.rule) == ("pass", "")
    assert found.gradients_over_bound == dict.fromkeys(GRADIENTS, 1 / 32)


def test_without_a_backward_nothing_is_said_of_gradients():
    found = verdict()
    assert found.gradients_over_bound is msgspec.UNSET
    assert "gradients_over_bound" not in msgspec.to_builtins(found)


@pytest.mark.parametrize(
    ("tensor", "at", "said"),
    [
        ("dq", (0, 3, 2, 1), "dq[0, 3, 2, 1] = "),
        ("dk", (0, 1, 3, 7), "dk[0, 1, 3, 7] = "),
        ("dv", (0, 0, 4, 0), "dv[0, 0, 4, 0] = "),
        ("dsink", (2,), "dsink[2] = "),
        ("dcaptured", (5,), "dcaptured[5] = "),
    ],
)
def test_a_gradient_beyond_its_bound_fails_at_its_element(tensor, at, said):
    exact = next(one.exact[at] for one in gradients({}) if one.name == tensor)
    found = verdict({(tensor, at): float(exact) + 2 * BOUND})
    assert (found.status, found.rule) == ("fail", "bound")
    assert found.reason.startswith(said)
    assert found.worst.tensor == tensor
    assert found.worst.at.index(tensor) == at
    assert found.worst.tile == ""
    assert found.gradients_over_bound[tensor] == 2
    assert found.wrong == 1


def test_a_gradient_without_any_finite_allowance_is_not_told():
    nothing = [
        replace(one, allowance=torch.full_like(one.exact, math.inf), counted=one.alive & False)
        if one.name == "dk"
        else one
        for one in gradients({})
    ]
    found = verdict(gradients_instead=nothing)
    assert (found.status, found.rule) == ("inconclusive", "")
    assert "no element of dk has a finite allowance" in found.reason


def test_how_many_elements_of_a_gradient_are_not_judged_is_said():
    (dq, *others) = gradients({})
    counted = dq.alive.clone()
    counted[0, 0, 0] = False
    found = verdict(gradients_instead=[replace(dq, counted=counted), *others])
    assert found.status == "pass"
    of_dq = f"{DIM} of {dq.exact.numel()} elements of dq"
    assert found.warnings == (f"not judged: {of_dq} have no finite bound",)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_fails(value):
    found = verdict({("dk", (0, 0, 1, 1)): value})
    assert (found.status, found.rule) == ("fail", "finite")
    assert "dk[0, 0, 1, 1]" in found.reason


@pytest.mark.parametrize("value", [2.0**-140, math.nan])
def test_a_key_that_no_row_sees_has_a_gradient_of_exactly_0(value):
    found = verdict({("dv", (*UNSEEN, 2)): value})
    assert (found.status, found.rule) == ("fail", "empty rows")
    assert "of keys that no row sees are not exactly 0" in found.reason


def test_only_a_query_lies_in_a_query_tile():
    assert verdict({("dq", (0, 0, 2, 0)): 0.0}, tiles=(2, 4)).worst.tile.startswith("query tile 1")
    assert verdict({("dk", (0, 0, 2, 0)): 0.0}, tiles=(2, 4)).worst.tile == ""


@pytest.mark.parametrize("tensor", AXES)
def test_a_place_is_an_index_and_back(tensor):
    index = (0, 3, 2, 1)[-len(AXES[tensor]) :] if len(AXES[tensor]) == 1 else (0, 3, 2, 1)
    index = index[: len(AXES[tensor])]
    assert Place.of(index).index(tensor) == index

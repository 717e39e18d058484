"""Each rule of the verdict on hand-made gradients: that it fails, and names the element."""

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
UNREAD = 3  # a captured number that no compared row reads
UNSEEN = (0, 1, 4)  # a key that no row sees


def gradients(changes: dict[tuple[TensorName, tuple[int, ...]], float]) -> list[ComparedTensor]:
    """Tensors of a kernel that is right except for ``changes``."""
    tensors = []
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
        for (tensor, at), value in changes.items():
            if tensor == name:
                got[at] = value
        tensors.append(
            ComparedTensor.of(name, got, exact, torch.where(exact == 0, 0.0, BOUND), alive)
        )
    return tensors


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


def test_right_gradients_pass_with_their_shares():
    judgement = verdict({})
    assert (judgement.status, judgement.rule) == ("pass", "")
    assert judgement.gradients_over_bound == dict.fromkeys(GRADIENTS, 1 / 32)


def test_verdict_without_a_backward_omits_gradients():
    judgement = verdict()
    assert judgement.gradients_over_bound is msgspec.UNSET
    assert "gradients_over_bound" not in msgspec.to_builtins(judgement)


@pytest.mark.parametrize(
    ("tensor", "at", "text"),
    [
        ("dq", (0, 3, 2, 1), "dq[0, 3, 2, 1] = "),
        ("dk", (0, 1, 3, 7), "dk[0, 1, 3, 7] = "),
        ("dv", (0, 0, 4, 0), "dv[0, 0, 4, 0] = "),
        ("dsink", (2,), "dsink[2] = "),
        ("dcaptured", (5,), "dcaptured[5] = "),
    ],
)
def test_gradient_beyond_its_bound_fails_and_names_the_element(tensor, at, text):
    exact = next(one.exact[at] for one in gradients({}) if one.name == tensor)
    judgement = verdict({(tensor, at): float(exact) + 2 * BOUND})
    assert (judgement.status, judgement.rule) == ("fail", "bound")
    assert judgement.reason.startswith(text)
    assert judgement.worst.tensor == tensor
    assert judgement.worst.at.index(tensor) == at
    assert judgement.worst.tile == ""
    assert judgement.gradients_over_bound[tensor] == 2
    assert judgement.wrong == 1


def test_gradient_without_a_finite_allowance_is_inconclusive():
    tensors = [
        replace(one, allowance=torch.full_like(one.exact, math.inf), counted=one.alive & False)
        if one.name == "dk"
        else one
        for one in gradients({})
    ]
    judgement = verdict(gradients_instead=tensors)
    assert (judgement.status, judgement.rule) == ("inconclusive", "")
    assert "no element of dk has a finite allowance" in judgement.reason


def test_warning_counts_unjudged_elements_of_a_gradient():
    (dq, *others) = gradients({})
    counted = dq.alive.clone()
    counted[0, 0, 0] = False
    judgement = verdict(gradients_instead=[replace(dq, counted=counted), *others])
    assert judgement.status == "pass"
    of_dq = f"{DIM} of {dq.exact.numel()} elements of dq"
    assert judgement.warnings == (f"not judged: {of_dq} have no finite bound",)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nonfinite_gradient_fails(value):
    judgement = verdict({("dk", (0, 0, 1, 1)): value})
    assert (judgement.status, judgement.rule) == ("fail", "finite")
    assert "dk[0, 0, 1, 1]" in judgement.reason


@pytest.mark.parametrize("value", [2.0**-140, math.nan])
def test_gradient_of_an_unseen_key_must_be_exactly_zero(value):
    judgement = verdict({("dv", (*UNSEEN, 2)): value})
    assert (judgement.status, judgement.rule) == ("fail", "empty rows")
    assert "of keys that no row sees are not exactly 0" in judgement.reason


def test_tile_is_named_for_dq_and_not_for_dk():
    assert verdict({("dq", (0, 0, 2, 0)): 0.0}, tiles=(2, 4)).worst.tile.startswith("query tile 1")
    assert verdict({("dk", (0, 0, 2, 0)): 0.0}, tiles=(2, 4)).worst.tile == ""


@pytest.mark.parametrize("tensor", AXES)
def test_place_round_trips_an_index_of_every_tensor(tensor):
    index = (2, 3, 1, 4)[: len(AXES[tensor])]
    assert Place.of(index).index(tensor) == index

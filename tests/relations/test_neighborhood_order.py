"""Cells in tiles and along a Z curve, against cells row by row."""

from __future__ import annotations

import pytest
import torch

from attncheck.inputs import input_tensors as inputs_room
from attncheck.mods.spec import Spec
from attncheck.relations import relation_named
from attncheck.relations.relation import Finding
from attncheck.subjects.ideal import Ideal

SIDES = {"canvas": [3, 5], "kernel": [3, 3]}
TILED = Spec.of("neighborhood_tiled", **SIDES, tile=[2, 2])
MORTON = Spec.of("neighborhood_morton", **SIDES)
ORDERS = pytest.mark.parametrize("mask", [TILED, MORTON], ids=["tiled", "morton"])
QUESTION = "neighborhood_order"


@pytest.fixture
def canvas(small):
    """A Problem of 15 cells, two rows and four keys beyond them."""
    return lambda mask, **changes: small(mask, **({"query": 17, "kv": 19} | changes))


class OtherNeighborhood(Ideal):
    """Computes ``other`` of the mask's arguments."""

    def other(self, name, values):
        raise NotImplementedError

    def prepare(self, inputs):
        mask = inputs.problem.mask
        other = self.other(mask.name, dict(mask.values))
        return super().prepare(inputs.replace(problem=inputs.problem.replace(mask=other)))


class OrderIgnored(OtherNeighborhood):
    """Cells are taken as they come, row by row."""

    def other(self, name, values):
        values.pop("tile", None)
        return Spec.of("neighborhood", **values)


class TilesOfTheOtherSide(OtherNeighborhood):
    """Tiles with their sides exchanged, ragged as they are."""

    def other(self, name, values):
        if "tile" in values:
            values["tile"] = [1, 4]
        return Spec.of(name, **values)


@ORDERS
@pytest.mark.parametrize(
    "kernel",
    [Ideal(), "triton-flash2", "sdpa-math", "flex"],
    ids=["ideal", "triton-flash2", "sdpa-math", "flex"],
)
def test_right_kernels_pass(kernel, mask, canvas, ask) -> None:
    assert ask(kernel, QUESTION, canvas(mask, dtype="fp16")) is None


@ORDERS
@pytest.mark.parametrize("dtype", ["fp32", "tf32", "bf16", "e4m3"])
def test_the_ideal_kernel_passes_in_every_dtype(dtype, mask, canvas, ask) -> None:
    asked = canvas(mask, dtype=dtype, distribution="outliers", score=Spec.of("softcap", cap=5.0))
    assert ask(Ideal(), QUESTION, asked) is None


@ORDERS
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_kernel_that_ignores_the_order_fails(dtype, mask, canvas, ask) -> None:
    assert isinstance(ask(OrderIgnored(), QUESTION, canvas(mask, dtype=dtype)), Finding)


def test_a_kernel_with_other_tiles_fails(canvas, ask) -> None:
    assert isinstance(ask(TilesOfTheOtherSide(), QUESTION, canvas(TILED)), Finding)


@ORDERS
def test_every_cell_keeps_its_neighbours(mask, canvas) -> None:
    """The plain problem's mask, its rows and keys moved back, is the given one's."""
    drawn = inputs_room.draw_inputs(canvas(mask, dtype="fp32"))
    plain, given = relation_named(QUESTION).runs(drawn, {})
    assert given is drawn
    assert plain.problem.mask == Spec.of("neighborhood", **SIDES)

    def places(ours, theirs):
        """Where each of our rows is among theirs."""
        same = (ours[0, 0, :, None] == theirs[0, 0, None]).all(-1)
        assert bool((same.sum(-1) == 1).all())
        return same.long().argmax(-1)

    rows, keys = places(given.q, plain.q), places(given.k, plain.k)
    assert torch.equal(places(given.v, plain.v), keys)
    indices = torch.meshgrid(*map(torch.arange, (1, 1, 17, 19)), indexing="ij")
    before, after = (each.problem.mask_mod()(*indices)[0, 0] for each in (plain, given))
    assert torch.equal(before[rows][:, keys], after)
    assert not torch.equal(before, after)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mask": Spec.of("neighborhood", **SIDES)}, "its mask is none of"),
        ({"query": 14}, "do not cover the canvas"),
        ({"kv": 14}, "do not cover the canvas"),
        ({"score": Spec.of("alibi")}, "reads the place of a row or key"),
        ({"score": Spec.of("bias", seed=0, per_batch=0, per_head=0)}, "reads the place"),
        ({"score": Spec.of("temperature", temperature=2.0)}, None),
    ],
)
def test_of_what_it_says_nothing(changes, says, canvas) -> None:
    reason = relation_named(QUESTION).unfit(canvas(TILED).replace(**changes))
    assert (reason is None) if says is None else (says in (reason or ""))


def test_a_softmax_is_refused(softmax) -> None:
    assert relation_named(QUESTION).unfit(softmax()) == "it is about attention"

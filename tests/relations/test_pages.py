"""The same keys in other pages: right kernels agree, and what looks elsewhere is found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attncheck.core.errors import ProblemError
from attncheck.core.paged_layout import Paging
from attncheck.core.source_files import import_file
from attncheck.inputs import input_tensors as inputs_room
from attncheck.mods.spec import Spec
from attncheck.relations import relation_named
from attncheck.relations.relation import Finding

planted = import_file(
    Path(__file__).parents[1] / "properties" / "planted_paged.py", "planted faults"
)

PAGING = Paging(size=2, seed=3, shared=1)
PADDING = Spec.of("padding", lengths=[7, 3])


def paged(small, mask=PADDING, **changes):
    return small(mask, **({"paging": PAGING} | changes))


@pytest.mark.parametrize("dtype", ["fp32", "tf32", "fp16", "bf16", "e4m3", "e5m2"])
def test_a_kernel_that_finds_its_keys_keeps_every_bit(dtype, small, ask, numbers) -> None:
    problem = paged(small, dtype=dtype, distribution="large_logits")
    for chosen in numbers("pages", problem):
        assert ask(planted.Gathering(), "pages", problem, **chosen) is None


@pytest.mark.parametrize(
    ("fault", "size"),
    [("Transposed", 3), ("PageOneLonger", 3), ("SharedIsTheFirstOnes", 3), ("KeptByPage", 2)],
)
def test_a_planted_fault_is_found(fault, size, small, ask) -> None:
    kernel = getattr(planted, fault)()
    found = ask(kernel, "pages", paged(small), size=size, order=1, shared=0)
    assert isinstance(found, Finding)


def test_the_numbers_stay_and_the_pages_change(small) -> None:
    drawn = inputs_room.draw_inputs(paged(small))
    before, after = relation_named("pages").runs(drawn, {"size": 16, "order": 2, "shared": 0})
    assert before is drawn
    assert after.problem.paging == Paging(size=16, seed=5, shared=0)
    assert after.problem.replace(paging=PAGING) == drawn.problem
    assert all(torch.equal(getattr(before, name), getattr(after, name)) for name in ("q", "k", "v"))


def test_what_may_be_asked(small) -> None:
    relation = relation_named("pages")
    assert relation.allowed(paged(small)) == {
        "size": [2, 3, 16, 64, 256],
        "order": (1, 2),
        "shared": [0, 1],
    }
    usual = paged(small, paging=Paging(size=32))
    assert relation.allowed(usual) == {
        "size": [16, 32, 64, 256],
        "order": (1, 2),
        "shared": [0],
    }
    last = paged(small, paging=Paging(size=16, seed=2**63 - 1))
    drawn = inputs_room.draw_inputs(last)
    assert relation.runs(drawn, {"size": 16, "order": 1, "shared": 0})[1].problem.paging.seed == 0


def test_without_pages_there_is_nothing_to_ask(small) -> None:
    with pytest.raises(ProblemError, match="its keys are in no pages"):
        relation_named("pages").check(small(), {})

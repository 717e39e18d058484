"""FlashAttention-2's list of tiles, its sink and its pages: the same bits as without a list or
pages, exact by the judge; and a list that is wrong, or pages that are, is noticed."""

from __future__ import annotations

import math

import pytest
import torch

from attncheck.examine.answer import answered
from attncheck.examine.environment import prepare
from attncheck.inputs import draw
from attncheck.mods import library
from attncheck.mods.spec import Spec
from attncheck.problem import Case, Problem
from attncheck.subjects import visits as visits_room
from attncheck.subjects.flash1 import Flash1
from attncheck.subjects.flash2 import Flash2

if not torch.cuda.is_available():
    prepare("cpu")

from attncheck.kernels.flash2_forward import flash2_forward
from attncheck.kernels.launch import KernelPages, VisitList
from attncheck.mods.to_triton import to_triton
from attncheck.subjects.traced import traced_mask

CAUSAL = Spec.of("causal")
MASKS = {
    "causal": CAUSAL,
    "window": Spec.of("sliding_window", window=20),
    "nothing": Spec.of("sliding_window", window=0),
    "document": Spec.of("document", lengths=[20, 0, 13, 37]),
    "padding": Spec.of("padding", lengths=[40]),
    "future": Spec.of("not", CAUSAL),
    "of heads": Spec.of("expression", text="kv_idx <= q_idx + 40 * h"),
    "of both": Spec.of("expression", text="kv_idx // 32 < q_idx // 32 + h - b"),
}


def small(**changes) -> Problem:
    sizes = {"batch": 1, "heads": 2, "kv_heads": 1, "query": 70, "kv": 66, "head_dim": 16}
    return Problem(**(sizes | {"dtype": "bf16", "mask": CAUSAL} | changes))


def same(one, other) -> bool:
    return torch.equal(one.out, other.out) and torch.equal(one.lse, other.lse)


def verdict(subject, problem: Problem) -> str:
    return answered(subject, Case(problem=problem), device="cpu", brief=True).status


@pytest.mark.parametrize("mask", MASKS)
def test_the_listed_tiles_give_what_all_give(mask) -> None:
    """To the bit: a hidden key's weight is 0, and a maximum that stays rescales by 1."""
    inputs = draw(small(mask=MASKS[mask], batch=2 if mask == "of both" else 1))
    assert same(Flash2((32, 32)).run(inputs), Flash2((32, 32), dense=True).run(inputs))


@pytest.mark.parametrize("mask", ["causal", "of heads"])
def test_they_are_exact_in_fp8(mask) -> None:
    assert verdict(Flash2((32, 32)), small(mask=MASKS[mask], dtype="e4m3")) == "pass"


@pytest.mark.parametrize("mask", MASKS)
def test_the_list_leaves_tiles_out(mask) -> None:
    """And has one entry for all of batch or heads where the mask does not read them."""
    paddings = {"mask": Spec.of("padding", lengths=[0, 40])} if mask == "padding" else {}
    problem = small(batch=2, **({"mask": MASKS[mask]} | paddings))
    found = Flash2((32, 32)).visited(problem, torch.device("cpu"))["tiles"]
    assert int(found.counts.min()) < 3
    reads = {"padding": (2, 1), "of heads": (1, 2), "of both": (2, 2)}
    assert found.counts.shape == (*reads.get(mask, (1, 1)), 3)
    assert Flash2().visited(small(mask=library.FULL), torch.device("cpu")) == {}


def test_a_score_mod_and_other_numbers_have_the_same_list() -> None:
    """It is made once for a mask at its lengths; for another window it is another."""
    lists = [
        visits_room.visits(small(**changes), 32, 32, "cpu")
        for changes in ({}, {"seed": 5, "score": Spec.of("alibi"), "sink": True}, {"kv": 50})
    ]
    assert lists[0] is lists[1]
    assert lists[0].counts.tolist() != lists[2].counts.tolist()


class WrongList(Flash2):
    """Walks over a list that ``change`` made of the right one."""

    def __init__(self, change) -> None:
        super().__init__((32, 32))
        self.change = change

    def visited(self, problem, device):
        right = super().visited(problem, device)["tiles"]
        return {"tiles": self.change(right.tiles.clone(), right.counts.clone())}


def nothing(tiles, counts) -> VisitList:
    return VisitList(tiles, counts)


def last_dropped(tiles, counts) -> VisitList:
    counts[..., 2] -= 1
    return VisitList(tiles, counts)


def first_dropped(tiles, counts) -> VisitList:
    tiles[:, :, 1, 0] = tiles[:, :, 1, 1]
    return VisitList(tiles, counts)


def partial_called_full(tiles, counts) -> VisitList:
    return VisitList(tiles | 1, counts)


def twice(tiles, counts) -> VisitList:
    tiles[..., 2, 1] = tiles[..., 2, 0]
    return VisitList(tiles, counts)


def of_another_head(tiles, counts) -> VisitList:
    return VisitList(tiles.expand(-1, 2, -1, -1).roll(1, 1).contiguous(), counts.roll(1, 1))


WRONG = {
    "nothing": (nothing, "causal", "pass"),
    "last dropped": (last_dropped, "causal", "fail"),
    "first dropped": (first_dropped, "causal", "fail"),
    "partial called full": (partial_called_full, "causal", "fail"),
    "one twice": (twice, "causal", "fail"),
    "of another head": (of_another_head, "of heads", "fail"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_list_is_noticed(fault) -> None:
    change, mask, expected = WRONG[fault]
    assert verdict(WrongList(change), small(mask=MASKS[mask])) == expected


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_what_a_skipped_tile_holds_does_not_matter(poison) -> None:
    """Nor what a visited one hides: its rows are done again with care, and no bit moves."""
    inputs = draw(small(query=20, heads=1))
    k, v = inputs.k.clone(), inputs.v.clone()
    k[:, :, 20:], v[:, :, 20:] = poison, poison
    poisoned = inputs.replace(k=k, v=v)
    for subject in (Flash2((32, 16)), Flash2((16, 32)), Flash2((32, 32), dense=True)):
        assert same(subject.run(poisoned), subject.run(inputs))


def test_other_launches_of_flash2() -> None:
    """Half as long, half as wide, twice as large and dense; in fp8 never fewer than 32 keys."""
    assert list(Flash2().launches(small(kv=70), "cpu")) == ["32×64", "64×32", "128×128", "dense"]
    assert list(Flash2().launches(small(mask=library.FULL, query=20, kv=20), "cpu")) == [
        "16×32",
        "32×16",
        "64×64",
    ]
    fp8 = Flash2().launches(small(dtype="e4m3", query=20, kv=20), "cpu")
    assert list(fp8) == ["16×32", "64×64", "dense"]
    for name, other in Flash2().launches(small(), "cpu").items():
        tiling = other.tiling(small(), "cpu")
        assert name in {f"{tiling.block_query}×{tiling.block_kv}", "dense"}
    assert Flash2().launches(small(head_dim=64), "cuda").keys() == {"64×64", "128×32", "dense"}


SINKS = {"causal": {}, "nothing": {"mask": MASKS["nothing"]}, "full": {"mask": library.FULL}}


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "e4m3"])
@pytest.mark.parametrize("subject", [Flash2(), Flash1()], ids=["flash2", "flash1"])
@pytest.mark.parametrize("changes", SINKS.values(), ids=SINKS)
def test_sinks_are_exact(changes, subject, dtype) -> None:
    assert verdict(subject, small(sink=True, query=40, dtype=dtype, **changes)) == "pass"


@pytest.mark.parametrize("subject", [Flash2(), Flash1()], ids=["flash2", "flash1"])
def test_sinks_with_a_score_mod_are_exact(subject) -> None:
    """Scores are natural then, and so is the sink."""
    score = Spec.of("softcap", cap=5.0)
    assert verdict(subject, small(sink=True, query=40, score=score)) == "pass"


@pytest.mark.parametrize("subject", [Flash2(), Flash1()], ids=["flash2", "flash1"])
def test_a_row_that_sees_no_key_sees_the_sink(subject) -> None:
    inputs = draw(small(sink=True, mask=MASKS["nothing"], score=Spec.of("softcap", cap=5.0)))
    found = subject.run(inputs)
    assert torch.equal(found.out, torch.zeros_like(found.out))
    assert torch.equal(found.lse, inputs.sink[:, None].expand_as(found.lse))


class OtherSink(Flash2):
    """Reads what ``change`` makes of the sink."""

    def __init__(self, change) -> None:
        super().__init__()
        self.change = change

    def prepare(self, inputs):
        return super().prepare(inputs.replace(sink=self.change(inputs.sink)))


@pytest.mark.parametrize(
    "change", [lambda s: s.flip(0), lambda s: s * 1.44269504, lambda s: s - 100.0]
)
def test_a_wrong_sink_is_noticed(change) -> None:
    """Another head's, one in log2 units, none."""
    assert verdict(OtherSink(change), small(sink=True)) == "fail"


def paged(inputs, size: int, *, poison: float = math.nan):
    """k, v as views of caches whose pages are shuffled, free ones between, and where they are."""
    batch, kv = inputs.problem.batch, inputs.problem.kv
    each = -(-kv // size)
    order = torch.randperm(2 * batch * each, generator=torch.Generator().manual_seed(size))
    table = order[: batch * each].view(batch, each)
    views = []
    for tensor in (inputs.k, inputs.v):
        heads, dim = tensor.shape[1], tensor.shape[3]
        cache = torch.full((len(order), size, heads, dim), poison).to(tensor.dtype)
        for b in range(batch):
            for j in range(kv):
                cache[table[b, j // size], j % size] = tensor[b, :, j]
        views.append(cache.permute(0, 2, 1, 3))
    beyond = torch.full((batch, 2), order[-1].item())  # free pages: what nobody may read
    return *views, KernelPages(torch.cat([table, beyond], 1).int(), size)


def forward(inputs, subject, k, v, **more):
    problem = inputs.problem
    out, lse = flash2_forward(
        inputs.q,
        k,
        v,
        scale=problem.scale,
        mask=to_triton(traced_mask(problem, "cpu")),
        score=None,
        launch=subject.launch(problem, "cpu"),
        descale=inputs.descale,
        out_dtype=problem.formats.output.torch_dtype,
        sink=inputs.sink,
        **subject.visited(problem, torch.device("cpu")),
        **more,
    )
    return type(subject.run(inputs))(out, lse)


@pytest.mark.parametrize("size", [1, 3, 16, 64])
@pytest.mark.parametrize(
    "changes",
    [{}, {"mask": library.FULL, "dtype": "fp32"}, {"sink": True, "dtype": "e4m3", "value_dim": 8}],
    ids=["causal", "full", "fp8"],
)
def test_pages_give_the_bits_of_rows_one_after_another(changes, size) -> None:
    """Whatever their size; what is free, or beyond the last key, may be NaN."""
    inputs = draw(small(batch=2, query=20, kv=70, **changes))
    subject = Flash2((32, 32))
    k, v, pages = paged(inputs, size)
    found = forward(inputs, subject, k, v, pages=pages, kv=inputs.problem.kv)
    assert same(found, subject.run(inputs))


def test_a_wrong_page_is_noticed() -> None:
    inputs = draw(small(batch=2, heads=4, kv_heads=2, query=20, kv=70, mask=library.FULL))
    subject = Flash2((32, 32))
    k, v, pages = paged(inputs, 16, poison=0.0)
    wrong = KernelPages(pages.table.roll(1, 0), 16)
    found = forward(inputs, subject, k, v, pages=wrong, kv=70)
    assert not same(found, subject.run(inputs))
    longer = forward(inputs, subject, k, v, pages=pages, kv=71)
    assert not same(longer, subject.run(inputs))

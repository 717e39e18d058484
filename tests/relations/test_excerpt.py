"""An excerpt of a Problem: its mods agree with the whole's at the places that it is cut from."""

import pytest
import torch

from attncheck.core.errors import ProblemError
from attncheck.core.mod_spec import Spec
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.relations.excerpt import Excerpt, can_excerpt
from attncheck.subjects.ideal import Ideal

MASKS = {
    "full": Spec.of("full"),
    "causal": Spec.of("causal"),
    "causal_bottom_right": Spec.of("causal_bottom_right"),
    "window": Spec.of("sliding_window", window=3),
    "no window": Spec.of("sliding_window", window=0),
    "huge window": Spec.of("sliding_window", window=2**31 - 1),
    "prefix": Spec.of("prefix_lm", prefix=4),
    "huge prefix": Spec.of("prefix_lm", prefix=2**31 - 1),
    "padding": Spec.of("padding", lengths=[3, 9, 0]),
    "document": Spec.of("document", lengths=[0, 3, 0, 1, 4, 9]),
    "expression": Spec.of("expression", text="(q_idx * 2 - kv_idx) % 3 <= b"),
    "and": Spec.of("and", Spec.of("causal"), Spec.of("document", lengths=[4, 8])),
    "offset": Spec.of("offset", Spec.of("causal_bottom_right"), rows=3),
    "later": Spec.of("offset", Spec.of("sliding_window", window=3), rows=3),
    "not or": Spec.of("not", Spec.of("or", Spec.of("causal"), Spec.of("prefix_lm", prefix=2))),
}
SCORES = {
    "softcap": Spec.of("softcap", cap=3.0),
    "alibi": Spec.of("alibi"),
    "bias": Spec.of("relative_bias", distance=2, seed=1),
    "written": Spec.of("expression", text="score * (kv_idx + 1) - q_idx + b"),
    "chain": Spec.of("chain", Spec.of("temperature", temperature=2.0), Spec.of("alibi")),
}
PARTS = {
    "whole": (range(3), range(7), range(9)),
    "later keys": (range(3), range(7), range(4, 9)),
    "earlier keys": (range(3), range(7), range(4)),
    "last rows": (range(3), range(5, 7), range(9)),
    "middle": (range(1, 2), range(2, 6), range(2, 5)),
    "apart": (range(2, 3), range(5), range(6, 9)),
    "below": (range(3), range(4, 7), range(1, 3)),
}


def indices_of(sequences, rows, keys):
    """Indices of all places, each (batch, heads, query, kv)."""
    ranges = (sequences, range(2), rows, keys)
    return torch.meshgrid(*(torch.tensor(list(each)) for each in ranges), indexing="ij")


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("query", [7, 9])
def test_mask_is_shifted(mask, part, query, small):
    whole = small(MASKS[mask], batch=3, heads=2, query=query, kv=9)
    excerpt = Excerpt(**dict(zip(("sequences", "rows", "keys"), PARTS[part], strict=True)))
    shifted = excerpt.problem(whole)
    own = indices_of(*(range(len(each)) for each in PARTS[part]))
    seen = shifted.mask_mod()(*own).expand(own[0].shape)
    assert torch.equal(seen, whole.mask_mod()(*indices_of(*PARTS[part])).expand(own[0].shape))


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("score", SCORES)
def test_score_mod_is_shifted_or_refused(score, part, small):
    whole = small(batch=3, heads=2, query=7, kv=9, score=SCORES[score])
    excerpt = Excerpt(**dict(zip(("sequences", "rows", "keys"), PARTS[part], strict=True)))
    needs_offset = score in {"alibi", "bias", "chain"} and excerpt.offset != 0
    assert can_excerpt(whole, excerpt) != needs_offset
    if needs_offset:
        with pytest.raises(ProblemError, match="cannot shift"):
            excerpt.problem(whole)
        return
    own = indices_of(*(range(len(each)) for each in PARTS[part]))
    values = torch.linspace(-4, 4, own[0].numel(), dtype=torch.float64).view(own[0].shape)
    scored = excerpt.problem(whole).score_mod()(values, *own)
    assert torch.equal(scored, whole.score_mod()(values, *indices_of(*PARTS[part])))


@pytest.mark.parametrize(
    ("mask", "excerpt", "name"),
    [
        ("causal", {"rows": range(4, 9)}, "causal_bottom_right"),
        ("causal", {"rows": range(4)}, "causal"),
        ("causal", {"keys": range(3, 9)}, "causal_bottom_right"),
        ("causal_bottom_right", {"rows": range(4, 9)}, "causal_bottom_right"),
        ("causal", {"rows": range(2, 5), "keys": range(2, 5)}, "causal"),
        ("window", {"rows": range(4)}, "sliding_window"),
        ("padding", {"keys": range(4, 9)}, "padding"),
        ("document", {"rows": range(3, 6), "keys": range(3, 6)}, "document"),
    ],
)
def test_shifted_mask_keeps_library_name(mask, excerpt, name, small):
    whole = small(MASKS[mask], batch=3, query=9, kv=9)
    assert Excerpt.of(whole, **excerpt).problem(whole).mask.name == name


@pytest.mark.parametrize(
    "part", ["whole", "last rows", "later keys", "one sequence", "middle rows"]
)
@pytest.mark.parametrize("inner", ["causal", "window", "huge window"])
def test_mask_of_each_sequence_keeps_its_name(inner, part, small):
    mask = Spec.of("bottom_right", MASKS[inner], lengths=[3, 9, 0])
    whole = small(mask, batch=3, heads=2, query=7, kv=9)
    ranges = PARTS | {
        "one sequence": (range(1, 2), range(7), range(9)),
        "middle rows": (range(3), range(2, 5), range(9)),
    }
    excerpt = Excerpt(**dict(zip(("sequences", "rows", "keys"), ranges[part], strict=True)))
    shifted = excerpt.problem(whole)
    assert shifted.mask.name == "bottom_right"
    own = indices_of(*(range(len(each)) for each in ranges[part]))
    seen = shifted.mask_mod()(*own).expand(own[0].shape)
    assert torch.equal(seen, whole.mask_mod()(*indices_of(*ranges[part])).expand(own[0].shape))


def test_mask_of_each_sequence_cannot_be_shifted_to_its_first_keys(small):
    whole = small(Spec.of("bottom_right", MASKS["causal"], lengths=[3, 9, 0]), batch=3, kv=9)
    assert not can_excerpt(whole, Excerpt.of(whole, keys=range(4)))


def test_expression_without_room_for_offset_cannot_be_shifted(small):
    # The text has its maximum length already.
    whole = small(Spec.of("expression", text=f"kv_idx >={'0':>191}"))
    assert can_excerpt(whole, Excerpt.of(whole, keys=range(3)))
    assert not can_excerpt(whole, Excerpt.of(whole, keys=range(3, 7)))


@pytest.mark.parametrize("dtype", ["bf16", "e4m3"])
def test_tensors_are_cut_into_memory_of_their_own(dtype, small):
    inputs = draw_inputs(small(dtype=dtype))
    excerpt = Excerpt(sequences=range(1, 2), rows=range(2, 5), keys=range(3))
    cut = excerpt.inputs(inputs)
    for tensor, whole, rows in (
        (cut.q, inputs.q, slice(2, 5)),
        (cut.k, inputs.k, slice(3)),
        (cut.v, inputs.v, slice(3)),
    ):
        assert torch.equal(tensor.float(), whole[1:2, :, rows].float())
        assert tensor.is_contiguous()
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    if cut.descale is not None:
        assert torch.equal(cut.descale.k, inputs.descale.k[1:2])


def test_excerpt_of_heads_gives_their_outputs_and_gradients(small):
    whole = small(
        Spec.of("causal"), batch=2, heads=4, kv_heads=2, query=5, kv=5, sink=True, backward=True
    )
    inputs = draw_inputs(whole)
    excerpt = Excerpt.of(whole, sequences=range(1), heads=range(2))
    part = excerpt.inputs(inputs)
    assert (part.problem.heads, part.problem.kv_heads, part.problem.batch) == (2, 1, 1)
    outputs = Ideal().run(inputs)
    expected, cut = Ideal().run(part), excerpt.outputs(outputs, part.problem)
    assert cut.tensors().keys() == expected.tensors().keys()
    for name, tensor in cut.tensors().items():
        # The gradient of a sink is a sum over both sequences.
        assert torch.equal(tensor, expected.tensors()[name]) != (name == "dsink"), name


@pytest.mark.parametrize(("score", "fits"), [("softcap", True), ("alibi", False), ("bias", False)])
def test_excerpt_of_heads_needs_score_mod_that_reads_no_head(score, fits, small):
    whole = small(heads=2, score=SCORES[score])
    assert can_excerpt(whole, Excerpt.of(whole, heads=range(1))) == fits

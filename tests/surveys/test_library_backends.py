"""Canvas, document-pair, offset and bias mods mean the same in every backend."""

import pytest
import torch

from attncheck.core.errors import ProblemError
from attncheck.core.mod_spec import Dimensions, Spec
from attncheck.mods import expression
from attncheck.mods.index_ranges import check_index_ranges
from attncheck.mods.library import build_mask, build_score
from attncheck.mods.trace import trace_mask, trace_score
from attncheck.subjects.capabilities.named_kernels import subject_named
from attncheck.subjects.ideal import Ideal
from attncheck.surveys.mod_survey import compare_backends

SMALL = Dimensions(batch=2, heads=2, query=14, kv=17)
LARGE = Dimensions(batch=3, heads=5, query=5000, kv=7000)
CANVAS = {"canvas": [3, 5], "kernel": [3, 2]}
MASKS = {
    "documents": Spec.of("documents", query_lengths=[3, 0, 9, 5], kv_lengths=[0, 4, 6, 7]),
    "neighborhood": Spec.of("neighborhood", **CANVAS),
    "neighborhood_tiled": Spec.of("neighborhood_tiled", **CANVAS, tile=[2, 3]),
    "neighborhood_morton": Spec.of("neighborhood_morton", **CANVAS),
    "offset": Spec.of("offset", Spec.of("causal_bottom_right"), rows=2),
    "offset, of a table": Spec.of("offset", Spec.of("document", lengths=[5, 9, 5]), rows=5),
    "offset, within": Spec.of(
        "and",
        Spec.of("not", Spec.of("offset", Spec.of("sliding_window", window=4), rows=3)),
        Spec.of("offset", Spec.of("neighborhood_morton", **CANVAS), rows=4),
    ),
}
SCORES = {
    "bias": Spec.of("bias", seed=5, per_batch=0, per_head=0),
    "bias of each": Spec.of("bias", seed=5, per_batch=1, per_head=1),
    "offset": Spec.of("offset", Spec.of("alibi"), rows=6),
    "offset of a bias": Spec.of("offset", Spec.of("bias", seed=5, per_batch=1, per_head=0), rows=6),
}
EVERY = [(spec, build_mask, trace_mask) for spec in MASKS.values()]
EVERY += [(spec, build_score, trace_score) for spec in SCORES.values()]
every_mod = pytest.mark.parametrize(
    ("spec", "build", "trace"), EVERY, ids=[*MASKS, *(f"score {name}" for name in SCORES)]
)


@every_mod
def test_all_backends_agree(spec, build, trace):
    # The interpreter is slow for score mods (a program for each key), so it runs one of them.
    triton = (
        [subject_named("triton-flash2")] if build is build_mask or spec == SCORES["offset"] else []
    )
    kernels = [Ideal(), subject_named("flex"), *triton]
    _, backends = compare_backends("mod", build(spec, SMALL), kernels, dimensions=SMALL)
    assert [backend.status for backend in backends] == ["equal"] * (1 + len(kernels)), backends
    assert {backend.compared for backend in backends} == {2 * 2 * 14 * 17}


@every_mod
def test_mod_survives_json_bit_for_bit(spec, build, trace):
    mod = build(spec, SMALL)
    traced = trace(mod)
    decoded = expression.expression_from_json(expression.expression_to_json(traced))
    assert expression.expression_digest(decoded) == expression.expression_digest(
        trace(build(spec, SMALL))
    )
    indices = torch.meshgrid(*map(torch.arange, (2, 2, 14, 17)), indexing="ij")
    start = [torch.zeros(2, 2, 14, 17, dtype=torch.float64)] if build is build_score else []
    assert torch.equal(
        decoded.evaluate(*start, *indices), mod(*start, *indices).expand(2, 2, 14, 17)
    )


@pytest.mark.parametrize(
    "spec",
    [
        *(
            Spec.of(name, canvas=[63, 80], kernel=[7, 12])
            for name in ("neighborhood", "neighborhood_morton")
        ),
        Spec.of("neighborhood_tiled", canvas=[63, 80], kernel=[7, 12], tile=[8, 9]),
        Spec.of("neighborhood_tiled", canvas=[16777216, 1], kernel=[1, 1], tile=[16777216, 1]),
        Spec.of("documents", query_lengths=[9000, 1], kv_lengths=[1, 9000]),
        Spec.of("offset", Spec.of("causal"), rows=2**31 - 1 - 5000),
    ],
    ids=str,
)
def test_indices_stay_within_their_tables_and_32_bits(spec):
    check_index_ranges(trace_mask(build_mask(spec, LARGE)), LARGE)


def test_index_beyond_a_table_is_an_error():
    """Masks avoid it by clamping, and an offset by building for the longer problem."""
    short = build_mask(MASKS["documents"], SMALL)
    longer = Dimensions(batch=2, heads=2, query=14, kv=18)
    with pytest.raises(
        ProblemError, match=r"indexes axis 0 of its tensor of shape \(17,\) with 17"
    ):
        check_index_ranges(trace_mask(short), longer)

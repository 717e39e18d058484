"""Which indices a mod reads, as far as its names tell: never fewer than it does."""

from __future__ import annotations

import pytest

from attncheck.mods.spec import Spec
from attncheck.relations.relation import indices_read

PLACES = {"q_idx", "kv_idx"}
SIDES = {"canvas": [2, 2], "kernel": [1, 1]}
READ = [
    (Spec.of("neighborhood", **SIDES), PLACES),
    (Spec.of("neighborhood_tiled", **SIDES, tile=[1, 2]), PLACES),
    (Spec.of("neighborhood_morton", **SIDES), PLACES),
    (Spec.of("documents", query_lengths=[4], kv_lengths=[4]), PLACES),
    (Spec.of("offset", Spec.of("full"), rows=3), set()),
    (Spec.of("offset", Spec.of("padding", lengths=[3, 4]), rows=3), {"b", "kv_idx"}),
    (Spec.of("offset", Spec.of("alibi"), rows=3), PLACES | {"h"}),
    (Spec.of("bias", seed=0, per_batch=0, per_head=0), PLACES),
    (Spec.of("bias", seed=0, per_batch=1, per_head=0), PLACES | {"b"}),
    (Spec.of("bias", seed=0, per_batch=0, per_head=1), PLACES | {"h"}),
    (Spec.of("mine.py::mask"), PLACES | {"b", "h"}),
]


@pytest.mark.parametrize(("mod", "indices"), READ, ids=[str(mod) for mod, _ in READ])
def test_a_mod_reads_these_indices(mod: Spec, indices: set[str]) -> None:
    assert indices_read(mod) == indices

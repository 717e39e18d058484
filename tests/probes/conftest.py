"""Small problems with several sequences, shared key heads, ragged tiles and empty rows."""

import pytest

from attncheck.core.mod_spec import Spec
from attncheck.inputs.problem import Problem

MASKS = {
    "full": Spec.of("full"),
    "causal": Spec.of("causal"),
    "causal_bottom_right": Spec.of("causal_bottom_right"),
    "sliding_window": Spec.of("sliding_window", window=5),
    "prefix_lm": Spec.of("prefix_lm", prefix=7),
    "document": Spec.of("document", lengths=[4, 9, 28]),
    "padding": Spec.of("padding", lengths=[0, 13]),
    "holes": Spec.of("not", Spec.of("sliding_window", window=3)),
}


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """Every probe test runs on one thread."""


@pytest.fixture
def small():
    """``small(mask, **changes)``: a small Problem."""

    def build(mask="full", **changes):
        sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "query": 12, "kv": 21, "head_dim": 8}
        return Problem(**(sizes | {"mask": MASKS[mask]} | changes))

    return build

"""Every entry of the catalogue: whole, planted where it says, and one of each category caught."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from attncheck.core.formats import DTYPES
from attncheck.core.paged_layout import Paging
from attncheck.faults.catalogue import FAULTS
from attncheck.faults.fault import CATEGORIES, HOSTS
from attncheck.faults.planting import plant
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Problem
from attncheck.mods.spec import Spec
from attncheck.subjects.load import load_subject
from attncheck.verify.environment import prepare

sys.path.insert(0, str(Path(__file__).parent))
from planted_gate import caught

HOW_MANY = {
    "mask alignment": 8,
    "sliding window": 4,
    "tail tile": 6,
    "fully masked rows": 6,
    "sentinels": 5,
    "online softmax": 6,
    "scale and units": 9,
    "softcap": 5,
    "score mods": 6,
    "gqa": 3,
    "strides": 4,
    "integer overflow": 3,
    "head dim": 2,
    "precision": 6,
    "fp8": 5,
    "split kv": 6,
    "paged kv": 3,
    "block mask": 3,
    "documents": 5,
    "degenerate shapes": 3,
    "determinism": 5,
    "backward": 4,
    "sinks": 1,
}
UNPLANTED = {"mask-offset-overflow", "dropout-seed-bwd-mismatch", "dropout-constant-seed"}
PLACES = [
    (fault.id, host, dtype)
    for fault in FAULTS.values()
    for host, how in fault.hosts.items()
    for dtype in how.dtypes
]
# What brings a kernel to what was changed, beside a mask.
SCORES = {"softcap": Spec.of("softcap", cap=20.0), "score mods": Spec.of("alibi")}


def tiny(fault, host, dtype, *, backward):
    """A Problem of few numbers that the kernel takes, with gradients where it has them."""
    score = {"score": SCORES[fault.category]} if fault.category in SCORES else {}
    backward = backward and not DTYPES[dtype].scaled
    paged = fault.hosts[host].kernel == "triton-paged"
    return Problem(
        heads=2,
        kv_heads=1,
        query=3,
        kv=5,
        head_dim=8,
        dtype=dtype,
        mask=Spec.of("causal_bottom_right"),
        backward=backward,
        dcaptured=backward and fault.category == "score mods",
        paging=Paging(size=4, seed=1) if paged else None,
        **score,
    )


def test_every_category_has_its_entries():
    assert set(HOW_MANY) == set(CATEGORIES)
    for category, count in HOW_MANY.items():
        assert sum(fault.category == category for fault in FAULTS.values()) == count, category


@pytest.mark.parametrize("name", FAULTS)
def test_an_entry_says_everything_and_is_planted_in_both_hosts(name):
    fault = FAULTS[name]
    assert set(fault.hosts) == (set() if name in UNPLANTED else set(HOSTS))
    assert bool(fault.unplanted) == (name in UNPLANTED)
    assert fault.summary
    assert fault.when
    assert fault.seen
    assert fault.sources


@pytest.mark.parametrize(("name", "host", "dtype"), PLACES)
def test_it_is_planted_and_gives_an_answer_of_the_right_shape(name, host, dtype, tmp_path):
    prepare("cpu")
    kernel = load_subject(plant(FAULTS[name], host, tmp_path))
    problem = tiny(FAULTS[name], host, dtype, backward=kernel.backward)
    assert kernel.unsupported(problem, "cpu") is None
    found = kernel.prepare(draw_inputs(problem))()
    assert found.out.shape == (1, 2, 3, 8)
    assert found.lse.shape == (1, 2, 3)
    assert (found.dk is not None) == problem.backward
    if problem.backward:
        assert found.dk.shape == (1, 1, 5, 8)


ONE_OF_EACH = [
    ("causal-one-future-key", "triton", "contract", "compare"),
    ("window-left-off-by-one", "ideal", "probes", "decode"),
    ("tail-keys-not-masked-exp0", "ideal", "contract", "compare"),
    ("lse-plus-inf-for-empty", "triton", "contract", "compare"),
    ("running-max-init-zero", "ideal", "probes", "negative"),
    ("missing-alpha-on-l", "triton", "probes", "ones"),
    ("lse-base2-returned", "ideal", "contract", "compare"),
    ("softcap-s-times-tanh", "triton", "bounds", "compare"),
    ("alibi-sign-flip", "triton", "bounds", "compare"),
    ("gqa-dkv-not-summed", "ideal", "bounds", "compare"),
    ("v-uses-k-strides", "ideal", "contract", "compare"),
    ("headdim-pad-not-masked", "ideal", "contract", "compare"),
    ("tf32-for-fp32", "ideal", "contract", "compare"),
    ("fp8-descale-scalar-not-per-head", "ideal", "contract", "compare"),
    ("empty-split-nan", "triton", "contract", "compare"),
    ("last-page-counted-full", "triton", "probes", "decode"),
    ("blockmask-partial-as-full", "ideal", "probes", "decode"),
    ("one-key-row-slice-nan", "ideal", "contract", "compare"),
    ("split-count-depends-on-batch", "ideal", "determinism", "neighbours"),
    ("delta-missing", "triton", "contract", "compare"),
]


@pytest.mark.parametrize(("name", "host", "stages", "question"), ONE_OF_EACH)
def test_one_of_each_category_is_caught(name, host, stages, question):
    record = caught(name, host, stages=stages)
    assert record is not None
    assert record.status == "fail"
    assert record.case["question"] == question


def test_each_category_is_among_them():
    """But what a gate comes to late, and 2³¹ numbers, which none asks of."""
    asked = {FAULTS[name].category for name, *_ in ONE_OF_EACH}
    assert set(CATEGORIES) - asked == {"integer overflow", "documents", "sinks"}

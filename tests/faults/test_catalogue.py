"""Every entry of the catalogue: whole, planted where it says, and one of each category caught."""

from __future__ import annotations

from collections import Counter

import pytest

from attncheck.core.formats import DTYPES
from attncheck.core.mod_spec import Spec
from attncheck.core.paged_layout import Paging
from attncheck.faults.catalogue import CATEGORIES, CONTROLS, FAULTS, HOSTS
from attncheck.faults.planting import plant
from attncheck.faults.scoring import GateRun
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Case, Problem
from attncheck.probes import case
from attncheck.records.record import FAILED_STATUSES
from attncheck.subjects.load import load_subject
from attncheck.verify.environment import prepare
from attncheck.verify.run_case import run_case
from attncheck.workers.units import Unit

pytestmark = pytest.mark.usefixtures("shared_evidence")

OF = Spec.of
HOW_MANY = dict(
    zip(
        CATEGORIES,
        (8, 4, 6, 6, 5, 6, 9, 5, 6, 3, 4, 3, 2, 6, 5, 6, 3, 3, 5, 3, 5, 4, 1),
        strict=True,
    )
)
UNPLANTED = {"mask-offset-overflow", "dropout-seed-bwd-mismatch", "dropout-constant-seed"}
PLACES = [
    (fault.id, host, dtype)
    for fault in FAULTS.values()
    for host, how in fault.hosts.items()
    for dtype in how.dtypes
]
# What brings a kernel to what was changed, beside a mask.
SCORES = {"softcap": OF("softcap", cap=20.0), "score mods": OF("alibi")}


def test_every_category_has_its_entries_and_each_says_everything():
    assert Counter(fault.category for fault in FAULTS.values()) == HOW_MANY
    for name, fault in FAULTS.items():
        assert set(fault.hosts) == (set() if name in UNPLANTED else set(HOSTS)), name
        assert bool(fault.unplanted) == (name in UNPLANTED), name
        assert all((fault.summary, fault.when, fault.seen, fault.reports, fault.category)), name


def test_every_patch_fits_the_text_that_it_changes(tmp_path):
    """All at once, for who changes a kernel: of the tests below few run without ``-m slow``."""
    for change in (*FAULTS.values(), *CONTROLS.values()):
        for host in change.hosts:
            plant(change, host, tmp_path)  # raises NotPlanted


@pytest.mark.parametrize(("name", "host", "dtype"), PLACES)
def test_it_is_planted_and_gives_an_answer_of_the_right_shape(name, host, dtype, tmp_path):
    prepare("cpu")
    fault = FAULTS[name]
    kernel = load_subject(plant(fault, host, tmp_path))
    backward = kernel.backward and not DTYPES[dtype].scaled
    problem = Problem(
        heads=2,
        kv_heads=1,
        query=3,
        kv=5,
        head_dim=8,
        dtype=dtype,
        mask=OF("causal_bottom_right"),
        backward=backward,
        dcaptured=backward and fault.category == "score mods",
        paging=Paging(size=4, seed=1) if fault.hosts[host].kernel == "triton-paged" else None,
        **({"score": SCORES[fault.category]} if fault.category in SCORES else {}),
    )
    assert kernel.unsupported(problem, "cpu") is None
    outputs = kernel.prepare(draw_inputs(problem))()
    assert (outputs.out.shape, outputs.lse.shape) == ((1, 2, 3, 8), (1, 2, 3))
    assert (None if outputs.dk is None else outputs.dk.shape) == (
        (1, 1, 5, 8) if backward else None
    )


ONE_OF_EACH = [
    ("causal-one-future-key", "triton", "contract", "compare"),
    ("window-left-off-by-one", "ideal", "probes", "decode"),
    ("tail-keys-not-masked-exp0", "ideal", "contract", "compare"),
    ("lse-plus-inf-for-empty", "triton", "contract", "compare"),
    ("running-max-init-zero", "ideal", "probes", "negative"),
    ("missing-alpha-on-l", "triton", "probes", "ramp"),
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
def test_one_of_each_category_is_caught(name, host, stages, question, tmp_path):
    unit = Unit(
        kind="fault",
        stage="contract",
        kernel=name,
        device="cpu",
        tier="smoke",
        dtype=FAULTS[name].hosts[host].dtypes[0],
    )
    run = GateRun(plant(FAULTS[name], host, tmp_path), unit, stages)
    records = (answer.record for answer, _ in run.answers())
    record = next(record for record in records if record.status in FAILED_STATUSES)
    run.close()
    assert (record.status, record.case["question"]) == ("fail", question)


def test_each_category_is_among_them():
    """But what a gate comes to late, and 2³¹ numbers, which none asks of."""
    tried = {FAULTS[name].category for name, *_ in ONE_OF_EACH}
    assert set(CATEGORIES) - tried == {"integer overflow", "documents", "sinks"}


PREFIX_AND_PADDING = OF("and", OF("prefix_lm", prefix=4), OF("padding", lengths=[15]))
DOCUMENTS = OF("documents", query_lengths=[0, 1, 1], kv_lengths=[5, 7, 8])


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("sink-ignored-or-wrong-form", {"query": 3, "kv": 40, "sink": True}),
        ("doc-mask-ignored", {"query": 9, "mask": OF("document", lengths=[4, 5])}),
        (
            "prefix-lost-in-causal-tile-skip",
            {"query": 9, "kv": 90, "mask": OF("prefix_lm", prefix=80)},
        ),
        ("pad-tokens-treated-as-prefix", {"query": 9, "kv": 20, "mask": PREFIX_AND_PADDING}),
        ("varlen-max-seqlen-one", {"query": 2, "kv": 20, "mask": DOCUMENTS}),
    ],
)
@pytest.mark.parametrize("host", HOSTS)
def test_what_a_gate_comes_to_late_is_caught_where_it_is_asked(name, problem, host, tmp_path):
    prepare("cpu")
    kernel = load_subject(plant(FAULTS[name], host, tmp_path))
    record = run_case(kernel, Case(problem=Problem(head_dim=16, **problem)), device="cpu")
    assert (record.status, record.judgement.rule) == ("fail", "bound")


@pytest.mark.parametrize(
    ("name", "host", "dtype"),
    [
        (name, host, dtype)
        for name, control in CONTROLS.items()
        for host, how in control.hosts.items()
        for dtype in how.dtypes
    ],
)
def test_a_control_is_right_where_it_differs(name, host, dtype, tmp_path):
    """Maxima that rise, a sink and gradients; a gate asks far more."""
    kernel = load_subject(plant(CONTROLS[name], host, tmp_path))
    few = {"dtype": dtype, "query": 5, "kv": 70, "head_dim": 16}
    gradients = {"backward": kernel.backward, "mask": OF("causal_bottom_right")}
    prepare("cpu")
    for each in (
        Case(problem=Problem(**few, **gradients, sink=True)),
        case("ramp", Problem(**few)),
    ):
        record = run_case(kernel, each, device="cpu")
        assert record.status == "pass", (each.question, record.reason)

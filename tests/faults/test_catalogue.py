"""The fault catalogue: entries are complete, their patches apply, and a gate catches the faults."""

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

ENTRIES = dict(
    zip(
        CATEGORIES,
        (9, 5, 6, 6, 5, 6, 10, 7, 6, 3, 4, 3, 2, 6, 5, 6, 3, 3, 6, 3, 5, 4, 1),
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
# Faults in these categories change code that runs only with a score mod.
SCORES = {"softcap": Spec.of("softcap", cap=20.0), "score mods": Spec.of("alibi")}


def test_catalogue_entries_are_complete():
    assert Counter(fault.category for fault in FAULTS.values()) == ENTRIES
    for name, fault in FAULTS.items():
        assert set(fault.hosts) == (set() if name in UNPLANTED else set(HOSTS)), name
        assert bool(fault.unplanted) == (name in UNPLANTED), name
        assert all((fault.summary, fault.when, fault.seen, fault.reports, fault.category)), name


def test_every_patch_applies_to_its_host(tmp_path):
    """Fast, so it always covers all patches; most cases of the sweep below need ``-m slow``."""
    for change in (*FAULTS.values(), *CONTROLS.values()):
        for host in change.hosts:
            plant(change, host, tmp_path)  # raises NotPlanted


@pytest.mark.parametrize(("name", "host", "dtype"), PLACES)
def test_planted_fault_runs_and_returns_the_right_shapes(name, host, dtype, tmp_path):
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
        mask=Spec.of("causal_bottom_right"),
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
    ("missing-alpha-on-l", "triton", "probes", "isolated"),
    ("lse-base2-returned", "ideal", "contract", "compare"),
    ("softcap-s-times-tanh", "triton", "bounds", "compare"),
    ("alibi-sign-flip", "triton", "bounds", "compare"),
    ("gqa-dkv-not-summed", "ideal", "bounds", "compare"),
    ("v-uses-k-strides", "ideal", "contract", "compare"),
    ("headdim-pad-not-masked", "ideal", "contract", "compare"),
    ("tf32-for-fp32", "ideal", "contract", "compare"),
    ("fp8-descale-scalar-not-per-head", "ideal", "contract", "compare"),
    ("empty-split-nan", "triton", "contract", "compare"),
    ("last-page-counted-full", "triton", "probes", "negative"),
    ("blockmask-partial-as-full", "ideal", "probes", "negative"),
    ("one-key-row-slice-nan", "ideal", "contract", "compare"),
    ("split-count-depends-on-batch", "ideal", "determinism", "neighbours"),
    ("delta-missing", "triton", "contract", "compare"),
]


@pytest.mark.parametrize(("name", "host", "stages", "question"), ONE_OF_EACH)
def test_gate_catches_one_fault_of_each_category(name, host, stages, question, tmp_path):
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


def test_one_of_each_covers_all_but_three_categories():
    """A gate reaches documents and sinks late (tested below), and never asks for 2³¹ numbers."""
    covered = {FAULTS[name].category for name, *_ in ONE_OF_EACH}
    assert set(CATEGORIES) - covered == {"integer overflow", "documents", "sinks"}


PREFIX_AND_PADDING = Spec.of(
    "and", Spec.of("prefix_lm", prefix=4), Spec.of("padding", lengths=[15])
)
OWN_DIAGONALS = Spec.of(
    "documents_bottom_right", Spec.of("causal"), query_lengths=[4, 5], kv_lengths=[6, 14]
)
DOCUMENTS = Spec.of("documents", query_lengths=[0, 1, 1], kv_lengths=[5, 7, 8])


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("sink-ignored-or-wrong-form", {"query": 3, "kv": 40, "sink": True}),
        ("doc-mask-ignored", {"query": 9, "mask": Spec.of("document", lengths=[4, 5])}),
        (
            "prefix-lost-in-causal-tile-skip",
            {"query": 9, "kv": 90, "mask": Spec.of("prefix_lm", prefix=80)},
        ),
        ("pad-tokens-treated-as-prefix", {"query": 9, "kv": 20, "mask": PREFIX_AND_PADDING}),
        ("varlen-max-seqlen-one", {"query": 2, "kv": 20, "mask": DOCUMENTS}),
        ("varlen-diagonal-of-longest", {"query": 9, "kv": 20, "mask": OWN_DIAGONALS}),
    ],
)
@pytest.mark.parametrize("host", HOSTS)
def test_fault_reached_late_in_a_gate_fails_its_own_problem(name, problem, host, tmp_path):
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
def test_control_passes_where_it_differs_from_its_host(name, host, dtype, tmp_path):
    """Rising maxima, a sink and gradients: where controls compute otherwise, and rightly."""
    kernel = load_subject(plant(CONTROLS[name], host, tmp_path))
    sizes = {"dtype": dtype, "query": 5, "kv": 70, "head_dim": 16}
    gradients = {"backward": kernel.backward, "mask": Spec.of("causal_bottom_right")}
    prepare("cpu")
    for question in (
        Case(problem=Problem(**sizes, **gradients, sink=True)),
        case("ramp", Problem(**sizes)),
    ):
        record = run_case(kernel, question, device="cpu")
        assert record.status == "pass", (question.question, record.reason)

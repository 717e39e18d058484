"""Faults that a gate comes to late, asked where they show; and the controls, which are right."""

from __future__ import annotations

import pytest

from attncheck.faults.catalogue import CONTROLS, FAULTS
from attncheck.faults.fault import HOSTS
from attncheck.faults.planting import plant
from attncheck.inputs.problem import Case, Problem
from attncheck.mods.spec import Spec
from attncheck.probes import case
from attncheck.subjects.load import load_subject
from attncheck.verify.environment import prepare
from attncheck.verify.run_case import run_case

CHANGES = [
    (name, host, dtype)
    for name, control in CONTROLS.items()
    for host, how in control.hosts.items()
    for dtype in how.dtypes
]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("sink-ignored-or-wrong-form", Problem(query=3, kv=40, head_dim=16, sink=True)),
        (
            "doc-mask-ignored",
            Problem(query=9, head_dim=16, mask=Spec.of("document", lengths=[4, 5])),
        ),
        (
            "prefix-lost-in-causal-tile-skip",
            Problem(query=9, kv=90, head_dim=16, mask=Spec.of("prefix_lm", prefix=80)),
        ),
        (
            "pad-tokens-treated-as-prefix",
            Problem(
                query=9,
                kv=20,
                head_dim=16,
                mask=Spec.of(
                    "and", Spec.of("prefix_lm", prefix=4), Spec.of("padding", lengths=[15])
                ),
            ),
        ),
        (
            "varlen-max-seqlen-one",
            Problem(
                query=2,
                kv=20,
                head_dim=16,
                mask=Spec.of("documents", query_lengths=[0, 1, 1], kv_lengths=[5, 7, 8]),
            ),
        ),
    ],
)
@pytest.mark.parametrize("host", HOSTS)
def test_what_a_gate_comes_to_late_is_caught_where_it_is_asked(name, problem, host, tmp_path):
    prepare("cpu")
    kernel = load_subject(plant(FAULTS[name], host, tmp_path))
    record = run_case(kernel, Case(problem=problem), device="cpu")
    assert record.status == "fail"
    assert record.judgement.rule == "bound"


@pytest.mark.parametrize(("name", "host", "dtype"), CHANGES)
def test_a_control_is_right_where_it_differs(name, host, dtype, tmp_path):
    """Maxima that rise, a sink and gradients; a gate asks far more."""
    kernel = load_subject(plant(CONTROLS[name], host, tmp_path))
    few = {"dtype": dtype, "query": 5, "kv": 70, "head_dim": 16}
    gradients = {"backward": kernel.backward, "mask": Spec.of("causal_bottom_right")}
    asked = [
        Case(problem=Problem(**few, **gradients, sink=True)),
        case("ramp", Problem(**few)),
    ]
    prepare("cpu")
    for each in asked:
        record = run_case(kernel, each, device="cpu")
        assert record.status == "pass", (each.question, record.reason)

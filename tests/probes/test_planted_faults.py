"""Each planted fault is caught by the probes that are there for it, and decode names the key."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from attncheck import probes
from attncheck.core.mod_spec import Spec
from attncheck.core.source_files import import_file
from attncheck.inputs.problem import Case, Problem
from attncheck.probes.margins import WeightErrors
from attncheck.reporting.diagnosis_text import diagnosis_text
from attncheck.subjects.capabilities.named_kernels import subject_named
from attncheck.verify.evidence_builder import EvidenceBuilder
from attncheck.verify.run_case import mask_rows, run_case

PLANTED = Path(__file__).parent / "planted.py"
planted = import_file(PLANTED, "planted faults")
PAGE = Path(__file__).parents[2] / "docs" / "probes.md"
MASKS = {
    "causal": Spec.of("causal"),
    "window": Spec.of("sliding_window", window=9),
    "bottom right": Spec.of("causal_bottom_right"),
    "full": Spec.of("full"),
}
# Class → mask, dtypes, the probes that are there for it.
FAULTS = {
    planted.CausalPlus: ("causal", ("fp32", "bf16", "e4m3"), "decode isolated"),
    planted.CausalMinus: ("causal", ("fp32", "bf16", "e4m3"), "decode isolated"),
    planted.WindowPlus: ("window", ("fp32", "bf16", "e4m3"), "decode isolated"),
    planted.WindowMinus: ("window", ("fp32", "bf16", "e4m3"), "decode isolated"),
    planted.KeyDropped: ("full", ("fp32", "bf16", "e4m3"), "decode"),
    planted.KeyTwice: ("full", ("fp32", "bf16", "e4m3"), "decode"),
    planted.LastTileUnmasked: ("causal", ("bf16",), "decode isolated"),
    planted.PaddingCounted: ("full", ("bf16", "e4m3"), "decode negative"),
    planted.TopLeft: ("bottom right", ("bf16",), "decode isolated"),
    planted.WrongKvHead: ("full", ("bf16", "e4m3"), "decode ones"),
    planted.WrongBatch: ("full", ("bf16", "e4m3"), "decode ones"),
    planted.OneHeadWrong: ("full", ("bf16",), "decode ones"),
    planted.WrongColumn: ("full", ("bf16",), "decode"),
    planted.DescaleOfFirstHead: ("full", ("e4m3", "e5m2"), "decode"),
    planted.MaximumFromZero: ("full", ("fp32", "bf16", "e4m3"), "negative"),
    planted.NoMaximum: ("full", ("fp32", "bf16"), "positive"),
    planted.AlphaSkipped: ("full", ("fp32", "bf16", "e4m3"), "ramp"),
    planted.SumNotRescaled: ("full", ("fp32", "bf16", "e4m3"), "ramp"),
    planted.SumSkipped: ("full", ("bf16",), "decode ones"),
    planted.ScaleOff: ("full", ("fp32", "bf16", "e4m3"), "two_level positive"),
    planted.BaseTwo: ("full", ("bf16", "e4m3"), "two_level"),
    planted.Saturating: ("full", ("e4m3", "e5m2"), "ramp"),
    planted.NoPrescale: ("full", ("e4m3", "e5m2"), "two_level"),
    planted.Smaller: ("full", ("fp32", "fp16", "bf16", "e4m3", "e5m2"), "mean"),
    planted.OutInBf16: ("full", ("fp32", "fp16", "bf16", "e4m3"), "mean"),
    planted.OutInFp16: ("full", ("fp32", "fp16", "bf16"), "mean"),
    planted.LseInBaseTwo: ("full", ("bf16",), "decode positive"),
}


def problem(mask, dtype, **changes):
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "query": 24, "kv": 77, "head_dim": 32}
    return Problem(**(sizes | {"mask": MASKS[mask], "dtype": dtype} | changes))


@functools.cache
def evidence(name, mask, dtype, turn):
    cases = probes.cases(name, problem(mask, dtype))
    return EvidenceBuilder(cases[turn], "cpu") if turn < min(2, len(cases)) else None


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_caught_by_the_probes_that_are_there_for_it(fault):
    mask, dtypes, names = FAULTS[fault]
    for dtype in dtypes:
        for name in names.split():
            asked = [evidence(name, mask, dtype, turn) for turn in range(2)]
            found = [
                run_case(fault(), one.case, device=one.device, evidence=one, variant=name)
                for one in asked
                if one is not None
            ]
            failed = [record for record in found if record.status == "fail"]
            assert failed, (name, dtype)
            rules = {record.judgement.rule for record in failed}
            assert rules <= {"structure", "finite"}, (name, dtype)


@pytest.mark.parametrize(
    ("value_dim", "dtype"),
    [(12, "fp32"), (32, "bf16"), (96, "e4m3"), (12, "e4m3")],
    ids=["digits", "two digits", "direct", "digits of fp8"],
)
@pytest.mark.parametrize(
    ("fault", "mask", "place", "says"),
    [
        (planted.CausalPlus, "causal", (0, 0, 0, 1), "key 1 is too many"),
        (planted.CausalMinus, "causal", (0, 0, 0, 0), "key 0 is missing: out is 0"),
        (planted.WindowPlus, "window", (0, 0, 9, 0), "key 0 is too many"),
        (planted.WindowMinus, "window", (0, 0, 8, 0), "key 0 is missing"),
        (planted.TopLeft, "bottom right", (0, 0, 0, 1), "keys 1–53 are missing"),
        (planted.LastTileUnmasked, "causal", (0, 0, 0, 64), "keys 64–76 are too many"),
        (planted.WrongKvHead, "full", (0, 0, 0, -1), "those of key head 1 of batch 0, not 0 of 0"),
        (planted.WrongBatch, "full", (0, 0, 0, -1), "those of key head 0 of batch 1, not 0 of 0"),
        (planted.OneHeadWrong, "full", (0, 3, 0, -1), "those of key head 0 of batch 0, not 1"),
        (planted.SumSkipped, "full", (0, 0, 0, -1), "out is 77 times what it should be"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_decode_names_the_first_wrong_row_and_key(fault, mask, place, says, value_dim, dtype):
    asked = problem(mask, dtype, value_dim=value_dim)
    inputs = probes.inputs(probes.case("decode", asked))
    found = probes.PROBES["decode"].read(
        inputs, fault().run(inputs), mask_rows(asked), errors=WeightErrors(divides=False)
    )
    assert found.place == place
    assert says in found.message


@pytest.mark.parametrize("silent", [False, True], ids=["with LSE", "without LSE"])
@pytest.mark.parametrize("value_dim", [32, 96], ids=["two digits", "direct"])
def test_decode_names_a_key_in_the_middle(value_dim, silent):
    """One digit alone tells the column of a key, not the key: see the page."""
    asked = problem("full", "bf16", value_dim=value_dim)
    inputs = probes.inputs(probes.case("decode", asked))
    for fault, says in (
        (planted.KeyDropped, "key 21 is missing"),
        (planted.KeyTwice, "key 21 is missing and key 22 is there twice"),
    ):
        outputs = fault().run(inputs)
        if silent:
            outputs = planted.Silent.spoiled(None, outputs)
        found = probes.PROBES["decode"].read(inputs, outputs, mask_rows(asked))
        assert found.place == (0, 0, 0, 21)
        assert says in found.message


def test_one_wrong_head_is_told_by_its_rows_alone():
    asked = problem("full", "bf16")
    inputs = probes.inputs(probes.case("decode", asked))
    found = probes.PROBES["decode"].read(
        inputs, planted.OneHeadWrong().run(inputs), mask_rows(asked)
    )
    assert (found.count, found.compared) == (2 * 24, 2 * 4 * 24)


def test_a_failure_can_be_run_again():
    case = probes.case("decode", problem("causal", "bf16"))
    record = run_case(planted.CausalPlus(), case, device="cpu")
    said = diagnosis_text(record, kernel="planted")
    assert said.startswith("FAIL structure decode: batch 0, head 0, row 0: key 1 is too many")
    assert "\n  question   decode round=0\n" in said
    again = Case.from_json(record.case)
    assert run_case(planted.CausalPlus(), again, device="cpu") == record
    assert run_case(subject_named("ideal"), again, device="cpu").status == "pass"


def test_a_coarse_exp_is_right_where_it_is_declared():
    for name in ("mean", "decode"):
        asked = evidence(name, "full", "bf16", 0)
        coarse, declared = (
            run_case(kernel(), asked.case, device=asked.device, evidence=asked, variant=name).status
            for kernel in (planted.CoarseExp, planted.DeclaredExp)
        )
        assert (coarse, declared) == ("fail", "pass"), name


def test_a_kernel_that_raises_is_an_error():
    class Raising(planted.Planted):
        """Raises."""

        def prepare(self, inputs):
            raise RuntimeError("illegal memory access")

    case = probes.case("ones", problem("full", "bf16"))
    record = run_case(Raising(), case, device="cpu")
    assert (record.status, record.reason) == ("error", "RuntimeError: illegal memory access")

"""Each planted fault is caught by the probes that are meant for it, and decode names the key."""

import functools

import pytest
from tests import planted_kernels

from attncheck import probes
from attncheck.core.mod_spec import Spec
from attncheck.core.outputs import Outputs
from attncheck.inputs.problem import Case, Problem
from attncheck.probes.margins import WeightErrors
from attncheck.records.failure_causes import without_place
from attncheck.reporting.diagnosis_text import diagnosis_text
from attncheck.subjects.capabilities.named_kernels import subject_named
from attncheck.subjects.ideal import Ideal
from attncheck.verify.evidence_builder import EvidenceBuilder
from attncheck.verify.run_case import mask_rows, run_case

pytestmark = pytest.mark.usefixtures("shared_evidence")

MASKS = {
    "causal": Spec.of("causal"),
    "window": Spec.of("sliding_window", window=9),
    "bottom right": Spec.of("causal_bottom_right"),
    "full": Spec.of("full"),
}
# Fault → mask, dtypes, the probes that are meant for it.
FAULTS = {
    "RowBelow": ("causal", ("fp32", "bf16", "e4m3"), "decode isolated"),
    "RowAbove": ("causal", ("fp32", "bf16", "e4m3"), "decode isolated"),
    "WindowWider": ("window", ("fp32", "bf16", "e4m3"), "decode isolated"),
    "WindowShorter": ("window", ("fp32", "bf16", "e4m3"), "decode isolated"),
    "Key21Dropped": ("full", ("fp32", "bf16", "e4m3"), "decode"),
    "KeyTwice": ("full", ("fp32", "bf16", "e4m3"), "decode"),
    "LastTileUnmasked": ("causal", ("bf16",), "decode isolated"),
    "TailKeysAtZero": ("full", ("bf16", "e4m3"), "decode negative"),
    "TopLeft": ("bottom right", ("bf16",), "decode isolated"),
    "NextKeyHeadsBoth": ("full", ("bf16", "e4m3"), "decode ones"),
    "NextSequencesKeys": ("full", ("bf16", "e4m3"), "decode ones"),
    "OneHeadWrong": ("full", ("bf16",), "decode ones"),
    "ColumnsOfQueryTurned": ("full", ("bf16",), "decode"),
    "FirstHeadsDescale": ("full", ("e4m3", "e5m2"), "decode"),
    "MaximumFromZero": ("full", ("fp32", "bf16", "e4m3"), "negative"),
    "NoMaximum": ("full", ("fp32", "bf16"), "positive"),
    "OutNotRescaled": ("full", ("fp32", "bf16", "e4m3"), "ramp"),
    "SumNotRescaled": ("full", ("fp32", "bf16", "e4m3"), "ramp"),
    "SumSkipped": ("full", ("bf16",), "decode ones"),
    "ScaleOff": ("full", ("fp32", "bf16", "e4m3"), "two_level positive"),
    "ScaleWithoutLog2E": ("full", ("bf16", "e4m3"), "two_level"),
    "LazyWeights": ("full", ("e4m3", "e5m2"), "ramp"),
    "WeightsNotScaled": ("full", ("e4m3", "e5m2"), "two_level"),
    "OutSmaller": ("full", ("fp32", "fp16", "bf16", "e4m3", "e5m2"), "mean"),
    "OutKeptInBf16": ("full", ("fp32", "fp16", "bf16", "e4m3"), "mean"),
    "OutKeptInFp16": ("full", ("fp32", "fp16", "bf16"), "mean"),
    "Base2Lse": ("full", ("bf16",), "decode positive"),
}


def plant(name):
    return planted_kernels.kernel(name, block=32)


def make_problem(mask, dtype, **changes):
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "query": 24, "kv": 77, "head_dim": 32}
    return Problem(**(sizes | {"mask": MASKS[mask], "dtype": dtype} | changes))


@functools.cache
def evidence(name, mask, dtype, turn):
    cases = probes.cases(name, make_problem(mask, dtype))
    return EvidenceBuilder(cases[turn], "cpu") if turn < min(2, len(cases)) else None


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught_by_probes_meant_for_it(fault):
    mask, dtypes, names = FAULTS[fault]
    for dtype in dtypes:
        for name in names.split():
            turns = [evidence(name, mask, dtype, turn) for turn in range(2)]
            records = [
                run_case(plant(fault), each.case, device=each.device, evidence=each, variant=name)
                for each in turns
                if each is not None
            ]
            failed = [record for record in records if record.status == "fail"]
            assert failed, (name, dtype)
            rules = {record.judgement.rule for record in failed}
            assert rules <= {"structure", "finite"}, (name, dtype)


@pytest.mark.parametrize(
    ("value_dim", "dtype"),
    [(12, "fp32"), (32, "bf16"), (96, "e4m3"), (12, "e4m3")],
    ids=["digits", "two digits", "direct", "digits of fp8"],
)
@pytest.mark.parametrize(
    ("fault", "mask", "place", "message"),
    [
        ("RowBelow", "causal", (0, 0, 0, 1), "key 1 is too many"),
        ("RowAbove", "causal", (0, 0, 0, 0), "key 0 is missing: out is 0"),
        ("WindowWider", "window", (0, 0, 9, 0), "key 0 is too many"),
        ("WindowShorter", "window", (0, 0, 8, 0), "key 0 is missing"),
        ("TopLeft", "bottom right", (0, 0, 0, 1), "keys 1–53 are missing"),
        ("LastTileUnmasked", "causal", (0, 0, 0, 64), "keys 64–76 are too many"),
        ("NextKeyHeadsBoth", "full", (0, 0, 0, -1), "those of key head 1 of batch 0, not 0 of 0"),
        ("NextSequencesKeys", "full", (0, 0, 0, -1), "those of key head 0 of batch 1, not 0 of 0"),
        ("OneHeadWrong", "full", (0, 3, 0, -1), "those of key head 0 of batch 0, not 1"),
        ("SumSkipped", "full", (0, 0, 0, -1), "out is 77 times what it should be"),
    ],
)
def test_decode_names_the_first_wrong_row_and_key(fault, mask, place, message, value_dim, dtype):
    problem = make_problem(mask, dtype, value_dim=value_dim)
    inputs = probes.inputs(probes.case("decode", problem))
    outputs, errors = plant(fault).run(inputs), WeightErrors(divides=False)
    finding = probes.check_tied_keys(inputs, outputs, mask_rows(problem), errors=errors)
    assert finding.place == place
    assert message in finding.message


@pytest.mark.parametrize("without_lse", [False, True], ids=["with LSE", "without LSE"])
@pytest.mark.parametrize("value_dim", [32, 96], ids=["two digits", "direct"])
def test_decode_names_a_key_in_the_middle(value_dim, without_lse):
    """One digit alone gives the column of a key, not the key: see docs/reference/probes.md."""
    problem = make_problem("full", "bf16", value_dim=value_dim)
    inputs = probes.inputs(probes.case("decode", problem))
    for fault, message in (
        ("Key21Dropped", "key 21 is missing"),
        ("KeyTwice", "key 21 is missing and key 22 is there twice"),
    ):
        outputs = plant(fault).run(inputs)
        if without_lse:
            outputs = Outputs(outputs.out)
        finding = probes.check_tied_keys(inputs, outputs, mask_rows(problem))
        assert finding.place == (0, 0, 0, 21)
        assert message in finding.message


def test_decode_counts_only_rows_of_wrong_head():
    problem = make_problem("full", "bf16")
    inputs = probes.inputs(probes.case("decode", problem))
    outputs = plant("OneHeadWrong").run(inputs)
    finding = probes.check_tied_keys(inputs, outputs, mask_rows(problem))
    assert (finding.count, finding.compared) == (2 * 24, 2 * 4 * 24)


def test_failed_case_can_be_run_again():
    case = probes.case("decode", make_problem("causal", "bf16"))
    record = run_case(plant("RowBelow"), case, device="cpu")
    text = diagnosis_text(record, kernel="planted")
    assert text.startswith("FAIL structure decode: batch 0, head 0, row 0: key 1 is too many")
    assert "\n  question   decode round=0\n" in text
    read_back = Case.from_json(record.case)
    assert run_case(plant("RowBelow"), read_back, device="cpu") == record
    assert run_case(subject_named("ideal"), read_back, device="cpu").status == "pass"


def test_coarse_exp_passes_only_if_declared():
    for name in ("mean", "decode"):
        builder = evidence(name, "full", "bf16", 0)
        run = functools.partial(
            run_case, case=builder.case, device=builder.device, evidence=builder, variant=name
        )
        coarse, declared = (run(plant(kernel)).status for kernel in ("CoarseExp", "DeclaredExp"))
        assert (coarse, declared) == ("fail", "pass"), name


def test_kernel_that_raises_is_an_error():
    class Raising(Ideal):
        def prepare(self, inputs):
            raise RuntimeError("illegal memory access")

    case = probes.case("ones", make_problem("full", "bf16"))
    record = run_case(Raising(), case, device="cpu")
    assert record.status == "error"
    assert without_place(record.reason) == "RuntimeError: illegal memory access"

"""The decode kernel passes the judge with any number of splits; planted faults fail."""

import dataclasses
import math

import pytest
import torch
from tests.kernels.patched_kernels import PLANTED, faulty

from attncheck.core.judgement import Judgement
from attncheck.core.mod_spec import Spec
from attncheck.core.paged_layout import Paging
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Case, Problem
from attncheck.kernels import decode_forward
from attncheck.subjects.load import load_subject
from attncheck.subjects.triton_caches import MOST_ROWS, Decode, splits_of
from attncheck.verify.environment import prepare
from attncheck.verify.evidence_builder import EvidenceBuilder
from attncheck.verify.question_fit import question_named
from attncheck.verify.run_case import run_case

FULL, BOTTOM_RIGHT = Spec.of("full"), Spec.of("causal_bottom_right")
WINDOW = Spec.of("offset", Spec.of("sliding_window", window=20), rows=98)
PADDING = Spec.of("padding", lengths=[0, 33])
PAGES = Paging(size=16, seed=3)
MASKS = (FULL, BOTTOM_RIGHT, WINDOW, PADDING)
ALIBI = Spec.of("offset", Spec.of("alibi"), rows=98)


SCORES = (
    ALIBI,
    Spec.of("softcap", cap=5.0),
    Spec.of("relative_bias", distance=9, seed=1),
    Spec.of("chain", Spec.of("temperature", temperature=0.7), ALIBI),
)
DIMS = ((1, 1), (3, 40), (64, 17), (80, 80))


KV, BLOCKS = 101, 2  # of 64 keys


@pytest.fixture(autouse=True)
def _interpreted_by_one_thread(one_thread):
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here: the properties judge them on the GPU")
    prepare("cpu")


def small(**changes) -> Problem:
    """Three rows of two groups of three heads each; value_dim is not head_dim."""
    sizes = {"batch": 2, "heads": 6, "kv_heads": 2, "query": 3, "kv": KV, "head_dim": 16}
    return Problem(**(sizes | {"value_dim": 8, "dtype": "fp32"} | changes))


def judge(problem: Problem, subject: Decode) -> Judgement:
    evidence = EvidenceBuilder(Case(problem=problem), "cpu", draw_inputs(problem))
    record = run_case(subject, evidence.case, device=evidence.device, evidence=evidence, brief=True)
    assert record.judgement is not None, record.reason
    return record.judgement


def launch_with(monkeypatch, **changes) -> None:
    """Override fields of the launch that ``Decode`` chooses."""
    launch = Decode.launch
    monkeypatch.setattr(
        Decode, "launch", lambda *arguments: dataclasses.replace(launch(*arguments), **changes)
    )


def assert_passes(problem: Problem, splits: int | None = None) -> None:
    judgement = judge(problem, Decode(splits))
    assert judgement.status == "pass", judgement.reason


@pytest.mark.parametrize("splits", [1, 2, 3, 7, KV + 1])
def test_outputs_pass_with_any_number_of_splits(splits):
    """From 3 on some splits are empty; a sequence of padding alone sees no key in any."""
    assert_passes(small(mask=PADDING, dtype="bf16"), splits)


@pytest.mark.parametrize("dtype", ["fp32", "tf32", "fp16", "bf16", "e4m3", "e5m2"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_outputs_pass_for_mask_in_every_dtype(mask, dtype):
    assert_passes(small(mask=mask, dtype=dtype, distribution="large_logits"))


@pytest.mark.parametrize(
    ("heads", "query"), [((1, 1), 1), ((8, 1), 4), ((6, 3), 5), ((4, 4), 33), ((16, 1), 8)], ids=str
)
def test_outputs_pass_for_groups_of_up_to_128_rows(heads, query):
    """16 to 128 packed rows, some of which leave a block partly empty."""
    problem = small(heads=heads[0], kv_heads=heads[1], query=query, batch=1, mask=BOTTOM_RIGHT)
    rows = query * heads[0] // heads[1]
    assert rows <= Decode().launch(problem, "cpu").block_query < max(17, 2 * rows)
    assert_passes(problem)


@pytest.mark.parametrize("question", ["alone_in_batch", "batch_permutation", "head_permutation"])
def test_outputs_do_not_depend_on_the_batch(question):
    allowed = question_named(question).allowed(small())
    parameters = {name: numbers[-1] for name, numbers in allowed.items()}
    case = Case(problem=small(), question=question, parameters=parameters)
    assert run_case(Decode(), case, device="cpu").status == "pass"


def test_outputs_pass_with_rows_in_several_blocks(monkeypatch):
    """On a GPU, one block of all rows may not fit."""
    launch_with(monkeypatch, block_query=16)
    assert_passes(small(query=7, mask=BOTTOM_RIGHT, score=ALIBI, sink=True))


@pytest.mark.parametrize(
    "changes",
    [
        *({"head_dim": k, "value_dim": v, "dtype": "bf16"} for k, v in DIMS),
        *({"kv": kv, "mask": BOTTOM_RIGHT} for kv in (1, 31, 32, 33, 64, 65, 256)),
        *({"mask": BOTTOM_RIGHT, "score": score} for score in SCORES),
    ],
    ids=str,
)
def test_outputs_pass_for_dims_lengths_and_score_mods(changes):
    assert_passes(small(**changes))


@pytest.mark.parametrize("splits", [1, 3, 4])
@pytest.mark.parametrize("mask", [BOTTOM_RIGHT, PADDING], ids=str)
@pytest.mark.parametrize("dtype", ["bf16", "e4m3"])
def test_sink_is_merged_once(dtype, mask, splits):
    assert_passes(small(mask=mask, dtype=dtype, score=ALIBI, sink=True), splits)


@pytest.mark.parametrize("dtype", ["bf16", "e4m3"])
@pytest.mark.parametrize("size", [1, 16, 48, 128])
@pytest.mark.parametrize("mask", [FULL, PADDING, BOTTOM_RIGHT], ids=str)
def test_outputs_pass_with_keys_in_pages(mask, size, dtype):
    paging = Paging(size=size, seed=3, shared=1)
    assert_passes(small(mask=mask, dtype=dtype, paging=paging, sink=True))


def test_rows_without_keys_give_zero_and_the_sink():
    inputs = draw_inputs(small(mask=PADDING))
    outputs = Decode().run(inputs)
    assert (outputs.out[0] == 0).all()
    assert (outputs.lse[0] == -math.inf).all()
    inputs = draw_inputs(small(mask=PADDING, sink=True))
    outputs = Decode().run(inputs)
    assert (outputs.out[0] == 0).all()
    assert torch.equal(outputs.lse[0], inputs.sink[:, None].expand(-1, 3))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_infinite_or_nan_value_reaches_only_rows_that_see_it(value):
    """Other rows of the same block keep all their bits, and so do its other columns."""
    inputs = draw_inputs(small(query=2, mask=BOTTOM_RIGHT, dtype="bf16"))
    v = inputs.v.clone()
    v[:, :, -1, 3] = value  # the last row sees it alone
    clean, spoilt = Decode(2).run(inputs), Decode(2).run(inputs.replace(v=v))
    assert torch.equal(spoilt.out[:, :, 0], clean.out[:, :, 0])
    assert torch.equal(spoilt.lse, clean.lse)
    seen = spoilt.out[:, :, 1]
    assert torch.equal(
        seen[..., [0, 1, 2, 4, 5, 6, 7]], clean.out[:, :, 1][..., [0, 1, 2, 4, 5, 6, 7]]
    )
    assert (seen[..., 3].isnan() if math.isnan(value) else seen[..., 3] == value).all()


def test_decode_refuses_more_than_128_packed_rows_and_softmax():
    decode = load_subject("triton-decode")
    assert decode.unsupported(small(query=MOST_ROWS // 3), "cpu") is None
    reason = decode.unsupported(small(query=MOST_ROWS // 3 + 1), "cpu")
    assert reason == "query · group = 129: it is for decoding, at most 128"
    assert decode.concerns(small(paging=Paging(size=16)))
    assert not decode.concerns(Problem(operation="softmax", query=2, kv=3))


def test_number_of_splits_depends_on_the_keys_and_not_on_the_batch():
    """On a GPU it grows with the square root of the keys; the interpreter uses at most three."""
    lengths = {
        1: (1, 1),
        511: (1, 1),
        512: (2, 4),
        8192: (8, 16),
        32768: (16, 32),
        2**20: (90, 180),
    }
    for kv, counts in lengths.items():
        assert tuple(splits_of(kv, 128, together, "cuda") for together in (1, 4)) == counts
    assert [splits_of(kv, 64, 1, "cpu") for kv in (1, 65, 129, 4096)] == [1, 2, 3, 3]
    problem = small()
    own = Decode().launch(problem, "cpu").splits
    assert own == Decode().launch(problem.replace(batch=1, heads=2), "cpu").splits == BLOCKS


@pytest.mark.parametrize(("splits", "together"), [(2, 2), (3, 2), (5, 4), (5, 8)])
@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "bf16", "mask": BOTTOM_RIGHT, "sink": True},
        {"dtype": "e4m3", "mask": PADDING},
        {"mask": WINDOW, "score": ALIBI},
    ],
    ids=str,
)
def test_adding_splits_in_one_program_or_by_a_merge_gives_the_same_bits(
    monkeypatch, changes, splits, together
):
    """Which of the two runs depends on the batch and the GPU's multiprocessors."""
    launch_with(monkeypatch, together=together)
    problem = small(kv=300, **changes)  # 5 blocks
    inputs, programs = draw_inputs(problem), []
    v = inputs.v.float()
    v[:, :, 70, 3] = math.nan
    spoilt = inputs.replace(v=v.to(inputs.v.dtype))
    for multiprocessors in (1, 10**6):
        monkeypatch.setattr(decode_forward, "multiprocessors", lambda _, n=multiprocessors: n)
        assert_passes(problem, splits)
        programs.append([Decode(splits).run(each) for each in (inputs, spoilt)])
    for one, other in zip(*programs, strict=True):
        assert torch.equal(one.out.nan_to_num(), other.out.nan_to_num())
        assert torch.equal(one.out.isnan(), other.out.isnan())
        assert torch.equal(one.lse, other.lse)


def test_other_launches_have_other_numbers_of_splits():
    launches = Decode().launches(small(), "cpu")
    splits = {name: each.launch(small(), "cpu").splits for name, each in launches.items()}
    assert splits == {"1 split": 1, "3 splits": 3, "7 splits": 7}  # 2 are its own, 3 are too many
    longer = Decode().launches(small(kv=1000), "cpu")
    assert list(longer) == ["1 split", "2 splits", "7 splits", "9 splits"]


def test_declared_arithmetic_counts_the_merged_parts():
    """A sink is one part. A tiling is declared for one part alone, which rounds as it does."""
    for splits, sink, parts in ((1, False, 1), (1, True, 2), (7, False, 7), (7, True, 8)):
        problem = small(sink=sink)
        assert Decode(splits).arithmetic(problem, "cpu").splits == parts
        assert (Decode(splits).tiling(problem, "cpu") is None) == (parts > 1)


def test_one_split_is_within_the_bounds_of_its_declared_tiling():
    assert_passes(small(head_dim=40, value_dim=40, dtype="bf16", query=32), splits=1)


@pytest.mark.parametrize("fault", PLANTED["decode_forward"])
def test_planted_fault_fails(fault, tmp_path, monkeypatch):
    changes = dict(PLANTED["decode_forward"][fault])
    right, wrong, splits = changes.pop("right"), changes.pop("wrong"), changes.pop("splits", 2)
    launch_with(monkeypatch, together=changes.pop("together", 1))
    known = {"padding": PADDING, "bottom_right": BOTTOM_RIGHT, "alibi": ALIBI, "pages": PAGES}
    problem = small(**{name: known.get(value, value) for name, value in changes.items()})
    assert judge(problem, Decode(splits)).status == "pass"
    planted = faulty(tmp_path, ("decode_forward",), "", right, wrong)
    monkeypatch.setattr(Decode, "forward", lambda self: planted)
    assert judge(problem, Decode(splits)).status == "fail"


def test_without_the_check_for_finite_values_hidden_nan_spreads(tmp_path, monkeypatch):
    """The planted fault against ``test_infinite_or_nan_value_reaches_only_rows_that_see_it``."""
    planted = faulty(tmp_path, ("decode_forward",), "", "if not all_finite(part):", "if False:")
    monkeypatch.setattr(Decode, "forward", lambda self: planted)
    inputs = draw_inputs(small(query=2, mask=BOTTOM_RIGHT, dtype="bf16"))
    v = inputs.v.clone()
    v[:, :, -1] = math.nan
    assert Decode(2).run(inputs.replace(v=v)).out[:, :, 0].isnan().any()

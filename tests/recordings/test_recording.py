"""A recorded call as a Problem: its bits, mask, scale, name and exact result are those passed."""

import dataclasses
import json
import math
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from attncheck import oracles
from attncheck.core.errors import ProblemError, UnknownName
from attncheck.core.formats import FORMATS, round_to
from attncheck.core.mod_spec import Dimensions, Spec
from attncheck.inputs import input_tensors
from attncheck.inputs.distributions import DISTRIBUTIONS
from attncheck.inputs.problem import Case, Problem
from attncheck.inputs.recorded_calls import named_mask
from attncheck.inputs.recording_file import load
from attncheck.mods import trace
from attncheck.mods.library import build_mask
from attncheck.mods.masks import MASKS
from attncheck.mods.scores import SCORES

# Of the calls in tests/data/trained.safetensors.
DIGESTS = ["295948c2", "5a73b380", "f294c281", "6a0855bd"]
FLOATS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(*, q=(2, 4, 5, 8), k=(2, 4, 7, 8), v=None, dtype=torch.float32):
    return (
        randn(*q, dtype=dtype),
        randn(*k, seed=1, dtype=dtype),
        randn(*(v or k), seed=2, dtype=dtype),
    )


def holes(*shape):
    """A bool mask in which every row sees its key 0."""
    mask = randn(*shape, seed=3) > 0
    mask[..., 0] = True
    return mask


def bias(*shape, hidden=True, dtype=torch.float32):
    values = randn(*shape, seed=4, dtype=dtype)
    return values.masked_fill(~holes(*shape), -math.inf) if hidden else values


CASES = {
    "plain": (qkv(), {}),
    "bf16": (qkv(dtype=torch.bfloat16), {}),
    "fp16": (qkv(dtype=torch.float16), {}),
    "value_dim": (qkv(v=(2, 4, 7, 3)), {}),
    "scale": (qkv(), {"scale": 0.3}),
    "causal": (qkv(), {"is_causal": True}),
    "causal, a subclass": (qkv(), {"attn_mask": causal_upper_left(5, 7)}),
    "causal bottom right": (qkv(), {"attn_mask": causal_lower_right(5, 7)}),
    "gqa": (qkv(k=(2, 2, 7, 8)), {"enable_gqa": True}),
    "gqa with unlike heads": (qkv(k=(2, 2, 7, 8), v=(2, 1, 7, 8)), {"enable_gqa": True}),
    "one key head, broadcast": (qkv(k=(2, 1, 7, 8)), {}),
    "one query head, broadcast": (qkv(q=(2, 1, 5, 8)), {}),
    "one sequence of keys, broadcast": (qkv(k=(1, 4, 7, 8)), {}),
    "two axes": (qkv(q=(5, 8), k=(7, 8)), {}),
    "three axes": (qkv(q=(4, 5, 8), k=(4, 7, 8)), {"attn_mask": holes(5, 7)}),
    "five axes": (qkv(q=(3, 2, 4, 5, 8), k=(3, 2, 4, 7, 8)), {"attn_mask": holes(3, 1, 1, 5, 7)}),
    "mask of all": (qkv(), {"attn_mask": holes(5, 7)}),
    "mask of sequences": (qkv(), {"attn_mask": holes(2, 1, 1, 7)}),
    "mask of heads": (qkv(), {"attn_mask": holes(4, 5, 7)}),
    "mask of everything": (qkv(), {"attn_mask": holes(2, 4, 5, 7)}),
    "mask of one number": (qkv(), {"attn_mask": torch.ones(1, 1, dtype=torch.bool)}),
    "bias": (qkv(), {"attn_mask": bias(5, 7)}),
    "bias of sequences": (qkv(), {"attn_mask": bias(2, 1, 1, 7), "scale": 2.0}),
    "bias, bf16": (
        qkv(dtype=torch.bfloat16),
        {"attn_mask": bias(2, 4, 5, 7, dtype=torch.bfloat16)},
    ),
    "bias, nothing hidden": (qkv(), {"attn_mask": bias(5, 7, hidden=False)}),
    "bias of one number": (qkv(), {"attn_mask": torch.full((1, 1), 0.5)}),
    "bias of 0 and -inf": (
        qkv(),
        {"attn_mask": torch.zeros(5, 7).masked_fill(~holes(5, 7), -math.inf)},
    ),
}
every_case = pytest.mark.parametrize(("tensors", "options"), CASES.values(), ids=CASES.keys())


def torch_in_float64(tensors, options, scale):
    """torch's result for the same numbers in float64."""
    options = dict(options) | {"scale": scale}
    mask = options.get("attn_mask")
    if mask is not None and mask.is_floating_point() and not hasattr(mask, "variant"):
        options["attn_mask"] = mask.double()
    return functional.scaled_dot_product_attention(*(t.double() for t in tensors), **options)


def allowance_for_torch(drawn, allowance):
    """The allowance for torch's unfused formula, which multiplies q and k by √scale in float64
    before their product.

    Each product and each root is rounded: 4 roundings of Σ|q·k|, added to the head_dim + 1 of the
    sum and to one more for the additive mask.
    """
    bound, problem = allowance(drawn), drawn.problem
    q, k, _ = drawn.promoted()
    mass = (q.abs() @ k.repeat_interleave(problem.group, dim=1).abs().mT).max().item()
    weight = bound.weight + problem.scale * (problem.head_dim + 6) * mass
    return dataclasses.replace(bound, weight=weight, out=2 * (weight + bound.kv) + 1)


@every_case
def test_exact_result_of_a_recording_is_that_of_torch_in_float64(
    tensors, options, recorded, allowance
):
    problem = recorded(*tensors, **options).problem()
    drawn = input_tensors.draw_inputs(problem)
    truth = oracles.dense(drawn)
    out = torch_in_float64(tensors, options, problem.scale).reshape(truth.out.shape)
    bound = allowance_for_torch(drawn, allowance)
    assert not bound.misses(truth, dataclasses.replace(truth, out=out))


def test_allowance_for_torch_detects_another_mask(recorded, allowance):
    tensors, _ = CASES["plain"]
    problem = recorded(*tensors, attn_mask=holes(5, 7)).problem()
    drawn = input_tensors.draw_inputs(problem)
    truth = oracles.dense(drawn)
    out = torch_in_float64(tensors, {}, problem.scale)
    bound = allowance_for_torch(drawn, allowance)
    assert bound.misses(truth, dataclasses.replace(truth, out=out))


@every_case
def test_problem_of_a_recording_draws_the_recorded_bits(tensors, options, recorded):
    recording = recorded(*tensors, **options)
    drawn = input_tensors.draw_inputs(recording.problem())
    for name in ("q", "k", "v"):
        input_tensor, kept = getattr(drawn, name), getattr(recording, name)
        assert input_tensor.dtype == kept.dtype == tensors[0].dtype
        assert torch.equal(input_tensor.view(torch.uint8), kept.view(torch.uint8))


@pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS.keys())
def test_unusual_bit_patterns_are_kept(dtype, recorded):
    """−0, subnormals and the largest numbers, and the bits of an additive mask."""
    info = torch.finfo(dtype)
    odd = torch.tensor(
        [-0.0, 0.0, info.tiny, info.smallest_normal / 2, info.max, -info.max, 1.0, info.eps]
    )
    q, k, v = (odd.to(dtype).roll(i).expand(1, 2, 4, 8) for i in range(3))
    mask = randn(2, 4, 4).to(dtype)
    recording = recorded(q, k, v, mask)
    for name, passed in (("q", q), ("k", k), ("v", v), ("mask", mask[None])):
        kept = getattr(recording, name)
        assert kept.dtype == dtype
        assert kept.is_contiguous()
        assert torch.equal(kept.view(torch.uint8), passed.contiguous().view(torch.uint8))
    drawn = input_tensors.draw_inputs(recording.problem())
    assert torch.equal(drawn.q.view(torch.uint8), q.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "tf32", "e4m3", "e5m2"])
def test_problem_in_another_dtype_rounds_the_recorded_numbers(dtype, recorded):
    recording = recorded(*qkv())
    problem = recording.problem(dtype)
    assert problem.dtype == dtype
    drawn, fmt = input_tensors.draw_inputs(problem), FORMATS[dtype if dtype != "tf32" else "fp32"]
    numbers = recording.v.double()
    if drawn.descale is not None:
        numbers = numbers / drawn.descale.v.double()[..., None, None]
    assert torch.equal(drawn.v.double(), round_to(numbers, fmt))


@every_case
def test_mods_of_a_recording_can_be_traced(tensors, options, recorded):
    problem = recorded(*tensors, **options).problem()
    mask, score = problem.mask_mod(), problem.score_mod()
    dims = problem.dimensions
    assert not trace.count_disagreements(trace.trace_mask(mask), mask, dims)
    assert not trace.count_disagreements(trace.trace_score(score), score, dims)


@pytest.mark.parametrize(
    ("case", "mask", "score"),
    [
        ("plain", "full", "none"),
        ("causal", "causal", "none"),
        ("causal, a subclass", "causal", "none"),
        ("causal bottom right", "causal_bottom_right", "none"),
        ("mask of one number", "full", "none"),
        ("mask of all", None, "none"),
        ("bias", "full", None),
        ("bias of 0 and -inf", None, "none"),
    ],
)
def test_mask_argument_becomes_a_mask_or_a_score_mod(case, mask, score, recorded):
    """None stands for a mod named after the recording."""
    tensors, options = CASES[case]
    recording = recorded(*tensors, **options)
    problem = recording.problem()
    assert problem.mask == Spec.of(mask or recording.name)
    assert problem.score == Spec.of(score or recording.name)


def test_problem_has_the_recorded_sizes_and_scale(recorded):
    problem = recorded(*qkv(k=(2, 2, 7, 8), v=(2, 2, 7, 3)), scale=0.3, enable_gqa=True).problem()
    assert problem.shape == "B2 H4/2 Q5 K7 D8/3"
    assert problem.scale == torch.tensor(0.3, dtype=torch.float32).item()
    assert recorded(*qkv()).problem().scale == Problem(query=1, head_dim=8).scale


def test_moved_file_gives_the_same_problem_in_another_process(recorded, tmp_path):
    """A process that has loaded the recording can also read its Case from JSON."""
    recording = recorded(*qkv(), attn_mask=bias(5, 7))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "recorded.safetensors").rename(elsewhere / "recorded.safetensors")
    code = (
        "import json, sys\n"
        "from attncheck.inputs.problem import Case\n"
        "from attncheck.inputs.recording_file import load\n"
        "(recording,) = load(sys.argv[1])\n"
        "case = Case(problem=recording.problem('bf16'))\n"
        "assert Case.from_json(json.loads(sys.argv[2])) == case\n"
        "print(case.problem.id)"
    )
    problem = recording.problem("bf16")
    case = json.dumps(Case(problem=problem).to_json())
    command = [sys.executable, "-c", code, str(elsewhere / "recorded.safetensors"), case]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == problem.id


def test_recordings_that_differ_in_one_bit_are_different_problems(recorded):
    q, k, v = qkv()
    first = recorded(q, k, v)
    other = k.clone()
    other.view(torch.int32)[0, 0, 0, 0] ^= 1
    second = recorded(q, other, v)
    assert first.name != second.name
    assert first.problem().id != second.problem().id
    assert first.problem() == recorded(q, k, v).problem()
    # Both stay registered: the second has not replaced the first.
    assert torch.equal(input_tensors.draw_inputs(first.problem()).k, k)
    assert torch.equal(input_tensors.draw_inputs(second.problem()).k, other)


def test_name_of_a_recording_holds_file_call_and_digest(recorded):
    file, _, rest = recorded(*qkv()).name.partition(":")
    call, _, digest = rest.partition("@")
    assert (file, call) == ("recorded.safetensors", "call-0")
    assert len(digest) == 8
    int(digest, 16)


@pytest.mark.parametrize("mask", [None, holes(5, 7), bias(5, 7)], ids=["none", "bool", "bias"])
def test_case_of_a_recording_that_is_not_loaded_names_its_file(mask, recorded):
    recording = recorded(*qkv(), attn_mask=mask)
    case = Case(problem=recording.problem()).to_json()
    registries = [(DISTRIBUTIONS, "distribution")]
    if mask is not None:
        registries.append((MASKS, "mask") if mask.dtype is torch.bool else (SCORES, "score mod"))
    for registry, kind in registries:
        entry = registry.pop(recording.name)
        with pytest.raises(ProblemError) as error:
            Case.from_json(case)
        registry[recording.name] = entry
        assert str(error.value) == (
            f"{kind} {recording.name!r} is of a recording: "
            "give its file recorded.safetensors with --inputs."
        )
    assert Case.from_json(case).problem == recording.problem()


def test_recording_name_with_a_double_colon_is_not_taken_for_a_mod_of_a_file(recorded):
    for fields in ({"mask": Spec.of("r.st:a::b@01234567")}, {"score": Spec.of("r.st:c@01234567")}):
        with pytest.raises(ProblemError, match=r"is of a recording: give its file r\.st with"):
            Problem(query=5, **fields)


def test_problem_with_another_seed_or_size_is_refused(recorded):
    problem = recorded(*qkv(), attn_mask=holes(5, 7)).problem()
    with pytest.raises(ProblemError, match=r"there is one draw of it: seed=3 must be 0\."):
        input_tensors.draw_inputs(problem.replace(seed=3))
    with pytest.raises(ProblemError, match=r"is recorded for q, k, v of shapes .* it has none of"):
        input_tensors.draw_inputs(problem.replace(query=6))
    with pytest.raises(ProblemError, match=r"shape \(1, 1, 5, 7\): it does not fit scores of"):
        problem.replace(query=6).mask_mod()


def test_writing_to_drawn_inputs_does_not_change_the_recording(recorded):
    recording = recorded(*qkv())
    input_tensors.unrounded_inputs(recording.problem()).q.zero_()
    assert recording.q.any()
    assert input_tensors.draw_inputs(recording.problem()).q.any()


def test_recorded_file_has_the_documented_schema(recorded, tmp_path):
    recorded(*qkv(k=(2, 2, 7, 8)), attn_mask=holes(5, 7), enable_gqa=True, dropout_p=0.25)
    with safe_open(tmp_path / "recorded.safetensors", framework="pt") as file:
        header = json.loads(file.metadata()["attncheck"])
        shapes = {name: tuple(file.get_tensor(name).shape) for name in file.keys()}  # noqa: SIM118  # no dict
        assert list(file.metadata()) == ["attncheck"]
    assert header == {
        "version": 1,
        "calls": [
            {
                "name": "call-0",
                "batch": 2,
                "heads": 4,
                "kv_heads": 2,
                "query": 5,
                "kv": 7,
                "head_dim": 8,
                "value_dim": 8,
                "dtype": "fp32",
                "mask": "bool",
                "scale": None,
                "dropout": 0.25,
                "softcap": None,
                "sink": False,
                "backward": False,
            }
        ],
    }
    assert shapes == {
        "0.q": (2, 4, 5, 8),
        "0.k": (2, 2, 7, 8),
        "0.v": (2, 2, 7, 8),
        "0.mask": (1, 1, 5, 7),
    }


def test_recording_in_the_repository_can_be_loaded(request):
    """tests/data/trained.safetensors was made by examples/train_transformer.py (see its README)."""
    folder = request.config.rootpath / "tests" / "data"
    recordings = load(folder / "trained.safetensors")
    assert [r.call.name for r in recordings] == [f"blocks.{i}.attention/0" for i in range(4)]
    for recording in recordings:
        problem = recording.problem()
        assert str(problem.mask) == "causal"
        assert problem.shape == "B1 H4 Q64 K64 D32"
        assert torch.equal(input_tensors.draw_inputs(problem).q, recording.q)
        assert oracles.dense(input_tensors.draw_inputs(problem)).out.isfinite().all()
    assert [r.name.rpartition("@")[2] for r in recordings] == DIGESTS
    assert sum(file.stat().st_size for file in folder.iterdir()) < 300_000


def test_suggestions_do_not_list_recordings(recorded):
    with_mask, with_bias = (recorded(*qkv(), attn_mask=f(5, 7)).name for f in (holes, bias))
    assert {with_mask} <= set(MASKS)
    assert {with_bias} <= set(SCORES)
    for fields in (
        {"mask": Spec.of("casual")},
        {"score": Spec.of("alebi")},
        {"distribution": "nirmal"},
    ):
        with pytest.raises(UnknownName, match=r"(?i)choose from ") as error:
            Problem(query=5, **fields)
        assert "safetensors" not in str(error.value)


@pytest.mark.parametrize(
    ("mask", "query", "kv"),
    [
        (Spec.of("full"), 4, 9),
        (Spec.of("causal"), 9, 9),
        (Spec.of("causal"), 4, 9),
        (Spec.of("causal_bottom_right"), 4, 9),
        (Spec.of("sliding_window", window=3), 9, 9),
        (Spec.of("offset", Spec.of("sliding_window", window=3), rows=5), 4, 9),
    ],
)
def test_named_mask_recognises_a_table_that_spells_out_a_mask(mask, query, kv):
    dimensions = Dimensions(batch=2, heads=1, query=query, kv=kv)
    first, rows = torch.tensor(0), torch.arange(query)[:, None]
    table = build_mask(mask, dimensions)(first, first, rows, torch.arange(kv)).expand(query, kv)
    tables = table.expand(2, 1, query, kv).clone()
    assert named_mask(tables, dimensions) == mask
    if mask.name != "full":
        tables[1, 0, -1, 0] ^= True  # one key of one sequence
        assert named_mask(tables, dimensions) is None

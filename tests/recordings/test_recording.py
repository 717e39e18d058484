"""What is recorded is what was passed: its bits, its mask, its scale, and its exact result."""

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

# Of tests/data/trained.safetensors, call by call.
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
    added = randn(*shape, seed=4, dtype=dtype)
    return added.masked_fill(~holes(*shape), -math.inf) if hidden else added


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
every_case = pytest.mark.parametrize(("given", "options"), CASES.values(), ids=CASES.keys())


def torch_in_float64(given, options, scale):
    """What torch gives for the same numbers in float64."""
    options = dict(options) | {"scale": scale}
    mask = options.get("attn_mask")
    if mask is not None and mask.is_floating_point() and not hasattr(mask, "variant"):
        options["attn_mask"] = mask.double()
    return functional.scaled_dot_product_attention(*(t.double() for t in given), **options)


def allowed_beside_torch(drawn, allowance):
    """torch's unfused formula multiplies q and k by √scale, as float64, before their product.

    That is a rounding of each and one of the root in each: 4 of Σ|q·k|, beside the head_dim + 1
    of the sum and one to spare for the additive mask.
    """
    bound, problem = allowance(drawn), drawn.problem
    q, k, _ = drawn.promoted()
    mass = (q.abs() @ k.repeat_interleave(problem.group, dim=1).abs().mT).max().item()
    weight = bound.weight + problem.scale * (problem.head_dim + 6) * mass
    return dataclasses.replace(bound, weight=weight, out=2 * (weight + bound.kv) + 1)


@every_case
def test_exact_attention_on_the_recording_is_torchs_in_float64(given, options, recorded, allowance):
    problem = recorded(*given, **options).problem()
    drawn = input_tensors.draw_inputs(problem)
    truth = oracles.dense(drawn)
    theirs = torch_in_float64(given, options, problem.scale).reshape(truth.out.shape)
    bound = allowed_beside_torch(drawn, allowance)
    assert not bound.misses(truth, dataclasses.replace(truth, out=theirs))


def test_the_comparison_notices_another_mask(recorded, allowance):
    given, _ = CASES["plain"]
    problem = recorded(*given, attn_mask=holes(5, 7)).problem()
    drawn = input_tensors.draw_inputs(problem)
    truth = oracles.dense(drawn)
    theirs = torch_in_float64(given, {}, problem.scale)
    bound = allowed_beside_torch(drawn, allowance)
    assert bound.misses(truth, dataclasses.replace(truth, out=theirs))


@every_case
def test_the_problem_draws_the_recorded_bits(given, options, recorded):
    recording = recorded(*given, **options)
    drawn = input_tensors.draw_inputs(recording.problem())
    for name in ("q", "k", "v"):
        stored, of_file = getattr(drawn, name), getattr(recording, name)
        assert stored.dtype == of_file.dtype == given[0].dtype
        assert torch.equal(stored.view(torch.uint8), of_file.view(torch.uint8))


@pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS.keys())
def test_every_bit_pattern_is_kept(dtype, recorded, tmp_path):
    """Also −0, subnormals and the largest numbers; mask and bias too."""
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
def test_another_dtype_rounds_the_recorded_numbers(dtype, recorded):
    recording = recorded(*qkv())
    problem = recording.problem(dtype)
    assert problem.dtype == dtype
    drawn, fmt = input_tensors.draw_inputs(problem), FORMATS[dtype if dtype != "tf32" else "fp32"]
    numbers = recording.v.double()
    if drawn.descale is not None:
        numbers = numbers / drawn.descale.v.double()[..., None, None]
    assert torch.equal(drawn.v.double(), round_to(numbers, fmt))


@every_case
def test_mods_are_traced(given, options, recorded):
    problem = recorded(*given, **options).problem()
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
def test_which_mods_a_mask_becomes(case, mask, score, recorded):
    given, options = CASES[case]
    recording = recorded(*given, **options)
    problem = recording.problem()
    assert problem.mask == Spec.of(mask or recording.name)
    assert problem.score == Spec.of(score or recording.name)


def test_sizes_and_scale(recorded):
    problem = recorded(*qkv(k=(2, 2, 7, 8), v=(2, 2, 7, 3)), scale=0.3, enable_gqa=True).problem()
    assert problem.shape == "B2 H4/2 Q5 K7 D8/3"
    assert problem.scale == torch.tensor(0.3, dtype=torch.float32).item()
    assert recorded(*qkv()).problem().scale == Problem(query=1, head_dim=8).scale


def test_the_same_file_gives_the_same_problem_in_another_process(recorded, tmp_path):
    """Wherever the file lies; and JSON brings the Problem back where it is loaded."""
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


def test_one_other_bit_is_another_problem(recorded):
    q, k, v = qkv()
    first = recorded(q, k, v)
    other = k.clone()
    other.view(torch.int32)[0, 0, 0, 0] ^= 1
    second = recorded(q, other, v)
    assert first.name != second.name
    assert first.problem().id != second.problem().id
    assert first.problem() == recorded(q, k, v).problem()
    # Both stay known: neither took the other's place.
    assert torch.equal(input_tensors.draw_inputs(first.problem()).k, k)
    assert torch.equal(input_tensors.draw_inputs(second.problem()).k, other)


def test_the_name_says_file_call_and_digest(recorded):
    file, _, rest = recorded(*qkv()).name.partition(":")
    call, _, digest = rest.partition("@")
    assert (file, call) == ("recorded.safetensors", "call-0")
    assert len(digest) == 8
    int(digest, 16)


@pytest.mark.parametrize("added", [None, holes(5, 7), bias(5, 7)], ids=["none", "bool", "added"])
def test_where_it_is_not_loaded_each_of_its_names_says_which_file_to_give(added, recorded):
    recording = recorded(*qkv(), attn_mask=added)
    case = Case(problem=recording.problem()).to_json()
    of_it = {"distribution": (DISTRIBUTIONS, "distribution")}
    if added is not None:
        is_mask = added.dtype is torch.bool
        of_it |= {"mask": (MASKS, "mask")} if is_mask else {"score": (SCORES, "score mod")}
    for registry, kind in of_it.values():
        entry = registry.pop(recording.name)
        with pytest.raises(ProblemError) as error:
            Case.from_json(case)
        registry[recording.name] = entry
        assert str(error.value) == (
            f"{kind} {recording.name!r} is of a recording: "
            "give its file recorded.safetensors with --inputs."
        )
    assert Case.from_json(case).problem == recording.problem()


def test_a_call_named_as_a_mod_of_a_file_is_still_of_a_recording(recorded):
    for fields in ({"mask": Spec.of("r.st:a::b@01234567")}, {"score": Spec.of("r.st:c@01234567")}):
        with pytest.raises(ProblemError, match=r"is of a recording: give its file r\.st with"):
            Problem(query=5, **fields)


def test_another_seed_or_size_is_refused(recorded):
    problem = recorded(*qkv(), attn_mask=holes(5, 7)).problem()
    with pytest.raises(ProblemError, match=r"there is one draw of it: seed=3 must be 0\."):
        input_tensors.draw_inputs(problem.replace(seed=3))
    with pytest.raises(ProblemError, match=r"is recorded for q, k, v of shapes .* it has none of"):
        input_tensors.draw_inputs(problem.replace(query=6))
    with pytest.raises(ProblemError, match=r"shape \(1, 1, 5, 7\): it does not fit scores of"):
        problem.replace(query=6).mask_mod()


def test_what_is_drawn_may_be_written_to(recorded):
    recording = recorded(*qkv())
    input_tensors.unrounded_inputs(recording.problem()).q.zero_()
    assert recording.q.any()
    assert input_tensors.draw_inputs(recording.problem()).q.any()


def test_the_file_is_what_the_schema_says(recorded, tmp_path):
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


def test_the_recording_in_the_repository(request):
    """Made by examples/train_transformer.py, as the README beside it says."""
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


def test_names_of_recordings_are_not_offered(recorded):
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
def test_a_table_that_writes_out_a_mask_has_its_name(mask, query, kv):
    dimensions = Dimensions(batch=2, heads=1, query=query, kv=kv)
    first, rows = torch.tensor(0), torch.arange(query)[:, None]
    table = build_mask(mask, dimensions)(first, first, rows, torch.arange(kv)).expand(query, kv)
    tables = table.expand(2, 1, query, kv).clone()
    assert named_mask(tables, dimensions) == mask
    if mask.name != "full":
        tables[1, 0, -1, 0] ^= True  # one key of one sequence
        assert named_mask(tables, dimensions) is None

"""Triton forwards in the interpreter: within rounding, as accurate as the ideal kernel, and inside
their tensors. Planted faults show that each of these tests can fail."""

import dataclasses
import math

import pytest
import torch
from tests.kernels.patched_kernels import PLANTED, faulty_forward
from tests.kernels.watched_accesses import Watched
from tests.subjects.sample_problems import MASKS
from tests.subjects.sample_problems import SCORES as ALL_SCORES

from attncheck import oracles
from attncheck.core.mod_spec import Entry, Spec
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Problem
from attncheck.mods import library
from attncheck.subjects import ideal, triton_flash
from attncheck.subjects.ideal import Ideal
from attncheck.subjects.triton_flash import Flash1, Flash2, launch_flash

SCORES = {"none": Spec.of("none")} | ALL_SCORES
DTYPES = ("fp32", "tf32", "fp16", "bf16", "e4m3", "e5m2")


pytestmark = pytest.mark.usefixtures("require_interpreter")


@pytest.fixture(params=[Flash2, Flash1], ids=["flash2", "flash1"])
def subject(request):
    return request.param()


def small(**changes) -> Problem:
    sizes = {"batch": 2, "heads": 2, "kv_heads": 1, "query": 40, "head_dim": 16, "value_dim": 8}
    return Problem(**(sizes | changes))


def measure_excess(inputs, exact, subject):
    truncated = inputs.problem.dtype == "tf32"
    return exact(inputs, truncated=truncated).excess(subject.run(inputs))


@pytest.mark.parametrize("lengths", [(40, 40), (70, 150), (150, 70)], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_masked_attention_is_within_rounding(mask, lengths, exact, subject):
    query, kv = lengths
    problem = small(query=query, kv=kv, dtype="fp32", mask=MASKS[mask])
    assert measure_excess(draw_inputs(problem), exact, subject) <= 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("score", SCORES)
def test_score_mods_are_within_rounding_in_every_dtype(score, dtype, exact, subject):
    problem = small(kv=70, dtype=dtype, mask=MASKS["causal"], score=SCORES[score])
    assert measure_excess(draw_inputs(problem), exact, subject) <= 1


SHAPES = [
    *(
        {"head_dim": k, "value_dim": v, "kv": 33, "dtype": "bf16"}
        for k, v in ((1, 1), (3, 5), (17, 64), (64, 17), (80, 80), (256, 256))
    ),
    *(
        {"query": q, "kv": k, "dtype": "fp16", "mask": MASKS["causal"]}
        for q, k in ((1, 1), (1, 65), (65, 1), (31, 32), (33, 33), (64, 129))
    ),
    *({"heads": q, "kv_heads": k} for q, k in ((1, 1), (3, 1), (6, 2), (4, 4))),
]


@pytest.mark.parametrize("changes", SHAPES, ids=str)
def test_unusual_shapes_are_within_rounding(changes, exact, subject):
    assert measure_excess(draw_inputs(small(**changes)), exact, subject) <= 1


@pytest.mark.parametrize("tiles", [(64, 16), (16, 64)], ids=str)
@pytest.mark.parametrize("mask", ["full", "and"])
def test_tiles_that_are_not_square_are_within_rounding(mask, tiles, exact, subject, monkeypatch):
    """Tiles on a GPU are not square, those that the interpreter chooses are."""
    chosen = dict(zip(("block_query", "block_kv"), tiles, strict=True))
    monkeypatch.setattr(triton_flash, "_interpreted", lambda problem: chosen)
    for query, kv in ((70, 150), (150, 70)):
        problem = small(query=query, kv=kv, dtype="fp32", mask=MASKS[mask])
        assert dataclasses.asdict(subject.tiling(problem, "cpu")).items() >= chosen.items()
        assert measure_excess(draw_inputs(problem), exact, subject) <= 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_launch_multiplies_in_tf32_only_for_tf32_and_sizes_tiles_by_the_wider_head_dim(dtype):
    for device in ("cuda", "cpu"):
        problem = small(head_dim=64, value_dim=64, dtype=dtype)
        assert launch_flash(problem, device).precision == ("tf32" if dtype == "tf32" else "ieee")
    chosen = {
        dims: launch_flash(small(head_dim=dims[0], value_dim=dims[1], dtype=dtype), "cuda")
        for dims in ((64, 64), (65, 64), (64, 65), (128, 128), (128, 129), (256, 1), (256, 256))
    }
    assert chosen[64, 64] != chosen[65, 64] == chosen[64, 65] == chosen[128, 128]
    assert chosen[128, 128] != chosen[128, 129] == chosen[256, 1] == chosen[256, 256]


@pytest.mark.parametrize("mask", MASKS)
def test_launch_knows_causal_masks_and_the_full_mask(mask):
    """Causal masks hide keys after the row, by which FlashAttention-1 skips tiles."""
    chosen = launch_flash(small(mask=MASKS[mask]), "cuda")
    assert (chosen.causal, chosen.free) == (mask in {"causal", "window", "and"}, mask == "full")


@pytest.mark.parametrize(
    ("mask", "dtype"),
    [
        ("full", "bf16"),
        ("causal", "fp16"),
        ("causal", "e4m3"),
        ("full", "e5m2"),
        ("window", "e4m3"),
    ],
)
def test_accuracy_equals_that_of_the_ideal_kernel_with_the_same_tiles(mask, dtype, subject, lead):
    for score in ("none", "relative_bias"):
        problem = with_1024_rows(dtype=dtype, mask=MASKS[mask], score=SCORES[score])
        inputs = draw_inputs(problem)
        best = Ideal(subject.tiling(problem, "cpu")).run(inputs)
        assert abs(lead(subject.run(inputs), best, oracles.dense(inputs).out)) <= 1


def with_1024_rows(**changes) -> Problem:
    return Problem(heads=4, query=256, head_dim=64, **changes)


WEIGHTS = "weights = (p * WEIGHTS_SCALE)"
TRUNCATED = """bits = p.to(tl.int32, bitcast=True) & -65536
    weights = bits.to(tl.float32, bitcast=True)"""


def test_truncated_weights_are_less_accurate_than_the_ideal_kernel(
    subject, lead, tmp_path, monkeypatch
):
    inputs = draw_inputs(with_1024_rows(dtype="bf16"))
    best = Ideal(subject.tiling(inputs.problem, "cpu")).run(inputs)
    wrong = faulty_forward(tmp_path, subject.forward().__name__, WEIGHTS, TRUNCATED)
    monkeypatch.setattr(type(subject), "forward", lambda self: wrong)
    assert lead(subject.run(inputs), best, oracles.dense(inputs).out) > 1


def test_flash1_is_more_accurate_than_an_ideal_kernel_of_flash2(lead):
    """The largest weight of each block is exactly 1 in FlashAttention-1, and is not rounded."""
    problem = Problem(heads=4, query=64, kv=512, head_dim=64, dtype="e5m2")
    inputs = draw_inputs(problem)
    own = Flash1().tiling(problem, "cpu")
    assert own.recurrence == "flash1"
    truth = oracles.dense(inputs).out
    outputs, best = Flash1().run(inputs), Ideal(own).run(inputs)
    assert abs(lead(outputs, best, truth)) <= 1
    assert lead(Ideal(Flash2().tiling(problem, "cpu")).run(inputs), best, truth) > 1


LARGEST = torch.finfo(torch.float32).max
PADDING = 20  # keys to the left of a sequence


def register_bias(bias, monkeypatch) -> Spec:
    """A score mod that adds ``bias`` (query, kv)."""

    def add_bias(score, b, h, q_idx, kv_idx):
        del b, h
        return score + bias[q_idx, kv_idx].to(score.dtype)

    entry = Entry(summary="a bias", build=lambda *_: add_bias, additive=True)
    monkeypatch.setitem(library.SCORES, "planted_bias", entry)
    return Spec.of("planted_bias")


def left_padding(value: float) -> torch.Tensor:
    """``value`` where a row may not see a key: in the future, or in the padding to the left."""
    row, key = torch.arange(70)[:, None], torch.arange(70)
    return torch.where((key > row) | (key < PADDING), value, 0.0)


def run_with_equal_scores(subject, inputs, keys: slice):
    """Outputs on some of the keys with every score 0, so that every weight is 1."""
    k, v = inputs.k[:, :, keys], inputs.v[:, :, keys]
    problem = inputs.problem.replace(kv=k.shape[2], score=Spec.of("none"))
    return subject.run(inputs.replace(problem=problem, q=torch.zeros_like(inputs.q), k=k, v=v))


def padded_rows_see_all(subject, inputs, monkeypatch) -> bool:
    """A bias of finfo.min hides keys unless all have it, as in Hugging Face's additive masks."""
    score = register_bias(left_padding(-LARGEST), monkeypatch)
    outputs = subject.run(inputs.replace(problem=inputs.problem.replace(score=score)))
    even = run_with_equal_scores(subject, inputs, slice(None)).out[:, :, :PADDING]
    hidden = register_bias(left_padding(-math.inf), monkeypatch)
    rest = subject.run(inputs.replace(problem=inputs.problem.replace(score=hidden)))
    return (
        torch.equal(outputs.out[:, :, :PADDING], even)
        and bool((outputs.lse[:, :, :PADDING] == -LARGEST).all())
        and torch.equal(outputs.out[:, :, PADDING:], rest.out[:, :, PADDING:])
        and torch.equal(outputs.lse[:, :, PADDING:], rest.lse[:, :, PADDING:])
    )


def largest_takes_all(subject, inputs, monkeypatch) -> bool:
    """Keys with a bias of finfo.max share all the weight equally."""
    bias = torch.zeros(70, 70)
    bias[:, :PADDING], bias[:, -PADDING:] = LARGEST, -LARGEST
    problem = inputs.problem.replace(score=register_bias(bias, monkeypatch))
    outputs = subject.run(inputs.replace(problem=problem))
    even = run_with_equal_scores(subject, inputs, slice(PADDING)).out
    return torch.equal(outputs.out, even) and bool((outputs.lse == LARGEST).all())


@pytest.mark.parametrize("holds", [padded_rows_see_all, largest_takes_all])
@pytest.mark.parametrize("dtype", ["fp32", "e4m3"])
@pytest.mark.parametrize("kernel", [Flash2, Flash1, Ideal])
def test_largest_finite_scores_do_not_overflow(kernel, dtype, holds, exact, tmp_path, monkeypatch):
    """A kernel that first converts scores to log2 units is correct elsewhere and fails here."""
    inputs = draw_inputs(small(query=70, kv=70, dtype=dtype))
    assert holds(kernel(), inputs, monkeypatch)
    plant_log2_units(kernel, tmp_path, monkeypatch)
    ordinary = inputs.replace(problem=inputs.problem.replace(score=SCORES["softcap"]))
    assert exact(ordinary).excess(kernel().run(ordinary)) <= 1
    assert not holds(kernel(), inputs, monkeypatch)


def plant_log2_units(kernel, tmp_path, monkeypatch):
    if kernel is Ideal:
        original = ideal.Pass.modified

        def there_and_back(*arguments):
            s = original(*arguments)
            return s * math.log2(math.e) * math.log(2.0) if arguments[0].score else s

        monkeypatch.setattr(ideal.Pass, "modified", there_and_back)
        return
    mod = "SCORE(s, b, h, rows[:, None], keys[None, :], captured)"
    there_and_back = f"{mod} * 1.4426950408889634 * 0.6931471805599453"
    wrong = faulty_forward(tmp_path, kernel().forward().__name__, mod, there_and_back)
    monkeypatch.setattr(kernel, "forward", lambda self: wrong)


@pytest.mark.parametrize("kernel", [Flash2, Flash1, Ideal])
def test_score_of_minus_infinity_has_weight_0_but_does_not_hide_the_value(kernel, monkeypatch):
    """Unlike a masked value, one that is NaN reaches the row, as 0 · NaN."""
    problem = small(query=70, kv=70)
    bias = torch.zeros(70, 70)
    masked = problem.replace(mask=Spec.of("padding", lengths=[33, 33]))
    expected = kernel().run(draw_inputs(masked.replace(score=register_bias(bias, monkeypatch))))
    bias[:, 33:] = -math.inf
    inputs = draw_inputs(problem.replace(score=register_bias(bias, monkeypatch)))
    outputs = kernel().run(inputs)
    assert torch.equal(outputs.out, expected.out)
    assert torch.equal(outputs.lse, expected.lse)
    inputs.v[:, :, 40, 3] = math.nan
    reached = kernel().run(inputs).out.isnan()
    assert reached[..., 3].all()
    assert not reached[..., :3].any()


@pytest.mark.parametrize(
    ("dtype", "poison"),
    [("bf16", each) for each in ([math.nan], [math.inf], [-math.inf], [math.inf, -math.inf])]
    + [("e4m3", [math.nan]), ("e5m2", [math.nan]), ("e5m2", [-math.inf])],
    ids=str,
)
@pytest.mark.parametrize("mask", ["causal", "document", "not", "causal_bottom_right"])
def test_value_that_is_not_finite_reaches_exactly_the_rows_that_see_it(
    mask, dtype, poison, subject
):
    """It arrives unchanged, or as NaN where a row sees infinities of both signs."""
    inputs = draw_inputs(small(batch=1, heads=1, query=70, dtype=dtype, mask=MASKS[mask]))
    v = inputs.v.float()
    for at, value in zip((30, 40), poison, strict=False):
        v[0, 0, at, 3] = value
    v = v.to(inputs.v.dtype)
    before = subject.run(inputs).out
    after = subject.run(inputs.replace(v=v))
    truth = oracles.dense(inputs.replace(v=v)).out
    assert torch.equal(after.out.isfinite(), truth.isfinite())
    assert torch.equal(after.out.isnan(), truth.isnan())
    assert torch.equal(after.out[truth.isinf()].double(), truth[truth.isinf()])
    assert torch.equal(after.out[truth.isfinite()], before[truth.isfinite()])


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_offsets_beyond_32_bits_do_not_wrap(name, subject):
    """A column's stride times 255 passes 2^31; untouched pages of memory cost nothing."""
    inputs = draw_inputs(
        small(batch=1, heads=1, query=3, head_dim=256, value_dim=256, dtype="e5m2")
    )
    tensor = getattr(inputs, name)
    stride = 2**31 // 255 + 1
    wide = torch.empty(256 * stride, dtype=tensor.dtype)
    view = wide.as_strided(tensor.shape, (0, 0, 1, stride))
    view.copy_(tensor)
    plain, far = subject.run(inputs), subject.run(inputs.replace(**{name: view}))
    assert torch.equal(plain.out, far.out)


def misplaced_infinities(outputs):
    """0 if exactly the rows that see the infinite value of ``inputs_for`` hold it, else 2."""
    truth = torch.where(torch.arange(70) >= 30, -math.inf, 0.0)
    return 2.0 * (not torch.equal(outputs.out[:, :, :, 3].clamp(max=0.0).isinf()[0, 0], truth < 0))


def inputs_for(fault: str, problem: Problem):
    """Inputs on which ``fault`` shows, and those whose exact result a correct kernel gives."""
    if "infinit" in fault:
        inputs = draw_inputs(problem.replace(mask=MASKS["causal"]))
        inputs.v[:, :, 30, 3] = -math.inf
        return inputs, inputs
    if "hidden values" in fault:
        inputs = draw_inputs(problem.replace(mask=MASKS["causal"]))
        inputs.v[:, :, 70:] = math.nan
        return inputs, inputs.replace(v=inputs.v.nan_to_num())
    if "score mod" in fault:
        problem = problem.replace(score=SCORES["alibi"])
    if "hidden" in fault:
        problem = problem.replace(mask=MASKS["causal"])
    return (draw_inputs(problem),) * 2


@pytest.mark.parametrize(
    ("kernel", "room", "fault"),
    [
        (kernel, room, fault)
        for kernel in ("flash2_forward", "flash1_forward")
        for room in ("tile", kernel)
        for fault in PLANTED[room]
    ],
)
def test_planted_fault_is_more_than_rounding(kernel, room, fault, exact, tmp_path, monkeypatch):
    subject = {"flash2_forward": Flash2, "flash1_forward": Flash1}[kernel]()
    sizes = {"batch": 1, "heads": 6, "kv_heads": 3, "query": 70, "kv": 101}
    problem = small(**sizes, dtype="bf16", distribution="negative_logits")
    inputs, reference = inputs_for(fault, problem)
    check = misplaced_infinities if "infinit" in fault else exact(reference).excess
    assert check(subject.run(inputs)) <= 1
    wrong = faulty_forward(tmp_path, kernel, *PLANTED[room][fault].values())
    monkeypatch.setattr(type(subject), "forward", lambda self: wrong)
    assert not check(subject.run(inputs)) <= 1


def recording(make, tensors):
    """``make``, which adds each tensor that it makes to ``tensors``."""

    def make_and_record(*arguments, **keywords):
        tensors.append(make(*arguments, **keywords))
        return tensors[-1]

    return make_and_record


@pytest.mark.parametrize("missing", [None, "q", "k", "v"])
def test_accesses_stay_within_the_kernels_tensors(missing, subject, monkeypatch):
    inputs = draw_inputs(small(query=70, kv=101, head_dim=17, dtype="bf16", mask=MASKS["causal"]))
    tensors = [getattr(inputs, name) for name in "qkv" if name != missing]
    for listed in subject.visited(inputs.problem, inputs.device).values():
        tensors += [listed.runs, listed.counts]
    for name in ("empty", "zeros", "full"):
        monkeypatch.setattr(torch, name, recording(getattr(torch, name), tensors))
    accesses = Watched(monkeypatch, tensors)
    subject.run(inputs)
    assert (accesses.outside > 0) == (missing is not None)  # a tensor not listed is noticed

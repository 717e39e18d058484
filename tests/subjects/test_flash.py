"""Our Triton forwards in the interpreter: within rounding, as good as the ideal kernel, inside
their tensors; and each of these notices a planted fault."""

import dataclasses
import math

import pytest
import torch
from tests.kernels.patched_kernels import PLANTED, faulty_forward
from tests.kernels.watched_accesses import Watched
from tests.subjects.sample_mods import MASKS
from tests.subjects.sample_mods import SCORES as ALL_SCORES

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


def excess(inputs, exact, subject):
    truncated = inputs.problem.dtype == "tf32"
    return exact(inputs, truncated=truncated).excess(subject.run(inputs))


@pytest.mark.parametrize("lengths", [(40, 40), (70, 150), (150, 70)], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask, lengths, exact, subject):
    query, kv = lengths
    problem = small(query=query, kv=kv, dtype="fp32", mask=MASKS[mask])
    assert excess(draw_inputs(problem), exact, subject) <= 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("score", SCORES)
def test_scores_in_every_dtype(score, dtype, exact, subject):
    problem = small(kv=70, dtype=dtype, mask=MASKS["causal"], score=SCORES[score])
    assert excess(draw_inputs(problem), exact, subject) <= 1


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
def test_any_shape(changes, exact, subject):
    assert excess(draw_inputs(small(**changes)), exact, subject) <= 1


@pytest.mark.parametrize("tiles", [(64, 16), (16, 64)], ids=str)
@pytest.mark.parametrize("mask", ["full", "and"])
def test_tiles_that_are_not_square(mask, tiles, exact, subject, monkeypatch):
    """As on a GPU; the interpreter's own choice is square."""
    chosen = dict(zip(("block_query", "block_kv"), tiles, strict=True))
    monkeypatch.setattr(triton_flash, "_interpreted", lambda problem: chosen)
    for query, kv in ((70, 150), (150, 70)):
        problem = small(query=query, kv=kv, dtype="fp32", mask=MASKS[mask])
        assert dataclasses.asdict(subject.tiling(problem, "cpu")).items() >= chosen.items()
        assert excess(draw_inputs(problem), exact, subject) <= 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_a_gpu_is_asked_for(dtype):
    """Only tf32 multiplies in tf32; the wider of the two head dims chooses the tiles."""
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
def test_which_tiles_a_mask_lets_it_skip(mask):
    """Whether keys after the row are hidden, which FlashAttention-1 goes by, or nothing is."""
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
def test_as_good_as_the_ideal_kernel(mask, dtype, subject, lead):
    """At the same tiles and order, on 1,024 rows; with a score mod too."""
    for score in ("none", "relative_bias"):
        problem = of_1024_rows(dtype=dtype, mask=MASKS[mask], score=SCORES[score])
        inputs = draw_inputs(problem)
        best = Ideal(subject.tiling(problem, "cpu")).run(inputs)
        assert abs(lead(subject.run(inputs), best, oracles.dense(inputs).out)) <= 1


def of_1024_rows(**changes) -> Problem:
    return Problem(heads=4, query=256, head_dim=64, **changes)


WEIGHTS = "weights = (p * WEIGHTS_SCALE)"
TRUNCATED = """bits = p.to(tl.int32, bitcast=True) & -65536
    weights = bits.to(tl.float32, bitcast=True)"""


def test_worse_than_the_ideal_kernel(subject, lead, tmp_path, monkeypatch):
    """bf16's weights truncated, not rounded to nearest."""
    inputs = draw_inputs(of_1024_rows(dtype="bf16"))
    best = Ideal(subject.tiling(inputs.problem, "cpu")).run(inputs)
    wrong = faulty_forward(tmp_path, subject.forward().__name__, WEIGHTS, TRUNCATED)
    monkeypatch.setattr(type(subject), "forward", lambda self: wrong)
    assert lead(subject.run(inputs), best, oracles.dense(inputs).out) > 1


def test_flash1_is_not_measured_against_flash2(lead):
    """A block's largest weight is 1 in FlashAttention-1, and not rounded: more is exact."""
    problem = Problem(heads=4, query=64, kv=512, head_dim=64, dtype="e5m2")
    inputs = draw_inputs(problem)
    own = Flash1().tiling(problem, "cpu")
    assert own.recurrence == "flash1"
    truth = oracles.dense(inputs).out
    found, best = Flash1().run(inputs), Ideal(own).run(inputs)
    assert abs(lead(found, best, truth)) <= 1
    assert lead(Ideal(Flash2().tiling(problem, "cpu")).run(inputs), best, truth) > 1


LARGEST = torch.finfo(torch.float32).max
PADDING = 20  # keys to the left of a sequence


def added(bias, monkeypatch) -> Spec:
    """A score mod that adds ``bias`` (query, kv)."""

    def biased(score, b, h, q_idx, kv_idx):
        del b, h
        return score + bias[q_idx, kv_idx].to(score.dtype)

    entry = Entry(summary="a bias", build=lambda *_: biased, additive=True)
    monkeypatch.setitem(library.SCORES, "planted_bias", entry)
    return Spec.of("planted_bias")


def left_padding(value: float) -> torch.Tensor:
    """``value`` where a row may not see a key: in the future, or in the padding to the left."""
    row, key = torch.arange(70)[:, None], torch.arange(70)
    return torch.where((key > row) | (key < PADDING), value, 0.0)


def evenly(subject, inputs, keys: slice):
    """What it gives where every score is 0, and all else is as it is: every weight is 1."""
    k, v = inputs.k[:, :, keys], inputs.v[:, :, keys]
    problem = inputs.problem.replace(kv=k.shape[2], score=Spec.of("none"))
    return subject.run(inputs.replace(problem=problem, q=torch.zeros_like(inputs.q), k=k, v=v))


def padded_rows_see_all(subject, inputs, monkeypatch) -> bool:
    """As with Hugging Face's additive masks: finfo.min hides keys unless all have it."""
    score = added(left_padding(-LARGEST), monkeypatch)
    found = subject.run(inputs.replace(problem=inputs.problem.replace(score=score)))
    even = evenly(subject, inputs, slice(None)).out[:, :, :PADDING]
    hidden = added(left_padding(-math.inf), monkeypatch)
    rest = subject.run(inputs.replace(problem=inputs.problem.replace(score=hidden)))
    return (
        torch.equal(found.out[:, :, :PADDING], even)
        and bool((found.lse[:, :, :PADDING] == -LARGEST).all())
        and torch.equal(found.out[:, :, PADDING:], rest.out[:, :, PADDING:])
        and torch.equal(found.lse[:, :, PADDING:], rest.lse[:, :, PADDING:])
    )


def largest_takes_all(subject, inputs, monkeypatch) -> bool:
    """finfo.max for the first keys, finfo.min for the last: the first are seen evenly."""
    bias = torch.zeros(70, 70)
    bias[:, :PADDING], bias[:, -PADDING:] = LARGEST, -LARGEST
    problem = inputs.problem.replace(score=added(bias, monkeypatch))
    found = subject.run(inputs.replace(problem=problem))
    even = evenly(subject, inputs, slice(PADDING)).out
    return torch.equal(found.out, even) and bool((found.lse == LARGEST).all())


@pytest.mark.parametrize("right", [padded_rows_see_all, largest_takes_all])
@pytest.mark.parametrize("dtype", ["fp32", "e4m3"])
@pytest.mark.parametrize("kernel", [Flash2, Flash1, Ideal])
def test_the_largest_finite_scores(kernel, dtype, right, exact, tmp_path, monkeypatch):
    """And what is right elsewhere but brings scores to log2 units first is wrong there."""
    inputs = draw_inputs(small(query=70, kv=70, dtype=dtype))
    assert right(kernel(), inputs, monkeypatch)
    plant_log2_units(kernel, tmp_path, monkeypatch)
    ordinary = inputs.replace(problem=inputs.problem.replace(score=SCORES["softcap"]))
    assert exact(ordinary).excess(kernel().run(ordinary)) <= 1
    assert not right(kernel(), inputs, monkeypatch)


def plant_log2_units(kernel, tmp_path, monkeypatch):
    if kernel is Ideal:
        of_tile = ideal.Pass.modified

        def scores(*arguments):
            s = of_tile(*arguments)
            return s * math.log2(math.e) * math.log(2.0) if arguments[0].score else s

        monkeypatch.setattr(ideal.Pass, "modified", scores)
        return
    mod = "SCORE(s, b, h, rows[:, None], keys[None, :], captured)"
    there_and_back = f"{mod} * 1.4426950408889634 * 0.6931471805599453"
    wrong = faulty_forward(tmp_path, kernel().forward().__name__, mod, there_and_back)
    monkeypatch.setattr(kernel, "forward", lambda self: wrong)


@pytest.mark.parametrize("kernel", [Flash2, Flash1, Ideal])
def test_a_score_of_minus_infinity_is_a_weight_of_0_and_hides_no_value(kernel, monkeypatch):
    """Unlike the mask, which hides it wholly."""
    problem = small(query=70, kv=70)
    bias = torch.zeros(70, 70)
    masked = problem.replace(mask=Spec.of("padding", lengths=[33, 33]))
    expected = kernel().run(draw_inputs(masked.replace(score=added(bias, monkeypatch))))
    bias[:, 33:] = -math.inf
    given = draw_inputs(problem.replace(score=added(bias, monkeypatch)))
    found = kernel().run(given)
    assert torch.equal(found.out, expected.out)
    assert torch.equal(found.lse, expected.lse)
    given.v[:, :, 40, 3] = math.nan
    reached = kernel().run(given).out.isnan()
    assert reached[..., 3].all()
    assert not reached[..., :3].any()


@pytest.mark.parametrize(
    ("dtype", "poison"),
    [("bf16", each) for each in ([math.nan], [math.inf], [-math.inf], [math.inf, -math.inf])]
    + [("e4m3", [math.nan]), ("e5m2", [math.nan]), ("e5m2", [-math.inf])],
    ids=str,
)
@pytest.mark.parametrize("mask", ["causal", "document", "not", "causal_bottom_right"])
def test_a_visible_value_that_is_not_finite_reaches_its_rows_and_no_other(
    mask, dtype, poison, subject
):
    """As it is, and NaN where a row sees both signs; the mask is one that no row broadcasts."""
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
def test_a_stride_beyond_32_bits(name, subject):
    """A column's stride times 255 columns passes 2^31: untouched pages of memory cost nothing."""
    inputs = draw_inputs(
        small(batch=1, heads=1, query=3, head_dim=256, value_dim=256, dtype="e5m2")
    )
    given = getattr(inputs, name)
    stride = 2**31 // 255 + 1
    wide = torch.empty(256 * stride, dtype=given.dtype)
    view = wide.as_strided(given.shape, (0, 0, 1, stride))
    view.copy_(given)
    plain, far = subject.run(inputs), subject.run(inputs.replace(**{name: view}))
    assert torch.equal(plain.out, far.out)


def infinities(outputs):
    """0 where the rows of ``asked_for``'s infinite value hold it, and no other."""
    truth = torch.where(torch.arange(70) >= 30, -math.inf, 0.0)
    return 2.0 * (not torch.equal(outputs.out[:, :, :, 3].clamp(max=0.0).isinf()[0, 0], truth < 0))


def asked_for(fault: str, problem: Problem):
    """Inputs on which ``fault`` shows, and the inputs whose truth is to be met."""
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
def test_planted_faults_are_noticed(kernel, room, fault, exact, tmp_path, monkeypatch):
    subject = {"flash2_forward": Flash2, "flash1_forward": Flash1}[kernel]()
    sizes = {"batch": 1, "heads": 6, "kv_heads": 3, "query": 70, "kv": 101}
    problem = small(**sizes, dtype="bf16", distribution="negative_logits")
    inputs, shown = asked_for(fault, problem)
    check = infinities if "infinit" in fault else exact(shown).excess
    assert check(subject.run(inputs)) <= 1
    wrong = faulty_forward(tmp_path, kernel, *PLANTED[room][fault].values())
    monkeypatch.setattr(type(subject), "forward", lambda self: wrong)
    assert not check(subject.run(inputs)) <= 1


def remembered(make, tensors):
    def made(*arguments, **named):
        tensors.append(make(*arguments, **named))
        return tensors[-1]

    return made


@pytest.mark.parametrize("missing", [None, "q", "k", "v"])
def test_reads_and_writes_its_own_tensors_only(missing, subject, monkeypatch):
    inputs = draw_inputs(small(query=70, kv=101, head_dim=17, dtype="bf16", mask=MASKS["causal"]))
    tensors = [getattr(inputs, name) for name in "qkv" if name != missing]
    for listed in subject.visited(inputs.problem, inputs.device).values():
        tensors += [listed.runs, listed.counts]
    for name in ("empty", "zeros", "full"):
        monkeypatch.setattr(torch, name, remembered(getattr(torch, name), tensors))
    seen = Watched(monkeypatch, tensors)
    subject.run(inputs)
    assert (seen.outside > 0) == (missing is not None)  # it notices a tensor it does not know

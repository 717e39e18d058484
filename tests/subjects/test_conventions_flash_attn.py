"""The flash_attn and varlen conventions: correct kernels pass, planted faults fail."""

import math

import pytest
import torch
from tests.subjects import plain_kernels as plain

from attncheck.core.mod_spec import Spec
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Case, Problem
from attncheck.subjects.capabilities.subject import Subject
from attncheck.subjects.conventions.convention import ConventionOptions
from attncheck.subjects.conventions.declarations import make_subject
from attncheck.verify.executor import Execution, InProcess
from attncheck.verify.run_case import run_case

CAUSAL, BOTTOM_RIGHT = Spec.of("causal"), Spec.of("causal_bottom_right")
WINDOW, SOFTCAP, ALIBI = (
    Spec.of("sliding_window", window=7),
    Spec.of("softcap", cap=2),
    Spec.of("alibi"),
)
EVEN_WINDOW = Spec.of("sliding_window", window=8)  # seven keys before a row's own: an odd number
LATER_ALIBI = Spec.of("offset", ALIBI, rows=11)  # of the last 20 rows of 31
DOCUMENTS = Spec.of("document", lengths=[5, 0, 9, 6])
PADDING = Spec.of("padding", lengths=[30, 7])
UNLIKE = Spec.of("documents", query_lengths=[0, 4, 0, 9, 7], kv_lengths=[3, 9, 2, 9, 7])
# Only the first document has unlike lengths: bottom-right in each is bottom-right in the whole.
SHIFTED = Spec.of("documents", query_lengths=[4, 9, 7], kv_lengths=[9, 9, 7])
# Each document has a diagonal of its own; one has more rows than keys, and one has no rows.
OWN_LENGTHS = {"query_lengths": [4, 9, 0, 7], "kv_lengths": [9, 6, 5, 11]}
EACH_CAUSAL, EACH_WINDOW = (
    Spec.of("documents_bottom_right", part, **OWN_LENGTHS) for part in (CAUSAL, WINDOW)
)
BY_LENGTH = Spec.of("bottom_right", WINDOW, lengths=[30, 23])
UNSHIFTED = Spec.of("documents", query_lengths=[4, 9, 0, 7], kv_lengths=[4, 9, 0, 7])


def label(value):
    """A short id of a test's argument."""
    if isinstance(value, dict):
        return ",".join(f"{key}={one}" for key, one in value.items()) or "plain"
    return str(value)


def both(*parts):
    return Spec.of("and", *parts)


def small(**changes) -> Problem:
    sizes = {"batch": 2, "heads": 4, "query": 20, "head_dim": 16, "dtype": "fp32"}
    return Problem(**(sizes | changes))


def wrap_kernel(function, convention, **options) -> Subject:
    subject = make_subject(function, "kernel", convention, ConventionOptions(**options))
    assert isinstance(subject, Subject), subject
    return subject


def judge(subject, problem):
    return run_case(subject, Case(problem=problem), device="cpu")


UNPACKED = [
    {},
    {"mask": CAUSAL},
    {"mask": CAUSAL, "dtype": "bf16", "kv_heads": 2},
    {"mask": BOTTOM_RIGHT, "kv": 31, "scale": 0.7},
    {"mask": BOTTOM_RIGHT, "query": 31, "kv": 20},
    {"mask": CAUSAL, "query": 31, "kv": 20},
    {"mask": WINDOW, "value_dim": 8},
    {"mask": EVEN_WINDOW},
    {"mask": both(WINDOW, CAUSAL), "kv_heads": 1},
    {"score": SOFTCAP, "mask": BOTTOM_RIGHT, "kv": 23},
    {"score": ALIBI, "mask": CAUSAL},
    {"score": Spec.of("chain", SOFTCAP, ALIBI), "mask": WINDOW},
    {"score": LATER_ALIBI, "mask": BOTTOM_RIGHT, "kv": 31},
]
PACKED = [
    {"mask": DOCUMENTS},
    {"mask": both(CAUSAL, DOCUMENTS), "kv_heads": 2},
    {"mask": both(DOCUMENTS, WINDOW), "score": ALIBI},
    {"mask": DOCUMENTS, "query": 12, "dtype": "bf16"},
    {"mask": DOCUMENTS, "kv": 9},
    {"mask": PADDING, "kv": 30},
    {"mask": Spec.of("padding", lengths=[0, 20])},
    {"mask": UNLIKE, "kv": 30, "kv_heads": 1},
    {"mask": Spec.of("documents", query_lengths=[20, 0], kv_lengths=[0, 6]), "kv": 6},
    {"mask": both(SHIFTED, BOTTOM_RIGHT), "kv": 25, "query": 20},
    {"mask": both(UNSHIFTED, CAUSAL, WINDOW), "score": ALIBI},
    {"mask": EACH_CAUSAL, "kv": 31, "kv_heads": 2},
    {"mask": EACH_WINDOW, "kv": 31, "score": SOFTCAP, "dtype": "bf16"},
    {"mask": Spec.of("bottom_right", CAUSAL, lengths=[9, 30]), "kv": 30},
    {"mask": BY_LENGTH, "kv": 31, "heads": 2},
    {
        "mask": both(SHIFTED, BOTTOM_RIGHT),
        "kv": 25,
        "score": Spec.of("chain", SOFTCAP, Spec.of("offset", ALIBI, rows=5)),
    },
]
KERNELS = {"flash_attn": plain.flash_attn_with, "varlen": plain.varlen_with}


@pytest.mark.parametrize("options", [{}, {"returns_lse": True}], ids=label)
@pytest.mark.parametrize(
    ("convention", "changes"),
    [(c, changes) for c in KERNELS for changes in UNPACKED] + [("varlen", p) for p in PACKED],
    ids=label,
)
def test_correct_kernel_passes(convention, changes, options):
    subject = wrap_kernel(KERNELS[convention](), convention, **options)
    record = judge(subject, small(**changes))
    assert record.status == "pass", (record.reason, record.judgement)
    assert record.lse is not None


@pytest.mark.parametrize(
    ("convention", "fault", "changes", "options"),
    [
        ("flash_attn", "top_left", {"mask": BOTTOM_RIGHT, "kv": 31}, {}),
        ("flash_attn", "", {"mask": BOTTOM_RIGHT, "kv": 31}, {"causal": "top_left"}),
        ("flash_attn", "base2", {}, {}),
        ("flash_attn", "", {}, {"lse": "base2"}),
        ("flash_attn", "axes", {"heads": 20}, {}),
        ("flash_attn", "window", {"mask": WINDOW}, {}),
        ("flash_attn", "right", {"mask": EVEN_WINDOW}, {}),
        ("varlen", "right", {"mask": EVEN_WINDOW}, {}),
        ("flash_attn", "alibi", {"mask": CAUSAL, "score": ALIBI}, {}),
        ("varlen", "ignores_starts", {"mask": DOCUMENTS}, {}),
        ("varlen", "ignores_starts", {"mask": CAUSAL}, {}),
        ("varlen", "top_left", {"mask": BOTTOM_RIGHT, "kv": 31}, {}),
        ("varlen", "top_left", {"mask": both(SHIFTED, BOTTOM_RIGHT), "kv": 25}, {}),
        ("varlen", "ignores_starts", {"mask": UNLIKE, "kv": 30}, {}),
        ("varlen", "top_left", {"mask": EACH_CAUSAL, "kv": 31}, {}),
        ("varlen", "longest", {"mask": EACH_CAUSAL, "kv": 31}, {}),
        ("varlen", "longest", {"mask": BY_LENGTH, "kv": 31}, {}),
        ("varlen", "window", {"mask": EACH_WINDOW, "kv": 31}, {}),
        ("varlen", "window", {"mask": both(DOCUMENTS, WINDOW)}, {}),
    ],
    ids=label,
)
def test_planted_fault_or_wrong_option_fails(convention, fault, changes, options):
    subject = wrap_kernel(KERNELS[convention](fault), convention, **options)
    record = judge(subject, small(**changes))
    assert record.status == "fail", record.reason


@pytest.mark.parametrize(
    ("fault", "options", "changes"),
    [
        ("base2", {"lse": "base2"}, {}),
        ("top_left", {"causal": "top_left"}, {"mask": CAUSAL, "kv": 31}),
        ("top_left", {"causal": "top_left"}, {"mask": CAUSAL, "query": 31, "kv": 20}),
        ("top_left", {"causal": "top_left"}, {"mask": CAUSAL, "kv": 31, "score": ALIBI}),
        ("base2", {"returns_lse": False}, {"mask": CAUSAL}),
    ],
    ids=label,
)
def test_declared_deviation_passes(fault, options, changes):
    subject = wrap_kernel(plain.flash_attn_with(fault), "flash_attn", **options)
    record = judge(subject, small(**changes))
    assert record.status == "pass", record.reason
    assert (record.lse is None) == (options.get("returns_lse") is False)


@pytest.mark.parametrize("fault", ["total_first", "padded_lse"])
def test_packed_lse_with_other_axes_passes(fault):
    subject = wrap_kernel(plain.varlen_with(fault), "varlen", returns_lse=True)
    for mask in (DOCUMENTS, Spec.of("full")):
        assert judge(subject, small(mask=mask)).status == "pass"


@pytest.mark.parametrize(
    ("convention", "changes", "reason"),
    [
        ("flash_attn", {"mask": CAUSAL, "kv": 31}, "neither causal nor window_size makes"),
        ("flash_attn", {"mask": WINDOW, "kv": 31}, "neither causal nor window_size makes"),
        ("flash_attn", {"mask": WINDOW, "query": 31, "kv": 20}, "neither causal nor window_size"),
        ("flash_attn", {"mask": Spec.of("sliding_window", window=0)}, "neither causal nor"),
        ("flash_attn", {"mask": Spec.of("prefix_lm", prefix=3)}, "neither causal nor window_size"),
        ("flash_attn", {"mask": DOCUMENTS}, "neither causal nor window_size makes"),
        ("flash_attn", {"score": ALIBI}, "alibi_slopes add -slope·|i + kv - query - j|"),
        ("flash_attn", {"score": ALIBI, "mask": BOTTOM_RIGHT, "kv": 31}, "alibi_slopes add"),
        ("flash_attn", {"score": LATER_ALIBI, "mask": BOTTOM_RIGHT, "kv": 30}, "alibi_slopes add"),
        ("varlen", {"score": LATER_ALIBI, "mask": both(SHIFTED, CAUSAL), "kv": 25}, "neither"),
        ("flash_attn", {"score": Spec.of("temperature", temperature=2)}, "neither softcap nor"),
        ("flash_attn", {"score": Spec.of("chain", ALIBI, SOFTCAP)}, "neither softcap nor"),
        ("flash_attn", {"dtype": "e4m3"}, "takes no q_descale"),
        ("flash_attn", {"dtype": "tf32"}, "the CPU has no tf32 products"),
        ("varlen", {"mask": Spec.of("or", CAUSAL, DOCUMENTS)}, "is not the same window of keys"),
        (
            "varlen",
            {"mask": both(Spec.of("padding", lengths=[9, 20]), DOCUMENTS)},
            "is not the same window of keys",
        ),
        ("varlen", {"mask": both(CAUSAL, PADDING), "kv": 30}, "neither causal nor window_size"),
        ("varlen", {"mask": both(CAUSAL, DOCUMENTS), "kv": 16}, "neither causal nor window_size"),
        ("varlen", {"mask": both(CAUSAL, UNLIKE), "kv": 30}, "neither causal nor window_size"),
        ("varlen", {"mask": both(CAUSAL, EACH_CAUSAL), "kv": 31}, "is not the same window of keys"),
        ("varlen", {"mask": both(PADDING, BY_LENGTH), "kv": 31}, "is not the same window of keys"),
        ("flash_attn", {"mask": BY_LENGTH, "kv": 31}, "neither causal nor window_size"),
        # Each document's slopes would count from its own diagonal.
        ("varlen", {"mask": EACH_CAUSAL, "kv": 31, "score": ALIBI}, "which is another bias here"),
        ("varlen", {"mask": BY_LENGTH, "kv": 31, "score": ALIBI}, "which is another bias here"),
        (
            "varlen",
            {"mask": both(BOTTOM_RIGHT, SHIFTED), "kv": 25, "score": ALIBI},
            "which is another bias here",
        ),
    ],
    ids=label,
)
def test_problem_that_the_convention_cannot_express_is_unsupported(convention, changes, reason):
    subject = wrap_kernel(KERNELS[convention](), convention)
    assert reason in (subject.unsupported(small(**changes), "cpu") or "")


def test_slopes_of_a_top_left_function_count_distance_from_its_own_diagonal():
    subject = wrap_kernel(plain.flash_attn_with("top_left"), "flash_attn", causal="top_left")
    later = small(score=LATER_ALIBI, mask=CAUSAL, kv=31)
    assert "-slope·|i - j|, which is another" in (subject.unsupported(later, "cpu") or "")


@pytest.mark.parametrize(
    ("takes", "mask", "passed"),
    [
        ("causal", CAUSAL, {"causal": True}),
        ("causal", Spec.of("full"), {"causal": False}),
        ("is_causal", CAUSAL, {"is_causal": True}),
        ("window_size", CAUSAL, {"window_size": (-1, 0)}),
        ("window_size", WINDOW, {"window_size": (6, 0)}),
        ("causal, window_size", CAUSAL, {"causal": True, "window_size": (-1, -1)}),
        ("causal", WINDOW, "takes no window_size"),
        ("causal, window_size", WINDOW, {"causal": True, "window_size": (6, 0)}),
        ("causal, window_size", EVEN_WINDOW, {"causal": True, "window_size": (7, 7)}),
        ("window_size", EVEN_WINDOW, {"window_size": (7, 0)}),
        ("softmax_scale", CAUSAL, "takes no causal"),
        ("sm_scale", Spec.of("full"), {"sm_scale": 0.25}),
        ("softcap, alibi_slopes", Spec.of("full"), {"softcap": 0.0, "alibi_slopes": None}),
        ("return_lse", Spec.of("full"), {"return_lse": True}),
        ("dropout_p", CAUSAL, "takes no causal"),
        ("dropout_p, causal", CAUSAL, {"dropout_p": 0.0, "causal": True}),
    ],
)
def test_required_keywords_and_those_of_the_mask_are_passed(takes, mask, passed):
    received = {}
    scope = {"received": received}
    items = ", ".join(f"{name}={name}" for name in takes.split(", "))
    # A function per signature, made here to keep the table short.
    exec(f"def kernel(q, k, v, {takes}):\n    received.update({items})\n    return v", scope)  # noqa: S102
    subject, problem = wrap_kernel(scope["kernel"], "flash_attn"), small(mask=mask)
    if isinstance(passed, str):
        assert subject.unsupported(problem, "cpu") == passed
        return
    subject.run(draw_inputs(problem))
    assert received == passed


def test_descales_of_fp8_are_passed():
    received = {}

    def kernel(q, k, v, q_descale=None, k_descale=None, v_descale=None, causal=False):
        received.update(q=q_descale, k=k_descale, v=v_descale)
        return q.bfloat16()

    inputs = draw_inputs(small(dtype="e4m3", kv_heads=2))
    assert isinstance(InProcess().run(wrap_kernel(kernel, None), inputs), Execution)
    assert all(torch.equal(received[name], getattr(inputs.descale, name)) for name in "qkv")
    assert received["q"].shape == (2, 2)


def test_packed_descales_are_repeated_for_each_part():
    """flash-attn takes them as (packed sequences, kv heads)."""
    received = {}

    def kernel(q, k, v, cu_seqlens_q, cu_seqlens_k, dropout_p, **scales):
        q_descale, k_descale, v_descale = (scales[f"{name}_descale"] for name in "qkv")
        received.update(q=q_descale, k=k_descale, v=v_descale, parts=len(cu_seqlens_q) - 1)
        received["dropout_p"] = dropout_p
        return q.bfloat16()

    inputs = draw_inputs(small(dtype="e4m3", kv_heads=2, mask=DOCUMENTS))
    assert isinstance(InProcess().run(wrap_kernel(kernel, None), inputs), Execution)
    assert (received["parts"], received["dropout_p"]) == (8, 0.0)
    for name in "qkv":
        whole = getattr(inputs.descale, name)
        assert torch.equal(received[name], whole.repeat_interleave(4, 0))


@pytest.mark.parametrize("convention", KERNELS)
def test_required_block_scales_are_refused(convention):
    def fixed(q, k, v, softmax_scale=None, *, k_block_scales): ...

    def packed(q, k, v, cu_seqlens_q, cu_seqlens_k, *, k_block_scales): ...

    function = {"flash_attn": fixed, "varlen": packed}[convention]
    assert make_subject(function, "kernel", convention) == (
        f"needs 'k_block_scales', which the {convention} convention does not pass: give it a "
        "default, or write an adapter (docs/how-to/adapters.md)"
    )


def test_tensors_have_the_axes_of_the_convention():
    shapes = {}

    def fixed(q, k, v, window_size=(-1, -1)):
        shapes["flash_attn"] = [(tuple(x.shape), x.is_contiguous()) for x in (q, k, v)]
        return q[..., :8]

    def packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
        shapes["varlen"] = [(tuple(x.shape), x.is_contiguous()) for x in (q, k, v)]
        shapes["places"] = [cu_seqlens_q.tolist(), cu_seqlens_k.tolist()]
        shapes["longest"] = (max_seqlen_q, max_seqlen_k)
        return q[..., :8]

    problem = small(kv=30, kv_heads=2, value_dim=8)
    assert wrap_kernel(fixed, None).run(draw_inputs(problem)).out.shape == (2, 4, 20, 8)
    whole = [((2, 20, 4, 16), True), ((2, 30, 2, 16), True), ((2, 30, 2, 8), True)]
    assert shapes["flash_attn"] == whole
    assert (
        wrap_kernel(packed, None).run(draw_inputs(problem.replace(mask=PADDING))).out.shape[0] == 2
    )
    assert shapes["varlen"] == [((40, 4, 16), True), ((37, 2, 16), True), ((37, 2, 8), True)]
    assert shapes["places"] == [[0, 20, 40], [0, 30, 37]]
    assert shapes["longest"] == (20, 30)


def test_strides_of_the_inputs_reach_the_kernel():
    strides = []

    def kernel(q, k, v, window_size=(-1, -1)):
        strides.append(q.stride())
        return v

    inputs = draw_inputs(small())
    wide = torch.zeros(2, 4, 20, 32)
    wide[..., ::2] = inputs.q
    wrap_kernel(kernel, None).run(inputs.replace(q=wide[..., ::2]))
    assert strides == [(2560, 32, 640, 2)]


def test_declared_lse_that_is_not_returned_breaks_the_contract():
    def kernel(q, k, v, window_size=(-1, -1)):
        return v

    record = judge(wrap_kernel(kernel, "flash_attn", returns_lse=True), small())
    assert (record.status, record.judgement.rule) == ("fail", "contract")
    assert record.judgement.reason == "it gave no LSE, which it is declared to give."


def test_lse_of_plus_infinity_in_empty_rows_is_read_as_minus_infinity():
    """flash-attn gives +∞ in rows without keys, and −∞ where it splits the keys."""
    problem = small(mask=BOTTOM_RIGHT, query=31, kv=20)
    inputs = draw_inputs(problem)
    outputs = wrap_kernel(plain.flash_attn_with(), "flash_attn").run(inputs)
    assert (outputs.lse[:, :, :11] == -math.inf).all()
    assert outputs.lse[:, :, 11:].isfinite().all()


def test_varlen_function_without_cu_seqlens_is_refused():
    def kernel(q, k, v, cu_seqlens_q): ...

    assert make_subject(kernel, "kernel", "varlen") == (
        "takes no cu_seqlens_k, which the varlen convention passes"
    )
    assert make_subject(lambda q, k, v: q, "kernel", "varlen").startswith("takes no cu_seqlens_q")

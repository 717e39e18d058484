"""The paged convention: correct kernels pass, planted faults fail, the rest is refused."""

import re

import pytest
import torch
from tests.subjects.plain_kernels import with_kvcache

from attncheck.cases import check_cases
from attncheck.core.mod_spec import Spec
from attncheck.core.paged_layout import Paging
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Case, Problem
from attncheck.subjects.capabilities.subject import Subject
from attncheck.subjects.conventions.declarations import make_subject
from attncheck.verify.run_case import run_case

PAGING = Paging(size=8, seed=1)
BOTTOM_RIGHT, WINDOW = Spec.of("causal_bottom_right"), Spec.of("sliding_window", window=7)
PADDING = Spec.of("padding", lengths=[30, 13])
BY_LENGTH = Spec.of("bottom_right", Spec.of("causal"), lengths=[30, 13])
LATER_ALIBI = Spec.of("offset", Spec.of("alibi"), rows=25)  # of the last 5 rows of 30


def small(**changes) -> Problem:
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "query": 5, "kv": 30, "head_dim": 16}
    return Problem(**(sizes | {"dtype": "fp32", "paging": PAGING} | changes))


def both(*parts):
    return Spec.of("and", *parts)


def wrap_kernel(function) -> Subject:
    subject = make_subject(function, "kernel", "paged")
    assert isinstance(subject, Subject), subject
    return subject


def judge(subject, problem):
    return run_case(subject, Case(problem=problem), device="cpu", brief=True)


SUPPORTED = {
    "full": {},
    "decoding": {"query": 1, "kv": 33, "dtype": "bf16"},
    "bottom right": {"mask": BOTTOM_RIGHT, "scale": 0.7},
    "more rows than keys": {"mask": BOTTOM_RIGHT, "query": 40},
    "window": {"mask": WINDOW, "query": 30},
    "padding": {"mask": PADDING},
    "no keys": {"mask": Spec.of("padding", lengths=[0, 30])},
    "a page": {"mask": Spec.of("padding", lengths=[8, 16]), "query": 1},
    "padding and causal at one length": {
        "mask": both(Spec.of("padding", lengths=[20, 20]), Spec.of("causal")),
        "query": 20,
    },
    "padding and the end of each sequence": {
        "mask": both(
            Spec.of("padding", lengths=[20, 20]), Spec.of("offset", Spec.of("causal"), rows=15)
        ),
    },
    "causal of each sequence": {"mask": BY_LENGTH},
    "a window of each sequence": {"mask": Spec.of("bottom_right", WINDOW, lengths=[30, 13])},
    "a window in decoding": {
        "mask": Spec.of("bottom_right", WINDOW, lengths=[30, 13]),
        "query": 1,
        "dtype": "bf16",
    },
    "fewer keys than rows": {"mask": Spec.of("bottom_right", Spec.of("causal"), lengths=[0, 3])},
    "alibi at one length": {
        "mask": Spec.of("bottom_right", Spec.of("causal"), lengths=[20, 20]),
        "score": Spec.of("offset", Spec.of("alibi"), rows=15),
    },
    "softcap": {"score": Spec.of("softcap", cap=2)},
    "alibi": {"score": Spec.of("alibi"), "mask": Spec.of("causal"), "query": 30},
    "alibi in a cache": {
        "score": Spec.of("chain", Spec.of("softcap", cap=2), LATER_ALIBI),
        "mask": Spec.of("causal_bottom_right"),
    },
    "shared": {"paging": Paging(size=8, seed=1, shared=2), "mask": PADDING},
    "odd pages": {"paging": Paging(size=3, seed=2)},
    "pages of a key": {"paging": Paging(size=1), "query": 2},
    "sink": {"sink": True, "mask": PADDING},
    "fp16": {"dtype": "fp16", "value_dim": 8},
}


@pytest.mark.parametrize("name", SUPPORTED)
def test_correct_kernel_passes(name):
    subject, problem = wrap_kernel(with_kvcache()), small(**SUPPORTED[name])
    record = judge(subject, problem)
    assert record.status == "pass", (record.reason, record.judgement)
    assert subject.run(draw_inputs(problem)).lse is not None


# The SUPPORTED problem that shows each fault.
FAULTS = {
    "transposed": "full",
    "page_size": "full",
    "shared": "full",
    "tail": "padding",
    "beyond": "padding",
    "top_left": "bottom right",
    "longest": "causal of each sequence",
    "window": "a window of each sequence",
}
# A kernel may be aligned wrongly for several rows, or for one row with a window.
ALIGNED = ("causal of each sequence", "a window of each sequence", "a window in decoding")


@pytest.mark.parametrize("name", ALIGNED)
def test_diagonal_of_the_longest_sequence_fails(name):
    record = judge(wrap_kernel(with_kvcache("longest")), small(**SUPPORTED[name]))
    assert record.status == "fail", record.reason


def test_causal_flag_and_window_of_each_sequence_are_passed():
    received = []

    def kernel(q, k, v, cache_seqlens, block_table, causal=False, window_size=(-1, -1)):
        received.append((causal, window_size, cache_seqlens.tolist()))
        return q

    for name in ALIGNED[:2]:
        wrap_kernel(kernel).run(draw_inputs(small(**SUPPORTED[name])))
    assert received == [(True, (-1, -1), [30, 13]), (True, (6, 0), [30, 13])]


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_fails(fault):
    record = judge(wrap_kernel(with_kvcache(fault)), small(**SUPPORTED[FAULTS[fault]]))
    assert record.status == "fail", record.reason


def test_reading_shared_pages_of_another_sequence_fails_when_its_keys_change():
    """The fault is invisible while shared pages are equal; a relation that changes one finds it."""
    subject = wrap_kernel(with_kvcache("shared"))
    problem = small(**SUPPORTED["shared"])
    assert judge(subject, problem).status == "pass"
    # The first sequence reads its own pages in either case.
    for lengths, status in (([30, 12], "pass"), ([12, 30], "fail")):
        hidden = problem.replace(mask=Spec.of("padding", lengths=lengths))
        case = Case(problem=hidden, question="hidden_keys", parameters={"row": 0})
        assert run_case(subject, case, device="cpu").status == status


REFUSED = {
    "lengths differ": (
        {"mask": both(PADDING, BOTTOM_RIGHT)},
        "causal and window_size begin at each sequence's own last key: no such thing is",
    ),
    "slopes of each sequence": (
        {"mask": BY_LENGTH, "score": LATER_ALIBI},
        "alibi_slopes add -slope·|i + kv - query - j|",
    ),
    "top left": (
        {"mask": Spec.of("causal")},
        "neither causal nor window_size makes this mask",
    ),
    "document": (
        {"mask": Spec.of("document", lengths=[10, 20])},
        "neither causal nor window_size makes this mask",
    ),
    "score": ({"score": Spec.of("temperature", temperature=2.0)}, "neither softcap nor"),
    "fp8": ({"dtype": "e4m3"}, "takes no q_descale"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_problem_that_the_convention_cannot_express_is_unsupported(name):
    changes, reason = REFUSED[name]
    assert wrap_kernel(with_kvcache()).unsupported(small(**changes), "cpu").startswith(reason)


def test_reason_names_mask_and_lengths():
    subject = wrap_kernel(with_kvcache())
    reason = subject.unsupported(small(**REFUSED["lengths differ"][0]), "cpu")
    assert reason.endswith(
        "and(padding(lengths=(30,13)), causal_bottom_right), of lengths [30, 13]"
    )


def test_decoding_of_padded_sequences_needs_no_causal_flag():
    """A single row sees all keys of its sequence, causal or not."""
    received = {}

    def kernel(q, k_cache, v_cache, cache_seqlens, block_table, causal=False):
        received.update(causal=causal, lengths=cache_seqlens.tolist())
        return q

    wrap_kernel(kernel).run(draw_inputs(small(query=1, mask=PADDING)))
    assert received == {"causal": False, "lengths": [30, 13]}


@pytest.mark.parametrize(
    ("lengths", "table"),
    [
        ("cache_seqlens", "block_table"),
        ("seq_lens", "block_tables"),
        ("context_lens", "page_table"),
        ("seqlens_k", "page_tables"),
    ],
)
def test_usual_names_of_arguments_are_recognised_in_any_order(lengths, table):
    scope = {"with_kvcache": with_kvcache}
    source = f"""
def kernel(q, k_cache, v_cache, {table}, {lengths}, sm_scale, page_size, max_seq_len):
    assert page_size == k_cache.shape[1]
    assert max_seq_len == 30
    return with_kvcache()(
        q, k_cache, v_cache, cache_seqlens={lengths}, block_table={table}, softmax_scale=sm_scale
    )
"""
    exec(source, scope)  # noqa: S102  # signatures are what is tested
    subject = make_subject(scope["kernel"], "kernel")
    assert subject.convention == "paged"
    assert judge(subject, small(mask=PADDING)).status == "pass"


def test_paged_kernel_is_given_pages_and_others_refuse_them():
    subject = wrap_kernel(with_kvcache())
    plain = small(paging=None)
    assert not subject.concerns(plain)
    assert not subject.concerns(Problem(operation="softmax", query=4))
    record = judge(subject, plain)
    assert (record.status, record.case["problem"]["paging"]["size"]) == ("pass", 16)
    other = make_subject(lambda query, key, value, is_causal=False: query, "other")
    assert not other.concerns(small())
    assert judge(other, small()).reason == "it takes no paged keys and values"


def test_sink_concerns_only_kernels_with_an_argument_for_it():
    def without_sink(q, k_cache, v_cache, cache_seqlens, block_table):
        return q

    assert wrap_kernel(with_kvcache()).concerns(small(sink=True))
    assert not wrap_kernel(without_sink).concerns(small(sink=True))


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ("k_new", "needs 'k_new': keys are in the cache already, and none are written"),
        ("slot_mapping", "needs 'slot_mapping': keys are in the cache already"),
        ("k_scale", "needs 'k_scale': fp8 has one descale a sequence and key head"),
        ("rotary_cos", "needs 'rotary_cos': queries and keys are rotated already"),
        ("dropout", "needs 'dropout': dropout is not checked"),
        ("workspace", "needs 'workspace', which the paged convention does not pass: give"),
    ],
)
def test_required_argument_without_a_value_is_refused(argument, reason):
    scope = {}
    exec(f"def kernel(q, k, v, cache_seqlens, block_table, {argument}): ...", scope)  # noqa: S102
    refusal = make_subject(scope["kernel"], "kernel", "paged")
    assert isinstance(refusal, str)
    assert refusal.startswith(reason)


@pytest.mark.parametrize(
    ("missing", "present"), [("cache_seqlens", "block_table"), ("block_table", "cache_seqlens")]
)
def test_function_without_block_table_or_lengths_is_refused(missing, present):
    scope = {}
    exec(f"def kernel(q, k_cache, v_cache, {present}): ...", scope)  # noqa: S102
    assert make_subject(scope["kernel"], "kernel", "paged") == (
        f"takes no {missing}, which the paged convention passes"
    )


def test_function_that_writes_to_its_cache_fails():
    def kernel(q, k_cache, v_cache, cache_seqlens, block_table):
        out = with_kvcache()(q, k_cache, v_cache, None, None, cache_seqlens, block_table)
        k_cache[0, 0] = 0.0
        return out

    record = judge(wrap_kernel(kernel), small())
    assert (record.status, record.judgement.rule) == ("fail", "mutation")
    assert record.judgement.reason == "wrote to its input k."


@pytest.mark.parametrize("name", ["cache_seqlens", "block_table"])
@pytest.mark.parametrize("copied", [1 << 20, 0])
def test_function_that_writes_to_its_tables_fails(name, copied, monkeypatch):
    """Small tables are copied before the call; larger ones are built again after it."""
    monkeypatch.setattr("attncheck.subjects.conventions.results._COPIED", copied)

    def kernel(q, k_cache, v_cache, cache_seqlens, block_table):
        out = with_kvcache()(q, k_cache, v_cache, None, None, cache_seqlens, block_table)
        {"cache_seqlens": cache_seqlens, "block_table": block_table}[name].add_(1)
        return out

    record = judge(wrap_kernel(kernel), small())
    assert (record.status, record.judgement.rule) == ("fail", "mutation")
    assert record.judgement.reason == f"wrote to its input {name}."


@pytest.mark.parametrize("shared", [0, 1])
def test_correct_kernel_passes_strides_relations(shared):
    problem = small(mask=PADDING, paging=Paging(size=8, shared=shared))
    for question in ("strides_transposed", "strides_packed", "strides_expanded"):
        case = Case(problem=problem, question=question)
        assert run_case(wrap_kernel(with_kvcache()), case, device="cpu").status == "pass"


def test_fp8_kernel_gets_descales_of_sequences_and_heads():
    def kernel(q, k_cache, v_cache, cache_seqlens, block_table, q_descale, k_descale, v_descale):
        scales = (q_descale.repeat_interleave(2, 1)[:, None, :, None], k_descale, v_descale)
        qs = q.float() * scales[0]
        outs = []
        for b in range(len(q)):  # each with its own descales
            caches = (
                cache.float() * scale[b, :, None]
                for cache, scale in zip((k_cache, v_cache), scales[1:], strict=True)
            )
            one = (cache_seqlens[b : b + 1], block_table[b : b + 1])
            outs.append(with_kvcache()(qs[b : b + 1], *caches, None, None, *one))
        return torch.cat(outs).bfloat16()

    problem = small(dtype="e4m3", mask=PADDING, paging=Paging(size=8, shared=1))
    record = judge(wrap_kernel(kernel), problem)
    assert record.status == "pass", (record.reason, record.judgement)


@pytest.mark.parametrize("name", SUPPORTED)
def test_rendered_script_gives_the_same_bits(name):
    function, problem = with_kvcache(), small(**SUPPORTED[name])
    subject, inputs = wrap_kernel(function), draw_inputs(problem)
    text = subject.render(problem)
    assert "attncheck" not in text
    scope = {"torch": torch, "sink": inputs.sink}
    exec(text, scope)  # noqa: S102  # a script is there to be run
    out, lse = scope["call"](function, inputs.q, inputs.k, inputs.v)
    expected = subject.run(inputs)
    assert torch.equal(out, expected.out)
    assert torch.equal(lse, expected.lse.masked_fill(expected.lse == torch.inf, -torch.inf))


def test_questions_of_a_check_use_pages_of_a_size_that_the_kernel_takes():
    def kernel_with_pages(size):
        def kernel(q, k_cache, v_cache, cache_seqlens, block_table):
            if k_cache.shape[1] % size:
                raise ValueError(f"pages of {size}")
            return with_kvcache()(q, k_cache, v_cache, None, None, cache_seqlens, block_table)

        return wrap_kernel(kernel)

    question = next(q for q in check_cases.check_cases("bf16", [16]) if q.name == "padding")
    for size, status in ((16, "pass"), (256, "pass"), (100, "unsupported")):
        record = run_case(kernel_with_pages(size), question.case, device="cpu")
        assert record.status == status, record.reason
        pages = re.search(r"pages of (\d+)", str(Problem.from_json(record.case["problem"])))
        assert pages is not None
        assert status != "pass" or int(pages[1]) % size == 0

"""The paged convention: a right function passes on what can be passed, and each fact can fail."""

import re

import pytest
import torch
from tests.subjects.plain_paged import with_kvcache

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


def small(**changes) -> Problem:
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "query": 5, "kv": 30, "head_dim": 16}
    return Problem(**(sizes | {"dtype": "fp32", "paging": PAGING} | changes))


def both(*parts):
    return Spec.of("and", *parts)


def subject_of(function, convention="paged") -> Subject:
    subject = make_subject(function, "kernel", convention)
    assert isinstance(subject, Subject), subject
    return subject


def record_of(subject, problem):
    return run_case(subject, Case(problem=problem), device="cpu", brief=True)


TAKEN = {
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
    "padding and each one's own end": {
        "mask": both(
            Spec.of("padding", lengths=[20, 20]), Spec.of("offset", Spec.of("causal"), rows=15)
        ),
    },
    "softcap": {"score": Spec.of("softcap", cap=2)},
    "alibi": {"score": Spec.of("alibi"), "mask": Spec.of("causal"), "query": 30},
    "shared": {"paging": Paging(size=8, seed=1, shared=2), "mask": PADDING},
    "odd pages": {"paging": Paging(size=3, seed=2)},
    "pages of a key": {"paging": Paging(size=1), "query": 2},
    "sink": {"sink": True, "mask": PADDING},
    "fp16": {"dtype": "fp16", "value_dim": 8},
}


@pytest.mark.parametrize("name", TAKEN)
def test_a_right_function_passes(name):
    subject, problem = subject_of(with_kvcache()), small(**TAKEN[name])
    record = record_of(subject, problem)
    assert record.status == "pass", (record.reason, record.judgement)
    assert subject.run(draw_inputs(problem)).lse is not None


# Which TAKEN a fault is wrong on.
FAULTS = {
    "transposed": "full",
    "page_size": "full",
    "shared": "full",
    "tail": "padding",
    "beyond": "padding",
    "top_left": "bottom right",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fact_can_fail(fault):
    record = record_of(subject_of(with_kvcache(fault)), small(**TAKEN[FAULTS[fault]]))
    assert record.status == "fail", record.reason


def test_what_is_shared_is_the_same_and_what_is_not_is_found():
    """The fault is right where the pages are, and a relation that changes one finds it."""
    subject = subject_of(with_kvcache("shared"))
    problem = small(**TAKEN["shared"])
    assert record_of(subject, problem).status == "pass"
    for lengths, status in (([30, 12], "pass"), ([12, 30], "fail")):  # the first keeps its own
        hidden = problem.replace(mask=Spec.of("padding", lengths=lengths))
        case = Case(problem=hidden, question="hidden_keys", parameters={"row": 0})
        assert run_case(subject, case, device="cpu").status == status


REFUSED = {
    "lengths differ": (
        {"mask": both(PADDING, BOTTOM_RIGHT)},
        "causal and window_size begin at each sequence's own last key: no such thing is",
    ),
    "top left": ({"mask": Spec.of("causal")}, "no causal flag or window_size is the mask causal"),
    "document": (
        {"mask": Spec.of("document", lengths=[10, 20])},
        "no causal flag or window_size is the mask document",
    ),
    "score": ({"score": Spec.of("temperature", temperature=2.0)}, "neither softcap nor"),
    "fp8": ({"dtype": "e4m3"}, "takes no q_descale"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_say_is_refused_with_a_reason(name):
    changes, reason = REFUSED[name]
    assert subject_of(with_kvcache()).unsupported(small(**changes), "cpu").startswith(reason)


def test_the_reason_names_mask_and_lengths():
    said = subject_of(with_kvcache()).unsupported(small(**REFUSED["lengths differ"][0]), "cpu")
    assert said.endswith("and(padding(lengths=(30,13)), causal_bottom_right), of lengths [30, 13]")


def test_decoding_of_padded_sequences_is_each_ones_own_end():
    """One row that sees all keys of its sequence is what causal means there: no flag is needed."""
    given = {}

    def kernel(q, k_cache, v_cache, cache_seqlens, block_table, causal=False):
        given.update(causal=causal, lengths=cache_seqlens.tolist())
        return q

    subject = subject_of(kernel)
    subject.run(draw_inputs(small(query=1, mask=PADDING)))
    assert given == {"causal": False, "lengths": [30, 13]}


@pytest.mark.parametrize(
    ("lengths", "table"),
    [
        ("cache_seqlens", "block_table"),
        ("seq_lens", "block_tables"),
        ("context_lens", "page_table"),
        ("seqlens_k", "page_tables"),
    ],
)
def test_usual_names_in_any_order(lengths, table):
    right = with_kvcache()
    scope = {"right": right}
    source = f"""
def kernel(q, k_cache, v_cache, {table}, {lengths}, sm_scale, page_size, max_seq_len):
    assert page_size == k_cache.shape[1]
    assert max_seq_len == 30
    return right(
        q, k_cache, v_cache, cache_seqlens={lengths}, block_table={table}, softmax_scale=sm_scale
    )
"""
    exec(source, scope)  # noqa: S102  # signatures are what is tested
    subject = make_subject(scope["kernel"], "kernel")
    assert subject.convention == "paged"
    assert record_of(subject, small(mask=PADDING)).status == "pass"


def test_it_is_asked_about_pages_alone():
    subject = subject_of(with_kvcache())
    plain = small(paging=None)
    assert not subject.concerns(plain)
    assert not subject.concerns(Problem(operation="softmax", query=4))
    record = record_of(subject, plain)
    assert (record.status, record.case["problem"]["paging"]["size"]) == ("pass", 16)
    other = make_subject(lambda query, key, value, is_causal=False: query, "other")
    assert not other.concerns(small())
    assert record_of(other, small()).reason == "it takes no paged keys and values"


def test_a_sink_is_asked_where_there_is_an_argument_for_it():
    assert subject_of(with_kvcache()).concerns(small(sink=True))

    def without(q, k_cache, v_cache, cache_seqlens, block_table):
        return q

    assert not subject_of(without).concerns(small(sink=True))


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
def test_what_it_has_no_value_for_is_refused(argument, reason):
    scope = {}
    exec(f"def kernel(q, k, v, cache_seqlens, block_table, {argument}): ...", scope)  # noqa: S102
    said = make_subject(scope["kernel"], "kernel", "paged")
    assert isinstance(said, str)
    assert said.startswith(reason)


@pytest.mark.parametrize("missing", ["cache_seqlens", "block_table"])
def test_a_table_and_lengths_are_needed(missing):
    there = {"cache_seqlens": "block_table", "block_table": "cache_seqlens"}[missing]
    scope = {}
    exec(f"def kernel(q, k_cache, v_cache, {there}): ...", scope)  # noqa: S102
    assert make_subject(scope["kernel"], "kernel", "paged") == (
        f"takes no {missing}, which the paged convention passes"
    )


def test_a_function_that_writes_to_its_cache_is_found():
    def kernel(q, k_cache, v_cache, cache_seqlens, block_table):
        out = with_kvcache()(q, k_cache, v_cache, None, None, cache_seqlens, block_table)
        k_cache[0, 0] = 0.0
        return out

    record = record_of(subject_of(kernel), small())
    found = record.judgement
    assert (record.status, found.rule) == ("fail", "mutation")
    assert found.reason == "wrote to its input k."


@pytest.mark.parametrize("name", ["cache_seqlens", "block_table"])
@pytest.mark.parametrize("copied", [1 << 20, 0])
def test_a_function_that_writes_to_its_tables_is_found(name, copied, monkeypatch):
    """Whether a copy was made before the call, or it is made once more after it."""
    monkeypatch.setattr("attncheck.subjects.conventions.results._COPIED", copied)

    def kernel(q, k_cache, v_cache, cache_seqlens, block_table):
        out = with_kvcache()(q, k_cache, v_cache, None, None, cache_seqlens, block_table)
        {"cache_seqlens": cache_seqlens, "block_table": block_table}[name].add_(1)
        return out

    record = record_of(subject_of(kernel), small())
    assert (record.status, record.judgement.rule) == ("fail", "mutation")
    assert record.judgement.reason == f"wrote to its input {name}."


@pytest.mark.parametrize("shared", [0, 1])
def test_keys_may_have_any_strides(shared):
    problem = small(mask=PADDING, paging=Paging(size=8, shared=shared))
    for question in ("strides_transposed", "strides_packed", "strides_expanded"):
        case = Case(problem=problem, question=question)
        assert run_case(subject_of(with_kvcache()), case, device="cpu").status == "pass"


def test_fp8_has_descales_of_sequences_and_heads():
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
    record = record_of(subject_of(kernel), problem)
    assert record.status == "pass", (record.reason, record.judgement)


@pytest.mark.parametrize("name", TAKEN)
def test_a_script_gives_the_same_bits(name):
    function, problem = with_kvcache(), small(**TAKEN[name])
    subject, inputs = subject_of(function), draw_inputs(problem)
    text = subject.render(problem)
    assert "attncheck" not in text
    scope = {"torch": torch, "sink": inputs.sink}
    exec(text, scope)  # noqa: S102  # a script is there to be run
    out, lse = scope["call"](function, inputs.q, inputs.k, inputs.v)
    ours = subject.run(inputs)
    assert torch.equal(out, ours.out)
    assert torch.equal(lse, ours.lse.masked_fill(ours.lse == torch.inf, -torch.inf))


def test_check_asks_it_with_pages():
    """The questions of ``attncheck check`` are asked in pages, of a size that the kernel takes."""

    def of_pages(size):
        def kernel(q, k_cache, v_cache, cache_seqlens, block_table):
            if k_cache.shape[1] % size:
                raise ValueError(f"pages of {size}")
            return with_kvcache()(q, k_cache, v_cache, None, None, cache_seqlens, block_table)

        return subject_of(kernel)

    question = next(q for q in check_cases.check_cases("bf16", [16]) if q.name == "padding")
    for size, status in ((16, "pass"), (256, "pass"), (100, "unsupported")):
        subject = of_pages(size)
        record = run_case(subject, question.case, device="cpu")
        assert record.status == status, record.reason
        asked = re.search(r"pages of (\d+)", str(Problem.from_json(record.case["problem"])))
        assert asked is not None
        assert status != "pass" or int(asked[1]) % size == 0

"""Every relation holds for right kernels, bit for bit where they promise it."""

import pytest
from tests.planted_kernels import kernel as planted_kernel

from attncheck.core.mod_spec import Spec
from attncheck.core.paged_layout import Paging
from attncheck.relations import RELATIONS, relation_named
from attncheck.subjects.capabilities.subject import Tiling
from attncheck.subjects.ideal import Ideal

FULL, CAUSAL, BOTTOM_RIGHT = map(Spec.of, ("full", "causal", "causal_bottom_right"))
WINDOW = Spec.of("sliding_window", window=2)
PADDING, EMPTY = Spec.of("padding", lengths=[2, 7]), Spec.of("padding", lengths=[4, 0])
READS_HEAD = Spec.of("expression", text="(kv_idx + h // 2) % 3 <= q_idx")
DOCUMENT = Spec.of("document", lengths=[2, 0, 3, 4])
# Documents of unequal rows and keys: one without rows, one without keys, one without either.
DOCUMENTS = Spec.of("documents", query_lengths=[1, 0, 0, 2, 2], kv_lengths=[2, 1, 0, 0, 4])
CAPPED, ALIBI = Spec.of("softcap", cap=5.0), Spec.of("alibi")
CANVAS = {"canvas": [3, 5], "kernel": [3, 3]}
PROBLEMS = {
    "full": {},
    "causal": {"mask": CAUSAL},
    "window": {"mask": WINDOW, "score": CAPPED},
    "padding": {"mask": PADDING, "score": Spec.of("chain", ALIBI, CAPPED)},
    "rows without keys": {"mask": EMPTY},
    "of heads": {"mask": READS_HEAD},
    "documents": {"mask": DOCUMENT},
    "causal documents": {"mask": Spec.of("and", CAUSAL, DOCUMENTS)},
    "not causal": {"mask": Spec.of("not", CAUSAL)},
    "tiled": {"mask": Spec.of("neighborhood_tiled", **CANVAS, tile=[2, 2]), "query": 17, "kv": 19},
    "morton": {"mask": Spec.of("neighborhood_morton", **CANVAS), "query": 17, "kv": 19},
    "sink": {"mask": CAUSAL, "sink": True},
    "sink of rows without keys": {"mask": EMPTY, "sink": True},
    "sink of documents": {"mask": Spec.of("document", lengths=[2, 6]), "sink": True, "query": 8},
    "pages": {"mask": BOTTOM_RIGHT, "paging": Paging(size=2, shared=1), "sink": True},
}
# The ideal kernel has only one launch, and ``strides_far`` has a test module of its own.
QUESTIONS = [n for n, r in RELATIONS.items() if not r.uses_other_launch and not r.needs_much_memory]
ATTENTION_QUESTIONS = [n for n in QUESTIONS if not n.startswith("softmax_")]


DTYPES = {
    "fp32": "large_logits",
    "tf32": "normal",
    "fp16": "negative_logits",
    "bf16": "outliers",
    "e4m3": "large_logits",
    "e5m2": "normal",
}


def problems(dtype, small):
    """Half of PROBLEMS in this dtype; the next dtype gets the other half."""
    turn = list(DTYPES).index(dtype) % 2
    some = list(PROBLEMS.values())[turn::2]
    return [small(**changes, dtype=dtype, distribution=DTYPES[dtype]) for changes in some]


@pytest.mark.parametrize("question", ATTENTION_QUESTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_ideal_kernel_passes(question, dtype, small, ask, extreme_parameters):
    for problem in problems(dtype, small):
        if relation_named(question).unfit(problem) is None:
            for parameters in extreme_parameters(question, problem):
                assert ask(Ideal(), question, problem, **parameters) is None


def test_every_relation_about_out_applies_to_some_problem(small):
    everything = [problem for dtype in DTYPES for problem in problems(dtype, small)]
    silent = {n for n in ATTENTION_QUESTIONS if all(RELATIONS[n].unfit(p) for p in everything)}
    assert silent == {"zero_loss", "lse_loss", "euler", "group_sums"}


@pytest.mark.parametrize("question", ATTENTION_QUESTIONS)
@pytest.mark.parametrize("kernel", ["triton-flash2", "triton-flash1", "sdpa-math"])
def test_triton_and_torch_kernels_pass(question, kernel, small, ask, extreme_parameters):
    if kernel == "sdpa-math" and question.endswith("_nan"):
        pytest.skip("torch multiplies hidden values by 0")
    for name in ("causal", "rows without keys", "tiled"):
        problem = small(**PROBLEMS[name], dtype="fp16", heads=2, kv_heads=1)
        if relation_named(question).unfit(problem) is None:
            result = ask(kernel, question, problem, **extreme_parameters(question, problem)[-1])
            assert result is None or getattr(result, "kind", "") == "refused"
            return


@pytest.mark.parametrize("question", ["softmax_shift", "softmax_columns", "softmax_rows", "repeat"])
@pytest.mark.parametrize("kernel", ["ideal", "triton-softmax-online", "torch-softmax"])
@pytest.mark.parametrize(
    ("dtype", "distribution"),
    [("fp32", "large_logits"), ("fp16", "normal"), ("bf16", "negative_logits")],
)
def test_softmax_kernels_pass(
    question, kernel, dtype, distribution, softmax, ask, extreme_parameters
):
    problem = softmax(dtype=dtype, distribution=distribution)
    for parameters in extreme_parameters(question, problem):
        assert ask(kernel, question, problem, **parameters) is None


@pytest.mark.parametrize(
    "tiling",
    [
        Tiling(block_query=4, block_kv=2, recurrence="flash1"),
        Tiling(block_query=2, block_kv=2, lazy_rescale=8.0),
        Tiling(block_query=4, block_kv=4, reverse=True),
    ],
)
@pytest.mark.parametrize(
    ("question", "dtypes"),
    [("values_scaled", ("fp32", "fp16")), ("descale", ("e4m3", "e5m2"))],
)
def test_power_of_two_scaling_keeps_bits_in_any_tiling(question, dtypes, tiling, small, ask):
    for dtype in dtypes:
        problem = small(CAUSAL, dtype=dtype, kv=9, query=9, distribution="large_logits", scale=80.0)
        ((name, values),) = relation_named(question).allowed(problem).items()
        for value in values:
            assert ask(Ideal(tiling), question, problem, **{name: value}) is None


@pytest.mark.parametrize("distribution", ["large_logits", "outliers", "negative_logits", "sink"])
@pytest.mark.parametrize("dtype", ["fp32", "tf32", "fp16", "bf16"])
def test_scaled_query_keeps_bits(dtype, distribution, small, ask):
    for scale in (0.0, 30.0, 2.0**-100):
        problem = small(CAUSAL, dtype=dtype, distribution=distribution, score=CAPPED, scale=scale)
        for exponent in relation_named("scaled_query").allowed(problem)["exponent"]:
            assert ask(Ideal(), "scaled_query", problem, exponent=exponent) is None


@pytest.mark.parametrize("cut", [1, 3, 6])
@pytest.mark.parametrize(
    "mask", [BOTTOM_RIGHT, WINDOW, DOCUMENT, Spec.of("prefix_lm", prefix=3), Spec.of("not", FULL)]
)
def test_split_merge_holds_for_any_mask(mask, cut, small, ask):
    assert ask(Ideal(), "split_merge", small(mask, score=CAPPED), cut=cut) is None


@pytest.mark.parametrize("dtype", ["fp32", "tf32", "fp16", "bf16", "e4m3", "e5m2"])
def test_paged_kernel_keeps_bits_for_any_pages(dtype, small, ask, extreme_parameters):
    paging = Paging(size=2, seed=3, shared=1)
    problem = small(Spec.of("padding", lengths=[7, 3]), paging=paging, dtype=dtype)
    for parameters in extreme_parameters("pages", problem):
        assert ask(planted_kernel("Gathering"), "pages", problem, **parameters) is None


def test_flex_passes_neighborhood_order(small, ask):
    problem = small(**PROBLEMS["morton"], dtype="fp16")
    assert ask("flex", "neighborhood_order", problem) is None

"""Every relation finds the planted faults that it is about, and only those."""

import pytest
from tests.planted_kernels import kernel as planted_kernel

from attncheck.core.mod_spec import Spec
from attncheck.core.paged_layout import Paging
from attncheck.relations import RELATIONS, relation_named
from attncheck.relations.relation import Finding
from attncheck.verify.executor import Failure

FULL, CAUSAL, BOTTOM_RIGHT = map(Spec.of, ("full", "causal", "causal_bottom_right"))
WINDOW = Spec.of("sliding_window", window=2)
PADDING, SEEN = Spec.of("padding", lengths=[4, 0]), Spec.of("padding", lengths=[2, 7])
LENGTHS = Spec.of("padding", lengths=[3, 6, 1])
READS_HEAD = Spec.of("expression", text="(kv_idx + h // 2) % 3 <= q_idx")
DOCUMENT = Spec.of("document", lengths=[2, 0, 3, 4])
DOCUMENTS = Spec.of("documents", query_lengths=[1, 0, 0, 2, 2], kv_lengths=[2, 1, 0, 0, 4])
CANVAS = {"canvas": [3, 5], "kernel": [3, 3]}
TILED = {"mask": Spec.of("neighborhood_tiled", **CANVAS, tile=[2, 2]), "query": 17, "kv": 19}
MORTON = {"mask": Spec.of("neighborhood_morton", **CANVAS), "query": 17, "kv": 19}
SQUARE = {"query": 7, "kv": 7}
LARGEST = 2**31 - 1
HIDDEN = ("hidden_keys", "hidden_keys_nan", "hidden_keys_huge")
STRIDES = [n for n in RELATIONS if n.startswith("strides_") and n != "strides_far"]

# Fault, relation, Problem and parameters; None: at least one of the allowed ones must find it.
FAULTS = [
    # what a row does not see
    *(("LongerWindow", question, {"mask": WINDOW}, None) for question in HIDDEN),
    *(("OtherHeadsMask", question, {"mask": READS_HEAD}, None) for question in HIDDEN),
    ("SentinelOf12", "hidden_keys", {"mask": CAUSAL}, None),
    ("HiddenTimesZero", "hidden_keys_nan", {"mask": PADDING}, None),
    ("EmptyRowsMean", "empty_rows", {"mask": PADDING}, {}),
    ("EmptyRowsNan", "empty_rows", {"mask": PADDING}, {}),
    ("LowestLse", "empty_rows", {"mask": PADDING}, {}),
    # results that are known
    ("DividedByAll", "zero_query", {"mask": CAUSAL}, {}),
    ("Base2Lse", "zero_query", {}, {}),
    ("WithoutLastKey", "zero_query", {}, {}),
    ("RowBelow", "zero_query", {"mask": CAUSAL}, {}),
    ("ValueOfNeighbour", "one_hot", {"mask": CAUSAL}, None),
    ("OtherHeadsMask", "one_hot", {"mask": READS_HEAD}, None),
    # linearity and shifts
    ("BiasedFar", "values_scaled", {"mask": CAUSAL}, None),
    ("FixedPoint", "values_scaled", {"mask": CAUSAL}, None),
    ("ValuesClamped", "values_scaled", {"mask": CAUSAL}, None),
    ("BiasedFar", "values_added", {"mask": CAUSAL}, None),
    ("ZeroValuesArePadding", "values_added", {"mask": CAUSAL}, None),
    *(
        (fault, question, {"mask": CAUSAL}, None)
        for fault in ("MaximumFromZero", "NoMaximum", "SentinelOf300")
        for question in ("key_shift", "logit_shift")
    ),
    ("ScoresInBf16", "key_shift", {"mask": CAUSAL}, None),
    ("LseWithoutMod", "logit_shift", {"mask": CAUSAL}, None),
    ("FirstHeadsMod", "logit_shift", {"mask": CAUSAL}, None),
    ("ScaleIgnored", "pad_head_dim", {}, {"columns": 8}),
    ("TraceOfTheFirstColumn", "pad_value_dim", {}, {"columns": 1}),
    # orders
    *(
        (fault, "key_permutation", {"mask": mask}, None)
        for fault in ("LaterKeysWeighMore", "ValueOfNeighbour")
        for mask in (
            FULL,
            Spec.of("padding", lengths=[3, 6]),
            Spec.of("document", lengths=[3, 0, 4]),
        )
    ),
    ("WithoutLastKey", "key_permutation", {}, None),
    ("NextLength", "batch_permutation", {"mask": LENGTHS, "batch": 3}, None),
    ("FirstKeys", "batch_permutation", {"mask": CAUSAL}, None),
    ("CellsRowByRow", "neighborhood_order", TILED, {}),
    ("CellsRowByRow", "neighborhood_order", MORTON, {}),
    ("TilesOfTheOtherSide", "neighborhood_order", TILED, {}),
    # parts
    ("Base2Lse", "split_merge", {}, {"cut": 3}),
    ("LseOfPadding", "split_merge", {}, {"cut": 3}),
    ("LastKeyHidden", "split_merge", {}, {"cut": 3}),
    ("LastKeyHidden", "split_merge", {"mask": CAUSAL, **SQUARE}, {"cut": 1}),
    ("TopLeft", "rectangular", {"mask": CAUSAL, **SQUARE}, {"rows": 2, "last": 1}),
    ("TopLeft", "rectangular", {"mask": BOTTOM_RIGHT, **SQUARE}, {"rows": 2, "last": 1}),
    ("OffsetForgotten", "prefill_rows", {"mask": CAUSAL}, {"rows": 2}),
    ("OffsetForgotten", "prefill_rows", {"mask": WINDOW}, {"rows": 1}),
    ("ScoreOffsetForgotten", "prefill_rows", {"score": Spec.of("alibi")}, {"rows": 1}),
    ("Neighbours", "documents", {"mask": DOCUMENT}, {}),
    ("EmptyRowsMean", "documents", {"mask": DOCUMENT, "query": 9, "kv": 5}, {}),
    ("Neighbours", "documents", {"mask": DOCUMENTS}, {}),
    ("EmptyRowsMean", "documents", {"mask": DOCUMENTS}, {}),
    ("SameLengths", "documents", {"mask": DOCUMENTS}, {}),
    ("FirstLength", "alone_in_batch", {"mask": SEEN}, {"sequence": 1}),
    ("LargeBatch", "alone_in_batch", {"mask": SEEN}, {"sequence": 1}),
    # the same function, the same numbers
    ("WindowShorter", "window_beyond", {"mask": CAUSAL}, {"window": 5}),
    ("OverflowingWindow", "window_beyond", {"mask": CAUSAL}, {"window": LARGEST}),
    ("PrefixLonger", "prefix_zero", {"mask": CAUSAL}, {"prefix": 1}),
    ("PrefixShorter", "prefix_full", {}, {"prefix": 7}),
    ("FixedCap", "softcap_infinite", {}, {"exponent": 24}),
    ("CancellingTanh", "softcap_infinite", {}, {"exponent": 40}),
    ("Interleaved", "gqa_repeat", {}, {}),
    *(("Flat", question, {}, {}) for question in STRIDES),
    ("OffsetIgnored", "strides_offset", {}, {}),
    ("OffsetIgnored", "strides_packed", {}, {}),
    ("WholeVectors", "strides_gapped", {}, {}),
    *(("Leftover", "call_order", {}, {"between": between}) for between in range(3)),
    ("StalePadding", "call_order", {}, {"between": 2}),
]
FAULTS_OF_ONE_DTYPE = [
    ("ScaleIgnored", "scaled_query", {"dtype": "bf16"}, {"exponent": 4}),
    ("ClippedScores", "scaled_query", {"dtype": "bf16"}, {"exponent": 4}),
    ("WithoutQueryDescale", "descale", {"dtype": "e4m3"}, {"tensor": 0}),
    ("WithoutKeyDescale", "descale", {"dtype": "e5m2"}, {"tensor": 1}),
    ("WithoutValueDescale", "descale", {"dtype": "e4m3"}, {"tensor": 2}),
    ("OutThroughBf16", "one_hot", {"dtype": "fp32"}, None),
    ("OutThroughBf16", "one_hot", {"dtype": "fp16"}, None),
    *(
        (fault, question, {"operation": "softmax", "dtype": dtype}, None)
        for dtype in ("fp32", "fp16", "bf16")
        for fault, question in (
            ("SoftmaxWithoutMaximum", "softmax_shift"),
            ("SoftmaxRelativeLse", "softmax_shift"),
            ("LastColumnTwice", "softmax_columns"),
            ("PreviousRow", "softmax_rows"),
        )
    ),
]


def finds_fault(kernel, question, problem, parameters, ask) -> bool:
    """Whether the relation finds the fault with these, or (None) with any allowed parameters."""
    if parameters is not None:
        return isinstance(ask(kernel, question, problem, **parameters), Finding)
    ((name, values),) = relation_named(question).allowed(problem).items()
    results = (ask(kernel, question, problem, **{name: value}) for value in list(values)[::-1])
    return any(isinstance(each, Finding) for each in results)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "e4m3"])
@pytest.mark.parametrize(("fault", "question", "changes", "parameters"), FAULTS)
def test_planted_fault_is_found(fault, question, changes, parameters, dtype, small, ask):
    problem = small(**{"dtype": dtype} | changes)
    assert finds_fault(planted_kernel(fault), question, problem, parameters, ask)


@pytest.mark.parametrize(("fault", "question", "changes", "parameters"), FAULTS_OF_ONE_DTYPE)
def test_fault_of_one_dtype_is_found(fault, question, changes, parameters, small, softmax, ask):
    problem = softmax(**changes) if "operation" in changes else small(**changes)
    assert finds_fault(planted_kernel(fault), question, problem, parameters, ask)


@pytest.mark.parametrize("heads", [(4, 2), (6, 2), (6, 3), (4, 4)])
@pytest.mark.parametrize("fault", ["Interleaved", "NextKeyHead", "LastHeadOff"])
def test_head_permutation_finds_kernel_that_uses_head_position(fault, heads, small, ask):
    problem = small(CAUSAL, heads=heads[0], kv_heads=heads[1], dtype="fp32")
    right = heads[0] == heads[1] and fault == "Interleaved"  # it computes h // group then
    # With two key heads each is the next of the other, in any order.
    blind = heads[1] == 2 and fault == "NextKeyHead"
    found = finds_fault(planted_kernel(fault), "head_permutation", problem, None, ask)
    assert found != (right or blind)


@pytest.mark.parametrize(
    ("fault", "size"),
    [("PagesTransposed", 3), ("PageOneLonger", 3), ("SharedIsTheFirstOnes", 3), ("KeptByPage", 2)],
)
def test_fault_of_pages_is_found(fault, size, small, ask):
    problem = small(Spec.of("padding", lengths=[7, 3]), paging=Paging(size=2, seed=3, shared=1))
    finding = ask(planted_kernel(fault), "pages", problem, size=size, order=1, shared=0)
    assert isinstance(finding, Finding)


@pytest.mark.parametrize(
    ("fault", "question", "changes", "parameters"),
    [
        ("WindowShorter", "window_beyond", {"mask": CAUSAL}, {"window": 6}),
        ("OverflowingWindow", "window_beyond", {"mask": CAUSAL}, {"window": 6}),
        ("PrefixLonger", "prefix_zero", {"mask": CAUSAL}, {"prefix": 0}),
        ("StalePadding", "call_order", {}, {"between": 0}),
        ("StalePadding", "call_order", {}, {"between": 1}),
    ],
)
def test_fault_is_not_found_with_parameters_that_hide_it(
    fault, question, changes, parameters, small, ask
):
    assert ask(planted_kernel(fault), question, small(**changes), **parameters) is None


@pytest.mark.parametrize(
    ("fault", "question", "changes"),
    [
        ("LastHeadOff", "head_permutation", {"mask": CAUSAL, "dtype": "fp32"}),
        ("LargeBatch", "alone_in_batch", {"mask": SEEN}),
        ("PairsShareAMaximum", "softmax_rows", {"operation": "softmax", "kv": 33, "query": 7}),
    ],
)
def test_bits_are_compared_only_if_promised(fault, question, changes, small, softmax, ask):
    problem = softmax(**changes) if "operation" in changes else small(**changes)
    kernel = planted_kernel(fault)
    assert finds_fault(kernel, question, problem, None, ask)
    kernel.promises = frozenset({"repeat", "hidden"})
    assert not finds_fault(kernel, question, problem, None, ask)


def test_finding_names_tensor_and_place(small, ask):
    finding = ask(planted_kernel("LongerWindow"), "hidden_keys", small(WINDOW), row=3)
    assert finding.place[2] == 3
    finding = ask(planted_kernel("Overflowing"), "hidden_keys_huge", small(WINDOW))
    assert finding.tensor == "lse"
    finding = ask(planted_kernel("LargeBatch"), "alone_in_batch", small(PADDING), sequence=0)
    assert (finding.tensor, finding.place, finding.count) == ("lse", (0, 0, 0), 4 * 5)
    finding = ask(planted_kernel("TraceOfTheFirstColumn"), "pad_value_dim", small(), columns=1)
    assert (finding.place[-1], finding.expected, finding.allowed) == (small().value_dim, 0.0, 0.0)
    findings = [
        ask(planted_kernel("WithoutLastKey"), "one_hot", small(), turn=turn) for turn in range(7)
    ]
    assert [each and each.place[2] for each in findings] == [None, None, 4, 3, 2, 1, 0]


def test_split_merge_is_not_compared_without_lse(small, ask):
    failure = ask(planted_kernel("WithoutLse"), "split_merge", small())
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.message) == ("refused", "gives no LSE")


def test_strides_unsupported_by_torch_are_refused(small, ask):
    failure = ask("sdpa-flash", "strides_transposed", small(CAUSAL, value_dim=6))
    assert isinstance(failure, Failure)
    assert failure.kind == "refused"
    assert "stride 1" in failure.message

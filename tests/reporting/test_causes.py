"""Grouping of failures by cause.

Failures that one fault model explains form one group; failures whose explanations contradict stay
in separate groups.
"""

import msgspec
import pytest
from tests.reporting import gate_reports as gates

from attncheck.core.judgement import Judgement, Unclaimed
from attncheck.records.failure_causes import group_by_cause, symptom, unclaimed_findings
from attncheck.records.record import Diagnosis, Explanation
from attncheck.reporting.diagnosis_text import causes_section
from attncheck.reporting.gate_document import gate_document
from attncheck.reporting.gate_verdict import failure_groups
from attncheck.reporting.markdown import markdown_text

WIDER, IGNORED, HALF = "mask-one-key-wider", "mask-ignored", "half-unwritten"


def explained(
    *models, seed=0, tried=153, share=1.0, every=True, kernel="mine", level="named", **parameters
):
    """A failure that each of ``models`` explains: all of it, or with ``every=False`` a part."""
    ranked = tuple(
        Explanation(
            model=name, sentence=name, share=share, explains_all=every, parameters=parameters
        )
        for name in models
    )
    tied = len(ranked) if every else 0
    diagnosis = Diagnosis(ranked=ranked, tied=tied, tried=tried, level=level)
    record = gates.wrong(kernel, problem={"seed": seed})
    return msgspec.structs.replace(record, diagnosis=diagnosis)


def in_forms(*forms, seed=0):
    """A failure that one model explains in each of ``forms``, which are its parameters."""
    record = explained(IGNORED, seed=seed)
    (one,) = record.diagnosis.ranked
    one = msgspec.structs.replace(one, parameters=forms[0], others=forms[1:])
    diagnosis = msgspec.structs.replace(record.diagnosis, ranked=(one,))
    return msgspec.structs.replace(record, diagnosis=diagnosis)


def raised(reason, status="error", seed=0):
    return gates.record("mine", problem={"seed": seed}, status=status, reason=reason)


def grouped(*records):
    """(cause, known, members) of each group."""
    return [(group.cause, group.known, group.members) for group in group_by_cause(records)]


def test_failures_of_one_model_form_one_group():
    assert grouped(*(explained(WIDER, seed=seed) for seed in range(70))) == [
        (WIDER, True, tuple(range(70)))
    ]


def test_failures_of_one_model_are_grouped_by_a_form_that_fits_all_of_them():
    values, both, plain = {"of": "v"}, {"of": "k and v"}, {}
    first, second = in_forms(both, values), in_forms(values, plain)
    assert grouped(first, second) == [(f"{IGNORED} [of v]", True, (0, 1))]
    # One form of a model is enough for the reader, and the best of them comes first.
    assert grouped(first) == [(f"{IGNORED} [of k and v]", True, (0,))]
    assert len(grouped(in_forms(both), in_forms(values, plain))) == 2


def test_out_of_bounds_writes_group_regardless_of_how_the_process_died():
    def wrote(size, died=""):
        reason = f"out-of-bounds write: 64 bytes after a tensor ({size}) that it allocated{died}"
        judgement = Judgement(status="fail", rule="memory", reason=reason)
        return msgspec.structs.replace(gates.wrong("mine"), judgement=judgement)

    tail = "; it was asked bf16 full; without guard bands its process died of SIGABRT"
    assert len(grouped(wrote(64, tail), wrote(77))) == 1
    assert len(grouped(wrote(64, " as well"), wrote(77))) == 2


def test_failures_beyond_the_declared_claims_form_one_group():
    def beyond(what, aspect="head_dims", **changes):
        which = Unclaimed(aspect=aspect, what=what)
        record = gates.wrong("mine", problem={"seed": int(what)})
        return msgspec.structs.replace(record, unclaimed=which, **changes)

    records = [beyond("40"), gates.wrong("mine"), beyond("80"), beyond("77", "lengths")]
    died = beyond("1", "lengths", status="crash", judgement=None)
    groups = grouped(*records, died)
    finding = "wrong, not refused, for head_dim 40, 80; lengths 77: mask the last tile, or refuse"
    assert groups[0] == (f"{finding} them by ValueError", True, (0, 2, 3))
    assert groups[1][2] == (1,)
    assert groups[2][0].startswith("crash, no refusal, for lengths 1: ")
    # A model that explains the failure takes precedence.
    known = msgspec.structs.replace(explained(WIDER), unclaimed=records[0].unclaimed)
    assert grouped(known, explained(WIDER, seed=1)) == [(WIDER, True, (0, 1))]
    # Ways with the same remedy stand together before it.
    crashed = beyond("80", status="crash", judgement=None)
    finding = "wrong, not refused, for head_dim 40; crash, no refusal, for head_dim 80"
    assert unclaimed_findings([records[0], crashed]) == [f"{finding}: refuse them by ValueError"]


@pytest.mark.parametrize(
    ("aspect", "what", "remedy"),
    [
        ("dtypes", ["fp16", "bf16"], "find the mistake with `check --dtype fp16`"),
        ("backward", ["out", "out and LSE"], "mend the backward"),
        ("backward", ["out and LSE"], "add LSE's gradient, or ctx.mark_non_differentiable(lse)"),
    ],
)
def test_wrong_dtype_or_gradient_is_to_be_mended_before_it_is_refused(aspect, what, remedy):
    records = [
        msgspec.structs.replace(gates.wrong("mine"), unclaimed=Unclaimed(aspect=aspect, what=one))
        for one in what
    ]
    (finding,) = unclaimed_findings(records)
    assert finding.endswith(f": {remedy}, or refuse them by ValueError")


def test_known_cause_is_to_be_mended_and_not_searched_for():
    """Where something fails within the claims, causes beyond them are not shown."""
    dtype = Unclaimed(aspect="dtypes", what="fp16")
    known, unknown = (
        msgspec.structs.replace(record, unclaimed=dtype)
        for record in (explained(WIDER), gates.wrong("mine"))
    )
    search = "find the mistake with `check --dtype fp16`"
    within = gates.wrong("mine")
    for records, remedy in [
        ([known], "mend it"),
        ([known, unknown], search),
        ([known, within], search),
    ]:
        (finding,) = unclaimed_findings(records)
        assert finding.endswith(f" for dtype fp16: {remedy}, or refuse them by ValueError")


def test_tie_goes_to_the_model_that_explains_other_failures():
    groups = grouped(explained(IGNORED, WIDER), explained(WIDER, seed=1), explained(WIDER, seed=2))
    assert groups == [(WIDER, True, (0, 1, 2))]


def test_cause_lists_both_models_when_ambiguous():
    assert grouped(explained(IGNORED, WIDER), explained(WIDER, IGNORED, seed=1)) == [
        (f"{IGNORED}, or {WIDER}", True, (0, 1))
    ]


def test_smaller_case_resolves_a_tie_between_models():
    large, small = explained(IGNORED, WIDER), explained(WIDER, seed=1)
    (group,) = group_by_cause([large], {0: [small]})
    assert group.cause == WIDER
    # A smaller case that contradicts is a different failure and must not decide the tie.
    (group,) = group_by_cause([large], {0: [explained(HALF)]})
    assert group.cause == f"{IGNORED}, or {WIDER}"


def test_contradicting_models_form_separate_groups():
    assert grouped(explained(WIDER), explained(HALF, seed=1)) == [
        (WIDER, True, (0,)),
        (HALF, True, (1,)),
    ]


def test_groups_split_by_tensor_but_not_by_tile_size():
    of_k, of_v = (explained("strides-not-taken", tried=0, of=name) for name in "kv")
    assert len(grouped(of_k, of_v)) == 2
    small, large = (explained("last-tile-dropped", tile=tile) for tile in (32, 64))
    assert grouped(small, large) == [("last-tile-dropped", True, (0, 1))]
    assert grouped(small, small) == [("last-tile-dropped [tile 32]", True, (0, 1))]


def test_partially_explained_failure_has_unknown_cause():
    assert grouped(explained(WIDER), explained(HALF, every=False, seed=1)) == [
        (WIDER, True, (0,)),
        ("errors beyond their bound", False, (1,)),
    ]


def of_relation(record, question="tiles"):
    """The same failure, found by the rule "relation"."""
    judgement = msgspec.structs.replace(record.judgement, rule="relation")
    case = {**record.case, "question": question}
    return msgspec.structs.replace(record, judgement=judgement, case=case)


def test_unconfirmed_model_joins_failures_of_two_rules_as_uncertain_cause():
    doubt, unseen = (
        explained(WIDER, HALF, level="unknown"),
        gates.wrong("mine", problem={"seed": 1}),
    )
    records = [doubt, of_relation(explained(WIDER, level="family")), unseen]
    assert grouped(*records) == [(f"perhaps {WIDER}", False, (0, 1, 2))]
    (group,) = group_by_cause(records)
    assert all(map(group.has, (*records, explained(WIDER))))
    assert not group.has(explained(IGNORED))
    assert causes_section([(group, doubt, "")]).title == "no cause is certain of 3 failures"


@pytest.mark.parametrize(
    "other",
    [
        explained(HALF, level="unknown"),
        explained(WIDER, level="unknown", every=False),
        explained(level="unknown"),
        gates.wrong("mine"),
    ],
)
def test_unconfirmed_model_does_not_join_failures_it_does_not_explain(other):
    groups = grouped(explained(WIDER, level="unknown"), of_relation(other))
    assert groups == [
        ("errors beyond their bound", False, (0,)),
        ("two runs that do not agree as they must: tiles", False, (1,)),
    ]


def test_diagnosed_failure_with_another_model_keeps_its_rule_separate():
    doubts = [explained(WIDER, level="unknown"), explained(HALF, level="unknown", seed=1)]
    other = of_relation(explained(WIDER, level="unknown", seed=2))
    assert [members for *_, members in grouped(*doubts, other)] == [(0, 1), (2,)]


def test_confirmed_model_explains_unconfirmed_failures_it_fits():
    doubt = of_relation(explained(WIDER, HALF, level="unknown"))
    assert grouped(explained(WIDER), doubt) == [(WIDER, True, (0, 1))]
    assert len(grouped(explained(IGNORED), doubt)) == 2


def test_undiagnosed_failure_joins_no_model():
    assert [known for _, known, _ in grouped(explained(WIDER), gates.wrong("mine"))] == [
        True,
        False,
    ]


def test_proven_sign_covers_undiagnosed_failures_of_the_same_question():
    sign, unseen = explained("not-the-same-again", tried=0), gates.wrong("mine")
    assert grouped(sign, unseen) == [("not-the-same-again", True, (0, 1))]
    assert len(grouped(sign, explained(WIDER), unseen)) == 3
    probe = gates.wrong("mine", question="decode", rule="structure")
    assert len(grouped(sign, probe)) == 2
    of_v = gates.wrong("mine", problem={"parameters": {"tensor": 2}})
    assert len(grouped(sign, of_v)) == 2


def test_error_symptom_ignores_line_numbers_but_not_words():
    one, other = "RuntimeError: fails at loading K", "RuntimeError: fails at storing O"
    places = (" at mine.py:55 in f", " at my file.py:7 in <lambda>", "")
    assert len({symptom(raised(one + place)) for place in places}) == 1
    assert symptom(raised(one + places[0])) != symptom(raised(other + places[0]))


def test_errors_group_regardless_of_sizes_in_their_message():
    groups = grouped(
        raised("ValueError: tile 64 is too large at mine.py:7 in forward"),
        raised("ValueError: tile 128 is too large at mine.py:12 in backward", seed=1),
        raised("IndexError: 64", seed=2),
        raised("SIGSEGV", "crash", seed=3),
    )
    assert [members for _, _, members in groups] == [(0, 1), (2,), (3,)]
    assert groups[0][0] == "it raises ValueError: tile 64 is too large at mine.py:7 in forward"
    assert all(known for _, known, _ in groups)


@pytest.mark.parametrize(("rule", "known"), [("mutation", True), ("bound", False)])
def test_mutation_is_a_known_cause_by_itself(rule, known):
    record = gates.record("mine", status="fail")
    judgement = Judgement(status="fail", rule=rule, reason="k was written to: 512 bytes differ")
    ((cause, is_known, _),) = grouped(msgspec.structs.replace(record, judgement=judgement))
    assert is_known == known
    assert cause == (judgement.reason if known else "errors beyond their bound")


def test_symptom_depends_on_tensor_and_relation():
    relations = [gates.wrong("mine", rule="relation", question=name) for name in ("a", "b")]
    assert symptom(relations[0]) != symptom(relations[1])
    record = gates.wrong("mine")
    worst = msgspec.structs.replace(record.judgement.worst, tensor="dq")
    judgement = msgspec.structs.replace(record.judgement, worst=worst)
    gradient = msgspec.structs.replace(record, judgement=judgement)
    assert symptom(gradient) != symptom(record)


def test_kernels_never_share_a_cause():
    groups = group_by_cause([explained(WIDER), explained(WIDER, kernel="other")])
    assert [group.kernel for group in groups] == ["mine", "other"]


def test_section_counts_explained_and_unexplained_failures():
    records = [explained(WIDER, seed=seed) for seed in range(3)] + [gates.wrong("mine")]
    groups = [(one, records[one.members[0]], "ask again") for one in group_by_cause(records)]
    section = causes_section(groups)
    assert section.title == "1 cause explains 3 of 4 failures; the other has no certain cause"
    (facts,) = section.blocks
    assert [label for label, _ in facts.pairs] == ["3 failures", "", "", "1 failure", "", ""]
    assert facts.pairs[3][1] == "of unknown cause: errors beyond their bound"
    assert causes_section(groups[1:]).title == "no cause is certain of 1 failure"


def test_gate_page_begins_with_causes_and_smallest_problem():
    original, other = explained(WIDER), explained(WIDER, seed=1)
    small = msgspec.structs.replace(
        gates.wrong("mine", problem={"query": 2, "kv": 3}), diagnosis=original.diagnosis
    )
    contrary = msgspec.structs.replace(
        gates.wrong("mine", problem={"query": 1, "kv": 1}), diagnosis=explained(HALF).diagnosis
    )
    report = gates.report(
        gates.answer(original),
        gates.answer(other),
        gates.answer(small, smallest_of=original.case_id),
        gates.answer(contrary, smallest_of=other.case_id),
    )
    (group,) = failure_groups(report)
    assert group.shown.record == small
    text = markdown_text(gate_document(report))
    assert text.index("1 cause explains 2 of 2 failures") < text.index("by kernel and stage")
    assert "smallest problem: bf16 causal B2 H8/2 Q2 K3" in text
    assert f"attncheck repro {group.id}" in text

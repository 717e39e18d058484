"""Failures by their cause: what explains them all is told once, what contradicts stays apart."""

import msgspec
import pytest
from tests.reporting import gate_reports as made

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
    """A failure that each of ``models`` explains, or ``every`` False: a part of it."""
    ranked = tuple(
        Explanation(
            model=name, sentence=name, share=share, explains_all=every, parameters=parameters
        )
        for name in models
    )
    tied = len(ranked) if every else 0
    diagnosis = Diagnosis(ranked=ranked, tied=tied, tried=tried, level=level)
    record = made.wrong(kernel, asked={"seed": seed})
    return msgspec.structs.replace(record, diagnosis=diagnosis)


def raised(reason, status="error", seed=0):
    return made.record("mine", asked={"seed": seed}, status=status, reason=reason)


def shape(*records):
    """(cause, known, members) of each group."""
    return [(one.cause, one.known, one.members) for one in group_by_cause(records)]


def test_what_one_model_explains_is_one_group():
    assert shape(*(explained(WIDER, seed=seed) for seed in range(70))) == [
        (WIDER, True, tuple(range(70)))
    ]


def test_a_wild_write_is_one_cause_however_its_process_died():
    def wrote(size, died=""):
        reason = f"out-of-bounds write: 64 bytes after a tensor ({size}) that it allocated{died}"
        judgement = Judgement(status="fail", rule="memory", reason=reason)
        return msgspec.structs.replace(made.wrong("mine"), judgement=judgement)

    tail = "; it was asked bf16 full; without guard bands its process died of SIGABRT"
    assert len(shape(wrote(64, tail), wrote(77))) == 1
    assert len(shape(wrote(64, " as well"), wrote(77))) == 2


def test_what_lies_beyond_the_claims_of_a_kernel_is_one_finding():
    def beyond(what, aspect="head_dims", **changes):
        which = Unclaimed(aspect=aspect, what=what)
        record = made.wrong("mine", asked={"seed": int(what)})
        return msgspec.structs.replace(record, unclaimed=which, **changes)

    records = [beyond("40"), made.wrong("mine"), beyond("80"), beyond("77", "lengths")]
    died = beyond("1", "lengths", status="crash", judgement=None)
    groups = shape(*records, died)
    finding = "wrong, not refused, for head_dim 40, 80; lengths 77: mask the last tile, or refuse"
    assert groups[0] == (f"{finding} them by ValueError", True, (0, 2, 3))
    assert groups[1][2] == (1,)
    assert groups[2][0].startswith("crash, no refusal, for lengths 1: ")
    # What a model explains is told by its cause.
    known = msgspec.structs.replace(explained(WIDER), unclaimed=records[0].unclaimed)
    assert shape(known, explained(WIDER, seed=1)) == [(WIDER, True, (0, 1))]
    # Ways with the same remedy stand together before it.
    crashed = beyond("80", status="crash", judgement=None)
    finding = "wrong, not refused, for head_dim 40; crash, no refusal, for head_dim 80"
    assert unclaimed_findings([records[0], crashed]) == [f"{finding}: refuse them by ValueError"]


def test_of_several_that_explain_as_well_the_one_that_explains_the_others_is_taken():
    groups = shape(explained(IGNORED, WIDER), explained(WIDER, seed=1), explained(WIDER, seed=2))
    assert groups == [(WIDER, True, (0, 1, 2))]


def test_where_nobody_can_tell_both_are_named():
    assert shape(explained(IGNORED, WIDER), explained(WIDER, IGNORED, seed=1)) == [
        (f"{IGNORED}, or {WIDER}", True, (0, 1))
    ]


def test_a_smaller_case_tells_them_apart():
    large, small = explained(IGNORED, WIDER), explained(WIDER, seed=1)
    (group,) = group_by_cause([large], {0: [small]})
    assert group.cause == WIDER
    # One that contradicts is another failure, and says nothing of this one.
    (group,) = group_by_cause([large], {0: [explained(HALF)]})
    assert group.cause == f"{IGNORED}, or {WIDER}"


def test_models_that_contradict_stay_apart():
    assert shape(explained(WIDER), explained(HALF, seed=1)) == [
        (WIDER, True, (0,)),
        (HALF, True, (1,)),
    ]


def test_so_do_faults_of_two_tensors_but_not_of_two_sizes():
    of_k, of_v = (explained("strides-not-taken", tried=0, of=name) for name in "kv")
    assert len(shape(of_k, of_v)) == 2
    small, large = (explained("last-tile-dropped", tile=tile) for tile in (32, 64))
    assert shape(small, large) == [("last-tile-dropped", True, (0, 1))]
    assert shape(small, small) == [("last-tile-dropped [tile 32]", True, (0, 1))]


def test_what_a_model_explains_in_part_is_of_unknown_cause():
    assert shape(explained(WIDER), explained(HALF, every=False, seed=1)) == [
        (WIDER, True, (0,)),
        ("rule bound", False, (1,)),
    ]


def of_relation(record, question="tiles"):
    """The same by another rule."""
    judgement = msgspec.structs.replace(record.judgement, rule="relation")
    case = {**record.case, "question": question}
    return msgspec.structs.replace(record, judgement=judgement, case=case)


def test_what_one_model_would_explain_of_two_rules_is_one_group_and_not_known():
    doubt, unseen = explained(WIDER, HALF, level="unknown"), made.wrong("mine", asked={"seed": 1})
    both = [doubt, of_relation(explained(WIDER, level="family")), unseen]
    assert shape(*both) == [(f"perhaps {WIDER}", False, (0, 1, 2))]
    (group,) = group_by_cause(both)
    assert all(map(group.has, (*both, explained(WIDER))))
    assert not group.has(explained(IGNORED))
    assert causes_section([(group, doubt, "")]).title == "no cause is certain of 3 failures"


@pytest.mark.parametrize(
    "other",
    [
        explained(HALF, level="unknown"),
        explained(WIDER, level="unknown", every=False),
        explained(level="unknown"),
        made.wrong("mine"),
    ],
)
def test_what_it_would_not_explain_stays_apart(other):
    groups = shape(explained(WIDER, level="unknown"), of_relation(other))
    assert groups == [("rule bound", False, (0,)), ("rule relation of tiles", False, (1,))]


def test_one_that_was_looked_into_and_is_otherwise_keeps_its_rule_apart():
    doubts = [explained(WIDER, level="unknown"), explained(HALF, level="unknown", seed=1)]
    other = of_relation(explained(WIDER, level="unknown", seed=2))
    assert [members for *_, members in shape(*doubts, other)] == [(0, 1), (2,)]


def test_what_was_confirmed_of_one_failure_explains_another_that_it_fits():
    doubt = of_relation(explained(WIDER, HALF, level="unknown"))
    assert shape(explained(WIDER), doubt) == [(WIDER, True, (0, 1))]
    assert len(shape(explained(IGNORED), doubt)) == 2


def test_a_failure_that_nobody_looked_into_is_explained_by_no_model():
    assert [one[1] for one in shape(explained(WIDER), made.wrong("mine"))] == [True, False]


def test_a_sign_is_shared_by_those_of_its_question_unless_another_cause_is_known():
    sign, unseen = explained("not-the-same-again", tried=0), made.wrong("mine")
    assert shape(sign, unseen) == [("not-the-same-again", True, (0, 1))]
    assert len(shape(sign, explained(WIDER), unseen)) == 3
    probe = made.wrong("mine", question="decode", rule="structure")
    assert len(shape(sign, probe)) == 2
    of_v = made.wrong("mine", asked={"parameters": {"tensor": 2}})
    assert len(shape(sign, of_v)) == 2


def test_a_line_number_tells_no_errors_apart_and_their_words_do():
    one, other = "RuntimeError: fails at loading K", "RuntimeError: fails at storing O"
    places = (" at mine.py:55 in f", " at my file.py:7 in <lambda>", "")
    assert len({symptom(raised(one + place)) for place in places}) == 1
    assert symptom(raised(one + places[0])) != symptom(raised(other + places[0]))


def test_errors_are_alike_whatever_the_sizes_in_their_message():
    groups = shape(
        raised("ValueError: tile 64 is too large at mine.py:7 in forward"),
        raised("ValueError: tile 128 is too large at mine.py:12 in backward", seed=1),
        raised("IndexError: 64", seed=2),
        raised("SIGSEGV", "crash", seed=3),
    )
    assert [members for _, _, members in groups] == [(0, 1), (2,), (3,)]
    assert groups[0][0] == "it raises ValueError: tile 64 is too large at mine.py:7 in forward"
    assert all(known for _, known, _ in groups)


@pytest.mark.parametrize(("rule", "known"), [("mutation", True), ("bound", False)])
def test_a_rule_of_the_call_is_a_cause_by_itself(rule, known):
    record = made.record("mine", status="fail")
    bad = Judgement(status="fail", rule=rule, reason="k was written to: 512 bytes differ")
    ((cause, is_known, _),) = shape(msgspec.structs.replace(record, judgement=bad))
    assert is_known == known
    assert cause == (bad.reason if known else "rule bound")


def test_symptoms_tell_gradients_from_out_and_relations_by_their_question():
    relations = [made.wrong("mine", rule="relation", question=name) for name in ("a", "b")]
    assert symptom(relations[0]) != symptom(relations[1])
    record = made.wrong("mine")
    worst = msgspec.structs.replace(record.judgement.worst, tensor="dq")
    judgement = msgspec.structs.replace(record.judgement, worst=worst)
    gradient = msgspec.structs.replace(record, judgement=judgement)
    assert symptom(gradient) != symptom(record)


def test_kernels_never_share_a_cause():
    groups = group_by_cause([explained(WIDER), explained(WIDER, kernel="other")])
    assert [one.kernel for one in groups] == ["mine", "other"]


def test_the_section_counts_what_is_explained_and_what_is_not():
    records = [explained(WIDER, seed=seed) for seed in range(3)] + [made.wrong("mine")]
    shown = [(one, records[one.members[0]], "ask again") for one in group_by_cause(records)]
    section = causes_section(shown)
    assert section.title == "1 cause explains 3 of 4 failures"
    (facts,) = section.blocks
    assert [label for label, _ in facts.pairs] == ["3 failures", "", "", "1 failure", "", ""]
    assert facts.pairs[3][1] == "of unknown cause: rule bound"
    assert causes_section(shown[1:]).title == "no cause is certain of 1 failure"


def test_a_gate_begins_with_its_causes_and_shows_the_smallest_problem():
    original, other = explained(WIDER), explained(WIDER, seed=1)
    small = msgspec.structs.replace(
        made.wrong("mine", asked={"query": 2, "kv": 3}), diagnosis=original.diagnosis
    )
    contrary = msgspec.structs.replace(
        made.wrong("mine", asked={"query": 1, "kv": 1}), diagnosis=explained(HALF).diagnosis
    )
    report = made.report(
        made.answer(original),
        made.answer(other),
        made.answer(small, smallest_of=original.case_id),
        made.answer(contrary, smallest_of=other.case_id),
    )
    (group,) = failure_groups(report)
    assert group.shown.record == small
    text = markdown_text(gate_document(report))
    assert text.index("1 cause explains 2 of 2 failures") < text.index("by kernel and stage")
    assert "smallest problem: bf16 causal B2 H8/2 Q2 K3" in text
    assert f"attncheck repro {group.id}" in text

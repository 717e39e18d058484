"""Kernels that wrongly keep state from call to call: the questions that call in sequence fail."""

from itertools import count

import pytest
import torch
from tests.verify.call_check_runs import SMALL, require_interpreter
from torch.utils.weak import WeakIdKeyDictionary

from attncheck.cases.check_cases import call_cases
from attncheck.core.mod_spec import Spec
from attncheck.inputs.problem import Case
from attncheck.relations import RELATIONS
from attncheck.subjects.conventions.declarations import make_subject
from attncheck.subjects.load import load_subject
from attncheck.verify.relation_runs import relation_inputs
from attncheck.verify.run_case import run_case

pytestmark = pytest.mark.usefixtures("one_thread")

TILE = 64
STALE = "call 2, after other numbers of the same shapes, returns the result of an earlier call"


def right(query, key, value):
    scores = query.float() @ key.float().mT * query.shape[-1] ** -0.5
    return (scores.softmax(-1) @ value.float()).to(query.dtype)


def cached_by(key_of):
    """A kernel that returns the result of its first call with a key in every later call with it."""
    kept = {}

    def attention(query, key, value):
        place = key_of(query, key, value)
        if place not in kept:
            kept[place] = right(query, key, value)
        return kept[place].clone()

    return attention


def address(*tensors):
    return tuple((each.data_ptr(), each.shape) for each in tensors)


def identity(*tensors):
    return tuple(map(id, tensors))


def cached_by_tensor():
    """A kernel that caches its result for as long as the query tensor is alive."""
    kept = WeakIdKeyDictionary()

    def attention(query, key, value):
        if query not in kept:
            kept[query] = right(query, key, value)
        return kept[query].clone()

    return attention


def cached_by_heads_inside(key_of):
    """``cached_by`` with the layout of ``flash_attn_func``: heads after the sequence."""
    kept = {}

    def attention(q, k, v, softmax_scale=None):
        place = key_of(q, k, v)
        if place not in kept:
            kept[place] = right(*(each.transpose(1, 2) for each in (q, k, v)))
        return kept[place].transpose(1, 2).contiguous()

    return attention


def changed_by_call_number(change):
    """A kernel that returns ``change(out, number of the call with this shape, buffer kept for this
    shape)``."""
    numbers, memory = {}, {}

    def attention(query, key, value):
        out = right(query, key, value)
        own = memory.setdefault(out.shape, torch.zeros(out.shape, dtype=out.dtype))
        return change(out, next(numbers.setdefault(out.shape, count())), own)

    return attention


def stale_tail():
    """A kernel that copies its keys to a buffer as large as the largest call, and reads the last
    tile of it in full: a shorter call reads keys of a longer one."""
    kept = {}

    def attention(query, key, value):
        length = key.shape[2]
        whole = []
        for name, tensor in (("k", key), ("v", value)):
            place = name, tensor.shape[1]
            old = kept.get(place, tensor)
            kept[place] = torch.cat([tensor, old[:, :, length:]], 2)
            whole.append(kept[place][:, :, : -(-length // TILE) * TILE])
        return right(query, *whole)

    return attention


FAULTS = {
    "by address": (lambda: cached_by(address), "calls-alike", "call 2, after other numbers"),
    "by address, heads inside": (lambda: cached_by_heads_inside(address), "calls-alike", STALE),
    "by identity": (lambda: cached_by(identity), "calls-alike", STALE),
    "by identity, heads inside": (lambda: cached_by_heads_inside(identity), "calls-alike", STALE),
    "by the tensor": (cached_by_tensor, "calls-alike", STALE),
    "by shape": (
        lambda: cached_by(lambda *tensors: tuple(each.shape for each in tensors)),
        "calls-alike",
        f"{STALE} on the same tensors: out[",
    ),
    "scratch adds up": (
        lambda: changed_by_call_number(lambda out, _, own: own.add_(out).clone()),
        "calls-alike",
        "call 3, after other numbers of the same shapes, is call 1 again: out[",
    ),
    "counter not set back": (
        lambda: changed_by_call_number(lambda out, number, own: own.clone() if number % 2 else out),
        "calls-alike",
        "call 2, after other numbers of the same shapes, is not exact",
    ),
    "right in its first call": (
        lambda: changed_by_call_number(lambda out, number, _: out if number == 0 else 1.5 * out),
        "calls-alike",
        "call 3, after other numbers",
    ),
    "one output buffer": (
        lambda: changed_by_call_number(lambda out, _, own: own.copy_(out)),
        "calls-alike",
        "call 2 of 3: writes over what call 1 had returned: out[0, 0, 0, 0] is ",
    ),
    "stale tail": (stale_tail, "calls-shorter", "call 2, after a longer one (B1 H1 Q74 K106 D64)"),
}


def first_failure(kernel):
    subject = make_subject(kernel, "planted")
    for question in call_cases("bf16"):
        record = run_case(subject, question.case, device="cpu", variant=question.name)
        if record.status != "pass":
            return record
    return None


@pytest.mark.parametrize("fault", FAULTS)
def test_state_kept_between_calls_fails(fault):
    plant, question, reason = FAULTS[fault]
    record = first_failure(plant())
    assert record is not None
    assert (record.status, record.variant) == ("fail", question), record.reason
    assert reason in record.judgement.reason


@pytest.mark.parametrize(
    "kernel",
    [
        right,
        cached_by(lambda *tensors: tuple(each.float().sum().item() for each in tensors)),
        lambda query, key, value: 1.5 * right(query, key, value),
    ],
    ids=["stateless", "cached by contents", "wrong in every call"],
)
def test_kernel_whose_result_does_not_depend_on_earlier_calls_passes(kernel):
    """Even a wrong kernel passes: these questions judge the order of calls alone."""
    assert first_failure(kernel) is None


def test_unwritten_output_differs_when_the_first_call_is_repeated():
    def unwritten(query, key, value):
        out = torch.empty_like(query)
        out[:, :, 1:] = right(query, key, value)[:, :, 1:]
        return out

    record = first_failure(unwritten)
    assert record.variant == "calls-alike"
    assert "is call 1 again: out[0, 0, 0, 0]" in record.judgement.reason


def test_kernel_that_takes_multiples_of_128_is_called_with_256_and_128():
    def takes(problem):
        return problem.query == problem.kv and problem.query % 128 == 0

    problem = call_cases("bf16", takes=takes)[-1].case.problem
    assert (problem.query, problem.kv) == (256, 256)
    case = Case(problem=problem, question="call_order", parameters={"between": 1})
    lengths = [one.problem.query for one in relation_inputs(case, "cpu")]
    assert lengths == [256, 128, 256]


def test_kernel_that_takes_one_length_gets_no_question_of_shorter_calls():
    names = [one.name for one in call_cases("bf16", takes=lambda problem: problem.query == 64)]
    assert names == ["state", "guards", "calls-alike"]


def test_relations_that_call_in_sequence():
    assert [name for name, each in RELATIONS.items() if each.consecutive_calls] == [
        "call_order",
        "mask_order",
    ]


@pytest.mark.parametrize("question", ["call_order", "guards"])
@pytest.mark.parametrize("score", ["bias", "alibi", "relative_bias"])
def test_triton_kernel_with_score_mod_passes_call_checks(score, question):
    """The checks watch memory and calls while the kernel traces its score mod: tracing under them
    must not change the mod."""
    require_interpreter("triton-flash2")
    numbers = {
        "bias": {"seed": 0, "per_batch": 1, "per_head": 1},
        "relative_bias": {"distance": 4, "seed": 0},
    }.get(score, {})
    problem = SMALL.replace(score=Spec.of(score, **numbers), dtype="fp16")
    parameters = {"between": 0} if question == "call_order" else {}
    case = Case(problem=problem, question=question, parameters=parameters)
    record = run_case(load_subject("triton-flash2"), case, device="cpu")
    assert record.status == "pass", (record.reason, record.judgement)

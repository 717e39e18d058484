"""A fault in each backward, planted in a copy of its source, is noticed."""

import pytest
from tests.oracles import gradients_by_torch as reference

from attncheck.core.mod_spec import Spec
from attncheck.oracles import backward_recurrences, streaming_gradients
from attncheck.oracles.float64_numbers import Float64
from attncheck.oracles.streaming_forward import Blocks

Definition, tiny, allowed_of = reference.Definition, reference.tiny, reference.allowed
SMALL = Blocks(rows=24, query=4, query_most=8, kv=8, cell=4)

FAULTS = {
    # what is wrong: module, right, wrong
    "dense: delta is missing": ("dense", "(dp + rows)", "dp"),
    "dense: f' is missing": ("dense", " * tile.slopes, 0.0)\n    by", ", 0.0)\n    by"),
    "dense: dk without the scale": ("dense", "q, by_key) * problem.scale", "q, by_key)"),
    "dense: dq without the scale": ("dense", "k, attended) * problem.scale", "k, attended)"),
    "dense: one head of a group": (
        "dense",
        "numbers.sum_heads(array, problem.group)",
        "array[:, :: problem.group]",
    ),
    "dense: dLSE is ignored": ("dense", "dout, dlse, attended", "dout, dlse * 0.0, attended"),
    "dense: dv of dk's weights": (
        "dense",
        "numbers.transpose(weights), d",
        "numbers.transpose(dx), d",
    ),
    "flash2: delta is missing": ("flash2", "(dp + self.terms)", "dp"),
    "flash2: f' is missing": ("flash2", " * tile.slopes, 0.0)\n        s", ", 0.0)\n        s"),
    "flash2: dk without the scale": ("flash2", "dk * problem.scale, dv", "dk, dv"),
    "flash2: one head of a group": (
        "flash2",
        "numbers.sum_heads(numbers.join_rows(parts), problem.group)",
        "numbers.join_rows(parts)[:, :: problem.group]",
    ),
    "flash2: dLSE is ignored": (
        "flash2",
        "terms = row_terms(numbers, result.out, dout, dlse, alive)",
        "terms = row_terms(numbers, result.out, dout, dlse * 0.0, alive)",
    ),
    "flash2: dq of the last key block": ("flash2", "self.dq + numbers", "numbers"),
    "flash2: dead rows in dsink": ("flash2", "dout, dlse, attends)", "dout * 2.0, dlse, attends)"),
    "streaming: delta is missing": (
        "streaming",
        "self.dlse - (dout * out).sum(",
        "self.dlse - (0 * out).sum(",
    ),
    "streaming: dLSE is ignored": ("streaming", "self.terms = self.dlse - ", "self.terms = -"),
    "streaming: f' is missing": ("streaming", "mul_(slopes)", "mul_(1.0)"),
    "streaming: dk without the scale": (
        "streaming",
        "self.dk.mT * self.problem.scale",
        "self.dk.mT",
    ),
    "streaming: dq without the scale": (
        "streaming",
        "self.dq.mul_(self.sums.problem.scale)",
        "self.dq",
    ),
    "streaming: causal ignored": (
        "streaming",
        "masked_fill_(~self.visible(run), -math.inf)",
        "mul_(1.0)",
    ),
    "streaming: dsink without LSE": ("streaming", "(logits - self.lse).exp()", "logits.exp()"),
    "parts: dsink of one sequence": ("parts", "numbers.sum_batch(", "(lambda x: x[:1])("),
}


@pytest.mark.parametrize(("room", "right", "wrong"), FAULTS.values(), ids=FAULTS.keys())
def test_a_planted_fault_is_noticed(room, right, wrong, allowance, planted):
    score = Spec.of("softcap", cap=1.5)
    inputs = tiny(mask=Spec.of("causal"), score=score, sink=True, query=11)
    exact, allowed = Definition.of(inputs).gradients(inputs), allowed_of(inputs, allowance)
    module = streaming_gradients if room == "streaming" else backward_recurrences
    wrong_room = planted(module, right, wrong)
    numbers = Float64()
    if room == "streaming":
        found = wrong_room.streaming_backward(inputs, blocks=SMALL)
    elif room == "flash2":
        found = wrong_room.flash2_backward(numbers, inputs, block_query=4, block_kv=3)
        found = found.rounded(numbers)
    else:
        found = wrong_room.dense_backward(numbers, inputs).rounded(numbers)
    assert allowed.misses(found, exact)


BOUNDED_FAULTS = {
    "without exp(-LSE)": ("self.loss *= self.lse.neg().exp_()", "pass"),
    "a hidden key": ("mul_(self.visible(run))  #", "mul_(1.0)  #"),
    "dv with LSE twice": ("(self.dout.mT, weights)", "((self.dout * self.lse.exp()).mT, weights)"),
}


@pytest.mark.parametrize(("right", "wrong"), BOUNDED_FAULTS.values(), ids=BOUNDED_FAULTS.keys())
def test_a_fault_of_bounded_scores_is_noticed(right, wrong, allowance, planted):
    inputs = tiny(mask=Spec.of("causal"))
    exact, allowed = Definition.of(inputs).gradients(inputs), allowed_of(inputs, allowance)
    room = planted(streaming_gradients, right, wrong)
    assert allowed.misses(room.streaming_backward(inputs, blocks=SMALL), exact)

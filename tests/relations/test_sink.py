"""Relations of Problems with a sink: each holds of a right kernel, or says why it says nothing."""

import dataclasses
import math

import pytest
import torch

from attncheck.core.mod_spec import Spec
from attncheck.core.outputs import Outputs
from attncheck.core.paged_layout import Paging
from attncheck.inputs import input_tensors as inputs_room
from attncheck.inputs.problem import Case, Problem
from attncheck.relations import RELATIONS
from attncheck.relations.excerpt import Excerpt
from attncheck.subjects.ideal import Ideal
from attncheck.verify.relation_runs import check_relation

SMALL = {"batch": 2, "heads": 6, "kv_heads": 2, "query": 6, "kv": 8, "head_dim": 8, "value_dim": 4}
PADDED = Spec.of("padding", lengths=[5, 0])
PROBLEMS = {
    "full": {},
    "causal": {"mask": Spec.of("causal")},
    "causal e4m3": {"mask": Spec.of("causal"), "dtype": "e4m3"},
    "causal fp16": {"mask": Spec.of("causal"), "dtype": "fp16", "distribution": "large_logits"},
    "some rows see nothing": {"mask": PADDED, "dtype": "fp32"},
    "documents": {"mask": Spec.of("document", lengths=[3, 4, 1])},
    "a document without keys": {"mask": Spec.of("document", lengths=[2, 6]), "query": 8, "kv": 2},
    "softcap": {"score": Spec.of("softcap", cap=5.0)},
    "pages": {"paging": Paging(size=2, shared=1), "mask": Spec.of("causal_bottom_right")},
}


def problem(name: str = "full") -> Problem:
    return Problem(**(SMALL | {"dtype": "bf16", "sink": True} | PROBLEMS[name]))


def asked(kernel: Ideal, question: str, of: Problem, place: int = -1):
    relation = RELATIONS[question]
    parameters = {name: values[place] for name, values in relation.allowed(of).items()}
    return check_relation(kernel, Case(problem=of, question=question, parameters=parameters))


def test_excerpts_keep_the_sink_and_not_what_is_shared_no_more():
    of = problem("pages")
    whole = inputs_room.draw_inputs(of)
    later = Excerpt.of(of, keys=range(2, of.kv)).inputs(whole)
    assert torch.equal(later.sink, whole.sink)
    assert later.problem.paging == Paging(size=2)
    first = Excerpt.of(of, sequences=range(1), rows=range(3)).inputs(whole)
    assert first.problem.paging == of.paging


FAULTS = {
    "of the first head": lambda _, sink: sink[:1].expand_as(sink).contiguous(),
    "by the place of the head": lambda p, sink: sink + torch.arange(p.heads),
    "of the batch": lambda p, sink: sink + math.log(p.batch),
    "per row": lambda p, sink: sink + math.log(p.query),
    "per key": lambda p, sink: sink + math.log(p.kv),
}


class OtherSinks(Ideal):
    """An ideal kernel that reads its sinks otherwise, or leaves them out of LSE."""

    name = "planted"

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def prepare(self, inputs):
        right = Ideal().run(inputs)
        if inputs.sink is None:
            return lambda: right
        if self.fault in FAULTS:
            sink = FAULTS[self.fault](inputs.problem, inputs.sink)
            return Ideal().prepare(inputs.replace(sink=sink))
        plain = inputs.problem.replace(sink=False)
        without = Ideal().run(dataclasses.replace(inputs, problem=plain, sink=None))
        return lambda: Outputs(right.out, without.lse)


@pytest.mark.parametrize(
    ("fault", "question", "name"),
    [
        ("of the first head", "head_permutation", "full"),
        ("by the place of the head", "head_permutation", "full"),
        ("of the batch", "alone_in_batch", "full"),
        ("per row", "rectangular", "causal"),
        ("per key", "split_merge", "full"),
        ("not in LSE", "split_merge", "full"),
        ("not in LSE", "documents", "a document without keys"),
        ("per key", "documents", "documents"),
    ],
)
def test_relations_catch_faults_of_the_sink(fault, question, name):
    assert asked(OtherSinks(fault), question, problem(name)) is not None

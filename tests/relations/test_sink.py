"""Relations on Problems with a sink: excerpts keep it, and faults in its use are found."""

import dataclasses
import math

import pytest
import torch

from attncheck.core.mod_spec import Spec
from attncheck.core.outputs import Outputs
from attncheck.core.paged_layout import Paging
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Case, Problem
from attncheck.relations import RELATIONS
from attncheck.relations.excerpt import Excerpt
from attncheck.subjects.ideal import Ideal
from attncheck.verify.relation_runs import check_relation

SMALL = {"batch": 2, "heads": 6, "kv_heads": 2, "query": 6, "kv": 8, "head_dim": 8, "value_dim": 4}
PROBLEMS = {
    "full": {},
    "causal": {"mask": Spec.of("causal")},
    "documents": {"mask": Spec.of("document", lengths=[3, 4, 1])},
    "a document without keys": {"mask": Spec.of("document", lengths=[2, 6]), "query": 8, "kv": 2},
    "pages": {"paging": Paging(size=2, shared=1), "mask": Spec.of("causal_bottom_right")},
}


def make_problem(name: str = "full") -> Problem:
    return Problem(**(SMALL | {"dtype": "bf16", "sink": True} | PROBLEMS[name]))


def test_excerpt_keeps_sink_and_drops_page_sharing_it_cuts():
    problem = make_problem("pages")
    whole = draw_inputs(problem)
    later = Excerpt.of(problem, keys=range(2, problem.kv)).inputs(whole)
    assert torch.equal(later.sink, whole.sink)
    assert later.problem.paging == Paging(size=2)
    first = Excerpt.of(problem, sequences=range(1), rows=range(3)).inputs(whole)
    assert first.problem.paging == problem.paging


FAULTS = {
    "of the first head": lambda _, sink: sink[:1].expand_as(sink).contiguous(),
    "by the place of the head": lambda p, sink: sink + torch.arange(p.heads),
    "of the batch": lambda p, sink: sink + math.log(p.batch),
    "per row": lambda p, sink: sink + math.log(p.query),
    "per key": lambda p, sink: sink + math.log(p.kv),
}


class OtherSinks(Ideal):
    """An ideal kernel that misreads its sinks, or leaves them out of LSE."""

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
def test_relation_finds_fault_of_sink(fault, question, name):
    problem = make_problem(name)
    largest = {key: values[-1] for key, values in RELATIONS[question].allowed(problem).items()}
    case = Case(problem=problem, question=question, parameters=largest)
    assert check_relation(OtherSinks(fault), case) is not None

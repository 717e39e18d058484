"""A fault in each recurrence, planted in a copy of its source, is noticed in either numbers."""

import pytest

from attncheck import oracles
from attncheck.core.mod_spec import Spec
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Problem
from attncheck.oracles import forward_recurrences, recurrence_steps
from attncheck.oracles.float64_numbers import Float64
from attncheck.oracles.forward_recurrences import dense_attention
from attncheck.oracles.mp_numbers import Mp

FAULTS = {
    # what is wrong: module, right, wrong
    "naive: not divided": (
        "naive",
        "return exponentials / numbers.select(alive, total, 1.0), lse\n\n\ndef safe",
        "return exponentials, lse\n\n\ndef safe",
    ),
    "safe: LSE without the maximum": (
        "safe",
        "largest + numbers.log(total), -math.inf",
        "numbers.log(total), -math.inf",
    ),
    "online: d is not rescaled": (
        "online",
        "total * numbers.exp(largest - reference) + numbers",
        "total + numbers",
    ),
    "online: the last column is left out": (
        "online",
        "range(attended.shape[-1])",
        "range(attended.shape[-1] - 1)",
    ),
    "flash1: O is not rescaled": ("flash1", "self.total * rescale * self.out", "self.out"),
    "flash1: O without l": ("flash1", "self.total * rescale * self.out", "rescale * self.out"),
    "flash1: l is not rescaled": ("flash1", "total = rescale * self.total", "total = self.total"),
    "flash1: the block's O is not": ("flash1", "rescale_block * weighed", "weighed"),
    "flash1: the block's l is not": ("flash1", "rescale_block * numbers.rowsum", "numbers.rowsum"),
    "flash1: O is not divided": ("flash1", "rescale_block * weighed) / divisor", "weighed)"),
    "flash2: O is not rescaled": ("flash2", "out = rescale * out", "out = out"),
    "flash2: l is not rescaled": ("flash2", "total = rescale * total", "total = total"),
    "flash2: O is not divided": (
        "flash2",
        "return out / numbers.select(alive, total, 1.0), lse",
        "return out, lse",
    ),
    "split: merged without weights": (
        "split in 3",
        "out = out + weight * result.out",
        "out = out + result.out",
    ),
    "split: the first has weight 1": ("split in 3", "out = total * first.out", "out = first.out"),
    "split: one is dropped": (
        "split in 3",
        "first, *others = results",
        "first, *others, _ = results",
    ),
    "split: an empty one counts": (
        "split in 11",
        "numbers.full((*shape, 1), -math.inf)",
        "numbers.full((*shape, 1), 0.0)",
    ),
    "split: keys are counted from its own first": (
        "split in 3",
        "scores(q, mine, rows, keys)",
        "scores(q, mine, rows, range(len(keys)))",
    ),
    "split: the last key is left out": ("split in 3", "cuts = [keys * ", "cuts = [(keys - 1) * "),
    "split: O is not divided": (
        "split in 3",
        "Result(out / numbers.select(alive, total, 1.0), lse)",
        "Result(out, lse)",
    ),
    "split: LSE without the largest": (
        "split in 3",
        "reference + numbers.log(total), -math.inf",
        "numbers.log(total), -math.inf",
    ),
}


def _recurrence(name, module):
    """The one called ``name``, from ``module``; blocks of 4 and 3."""
    if name.startswith("split"):
        splits = int(name.removeprefix("split in "))
        return lambda numbers, inputs: module.split_forward(numbers, inputs, splits=splits)
    if name.startswith("flash"):
        forward = getattr(module, f"{name}_forward")
        return lambda numbers, inputs: forward(numbers, inputs, block_query=4, block_kv=3)
    softmax = getattr(module, name)
    return lambda numbers, inputs: dense_attention(numbers, inputs, softmax)


def _inputs():
    problem = Problem(heads=2, kv_heads=1, query=8, kv=8, head_dim=4, mask=Spec.of("causal"))
    return draw_inputs(problem)


def _module(name):
    of_blocks = name.startswith(("flash", "split"))
    return forward_recurrences if of_blocks else recurrence_steps


@pytest.mark.parametrize(("name", "right", "wrong"), FAULTS.values(), ids=FAULTS.keys())
@pytest.mark.parametrize("digits", [None, 30])
def test_a_planted_fault_is_noticed(name, right, wrong, digits, allowance, planted):
    inputs = _inputs()
    numbers = Mp(digits) if digits else Float64()
    bound, truth = allowance(inputs), oracles.RECURRENCES[oracles.REFERENCE](numbers, inputs)

    def misses(module):
        found = _recurrence(name, module)(numbers, inputs)
        if digits:
            return bound.misses_in_many_digits(numbers, found, truth)
        return bound.misses(found.rounded(numbers), truth.rounded(numbers))

    if name != oracles.REFERENCE:
        assert not misses(_module(name))
    assert misses(planted(_module(name), right, wrong))

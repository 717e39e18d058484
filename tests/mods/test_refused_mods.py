"""Mods that cannot be traced, or fail at an index, are refused with reason, line and advice."""

# ruff: noqa: S311  # mods that draw random numbers are under test

import functools
import gc
import math
import random
import re
import warnings

import pytest
import torch
from tests.messages import one_line

from attncheck.core.errors import TraceError
from attncheck.core.mod_spec import Dimensions
from attncheck.mods.trace import count_disagreements, trace_mask, trace_score

DIMENSIONS = Dimensions(batch=2, heads=3, query=37, kv=50)
BIAS = torch.arange(12, dtype=torch.float32).reshape(3, 4)
TENTHS = torch.full((3,), 0.1, dtype=torch.float64)
BYTES = torch.arange(3, dtype=torch.uint8)
HALVES = torch.arange(3, dtype=torch.float16)
COMPLEX = torch.zeros(3, dtype=torch.complex64)
SEEN = torch.zeros(3)


def in_place(s, b, h, q, k):
    s += 1.0
    return s


def counting(s, b, h, q, k):
    SEEN[0] = 1.0
    return s + SEEN[h]


def summed_over_keys(s, b, h, q, k):
    for key in range(k):
        s = s + key
    return s


ONE_NUMBER = "it must give one tensor of real numbers, as score.dtype, one value an index."
VALUE = "use torch.where for a choice, torch's functions in place of Python's."

REFUSED = {
    "bits of another dtype": (
        lambda s, b, h, q, k: s + q.view(torch.float64),
        "it reads bits as another dtype at test_refused_mods.py:",
    ),
    "power of a tensor": (
        lambda s, b, h, q, k: s + torch.tensor([2, 3]) ** q,
        "it raises to a computed power at test_refused_mods.py:",
    ),
    "alpha by its place": (
        lambda s, b, h, q, k: torch.rsub(s, 1.0, alpha=2),
        "it uses rsub with alpha at test_refused_mods.py:",
    ),
    # Outside the vocabulary.
    "operation": (
        lambda s, b, h, q, k: s.cumsum(0),
        "operation aten.cumsum is not supported at test_refused_mods.py:",
    ),
    "reduction": (lambda s, b, h, q, k: s - s.max(), "operation aten.max is not supported at "),
    "erf": (lambda s, b, h, q, k: torch.erf(s), "operation aten.erf is not supported at "),
    "any": (lambda s, b, h, q, k: s * (q > k).any(), "operation aten.any is not supported at "),
    "part of an index": (
        lambda s, b, h, q, k: s + BIAS[h].sum(),
        "1 of the 2 dimensions of a tensor at ",
    ),
    "whole tensor": (lambda s, b, h, q, k: s + BIAS, "a whole tensor of shape (3, 4) at "),
    "computed table": (lambda s, b, h, q, k: s[q], "it indexes a computed tensor at "),
    "boolean index": (lambda s, b, h, q, k: s + SEEN[:1][q > k], "with truth values at "),
    "power": (lambda s, b, h, q, k: s**2.5, "it raises to the power 2.5 at "),
    "large power": (lambda s, b, h, q, k: s**4, "it may raise to -2, -1, -0.5, 0.5, 1, 2, 3."),
    "computed power": (lambda s, b, h, q, k: s**q, "use torch.exp2(x) for 2 ** x"),
    "alpha": (lambda s, b, h, q, k: torch.add(s, q, alpha=3), "it uses add with alpha at "),
    "approximate": (
        lambda s, b, h, q, k: s.masked_fill(q > k, 1.0).to(torch.float16),
        "it casts to float16 at ",
    ),
    "fill with another kind": (
        lambda s, b, h, q, k: s + (q > k).masked_fill(q > 3, 2),
        "it fills a tensor with numbers of another kind at ",
    ),
    "abs of truth": (lambda s, b, h, q, k: s + torch.sign(q > k), "sign on truth values at "),
    # Values that a kernel would not have.
    "float64": (
        lambda s, b, h, q, k: s + TENTHS[h],
        "a torch.float64 tensor with 3 elements that are no fp32 number, as 0.1 at ",
    ),
    "complex": (lambda s, b, h, q, k: s + COMPLEX[h].real, "a torch.complex64 tensor at "),
    "bytes": (lambda s, b, h, q, k: s + (BYTES[h] - BYTES[b]), "it computes sub in uint8 at "),
    "halves": (lambda s, b, h, q, k: s + HALVES[h] * 0.1, "it computes mul in float16 at "),
    # Control flow and side effects.
    "branch": (lambda s, b, h, q, k: s if q > k else -s, "it decides on a tensor's value at "),
    "item": (lambda s, b, h, q, k: s + int(q), "it decides on a tensor's value at "),
    "math": (lambda s, b, h, q, k: s + math.sqrt(q), VALUE),
    "list": (lambda s, b, h, q, k: s + q.tolist()[0], "it decides on a tensor's value at "),
    "numpy": (lambda s, b, h, q, k: s + float(q.numpy()[0]), "it decides on a tensor's value at "),
    "equal": (lambda s, b, h, q, k: s if torch.equal(q, k) else -s, "it decides on a tensor's"),
    "loop": (summed_over_keys, "it decides on a tensor's value at "),
    "random": (lambda s, b, h, q, k: s + torch.rand(3)[h], "it draws random numbers at "),
    "random like": (lambda s, b, h, q, k: s + torch.rand_like(s), "it draws random numbers at "),
    "dropout": (lambda s, b, h, q, k: torch.dropout(s, 0.5, True), "it draws random numbers at "),
    "in place": (in_place, "it writes in place with aten.add_ at "),
    "captured in place": (counting, "it writes in place with aten.copy_ at "),
    "out": (
        lambda s, b, h, q, k: torch.add(s, 1.0, out=torch.empty(1, dtype=torch.float64)),
        "it writes in place with aten.add at ",
    ),
    # Wrong results.
    "number": (lambda s, b, h, q, k: 1.0, f"it gives 1.0: {ONE_NUMBER}"),
    "nothing": (lambda s, b, h, q, k: None, f"it gives None: {ONE_NUMBER}"),
    "truth": (lambda s, b, h, q, k: True, f"it gives True: {ONE_NUMBER}"),
    "tuple": (lambda s, b, h, q, k: (s, s), f"it gives a tuple of 2: {ONE_NUMBER}"),
    "int": (lambda s, b, h, q, k: q, f"it gives dtype int64: {ONE_NUMBER}"),
    "bool": (lambda s, b, h, q, k: q > k, f"it gives dtype bool: {ONE_NUMBER}"),
    "shape": (lambda s, b, h, q, k: s[None], f"gives shape (1, 1) for one index: {ONE_NUMBER}"),
    "a table": (lambda s, b, h, q, k: BIAS, f"gives shape (3, 4) for one index: {ONE_NUMBER}"),
    "repeated": (
        lambda s, b, h, q, k: s.expand(5),
        "aten.expand gives shape (5,) for one index at ",
    ),
    # What it raises itself.
    "exception": (
        lambda s, b, h, q, k: s + BIAS[h, 99],
        "it raised IndexError: index 99 is out of bounds for dimension 1 with size 4 at ",
    ),
    "arguments": (
        lambda s, q, k: s,
        "it must take (score, b, h, q_idx, kv_idx): too many positional arguments.",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_untraceable_score_mod_is_refused_with_reason_and_line(name):
    mod, message = REFUSED[name]
    with pytest.raises(TraceError) as error:
        trace_score(mod)
    text = str(error.value)
    assert text.startswith(f"score mod {mod.__name__!r} cannot be traced: ")
    assert message in re.sub(r" `.*`", "", text)  # the line of the mod that is quoted
    assert "\n" not in text
    if message.endswith(" at "):
        first = mod.__code__.co_firstlineno
        assert any(f"at test_refused_mods.py:{first + line}" in text for line in range(3))
    assert SEEN.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("mod", "result"),
    [
        (lambda b, h, q, k: q - k, "dtype int64"),
        (lambda b, h, q, k: (q - k) * 0.5, "dtype float32"),
        (lambda b, h, q, k: True, "True"),
        (lambda b, h, q, k: (q > k)[None], "shape (1, 1) for one index"),
        (lambda b, h, q, k: [q > k], "a list of 1"),
    ],
)
def test_mask_must_give_truth_values(mod, result):
    with one_line(
        TraceError,
        whole=f"mask '<lambda>' cannot be traced: it gives {result}: it must give one tensor of "
        "truth values, torch.bool, one value an index.",
    ):
        trace_mask(mod)


def test_non_callable_is_refused():
    with pytest.raises(TraceError, match=r"^mask 'int' cannot be traced: it is no callable of"):
        trace_mask(3)


def test_unknown_operation_lists_known_ones():
    with pytest.raises(TraceError, match=r"`.*round.*`: use abs, add, and, cast, .*, xor\.$"):
        trace_score(lambda s, b, h, q, k: s.round())


def test_error_quotes_line_of_the_refused_call():
    """Of four calls of one operation the tracer drops one, and the third is refused."""

    def mod(score, b, h, q, k):
        score.pow(2.0)
        score = score.pow(3)
        score = score.pow(2.5)
        return score.pow(0.5)

    with pytest.raises(TraceError, match=r"power 2\.5 at [^`]*`score = score\.pow\(2\.5\)`:"):
        trace_score(mod)


def test_error_quotes_line_in_inner_function():
    def inner(x):
        return torch.special.erfc(x)

    with pytest.raises(TraceError, match=r"`return torch\.special\.erfc\(x\)`"):
        trace_score(lambda s, b, h, q, k: inner(s))


def test_partial_is_named_by_function_and_object_by_class():
    def window(width, b, h, q, k):
        return q - k

    class Bias(torch.nn.Module):
        def forward(self, b, h, q, k):
            return q - k

    with pytest.raises(TraceError, match=r"^mask 'window' cannot"):
        trace_mask(functools.partial(functools.partial(window), 3))
    with pytest.raises(TraceError, match=r"^mask 'Bias' cannot"):
        trace_mask(Bias())


def test_error_at_index_beyond_captured_tensor_quotes_line():
    documents = torch.zeros(40, dtype=torch.int64)

    def document(b, h, q, k):
        return documents[q] == documents[k]

    with pytest.raises(TraceError) as error:
        count_disagreements(trace_mask(document), document, DIMENSIONS)
    text = str(error.value)
    assert text.startswith("mask 'document' raised IndexError at an index of its Problem: index ")
    assert "is out of bounds for dimension 0 with size 40 at test_refused_mods.py:" in text
    assert text.endswith("`return documents[q] == documents[k]`.")
    assert "\n" not in text


def test_division_by_zero_at_an_index_is_reported():
    def mod(b, h, q, k):
        return q // (k - 3) > 1

    with pytest.raises(TraceError, match=r"'mod' raised RuntimeError .* ZeroDivisionError at"):
        count_disagreements(trace_mask(mod), mod, DIMENSIONS)


def test_wrong_shape_for_many_indices_is_reported():
    def broadcasting(b, h, q, k):
        return q[:1] > k[:1] if q.numel() > 1 else (q > k)

    def wrong(b, h, q, k):
        return (q > k)[:2] if q.numel() > 1 else (q > k)

    assert count_disagreements(trace_mask(broadcasting), broadcasting, DIMENSIONS) > 0
    with pytest.raises(TraceError, match=r"'wrong' gives \(2,\) for \d+ indices: it must give"):
        count_disagreements(trace_mask(wrong), wrong, DIMENSIONS)


def test_random_number_of_python_is_detected():
    def mod(s, b, h, q, k):
        return s + random.random()

    assert count_disagreements(trace_score(mod), mod, DIMENSIONS) > 0


class UnprintableError(Exception):
    def __str__(self):
        raise RuntimeError("no words")


def raising(error, *, at):
    """A mask that raises ``error`` when it is called with at least ``at`` indices."""

    def mod(b, h, q, k):
        if k.numel() >= at:
            raise error
        return q > k

    return mod


ENDING_ERRORS = (SystemExit(0), SystemExit(), GeneratorExit(), UnprintableError())


@pytest.mark.parametrize("error", ENDING_ERRORS, ids=repr)
def test_mod_that_exits_raises_trace_error(error):
    kind = type(error).__name__
    with pytest.raises(TraceError, match=f"^mask 'mod' cannot be traced: it raised {kind}"):
        trace_mask(raising(error, at=1))
    late = raising(error, at=2)
    with pytest.raises(TraceError, match=f"^mask 'mod' raised {kind} at an index of its Problem"):
        count_disagreements(trace_mask(late), late, DIMENSIONS)


def test_keyboard_interrupt_is_not_caught():
    with pytest.raises(KeyboardInterrupt):
        trace_mask(raising(KeyboardInterrupt(), at=1))
    late = raising(KeyboardInterrupt(), at=2)
    with pytest.raises(KeyboardInterrupt):
        count_disagreements(trace_mask(late), late, DIMENSIONS)


def test_coroutine_or_generator_is_refused_without_warning():
    async def coroutine(b, h, q, k):
        return q > k

    def generator(b, h, q, k):
        yield q > k

    async def async_generator(b, h, q, k):
        yield q > k

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(TraceError, match=r"it gives a coroutine: use a plain def\.$"):
            trace_mask(coroutine)
        for mod in (generator, async_generator):
            with pytest.raises(TraceError, match=r"it gives a generator: use a plain def without"):
                trace_mask(mod)
        gc.collect()

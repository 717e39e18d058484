"""Expressions survive JSON unchanged, and malformed JSON is refused."""

import copy
import json
import math

import pytest
import torch
from tests.messages import one_line

from attncheck.core.errors import ProblemError
from attncheck.mods.expression import (
    Algebra,
    evaluate,
    expression_digest,
    expression_from_json,
    expression_to_json,
)
from attncheck.mods.trace import trace_mask, trace_score

TABLE = torch.sin(torch.arange(4 * 40.0)).reshape(4, 40)
DOCUMENTS = torch.arange(64, dtype=torch.int32) // 7
ODD = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 2.0**-149, 0.1])
TREE = torch.rand(9, 9) > 0.5
SEVENTY = torch.arange(70, dtype=torch.int64) - 2**40


def relative(score, b, h, q, k):
    return torch.where(q >= k, score + 0.1 * TABLE[h, (q - k).clamp(0, 39)], -math.inf)


def odd(score, b, h, q, k):
    return score * 1e300 + ODD[k % 6].to(torch.float64)


def documents(b, h, q, k):
    return (DOCUMENTS[q] == DOCUMENTS[k]) & TREE[q % 9, k % 9] | (SEVENTY[k] < 7)


EXPRESSIONS = [trace_score(relative), trace_score(odd), trace_mask(documents)]


def indices():
    axes = [torch.arange(n) for n in (2, 4, 12, 20)]
    return [axis.view([-1 if i == j else 1 for j in range(4)]) for i, axis in enumerate(axes)]


def json_round_trip(expression):
    return json.loads(json.dumps(expression_to_json(expression), allow_nan=False))


@pytest.mark.parametrize("expression", EXPRESSIONS, ids=["relative", "odd", "documents"])
def test_expression_survives_json_round_trip(expression):
    restored = expression_from_json(json_round_trip(expression))
    assert restored.structure == expression.structure
    assert str(restored) == str(expression)
    assert expression_digest(restored) == expression_digest(expression)
    for actual, expected in zip(restored.captured, expression.captured, strict=True):
        assert type(actual) is type(expected)
        if isinstance(expected, torch.Tensor):
            assert actual.dtype == expected.dtype
            assert actual.shape == expected.shape
            as_bytes = (x.reshape(-1).contiguous().view(torch.uint8) for x in (actual, expected))
            assert torch.equal(*as_bytes)
        else:
            assert repr(actual) == repr(expected)
    inputs = indices()
    if expression.structure.inputs[0] == "score":
        inputs.insert(0, torch.linspace(-3, 3, 20, dtype=torch.float64))
    torch.testing.assert_close(
        restored.evaluate(*inputs), expression.evaluate(*inputs), rtol=0, atol=0, equal_nan=True
    )


def test_json_lists_small_tensors_and_encodes_large_ones():
    pairs = torch.tensor([[3, 5], [7, 1]])
    small = expression_to_json(trace_mask(lambda b, h, q, k: pairs[b, h % 2] > k))["captured"]
    assert {"dtype": "int64", "shape": [2, 2], "values": [3, 5, 7, 1]} in small
    large = expression_to_json(EXPRESSIONS[0])["captured"]
    assert any("base64" in value for value in large if isinstance(value, dict))


def test_digest_depends_on_structure_numbers_and_tensors():
    def digest(window, table, shift=0):
        return expression_digest(
            trace_mask(lambda b, h, q, k: (table[q] - k < window) | (k == q + shift))
        )

    plain = digest(8, DOCUMENTS)
    assert plain == digest(8, DOCUMENTS.clone())
    changed = DOCUMENTS.clone()
    changed[63] += 1
    different = [
        digest(9, DOCUMENTS),
        digest(8, changed),
        digest(8, DOCUMENTS.long()),
        digest(8, DOCUMENTS, 1),
    ]
    assert len({plain, *different}) == 5


def change(path, value):
    """A function that changes (or deletes) one entry of an expression's JSON."""

    def edit(data):
        place = data
        for step in path[:-1]:
            place = place[step]
        if value is KeyError:
            del place[path[-1]]
        else:
            place[path[-1]] = value
        return data

    return edit


def index_of(data, op):
    """The index of the first node with this operation."""
    return next(i for i, node in enumerate(data["nodes"]) if node["op"] == op)


BAD = {
    "no object": lambda data: [data],
    "another format": change(["format"], "something"),
    "no nodes": change(["nodes"], KeyError),
    "nodes are text": change(["nodes"], "many"),
    "empty": change(["nodes"], []),
    "a node is a number": change(["nodes", 2], 7),
    "other inputs": change(["inputs"], ["q", "k"]),
    "nested inputs": change(["inputs"], [["score"]]),
    "unknown operation": change(["nodes", -1, "op"], "erf"),
    "operation is a list": change(["nodes", -1, "op"], []),
    "unknown kind": change(["nodes", -1, "kind"], "complex"),
    "wrong kind": change(["nodes", -1, "kind"], "int"),
    "later operand": change(["nodes", -1, "operands"], [1000, 0, 0]),
    "itself": lambda data: change(["nodes", -1, "operands", 0], len(data["nodes"]) - 1)(data),
    "negative operand": change(["nodes", -1, "operands", 0], -1),
    "too few operands": change(["nodes", -1, "operands"], [0]),
    "operands no list": change(["nodes", -1, "operands"], 3),
    "mask as condition": change(["nodes", -1, "operands"], [0, 0, 0]),
    "name is a list": change(["nodes", 0, "name"], []),
    "no such input": change(["nodes", 0, "name"], "row"),
    "no such slot": lambda d: change(["nodes", index_of(d, "number"), "slot"], 99)(d),
    "slot of a tensor": lambda d: (
        change(["nodes", index_of(d, "number"), "slot"], 3)(d)
        if isinstance(d["captured"][3], dict)
        else change(["nodes", index_of(d, "tensor"), "slot"], 0)(d)
    ),
    "rank": lambda d: change(["nodes", index_of(d, "tensor"), "rank"], 1)(d),
    "indices": lambda d: change(["nodes", index_of(d, "index"), "operands"], [0])(d),
    "captured is text": change(["captured", 0], "many"),
    "captured is true": change(["captured", 0], True),
    "result is a truth value": lambda d: change(["nodes"], d["nodes"][: index_of(d, "ge") + 1])(d),
}


@pytest.mark.parametrize("spoil", BAD.values(), ids=BAD)
def test_malformed_expression_is_refused_in_one_line(spoil):
    data = spoil(copy.deepcopy(json_round_trip(EXPRESSIONS[0])))
    with one_line(ProblemError):
        expression_from_json(data)


TENSOR = {"dtype": "float32", "shape": [2], "values": [0.5, 1.5]}
BAD_TENSORS = {
    "dtype": TENSOR | {"dtype": "float8"},
    "dtype is a list": TENSOR | {"dtype": []},
    "shape": TENSOR | {"shape": [3]},
    "negative shape": TENSOR | {"shape": [-2]},
    "shape is a number": TENSOR | {"shape": 2},
    "no values": {"dtype": "float32", "shape": [2]},
    "values are text": TENSOR | {"values": ["a", "b"]},
    "not fp32": TENSOR | {"values": [0.1, 1.0]},
    "not whole": TENSOR | {"dtype": "int32", "values": [0.5, 1]},
    "too large": TENSOR | {"dtype": "int32", "values": [2**40, 1]},
    "too large for any": TENSOR | {"dtype": "int64", "values": [2**63, 1]},
    "much too large": TENSOR | {"values": [10**30, 10**400]},
    "too large for a byte": TENSOR | {"dtype": "uint8", "values": [10**30, 1]},
    "not base64": {"dtype": "float32", "shape": [2], "base64": "?!"},
    "base64 is a number": {"dtype": "float32", "shape": [2], "base64": 7},
    "half an element": {"dtype": "float32", "shape": [2], "base64": "AAAA"},
}


@pytest.mark.parametrize("tensor", BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_malformed_captured_tensor_is_refused_in_one_line(tensor):
    data = json_round_trip(EXPRESSIONS[0])
    data["captured"].append(tensor)
    with one_line(ProblemError, match=r"captured\[\d+\]"):
        expression_from_json(data)


def test_valid_captured_tensor_is_accepted():
    """Appending a tensor is not itself why the expressions above are refused."""
    data = json_round_trip(EXPRESSIONS[0])
    data["captured"].append(TENSOR)
    assert expression_from_json(data).structure == EXPRESSIONS[0].structure


class CountedValue:
    """A value of an algebra; the class counts how many exist at once."""

    alive = most = 0

    def __init__(self, *_):
        CountedValue.alive += 1
        CountedValue.most = max(CountedValue.most, CountedValue.alive)

    def __del__(self):
        CountedValue.alive -= 1


def test_evaluate_frees_values_after_last_use():
    """A chain of 60 operations keeps at most 3 values; keeping all would exhaust the memory."""

    def long(score, b, h, q, k):
        for _ in range(30):
            score = score.abs().neg()
        return score

    evaluate(trace_score(long), Algebra.of(CountedValue, CountedValue, {}), *range(5))
    assert CountedValue.most <= 3

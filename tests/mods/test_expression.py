"""An expression comes back from JSON as it was, and nothing else comes in."""

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


def through_text(expression):
    return json.loads(json.dumps(expression_to_json(expression), allow_nan=False))


@pytest.mark.parametrize("expression", EXPRESSIONS, ids=["relative", "odd", "documents"])
def test_round_trip(expression):
    back = expression_from_json(through_text(expression))
    assert back.structure == expression.structure
    assert str(back) == str(expression)
    assert expression_digest(back) == expression_digest(expression)
    for mine, its in zip(back.captured, expression.captured, strict=True):
        assert type(mine) is type(its)
        if isinstance(its, torch.Tensor):
            assert mine.dtype == its.dtype
            assert mine.shape == its.shape
            same = (x.reshape(-1).contiguous().view(torch.uint8) for x in (mine, its))
            assert torch.equal(*same)
        else:
            assert repr(mine) == repr(its)
    inputs = indices()
    if expression.structure.inputs[0] == "score":
        inputs.insert(0, torch.linspace(-3, 3, 20, dtype=torch.float64))
    torch.testing.assert_close(
        back.evaluate(*inputs), expression.evaluate(*inputs), rtol=0, atol=0, equal_nan=True
    )


def test_small_tensors_can_be_read_and_large_ones_are_bytes():
    pairs = torch.tensor([[3, 5], [7, 1]])
    small = expression_to_json(trace_mask(lambda b, h, q, k: pairs[b, h % 2] > k))["captured"]
    assert {"dtype": "int64", "shape": [2, 2], "values": [3, 5, 7, 1]} in small
    large = expression_to_json(EXPRESSIONS[0])["captured"]
    assert any("base64" in value for value in large if isinstance(value, dict))


def test_the_digest_tells_everything_apart():
    def of(window, table, shift=0):
        return expression_digest(
            trace_mask(lambda b, h, q, k: (table[q] - k < window) | (k == q + shift))
        )

    plain = of(8, DOCUMENTS)
    assert plain == of(8, DOCUMENTS.clone())
    other = DOCUMENTS.clone()
    other[63] += 1
    different = [of(9, DOCUMENTS), of(8, other), of(8, DOCUMENTS.long()), of(8, DOCUMENTS, 1)]
    assert len({plain, *different}) == 5


def change(path, value):
    """JSON of the first expression with one thing changed."""

    def changed(data):
        place = data
        for step in path[:-1]:
            place = place[step]
        if value is KeyError:
            del place[path[-1]]
        else:
            place[path[-1]] = value
        return data

    return changed


def where_is(data, op):
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
    "no such slot": lambda d: change(["nodes", where_is(d, "number"), "slot"], 99)(d),
    "slot of a tensor": lambda d: (
        change(["nodes", where_is(d, "number"), "slot"], 3)(d)
        if isinstance(d["captured"][3], dict)
        else change(["nodes", where_is(d, "tensor"), "slot"], 0)(d)
    ),
    "rank": lambda d: change(["nodes", where_is(d, "tensor"), "rank"], 1)(d),
    "indices": lambda d: change(["nodes", where_is(d, "index"), "operands"], [0])(d),
    "captured is text": change(["captured", 0], "many"),
    "captured is true": change(["captured", 0], True),
    "result is a truth value": lambda d: change(["nodes"], d["nodes"][: where_is(d, "ge") + 1])(d),
}


@pytest.mark.parametrize("spoil", BAD.values(), ids=BAD)
def test_anything_else_is_one_line(spoil):
    data = spoil(copy.deepcopy(through_text(EXPRESSIONS[0])))
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
def test_a_bad_tensor_is_one_line(tensor):
    data = through_text(EXPRESSIONS[0])
    data["captured"].append(tensor)
    with one_line(ProblemError, match=r"captured\[\d+\]"):
        expression_from_json(data)


def test_a_good_tensor_among_them_passes():
    data = through_text(EXPRESSIONS[0])
    data["captured"].append(TENSOR)
    assert expression_from_json(data).structure == EXPRESSIONS[0].structure


class Held:
    """A value of an algebra that counts how many there are."""

    alive = most = 0

    def __init__(self, *_):
        Held.alive += 1
        Held.most = max(Held.most, Held.alive)

    def __del__(self):
        Held.alive -= 1


def test_a_value_is_let_go_of_after_its_last_use():
    def long(score, b, h, q, k):
        for _ in range(30):
            score = score.abs().neg()
        return score

    evaluate(trace_score(long), Algebra.of(Held, Held, {}), *range(5))
    assert Held.most <= 3

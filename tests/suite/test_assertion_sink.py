"""Out and LSE with a sink, for somebody who has tensors."""

import math

import pytest
import torch

import attncheck
from attncheck.core.errors import UsageError
from attncheck.inputs.problem import Problem

close = attncheck.assert_attention_close
SINK = torch.tensor([1.0, -2.0, 40.0, 3.5])


def given():
    generator = torch.Generator().manual_seed(5)
    shapes = {"q": (2, 4, 20, 16), "k": (2, 4, 30, 16), "v": (2, 4, 30, 8)}
    return {n: torch.randn(shape, generator=generator).bfloat16() for n, shape in shapes.items()}


def attention(q, k, v, sink):
    """P has a column more, of which no value is added."""
    scores = q.float() @ k.float().mT / math.sqrt(q.shape[3])
    own = sink.float()[:, None, None].expand(*scores.shape[:-1], 1)
    scores = torch.cat([scores, own], -1)
    return (scores.softmax(-1)[..., :-1] @ v.float()).bfloat16(), scores.logsumexp(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_with_a_sink_is_accepted(dtype):
    out, lse = attention(**given(), sink=SINK.to(dtype))
    assert close(out, lse, **given(), sink=SINK.to(dtype)).status == "pass"
    assert close(out, **given(), sink=SINK.to(dtype)).status == "pass"


def test_a_sink_that_is_another_is_refused():
    out, lse = attention(**given(), sink=SINK)
    for other in (None, SINK.roll(1), SINK * math.log(2)):
        with pytest.raises(AssertionError, match="attention: fail"):
            close(out, lse, **given(), sink=other)


def test_merged_with_what_keys_alone_gave():
    """Out in fp32 times e^(LSE − LSE'), and minus infinity is no sink."""
    plain = [x.float() for x in given().values()]
    none = torch.full((4,), -math.inf)
    scores = plain[0] @ plain[1].mT / 4
    out, lse = scores.softmax(-1) @ plain[2], scores.logsumexp(-1)
    assert close(out, lse, **given(), sink=none).status == "pass"
    both = torch.logaddexp(lse, SINK[:, None])
    out = (out * (lse - both).exp()[..., None]).bfloat16()
    assert close(out, both, **given(), sink=SINK).status == "pass"


@pytest.mark.parametrize(
    ("sink", "said"),
    [
        (1.0, "sink is float: it must be a tensor"),
        (SINK[:3], r"sink.shape=\(3,\) must be \(heads,\) = \(4,\)"),
        (SINK.double(), "sink.dtype=torch.float64 is not known: choose from float32"),
        (torch.full((4,), math.nan), "sink holds NaN or ∞"),
    ],
)
def test_what_is_no_sink_is_said(sink, said):
    out, _ = attention(**given(), sink=SINK)
    with pytest.raises(UsageError, match=said):
        close(out, **given(), sink=sink)


def test_a_problem_says_it_all():
    with pytest.raises(UsageError, match="problem and sink are given both"):
        close(torch.zeros(1, 1, 4, 64), problem=Problem(query=4), sink=SINK)

"""The pass that makes a tile's weights on a Hopper GPU: it gives torch's bits, and fits the tiles.

Without such a GPU what surrounds it is tested beside the same in torch.
"""

import pytest
import torch
from tests.oracles.conftest import UNIT
from tests.oracles.gradients_by_torch import allowed

from attncheck import oracles
from attncheck.core.errors import HostError
from attncheck.core.mod_spec import Spec
from attncheck.core.outputs import Outputs
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Problem
from attncheck.oracles import fused_weights as room
from attncheck.oracles import streaming_forward, streaming_gradients
from attncheck.oracles.streaming_forward import Blocks

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
on_hopper = pytest.mark.skipif(not HOPPER, reason="its instruction is a Hopper GPU's")

MASKS = [
    Spec.of("full"),
    Spec.of("causal"),
    Spec.of("padding", lengths=[150, 77]),
    Spec.of("sliding_window", window=70),
]
BLOCKS = Blocks(rows=256, query=32, query_most=128, kv=96, cell=16)


def in_torch(weights, q, k, seen, scale, of_values=None):
    """What the pass gives, as its caller sees it, in two parts of the keys."""
    torch.exp(torch.baddbmm(weights, q, k.mT, beta=0, alpha=scale), out=weights)
    if seen is not None:
        assert seen.dtype == torch.bool, "the pass reads bytes"
        weights.view(seen.shape).mul_(seen)
    if of_values is not None:
        dx, loss, v = of_values
        columns = v.shape[-1]
        term = loss[:, :, columns : columns + 1]
        torch.mul(weights, loss[:, :, :columns] @ v.mT + term, out=dx)
    half = weights.shape[2] // 2
    return torch.stack([weights[..., :half].sum(-1), weights[..., half:].sum(-1)], -1)


def _problem(mask, **changes):
    sizes = {"batch": 2, "heads": 6, "kv_heads": 2, "query": 150, "kv": 150} | changes
    return Problem(**sizes, head_dim=32, value_dim=16, mask=mask, backward=True)


def _misses(inputs, found, expected, allowance):
    """What of out, LSE and gradients differs by more than two float64 evaluations may."""
    found, expected = (
        Outputs(**{name: tensor.cpu() for name, tensor in outputs.tensors().items()})
        for outputs in (found, expected)
    )
    forward = allowance(inputs.forward()).misses(found, expected)
    return forward + allowed(inputs, allowance).misses(found, expected.gradients())


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_tiles_of_the_pass_are_those_of_torch(monkeypatch, mask, allowance):
    inputs = draw_inputs(_problem(mask))
    expected = oracles.truth(inputs)
    calls = []

    def counted(*given):
        calls.append(given)
        return in_torch(*given)

    for each in (streaming_forward, streaming_gradients):
        monkeypatch.setattr(each, "fused_weights", lambda *_, **__: counted)
    found = streaming_gradients.streaming_backward(inputs, blocks=BLOCKS)
    assert not _misses(inputs, found, expected, allowance)
    assert {len(given) for given in calls} == {5, 6}

    def wrong(weights, *given):
        parts = in_torch(weights, *given)
        return parts * (1 + 2.0**-40)  # sums of other weights than those that were given

    for each in (streaming_forward, streaming_gradients):
        monkeypatch.setattr(each, "fused_weights", lambda *_, **__: wrong)
    found = streaming_gradients.streaming_backward(inputs, blocks=BLOCKS)
    assert _misses(inputs, found, expected, allowance), "a relative error of 2^-40 is none of order"


def test_it_is_for_large_problems_of_a_hopper_gpu(monkeypatch):
    problem = _problem(MASKS[0], query=2**17, kv=2**17)
    gpu = torch.device("cuda", 0)
    assert room.fused_weights(problem, torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert room.fused_weights(problem, gpu) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(room, "compile_kernel", lambda *_, **__: "a launch")
    room._compiled.cache_clear()
    assert room.fused_weights(problem, gpu) is not None
    assert room.fused_weights(problem.replace(query=128), gpu) is None
    assert room.fused_weights(problem.replace(head_dim=24), gpu) is None
    room._compiled.cache_clear()


def test_without_cudas_compiler_torch_does_it(monkeypatch):
    def refuses(*_, **__):
        raise HostError("CUDA's compiler cannot be loaded.")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(room, "compile_kernel", refuses)
    room._compiled.cache_clear()
    problem = _problem(MASKS[0], query=2**17, kv=2**17)
    assert room.fused_weights(problem, torch.device("cuda", 0)) is None


@on_hopper
@pytest.mark.parametrize("rows", [1, 64, 130])
@pytest.mark.parametrize("keys", [2, 64, 190])
@pytest.mark.parametrize("dim", [16, 64, 128])
def test_weights_have_torchs_bits(rows, keys, dim):
    """Products of 16-bit numbers are exact in float64, whatever the order of their sum."""
    q, k, loss, v = (
        torch.randn(4, n, dim + 8, device="cuda").bfloat16().double()
        for n in (rows, keys, rows, keys)
    )
    q, k, v = q[..., :dim], k[..., :dim], v[..., :dim]
    seen = torch.rand(2, 2, rows, keys, device="cuda") > 0.3
    device = torch.device("cuda", 0)
    for mask in (None, seen):
        found, expected, dx, of_torch = (
            torch.full((4, rows, keys), 7.0, dtype=torch.float64, device="cuda") for _ in range(4)
        )
        sums = in_torch(expected, q, k, mask, 0.25, (of_torch, loss, v)).sum(-1)
        parts = room.FusedWeights(device)(found, q, k, mask, 0.25)
        assert torch.equal(found, expected)
        # Two orders of a sum of ``keys`` numbers, none of them negative.
        assert bool(((parts.sum(-1) - sums).abs() <= 2 * keys * UNIT * sums).all())
        room.FusedWeights(device, gradient=True)(found.fill_(7), q, k, mask, 0.25, (dx, loss, v))
        assert torch.equal(found, expected)
        # Two orders of a sum of products and a term, and two products with the weight.
        sizes = loss[..., :dim].abs() @ v.abs().mT + loss[..., dim : dim + 1].abs()
        off = (dx - of_torch).abs()
        assert bool((off <= 2 * (dim + 2) * UNIT * expected * sizes).all())


@on_hopper
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_results_are_torchs(monkeypatch, mask, allowance):
    inputs = draw_inputs(_problem(mask))
    expected = oracles.truth(inputs.to("cuda"))
    monkeypatch.setattr(room, "_FEWEST_PRODUCTS", 0)
    found = streaming_gradients.streaming_backward(inputs.to("cuda"), blocks=BLOCKS)
    assert not _misses(inputs, found, expected, allowance)

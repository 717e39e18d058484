"""Fused CUDA kernels for the streaming oracle's tiles on Hopper GPUs give what torch's tiles give.

Without such a GPU, torch code stands in for the kernels and their callers are tested.
"""

import re
import struct
from pathlib import Path

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
from attncheck.oracles import fused_tiles, streaming_forward, streaming_gradients
from attncheck.oracles.mod_calls import seen_by_blocks
from attncheck.oracles.streaming_forward import Blocks
from attncheck.oracles.streaming_gradients import streaming_backward

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
on_hopper = pytest.mark.skipif(not HOPPER, reason="the kernels use a Hopper instruction")
GPU = torch.device("cuda", 0)

MASKS = [
    Spec.of("full"),
    Spec.of("causal"),
    Spec.of("padding", lengths=[151, 77]),
    Spec.of("sliding_window", window=70),
]
BLOCKS = Blocks(rows=256, query=32, query_most=128, kv=96, cell=16)


def weights_in_torch(q, k, scale, seen):
    weights = torch.exp(scale * (q @ k.mT))
    return weights if seen is None else (weights.view(seen.shape) * seen).view(weights.shape)


def add_in_torch(sums, q, k, v, *, scale, seen):
    weights, columns = weights_in_torch(q, k, scale, seen), v.shape[-1]
    sums[..., :columns] += weights @ v
    sums[..., columns] += weights.sum(-1)


def fill_in_torch(tiles, q, k, loss, v, *, scale, seen):
    columns = v.shape[-1]
    tiles[0].copy_(weights_in_torch(q, k, scale, seen))
    term = loss[..., columns : columns + 1]
    torch.mul(tiles[0], loss[..., :columns] @ v.mT + term, out=tiles[1])


def _problem(mask, **changes):
    sizes = {"batch": 2, "heads": 6, "kv_heads": 2, "query": 151, "kv": 151} | changes
    return Problem(**sizes, head_dim=32, value_dim=16, mask=mask, backward=True)


def _misses(inputs, one, other, allowance):
    """What of out, LSE and gradients differs by more than two float64 evaluations may."""
    one, other = (
        Outputs(**{name: tensor.cpu() for name, tensor in outputs.tensors().items()})
        for outputs in (one, other)
    )
    forward = allowance(inputs.forward()).misses(one, other)
    return forward + allowed(inputs, allowance).misses(one, other.gradients())


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_streaming_backward_uses_fused_tiles(monkeypatch, mask, allowance):
    inputs = draw_inputs(_problem(mask))
    expected, calls = oracles.truth(inputs), set()

    def add(*tensors, factor=1.0, **how):
        calls.add("forward")
        add_in_torch(*tensors, **how)
        tensors[0].mul_(factor)

    def fill(*tensors, **how):
        calls.add("backward")
        fill_in_torch(*tensors, **how)

    monkeypatch.setattr(fused_tiles, "takes", lambda *_, **__: True)
    monkeypatch.setattr(fused_tiles, "add_tile", add)
    monkeypatch.setattr(fused_tiles, "fill_tiles", fill)
    results = streaming_backward(inputs, blocks=BLOCKS)
    assert not _misses(inputs, results, expected, allowance)
    assert calls == {"forward", "backward"}

    # A wrong sum in the forward's tiles alone shows in the results.
    monkeypatch.setattr(fused_tiles, "add_tile", lambda *a, **how: add(*a, factor=1.0001, **how))
    results = streaming_backward(inputs, blocks=BLOCKS)
    assert _misses(inputs, results, expected, allowance)


@pytest.mark.parametrize("keys", [8, 12])
def test_visibility_of_blocks_is_any_and_all_of_their_pairs(keys):
    generator = torch.Generator().manual_seed(5)
    rows = torch.randint(0, 4, (2, 1, 37, 50), generator=generator) > 0
    rows[:, :, :16, :24], rows[:, :, 16:, 8:24] = True, False
    for seen in (rows, rows[:, :, :1].expand(-1, -1, 37, -1), rows[..., :1].expand(-1, -1, -1, 50)):
        some, every = (each.expand(2, 1, -1, -1) for each in seen_by_blocks(seen, 16, keys))
        for i, row in enumerate(range(0, 37, 16)):
            for j, key in enumerate(range(0, 50, keys)):
                block = seen[:, :, row : row + 16, key : key + keys].flatten(2)
                at = min(i, some.shape[2] - 1), min(j, some.shape[3] - 1)
                assert torch.equal(some[:, :, *at], block.any(-1))
                assert torch.equal(every[:, :, *at], block.all(-1))


def test_scores_stay_below_the_limit_the_cuda_compiler_assumes():
    """The source states it for the upper half of a float64's bits, read as a float32."""
    source = Path(fused_tiles.__file__).with_suffix(".cu").read_text(encoding="utf-8")
    (assumed,) = re.findall(r"__double2hiint\(x\)\)\) < ([\d.]+)f\)", source)
    (limit,) = struct.unpack("<d", bytes(4) + struct.pack("<f", float(assumed)))
    assert limit == 700
    modules = (streaming_forward, streaming_gradients)
    assert max(module.LARGEST_BOUNDED_SCORE for module in modules) < limit


def test_fused_tiles_take_large_problems_on_a_hopper_gpu_only(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(fused_tiles, "_kernel", lambda *_, **__: "a launch")
    problem = _problem(MASKS[0], query=2**17, kv=2**17)
    assert fused_tiles.takes(problem, GPU)
    assert not fused_tiles.takes(problem, torch.device("cpu"))
    for changes in ({"query": 128}, {"head_dim": 24}, {"value_dim": 144}):
        assert not fused_tiles.takes(problem.replace(**changes), GPU)
    assert fused_tiles.takes(problem.replace(value_dim=144), GPU, backward=True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert not fused_tiles.takes(problem, GPU)


def test_fused_tiles_take_nothing_without_cudas_compiler(monkeypatch):
    def refuses(*_, **__):
        raise HostError("CUDA's compiler cannot be loaded.")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(fused_tiles, "_kernel", refuses)
    assert not fused_tiles.takes(_problem(MASKS[0], query=2**17, kv=2**17), GPU)


@on_hopper
@pytest.mark.parametrize("rows", [1, 64, 130])
@pytest.mark.parametrize("keys", [2, 64, 190])
@pytest.mark.parametrize(("dim", "value"), [(16, 32), (64, 16), (64, 64), (128, 128), (96, 16)])
def test_fused_tile_equals_torchs(rows, keys, dim, value):
    """Weights are bitwise equal, as products of 16-bit numbers are exact in float64."""
    q, k, loss, v = (
        torch.randn(4, lines, columns + 8, device=GPU).bfloat16().double()
        for lines, columns in ((rows, dim), (keys, dim), (rows, value), (keys, value))
    )
    q, k, v = q[..., :dim], k[..., :dim], v[..., :value]
    some = torch.rand(2, 2, rows, keys, device=GPU) > torch.rand(2, 2, rows, 1, device=GPU)
    some[:, :, :64, :130], some[:, :, 64:, :130] = True, False
    for seen in (None, some, some[:, :1].expand(-1, 2, -1, -1), torch.zeros_like(some)):
        how = {"scale": 0.25, "seen": seen}
        ours, torchs, sizes = (torch.ones(4, rows, value + 8, device=GPU).double() for _ in "ots")
        fused_tiles.add_tile(ours, q, k, v, **how)
        add_in_torch(torchs, q, k, v, **how)
        add_in_torch(sizes, q, k, v.abs(), **how)
        # A sum of ``keys`` products and the previous value, in two orders.
        assert bool(((ours - torchs).abs() <= 2 * (keys + 2) * UNIT * sizes).all())
        ours, torchs = (
            torch.full((2, 4, rows, keys), 7.0, dtype=torch.float64, device=GPU).unbind()
            for _ in range(2)
        )
        fused_tiles.fill_tiles(ours, q, k, loss, v, **how)
        fill_in_torch(torchs, q, k, loss, v, **how)
        assert torch.equal(ours[0], torchs[0])
        # A sum of products and a term, in two orders, each times the weight.
        sizes = loss[..., :value].abs() @ v.abs().mT + loss[..., value : value + 1].abs()
        off = (ours[1] - torchs[1]).abs()
        assert bool((off <= 2 * (value + 2) * UNIT * torchs[0] * sizes).all())


@on_hopper
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_results_with_fused_tiles_equal_torchs(monkeypatch, mask, allowance):
    inputs = draw_inputs(_problem(mask))
    expected = oracles.truth(inputs.to("cuda"))
    monkeypatch.setattr(fused_tiles, "_FEWEST_PRODUCTS", 0)
    for blocks in (BLOCKS, None):
        results = streaming_backward(inputs.to("cuda"), blocks=blocks)
        assert not _misses(inputs, results, expected, allowance)

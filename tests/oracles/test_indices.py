"""Calls of mods on index tensors: broadcast where the mod can, mapped over elements otherwise."""

import pytest
import torch

from attncheck.oracles.mod_calls import Indices, call_mask, call_score_mod, is_identity

INDICES = Indices.of(range(2), range(1, 4), range(5, 9), range(3, 8))


def _each(mod, dtype=torch.bool):
    axes = [axis.flatten().tolist() for axis in INDICES.axes]
    table = [
        [[[mod(b, h, i, j) for j in axes[3]] for i in axes[2]] for h in axes[1]] for b in axes[0]
    ]
    return torch.tensor(table, dtype=dtype)


def test_mask_result_has_only_the_axes_the_mask_depends_on():
    assert call_mask(lambda b, h, i, j: i >= j, INDICES).shape == (1, 1, 4, 5)
    assert call_mask(lambda b, h, i, j: j < b, INDICES).shape == (2, 1, 1, 5)
    assert call_mask(lambda b, h, i, j: b.new_ones((), dtype=torch.bool), INDICES).shape == (1,) * 4
    assert call_mask(lambda b, h, i, j: True, INDICES).shape == (1,) * 4


def _stacks(b, h, i, j):
    return torch.stack([b + h, i, j]).amax(dim=0) > 6


def _flattens(b, h, i, j):
    return (i + j + h * b).reshape(()) % 3 == 0


@pytest.mark.parametrize(
    ("mod", "each"),
    [
        (lambda b, h, i, j: (i - j < h) & (b == 0), lambda b, h, i, j: i - j < h and b == 0),
        (_stacks, lambda b, h, i, j: max(b + h, i, j) > 6),
        (_flattens, lambda b, h, i, j: (i + j + h * b) % 3 == 0),
    ],
    ids=["broadcasts", "stacks", "0-d only"],
)
def test_mask_equals_its_elementwise_evaluation(mod, each):
    seen = call_mask(mod, INDICES).expand(INDICES.shape)
    assert torch.equal(seen, _each(each))


@pytest.mark.parametrize("mapped", [False, True])
def test_score_mod_that_reads_a_captured_tensor(mapped):
    table = torch.arange(60.0).view(3, 20).double() / 7
    scores = torch.randn(INDICES.shape, dtype=torch.float64)

    def mod(score, b, h, i, j):
        if mapped:  # works for 0-d indices only
            b = b.reshape(())
        return score * (b + 1) + table[h - 1, i + j]

    biases = _each(lambda b, h, i, j: table[h - 1, i + j].item(), torch.float64)
    expected = scores * torch.tensor([1.0, 2.0]).view(2, 1, 1, 1) + biases
    assert torch.equal(call_score_mod(mod, scores, INDICES), expected)


def test_exception_of_a_mod_reaches_the_caller():
    def broken(b, h, i, j):
        raise RuntimeError("what the author wrote")

    with pytest.raises(RuntimeError, match="what the author wrote"):
        call_mask(broken, INDICES)


def test_identity_returns_its_score_unmodified():
    assert is_identity(lambda score, b, h, i, j: score, "cpu")
    assert not is_identity(lambda score, b, h, i, j: score + 0, "cpu")
    assert not is_identity(lambda score, b, h, i, j: score.add_(i), "cpu")

"""FlashAttention-2's backward as its subject launches it, and its launches for Hopper."""

import pytest
import torch
from tests.kernels.gradient_reference import Question, Score, worst

from attncheck.core.mod_spec import FULL, NONE, Spec
from attncheck.core.tensor_names import GRADIENTS
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Problem
from attncheck.mods import block_mask
from attncheck.subjects import kernel_mods
from attncheck.subjects.triton_flash import Flash2, Flash2Atomic

BLOCKS = (32, 32)


def problem(**changes) -> Problem:
    sizes = {"batch": 1, "heads": 2, "kv_heads": 1, "query": 40, "kv": 50, "head_dim": 20}
    options = {"mask": Spec.of("causal"), "backward": True, "dlse": True, "sink": True}
    return Problem(**(sizes | {"value_dim": 12, "dtype": "bf16"} | options | changes))


def reference_question(inputs):
    case = inputs.problem
    tensors = {name: getattr(inputs, name) for name in ("q", "k", "v", "dout", "dlse", "sink")}
    score = None if case.score == NONE else Score(mod=case.score_mod("cpu"), bend=0.2)
    mods = {"mask": case.mask_mod("cpu"), "score": score}
    return Question(**tensors, **mods, dtype=case.dtype, scale=case.scale)


@pytest.mark.parametrize("subject", [Flash2(), Flash2(BLOCKS), Flash2Atomic(BLOCKS)])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mask": FULL, "dlse": False, "sink": False},
        {"score": Spec.of("softcap", cap=5.0), "dtype": "tf32"},
        {"score": Spec.of("alibi"), "dtype": "fp16"},
    ],
    ids=["causal", "full", "softcap", "alibi"],
)
def test_gradients_of_the_subject_are_within_bounds(changes, subject):
    inputs = draw_inputs(problem(**changes))
    assert subject.backward
    assert subject.concerns(inputs.problem)
    outputs = subject.run(inputs)
    assert outputs.gradients().keys() == {f"d{n}" for n in inputs.tensors()} & set(GRADIENTS)
    shares = worst(outputs.gradients(), reference_question(inputs), outputs.out, outputs.lse)
    assert max(shares.values()) <= 1
    forward = subject.run(inputs.forward())
    assert torch.equal(forward.out, outputs.out)
    assert not forward.gradients()


@pytest.mark.parametrize("subject", [Flash2(), Flash2(BLOCKS)])
def test_nan_key_of_one_document_changes_no_gradient_of_another(subject):
    documents = problem(mask=Spec.of("document", lengths=[30, 20]), kv=50, query=50, sink=False)
    plain = draw_inputs(documents)
    k = plain.k.clone()
    k[:, :, 3] = torch.nan
    right, spoilt = subject.run(plain), subject.run(plain.replace(k=k))
    assert not bool(torch.isfinite(spoilt.dk[:, :, :30]).all())
    for name in ("dk", "dv"):
        one, other = (outputs.gradients()[name][:, :, 30:] for outputs in (spoilt, right))
        assert torch.equal(one, other)


def test_lists_by_rows_and_by_keys_have_the_visible_tiles():
    """With and without lists (``dense``) the gradients have the same bits."""
    inputs = draw_inputs(problem(query=70, kv=70))
    listed, dense = Flash2(BLOCKS).run(inputs), Flash2(BLOCKS, dense=True).run(inputs)
    for name, one in listed.gradients().items():
        assert torch.equal(one, dense.gradients()[name])
    by_rows, by_keys = (
        kernel_mods.visited_tiles(inputs.problem, 32, 16, "cpu", by_keys=by_keys)
        for by_keys in (False, True)
    )
    assert by_rows.runs[..., 1].sum(-1).flatten().tolist() == [2, 4, 5]
    assert by_keys.runs[..., 1].sum(-1).flatten().tolist() == [3, 3, 2, 2, 1]
    # Key block 2 (keys 32 to 47): rows 32 to 63 see some of it, and 64 to 95 end at 69.
    assert by_keys.runs[0, 0, 2].tolist()[0] == [4 * 1 + block_mask.PARTIAL, 2]
    first_keys = [
        [4 * 0 + block_mask.PARTIAL, 1],
        [4 * 1 + block_mask.FULL, 1],
        [4 * 2 + block_mask.PARTIAL, 1],
    ]
    assert by_keys.runs[0, 0, 0].tolist() == first_keys


def test_gradient_launches_have_8_warps_for_every_dtype_and_head_dim():
    for dtype in ("fp32", "tf32", "fp16", "bf16"):
        for dim in (64, 80, 256):
            rows, keys = Flash2().gradient_launches(problem(dtype=dtype, head_dim=dim), "cuda")
            assert {rows.warps, keys.warps} == {8}
            assert rows.precision == keys.precision == ("tf32" if dtype == "tf32" else "ieee")

"""FlashAttention-2's backward as its subject launches it, and compiled for Hopper without one."""

import pytest
import torch
from tests.kernels.gradient_reference import Given, Score, worst

from attncheck.core.mod_spec import FULL, NONE, Spec
from attncheck.core.tensor_names import GRADIENTS
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Problem
from attncheck.subjects import kernel_mods
from attncheck.subjects.triton_flash import Flash2, Flash2Atomic

BLOCKS = (32, 32)


def problem(**changes) -> Problem:
    sizes = {"batch": 1, "heads": 2, "kv_heads": 1, "query": 40, "kv": 50, "head_dim": 20}
    asked = {"mask": Spec.of("causal"), "backward": True, "dlse": True, "sink": True}
    return Problem(**(sizes | {"value_dim": 12, "dtype": "bf16"} | asked | changes))


def of_problem(inputs):
    """The same question in this file's terms."""
    case = inputs.problem
    named = {name: getattr(inputs, name) for name in ("q", "k", "v", "dout", "dlse", "sink")}
    score = None if case.score == NONE else Score(mod=case.score_mod("cpu"), bend=0.2)
    mods = {"mask": case.mask_mod("cpu"), "score": score}
    return Given(**named, **mods, dtype=case.dtype, scale=case.scale)


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
def test_the_subject_gives_gradients(changes, subject):
    inputs = draw_inputs(problem(**changes))
    assert subject.backward
    assert subject.concerns(inputs.problem)
    found = subject.run(inputs)
    assert found.gradients().keys() == {f"d{n}" for n in inputs.tensors()} & set(GRADIENTS)
    reached = worst(found.gradients(), of_problem(inputs), found.out, found.lse)
    assert max(reached.values()) <= 1
    forward = subject.run(inputs.forward())
    assert torch.equal(forward.out, found.out)
    assert not forward.gradients()


@pytest.mark.parametrize("subject", [Flash2(), Flash2(BLOCKS)])
def test_a_key_that_is_nan_has_no_part_in_the_gradients_of_keys_of_other_rows(subject):
    asked = problem(mask=Spec.of("document", lengths=[30, 20]), kv=50, query=50, sink=False)
    plain = draw_inputs(asked)
    k = plain.k.clone()
    k[:, :, 3] = torch.nan
    right, found = subject.run(plain), subject.run(plain.replace(k=k))
    assert not bool(torch.isfinite(found.dk[:, :, :30]).all())
    for name in ("dk", "dv"):
        given, wanted = (one.gradients()[name][:, :, 30:] for one in (found, right))
        assert torch.equal(given, wanted)


def test_its_lists_have_the_tiles_of_their_launches():
    """And dense it has none; to the bit the same."""
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
    # Key block 2, of keys 32 to 47: rows 32 to 63 see some of them, the later ones not all exist.
    assert by_keys.runs[0, 0, 2].tolist()[0] == [2 * 1, 2]
    assert by_keys.runs[0, 0, 0].tolist() == [[2 * 0, 1], [2 * 1 + 1, 1], [2 * 2, 1]]


def test_every_dtype_has_tiles_that_hopper_holds():
    """Those of both gradients are chosen for head dims as the forward's are."""
    for dtype in ("fp32", "tf32", "fp16", "bf16"):
        for dim in (64, 80, 256):
            rows, keys = Flash2().gradient_launches(problem(dtype=dtype, head_dim=dim), "cuda")
            assert {rows.warps, keys.warps} == {8}
            assert rows.precision == keys.precision == ("tf32" if dtype == "tf32" else "ieee")

"""FlashAttention-3's backward without a GPU: its Gluon source runs as Python, in an emulation.

Whether its waits suffice on hardware, and its speed, can be tested on a GPU only.
"""

import pytest
import torch
from tests.kernels.gluon_emulation import EmulatedKernel, delay_arrivals
from tests.kernels.patched_kernels import PLANTED, copy_kernels

from attncheck.core.mod_spec import FULL, Spec
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Case, Problem
from attncheck.subjects.triton_flash import Flash2, Flash3
from attncheck.verify.environment import prepare
from attncheck.verify.run_case import run_case

if not torch.cuda.is_available():
    prepare("cpu")

from attncheck.kernels import flash3_backward, tile

CALLEES = ("walk_rows", "turn_of", "place_in_tile", "_copy", "_await_turns", "_pass_turns", "_step",
           "_differentiate")  # fmt: skip
CAUSAL, WINDOW = Spec.of("causal"), Spec.of("sliding_window", window=130)
SHAPES = [
    {"heads": 2, "query": 300, "head_dim": 64, "mask": CAUSAL},
    {"heads": 3, "query": 130, "kv": 200, "head_dim": 64, "mask": FULL, "dtype": "fp16"},
    {"heads": 2, "query": 140, "kv": 300, "head_dim": 128, "mask": Spec.of("causal_bottom_right")},
    {"heads": 4, "kv_heads": 2, "query": 300, "head_dim": 40, "value_dim": 48, "mask": WINDOW},
    {"heads": 2, "kv_heads": 1, "query": 300, "kv": 100, "head_dim": 128, "mask": CAUSAL},
    {"heads": 1, "query": 70, "kv": 300, "head_dim": 72, "mask": CAUSAL},
    # A key beyond the last would have an infinite weight here.
    {
        "heads": 1,
        "query": 70,
        "kv": 200,
        "head_dim": 64,
        "mask": FULL,
        "distribution": "negative_logits",
        "scale": 4.0,
    },
]


@pytest.fixture
def emulate(monkeypatch):
    """``emulate(module, resident)``: replace the module's kernel by an emulation of its source."""
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here")

    def emulate(module, resident):
        callees = [getattr(module, name) for name in CALLEES]
        kernel = EmulatedKernel(module._backward, [*callees, tile.place], resident)
        monkeypatch.setattr(module, "_backward", kernel)
        monkeypatch.setattr(module, "on_hopper", lambda device: True)
        return module.flash3_backward

    return emulate


def gradients(inputs, *subjects):
    """Of each of ``subjects``, after the forward of FlashAttention-2."""
    forward = Flash2().run(inputs)
    return [subject._prepared_backward(inputs)(forward) for subject in subjects]


def is_right(launcher, shape) -> bool:
    """Whether gradients (after FlashAttention-2's forward) are within bounds and deterministic."""

    class Emulation(Flash3):
        def absent(self, device):
            return None

        def backward_launcher(self):
            return launcher

    problem = Problem(**{"dtype": "bf16", **shape}, backward=True)
    one, again = gradients(draw_inputs(problem), Emulation(), Emulation())
    alike = all(torch.equal(x, y) for x, y in zip(one[:3], again[:3], strict=True))
    status = run_case(Emulation(), Case(problem=problem), device="cpu", brief=True).status
    return alike and status in {"pass", "warn"}


@pytest.mark.parametrize("shape", SHAPES, ids=lambda x: "-".join(map(str, x.values())))
@pytest.mark.parametrize("resident", [2, 64])
def test_gradients_are_within_bounds_and_deterministic(shape, resident, emulate):
    """With two programs at a time, or all of them."""
    assert is_right(emulate(flash3_backward, resident), shape)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_no_wait_depends_on_timing(head_dim, emulate, monkeypatch):
    """Threads pause after arriving at a barrier, so a phase that is waited for late has passed.

    That this catches a late wait is shown for the forward, where one is planted: planted here, it
    would leave threads that wait for ever.
    """
    delay_arrivals(monkeypatch)
    shape = {"heads": 1, "query": 700, "kv": 300, "head_dim": head_dim, "mask": WINDOW}
    assert is_right(emulate(flash3_backward, 64), shape)


@pytest.mark.parametrize("redone", [True, False])
def test_nan_key_reaches_only_rows_that_see_it(redone, emulate, monkeypatch):
    launcher = emulate(flash3_backward, 64)

    class Emulation(Flash3):
        def backward_launcher(self):
            return launcher

    if not redone:
        monkeypatch.setattr(flash3_backward, "redo_rows", lambda *tensors, **how: None)
    problem = Problem(**SHAPES[0] | {"dtype": "bf16", "backward": True})
    inputs = draw_inputs(problem)
    first = 160  # row that sees the key
    k = inputs.k.clone()
    k[:, :, first] = torch.nan
    inputs = inputs.replace(k=k)
    (dq, *_), (other, *_) = gradients(inputs, Emulation(), Flash2())
    assert dq[:, :, first:].isnan().all()
    before = dq[:, :, :first]
    assert bool(before.isfinite().all()) == redone, "the rows above it share tiles with those below"
    if redone:
        assert torch.equal(before, other[:, :, :first])


@pytest.mark.parametrize("fault", PLANTED["flash3_backward"])
def test_planted_fault_fails(fault, emulate, tmp_path):
    copy = copy_kernels(tmp_path, ("flash3_backward",), **PLANTED["flash3_backward"][fault])
    launcher = emulate(copy.flash3_backward, 64)
    assert not all(is_right(launcher, shape) for shape in SHAPES)

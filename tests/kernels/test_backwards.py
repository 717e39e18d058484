"""What holds of each backward: FlashAttention-2's, with atomics too, and packed documents'."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from tests.kernels import backward_calls as dense
from tests.kernels import packed_calls as packed
from tests.kernels.backward_calls import same, scattered
from tests.kernels.gradient_reference import given
from tests.kernels.patched_kernels import FLASH2, faulty
from tests.kernels.test_flash2_backward import MASKS, SCORES
from tests.kernels.watched_accesses import Watched

from attncheck.core.errors import UsageError

FLAGS = {"fp32": "bottom_right", "tf32": "top_left", "fp16": "", "bf16": "bottom_right"}


def ask_packed(dtype="fp32", **changes):
    return packed.asked_of(FLAGS[dtype], dtype=dtype, **changes)


CALLS = {
    "flash2": SimpleNamespace(
        ask=partial(given, MASKS["causal"]),
        dead=given(MASKS["later rows see nothing"]),
        blind=given(MASKS["nothing"], sink=True),
        softcap=SCORES["softcap"],
        given=lambda asked: asked,
        run=dense.run,
        worst_of=dense.worst_of,
        backward=dense.flash2_backward,
        scattered=scattered,
        files=FLASH2,
        most=given(MASKS["causal"], "bf16", sink=True),
    ),
    "varlen": SimpleNamespace(
        ask=ask_packed,
        dead=packed.asked_of("top_left", packed.WITHIN["later rows see nothing"]),
        blind=packed.asked_of(within=packed.WITHIN["nothing"], sink=True),
        softcap=packed.SCORES["softcap"],
        given=lambda asked: asked.given,
        run=packed.run,
        worst_of=packed.worst_of,
        backward=packed.varlen_backward,
        scattered=lambda out: scattered(out[None])[0],
        files=("varlen_backward",),
        most=packed.asked_of(
            "bottom_right", packed.WITHIN["stripes"], dtype="bf16", sink=True, local=False
        ),
    ),
}
CALLS["flash2, atomic"] = SimpleNamespace(
    **vars(CALLS["flash2"]) | {"run": partial(dense.run, atomic=True)}
)


@pytest.fixture(params=CALLS)
def calls(request):
    return CALLS[request.param]


@pytest.mark.parametrize("dtype", FLAGS)
def test_gradients_are_right_in_every_dtype(dtype, calls):
    """Of query heads that share keys, with a sink, and a loss of LSE."""
    asked = calls.ask(dtype=dtype, sink=True)
    found = calls.run(asked)
    assert calls.worst_of(asked, found) <= 1
    tensors = vars(asked) if hasattr(asked, "q") else asked.packed() | {"sink": asked.given.sink}
    for name in ("q", "k", "v", "sink"):
        gradient = found[2][f"d{name}"]
        assert (gradient.dtype, gradient.shape) == (tensors[name].dtype, tensors[name].shape)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_no_gradient_of_lse_is_one_of_0(dtype, calls):
    asked = calls.ask(dtype=dtype, dlse=False, sink=True)
    found, zeros = calls.run(asked), torch.zeros(calls.given(asked).q.shape[:3])
    assert same(found, calls.run(asked.but(dlse=zeros)))
    assert calls.worst_of(asked, found) <= 1


def test_lse_alone(calls):
    """dout may be one 0, expanded."""
    asked = calls.ask(sink=True)
    asked = asked.but(dout=torch.zeros(()).expand(calls.given(asked).dout.shape))
    found = calls.run(asked)
    assert calls.worst_of(asked, found) <= 1
    assert not found[2]["dv"].any()


def test_strides_are_used(calls):
    asked = calls.ask(dtype="bf16", sink=True)
    tensors = calls.given(asked)
    views = {name: scattered(getattr(tensors, name)) for name in ("q", "k", "v", "dout")}
    views["dlse"] = tensors.dlse.mT.contiguous().mT
    assert same(calls.run(asked.but(**views)), calls.run(asked))


def test_out_has_strides_of_its_own(calls):
    def moved(q, k, v, out, *rest, **keywords):
        return calls.backward(q, k, v, calls.scattered(out), *rest, **keywords)

    assert same(calls.run(calls.ask(), backward=moved), calls.run(calls.ask()))


def test_a_row_that_sees_no_key_has_no_part_in_anything(calls):
    """Whatever its gradients are, as long as dO is finite."""
    asked, tensors = calls.dead, calls.given(calls.dead)
    dead = ~tensors.seen().any(-1)
    assert dead.any()
    dlse = tensors.dlse.masked_fill(dead, torch.nan)
    dout = tensors.dout.masked_fill(dead[..., None], 1e30)
    assert same(calls.run(asked.but(dlse=dlse, dout=dout)), calls.run(asked))


def test_a_row_without_keys_passes_its_gradient_of_lse_to_the_sink(calls):
    found = calls.run(calls.blind)
    assert not any(found[2][name].any() for name in ("dq", "dk", "dv"))
    assert calls.worst_of(calls.blind, found) <= 1
    assert found[2]["dsink"].all()


def test_runs_give_the_same_bits(calls):
    asked = calls.ask(dtype="bf16", sink=True)
    assert same(calls.run(asked), calls.run(asked))


@pytest.mark.parametrize("missing", ["score", "slope"])
def test_a_score_mod_needs_its_slope(missing, calls):
    def without(*tensors, **keywords):
        return calls.backward(*tensors, **keywords | {missing: None})

    with pytest.raises(UsageError, match="needs its slope"):
        calls.run(calls.ask(score=calls.softcap), backward=without)


def test_the_copy_without_a_fault_is_right(tmp_path, calls):
    """Of which the planted faults of each backward are made."""
    copy = faulty(tmp_path, calls.files, "by_keys_kernel", "(dk * scale)", "(dk * scale)")
    assert same(calls.run(calls.ask(), backward=copy), calls.run(calls.ask()))


@pytest.mark.parametrize("missing", [None, "q", "k", "v", "dout", "dlse", "sink"])
def test_reads_and_writes_its_own_tensors_only(missing, calls, monkeypatch):
    """The interpreter itself would copy from anywhere."""
    asked, names = calls.most, ("q", "k", "v", "dout", "dlse", "sink")
    tensors = [getattr(calls.given(asked), name) for name in names if name != missing]

    def remembered(make):
        def made(*arguments, **named):
            tensors.append(make(*arguments, **named))
            return tensors[-1]

        return made

    for name in ("empty", "zeros", "empty_like", "tensor"):
        monkeypatch.setattr(torch, name, remembered(getattr(torch, name)))
    watched = Watched(monkeypatch, tensors)
    calls.run(asked)
    assert (watched.outside > 0) == (missing is not None)

"""Tests of every backward: FlashAttention-2's, with and without atomics, and packed documents'."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from tests.kernels import backward_calls as dense
from tests.kernels import packed_calls as packed
from tests.kernels.backward_calls import same, scattered
from tests.kernels.gradient_reference import make_question
from tests.kernels.patched_kernels import FLASH2, faulty
from tests.kernels.test_flash2_backward import MASKS, SCORES
from tests.kernels.watched_accesses import Watched

from attncheck.core.errors import UsageError

FLAGS = {"fp32": "bottom_right", "tf32": "top_left", "fp16": "", "bf16": "bottom_right"}


def make_packed(dtype="fp32", **changes):
    return packed.pack(FLAGS[dtype], dtype=dtype, **changes)


CALLS = {
    "flash2": SimpleNamespace(
        make=partial(make_question, MASKS["causal"]),
        some_rows_empty=make_question(MASKS["later rows see nothing"]),
        all_rows_empty=make_question(MASKS["nothing"], sink=True),
        softcap=SCORES["softcap"],
        whole=lambda question: question,
        run=dense.run,
        worst_of=dense.worst_of,
        backward=dense.flash2_backward,
        scattered=scattered,
        modules=FLASH2,
        every_tensor=make_question(MASKS["causal"], "bf16", sink=True),
    ),
    "varlen": SimpleNamespace(
        make=make_packed,
        some_rows_empty=packed.pack("top_left", packed.WITHIN["later rows see nothing"]),
        all_rows_empty=packed.pack(within=packed.WITHIN["nothing"], sink=True),
        softcap=packed.SCORES["softcap"],
        whole=lambda question: question.whole,
        run=packed.run,
        worst_of=packed.worst_of,
        backward=packed.varlen_backward,
        scattered=lambda out: scattered(out[None])[0],
        modules=("varlen_backward",),
        every_tensor=packed.pack(
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
def test_gradients_are_within_bounds_in_every_dtype(dtype, calls):
    """With query heads that share keys, a sink, and a loss of LSE."""
    question = calls.make(dtype=dtype, sink=True)
    results = calls.run(question)
    assert calls.worst_of(question, results) <= 1
    if hasattr(question, "q"):
        tensors = vars(question)
    else:
        tensors = question.tensors() | {"sink": question.whole.sink}
    for name in ("q", "k", "v", "sink"):
        gradient = results[2][f"d{name}"]
        assert (gradient.dtype, gradient.shape) == (tensors[name].dtype, tensors[name].shape)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_missing_dlse_gives_the_same_bits_as_zeros(dtype, calls):
    question = calls.make(dtype=dtype, dlse=False, sink=True)
    results, zeros = calls.run(question), torch.zeros(calls.whole(question).q.shape[:3])
    assert same(results, calls.run(question.but(dlse=zeros)))
    assert calls.worst_of(question, results) <= 1


def test_gradients_of_a_loss_of_lse_alone(calls):
    """dout is then a single 0, expanded: all its strides are 0."""
    question = calls.make(sink=True)
    question = question.but(dout=torch.zeros(()).expand(calls.whole(question).dout.shape))
    results = calls.run(question)
    assert calls.worst_of(question, results) <= 1
    assert not results[2]["dv"].any()


def test_inputs_may_have_any_strides(calls):
    question = calls.make(dtype="bf16", sink=True)
    tensors = calls.whole(question)
    views = {name: scattered(getattr(tensors, name)) for name in ("q", "k", "v", "dout")}
    views["dlse"] = tensors.dlse.mT.contiguous().mT
    assert same(calls.run(question.but(**views)), calls.run(question))


def test_saved_out_may_have_any_strides(calls):
    def with_scattered_out(q, k, v, out, *rest, **keywords):
        return calls.backward(q, k, v, calls.scattered(out), *rest, **keywords)

    assert same(calls.run(calls.make(), backward=with_scattered_out), calls.run(calls.make()))


def test_row_without_keys_changes_no_gradient(calls):
    """Its dLSE may be NaN and its dO huge, as long as dO is finite."""
    question, tensors = calls.some_rows_empty, calls.whole(calls.some_rows_empty)
    empty = ~tensors.seen().any(-1)
    assert empty.any()
    dlse = tensors.dlse.masked_fill(empty, torch.nan)
    dout = tensors.dout.masked_fill(empty[..., None], 1e30)
    assert same(calls.run(question.but(dlse=dlse, dout=dout)), calls.run(question))


def test_row_without_keys_passes_its_gradient_of_lse_to_the_sink(calls):
    results = calls.run(calls.all_rows_empty)
    assert not any(results[2][name].any() for name in ("dq", "dk", "dv"))
    assert calls.worst_of(calls.all_rows_empty, results) <= 1
    assert results[2]["dsink"].all()


def test_gradients_are_deterministic(calls):
    question = calls.make(dtype="bf16", sink=True)
    assert same(calls.run(question), calls.run(question))


@pytest.mark.parametrize("missing", ["score", "slope"])
def test_score_mod_without_its_slope_is_refused(missing, calls):
    def without(*tensors, **keywords):
        return calls.backward(*tensors, **keywords | {missing: None})

    with pytest.raises(UsageError, match="needs its slope"):
        calls.run(calls.make(score=calls.softcap), backward=without)


def test_copy_without_a_fault_gives_the_same_bits(tmp_path, calls):
    """Tests of planted faults patch such copies: only the fault may make a difference."""
    copy = faulty(tmp_path, calls.modules, "by_keys_kernel", "(dk * scale)", "(dk * scale)")
    assert same(calls.run(calls.make(), backward=copy), calls.run(calls.make()))


@pytest.mark.parametrize("missing", [None, "q", "k", "v", "dout", "dlse", "sink"])
def test_backward_accesses_its_own_tensors_only(missing, calls, monkeypatch):
    """A tensor left out of the watch shows that reads of it are noticed."""
    question, names = calls.every_tensor, ("q", "k", "v", "dout", "dlse", "sink")
    tensors = [getattr(calls.whole(question), name) for name in names if name != missing]

    def recording(make):
        def make_and_record(*arguments, **named):
            tensors.append(make(*arguments, **named))
            return tensors[-1]

        return make_and_record

    for name in ("empty", "zeros", "empty_like", "tensor"):
        monkeypatch.setattr(torch, name, recording(getattr(torch, name)))
    watched = Watched(monkeypatch, tensors)
    calls.run(question)
    assert (watched.outside > 0) == (missing is not None)

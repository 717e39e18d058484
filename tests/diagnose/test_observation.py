"""Facts and families in a diagnosis that tries no model, of faults planted in the ideal kernel."""

import pytest
import torch
from tests.diagnose.helpers import diagnose, exclude_models
from tests.planted_kernels.other_steps import stepping

from attncheck.core.mod_spec import Spec
from attncheck.core.outputs import Outputs
from attncheck.fault_models.fault_model import FAMILIES
from attncheck.inputs.problem import Problem
from attncheck.subjects.ideal import Ideal

pytestmark = pytest.mark.usefixtures("shared_evidence")

PLAIN = Problem(query=40, kv=70, heads=4, kv_heads=2, batch=2, head_dim=64, dtype="bf16")
ROWS = "rows change with the queries of others, and not with their own"
HEADS = "other sequences or heads change with the keys and values of sequence 0, key head 0"


def observe(monkeypatch, call, problem=PLAIN):
    """Diagnose ``call(run, inputs)`` without models; ``run(inputs)`` is the right result."""

    def prepare(self, inputs):
        return lambda: call(lambda read: Ideal.prepare(self, read)(), inputs)

    exclude_models(monkeypatch)
    return diagnose(stepping(prepare=prepare), problem)


def observe_out(monkeypatch, change, problem=PLAIN):
    """Diagnose without models a right kernel whose out is replaced by ``change(out)``."""

    def call(run, inputs):
        outputs = run(inputs)
        return Outputs(change(outputs.out.float()).to(outputs.out.dtype), outputs.lse)

    return observe(monkeypatch, call, problem)


def _first(tensor):
    return tensor[:1, :1].expand(tensor.shape).contiguous()


def _values_of_keys(x):
    return x.replace(k=x.v.clone()) if x.v.shape == x.k.shape else x


MISREAD_INPUTS = {
    "the row before": (lambda x: x.replace(q=x.q.roll(1, 2)), ROWS),
    "the first key head": (lambda x: x.replace(k=_first(x.k)), HEADS),
    "values for keys": (_values_of_keys, "LSE changes with the values"),
    "values turned": (
        lambda x: x.replace(v=x.v.roll(1, 3)),
        "columns change with other columns of the values",
    ),
    "the first key": (
        lambda x: x.replace(k=x.k[:, :, :1].expand(x.k.shape).contiguous()),
        "and with their values",
    ),
    "column 0": (
        lambda x: x.replace(q=x.q[..., :1].expand(x.q.shape).contiguous()),
        "nothing changes with columns 16 and more of q",
    ),
}


@pytest.mark.parametrize("name", MISREAD_INPUTS)
def test_misread_inputs_are_mapping_family(name, monkeypatch):
    change, fact = MISREAD_INPUTS[name]
    diagnosis = observe(monkeypatch, lambda run, inputs: run(change(inputs)))
    assert (diagnosis.level, diagnosis.family) == ("family", FAMILIES["mapping"])
    assert any(fact in each for each in diagnosis.facts)


@pytest.mark.parametrize("dtype", ["e4m3", "e5m2", "fp16", "fp32"])
def test_unknown_fault_is_observed_in_every_dtype(dtype, monkeypatch):
    """Planted: a fault of no family, so that every further question is asked; none may raise."""

    def add_wave(out):
        return out + torch.arange(out.numel()).view(out.shape).sin()

    diagnosis = observe_out(monkeypatch, add_wave, PLAIN.replace(dtype=dtype))
    assert (diagnosis.level, diagnosis.family) == ("unknown", "")


def test_what_whole_tiles_mend_is_observed(monkeypatch):
    """Rows and columns of a ragged call are off by what no family explains."""

    def spoil(out):
        wave = torch.arange(out.numel()).view(out.shape).sin()
        return out + wave * (out.shape[2] % 128 > 0)

    facts = observe_out(monkeypatch, spoil).facts
    assert "right with whole tiles (128 × 128)" in facts
    assert facts.index("right with whole tiles (128 × 128)") < facts.index("wrong as well in fp32")


def test_outputs_written_to_other_heads_are_mapping_family(monkeypatch):
    diagnosis = observe_out(monkeypatch, lambda out: out.roll(1, 1))
    assert diagnosis.family == FAMILIES["mapping"]


@pytest.mark.parametrize("each", [True, False], ids=["each row its own", "one for all"])
def test_output_factor_is_recognised_for_all_rows_or_each(each, monkeypatch):
    def scale(out):
        return out * (torch.arange(1.0, out.shape[2] + 1)[:, None] if each else 1.5)

    diagnosis = observe_out(monkeypatch, scale, PLAIN.replace(kv=128))
    assert diagnosis.family == FAMILIES["rescaling" if each else "factor"]


def test_rows_of_zeros_are_not_taken_for_factor(monkeypatch):
    """Planted: the sums of half of the rows are lost."""

    def clear_late_rows(out):
        late = torch.arange(out.shape[2]) >= out.shape[2] // 2
        return out.masked_fill(late[:, None], 0.0)

    assert observe_out(monkeypatch, clear_late_rows, PLAIN.replace(kv=128)).family == ""


def test_factor_of_later_sequence_alone_is_mapping_family(monkeypatch):
    """Planted: the second sequence's output has a factor, as if it read another one's."""

    def scale_later_sequences(out):
        return out * (1.0 + 0.5 * torch.arange(len(out)).view(-1, 1, 1, 1))

    diagnosis = observe_out(monkeypatch, scale_later_sequences, PLAIN.replace(kv=128))
    assert diagnosis.family == FAMILIES["mapping"]


def test_keys_lost_by_one_sequence_are_not_taken_for_tile(monkeypatch):
    """Planted: the second of two sequences is taken to be as short as its first tile."""
    spec = Spec.of("padding", lengths=[30, 64])
    problem = PLAIN.replace(kv=64, mask=spec)

    def call(run, inputs):
        own = inputs.problem
        if own.mask != spec:
            return run(inputs)
        return run(inputs.replace(problem=own.replace(mask=Spec.of("padding", lengths=[30, 32]))))

    diagnosis = observe(monkeypatch, call, problem)
    assert diagnosis.family != FAMILIES["tile"]
    assert any("keys 32–63 do not count" in fact for fact in diagnosis.facts)


def test_lost_first_tile_may_have_been_rescaled_by_zero(monkeypatch):
    """Planted: only the last of two tiles counts, in the output and in LSE."""

    def call(run, inputs):
        late = inputs.problem.kv // 2 // 16 * 16
        kept = inputs.replace(
            problem=inputs.problem.replace(kv=inputs.problem.kv - late),
            k=inputs.k[:, :, late:].contiguous(),
            v=inputs.v[:, :, late:].contiguous(),
        )
        return run(kept)

    diagnosis = observe(monkeypatch, call, PLAIN.replace(kv=64))
    assert diagnosis.family != FAMILIES["tile"]
    assert any("do not count" in fact for fact in diagnosis.facts)


def test_score_factor_is_factor_family(monkeypatch):
    def call(run, inputs):
        problem = inputs.problem
        return run(inputs.replace(problem=problem.replace(scale=problem.scale / 3)))

    assert observe(monkeypatch, call).family == FAMILIES["factor"]


@pytest.mark.parametrize("kv", [70, 150])
def test_hidden_keys_that_count_are_found_at_any_length(kv, monkeypatch):
    """Planted: a window that is wider by two."""

    def call(run, inputs):
        wider = inputs.problem.replace(mask=Spec.of("sliding_window", window=9))
        return run(inputs.replace(problem=wider))

    mask = Spec.of("sliding_window", window=7)
    diagnosis = observe(monkeypatch, call, PLAIN.replace(batch=1, query=kv, kv=kv, mask=mask))
    assert diagnosis.family == FAMILIES["mask"]
    assert any("count although they are hidden" in fact for fact in diagnosis.facts)


def test_rows_in_which_no_key_counts_are_reported(monkeypatch):
    """Planted: for the first rows the loop ends before it begins."""

    def call(run, inputs):
        outputs = run(inputs)
        early = torch.arange(outputs.out.shape[2]) < 16
        return Outputs(
            outputs.out.masked_fill(early[:, None], 0.0),
            outputs.lse.masked_fill(early, -torch.inf),
        )

    diagnosis = observe(monkeypatch, call, PLAIN.replace(batch=1, mask=Spec.of("causal"), kv=40))
    assert diagnosis.family == FAMILIES["tile"]
    assert any("do not count in rows 0–15" in fact for fact in diagnosis.facts)


class Capped(Ideal):
    """A softcap made of another function than tanh."""

    name = "capped"

    def __init__(self, function):
        super().__init__()
        self.function = function

    def prepare(self, inputs):
        problem = inputs.problem
        if problem.score.name != "softcap":
            return super().prepare(inputs)

        def call():
            q, k, v = inputs.promoted()
            k, v = (x.repeat_interleave(problem.group, 1) for x in (k, v))
            cap = problem.score.values["cap"]
            s = cap * self.function(q @ k.mT * problem.scale / cap)
            out = torch.softmax(s, -1) @ v
            return Outputs(out.to(inputs.q.dtype), s.logsumexp(-1).float())

        return call


@pytest.mark.parametrize(
    ("function", "sign"),
    [(lambda x: x / (1 + x.abs()), True), (lambda x: x.tanh().to(torch.float16).double(), False)],
    ids=["another", "rounded"],
)
def test_softcap_of_other_function_is_distinguished_from_rounded_tanh(function, sign, monkeypatch):
    exclude_models(monkeypatch)
    problem = PLAIN.replace(score=Spec.of("softcap", cap=20.0), dtype="fp32")
    diagnosis = diagnose(Capped(function), problem)
    if sign:
        assert (diagnosis.level, diagnosis.tried) == ("named", 0)
        assert [one.model for one in diagnosis.ranked] == ["softcap-of-another-function"]
    else:
        assert (diagnosis.level, diagnosis.family) == ("family", FAMILIES["precision"])


@pytest.mark.parametrize(
    ("change", "family"),
    [(torch.sin, "precision"), (torch.ones_like, "lse")],
    ids=["either sign", "one sign"],
)
def test_small_errors_of_lse_of_either_sign_are_lost_precision(change, family, monkeypatch):
    def call(run, inputs):
        outputs = run(inputs)
        number = torch.arange(outputs.lse.numel()).view(outputs.lse.shape).float()
        return Outputs(outputs.out, outputs.lse + 1e-3 * change(number))

    assert observe(monkeypatch, call).family == FAMILIES[family]

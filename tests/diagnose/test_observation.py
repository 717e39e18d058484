"""What is seen of a failure of which no model is tried: faults planted around the ideal kernel."""

import pytest
import torch
from tests.diagnose.told import left_out, told
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


def seen(monkeypatch, call, problem=PLAIN):
    """What a diagnosis without models tells of ``call``, which is given the right kernel's own."""

    def prepare(self, inputs):
        return lambda: call(lambda read: Ideal.prepare(self, read)(), inputs)

    left_out(monkeypatch)
    return told(stepping(prepare=prepare), problem)


def _first(tensor):
    return tensor[:1, :1].expand(tensor.shape).contiguous()


def _values_of_keys(x):
    return x.replace(k=x.v.clone()) if x.v.shape == x.k.shape else x


ELSEWHERE = {
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


@pytest.mark.parametrize("name", ELSEWHERE)
def test_numbers_that_are_read_elsewhere_are_told(name, monkeypatch):
    change, fact = ELSEWHERE[name]
    found = seen(monkeypatch, lambda run, inputs: run(change(inputs)))
    assert (found.level, found.family) == ("family", FAMILIES["mapping"])
    assert any(fact in one for one in found.facts)


@pytest.mark.parametrize("dtype", ["e4m3", "e5m2", "fp16", "fp32"])
def test_in_any_dtype_nothing_that_is_asked_again_raises(dtype, monkeypatch):
    """Planted: what no family is of, so that all is asked."""

    def call(run, inputs):
        outputs = run(inputs)
        waves = torch.arange(outputs.out.numel()).view(outputs.out.shape).sin()
        return Outputs((outputs.out.float() + waves).to(outputs.out.dtype), outputs.lse)

    found = seen(monkeypatch, call, PLAIN.replace(dtype=dtype))
    assert (found.level, found.family) == ("unknown", "")


def test_rows_that_are_written_elsewhere_are_told(monkeypatch):
    def call(run, inputs):
        outputs = run(inputs)
        return Outputs(outputs.out.roll(1, 1), outputs.lse)

    found = seen(monkeypatch, call)
    assert found.family == FAMILIES["mapping"]


@pytest.mark.parametrize("each", [True, False], ids=["each row its own", "one for all"])
def test_an_output_off_by_a_factor_is_told(each, monkeypatch):
    def call(run, inputs):
        outputs = run(inputs)
        row = torch.arange(1.0, outputs.out.shape[2] + 1)[:, None] if each else 1.5
        return Outputs((outputs.out.float() * row).to(outputs.out.dtype), outputs.lse)

    found = seen(monkeypatch, call, PLAIN.replace(kv=128))
    assert found.family == FAMILIES["rescaling" if each else "factor"]


def test_rows_of_zeros_are_off_by_no_factor(monkeypatch):
    """Planted: all that a half of the rows summed is gone."""

    def call(run, inputs):
        outputs = run(inputs)
        late = torch.arange(outputs.out.shape[2]) >= outputs.out.shape[2] // 2
        return Outputs(outputs.out.masked_fill(late[:, None], 0.0), outputs.lse)

    assert seen(monkeypatch, call, PLAIN.replace(kv=128)).family == ""


def test_what_the_first_sequence_has_right_is_no_factor(monkeypatch):
    """Planted: the second one's output is off by a factor, as one is that reads another's."""

    def call(run, inputs):
        outputs = run(inputs)
        factors = 1.0 + 0.5 * torch.arange(inputs.problem.batch).view(-1, 1, 1, 1)
        return Outputs((outputs.out.float() * factors).to(outputs.out.dtype), outputs.lse)

    assert seen(monkeypatch, call, PLAIN.replace(kv=128)).family == FAMILIES["mapping"]


def test_keys_that_one_sequence_has_lost_may_be_of_its_length(monkeypatch):
    """Planted: the second of two sequences is taken for as short as its first tile."""
    spec = Spec.of("padding", lengths=[30, 64])
    problem = PLAIN.replace(kv=64, mask=spec)

    def call(run, inputs):
        own = inputs.problem
        if own.mask != spec:
            return run(inputs)
        return run(inputs.replace(problem=own.replace(mask=Spec.of("padding", lengths=[30, 32]))))

    found = seen(monkeypatch, call, problem)
    assert found.family != FAMILIES["tile"]
    assert any("keys 32–63 do not count" in fact for fact in found.facts)


def test_a_first_tile_that_is_gone_may_have_been_rescaled_by_0(monkeypatch):
    """Planted: of two tiles the last alone counts, in the output and in LSE."""

    def call(run, inputs):
        late = inputs.problem.kv // 2 // 16 * 16
        kept = inputs.replace(
            problem=inputs.problem.replace(kv=inputs.problem.kv - late),
            k=inputs.k[:, :, late:].contiguous(),
            v=inputs.v[:, :, late:].contiguous(),
        )
        return run(kept)

    found = seen(monkeypatch, call, PLAIN.replace(kv=64))
    assert found.family != FAMILIES["tile"]
    assert any("do not count" in fact for fact in found.facts)


def test_scores_off_by_a_factor_are_told(monkeypatch):
    def call(run, inputs):
        problem = inputs.problem
        return run(inputs.replace(problem=problem.replace(scale=problem.scale / 3)))

    assert seen(monkeypatch, call).family == FAMILIES["factor"]


@pytest.mark.parametrize("kv", [70, 150])
def test_keys_of_any_length_are_counted(kv, monkeypatch):
    """Planted: a window that is wider by two."""

    def call(run, inputs):
        wider = inputs.problem.replace(mask=Spec.of("sliding_window", window=9))
        return run(inputs.replace(problem=wider))

    mask = Spec.of("sliding_window", window=7)
    found = seen(monkeypatch, call, PLAIN.replace(batch=1, query=kv, kv=kv, mask=mask))
    assert found.family == FAMILIES["mask"]
    assert any("count although they are hidden" in fact for fact in found.facts)


def test_rows_in_which_no_key_counts_are_told(monkeypatch):
    """Planted: a loop that ends before it begins, for the first rows."""

    def call(run, inputs):
        outputs = run(inputs)
        early = torch.arange(outputs.out.shape[2]) < 16
        return Outputs(
            outputs.out.masked_fill(early[:, None], 0.0),
            outputs.lse.masked_fill(early, -torch.inf),
        )

    found = seen(monkeypatch, call, PLAIN.replace(batch=1, mask=Spec.of("causal"), kv=40))
    assert found.family == FAMILIES["tile"]
    assert any("do not count in rows 0–15" in fact for fact in found.facts)


class Capped(Ideal):
    """A cap that is made of something else than tanh."""

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
def test_a_cap_is_another_function_or_a_rounded_one(function, sign, monkeypatch):
    left_out(monkeypatch)
    problem = PLAIN.replace(score=Spec.of("softcap", cap=20.0), dtype="fp32")
    found = told(Capped(function), problem)
    if sign:
        assert (found.level, found.tried) == ("named", 0)
        assert [one.model for one in found.ranked] == ["softcap-of-another-function"]
    else:
        assert (found.level, found.family) == ("family", FAMILIES["precision"])

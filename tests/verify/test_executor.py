"""The in-process executor: calls, timing, contract checks and detection of changed inputs."""

import itertools
import re
import time
import warnings
from dataclasses import replace

import pytest
import torch

from attncheck.core.formats import FORMATS
from attncheck.core.mod_spec import Spec
from attncheck.core.outputs import Outputs
from attncheck.core.sanitize_text import LONGEST
from attncheck.inputs import input_tensors as inputs_room
from attncheck.inputs.problem import Problem
from attncheck.records.failure_causes import without_place
from attncheck.subjects.capabilities.subject import ContractViolation, Refused, Subject
from attncheck.subjects.ideal import Ideal
from attncheck.verify.call_conditions import CallConditions
from attncheck.verify.executor import ENDS_CALLER, Execution, Failure, InProcess

ATTENTION = Problem(heads=4, kv_heads=2, query=5, kv=7, head_dim=8, value_dim=3, dtype="fp16")
SOFTMAX = Problem(operation="softmax", heads=2, query=5, kv=7, dtype="fp16")
FP8 = ATTENTION.replace(dtype="e4m3")
TIMED = CallConditions(timed=True)
NAMES = [
    *[(ATTENTION, name) for name in ("q", "k", "v")],
    *[(FP8, name) for name in ("q", "k", "v", "q_descale", "k_descale", "v_descale")],
    (SOFTMAX, "x"),
]


class Kernel(Subject):
    """Returns zeros: ``effect`` runs in each call, ``make_outputs`` builds what it returns."""

    name, summary = "zeros", "zeros of the right shape"

    def __init__(
        self,
        effect=lambda _inputs: None,
        columns=None,
        make_outputs=lambda _inputs, out: Outputs(out),
    ):
        self.effect, self.columns, self.make_outputs = effect, columns, make_outputs

    def unsupported(self, problem, device):
        return None

    def prepare(self, inputs):
        problem = inputs.problem
        columns = problem.kv if problem.operation == "softmax" else problem.value_dim
        rows = (problem.batch, problem.heads, problem.query)

        def call():
            self.effect(inputs)
            shape = (*rows, self.columns or columns)
            out = torch.zeros(shape, dtype=problem.formats.output.torch_dtype)
            return self.make_outputs(inputs, out)

        return call


def run(kernel, problem=ATTENTION, **options):
    return InProcess().run(kernel, inputs_room.draw_inputs(problem), **options)


@pytest.mark.parametrize("problem", [ATTENTION, SOFTMAX, FP8], ids=str)
def test_kernel_that_only_reads_its_inputs_is_executed(problem):
    result = run(Kernel(lambda inputs: [t.sum() for t in inputs.promoted()]), problem)
    assert isinstance(result, Execution)
    assert result.seconds is None


@pytest.mark.parametrize(
    ("problem", "columns", "expected"), [(ATTENTION, 7, 3), (SOFTMAX, 3, 7), (FP8, 8, 3)]
)
def test_wrong_number_of_output_columns_breaks_the_contract(problem, columns, expected):
    result = run(Kernel(columns=columns), problem)
    assert result == Failure(
        kind="contract",
        message=f"out.shape=(1, {problem.heads}, 5, {columns}), "
        f"but should be (1, {problem.heads}, 5, {expected}).",
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda o: Outputs(o.out[..., :-1], o.lse),
            "out.shape=(1, 4, 5, 2), but should be (1, 4, 5, 3).",
        ),
        (
            lambda o: Outputs(o.out.float(), o.lse),
            "out.dtype=torch.float32, but should be torch.float16.",
        ),
        (
            lambda o: Outputs(o.out, o.lse[..., None]),
            "lse.shape=(1, 4, 5, 1), but should be (1, 4, 5).",
        ),
        (lambda o: Outputs(o.out.to("meta"), o.lse), "out.device=meta, but should be cpu."),
        (
            lambda o: Outputs(o.out, o.lse.half()),
            "lse.dtype=torch.float16, but should be torch.float32.",
        ),
        (lambda o: Outputs([1.0], o.lse), "out is list, but should be a tensor."),
        (
            lambda o: Outputs(o.out.to_sparse()),
            "out.layout=torch.sparse_coo, but should be torch.strided.",
        ),
        (lambda o: (o.out, o.lse), "returned tuple, but should return Outputs."),
    ],
)
def test_wrong_output_type_shape_dtype_layout_or_device_breaks_the_contract(change, message):
    broken = Kernel(make_outputs=lambda _, out: change(Outputs(out, torch.zeros(1, 4, 5))))
    assert run(broken) == Failure(kind="contract", message=message)


def kernel_with_gradients(*names, **changes):
    """A kernel that returns a gradient of each of these inputs, valid in all but ``changes``."""

    def make_outputs(inputs, out):
        valid = {f"d{name}": inputs.tensors()[name].clone() for name in names}
        return Outputs(out, **valid | changes)

    return Kernel(make_outputs=make_outputs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, ""),
        ({"dq": None}, "dq is NoneType, but should be a tensor."),
        ({"dk": torch.zeros(1, 4, 7, 8)}, "dk.shape=(1, 4, 7, 8), but should be (1, 2, 7, 8)."),
        ({"dv": torch.zeros(1, 2, 7, 3)}, "dv.dtype=torch.float32, but should be torch.float16."),
        ({"dsink": torch.zeros(2)}, "dsink.shape=(2,), but should be (4,)."),
        ({"dsink": None}, "dsink is NoneType, but should be a tensor."),
    ],
)
def test_gradients_must_have_shape_and_dtype_of_their_inputs(changes, message):
    problem = ATTENTION.replace(sink=True, backward=True)
    result = run(kernel_with_gradients("q", "k", "v", "sink", **changes), problem)
    if message:
        assert result == Failure(kind="contract", message=message)
    else:
        assert list(result.outputs.gradients()) == ["dq", "dk", "dv", "dsink"]


@pytest.mark.parametrize(
    ("dcaptured", "message"),
    [
        (torch.zeros(4), ""),
        (None, "dcaptured is NoneType, but should be a tensor."),
        (torch.zeros(5), "dcaptured.shape=(5,), but should be (4,)."),
        (torch.zeros(4).half(), "dcaptured.dtype=torch.float16, but should be torch.float32."),
    ],
)
def test_dcaptured_must_be_fp32_of_the_captured_size(dcaptured, message):
    problem = ATTENTION.replace(score=Spec.of("alibi"), backward=True, dcaptured=True)
    result = run(kernel_with_gradients("q", "k", "v", dcaptured=dcaptured), problem)
    assert getattr(result, "message", "") == message


def test_dcaptured_is_refused_for_kernels_without_it():
    problem = ATTENTION.replace(score=Spec.of("alibi"), backward=True, dcaptured=True)
    reason = "it gives no gradients of the tensors that a score mod reads"
    assert InProcess().refusal(Kernel(), problem, "cpu").message == reason
    able = Kernel()
    able.captured = True
    assert InProcess().refusal(able, problem, "cpu") is None


def test_fp8_output_breaks_the_contract_of_fp8_problems():
    result = run(Kernel(make_outputs=lambda _, out: Outputs(out.to(torch.float8_e4m3fn))), FP8)
    assert result.message == "out.dtype=torch.float8_e4m3fn, but should be torch.bfloat16."


def _flip_one_bit(tensor):
    tensor.view(torch.uint8).view(-1)[-1] ^= 1


@pytest.mark.parametrize(("problem", "name"), NAMES)
def test_one_changed_input_bit_is_a_mutation(problem, name):
    drawn = inputs_room.draw_inputs(problem)
    before = {n: t.clone() for n, t in drawn.tensors().items()}
    result = InProcess().run(Kernel(lambda i: _flip_one_bit(i.tensors()[name])), drawn)
    assert result == Failure(kind="mutation", message=f"wrote to its input {name}.")
    for n, tensor in drawn.tensors().items():  # the kernel was passed a copy
        assert torch.equal(tensor.view(torch.uint8), before[n].view(torch.uint8))


def test_resized_input_is_a_mutation():
    result = run(Kernel(lambda inputs: inputs.x.resize_(1, 2, 5, 6)), SOFTMAX)
    assert result.message == "wrote to its input x."


def test_nan_input_left_unchanged_is_no_mutation():
    """Inputs are compared by bits: by value NaN would differ from itself."""
    drawn = inputs_room.draw_inputs(SOFTMAX)
    with_nan = drawn.replace(x=torch.full_like(drawn.x, torch.nan))
    assert isinstance(InProcess().run(Kernel(), with_nan), Execution)


@pytest.mark.parametrize("error", [ValueError("planted"), SystemExit(3)])
def test_kernel_whose_concerns_raises_counts_as_concerned(error):
    class Broken(Kernel):
        def concerns(self, problem):
            raise error

    assert InProcess().concerns(Broken(), ATTENTION) is True


def test_keyboard_interrupt_in_concerns_propagates():
    class Stop(Kernel):
        def concerns(self, problem):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        InProcess().concerns(Stop(), ATTENTION)


def test_kernels_concern_attention_by_default():
    class Softmax(Kernel):
        def concerns(self, problem):
            return problem.operation == "softmax"

    for problem, concerned in ((ATTENTION, [True, False]), (SOFTMAX, [False, True])):
        assert [InProcess().concerns(k, problem) for k in (Kernel(), Softmax())] == concerned


def test_exception_in_prepare_is_a_failure_with_its_place():
    class Broken(Kernel):
        def prepare(self, inputs):
            raise RuntimeError

    result = run(Broken())
    assert isinstance(result, Failure)
    assert (result.kind, without_place(result.message)) == ("error", "RuntimeError")
    assert re.fullmatch(r"RuntimeError at test_executor\.py:\d+ in prepare", result.message)
    assert re.fullmatch(r"test_executor\.py:\d+ in prepare", result.trace)


@pytest.mark.parametrize("kind", [RuntimeError, Refused, ContractViolation])
def test_four_megabyte_message_is_truncated(kind):
    class Loud(Kernel):
        def prepare(self, inputs):
            text = "x" * 2_000_000 + "\n" + "y" * 2_000_000
            raise kind(text)

    result = run(Loud())
    assert isinstance(result, Failure)
    assert "… (1,998,000 more characters)" in result.message
    assert len(result.message) < LONGEST + 100


def test_untimed_run_calls_the_kernel_once():
    calls = []
    result = run(Kernel(calls.append))
    assert isinstance(result, Execution)
    assert (result.seconds, len(calls)) == (None, 1)


def test_timing_skips_the_first_call(monkeypatch):
    calls = []
    clock = iter(range(1000))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    # This clock advances by one second with every reading.
    assert run(Kernel(calls.append), under=TIMED).seconds == 1.0
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("ticks", "seconds", "times"),
    # Calls repeat until the time limit, or until five took equally long.
    [([1, 2, 6], 2 / 64, 3), ([8], 8 / 64, 1), ([0], 0.0, 5)],
    ids=["uneven", "slow", "quick"],
)
def test_time_is_the_median_of_the_calls_after_the_first(ticks, seconds, times, monkeypatch):
    durations, now, calls = itertools.cycle(ticks), [0.0], []

    def advance_clock(_):
        if calls:  # the first may compile, and is not timed
            now[0] += next(durations) / 64
        calls.append(1)

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    assert run(Kernel(advance_clock), under=TIMED).seconds == seconds
    assert len(calls) == 1 + times


def test_call_that_broke_its_contract_is_not_timed():
    calls = []
    assert isinstance(run(Kernel(calls.append, columns=99), under=TIMED), Failure)
    assert len(calls) == 1


def test_outputs_of_the_first_call_survive_reuse_of_their_memory():
    class Reuses(Ideal):
        name = "reuses"

        def prepare(self, inputs):
            first = Ideal.prepare(self, inputs)()
            calls = iter([None])

            def call():
                if next(calls, "further") == "further":
                    first.out.zero_()
                    first.lse.zero_()
                return first

            return call

    inputs = inputs_room.draw_inputs(Problem(query=8, head_dim=8))
    result = InProcess().run(Reuses(), inputs, under=TIMED)
    expected = Ideal().run(inputs)
    assert torch.equal(result.outputs.out, expected.out)
    assert torch.equal(result.outputs.lse, expected.lse)


# Declared arithmetic.


def test_execution_carries_the_declared_arithmetic():
    kernel = Kernel()
    declared = replace(kernel.arithmetic(ATTENTION, "cpu"), sums_rounded_weights=True)
    kernel.arithmetic = lambda problem, device: declared
    assert run(kernel).arithmetic is declared


@pytest.mark.parametrize("nonsense", [None, "fp32", 24, {}])
def test_arithmetic_of_another_type_breaks_the_contract(nonsense):
    kernel = Kernel()
    kernel.arithmetic = lambda problem, device: nonsense
    message = f"arithmetic() returned {type(nonsense).__name__}, but should return Arithmetic."
    assert run(kernel) == Failure(kind="contract", message=message)


@pytest.mark.parametrize(("output", "name"), [(FORMATS["bf16"], "bf16"), ("half", "half")])
def test_arithmetic_with_another_output_format_breaks_the_contract(output, name):
    kernel = Kernel()
    declared = kernel.arithmetic(ATTENTION, "cpu")
    object.__setattr__(declared, "output", output)  # past the constructor's own checks
    kernel.arithmetic = lambda problem, device: declared
    message = f"arithmetic().output is {name}, but should be fp16."
    assert run(kernel) == Failure(kind="contract", message=message)


def test_exception_in_arithmetic_is_an_error():
    def fail(*_):
        raise ValueError("planted")

    kernel = Kernel()
    kernel.arithmetic = fail
    result = run(kernel)
    assert (result.kind, without_place(result.message)) == ("error", "ValueError: planted")


class Unprintable(Exception):
    """An exception whose message cannot be formatted."""

    def __str__(self):
        raise RuntimeError("planted")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (Unprintable(), "Unprintable"),
        (BaseException("planted"), f"BaseException: planted, {ENDS_CALLER}"),
    ],
)
def test_unprintable_and_base_exceptions_are_errors(error, message):
    """``pytest.skip``, for one, raises a BaseException."""

    def raises(_inputs):
        raise error

    result = run(Kernel(raises))
    assert isinstance(result, Failure)
    assert (result.kind, without_place(result.message)) == ("error", message)
    assert " in raises" in result.message


def test_warning_is_shown_and_is_no_failure_even_if_warnings_are_errors():
    kernel = Kernel(lambda _inputs: warnings.warn("a thread without a context", UserWarning))  # noqa: B028
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("error")
        assert isinstance(run(kernel), Execution)
        with pytest.raises(UserWarning):
            warnings.warn("the filters are restored", UserWarning, stacklevel=1)
    assert [str(each.message) for each in shown] == ["a thread without a context"]


def test_warnings_that_the_caller_ignores_stay_ignored():
    kernel = Kernel(lambda _inputs: warnings.warn("planted", DeprecationWarning))  # noqa: B028
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "plant", DeprecationWarning)
        assert isinstance(run(kernel), Execution)
    assert shown == []


def test_repeated_warning_is_shown_once():
    kernel = Kernel(lambda _inputs: warnings.warn("planted", UserWarning))  # noqa: B028
    inputs = inputs_room.draw_inputs(ATTENTION)
    with warnings.catch_warnings(record=True) as shown:
        warnings.resetwarnings()  # pytest's configuration turns warnings into errors
        warnings.simplefilter("default")
        for _ in range(3):
            InProcess().run(kernel, inputs)
    assert len(shown) == 1


def test_keyboard_interrupt_in_a_kernel_propagates():
    def raises(_inputs):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(Kernel(raises))

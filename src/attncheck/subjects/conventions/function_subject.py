"""The Subject that wraps a function of a known convention."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import replace
from types import ModuleType
from typing import Any, cast

import torch

from attncheck.core.declared_arithmetic import Arithmetic
from attncheck.core.mod_spec import FULL
from attncheck.core.outputs import Outputs
from attncheck.inputs.input_tensors import Inputs
from attncheck.inputs.problem import Problem, Promise
from attncheck.subjects.capabilities.subject import Call, Subject, WrittenCall, memory_refusal
from attncheck.subjects.conventions import results, torch_arithmetic
from attncheck.subjects.conventions.convention import (
    ComputedArgument,
    Convention,
    ConventionOptions,
    Request,
    Signature,
)
from attncheck.subjects.conventions.empty_rows import empty_rows, settle_empty_rows
from attncheck.subjects.conventions.function_gradients import GradientCall, gradient_refusal
from attncheck.subjects.conventions.layouts import Layout

LEAVES_MODES: ContextVar[bool] = ContextVar("LEAVES_MODES", default=False)
"""Whether a call leaves grad mode and TF32 alone, since setting them hides a function's changes."""

REUSED_TENSORS: ContextVar[list[torch.Tensor] | None] = ContextVar("REUSED_TENSORS", default=None)
"""Positional tensors of the last call in a sequence of calls; None outside of a sequence.

The next call reuses them, filled with its own numbers, if shapes, dtypes and strides are equal,
as in training with static buffers."""


class FunctionSubject(Subject):
    """A function of q, k, v and those of its convention's keywords that its signature has.

    Problems that need other keywords are unsupported. Gradients come from autograd or a function
    of their own; without gradients autograd is off. ValueError, NotImplementedError and
    AssertionError mean that the function refuses its arguments (``Refused``).
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        convention: Convention,
        signature: Signature,
        options: ConventionOptions,
    ) -> None:
        self.function = function
        self._convention = convention
        self._signature = signature
        # ``_names`` maps meanings to the function's own names, ``_parameters`` the reverse.
        names = {m: signature.names_of(each) for m, each in convention.bound.items()}
        self._names = {meaning: each for meaning, each in names.items() if each}
        self._parameters = {
            n: convention.bound[meaning] for meaning, each in self._names.items() for n in each
        }
        self.name = name
        self.convention = convention.name
        self.options = options
        self.takes = frozenset(self._parameters)  # names of the keywords that it accepts
        listed = [n for n, each in self._parameters.items() if each.meaning != "dropout"]
        keywords = f"takes {', '.join(listed)}" if listed else "takes query, key and value alone"
        self.summary = f"{convention.name} convention: {keywords}"
        self.triton = _uses_triton(function)
        self.sinks = "sinks" in self._names
        self.float_mask = "attn_mask" in self._names and "bias" not in self._names
        self.backward = options.backward is not None and not convention.paged
        if options.promises is not None:
            self.promises = cast("frozenset[Promise]", options.promises)
        # Ids of Problems whose call reached torch's CPU flash kernel; dtypes and shapes decide.
        self._reached_flash: set[str] = set()

    def concerns(self, problem: Problem) -> bool:
        """Return whether it is attention, with pages if and only if the convention has pages."""
        paged = problem.paging is not None
        return paged == self._convention.paged and super().concerns(problem.replace(paging=None))

    def unsupported(self, problem: Problem, device: str) -> str | None:
        """Return why the convention or the function lacks a feature, or memory does not suffice."""
        arguments = self._convention_refusal(problem, device) or self._arguments(problem)
        if isinstance(arguments, str):
            return arguments
        if problem.backward:
            refused = gradient_refusal(problem, device, self.options, arguments, self._parameters)
            if refused:
                return refused
        made = [value for value in arguments.values() if isinstance(value, ComputedArgument)]
        for value in made:
            # The size comes first, because all of the tensor is computed for the other reason.
            refused = memory_refusal(value.what, value.size, device)
            if refused or (refused := value.unfit(device)):
                return refused
        return None

    def prepare(self, inputs: Inputs) -> Call:
        """Convert q, k and v to the function's axes, and create the tensors among its keywords."""
        problem, device = inputs.problem, inputs.device
        arguments = self._arguments(problem)
        assert not isinstance(arguments, str), arguments
        passed = {
            n: v.make(inputs) if isinstance(v, ComputedArgument) else v
            for n, v in arguments.items()
        }
        layout = self._convention.layout(problem)
        tensors = self._tensors(layout, inputs)
        dead = self._empty_rows(inputs)  # outside of the call, which is timed
        gradients = None
        if problem.backward:
            gradients = GradientCall(
                self.options,
                layout,
                inputs,
                passed=passed,
                parameters=self._parameters,
                dead=dead,
            )
            # The function gets leaves of autograd, so that only this loss is differentiated.
            tensors, passed = gradients.tensors, gradients.passed
        elif (last := REUSED_TENSORS.get()) is not None:
            if all(map(_have_same_layout, last, tensors)):
                for reused, new in zip(last, tensors, strict=False):
                    reused.copy_(new)
            else:
                last.clear()
            last += tensors[len(last) :]
            tensors = (last[0], last[1], last[2])
        graded = gradients is not None and gradients.by_autograd
        detector = torch_arithmetic.CpuFlashDetector() if device.type == "cpu" else None
        mutations: results.MutationCheck | None = results.MutationCheck(passed, arguments, inputs)

        def call() -> Outputs:
            nonlocal detector, mutations
            around = self._convention.within(device.type)
            leaves_modes = LEAVES_MODES.get()
            grad = nullcontext() if leaves_modes and not graded else torch.set_grad_enabled(graded)
            products = torch_arithmetic.fp32_products(problem.dtype)
            rounds = nullcontext() if leaves_modes else products
            with grad, rounds, around, detector or nullcontext():
                with results.refusals():
                    result = self.function(*tensors, **passed)
                returned = results.read_result(result, self._convention, self.options)
                outputs = results.to_outputs(*returned, layout, self.options)
                if gradients is not None:
                    with results.refusals():
                        outputs = gradients.added(*returned, outputs)
            # Checked in the first call: the executor compares q, k and v, but not copies of them.
            if mutations is not None:
                self._check_inputs(layout, inputs, tensors)
                mutations.check()
            if detector is not None and detector.called:
                self._reached_flash.add(problem.id)
            detector = mutations = None  # off in later calls, which are timed
            if dead is None:
                return outputs
            how = self.options.empty_row or "zero"
            return settle_empty_rows(outputs, inputs, how, self._convention.empty_lse, dead)

        return call

    def arithmetic(self, problem: Problem, device: str) -> Arithmetic:
        """Return the default arithmetic, loosened by what the function may do.

        P may be divided by its sum before it is rounded, as in unfused kernels. A sink may be
        merged through LSE, after the keys. Gradients of 16 bits may be autograd's of an unfused
        formula, which rounds dP, and rounds dK and dV of each head before they are summed. If a
        call has reached torch's flash kernel on the CPU, exp is as inaccurate as that kernel's.
        """
        assumed = replace(
            super().arithmetic(problem, device),
            normalised_weights=True,
            splits=2 if problem.sink else 1,
        )
        if self.backward and problem.backward and problem.dtype in {"fp16", "bf16"}:
            fmt = assumed.output
            assumed = replace(assumed, rounds_value_products=fmt, sums_rounded_heads=True)
        if problem.id not in self._reached_flash:
            return assumed
        assumed = torch_arithmetic.with_short_exp(assumed, device)
        if not problem.backward:
            return assumed
        return torch_arithmetic.with_rounded_sums(assumed, problem, device, whole=False)

    def written_call(self, problem: Problem) -> WrittenCall:
        """Return source that calls the function."""
        return WrittenCall(
            source=self.render(problem),
            convention=self.convention,
            empty_row=self.options.empty_row,
            triton=self.triton,
        )

    def render(self, problem: Problem) -> str | None:
        """Return a call of the kernel on ``problem`` as Python source in plain torch, or None.

        The source defines ``call(kernel, q, k, v)``, which takes ``(batch, heads, length, dim)``
        tensors and returns out ``(batch, heads, query, value_dim)`` and LSE ``(batch, heads,
        query)`` in natural logarithm, or None. ``torch`` must be imported. An explicit mask is read
        from a global ``mask``, a bool that broadcasts to ``(batch, heads, query, kv)``, descales
        from ``q_descale``, ``k_descale`` and ``v_descale``, and sinks from ``sink``. Rows that see
        no key are left as the kernel returns them.
        """
        arguments = self._arguments(problem)
        if isinstance(arguments, str):
            return None
        layout = self._convention.layout(problem)
        made = [value for value in arguments.values() if isinstance(value, ComputedArgument)]
        if not all(value.text and value.unfit("cpu") is None for value in made):
            return None
        # All setups come before the call, because an expression may use names from another's setup.
        lines = [line for value in made for line in value.setup.splitlines()]
        passed = [layout.texts[name] for name in "qkv"]
        for name, value in arguments.items():
            passed.append(
                f"{name}={value.text if isinstance(value, ComputedArgument) else repr(value)}"
            )
        lines += ["given = kernel(", *(f"    {each}," for each in passed), ")"]
        lines += [
            "out, lse = given[:2] if isinstance(given, (tuple, list)) else (given, None)",
            'lse = lse if isinstance(lse, torch.Tensor) else getattr(lse, "lse", None)',
        ]
        # Lines that change nothing are left out.
        if layout.texts["out"] != "out":
            lines.append(f"out = {layout.texts['out']}")
        if self.options.returns_lse is False:
            lines.append("lse = None")
        else:
            changes = [] if layout.texts["lse"] == "lse" else [layout.texts["lse"]]
            # As ``base2_to_natural`` does, so that the script has the same bits.
            if self.options.lse == "base2":
                changes.append(f"(lse.double() * {math.log(2)!r}).float()")
            # The script compares with the oracle, in which rows without keys have -∞.
            if math.inf in self._convention.empty_lse:
                changes.append('lse.masked_fill(lse == float("inf"), -float("inf"))')
            lines += [f"lse = None if lse is None else {change}" for change in changes]
        lines.append("return out, lse")
        return "\n".join(["def call(kernel, q, k, v):", *(f"    {line}" for line in lines), ""])

    def _convention_refusal(self, problem: Problem, device: str) -> str | None:
        """Return why no function of the convention can support the Problem."""
        if problem.operation != "attention":
            return f"the {self.convention} convention is of attention"
        if (problem.paging is not None) != self._convention.paged:
            pages = "is of keys in pages" if self._convention.paged else "has no pages"
            return f"the {self.convention} convention {pages}"
        # Without descales the function would compute another Problem.
        if problem.formats.scaled and "q_descale" not in self._convention.bound:
            return f"the {self.convention} convention has no descales, which fp8 inputs need"
        if problem.dtype == "tf32" and device == "cpu":
            return "the CPU has no tf32 products"
        return None

    def _arguments(self, problem: Problem) -> dict[str, Any] | str:
        """Return arguments by the function's own names, or which parameter it lacks."""
        alignment = self.options.causal
        bound = self._convention.bind(
            Request(
                problem=problem,
                able=frozenset(self._names),
                bottom_right=alignment == "bottom_right"
                if alignment
                else self._convention.bottom_right,
                options=self.options,
            )
        )
        if isinstance(bound, str):
            return bound
        passed = {}
        for meaning, argument in bound.items():
            if argument.when == "always" and meaning not in self._names:
                return f"takes no {self._convention.bound[meaning].spellings[0]}"
            for name in self._names.get(meaning, ()):
                if argument.when != "required" or name in self._signature.required:
                    passed[name] = argument.value
        return passed

    def _tensors(
        self, layout: Layout, inputs: Inputs
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the tensors that are passed by position."""
        # Keys and values in pages share one table, so they cannot be converted separately.
        if self._convention.tensors is not None:
            return self._convention.tensors(layout, inputs)
        return layout.queries(inputs.q), layout.keys(inputs.k), layout.keys(inputs.v)

    def _check_inputs(
        self, layout: Layout, inputs: Inputs, tensors: tuple[torch.Tensor, ...]
    ) -> None:
        """Raise WroteToInput if the function wrote to a copy, which the executor does not see."""
        fresh = self._tensors(layout, inputs)
        for name, copy, original in zip("qkv", (x.detach() for x in tensors), fresh, strict=True):
            # The executor itself compares inputs that were passed without a copy.
            if copy.data_ptr() != getattr(inputs, name).data_ptr():
                results.require_unchanged(name, copy, original)

    def _empty_rows(self, inputs: Inputs) -> torch.Tensor | None:
        """Return which rows ``settle_empty_rows`` has to change; None if there are none."""
        plain = self.options.empty_row in {"", "zero"}
        as_judged = plain and self._convention.empty_lse == (-math.inf,)
        if as_judged or inputs.problem.mask == FULL or inputs.problem.sink:
            return None  # with a sink every row has a weight
        dead = empty_rows(inputs.problem, inputs.device)
        return dead if bool(dead.any()) else None


def _have_same_layout(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


def _uses_triton(function: Callable[..., Any]) -> bool:
    """Return whether the function's module has Triton among its globals."""
    # Unwrapped, because a decorator's wrapper may come from another module.
    names = getattr(inspect.unwrap(function), "__globals__", {})
    modules = (value.__name__ for value in names.values() if isinstance(value, ModuleType))
    return any(name.partition(".")[0] == "triton" for name in modules)

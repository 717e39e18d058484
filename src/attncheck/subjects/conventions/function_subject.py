"""Any function of a known convention as a Subject."""

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
    Convention,
    ConventionOptions,
    MadeArgument,
    Request,
    Signature,
)
from attncheck.subjects.conventions.empty_rows import empty_rows, settle_empty_rows
from attncheck.subjects.conventions.function_gradients import GradientCall, gradient_refusal
from attncheck.subjects.conventions.layouts import Layout
from attncheck.subjects.conventions.render import render_call

LEAVES_MODES: ContextVar[bool] = ContextVar("LEAVES_MODES", default=False)
"""Whether a call sets neither grad mode nor TF32 around the function, which hides what it does."""

REFILLED: ContextVar[list[torch.Tensor] | None] = ContextVar("REFILLED", default=None)
"""What the last call of a sequence was passed by position. The next is passed these very tensors
with its numbers in them, where its own are alike: as who trains in static buffers calls a kernel.
None of a call by itself."""


class FunctionSubject(Subject):
    """A function of q, k and v and of the keywords that its signature takes of its convention.

    No Problem concerns it that needs a keyword that it does not take. Where a Problem has
    gradients, they are autograd's or those of a function of their own; else autograd is off.
    ValueError, NotImplementedError and AssertionError mean that it does not take its arguments
    (``Refused``).
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
        # By meaning, the names under which the function takes it; and back.
        names = {m: signature.names_of(each) for m, each in convention.bound.items()}
        self._names = {meaning: each for meaning, each in names.items() if each}
        self._parameters = {
            n: convention.bound[meaning] for meaning, each in self._names.items() for n in each
        }
        self.name = name
        self.convention = convention.name
        self.options = options
        self.takes = frozenset(self._parameters)  # names of the keywords that it can be passed
        listed = [n for n, each in self._parameters.items() if each.meaning != "dropout"]
        keywords = f"takes {', '.join(listed)}" if listed else "takes query, key and value alone"
        self.summary = f"{convention.name} convention: {keywords}"
        self.triton = _uses_triton(function)
        self.sinks = "sinks" in self._names
        self.backward = options.backward is not None and not convention.paged
        if options.promises is not None:
            self.promises = cast("frozenset[Promise]", options.promises)
        # Known only after a call, and by Problem: a kernel may choose by shape or dtype.
        self._reached_flash: set[str] = set()

    def concerns(self, problem: Problem) -> bool:
        """Attention with pages where its convention is of pages, and without them elsewhere."""
        paged = problem.paging is not None
        return paged == self._convention.paged and super().concerns(problem.replace(paging=None))

    def unsupported(self, problem: Problem, device: str) -> str | None:
        """Return what the convention cannot pass, the function not take, or no memory hold."""
        arguments = self._outside(problem, device) or self._arguments(problem)
        if isinstance(arguments, str):
            return arguments
        if problem.backward:
            refused = gradient_refusal(problem, device, self.options, arguments, self._parameters)
            if refused:
                return refused
        made = [value for value in arguments.values() if isinstance(value, MadeArgument)]
        return next(filter(None, (memory_refusal(m.what, m.size, device) for m in made)), None)

    def prepare(self, inputs: Inputs) -> Call:
        """Bring q, k and v into its axes, and make the tensors that its keywords take."""
        problem, device = inputs.problem, inputs.device
        arguments = self._arguments(problem)
        assert not isinstance(arguments, str), arguments
        passed = {
            n: v.make(inputs) if isinstance(v, MadeArgument) else v for n, v in arguments.items()
        }
        layout = self._convention.layout(problem)
        tensors = self._tensors(layout, inputs)
        dead = self._empty_rows(inputs)  # before the call, which is timed
        gradients = None
        if problem.backward:
            gradients = GradientCall(
                self.options,
                layout,
                inputs,
                passed=passed,
                parameters=self._parameters,
                dead=dead,
                natural_lse=lambda lse: results.to_natural_lse(lse, layout, self.options),
            )
            # Leaves of autograd in place of the inputs, so that only this loss is differentiated.
            tensors, passed = gradients.tensors, gradients.passed
        elif (last := REFILLED.get()) is not None:
            if all(map(_alike, last, tensors)):
                for its, mine in zip(last, tensors, strict=False):
                    its.copy_(mine)
            else:
                last.clear()
            last += tensors[len(last) :]
            tensors = (last[0], last[1], last[2])
        graded = gradients is not None and gradients.by_autograd
        products: torch_arithmetic.Products = "tf32" if problem.dtype == "tf32" else "ieee"
        detector = torch_arithmetic.CpuFlashDetector() if device.type == "cpu" else None
        mutations: results.MutationCheck | None = results.MutationCheck(passed, arguments, inputs)

        def call() -> Outputs:
            nonlocal detector, mutations
            around = self._convention.within(device.type)
            bare = LEAVES_MODES.get()
            grad = nullcontext() if bare and not graded else torch.set_grad_enabled(graded)
            rounds = nullcontext() if bare else torch_arithmetic.fp32_products(products)
            with grad, rounds, around, detector or nullcontext():
                with results.refusals():
                    result = self.function(*tensors, **passed)
                returned = results.read_result(
                    result, self.convention, self._convention.most, self.options
                )
                outputs = results.to_outputs(returned, layout, self.options)
                if gradients is not None:
                    with results.refusals():
                        outputs = gradients.added(returned, outputs)
            # Once: the executor compares q, k and v themselves, but it does not see copies.
            if mutations is not None:
                self._check_inputs(layout, inputs, tensors)
                mutations.check()
            if detector is not None and detector.called:
                self._reached_flash.add(problem.id)
            detector = mutations = None  # further calls are timed
            if dead is None:
                return outputs
            how = self.options.empty_row or "zero"
            return settle_empty_rows(outputs, inputs, how, self._convention.empty_lse, dead)

        return call

    def arithmetic(self, problem: Problem, device: str) -> Arithmetic:
        """The default; P may be divided by its sum before it is rounded, as unfused kernels do.

        A sink may be merged through LSE, after the keys. Gradients of 16 bits may be autograd's of
        an unfused formula: dP rounded, and dK and dV for each head before they are summed. Where
        its call has reached torch's flash kernel on the CPU, exp is as short as it is there.
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
        """Return how a script calls the function."""
        return WrittenCall(
            source=self.render(problem),
            convention=self.convention,
            empty_row=self.options.empty_row,
            triton=self.triton,
        )

    def render(self, problem: Problem) -> str | None:
        """A call of the kernel on ``problem`` as Python source, in plain torch.

        It defines ``call(kernel, q, k, v)``, which takes ``(batch, heads, length, dim)`` tensors
        and gives out ``(batch, heads, query, value_dim)`` and LSE ``(batch, heads, query)`` with
        natural logarithm, or None. ``torch`` must be imported. A mask that is written out is read
        from a global ``mask``, bool, that broadcasts to ``(batch, heads, query, kv)``; descales
        from ``q_descale``, ``k_descale`` and ``v_descale``, sinks from ``sink``. Rows that see no
        key are as the kernel gives them. None for what cannot be written so.
        """
        arguments = self._arguments(problem)
        if isinstance(arguments, str):
            return None
        return render_call(
            arguments,
            self._convention.layout(problem),
            base2=self.options.lse == "base2",
            drops_lse=self.options.returns_lse is False,
            infinite=math.inf in self._convention.empty_lse,
        )

    def _outside(self, problem: Problem, device: str) -> str | None:
        """Return why no function of the convention can be given it."""
        if problem.operation != "attention":
            return f"the {self.convention} convention is of attention"
        if (problem.paging is not None) != self._convention.paged:
            pages = "is of keys in pages" if self._convention.paged else "has no pages"
            return f"the {self.convention} convention {pages}"
        # Without them the numbers would be another Problem's.
        if problem.formats.scaled and "q_descale" not in self._convention.bound:
            return f"the {self.convention} convention has no descales, which fp8 inputs need"
        if problem.dtype == "tf32" and device == "cpu":
            return "the CPU has no tf32 products"
        return None

    def _arguments(self, problem: Problem) -> dict[str, Any] | str:
        """Arguments by the names that the function has; or what it lacks."""
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
            if argument.when == "needed" and meaning not in self._names:
                return f"takes no {self._convention.bound[meaning].spellings[0]}"
            for name in self._names.get(meaning, ()):
                if argument.when != "required" or name in self._signature.required:
                    passed[name] = argument.value
        return passed

    def _tensors(
        self, layout: Layout, inputs: Inputs
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The tensors that are passed by position."""
        # Pages hold keys and values after one table: no change of a single tensor makes them.
        if self._convention.tensors is not None:
            return self._convention.tensors(layout, inputs)
        return layout.queries(inputs.q), layout.keys(inputs.k), layout.keys(inputs.v)

    def _check_inputs(
        self, layout: Layout, inputs: Inputs, tensors: tuple[torch.Tensor, ...]
    ) -> None:
        """Raise WroteToInput where it wrote to a copy, which the executor does not see."""
        again = self._tensors(layout, inputs)
        for name, its, mine in zip("qkv", (x.detach() for x in tensors), again, strict=True):
            # What is the input itself is the executor's to compare.
            if its.data_ptr() != getattr(inputs, name).data_ptr():
                results.require_unchanged(name, its, mine)

    def _empty_rows(self, inputs: Inputs) -> torch.Tensor | None:
        """Rows that are settled before the judge sees them; None where there are none."""
        plain = self.options.empty_row in {"", "zero"}
        as_judged = plain and self._convention.empty_lse == (-math.inf,)
        if as_judged or inputs.problem.mask == FULL or inputs.problem.sink:
            return None  # with a sink no row has nothing to weigh
        dead = empty_rows(inputs.problem, inputs.device)
        return dead if bool(dead.any()) else None


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in ("shape", "dtype")) and (
        one.stride() == other.stride()
    )


def _uses_triton(function: Callable[..., Any]) -> bool:
    """Return whether the module that it is of has imported Triton by name."""
    # Behind decorators: the wrapper's own module may be another.
    names = getattr(inspect.unwrap(function), "__globals__", {})
    modules = (value.__name__ for value in names.values() if isinstance(value, ModuleType))
    return any(name.partition(".")[0] == "triton" for name in modules)

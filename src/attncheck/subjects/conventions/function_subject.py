"""Any function of a known convention as a Subject."""

from __future__ import annotations

import inspect
import math
from contextlib import nullcontext
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import torch

from attncheck.mods import library
from attncheck.subjects.contract import Call, Subject
from attncheck.subjects.conventions.arguments import Arguments, Asked, Made
from attncheck.subjects.conventions.backward import Backward, refusal
from attncheck.subjects.conventions.dispatched import FlashOnTheCpu
from attncheck.subjects.conventions.left_alone import LeftAlone, require_same
from attncheck.subjects.conventions.outcome import brought, brought_lse, read, refusing
from attncheck.subjects.conventions.script import script
from attncheck.subjects.empty_rows import empty_rows, settled
from attncheck.subjects.matmul_precision import Products, fp32_products
from attncheck.subjects.memory import too_large
from attncheck.subjects.torch_arithmetic import with_rounded_sums, with_short_exp

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncheck.inputs import Inputs
    from attncheck.judge.arithmetic import Arithmetic
    from attncheck.outputs import Outputs
    from attncheck.problem import Problem
    from attncheck.question import Promise
    from attncheck.subjects.conventions.calling import Calling
    from attncheck.subjects.conventions.layouts import Layout
    from attncheck.subjects.conventions.options import ConventionOptions
    from attncheck.subjects.conventions.signature import Taken

__all__ = ["FunctionSubject"]

_NEVER_LISTED = {"dropout_p"}


class FunctionSubject(Subject):
    """A function of q, k and v and of the keywords that its signature takes of its convention.

    It is asked nothing that needs a keyword that it does not take. Where a Problem asks for
    gradients, they are autograd's or those of a function of their own; else autograd is off.
    ValueError, NotImplementedError and AssertionError mean that it does not take its arguments
    (``contract.Refused``).

    Args:
        function: The kernel.
        name: What reports call it.
        calling: Its convention.
        takes: What it takes of it.
        options: Where it differs.

    Attributes:
        convention: Name of the convention.
        options: As given.
        takes: Names of the keywords that it can be passed.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        calling: Calling,
        takes: Taken,
        options: ConventionOptions,
    ) -> None:
        self._function = function
        self._calling = calling
        self._taken = takes
        self._spelled = takes.spelled(calling.spellings, calling.by_name)
        self.name = name
        self.convention = calling.name
        self.options = options
        self.takes = frozenset(name for names in self._spelled.values() for name in names)
        self.summary = f"{calling.name} convention: {_listed(self._spelled)}"
        self.triton = _uses_triton(function)
        self.sinks = "sinks" in self._spelled
        self.backward = options.backward is not None and not calling.paged
        if options.promises is not None:
            self.promises = cast("frozenset[Promise]", options.promises)
        self._reached_flash: set[str] = set()

    def concerns(self, problem: Problem) -> bool:
        """Attention with pages where its convention is of pages, and without them elsewhere."""
        paged = problem.paging is not None
        return paged == self._calling.paged and super().concerns(problem.replace(paging=None))

    def unsupported(self, problem: Problem, device: str) -> str | None:
        """What the convention cannot pass, the function does not take, or no memory holds."""
        arguments = self._beyond(problem, device) or self._arguments(problem)
        if isinstance(arguments, str):
            return arguments
        if problem.backward:
            refused = refusal(problem, device, self.options, arguments, self._meanings)
            if refused:
                return refused
        made = [value for value in arguments.values() if isinstance(value, Made)]
        return next(filter(None, (too_large(m.what, m.size, device) for m in made)), None)

    def prepare(self, inputs: Inputs) -> Call:
        """Bring q, k and v into its axes, and make the tensors that its keywords take."""
        problem, device = inputs.problem, inputs.device
        arguments = self._arguments(problem)
        assert not isinstance(arguments, str), arguments
        passed = {n: v.make(inputs) if isinstance(v, Made) else v for n, v in arguments.items()}
        layout = self._calling.layout(problem)
        tensors = self._tensors(layout, inputs)
        dead = self._empty_rows(inputs)  # before the call, which is timed
        backward = self._backward(layout, inputs, passed, dead) if problem.backward else None
        if backward is not None:
            tensors, passed = backward.tensors, backward.passed
        graded = backward is not None and backward.by_autograd
        products: Products = "tf32" if problem.dtype == "tf32" else "ieee"
        notes = FlashOnTheCpu() if device.type == "cpu" else None
        made: LeftAlone | None = LeftAlone(passed, arguments, inputs)

        def call() -> Outputs:
            nonlocal notes, made
            around = self._calling.within(device.type)
            grad = torch.set_grad_enabled(graded)
            with grad, fp32_products(products), around, notes or nullcontext():
                with refusing():
                    given = self._function(*tensors, **passed)
                found = read(given, self.convention, self._calling.most, self.options)
                outputs = brought(found, layout, self.options)
                if backward is not None:
                    with refusing():
                        outputs = backward.added(found, outputs)
            if made is not None:
                self._check_inputs(layout, inputs, tensors)
                made.check()
            if notes is not None and notes.called:
                self._reached_flash.add(problem.id)
            notes = made = None  # further calls are timed
            if dead is None:
                return outputs
            return settled(outputs, inputs, self._empty_row, self._calling.empty_lse, dead)

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
        assumed = with_short_exp(assumed, device)
        if not problem.backward:
            return assumed
        return with_rounded_sums(assumed, problem, device, whole=False)

    def script(self, problem: Problem) -> str | None:
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
        return script(
            arguments,
            self._calling.layout(problem),
            base2=self.options.lse == "base2",
            drops_lse=self.options.returns_lse is False,
            infinite=math.inf in self._calling.empty_lse,
        )

    def _beyond(self, problem: Problem, device: str) -> str | None:
        """What no function of the convention can be asked."""
        if problem.operation != "attention":
            return f"the {self.convention} convention is of attention"
        if (problem.paging is not None) != self._calling.paged:
            pages = "is of keys in pages" if self._calling.paged else "has no pages"
            return f"the {self.convention} convention {pages}"
        if problem.formats.scaled and "q_descale" not in self._calling.spellings:
            return f"the {self.convention} convention has no descales, which fp8 inputs need"
        if problem.dtype == "tf32" and device == "cpu":
            return "the CPU has no tf32 products"
        return None

    def _arguments(self, problem: Problem) -> dict[str, Any] | str:
        """What is passed, by the names that the function has; or what it lacks."""
        wanted = self._calling.arguments(
            Asked(
                problem=problem,
                able=frozenset(self._spelled),
                bottom_right=self._bottom_right,
                options=self.options,
            )
        )
        if isinstance(wanted, str):
            return wanted
        for meaning, argument in wanted.items():
            if argument.when == "needed" and meaning not in self._spelled:
                return f"takes no {self._calling.spellings[meaning][0]}"
        return self._passed(wanted)

    def _passed(self, wanted: Arguments) -> dict[str, Any]:
        passed = {}
        for meaning, argument in wanted.items():
            for name in self._spelled.get(meaning, ()):
                if argument.when != "required" or name in self._taken.required:
                    passed[name] = argument.value
        return passed

    @property
    def _bottom_right(self) -> bool:
        said = self.options.causal
        return said == "bottom_right" if said else self._calling.bottom_right

    def _tensors(
        self, layout: Layout, inputs: Inputs
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What it is given by position."""
        if self._calling.tensors is not None:
            return self._calling.tensors(layout, inputs)
        return layout.queries(inputs.q), layout.keys(inputs.k), layout.keys(inputs.v)

    def _check_inputs(
        self, layout: Layout, inputs: Inputs, tensors: tuple[torch.Tensor, ...]
    ) -> None:
        """Raises WroteToInput where it wrote to a copy, which the executor does not see."""
        again = self._tensors(layout, inputs)
        for name, its, mine in zip("qkv", (x.detach() for x in tensors), again, strict=True):
            if its.data_ptr() != getattr(inputs, name).data_ptr():
                require_same(name, its, mine)

    @property
    def _empty_row(self) -> str:
        return self.options.empty_row or "zero"

    def _empty_rows(self, inputs: Inputs) -> torch.Tensor | None:
        """Rows that are looked at before the judge does; None where there are none."""
        as_judged = self._empty_row == "zero" and self._calling.empty_lse == (-math.inf,)
        if as_judged or inputs.problem.mask == library.FULL or inputs.problem.sink:
            return None  # with a sink no row has nothing to weigh
        dead = empty_rows(inputs.problem, inputs.device)
        return dead if bool(dead.any()) else None

    def _backward(
        self,
        layout: Layout,
        inputs: Inputs,
        passed: dict[str, Any],
        dead: torch.Tensor | None,
    ) -> Backward:
        return Backward(
            self.options,
            layout,
            inputs,
            passed=passed,
            meanings=self._meanings,
            dead=dead,
            lse_of=lambda lse: brought_lse(lse, layout, self.options),
        )

    @property
    def _meanings(self) -> dict[str, str]:
        """By the names that the function has."""
        return {name: meaning for meaning, names in self._spelled.items() for name in names}


def _listed(spelled: dict[str, tuple[str, ...]]) -> str:
    able = [n for meaning, n in spelled.items() if meaning not in _NEVER_LISTED]
    names = [name for names in able for name in names]
    return f"takes {', '.join(names)}" if names else "takes query, key and value alone"


def _uses_triton(function: Callable[..., Any]) -> bool:
    """Whether the module that it is of has imported Triton by name."""
    names = getattr(inspect.unwrap(function), "__globals__", {})
    modules = (value.__name__ for value in names.values() if isinstance(value, ModuleType))
    return any(name.partition(".")[0] == "triton" for name in modules)

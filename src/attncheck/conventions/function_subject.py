"""Any function of a known convention as a Subject."""

from __future__ import annotations

import inspect
import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import torch

from attncheck.capabilities.subject import Call, Subject, memory_refusal
from attncheck.conventions.convention import (
    Arguments,
    Convention,
    MadeArgument,
    Request,
    Signature,
    parameter_names,
    read_signature,
    required_names,
)
from attncheck.conventions.empty_rows import empty_rows, settle_empty_rows
from attncheck.conventions.function_gradients import GradientCall, gradient_refusal
from attncheck.conventions.render import render_call
from attncheck.conventions.results import (
    MutationCheck,
    read_result,
    refusals,
    require_unchanged,
    to_natural_lse,
    to_outputs,
)
from attncheck.conventions.torch_arithmetic import (
    CpuFlashDetector,
    Products,
    fp32_products,
    with_rounded_sums,
    with_short_exp,
)
from attncheck.mods import library

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from attncheck.conventions.convention import ConventionOptions
    from attncheck.conventions.layouts import Layout
    from attncheck.core.outputs import Outputs
    from attncheck.inputs.input_tensors import Inputs
    from attncheck.inputs.problem import Problem, Promise
    from attncheck.judge.declared_arithmetic import Arithmetic

__all__ = ["Calling", "FunctionSubject", "convention_of", "dotted_name"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calling:
    """How functions of one convention are called.

    Attributes:
        name: Of the convention.
        summary: One line.
        spellings: By meaning, the names that functions have for it; the convention's own first.
        arguments: What becomes of a Problem's mask, score mod and scale: arguments by meaning, or
            why the convention cannot pass them.
        layout: The axes of the tensors of a Problem that can be passed.
        claims: Whether a function's (parameters, dotted name) show that it is of this convention.
        by_name: Meanings that are passed only where the signature names them, and never into
            somebody's ``**keywords``.
        musts: Meanings without which a function is none of this convention.
        most: Most things that a function returns.
        bottom_right: How causal masks and windows are aligned where the lengths differ.
        empty_lse: What LSE may be of a row that sees no key.
        within: What is entered around a call on (device).
        declined: Arguments for which it has no value, with the reason: a function that requires
            one is none of this convention.
        tensors: What it is given by position, where keys and values are laid out together; None
            for what the layout makes of each.
        paged: Whether keys and values lie in pages: it is asked Problems with paging, and no other.
    """

    name: str
    summary: str
    spellings: Mapping[str, tuple[str, ...]]
    arguments: Callable[[Request], Arguments | str]
    layout: Callable[[Problem], Layout]
    claims: Callable[[frozenset[str], str], bool]
    by_name: frozenset[str] = frozenset()
    musts: tuple[str, ...] = ()
    most: int = 2
    bottom_right: bool = False
    empty_lse: tuple[float, ...] = (float("-inf"),)
    within: Callable[[str], AbstractContextManager[object]] = lambda _device: nullcontext()
    declined: Mapping[str, str] = field(default_factory=dict)
    tensors: Callable[[Layout, Inputs], tuple[Tensor, Tensor, Tensor]] | None = None
    paged: bool = False

    def takes(self, function: object) -> Signature | str:
        """What the function takes of it, or why it is no such function."""
        for name in required_names(function) & set(self.declined):
            return f"need no {name!r}: {self.declined[name]}"
        names = [name for names in self.spellings.values() for name in names]
        found = read_signature(function, names)
        if isinstance(found, str):
            return found
        for meaning in self.musts:
            if not found.keywords & set(self.spellings[meaning]):
                return f"take {self.spellings[meaning][0]}, as the {self.name} convention has it"
        return found


def dotted_name(function: object) -> str:
    """Dotted name of a function, its module first; empty where it has none."""
    whole = inspect.unwrap(function) if callable(function) else function
    parts = (getattr(whole, name, "") for name in ("__module__", "__qualname__"))
    return ".".join(part for part in parts if isinstance(part, str))


def convention_of(calling: Calling) -> Convention:
    """The convention whose functions are called so."""

    def claims(found: object) -> bool:
        if not callable(found) or inspect.isclass(found):
            return False
        return calling.claims(parameter_names(found), dotted_name(found))

    def unfit(found: object) -> str | None:
        fits = calling.takes(found)
        return fits if isinstance(fits, str) else None

    def adopt(found: object, name: str, options: ConventionOptions) -> Subject:

        fits = calling.takes(found)
        assert isinstance(fits, Signature), "asked of what fits"
        assert callable(found)
        path, separator, member = name.partition("::")
        return FunctionSubject(found, Path(path).name + separator + member, calling, fits, options)

    return Convention(
        name=calling.name, summary=calling.summary, claims=claims, unfit=unfit, adopt=adopt
    )


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
        takes: Signature,
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
            refused = gradient_refusal(problem, device, self.options, arguments, self._meanings)
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
        layout = self._calling.layout(problem)
        tensors = self._tensors(layout, inputs)
        dead = self._empty_rows(inputs)  # before the call, which is timed
        backward = self._backward(layout, inputs, passed, dead) if problem.backward else None
        if backward is not None:
            tensors, passed = backward.tensors, backward.passed
        graded = backward is not None and backward.by_autograd
        products: Products = "tf32" if problem.dtype == "tf32" else "ieee"
        notes = CpuFlashDetector() if device.type == "cpu" else None
        made: MutationCheck | None = MutationCheck(passed, arguments, inputs)

        def call() -> Outputs:
            nonlocal notes, made
            around = self._calling.within(device.type)
            grad = torch.set_grad_enabled(graded)
            with grad, fp32_products(products), around, notes or nullcontext():
                with refusals():
                    given = self._function(*tensors, **passed)
                found = read_result(given, self.convention, self._calling.most, self.options)
                outputs = to_outputs(found, layout, self.options)
                if backward is not None:
                    with refusals():
                        outputs = backward.added(found, outputs)
            if made is not None:
                self._check_inputs(layout, inputs, tensors)
                made.check()
            if notes is not None and notes.called:
                self._reached_flash.add(problem.id)
            notes = made = None  # further calls are timed
            if dead is None:
                return outputs
            return settle_empty_rows(
                outputs, inputs, self._empty_row, self._calling.empty_lse, dead
            )

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
        return render_call(
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
            Request(
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
                require_unchanged(name, its, mine)

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
    ) -> GradientCall:
        return GradientCall(
            self.options,
            layout,
            inputs,
            passed=passed,
            meanings=self._meanings,
            dead=dead,
            lse_of=lambda lse: to_natural_lse(lse, layout, self.options),
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

"""Calling conventions, each declared once for making, parsing and rendering calls.

A ``Convention`` has parameters by meaning, each with the names that functions use for it. ``bind``
turns a Problem into arguments by meaning, ``Signature`` holds the keywords that a function accepts,
``parse`` reads a user's own call, and an argument's ``text`` is its source in a script.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch

from attncheck.core.errors import UnknownName
from attncheck.core.mod_spec import NONE
from attncheck.inputs.input_tensors import Inputs
from attncheck.inputs.problem import Problem
from attncheck.mods.library import is_additive
from attncheck.subjects.capabilities.capability_table import ALIGNMENTS, EMPTY_ROWS, LSE_BASES
from attncheck.subjects.conventions.call_tensors import attention_bias, sequence_lengths
from attncheck.subjects.conventions.layouts import Layout, without_padding
from attncheck.subjects.conventions.parse import CallArguments, ParsedCall

SINKS = ("sinks", "sink", "s_aux", "softmax_sink", "attention_sinks")
"""Names for each head's sink logit, fp32 ``(heads,)``, in gpt-oss, flash-attn's Hopper kernels and
others. ``learnable_sink`` is not among them: flash-attn's CuTe kernels take bf16 there, to which a
drawn logit would have to be rounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConventionOptions:
    """Deviations of one kernel from its convention; an empty value means the convention's own.

    Raises:
        UnknownName: for an invalid name.
    """

    lse: Literal["", "natural", "base2"] = ""  # logarithm of its LSE, a name in ``LSE_BASES``
    # What it returns for rows that see no key, a name in ``EMPTY_ROWS``.
    empty_row: Literal["", "zero", "nan", "mean", "unspecified"] = ""
    # How its causal flag and window are aligned, a name in ``ALIGNMENTS``.
    causal: Literal["", "top_left", "bottom_right"] = ""
    # Names in ``PROMISES``; None: only what every kernel promises.
    promises: frozenset[str] | None = None
    # True: it must return LSE; False: none is requested, and one that it returns is ignored;
    # None: LSE is requested if the signature has a flag for it, and used if returned.
    returns_lse: bool | None = None
    # Source of gradients: ``autograd``, or a function of (dout, q, k, v, out, lse, and its own
    # keywords) that returns dq, dk and dv, and dsink if there are sinks; None: no gradients.
    backward: Literal["autograd"] | Callable[..., Any] | None = "autograd"

    def __post_init__(self) -> None:
        for name, valid in (("lse", LSE_BASES), ("empty_row", EMPTY_ROWS), ("causal", ALIGNMENTS)):
            value = getattr(self, name)
            if value and value not in valid:
                raise UnknownName(name, value, valid)
        if isinstance(self.backward, str) and self.backward != "autograd":
            raise UnknownName("backward", self.backward, ("autograd",))


# ------------------------------------------------------------------ arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputedArgument:
    """An argument whose value is made from the inputs."""

    make: Callable[[Inputs], Any]  # creates the value on the inputs' device
    # Source of the value in a script: a Python expression of torch, q, k, v and ``mask``, a bool
    # tensor that broadcasts to ``(batch, heads, query, kv)``. Empty if there is no such source.
    text: str
    setup: str = ""  # statements that the expression needs before it
    what: str = ""  # name of a tensor that may be too large for the machine's memory
    size: int = 0  # that tensor's bytes
    # Why a device's tensor would not be the Problem's, in one line; None if it is.
    unfit: Callable[[str], str | None] = lambda _device: None


def number_tensor(numbers: Collection[float | list[float]], dtype: torch.dtype) -> ComputedArgument:
    """Return an argument that is a tensor of ``numbers``, or of lists of numbers."""
    listed = list(numbers)
    return ComputedArgument(
        make=lambda inputs: torch.tensor(listed, dtype=dtype, device=inputs.device),
        text=f"torch.tensor({listed}, dtype={dtype}, device=q.device)",
    )


@dataclass(frozen=True, slots=True)
class Argument:
    """The value of one parameter, and when to pass it."""

    value: Any  # the value itself, or a ``ComputedArgument``
    # ``always``: a function without the parameter does not support the Problem. ``accepted``:
    # passed if the function has the parameter. ``required``: passed if it has no default.
    when: Literal["always", "accepted", "required"]


Arguments = dict[str, Argument]  # arguments by meaning


must_pass = partial(Argument, when="always")
pass_if_accepted = partial(Argument, when="accepted")
pass_if_required = partial(Argument, when="required")  # for the convention's default values


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A Problem to bind to a function's arguments, and what else the arguments depend on."""

    problem: Problem
    able: frozenset[str]  # meanings of the parameters that the function has
    bottom_right: bool  # whether causal masks and windows are aligned bottom-right, not top-left
    options: ConventionOptions

    def scale(self) -> Argument:
        """Return the scale; 1/√head_dim is left out, so that the default is tested too."""
        return (pass_if_required if self.problem.has_usual_scale else must_pass)(self.problem.scale)

    def sinks(self) -> Argument:
        """Return each head's sink logit, fp32 ``(heads,)``; −∞ (weight 0) without a sink."""
        heads = self.problem.heads
        if self.problem.sink:
            return must_pass(ComputedArgument(make=lambda inputs: inputs.sink, text="sink"))
        return pass_if_required(
            ComputedArgument(
                make=lambda inputs: inputs.q.new_full((heads,), -math.inf, dtype=torch.float32),
                text=f'torch.full(({heads},), -float("inf"), device=q.device)',
            )
        )

    def bias(self) -> Argument | str:
        """Return the score mod as a bias, fp32 ``(batch, heads, query, kv)``, or why it is none."""
        score = self.problem.score
        if score == NONE:
            return pass_if_required(None)
        if not is_additive(score):
            return f"a bias is added to scores, and {score} does more"
        shape = (self.problem.batch, self.problem.heads, self.problem.query, self.problem.kv)

        def make(inputs: Inputs) -> torch.Tensor:
            bias = attention_bias(self.problem, str(inputs.device)).float()
            # Expanded, because few kernels broadcast it.
            return bias.expand(shape).contiguous()

        return must_pass(
            ComputedArgument(make=make, text="", what="bias", size=4 * math.prod(shape))
        )

    def key_padding(self, *, seen: bool) -> Argument:
        """Return a bool ``(batch, kv)``, True where padding leaves (``seen``) or hides a key."""
        if without_padding(self.problem.mask) == self.problem.mask:
            return pass_if_required(None)
        lengths, kv = list(sequence_lengths(self.problem)), self.problem.kv

        def make(inputs: Inputs) -> torch.Tensor:
            ends = torch.tensor(lengths, device=inputs.device)[:, None]
            visible = torch.arange(kv, device=inputs.device) < ends
            return visible if seen else ~visible

        ends = f"torch.tensor({lengths}, device=q.device)[:, None]"
        text = f"torch.arange({kv}, device=q.device) {'<' if seen else '>='} {ends}"
        return must_pass(ComputedArgument(make=make, text=text))

    def lse_flag(self) -> Argument:
        """Return the flag that requests LSE, by which kernels are judged too if they have it."""
        return (
            pass_if_required(value=False)
            if self.options.returns_lse is False
            else pass_if_accepted(value=True)
        )


# ------------------------------------------------------------------ signatures


def callee(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function whose signature counts: a ``torch.nn.Module``'s ``forward``."""
    # The ``__call__`` of a module, compiled or not, has only *args in its signature.
    if isinstance(function, torch.nn.Module):
        return getattr(function, "_orig_mod", function).forward
    return function


def _signature_parameters(function: object) -> list[inspect.Parameter] | None:
    """Return the parameters of a callable; None if they cannot be determined."""
    if not callable(function):
        return None
    try:
        called = callee(function)
        schema = _schema(called)
        if schema is not None:
            return [_schema_parameter(each) for each in schema.arguments]
        return list(inspect.signature(called).parameters.values())
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001  # functions in C, or a broken __signature__
        return None


def _schema(function: object) -> Any:
    """Return torch's schema of a scripted function or an operator; None for other functions."""
    if isinstance(function, torch.jit.ScriptFunction):
        return function.schema
    function = getattr(function, "_opoverload", function)  # set by ``torch.library.custom_op``
    if isinstance(function, torch._ops.OpOverloadPacket):
        names = function.overloads()  # type: ignore[no-untyped-call]  # torch's
        function = getattr(function, names[0])
    return function._schema if isinstance(function, torch._ops.OpOverload) else None


def _schema_parameter(argument: Any) -> inspect.Parameter:
    return inspect.Parameter(
        argument.name,
        inspect.Parameter.KEYWORD_ONLY
        if argument.kwarg_only
        else inspect.Parameter.POSITIONAL_OR_KEYWORD,
        default=argument.default_value if argument.has_default_value() else inspect.Parameter.empty,
    )


def _without_default(parameters: list[inspect.Parameter]) -> frozenset[str]:
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return frozenset(p.name for p in parameters if p.default is p.empty and p.kind not in variable)


def _parameter_names(parameters: list[inspect.Parameter]) -> str:
    """Return ``(q, k, causal=…)``, without annotations and values."""
    shown = [
        p.replace(annotation=p.empty, default=p.empty if p.default is p.empty else ...)
        for p in parameters
    ]
    text = str(inspect.Signature(shown, __validate_parameters__=False))
    return text.replace("=Ellipsis", "=…")


@dataclass(frozen=True, slots=True)
class Signature:
    """Keywords of a convention that a function accepts."""

    keywords: frozenset[str]
    required: frozenset[str] = frozenset()  # those without a default
    # Those in its signature; it takes the others by ``**keywords``, or has no signature.
    named: frozenset[str] = frozenset()

    @classmethod
    def read(cls, function: object, keywords: Collection[str], convention: str) -> Signature | str:
        """Return the Signature of a function that takes q, k, v by position, and some ``keywords``.

        Args:
            function: A callable; for a ``torch.nn.Module``, its ``forward`` is read.
            convention: The convention's name, for the reason.

        Returns:
            The Signature, with all keywords if they cannot be determined (functions written in C).
            Or why it does not follow the convention, to follow its name: ``needs 'block', …``.
        """
        if not callable(function) or inspect.isclass(function):
            return f"is {type(function).__name__}, and must be a function of query, key and value"
        # A Triton function needs a grid and pointers, so it cannot be called with tensors alone.
        if type(function).__module__.partition(".")[0] == "triton":
            return "is a Triton function: name the Python function that launches it"
        parameters = _signature_parameters(function)
        if parameters is None:
            return cls(frozenset(keywords))
        return cls._of_parameters(parameters, frozenset(keywords), convention)

    @classmethod
    def _of_parameters(
        cls, parameters: list[inspect.Parameter], known: frozenset[str], convention: str
    ) -> Signature | str:
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        tensors = [p for p in parameters if p.kind in positional][:3]
        enough = len(tensors) == 3 or any(p.kind is p.VAR_POSITIONAL for p in parameters)
        for place, parameter in enumerate(tensors):
            # The tensors end at a keyword of the convention or a default; ``*args`` adds none then.
            if parameter.name in known or parameter.default is not parameter.empty:
                tensors, enough = tensors[:place], False
                break
        if not enough:
            return (
                f"takes {_parameter_names(parameters)}: a kernel's first three arguments are "
                "query, key and value, without defaults"
            )
        others = [p for p in parameters if p not in tensors]
        required = _without_default(others)
        named = known & {p.name for p in others if p.kind is not p.POSITIONAL_ONLY}
        # A function with ``**keywords`` may find other required values there.
        if any(p.kind is p.VAR_KEYWORD for p in others):
            return cls(known, required & known, named)
        unknown = required - known
        if unknown:
            return (
                f"needs {min(unknown)!r}, which the {convention} convention does not pass: give it "
                "a default, or write an adapter (docs/how-to/adapters.md)"
            )
        return cls(named, required, named)

    def names_of(self, parameter: Parameter) -> tuple[str, ...]:
        """Return the names under which to pass a parameter: all required ones, else at most one.

        In ``**keywords`` the convention's own name, the first spelling, is used, unless the
        parameter is passed ``by_name`` only.
        """
        required = tuple(name for name in parameter.spellings if name in self.required)
        if required:
            return required
        named = [name for name in parameter.spellings if name in self.named]
        if not named and parameter.spellings[0] in self.keywords and not parameter.by_name:
            named = [parameter.spellings[0]]
        return tuple(named[:1])


# ------------------------------------------------------------------ conventions


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a convention, other than q, k and v."""

    meaning: str  # key of the meaning, shared by all conventions
    spellings: tuple[str, ...]  # names that functions use for it, the convention's own first
    # Whether it is passed only if the signature names it, and never into ``**keywords``.
    by_name: bool = False
    must: bool = False  # whether a function without it does not follow this convention
    of_result: bool = False  # whether it selects results, or is dropout: gradients ignore it
    bound: bool = True  # whether attncheck's own calls pass it; else it is only parsed
    matters: bool = True  # whether it affects the result, and not only the speed
    # Whether functions of the convention also take it by position, in the declared order.
    by_position: bool = True


WRITTEN_OUT = (
    Parameter("bias", ("attn_bias", "bias"), by_name=True, by_position=False),
    Parameter("key_padding", ("key_padding_mask",), by_name=True, by_position=False),
)
"""Parameters that are explicit tensors: a bias that is added to the scores, as in xformers and
flash-attn's Triton kernel, and a padding mask of keys, in which True means a visible key in
flash-attn's modules and a hidden key in torch's ``MultiheadAttention``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Convention:
    """A calling convention of functions."""

    name: str  # on the command line
    summary: str
    parameters: tuple[Parameter, ...]  # those after q, k and v, in order
    layout: Callable[[Problem], Layout]  # axes of the tensors of a supported Problem
    # Turns a Problem's mask, score mod and scale into arguments by meaning, or returns why the
    # convention cannot express them.
    bind: Callable[[Request], Arguments | str]
    # Whether a function's (parameter names, dotted name) identify this convention and no other.
    claims_function: Callable[[frozenset[str], str], bool]
    # The reverse of ``bind``: parses a user's call; None if calls are not parsed.
    parse: Callable[[CallArguments], ParsedCall] | None = None
    most_results: int = 2  # the longest tuple of results of a function
    bottom_right: bool = False  # whether causal masks and windows are aligned bottom-right
    empty_lse: tuple[float, ...] = (-math.inf,)  # valid LSE of a row that sees no key
    # Context manager around a call on (device).
    within: Callable[[str], AbstractContextManager[object]] = lambda _device: nullcontext()
    # Reasons by names of arguments for which the convention has no value: a function that
    # requires one does not follow the convention.
    declined: Mapping[str, str] = field(default_factory=dict)
    # Makes the positional tensors if keys and values are laid out together; None: the layout
    # converts each by itself.
    tensors: Callable[[Layout, Inputs], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] | None = (
        None
    )
    # Whether keys and values lie in pages; then it supports only Problems with paging.
    paged: bool = False

    @property
    def bound(self) -> dict[str, Parameter]:
        """The parameters that attncheck's own calls may pass, by meaning."""
        return {each.meaning: each for each in self.parameters if each.bound}

    def signature(self, function: object) -> Signature | str:
        """Return a function's Signature, or why it does not follow the convention."""
        # The first three parameters are tensors, whatever their names. Declined ones come first,
        # because their reason is better than "the convention has no value".
        required = _without_default((_signature_parameters(function) or [])[3:])
        for name in required & set(self.declined):
            return f"needs {name!r}: {self.declined[name]}"
        parameters = self.bound.values()
        keywords = [name for each in parameters for name in each.spellings]
        signature = Signature.read(function, keywords, self.name)
        if isinstance(signature, str):
            return signature
        for each in parameters:
            # Without cu_seqlens, for example, it would silently compute another Problem.
            if each.must and not signature.keywords & set(each.spellings):
                return f"takes no {each.spellings[0]}, which the {self.name} convention passes"
        return signature

    def claims(self, candidate: object, ignored: Collection[str] = ()) -> bool:
        """Return whether an object's names identify this convention and no other.

        Parameters in ``ignored`` do not count.
        """
        if not callable(candidate) or inspect.isclass(candidate):
            return False
        names = frozenset(each.name for each in _signature_parameters(candidate) or ())
        names -= frozenset(ignored)
        # Decorators hide a function's module, which may name its convention too.
        unwrapped = inspect.unwrap(candidate)
        parts = (getattr(unwrapped, name, "") for name in ("__module__", "__qualname__"))
        return self.claims_function(
            names, ".".join(part for part in parts if isinstance(part, str))
        )

    def unfit(self, candidate: object) -> str | None:
        """Return why an object does not follow this convention, to follow its name; or None."""
        signature = self.signature(candidate)
        return signature if isinstance(signature, str) else None

"""Calling conventions: one declaration of each, from which calls are made, read and written out.

A ``Convention`` names its parameters by meaning, each with the spellings that functions have for
it. ``bind`` turns a Problem into arguments by meaning, ``Signature`` says which of them a function
takes, ``parse`` reads somebody's own call, and an argument's ``text`` is what a script says.
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
from attncheck.core.formats import fp32
from attncheck.core.mod_spec import NONE
from attncheck.inputs.input_tensors import Inputs
from attncheck.inputs.problem import Problem
from attncheck.mods.library import is_additive
from attncheck.subjects.capabilities.capability_table import ALIGNMENTS, EMPTY_ROWS, LSE_BASES
from attncheck.subjects.conventions.call_tensors import attention_bias, sequence_lengths
from attncheck.subjects.conventions.layouts import Layout, without_padding
from attncheck.subjects.conventions.parse import CallArguments, ParsedCall

SINKS = ("sinks", "sink", "s_aux", "softmax_sink", "attention_sinks")
"""Names for each head's logit, fp32 ``(heads,)``: those of gpt-oss, of flash-attn's Hopper kernels,
and others that say the same. Not ``learnable_sink``: flash-attn's CuTe kernels take bf16 there, to
which a drawn logit would have to be rounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConventionOptions:
    """Facts of one kernel that its convention does not know; empty: as the convention has it.

    Raises:
        UnknownName: for a name that is none of these.
    """

    # Empty, and not None: a table that is silent and one that says the usual are alike.
    lse: Literal["", "natural", "base2"] = ""  # logarithm of its LSE, a name in ``LSE_BASES``
    # What it gives for rows that see no key, a name in ``EMPTY_ROWS``.
    empty_row: Literal["", "zero", "nan", "mean", "unspecified"] = ""
    # How its causal flag and window are aligned, a name in ``ALIGNMENTS``.
    causal: Literal["", "top_left", "bottom_right"] = ""
    # What it promises, names in ``PROMISES``; None: what any kernel does.
    promises: frozenset[str] | None = None
    # True: it must give LSE; False: none is requested, and one that it gives is left out; None:
    # it is requested where the signature has a flag for it, and taken where it comes.
    returns_lse: bool | None = None
    # How its gradients are had where a Problem has them: by ``autograd``, or by a function (dout,
    # q, k, v, out, lse, and its own keywords) that gives dq, dk and dv, and dsink where there are
    # sinks; None: it has no gradients.
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
class MadeArgument:
    """A value that is made only once there are inputs."""

    make: Callable[[Inputs], Any]  # function that makes it on the inputs' device
    # The same for a script: a Python expression of torch, q, k, v and ``mask``, a bool tensor
    # that broadcasts to ``(batch, heads, query, kv)``. Empty where it cannot be said.
    text: str
    setup: str = ""  # statements that the expression needs before it
    what: str = ""  # name of a tensor that may be too large for the machine
    size: int = 0  # its bytes


def number_tensor(numbers: Collection[float | list[float]], dtype: torch.dtype) -> MadeArgument:
    """Tensor of these numbers, or of lists of them."""
    listed = list(numbers)
    return MadeArgument(
        make=lambda inputs: torch.tensor(listed, dtype=dtype, device=inputs.device),
        text=f"torch.tensor({listed}, dtype={dtype}, device=q.device)",
    )


def input_argument(text: str, make: Callable[[Inputs], Any]) -> MadeArgument:
    """An input as it is; ``text`` is its name in a script."""
    return MadeArgument(make=make, text=text)


@dataclass(frozen=True, slots=True)
class Argument:
    """A value for one meaning."""

    value: Any  # the value, or how it is ``MadeArgument``
    # ``needed``: without it the Problem cannot be passed. ``offered``: passed where it is taken.
    # ``required``: passed where it has no default.
    when: Literal["needed", "offered", "required"]


Arguments = dict[str, Argument]  # arguments by meaning


needed = partial(Argument, when="needed")
offered = partial(Argument, when="offered")
spare = partial(Argument, when="required")  # the convention's own default


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A Problem to be passed, and what its arguments depend on besides."""

    problem: Problem
    able: frozenset[str]  # meanings that the function takes
    bottom_right: bool  # whether causal masks and windows are aligned so
    options: ConventionOptions  # what else was said of the function

    def scale(self) -> Argument:
        """The scale; left out where it is 1/√head_dim, so that its default is examined too."""
        usual = self.problem.scale == fp32(self.problem.head_dim**-0.5)
        return spare(self.problem.scale) if usual else needed(self.problem.scale)

    def sinks(self) -> Argument:
        """Each head's logit, fp32 ``(heads,)``; −∞, which weighs nothing, where there is none."""
        heads = self.problem.heads
        if self.problem.sink:
            return needed(input_argument("sink", lambda inputs: inputs.sink))
        return spare(
            MadeArgument(
                make=lambda inputs: inputs.q.new_full((heads,), -math.inf, dtype=torch.float32),
                text=f'torch.full(({heads},), -float("inf"), device=q.device)',
            )
        )

    def bias(self) -> Argument | str:
        """What the score mod adds, fp32 ``(batch, heads, query, kv)``; or why it is no such sum."""
        score = self.problem.score
        if score == NONE:
            return spare(None)
        if not is_additive(score):
            return f"a bias is added to scores, and {score} does more"
        whole = (self.problem.batch, self.problem.heads, self.problem.query, self.problem.kv)

        def make(inputs: Inputs) -> torch.Tensor:
            bias = attention_bias(self.problem, str(inputs.device)).float()
            # Written out in full: few kernels broadcast it.
            return bias.expand(whole).contiguous()

        return needed(MadeArgument(make=make, text="", what="bias", size=4 * math.prod(whole)))

    def key_padding(self, *, seen: bool) -> Argument:
        """Which keys padding leaves to each sequence (``seen``), or hides; bool ``(batch, kv)``."""
        if without_padding(self.problem.mask) == self.problem.mask:
            return spare(None)
        lengths, kv = list(sequence_lengths(self.problem)), self.problem.kv

        def make(inputs: Inputs) -> torch.Tensor:
            ends = torch.tensor(lengths, device=inputs.device)[:, None]
            there = torch.arange(kv, device=inputs.device) < ends
            return there if seen else ~there

        ends = f"torch.tensor({lengths}, device=q.device)[:, None]"
        text = f"torch.arange({kv}, device=q.device) {'<' if seen else '>='} {ends}"
        return needed(MadeArgument(make=make, text=text))

    # A kernel with LSE is judged by it too, so it is requested wherever that is possible.
    def lse_flag(self) -> Argument:
        """The flag that requests LSE."""
        return spare(value=False) if self.options.returns_lse is False else offered(value=True)


# ------------------------------------------------------------------ signatures


def callee(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what a call of ``function`` calls: a ``torch.nn.Module``'s ``forward``."""
    # A module's ``__call__`` takes *args, and so does what is compiled of one: their signatures
    # would say nothing.
    if isinstance(function, torch.nn.Module):
        return getattr(function, "_orig_mod", function).forward
    return function


def _signature_parameters(function: object) -> list[inspect.Parameter] | None:
    """Return the parameters of a callable; None where nothing says what they are."""
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
    except BaseException:  # noqa: BLE001  # in C, or somebody's own __signature__: it says nothing
        return None


def _schema(function: object) -> Any:
    """What torch says of a scripted function or an operator, whose signature says nothing."""
    if isinstance(function, torch.jit.ScriptFunction):
        return function.schema
    function = getattr(function, "_opoverload", function)  # of ``torch.library.custom_op``
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


@dataclass(frozen=True, slots=True)
class Signature:
    """Keywords of a convention that a function takes."""

    keywords: frozenset[str]  # all of them
    required: frozenset[str] = frozenset()  # those that it gives no default
    # Those that its signature names; the others go into its ``**keywords``, or it has no
    # signature.
    named: frozenset[str] = frozenset()

    @classmethod
    def read(cls, function: object, keywords: Collection[str]) -> Signature | str:
        """Read what ``function`` takes of a convention of q, k, v by position and of ``keywords``.

        Args:
            function: A callable; a ``torch.nn.Module`` is its ``forward``.

        Returns:
            What it takes; all, where nothing says it (functions written in C). Or why it does not
            follow the convention, to stand after ``it must``: ``be a function``.
        """
        if not callable(function) or inspect.isclass(function):
            return "be a function of query, key and value"
        # A Triton function wants a grid and pointers: nobody can call it with tensors alone.
        if type(function).__module__.partition(".")[0] == "triton":
            return "be the Python function that launches this Triton function"
        parameters = _signature_parameters(function)
        if parameters is None:
            return cls(frozenset(keywords))
        return cls._of_parameters(parameters, frozenset(keywords))

    @classmethod
    def _of_parameters(
        cls, parameters: list[inspect.Parameter], known: frozenset[str]
    ) -> Signature | str:
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        tensors = [p for p in parameters if p.kind in positional][:3]
        enough = len(tensors) == 3 or any(p.kind is p.VAR_POSITIONAL for p in parameters)
        for place, parameter in enumerate(tensors):
            # A keyword of the convention, or a default, ends the tensors: ``*args`` takes no more.
            if parameter.name in known or parameter.default is not parameter.empty:
                tensors, enough = tensors[:place], False
                break
        if not enough:
            return (
                "be a function of query, key and value: its first three arguments, without defaults"
            )
        others = [p for p in parameters if p not in tensors]
        required = _without_default(others)
        named = known & {p.name for p in others if p.kind is not p.POSITIONAL_ONLY}
        # What it requires beyond the convention it may well find in its own ``**keywords``.
        if any(p.kind is p.VAR_KEYWORD for p in others):
            return cls(known, required & known, named)
        unknown = required - known
        if unknown:
            return f"need no {min(unknown)!r}, for which the convention has no value"
        return cls(named, required, named)

    def names_of(self, parameter: Parameter) -> tuple[str, ...]:
        """Return the names under which a parameter is passed: all that are required, else one.

        What goes into ``**keywords`` has the convention's own name, the first spelling, unless the
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
    """A parameter of a convention, beside q, k and v."""

    meaning: str  # name of what it means, the same in all conventions
    spellings: tuple[str, ...]  # names that functions have for it, the convention's own first
    # It is passed only where a signature names it, and never into ``**keywords``.
    by_name: bool = False
    must: bool = False  # a function without it is none of this convention
    of_result: bool = False  # it says what is returned, or is dropout: no gradient depends on it
    bound: bool = True  # calls of ours pass it; else only a caller's call may have it
    matters: bool = True  # a caller's value changes the result, and not only how fast it comes
    # Functions of the convention take it by position too, in the order declared.
    by_position: bool = True


WRITTEN_OUT = (
    Parameter("bias", ("attn_bias", "bias"), by_name=True, by_position=False),
    Parameter("key_padding", ("key_padding_mask",), by_name=True, by_position=False),
)
"""Tensors that say what a flag cannot: what is added to the scores, as xformers and flash-attn's
Triton kernel have it, and which keys padding leaves. Of these flash-attn's modules say True where a
key is seen, torch's ``MultiheadAttention`` where it is hidden."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Convention:
    """A calling convention of functions."""

    name: str  # what it is called on the command line
    summary: str
    parameters: tuple[Parameter, ...]  # beside q, k and v, in their order
    layout: Callable[[Problem], Layout]  # the axes of the tensors of a Problem that can be passed
    # What becomes of a Problem's mask, score mod and scale: arguments by meaning, or why the
    # convention cannot pass them.
    bind: Callable[[Request], Arguments | str]
    # Whether a function's (parameter names, dotted name) show that it is of this convention and
    # of no other.
    claims_function: Callable[[frozenset[str], str], bool]
    # The reverse: what somebody's call asks; None where no call is read.
    parse: Callable[[CallArguments], ParsedCall] | None = None
    most: int = 2  # most things that a function returns
    bottom_right: bool = False  # how causal masks and windows are aligned where the lengths differ
    empty_lse: tuple[float, ...] = (-math.inf,)  # what LSE may be of a row that sees no key
    # What is entered around a call on (device).
    within: Callable[[str], AbstractContextManager[object]] = lambda _device: nullcontext()
    # Arguments for which it has no value, with the reason: a function that requires one is none
    # of this convention.
    declined: Mapping[str, str] = field(default_factory=dict)
    # What is passed by position, where keys and values are laid out together; None for what the
    # layout makes of each.
    tensors: Callable[[Layout, Inputs], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] | None = (
        None
    )
    # Whether keys and values lie in pages: it takes Problems with paging, and no other.
    paged: bool = False

    @property
    def bound(self) -> dict[str, Parameter]:
        """Parameters that calls of ours may pass, by meaning."""
        return {each.meaning: each for each in self.parameters if each.bound}

    def signature(self, function: object) -> Signature | str:
        """Read what a function takes of the convention, or why it is none of its functions."""
        # The first three are tensors, whatever they are called.
        # A reason of its own says more than "the convention has no value".
        required = _without_default((_signature_parameters(function) or [])[3:])
        for name in required & set(self.declined):
            return f"need no {name!r}: {self.declined[name]}"
        parameters = self.bound.values()
        signature = Signature.read(function, [n for each in parameters for n in each.spellings])
        if isinstance(signature, str):
            return signature
        for each in parameters:
            # Without cu_seqlens, say, it would compute another Problem in silence.
            if each.must and not signature.keywords & set(each.spellings):
                return f"take {each.spellings[0]}, as the {self.name} convention has it"
        return signature

    def claims(self, candidate: object, ignored: Collection[str] = ()) -> bool:
        """Return whether an object shows that it is of this convention and of no other.

        Names that are ``ignored`` show nothing.
        """
        if not callable(candidate) or inspect.isclass(candidate):
            return False
        names = frozenset(each.name for each in _signature_parameters(candidate) or ())
        names -= frozenset(ignored)
        # A decorator hides where a function is from, and that names its convention too.
        whole = inspect.unwrap(candidate)
        parts = (getattr(whole, name, "") for name in ("__module__", "__qualname__"))
        return self.claims_function(
            names, ".".join(part for part in parts if isinstance(part, str))
        )

    def unfit(self, candidate: object) -> str | None:
        """Return why an object is none of this convention, to stand after ``it must``."""
        signature = self.signature(candidate)
        return signature if isinstance(signature, str) else None

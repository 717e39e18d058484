"""What a calling convention is: arguments by meaning, what a signature takes of them, options."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from attncheck.capabilities.capability_table import ALIGNMENTS, EMPTY_ROWS, LSE_BASES
from attncheck.core.errors import UnknownName

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from attncheck.capabilities.subject import Subject
    from attncheck.inputs.input_tensors import Inputs
    from attncheck.inputs.problem import Problem

__all__ = [
    "ALIGNMENTS",
    "EMPTY_ROWS",
    "LSE_BASES",
    "SINKS",
    "Argument",
    "Arguments",
    "Convention",
    "ConventionOptions",
    "MadeArgument",
    "Request",
    "Signature",
    "callee",
    "needed",
    "offered",
    "parameter_names",
    "read_signature",
    "required_names",
    "spare",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConventionOptions:
    """Facts of one kernel that its convention does not know; empty: as the convention has it.

    Attributes:
        lse: Logarithm of its LSE, a name in ``LSE_BASES``.
        empty_row: What it gives for rows that see no key, a name in ``EMPTY_ROWS``.
        causal: How its causal flag and window are aligned, a name in ``ALIGNMENTS``.
        promises: What it promises, names in ``question.PROMISES``; None: what any kernel does.
        returns_lse: True: it must give LSE; False: none is asked for, and one that it gives is
            left out; None: it is asked for where the signature has a flag for it, and taken where
            it comes.
        backward: How its gradients are had where a Problem asks for them: by ``autograd``, or by a
            function (dout, q, k, v, out, lse, and its own keywords) that gives dq, dk and dv, and
            dsink where there are sinks; None: it has none, and is not asked.

    Raises:
        UnknownName: for a name that is none of these.
    """

    lse: Literal["", "natural", "base2"] = ""
    empty_row: Literal["", "zero", "nan", "mean", "unspecified"] = ""
    causal: Literal["", "top_left", "bottom_right"] = ""
    promises: frozenset[str] | None = None
    returns_lse: bool | None = None
    backward: Literal["autograd"] | Callable[..., Any] | None = "autograd"

    def __post_init__(self) -> None:
        for name, valid in (("lse", LSE_BASES), ("empty_row", EMPTY_ROWS), ("causal", ALIGNMENTS)):
            value = getattr(self, name)
            if value and value not in valid:
                raise UnknownName(name, value, valid)
        if isinstance(self.backward, str) and self.backward != "autograd":
            raise UnknownName("backward", self.backward, ("autograd",))


When = Literal["needed", "offered", "required"]

SINKS = ("sinks", "sink", "s_aux", "softmax_sink", "attention_sinks")
"""Names for each head's logit, fp32 ``(heads,)``: those of gpt-oss, of flash-attn's Hopper kernels,
and others that say the same. Not ``learnable_sink``: flash-attn's CuTe kernels take bf16 there, to
which a drawn logit would have to be rounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeArgument:
    """A value that is made only once there are inputs.

    Attributes:
        make: What makes it, on their device.
        text: The same for a script: a Python expression of torch, q, k, v and ``mask``, a bool
            tensor that broadcasts to ``(batch, heads, query, kv)``. Empty where it cannot be said.
        setup: Statements that the expression needs before it.
        what: What is written out, for who has no memory for it.
        size: Its bytes.
    """

    make: Callable[[Inputs], Any]
    text: str
    setup: str = ""
    what: str = ""
    size: int = 0


@dataclass(frozen=True, slots=True)
class Argument:
    """A value for one meaning.

    Attributes:
        value: Itself, or how it is ``Made``.
        when: ``needed``: without it the Problem cannot be asked. ``offered``: passed where it is
            taken. ``required``: passed where it has no default.
    """

    value: Any
    when: When


Arguments = dict[str, Argument]


def needed(value: Any) -> Argument:
    """Without it the Problem cannot be asked."""
    return Argument(value, "needed")


def offered(value: Any) -> Argument:
    """Passed where it is taken."""
    return Argument(value, "offered")


def spare(value: Any) -> Argument:
    """The default of the convention: passed only where a function has none."""
    return Argument(value, "required")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a convention's arguments depend on.

    Attributes:
        problem: What to compute.
        able: Meanings that the function takes.
        bottom_right: Whether causal masks and windows are aligned so.
        options: What else was said of the function.
    """

    problem: Problem
    able: frozenset[str]
    bottom_right: bool
    options: ConventionOptions

    def scale(self) -> Argument:
        """Left out where it is 1/√head_dim, so that its default is examined too."""
        from attncheck.core.formats import fp32

        usual = self.problem.scale == fp32(self.problem.head_dim**-0.5)
        return spare(self.problem.scale) if usual else needed(self.problem.scale)

    def sinks(self) -> Argument:
        """Each head's logit, fp32 ``(heads,)``; −∞, which weighs nothing, where there is none."""
        heads = self.problem.heads

        def make(inputs: Inputs) -> torch.Tensor:
            if inputs.sink is not None:
                return inputs.sink
            return inputs.q.new_full((heads,), -math.inf, dtype=torch.float32)

        if self.problem.sink:
            return needed(MadeArgument(make=make, text="sink"))
        return spare(
            MadeArgument(make=make, text=f'torch.full(({heads},), -float("inf"), device=q.device)')
        )

    def lse_flag(self) -> Argument:
        """Whether LSE is asked for."""
        if self.options.returns_lse is False:
            return spare(value=False)
        return offered(value=True)


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, slots=True)
class Signature:
    """Keywords of a convention that a function takes.

    Attributes:
        keywords: All of them.
        required: Those that it gives no default.
        named: Those that its signature names; the others go into its ``**keywords``, or it has no
            signature.
    """

    keywords: frozenset[str]
    required: frozenset[str] = frozenset()
    named: frozenset[str] = frozenset()

    def spelled(
        self, spellings: Mapping[str, tuple[str, ...]], by_name: Collection[str] = ()
    ) -> dict[str, tuple[str, ...]]:
        """By meaning, the names under which it takes it: all that it requires, else one.

        What goes into ``**keywords`` has the convention's own name, the first of each meaning; of
        the meanings in ``by_name`` nothing does.
        """
        found = {}
        for meaning, names in spellings.items():
            required = tuple(name for name in names if name in self.required)
            one = [name for name in names if name in self.named] or [
                name for name in names[:1] if name in self.keywords and meaning not in by_name
            ]
            if required or one:
                found[meaning] = required or (one[0],)
        return found


def read_signature(function: object, keywords: Collection[str]) -> Signature | str:
    """What ``function`` takes of a convention of q, k, v by position and ``keywords`` by name.

    Args:
        function: A callable; a ``torch.nn.Module`` is its ``forward``.
        keywords: The convention's.

    Returns:
        What it takes; all, where nothing says it (functions written in C). Or why it does not
        follow the convention, to stand after ``it must``: ``be a function``.
    """
    if not callable(function) or inspect.isclass(function):
        return "be a function of query, key and value"
    if type(function).__module__.partition(".")[0] == "triton":
        return "be the Python function that launches this Triton function"
    parameters = _parameters(function)
    if parameters is None:
        return Signature(frozenset(keywords))
    return _read(parameters, frozenset(keywords))


def parameter_names(function: object) -> frozenset[str]:
    """Names in the signature; none where there is none."""
    parameters = _parameters(function) if callable(function) else None
    return frozenset(parameter.name for parameter in parameters or ())


def required_names(function: object) -> frozenset[str]:
    """Names in the signature that have no default, beyond the first three: those are tensors."""
    parameters = _parameters(function) if callable(function) else None
    return _required((parameters or [])[3:])


def callee(function: Callable[..., Any]) -> Callable[..., Any]:
    """What a call of ``function`` calls: a ``torch.nn.Module``'s ``forward``."""
    import torch

    return function.forward if isinstance(function, torch.nn.Module) else function


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(callee(function)).parameters.values())
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001  # in C, or somebody's own __signature__: it says nothing
        return None


def _read(parameters: list[inspect.Parameter], keywords: frozenset[str]) -> Signature | str:
    tensors = [p for p in parameters if p.kind in _POSITIONAL][:3]
    anything = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    for parameter in tensors:
        if parameter.name in keywords or parameter.default is not parameter.empty:
            anything = False
            tensors = tensors[: tensors.index(parameter)]
            break
    if len(tensors) < 3 and not anything:
        return "be a function of query, key and value: its first three arguments, without defaults"
    parameters = [p for p in parameters if p not in tensors]
    required = _required(parameters)
    named = keywords & {p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return Signature(keywords, required & keywords, named)
    others = required - keywords
    if others:
        return f"need no {min(others)!r}, for which the convention has no value"
    return Signature(named, required, named)


def _required(parameters: list[inspect.Parameter]) -> frozenset[str]:
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return frozenset(p.name for p in parameters if p.default is p.empty and p.kind not in variable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Convention:
    """A way to call a kernel.

    Attributes:
        name: What it is called on the command line.
        summary: One line.
        claims: Whether an object shows that it is of this convention and of no other.
        unfit: Why an object is none of this convention, to stand after ``it must``: ``be a
            Subject``; None where it is one.
        adopt: (object, name for reports, options) → the Subject that it is then.
    """

    name: str
    summary: str
    claims: Callable[[object], bool]
    unfit: Callable[[object], str | None]
    adopt: Callable[[object, str, ConventionOptions], Subject]

"""Somebody's call of a function, its arguments by meaning: what a convention's ``parse`` reads."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from attncheck.core.mod_spec import FULL

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from attncheck.core.mod_spec import Spec
    from attncheck.core.outputs import Outputs

    Mod = Callable[..., torch.Tensor]


class UnreadableCall(Exception):
    """A call is nothing that a kernel of ours can be given: why, in a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCall:
    """The computation that a call is."""

    q: torch.Tensor  # ``(batch, heads, query, head_dim)``
    k: torch.Tensor  # ``(batch, kv_heads, kv, head_dim)``
    v: torch.Tensor  # ``(batch, kv_heads, kv, value_dim)``
    # Of the library, or a FlexAttention mask, or bool numbers ``(batch, heads, query, kv)``, with
    # axes of 1 where they are alike.
    mask: Spec | Mod | torch.Tensor = FULL
    score: Spec | Mod | None = None  # of the library, or a FlexAttention score mod; None for none
    scale: float | None = None  # factor of q·k; None for 1/√head_dim
    sink: torch.Tensor | None = None  # fp32 ``(heads,)``; None for none
    # Outputs → what the caller gets, in the axes of its own tensors.
    returned: Callable[[Outputs], Any]


class CallArguments:
    """Arguments of one call by meaning, and which of them were read.

    Args:
        order: Names of the arguments after q, k and v where the signature does not say them.
        meanings: What names mean, where that is another word.
        ignored: Meanings that change no result.

    Raises:
        UnreadableCall: for more arguments than there are names.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        order: Sequence[str],
        meanings: Mapping[str, str],
        ignored: Collection[str],
    ) -> None:
        names, defaults = _signature(function)
        if not names:
            names = ["q", "k", "v", *order]
        if len(args) > len(names):
            raise UnreadableCall(f"it has {len(args)} arguments")
        values = defaults | dict(zip(names, args, strict=False)) | dict(kwargs)
        # Tensors are known by place, whatever they are called; by keyword torch's names count too.
        first = dict(zip(names[:3], "qkv", strict=True)) | {"query": "q", "key": "k", "value": "v"}
        self.values = {
            first.get(name, meanings.get(name, name)): value for name, value in values.items()
        }
        self._read = {"q", "k", "v", *ignored}

    def tensor(self, meaning: str) -> torch.Tensor:
        """Return a tensor that must be there; raises UnreadableCall for anything else."""
        value = self.value(meaning)
        if not isinstance(value, torch.Tensor):
            raise UnreadableCall(f"its {meaning} is {type(value).__name__}")
        return value

    def value(self, meaning: str, usual: Any = None) -> Any:
        """Return an argument, or ``usual`` where it is left out."""
        self._read.add(meaning)
        return self.values.get(meaning, usual)

    def results(self, out: Mod, lse: Mod) -> Callable[[Outputs], Any]:
        """Return what makes the caller's results: out, or out and LSE where that is requested.

        As flash-attn gives it there is a third, what dropout left: None.

        Args:
            out: What brings out to the caller's axes.
            lse: The same of LSE.
        """
        with_lse = self.value("return_lse")
        # Only flash-attn's own functions have that parameter, and only they return three things.
        of_flash_attn = "deterministic" in self.values

        def returned(outputs: Outputs) -> Any:
            if not with_lse:
                return out(outputs.out)
            assert outputs.lse is not None, "a kernel of ours gives it"
            both = (out(outputs.out), lse(outputs.lse))
            return (*both, None) if of_flash_attn else both

        return returned

    def check(self) -> None:
        """Raise UnreadableCall for an argument that means something and that nobody has read."""
        # Silence would compute something else than the caller meant.
        for meaning in sorted(set(self.values) - self._read):
            value = self.values[meaning]
            if isinstance(value, torch.Tensor) or (value is not None and value not in (0, "")):
                raise UnreadableCall(f"it is given {meaning}")


def _signature(function: Callable[..., Any]) -> tuple[list[str], dict[str, Any]]:
    """Names in their order, and defaults; none of a function whose signature says nothing."""
    owner = getattr(function, "__self__", None)
    # ``Function.apply`` takes what its ``forward`` takes after the context.
    applied = isinstance(owner, type) and issubclass(owner, torch.autograd.Function)
    signed: Callable[..., Any] = owner.forward if applied else function  # type: ignore[union-attr]  # it is one
    try:
        parameters = list(inspect.signature(signed).parameters.values())
    except (TypeError, ValueError):
        return [], {}
    parameters = parameters[1:] if applied else parameters
    # Names that do not cover the tensors cannot say what the arguments after them are.
    if any(one.kind is one.VAR_POSITIONAL for one in parameters) or len(parameters) < len("qkv"):
        return [], {}
    named = [one for one in parameters if one.kind is not one.VAR_KEYWORD]
    return [one.name for one in named], {
        one.name: one.default for one in named if one.default is not one.empty
    }

"""A user's call of a function with its arguments by meaning, for a convention's ``parse``."""

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
    """Raised if a call cannot be expressed as a Problem, with the reason in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCall:
    """The computation that a call requests."""

    q: torch.Tensor  # ``(batch, heads, query, head_dim)``
    k: torch.Tensor  # ``(batch, kv_heads, kv, head_dim)``
    v: torch.Tensor  # ``(batch, kv_heads, kv, value_dim)``
    # A mask of the library, a FlexAttention mask, or a bool tensor that broadcasts to ``(batch,
    # heads, query, kv)``.
    mask: Spec | Mod | torch.Tensor = FULL
    score: Spec | Mod | None = None  # a score mod of the library or of FlexAttention
    scale: float | None = None  # factor of q·k; None for 1/√head_dim
    sink: torch.Tensor | None = None  # fp32 ``(heads,)``
    # Converts Outputs to the caller's results, in the axes of its own tensors.
    returned: Callable[[Outputs], Any]


class CallArguments:
    """Arguments of one call by meaning, with a record of those that were read.

    Args:
        order: Names of the arguments after q, k and v if the signature does not have them.
        meanings: The meanings of names; other names are their own meanings.
        ignored: Meanings that do not affect the result.

    Raises:
        UnreadableCall: for more positional arguments than there are names.
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
        # The first three parameters are the tensors, whatever their names; torch's names count too.
        qkv = dict(zip(names[:3], "qkv", strict=True)) | {"query": "q", "key": "k", "value": "v"}
        self.values = {
            qkv.get(name, meanings.get(name, name)): value for name, value in values.items()
        }
        self._read = {"q", "k", "v", *ignored}

    def tensor(self, meaning: str) -> torch.Tensor:
        """Return an argument that must be a tensor; raises UnreadableCall if it is not."""
        value = self.value(meaning)
        if not isinstance(value, torch.Tensor):
            raise UnreadableCall(f"its {meaning} is {type(value).__name__}")
        return value

    def value(self, meaning: str, usual: Any = None) -> Any:
        """Return an argument, or ``usual`` if the call leaves it out."""
        self._read.add(meaning)
        return self.values.get(meaning, usual)

    def results(self, out: Mod, lse: Mod) -> Callable[[Outputs], Any]:
        """Return a function from Outputs to the caller's results: out, or out and LSE if requested.

        flash-attn returns a third result with LSE, the dropout mask, which is None here.

        Args:
            out: Converts out to the caller's axes.
            lse: Converts LSE to the caller's axes.
        """
        with_lse = self.value("return_lse")
        # Only flash-attn's own functions have this parameter, and only they return three results.
        of_flash_attn = "deterministic" in self.values

        def returned(outputs: Outputs) -> Any:
            if not with_lse:
                return out(outputs.out)
            assert outputs.lse is not None, "a kernel of ours gives it"
            both = (out(outputs.out), lse(outputs.lse))
            return (*both, None) if of_flash_attn else both

        return returned

    def check(self) -> None:
        """Raise UnreadableCall for an argument with an effect that has not been read."""
        # Ignoring it would silently compute something else than the caller meant.
        for meaning in sorted(set(self.values) - self._read):
            value = self.values[meaning]
            if isinstance(value, torch.Tensor) or (value is not None and value not in (0, "")):
                raise UnreadableCall(f"it is given {meaning}")


def _signature(function: Callable[..., Any]) -> tuple[list[str], dict[str, Any]]:
    """Return parameter names in order, and defaults; empty if the signature is of no use."""
    owner = getattr(function, "__self__", None)
    # ``Function.apply`` has the parameters of its ``forward`` after the context.
    is_apply = isinstance(owner, type) and issubclass(owner, torch.autograd.Function)
    target: Callable[..., Any] = owner.forward if is_apply else function  # type: ignore[union-attr]  # it is one
    try:
        parameters = list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError):
        return [], {}
    parameters = parameters[1:] if is_apply else parameters
    # With ``*args``, or fewer than three parameters, the names after q, k and v are unknown.
    if any(one.kind is one.VAR_POSITIONAL for one in parameters) or len(parameters) < len("qkv"):
        return [], {}
    named = [one for one in parameters if one.kind is not one.VAR_KEYWORD]
    return [one.name for one in named], {
        one.name: one.default for one in named if one.default is not one.empty
    }

"""Any function in the convention of torch's ``F.scaled_dot_product_attention``."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from attncheck.formats import fp32
from attncheck.mods import library
from attncheck.outputs import Outputs
from attncheck.source_files import brief
from attncheck.subjects.contract import Call, Refused, Subject
from attncheck.subjects.conventions.convention import Convention
from attncheck.subjects.conventions.dispatched import FlashOnTheCpu
from attncheck.subjects.conventions.signature import Taken, taken
from attncheck.subjects.matmul_precision import Products, fp32_products
from attncheck.subjects.memory import too_large
from attncheck.subjects.sdpa import attention_mask, is_causal, with_short_exp

if TYPE_CHECKING:
    from collections.abc import Callable

    from attncheck.inputs import Inputs
    from attncheck.judge.arithmetic import Arithmetic
    from attncheck.problem import Problem

__all__ = ["KEYWORDS", "SDPA", "SdpaFunction"]

KEYWORDS = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
"""What the convention has besides query, key and value, with torch's meanings."""

# How a kernel says that it does not take its arguments. What else it raises is an error.
_REFUSALS = (ValueError, NotImplementedError, AssertionError)


class SdpaFunction(Subject):
    """``function(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)``.

    It gives out, or (out, LSE): ``(batch, heads, query, value_dim)`` in the dtype of query, and
    ``(batch, heads, query)`` in fp32 with the natural logarithm. Its signature says which keywords
    it takes, and it is asked nothing that needs another:

    * ``is_causal`` is passed for torch's causal mask, aligned top-left; every other mask is a
      boolean ``attn_mask`` (True: seen) that broadcasts to the scores;
    * ``scale`` is left out where it is 1/√head_dim, so that its default is examined too;
    * ``enable_gqa`` is passed where there are fewer key than query heads.

    Gradients are off. ValueError, NotImplementedError and AssertionError mean that it does not take
    its arguments (``contract.Refused``).

    Args:
        function: The kernel.
        name: What reports call it.
        takes: What it takes of ``KEYWORDS``.
    """

    def __init__(self, function: Callable[..., Any], name: str, takes: Taken) -> None:
        self._function = function
        self._takes = takes
        self.name = name
        self.summary = f"sdpa convention: {_listed(takes)}"
        self.triton = _uses_triton(function)
        self._reached_flash: set[str] = set()

    def unsupported(self, problem: Problem, device: str) -> str | None:
        """What needs a keyword that the function does not take, or none has."""
        return (
            _beyond_the_convention(problem, device)
            or self._lacks(problem)
            or self._unsupported_size(problem, device)
        )

    def prepare(self, inputs: Inputs) -> Call:
        """Write the mask out where it needs ``attn_mask``."""
        problem = inputs.problem
        products: Products = "tf32" if problem.dtype == "tf32" else "ieee"
        arguments = self._arguments(problem, str(inputs.device))
        notes = FlashOnTheCpu() if inputs.device.type == "cpu" else None

        def call() -> Outputs:
            nonlocal notes
            with torch.no_grad(), fp32_products(products), notes or nullcontext():
                try:
                    given = self._function(inputs.q, inputs.k, inputs.v, **arguments)
                except _REFUSALS as error:
                    raise Refused(brief(error)) from error
            if notes is not None and notes.called:
                self._reached_flash.add(problem.id)
            notes = None  # further calls are timed
            return _outputs(given)

        return call

    def arithmetic(self, problem: Problem, device: str) -> Arithmetic:
        """The default; P may be divided by its sum before it is rounded, as unfused kernels do.

        Where its call has reached torch's flash kernel on the CPU, exp is as short as it is there.
        """
        assumed = replace(super().arithmetic(problem, device), normalised_weights=True)
        return with_short_exp(assumed, device) if problem.id in self._reached_flash else assumed

    def _lacks(self, problem: Problem) -> str | None:
        """Which keyword it would need."""
        needed = {
            "enable_gqa": problem.group > 1,
            "scale": not _default_scale(problem),
            "attn_mask": self._written_out(problem),
        }
        for name, needs in needed.items():
            if needs and name not in self._takes.keywords:
                also = " or is_causal" if name == "attn_mask" and is_causal(problem) else ""
                return f"takes no {name}{also}"
        return None

    def _written_out(self, problem: Problem) -> bool:
        flagged = is_causal(problem) and "is_causal" in self._takes.keywords
        return problem.mask != library.FULL and not flagged

    def _unsupported_size(self, problem: Problem, device: str) -> str | None:
        if not self._written_out(problem):
            return None
        return too_large("attn_mask", problem.query * problem.kv, device)

    def _arguments(self, problem: Problem, device: str) -> dict[str, Any]:
        written_out = self._written_out(problem)
        values: dict[str, Any] = {
            "attn_mask": attention_mask(problem, device) if written_out else None,
            "dropout_p": 0.0,
            "is_causal": is_causal(problem) and not written_out,
            "scale": None if _default_scale(problem) else problem.scale,
            "enable_gqa": problem.group > 1,
        }
        asked = {name for name, value in values.items() if value is not None}
        passed = self._takes.keywords & (asked | self._takes.required)
        return {name: values[name] for name in KEYWORDS if name in passed}


def _beyond_the_convention(problem: Problem, device: str) -> str | None:
    """What no function of the convention can be asked."""
    if problem.formats.scaled:
        return "the sdpa convention has no descales, which fp8 inputs need"
    if problem.score != library.NONE:
        return "the sdpa convention has no score mod"
    if problem.dtype == "tf32" and device == "cpu":
        return "the CPU has no tf32 products"
    return None


def _default_scale(problem: Problem) -> bool:
    """Whether the scale is 1/√head_dim, as a Problem rounds it."""
    return problem.scale == fp32(problem.head_dim**-0.5)


def _outputs(given: object) -> Outputs:
    """Raises TypeError for anything but out or (out, LSE)."""
    if isinstance(given, torch.Tensor):
        return Outputs(given)
    if isinstance(given, tuple | list) and len(given) == 2:
        return Outputs(*given)
    many = f" of {len(given)}" if isinstance(given, tuple | list) else ""
    raise TypeError(
        f"it returned {type(given).__name__}{many}: the sdpa convention gives out, or (out, lse)"
    )


def _listed(takes: Taken) -> str:
    able = [name for name in KEYWORDS if name in takes.keywords and name != "dropout_p"]
    return f"takes {', '.join(able)}" if able else "takes query, key and value alone"


def _uses_triton(function: Callable[..., Any]) -> bool:
    """Whether the module that it is of has imported Triton by name."""
    names = getattr(inspect.unwrap(function), "__globals__", {})
    modules = (value.__name__ for value in names.values() if isinstance(value, ModuleType))
    return any(name.partition(".")[0] == "triton" for name in modules)


def _unfit(found: object) -> str | None:
    fits = taken(found, KEYWORDS)
    return fits if isinstance(fits, str) else None


def _adopt(found: object, name: str) -> Subject:
    fits = taken(found, KEYWORDS)
    assert isinstance(fits, Taken), "asked of what fits"
    assert callable(found)
    path, separator, member = name.partition("::")
    return SdpaFunction(found, Path(path).name + separator + member, fits)


SDPA = Convention(
    name="sdpa",
    summary="a function of query, key, value, called like F.scaled_dot_product_attention",
    unfit=_unfit,
    adopt=_adopt,
)

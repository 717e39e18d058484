"""A call of a kernel as Python source that needs torch and the kernel alone."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from attncheck.conventions.convention import MadeArgument
from attncheck.mods.scores import alibi_slopes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from attncheck.conventions.layouts import Layout
    from attncheck.inputs.problem import Problem
    from attncheck.mods.spec import Spec

__all__ = ["render_call", "render_score_mod"]


def _alibi(spec: Spec, problem: Problem) -> str:
    del spec
    slopes = f"torch.tensor({list(alibi_slopes(problem.heads))}, device=q.device)"
    return f"score + {slopes}[h] * (kv_idx - q_idx)"


def _softcap(spec: Spec, problem: Problem) -> str:
    del problem
    cap = spec.values["cap"]
    return f"{cap} * torch.tanh(score / {cap})"


def _temperature(spec: Spec, problem: Problem) -> str:
    del problem
    return f"score / {spec.values['temperature']}"


_TEXTS: dict[str, Callable[[Spec, Problem], str]] = {
    "none": lambda _spec, _problem: "score",
    "alibi": _alibi,
    "softcap": _softcap,
    "temperature": _temperature,
}


def render_score_mod(problem: Problem) -> str:
    """``def score_mod(score, b, h, q_idx, kv_idx)``; empty where it cannot be said in a line each.

    That are a learned table and mods of one's own.
    """
    steps = list(_steps(problem.score))
    if any(step.name not in _TEXTS for step in steps):
        return ""
    lines = [f"    score = {_TEXTS[step.name](step, problem)}" for step in steps]
    head = "def score_mod(score, b, h, q_idx, kv_idx):"
    return "\n".join([head, *lines, "    return score"])


def _steps(score: Spec) -> Iterator[Spec]:
    if score.name != "chain":
        yield score
    for part in score.parts:
        yield from _steps(part)


def render_call(
    arguments: Mapping[str, Any],
    layout: Layout,
    *,
    base2: bool,
    drops_lse: bool,
    infinite: bool,
) -> str | None:
    """``def call(kernel, q, k, v)`` in attncheck's axes; None where an argument cannot be said.

    Args:
        arguments: What is passed, by name.
        layout: The kernel's axes.
        base2: Whether its LSE is of base 2.
        drops_lse: Whether an LSE that it gives is left out.
        infinite: Whether LSE may be ∞ where a row sees no key; it is -∞ then.
    """
    made = [value for value in arguments.values() if isinstance(value, MadeArgument)]
    if not all(value.text for value in made):
        return None
    lines = [line for value in made for line in value.setup.splitlines()]
    tensors = [layout.texts[name] for name in "qkv"]
    keywords = [f"{name}={_text(value)}" for name, value in arguments.items()]
    lines += ["given = kernel(", *(f"    {one}," for one in [*tensors, *keywords]), ")"]
    lines += [
        "out, lse = given[:2] if isinstance(given, (tuple, list)) else (given, None)",
        'lse = lse if isinstance(lse, torch.Tensor) else getattr(lse, "lse", None)',
        f"out = {layout.texts['out']}",
    ]
    changes = [
        layout.texts["lse"],
        f"(lse.double() * {math.log(2)!r}).float()" if base2 else "lse",
        'lse.masked_fill(lse == float("inf"), -float("inf"))' if infinite else "lse",
    ]
    changes = ["None"] if drops_lse else [f"None if lse is None else {one}" for one in changes]
    lines += [f"lse = {one}" for one in changes if not one.endswith("else lse")]
    lines.append("return out, lse")
    lines = [line for line in lines if line != "out = out"]
    return "\n".join(["def call(kernel, q, k, v):", *(f"    {line}" for line in lines), ""])


def _text(value: Any) -> str:
    return value.text if isinstance(value, MadeArgument) else repr(value)

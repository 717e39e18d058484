"""A call of a kernel as Python source that needs torch and the kernel alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from attncheck.core.mod_spec import Spec
from attncheck.inputs.problem import Problem
from attncheck.mods.scores import alibi_slopes, sequence_slopes
from attncheck.subjects.conventions.convention import MadeArgument
from attncheck.subjects.conventions.layouts import Layout


def render_call(
    arguments: Mapping[str, Any], layout: Layout, *, base2: bool, drops_lse: bool, infinite: bool
) -> str | None:
    """``def call(kernel, q, k, v)`` in attncheck's axes; None where an argument cannot be said.

    Args:
        base2: Whether its LSE is of base 2.
        drops_lse: Whether an LSE that it gives is left out.
        infinite: Whether LSE may be ∞ where a row sees no key; it is -∞ then.
    """
    made = [value for value in arguments.values() if isinstance(value, MadeArgument)]
    if not all(value.text for value in made):
        return None
    # Before the call: an expression may use names that another's setup makes.
    lines = [line for value in made for line in value.setup.splitlines()]
    passed = [layout.texts[name] for name in "qkv"]
    for name, value in arguments.items():
        passed.append(f"{name}={value.text if isinstance(value, MadeArgument) else repr(value)}")
    lines += ["given = kernel(", *(f"    {each}," for each in passed), ")"]
    lines += [
        "out, lse = given[:2] if isinstance(given, (tuple, list)) else (given, None)",
        'lse = lse if isinstance(lse, torch.Tensor) else getattr(lse, "lse", None)',
    ]
    # A line that changes nothing would only be read.
    if layout.texts["out"] != "out":
        lines.append(f"out = {layout.texts['out']}")
    if drops_lse:
        lines.append("lse = None")
    else:
        changes = [] if layout.texts["lse"] == "lse" else [layout.texts["lse"]]
        # As ``base2_to_natural``: once more to fp32, so that the script has the same bits.
        if base2:
            changes.append(f"(lse.double() * {math.log(2)!r}).float()")
        # The script compares with the oracle, whose rows without keys have -∞.
        if infinite:
            changes.append('lse.masked_fill(lse == float("inf"), -float("inf"))')
        lines += [f"lse = None if lse is None else {change}" for change in changes]
    lines.append("return out, lse")
    return "\n".join(["def call(kernel, q, k, v):", *(f"    {line}" for line in lines), ""])


def render_score_mod(problem: Problem) -> str:
    """``def score_mod(score, b, h, q_idx, kv_idx)``; empty where a step is more than a line.

    That is so of a learned table and of mods of one's own.
    """
    lines = []
    for step in problem.score.walk():
        if step.name == "chain":  # its parts come after it
            continue
        expression = _score_expression(step, problem)
        if not expression:
            return ""
        lines.append(f"    score = {expression}")
    head = "def score_mod(score, b, h, q_idx, kv_idx):"
    return "\n".join([head, *lines, "    return score"])


def _score_expression(step: Spec, problem: Problem) -> str:
    if step.name == "none":
        return "score"
    if step.name == "alibi":
        slopes = f"torch.tensor({list(alibi_slopes(problem.heads))}, device=q.device)"
        return f"score + {slopes}[h] * (kv_idx - q_idx)"
    if step.name == "alibi_by_sequence":
        slopes = f"torch.tensor({sequence_slopes(problem.batch, problem.heads)}, device=q.device)"
        return f"score + {slopes}[b, h] * (kv_idx - q_idx)"
    if step.name == "softcap":
        return f"{step.values['cap']} * torch.tanh(score / {step.values['cap']})"
    if step.name == "temperature":
        return f"score / {step.values['temperature']}"
    return ""

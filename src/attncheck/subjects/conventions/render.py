"""Renders a call of a kernel as Python source that needs only torch and the kernel."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from attncheck.core.mod_spec import Spec
from attncheck.inputs.problem import Problem
from attncheck.mods.scores import alibi_slopes, sequence_slopes
from attncheck.subjects.conventions.convention import ComputedArgument
from attncheck.subjects.conventions.layouts import Layout


def render_call(
    arguments: Mapping[str, Any], layout: Layout, *, base2: bool, drops_lse: bool, infinite: bool
) -> str | None:
    """Return ``def call(kernel, q, k, v)`` in attncheck's axes; None if an argument has no source.

    Args:
        base2: Whether the kernel's LSE has base 2.
        drops_lse: Whether an LSE that it returns is ignored.
        infinite: Whether its LSE may be ∞ in a row that sees no key, which is changed to -∞.
    """
    made = [value for value in arguments.values() if isinstance(value, ComputedArgument)]
    if not all(value.text for value in made):
        return None
    # All setups come before the call, because an expression may use names from another's setup.
    lines = [line for value in made for line in value.setup.splitlines()]
    passed = [layout.texts[name] for name in "qkv"]
    for name, value in arguments.items():
        passed.append(
            f"{name}={value.text if isinstance(value, ComputedArgument) else repr(value)}"
        )
    lines += ["given = kernel(", *(f"    {each}," for each in passed), ")"]
    lines += [
        "out, lse = given[:2] if isinstance(given, (tuple, list)) else (given, None)",
        'lse = lse if isinstance(lse, torch.Tensor) else getattr(lse, "lse", None)',
    ]
    # Lines that change nothing are left out.
    if layout.texts["out"] != "out":
        lines.append(f"out = {layout.texts['out']}")
    if drops_lse:
        lines.append("lse = None")
    else:
        changes = [] if layout.texts["lse"] == "lse" else [layout.texts["lse"]]
        # As ``base2_to_natural`` does, so that the script has the same bits.
        if base2:
            changes.append(f"(lse.double() * {math.log(2)!r}).float()")
        # The script compares with the oracle, in which rows without keys have -∞.
        if infinite:
            changes.append('lse.masked_fill(lse == float("inf"), -float("inf"))')
        lines += [f"lse = None if lse is None else {change}" for change in changes]
    lines.append("return out, lse")
    return "\n".join(["def call(kernel, q, k, v):", *(f"    {line}" for line in lines), ""])


def render_score_mod(problem: Problem) -> str:
    """Return ``def score_mod(score, b, h, q_idx, kv_idx)``; empty if a step needs more than a line.

    This is so for a learned table and a user's own mods.
    """
    lines = []
    for step in problem.score.walk():
        if step.name == "chain":  # ``walk`` yields its parts afterwards
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

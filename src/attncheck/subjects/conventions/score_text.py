"""A library's score mod as Python source in plain torch, for a script."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attncheck.mods.library import alibi_slopes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from attncheck.mods.spec import Spec
    from attncheck.problem import Problem

__all__ = ["score_text"]


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


def score_text(problem: Problem) -> str:
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

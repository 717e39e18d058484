"""Is this output attention of these tensors, up to rounding? For somebody who has both."""

from __future__ import annotations

import itertools
import warnings
from typing import TYPE_CHECKING

from attncheck.core.errors import OraclesDisagree
from attncheck.diagnose.user_tensors import UserOutputs
from attncheck.reporting.diagnosis_text import explanation_facts, tile_picture

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from attncheck.core.judgement import BlindSpot, Judgement, Worst
    from attncheck.inputs.input_tensors import Descale, Inputs
    from attncheck.inputs.problem import Problem
    from attncheck.judge.declared_arithmetic import Arithmetic

__all__ = ["NotAttention", "assert_attention_close"]

_LOOKED_INTO = 24
_left = iter(range(_LOOKED_INTO))
"""Failures of this process that are still looked into: each takes as long as a question."""


def assert_attention_close(  # noqa: PLR0913  # a call of attention has that many
    out: Tensor,
    lse: Tensor | None = None,
    *,
    q: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    mask: Tensor | Callable[..., Tensor] | None = None,
    is_causal: bool = False,
    score_mod: Callable[..., Tensor] | None = None,
    scale: float | None = None,
    descale: Descale | tuple[Tensor, Tensor, Tensor] | None = None,
    sink: Tensor | None = None,
    arithmetic: Arithmetic | None = None,
    problem: Problem | Inputs | None = None,
    generic: bool = False,
) -> Judgement:
    """Raise AssertionError unless out, and LSE, are exact attention up to rounding.

    There is no tolerance: how far each element may be from the exact result follows from the
    tensors and the arithmetic (``docs/explanation/bounds.md``). A kernel need not be there.

    Args:
        out: ``(batch, heads, query, value_dim)``, as the kernel gave it.
        lse: ``(batch, heads, query)``, natural logarithm; the sharper witness, where there is one.
        q: ``(batch, heads, query, head_dim)``, fp32, fp16, bf16 or fp8.
        k: ``(batch, kv_heads, kv, head_dim)``; fewer heads than q's are shared (GQA).
        v: ``(batch, kv_heads, kv, value_dim)``.
        mask: A FlexAttention mask ``(b, h, q_idx, kv_idx) -> bool``, or a bool tensor that
            broadcasts to ``(batch, heads, query, kv)``, True where a row sees a key.
        is_causal: Row i sees keys up to i, aligned top-left as in torch.
        score_mod: A FlexAttention score mod ``(score, b, h, q_idx, kv_idx) -> score``.
        scale: Factor of q·k, read as fp32; None for 1/√head_dim.
        descale: Of fp8: what q, k and v are to be multiplied by, fp32 ``(batch, kv_heads)`` each;
            None for 1.
        sink: Each head's logit, ``(heads,)``, fp32, bf16 or fp16, natural: one more key of value 0
            that every row sees, and that LSE includes; −∞ for none.
        arithmetic: The kernel's; None for what is usual at these dtypes on this device. One whose
            products are tf32 says that fp32 tensors are multiplied so.
        problem: In place of q to sink: Inputs, or a Problem whose Inputs are drawn here.
        generic: Whether the tensors are random and without structure (``torch.randn``): then what
            rounding does once in a million times is a failure, not a warning.

    Returns:
        The judgement, of status ``pass``, ``warn`` or ``inconclusive``. The last two are said by a
        UserWarning as well: turn it into an error (``warnings.simplefilter("error")``) to be
        strict.

    Raises:
        AssertionError: ``NotAttention``, with the rule that is broken, what is likely wrong, the
            worst element, what is allowed there and why, and how small a fault would have been
            seen.
        OraclesDisagree: where two oracles are further apart than float64 explains.
        UsageError: for arguments that are no call of attention; in one line.
    """
    __tracebackhide__ = True
    answer = UserOutputs(
        out=out,
        lse=lse,
        call={
            "q": q,
            "k": k,
            "v": v,
            "mask": mask,
            "is_causal": is_causal,
            "score_mod": score_mod,
            "scale": scale,
            "descale": descale,
            "sink": sink,
        },
        problem=problem,
        arithmetic=arithmetic,
        generic=generic,
    )
    found, said = answer.judgement()
    if said:
        raise OraclesDisagree(f"{said}: nothing is said of what was given.")
    if found.status == "fail":
        raise NotAttention(found, answer)
    if found.status != "pass":
        warnings.warn("\n".join(_lines(found)), UserWarning, stacklevel=2)
    return found


class NotAttention(AssertionError):
    """What was given is not attention.

    Hypothesis raises one for every example that fails on the way to the smallest; so what may be
    wrong is looked for when the text is read, in copies of the tensors.

    Attributes:
        judgement: What the judge says.
    """

    def __init__(self, judgement: Judgement, answer: UserOutputs) -> None:
        super().__init__(judgement.reason)
        self.judgement = judgement
        self._answer = answer.kept()
        self._text = ""

    def __str__(self) -> str:
        if not self._text:
            first, *rest = _lines(self.judgement)
            likely, tiles = _looked(self._answer)
            self._text, self._answer = "\n".join([first, *likely, *rest, *tiles]), None
        return self._text


def _looked(answer: UserOutputs | None) -> tuple[list[str], list[str]]:
    """Lines of what may be wrong, and of where; none where nobody can say."""
    if answer is None:
        return [], []
    if next(_left, None) is None:
        return [_fact("likely", f"not looked for, as it was of {_LOOKED_INTO} failures before")], []
    with warnings.catch_warnings():  # of what is tried, not of what was given
        warnings.simplefilter("ignore")
        found = answer.diagnosis()
    if found is None:
        return [], []
    labels = itertools.chain(["tiles"], itertools.repeat(""))
    return (
        [_fact(name, text) for name, text in explanation_facts(found)],
        [_fact(name, line) for name, line in zip(labels, tile_picture(found), strict=False)],
    )


def _fact(name: str, text: str) -> str:
    return f"  {name:<10} {text}"


def _lines(found: Judgement) -> Iterator[str]:
    """The judgement for somebody who reads a failed test."""
    rule = f": {found.rule}" if found.rule else ""
    yield f"attention: {found.status}{rule}: {found.reason}"
    yield from (_fact("also", text) for text in found.warnings if text != found.reason)
    if found.worst is not None:
        yield from _worst(found.worst)
    yield _fact("judged as", found.arithmetic)
    if found.blind_spot is not None:
        yield _fact("would see", _seen(found.blind_spot))


def _worst(worst: Worst) -> Iterator[str]:
    at = worst.at
    index = [at.batch, at.head, at.query] + ([at.dim] if at.dim >= 0 else [])
    yield _fact("worst", f"{worst.tensor}{index}")
    yield _fact("got", f"{worst.got:.9g}")
    yield _fact("should be", f"{worst.exact:.9g}")
    parts = sorted(worst.budget.items(), key=lambda item: -item[1])
    made = " + ".join(f"{name} {part:.1e}" for name, part in parts if part > 0)
    yield _fact("allowed", f"{worst.allowance:.2e}{f' = {made}' if made else ''}")


def _seen(spot: BlindSpot) -> str:
    """The smallest faults that these tensors would have shown."""
    facts = {
        f"a scale {100 * spot.scale:.2g} % off": spot.scale < float("inf"),
        f"a key's weight {100 * spot.weight:.2g} % off": spot.weight < float("inf"),
        f"{100 * (spot.dropped_keys or 0):.3g} % of single dropped keys": bool(spot.dropped_keys),
        f"sums of {spot.accumulator_bits} bits": spot.accumulator_bits > 0,
        "half the output": spot.half,
        "zeros": spot.zeros,
    }
    return ", ".join(fact for fact, seen in facts.items() if seen) or "none of the usual faults"

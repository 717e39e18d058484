"""Is this output attention of these tensors, up to rounding? For somebody who has both."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from attncheck import inputs as inputs_room
from attncheck.errors import UsageError
from attncheck.examine.evidence import Evidence
from attncheck.examine.executor import Execution
from attncheck.examine.given_tensors import GivenTensors
from attncheck.examine.judging import judged
from attncheck.formats import FORMATS
from attncheck.inputs import Inputs
from attncheck.judge.arithmetic import Arithmetic, default
from attncheck.outputs import Outputs
from attncheck.problem import Case, Problem
from attncheck.subjects.contract import capability

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from attncheck.formats import Format
    from attncheck.inputs import Descale
    from attncheck.judgement import BlindSpot, Judgement, Worst

__all__ = ["assert_attention_close"]


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
    tensors and the arithmetic (``docs/bounds.md``). A kernel need not be there.

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
        AssertionError: with the rule that is broken, the worst element, what is allowed there and
            why, and how small a fault would have been seen.
        UsageError: for arguments that are no call of attention; in one line.
    """
    __tracebackhide__ = True
    given = {"q": q, "k": k, "v": v}
    options = {
        "mask": mask,
        "is_causal": is_causal,
        "score_mod": score_mod,
        "scale": scale,
        "descale": descale,
        "sink": sink,
    }
    with _asked(out, problem, given, options, arithmetic, generic=generic) as inputs:
        found = _judgement(out, lse, inputs, arithmetic)
    if found.status == "fail":
        raise AssertionError(_message(found))
    if found.status != "pass":
        warnings.warn(_message(found), UserWarning, stacklevel=2)
    return found


@contextmanager
def _asked(  # what is said in two ways
    out: Tensor,
    problem: Problem | Inputs | None,
    given: dict[str, Any],
    options: dict[str, Any],
    arithmetic: Arithmetic | None,
    *,
    generic: bool,
) -> Iterator[Inputs]:
    """The Inputs that are meant."""
    if not isinstance(out, torch.Tensor):
        raise UsageError(f"out is {type(out).__name__}: it must be a tensor.")
    if not isinstance(arithmetic, Arithmetic | None):
        raise UsageError(f"arithmetic is {type(arithmetic).__name__}: it must be an Arithmetic.")
    if problem is None:
        missing = [name for name, tensor in given.items() if tensor is None]
        if missing:
            raise UsageError(f"{missing[0]} is missing: give q, k and v, or problem.")
        tf32 = arithmetic is not None and arithmetic.products.name == "tf32"
        with GivenTensors(**given, **options, tf32=tf32, generic=generic).inputs() as inputs:
            yield inputs
        return
    twice = [
        n for n, value in (given | options).items() if value is not None and value is not False
    ]
    if twice:
        raise UsageError(f"problem and {twice[0]} are given both: the problem says it all.")
    if not isinstance(problem, Problem | Inputs):
        kind = type(problem).__name__
        raise UsageError(f"problem is {kind}: it must be a Problem, or its Inputs.")
    yield problem if isinstance(problem, Inputs) else inputs_room.draw(problem, out.device)


def _judgement(
    out: Tensor, lse: Tensor | None, inputs: Inputs, arithmetic: Arithmetic | None
) -> Judgement:
    problem, device = inputs.problem, inputs.device
    columns = problem.kv if problem.operation == "softmax" else problem.value_dim
    rows = (problem.batch, problem.heads, problem.query)
    output = _checked("out", out, (*rows, columns), inputs)
    if lse is not None:
        _checked("lse", lse, rows, inputs)
    if arithmetic is None:
        assumed = default(problem.formats, capability(device.type))
        # Whoever made out may have divided P by its sum before it was rounded, and have merged a
        # sink with what keys alone gave.
        splits = 2 if problem.sink else 1
        arithmetic = replace(assumed, output=output, normalised_weights=True, splits=splits)
    elif arithmetic.output != output:
        raise UsageError(
            f"out.dtype={out.dtype}, but the arithmetic gives out in {arithmetic.output.name}."
        )
    evidence = Evidence(Case(problem=problem), str(device), inputs)
    outputs = Outputs(out.detach(), None if lse is None else lse.detach())
    result = Execution(outputs=outputs, seconds=None, tiling=None, arithmetic=arithmetic)
    return judged(result, evidence)


def _checked(name: str, tensor: object, shape: tuple[int, ...], inputs: Inputs) -> Format:
    """The format of an output; raises UsageError where it is none."""
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"{name} is {type(tensor).__name__}: it must be a tensor.")
    if tuple(tensor.shape) != shape:
        raise UsageError(f"{name}.shape={tuple(tensor.shape)}, but should be {shape}.")
    if tensor.device != inputs.device:
        raise UsageError(f"{name}.device={tensor.device}, but should be {inputs.device}.")
    if tensor.layout != torch.strided:
        raise UsageError(f"{name}.layout={tensor.layout} must be torch.strided.")
    for fmt in FORMATS.values():
        if fmt.torch_dtype == tensor.dtype and not fmt.saturates:
            return fmt
    raise UsageError(f"{name}.dtype={tensor.dtype} is no dtype of a result.")


def _message(found: Judgement) -> str:
    """The judgement for somebody who reads a failed test."""
    rule = f": {found.rule}" if found.rule else ""
    lines = [f"attention: {found.status}{rule}: {found.reason}"]
    lines += [f"  also       {warning}" for warning in found.warnings if warning != found.reason]
    if found.worst is not None:
        lines += _worst(found.worst)
    lines += [f"  judged as  {found.arithmetic}"]
    if found.blind_spot is not None:
        lines += [f"  would see  {_seen(found.blind_spot)}"]
    return "\n".join(lines)


def _worst(worst: Worst) -> Iterator[str]:
    at = worst.at
    index = [at.batch, at.head, at.query] + ([at.dim] if at.dim >= 0 else [])
    yield f"  worst      {worst.tensor}{index}"
    yield f"  got        {worst.got:.9g}"
    yield f"  should be  {worst.exact:.9g}"
    parts = sorted(worst.budget.items(), key=lambda item: -item[1])
    made = " + ".join(f"{name} {part:.1e}" for name, part in parts if part > 0)
    yield f"  allowed    {worst.allowance:.2e}{f' = {made}' if made else ''}"


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

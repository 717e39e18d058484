"""The conventions of torch's ``F.scaled_dot_product_attention`` and ``flex_attention``."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask

from attncheck.core.mod_spec import FULL, NONE, Spec
from attncheck.core.outputs import Outputs
from attncheck.inputs.input_tensors import Inputs
from attncheck.inputs.problem import Problem
from attncheck.mods.masks import band_of
from attncheck.mods.scores import alibi_slopes, bias, sequence_slopes
from attncheck.mods.signatures import ScoreMod
from attncheck.subjects.capabilities.subject import Inexact
from attncheck.subjects.conventions.call_tensors import (
    attention_mask,
    bias_is_exact,
    mask_size,
    masked_bias,
    row_blocks,
)
from attncheck.subjects.conventions.convention import (
    SINKS,
    WRITTEN_OUT,
    Argument,
    Arguments,
    ComputedArgument,
    Convention,
    Parameter,
    Request,
    must_pass,
    pass_if_accepted,
    pass_if_required,
)
from attncheck.subjects.conventions.layouts import bhsd, without_padding
from attncheck.subjects.conventions.parse import CallArguments, ParsedCall, UnreadableCall
from attncheck.subjects.conventions.window_masks import band_window


def _check_heads(q: torch.Tensor, k: torch.Tensor, *, grouped: bool) -> None:
    if q.dim() == k.dim() == 4 and q.shape[1] != k.shape[1] and not grouped:  # axes
        raise UnreadableCall("q and k have other heads, without enable_gqa")


# ------------------------------------------------------------------ scaled_dot_product_attention


def _bind_sdpa(request: Request) -> Arguments | str:
    """Return arguments for a Problem, or why there are none.

    * ``is_causal`` is passed for the causal mask, aligned top-left as in torch; every other mask is
      a boolean ``attn_mask`` (True: visible) that broadcasts to the scores;
    * an additive score mod is a floating-point ``attn_mask`` in the dtype of query, if that is
      exact: the number added where a key is visible, −∞ where it is not, also for a causal mask;
    * ``scale`` is left out if it is 1/√head_dim, so that its default is tested too;
    * ``enable_gqa`` is passed if there are fewer key than query heads;
    * ``attn_bias`` holds an additive score mod instead, if the function has it, and
      ``key_padding_mask`` is True for keys that padding hides, as in torch's
      ``MultiheadAttention``.
    """
    problem, bias = request.problem, request.bias()
    if isinstance(bias, str):
        return bias
    # torch has one argument for both, and forbids ``is_causal`` beside it.
    in_mask = problem.score != NONE and "bias" not in request.able
    if in_mask and "attn_mask" not in request.able:
        return "takes no attn_mask or attn_bias"
    written = {} if in_mask else {"bias": bias}
    if "key_padding" in request.able:
        written["key_padding"] = request.key_padding(seen=False)
        problem = problem.replace(mask=without_padding(problem.mask))
    band, lengths = band_of(problem.mask, problem.dimensions), [(problem.query, problem.kv)]
    # Not by the mask's name, because at equal lengths several masks equal the causal one.
    window = band and band_window(band, lengths, bottom_right=request.bottom_right)
    causal = window == (-1, 0)
    flagged = causal and "causal" in request.able and not in_mask
    unmasked = flagged or (problem.mask == FULL and not in_mask)
    mask = _float_mask(problem) if in_mask else _bool_mask(problem)
    arguments = {
        "enable_gqa": must_pass(value=True) if problem.group > 1 else pass_if_accepted(value=False),
        "scale": request.scale(),
        "attn_mask": pass_if_required(None) if unmasked else must_pass(mask),
        "dropout": pass_if_accepted(0.0),
        "causal": pass_if_accepted(flagged),
        "return_lse": request.lse_flag(),
        "sinks": request.sinks(),
        **written,
    }
    missing = [name for name, one in arguments.items() if one.when == "always"]
    missing = [name for name in missing if name not in request.able]
    # Other missing parameters are reported by FunctionSubject.
    if causal and missing == ["attn_mask"]:
        return "takes no attn_mask or is_causal"
    return arguments


def _bool_mask(problem: Problem) -> ComputedArgument:
    return ComputedArgument(
        make=lambda inputs: attention_mask(problem, str(inputs.device)),
        text="mask",
        what="attn_mask",
        size=problem.query * problem.kv,
    )


_FLOAT_MASK = """\
indices = [
    torch.arange(n, device=q.device).view([-1 if axis == at else 1 for at in range(4)])
    for axis, n in enumerate((*q.shape[:3], k.shape[2]))
]
bias = score_mod(torch.zeros((1, 1, 1, 1), dtype=torch.float64, device=q.device), *indices)
float_mask = torch.where(mask, bias, -float("inf")).to(q.dtype)"""


def _float_mask(problem: Problem) -> ComputedArgument:
    """Return what is added to the scores, −∞ where a key is hidden, in the dtype of query."""
    fmt = problem.formats.storage

    def make(inputs: Inputs) -> torch.Tensor:
        device = str(inputs.device)
        blocks = [masked_bias(problem, device, rows, fmt) for rows in row_blocks(problem)]
        return torch.cat(blocks, dim=2)

    def unfit(device: str) -> Inexact | None:
        exact = bias_is_exact(problem, fmt, device)
        return None if exact else Inexact(f"would round the bias to {fmt.name}")

    setup = _render_score_mod(problem)
    return ComputedArgument(
        make=make,
        text="float_mask" if setup else "",
        setup=f"{setup}\n{_FLOAT_MASK}",
        what="attn_mask",
        size=math.prod(mask_size(problem, "cpu")) * fmt.torch_dtype.itemsize,
        unfit=unfit,
    )


def _parse_sdpa(call: CallArguments) -> ParsedCall:
    """Return the computation of a call; raises UnreadableCall for a bias with a gradient."""
    q, k, v = (call.tensor(name) for name in "qkv")
    mask: Spec | torch.Tensor = Spec.of("causal") if call.value("causal") else FULL
    score, table = None, call.value("attn_mask")
    # A float mask is a bias to be added; in a bool mask, True means visible.
    if table is not None:
        if not isinstance(table, torch.Tensor) or mask != FULL:
            raise UnreadableCall("its mask is no tensor, or is_causal is set beside it")
        # The kernel that replaces it would return no gradient of the bias.
        if table.requires_grad:
            raise UnreadableCall("its mask has a gradient")
        if table.dtype is torch.bool:
            mask = table
        else:
            whole = (*q.shape[:3], k.shape[2])
            score = bias(table.float().expand(whole) if table.dim() < len(whole) else table.float())
    _check_heads(q, k, grouped=call.value("enable_gqa", usual=True))
    return ParsedCall(
        q=q,
        k=k,
        v=v,
        mask=mask,
        score=score,
        scale=call.value("scale"),
        sink=call.value("sinks"),
        returned=call.results(lambda out: out, lambda lse: lse),
    )


SDPA = Convention(
    name="sdpa",
    summary="a function of query, key, value, called like F.scaled_dot_product_attention",
    # torch's own function has neither LSE nor sinks: they need a function that names them.
    parameters=(
        Parameter("attn_mask", ("attn_mask", "mask")),
        Parameter("dropout", ("dropout_p",), of_result=True),
        Parameter("causal", ("is_causal", "causal")),
        Parameter("scale", ("scale", "sm_scale", "softmax_scale")),
        Parameter("enable_gqa", ("enable_gqa",)),
        Parameter(
            "return_lse",
            ("return_lse", "return_softmax_lse"),
            by_name=True,
            of_result=True,
            by_position=False,
        ),
        Parameter("sinks", SINKS, by_name=True, by_position=False),
        *WRITTEN_OUT,
    ),
    layout=bhsd,
    bind=_bind_sdpa,
    parse=_parse_sdpa,
    claims_function=lambda names, _dotted: bool(
        names & {"attn_mask", "mask", "is_causal", "enable_gqa", "sm_scale"}
    ),
)


# ------------------------------------------------------------------ flex_attention


def flex_score_mod(problem: Problem, device: str) -> ScoreMod:
    """Return the score mod with its result cast to the score's dtype: flex would keep float64."""
    mod = problem.score_mod(device)

    def in_score_dtype(
        score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor
    ) -> torch.Tensor:
        return mod(score, b, h, q, kv).to(score.dtype)

    return in_score_dtype


def flex_block_mask(problem: Problem, device: str) -> BlockMask:
    """Return the mask as a BlockMask, with one sequence or head if all see the same keys."""
    mask = problem.mask_mod(device)
    b = torch.arange(problem.batch, device=device).view(-1, 1)
    h = torch.arange(problem.heads, device=device).view(1, -1)
    first = torch.zeros((1, 1), dtype=torch.int64, device=device)
    # The result broadcasts to more than one sequence or head only if the mask reads b or h.
    sequences, heads = (mask(b, h, first, first) & torch.ones_like(first, dtype=torch.bool)).shape
    return flex.create_block_mask(mask, sequences, heads, problem.query, problem.kv, device=device)


def uncompiled_flex() -> AbstractContextManager[object]:
    """Return a context in which uncompiled flex_attention neither traces nor warns about it."""
    return mock.patch.object(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", new=True)


_MASK_OF_TABLE = """\
sees = mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
def mask_mod(b, h, q_idx, kv_idx):
    return sees[b, h, q_idx, kv_idx]"""


def _bind_flex(request: Request) -> Arguments:
    """Return arguments for a Problem: every mask and every score mod can be passed.

    A ``block_mask`` is made before the call; functions without it get ``mask_mod``. LSE is
    requested by ``return_aux`` if possible, because torch warns about ``return_lse``.
    """
    problem = request.problem
    setup = _render_score_mod(problem)
    score = ComputedArgument(
        make=lambda inputs: flex_score_mod(problem, str(inputs.device)),
        text="score_mod" if setup else "",
        setup=setup,
    )
    by_aux = "return_aux" in request.able
    aux = ComputedArgument(
        make=lambda _inputs: flex.AuxRequest(lse=True),
        text="torch.nn.attention.flex_attention.AuxRequest(lse=True)",
    )
    no_lse = request.options.returns_lse is False
    return {
        "score_mod": pass_if_required(None) if problem.score == NONE else must_pass(score),
        **_flex_mask(problem, request.able),
        "scale": request.scale(),
        "enable_gqa": must_pass(value=True) if problem.group > 1 else pass_if_accepted(value=False),
        "return_aux": pass_if_accepted(aux) if by_aux and not no_lse else pass_if_required(None),
        "return_lse": pass_if_required(value=False)
        if by_aux or no_lse
        else pass_if_accepted(value=True),
    }


def _render_score_mod(problem: Problem) -> str:
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


def _flex_mask(problem: Problem, able: frozenset[str]) -> dict[str, Argument]:
    if problem.mask == FULL:
        return {"block_mask": pass_if_required(None), "mask_mod": pass_if_required(None)}
    # A block mask is preferred: flex_attention itself takes one, and its tiles are tested too.
    if "mask_mod" in able and "block_mask" not in able:
        mask = ComputedArgument(
            make=lambda inputs: problem.mask_mod(str(inputs.device)),
            text="mask_mod",
            setup=_MASK_OF_TABLE,
        )
        return {"mask_mod": must_pass(mask)}
    blocks = ComputedArgument(
        make=lambda inputs: flex_block_mask(problem, str(inputs.device)),
        text="torch.nn.attention.flex_attention.create_block_mask("
        "mask_mod, *sees.shape, device=q.device)",
        setup=_MASK_OF_TABLE,
        what="mask, of which blocks are made,",
        size=problem.batch * problem.heads * problem.query * problem.kv,
    )
    return {"block_mask": must_pass(blocks), "mask_mod": pass_if_required(None)}


def _parse_flex(call: CallArguments) -> ParsedCall:
    """Return the computation of a call; raises UnreadableCall if it requests the largest scores."""
    q, k, v = (call.tensor(name) for name in "qkv")
    blocks, mask = call.value("block_mask"), call.value("mask_mod")
    _check_heads(q, k, grouped=call.value("enable_gqa"))
    aux, with_lse = call.value("return_aux"), call.value("return_lse")
    if aux is not None and aux.max_scores:
        raise UnreadableCall("it asks for the largest scores")

    def returned(outputs: Outputs) -> Any:
        if aux is not None:
            return outputs.out, flex.AuxOutput(lse=outputs.lse if aux.lse else None)
        return (outputs.out, outputs.lse) if with_lse else outputs.out

    return ParsedCall(
        q=q,
        k=k,
        v=v,
        mask=blocks.mask_mod if blocks is not None else mask or FULL,
        score=call.value("score_mod"),
        scale=call.value("scale"),
        returned=returned,
    )


FLEX = Convention(
    name="flex",
    summary="a function of query, key, value with score_mod and block_mask, called like "
    "flex_attention",
    parameters=(
        Parameter("score_mod", ("score_mod",)),
        Parameter("block_mask", ("block_mask",)),
        Parameter("mask_mod", ("mask_mod",), by_position=False),
        Parameter("scale", ("scale", "sm_scale", "softmax_scale")),
        Parameter("enable_gqa", ("enable_gqa",)),
        Parameter("return_aux", ("return_aux",), by_name=True, of_result=True, by_position=False),
        Parameter("return_lse", ("return_lse",), by_name=True, of_result=True),
        Parameter("kernel_options", ("kernel_options",), bound=False, matters=False),
    ),
    layout=bhsd,
    bind=_bind_flex,
    parse=_parse_flex,
    claims_function=lambda names, _dotted: bool(names & {"score_mod", "block_mask", "mask_mod"}),
    # On a CPU torch's own function computes a dense formula; without this it would trace and warn.
    within=lambda device: uncompiled_flex() if device == "cpu" else nullcontext(),
)

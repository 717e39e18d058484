"""Faults of softcapping: cap · tanh(score / cap), and its derivative."""

from __future__ import annotations

from attncheck.faults.entries.changed_scores import changed_entry, changed_slope
from attncheck.faults.fault import Fault, Host

__all__ = ["FAULTS"]

_MISSING = changed_entry(
    "softcap",
    """
def _other(_values, _dims, _device):
    from attncheck.mods import scores

    return scores.none
""",
)
_TIMES_SCORE = changed_entry(
    "softcap",
    """
def _other(values, _dims, _device):
    cap = values["cap"]

    def capped(score, b, h, q_idx, kv_idx):
        return score * (score / cap).tanh()

    return capped
""",
)
_OF_LOG2 = changed_entry(
    "softcap",
    """
def _other(values, _dims, _device):
    cap = values["cap"]

    def capped(score, b, h, q_idx, kv_idx):
        in_log2 = score * 1.4426950408889634
        return cap * (in_log2 / cap).tanh() / 1.4426950408889634

    return capped
""",
)
_NO_SLOPE = changed_slope(
    "softcap",
    """
def _other(_values, _dims, _device):
    from attncheck.mods import scores

    return scores.none
""",
)
_BY_EXP = changed_entry(
    "softcap",
    """
def _other(values, _dims, _device):
    cap = values["cap"]

    def capped(score, b, h, q_idx, kv_idx):
        up, down = (score / cap).exp(), (-score / cap).exp()
        return cap * ((up - down) / (up + down))

    return capped
""",
)

FAULTS = (
    Fault(
        id="softcap-missing",
        category="softcap",
        summary="the cap is taken as an argument, and nothing is capped",
        when="a softcap, and scores that are not small beside it",
        seen="a tenth of a percent where scores are small; another softmax where they are large",
        sources=("sgl-project/sgl-kernel-xpu#491",),
        hosts={
            "ideal": Host(kernel="ideal", edits=_MISSING["ideal"]),
            "triton": Host(kernel="triton-flash2", edits=_MISSING["triton"]),
        },
        named=("softcap-missing",),
    ),
    Fault(
        id="softcap-s-times-tanh",
        category="softcap",
        summary="score · tanh(score / cap) stands for cap · tanh(score / cap)",
        when="a softcap",
        seen="every score is wrong: none keeps its sign",
        sources=("Dao-AILab/flash-attention#2402",),
        hosts={
            "ideal": Host(kernel="ideal", edits=_TIMES_SCORE["ideal"]),
            "triton": Host(kernel="triton-decode", edits=_TIMES_SCORE["triton"]),
        },
        named=("softcap-times-score",),
    ),
    Fault(
        id="softcap-on-log2-logits",
        category="softcap",
        summary="scores are capped after they were multiplied by log2 e",
        when="a softcap, and scores that are not small beside it",
        seen="a cap that is 1.44 times too small",
        sources=("sgl-project/sgl-kernel-xpu#491", "ROCm/rocm-libraries#12229"),
        hosts={
            "ideal": Host(kernel="ideal", edits=_OF_LOG2["ideal"]),
            "triton": Host(kernel="triton-flash1", edits=_OF_LOG2["triton"]),
        },
        named=("softcap-of-log2",),
    ),
    Fault(
        id="softcap-bwd-missing-dtanh",
        category="softcap",
        summary="the backward pass leaves out the derivative of tanh",
        when="gradients of a softcap, and scores that are not small beside it",
        seen="dQ and dK too large where scores are bent; O and dV are right",
        sources=("Dao-AILab/flash-attention#1033", "Dao-AILab/flash-attention#2402"),
        hosts={
            "ideal": Host(kernel="ideal", edits=_NO_SLOPE["ideal"]),
            "triton": Host(kernel="triton-flash2", edits=_NO_SLOPE["triton"]),
        },
        named=("slope-missing",),
    ),
    Fault(
        id="softcap-tanh-overflow",
        category="softcap",
        summary="tanh by (e^x − e^−x) / (e^x + e^−x), which is ∞ / ∞ for a large x",
        when="a score of more than 88 caps",
        seen="rows of NaN",
        sources=("vllm-project/vllm#56578", "vllm-project/vllm#56579"),
        hosts={
            "ideal": Host(kernel="ideal", edits=_BY_EXP["ideal"]),
            "triton": Host(kernel="triton-flash2", edits=_BY_EXP["triton"]),
        },
        named=("tanh-overflows",),
    ),
)

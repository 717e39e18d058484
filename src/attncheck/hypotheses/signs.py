"""Faults that no model predicts, and that a failure tells by itself: which call is wrong, and when.

A result that differs from call to call, or with what lies beside an input, is nobody's to predict;
that it does is known all the same.
"""

from __future__ import annotations

__all__ = ["MOST_PLACES", "SIGNS"]

MOST_PLACES = 65_535
"""Programs along each of CUDA's grid axes y and z (CUDA C++ Programming Guide, table of limits)."""
SIGNS: dict[str, str] = {
    "not-the-same-again": (
        "the same call gives something else another time: a race, memory that is not cleared or "
        "never written, or what is kept from an earlier call"
    ),
    "depends-on-the-batch": (
        "what a sequence gives depends on the others of its batch, within rounding: the whole "
        "batch decides into how many parts its keys are cut, or which launch it gets"
    ),
    "grid-axis-exceeded": (
        "there are more sequences and heads than the 65 535 places of an axis of the grid: nothing "
        "is launched, and out holds what its memory held"
    ),
    "strides-not-taken": (
        "where a tensor's elements lie is not taken from its strides: the same numbers are right "
        "contiguous, and wrong laid out otherwise"
    ),
    "far-offsets-wrap": (
        "a tensor is right laid out near, and wrong with the same layout 2³¹ elements apart: its "
        "offsets are 32-bit integers"
    ),
    "reads-beside-an-input": (
        "the result changes with what lies in memory beside a tensor, or between its rows, and is "
        "no part of it"
    ),
}
"""A sentence for a kernel's author, by id."""

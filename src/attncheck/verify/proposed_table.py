"""Proposes a capability table from the results of detection, with comments for its author.

Everything that a kernel answers is declared, right or wrong: a wrong answer is a fault until the
kernel is mended or refuses the problem, or its author removes the entry. What it refuses or raises
at is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attncheck.records.failure_causes import without_place
from attncheck.subjects.capabilities.capability_table import ANY, Capabilities, Override, When
from attncheck.verify.capability_detection import HEAD_DIMS, DetectedCapabilities, TrialResult

Comments = dict[str, list[str]]

_USUAL_PROMISES = ("repeat", "hidden")
_ELSEWHERE = ("lengths", "batch", "strides")  # Aspects without a field in the table.
_LONGEST_REASON = 90  # Characters of a reason in a comment.
_LISTS = ("dtypes", "head_dims", "masks", "scores")
_UNEQUAL = ("causal", "unequal")  # Aspects of masks at unequal lengths.
_FLAGS = ("gqa", "rectangular", "scale")


def propose_table(detection: DetectedCapabilities, entry: str) -> tuple[Capabilities, Comments]:
    """Return the table of detected capabilities, and the comment lines above its fields.

    Args:
        detection: Results of detection, in which the kernel takes something.
        entry: The kernel's name in the table.
    """
    fields: dict[str, Any] = {"entry": entry, "convention": detection.convention or None}
    comments: Comments = {}
    for name in (*_LISTS, *_FLAGS):
        tried = detection.of(name)
        fields[name] = _list_values(name, tried) if name in _LISTS else _flag(tried)
        comments[name] = [
            *_fault_comments(tried),
            *(_mixed_comment(tried) if name in _FLAGS else ()),
        ]
    if halves := _half_rectangular(detection):
        # The flag cannot say it of one mask, and ``false`` would hide what is taken.
        fields["rectangular"] = None
        comments["rectangular"] += halves
    fields["override"] = _overrides(detection, fields)
    fields["length_multiple"] = _multiple(detection)
    fields |= _convention_fields(detection)
    fields["promises"], comments["promises"] = _promises(detection)
    elsewhere = [one for one in detection.tried if one.aspect in _ELSEWHERE]
    comments["convention"] = _fault_comments(elsewhere)
    for name in ("causal", "empty_row"):
        comments[name] = _fault_comments(detection.of(name))
    return Capabilities(**fields), comments


def _answers(one: TrialResult) -> bool:
    return one.verdict in {"takes", "wrong"}


def _list_values(name: str, tried: Sequence[TrialResult]) -> tuple[Any, ...] | str:
    """Return the values that the kernel answers; ``any`` if it answers all that were tried."""
    names = [one.what for one in tried if _answers(one)]
    if name == "head_dims":
        dims_of = {"/".join(map(str, d)) if isinstance(d, tuple) else str(d): d for d in HEAD_DIMS}
        return ANY if len(names) == len(tried) else tuple(dims_of[name] for name in names)
    # ``any`` is no dtype: a table lists its kernel's dtypes.
    if name != "dtypes" and len(names) == len(tried):
        return (ANY,)
    return tuple(names)


def _flag(tried: Sequence[TrialResult]) -> bool | None:
    """Return True if all are answered, False if none, else None: the kernel may refuse the rest."""
    answers = {_answers(one) for one in tried}
    return answers.pop() if len(answers) == 1 else None


def _mixed_comment(tried: Sequence[TrialResult]) -> list[str]:
    if _flag(tried) is not None or not tried:
        return []
    return [_taken_alone(tried[0].aspect, tried)]


def _taken_alone(what: str, tried: Iterable[TrialResult]) -> str:
    able = ", ".join(one.what for one in tried if _answers(one))
    return f"{what}: takes {able} alone: not declared, so that it may refuse the rest"


def _multiple(detection: DetectedCapabilities) -> int | None:
    """Return the smallest length whose multiples it takes; None if it takes any length."""
    assert detection.base is not None, "it takes something"
    lengths = {int(one.what): _answers(one) for one in detection.of("lengths")}
    # 77 is a multiple of no tile: a kernel that takes it takes any length.
    if lengths.get(77, True):
        return None
    # Length 1 is left out, because kernels for decoding take it beside their multiples.
    multiples = [length for length, answers in lengths.items() if answers and length > 1]
    return min((*multiples, detection.base.query))


def _overrides(detection: DetectedCapabilities, fields: Mapping[str, Any]) -> tuple[Override, ...]:
    """Return an override of the masks that are taken for equal lengths only, if there are any."""
    declared = ANY in fields["masks"]
    square = tuple(
        mask
        for mask, tried in _by_mask(detection).items()
        if (declared or mask in fields["masks"]) and not any(map(_answers, tried))
    )
    if not square or not fields["rectangular"]:
        return ()
    return (Override(when=When(mask=square), rectangular=False),)


def _by_mask(detection: DetectedCapabilities) -> dict[str, list[TrialResult]]:
    """Return the results at unequal lengths of each mask."""
    by_mask: dict[str, list[TrialResult]] = {}
    for one in (each for aspect in _UNEQUAL for each in detection.of(aspect)):
        by_mask.setdefault(one.what.partition(",")[0], []).append(one)
    return by_mask


def _half_rectangular(detection: DetectedCapabilities) -> list[str]:
    """Return comments on masks of which a kernel itself takes only one kind of unequal lengths."""
    return [
        _taken_alone("rectangular", tried)
        for tried in _by_mask(detection).values()
        if any(map(_answers, tried))
        and not all(_answers(one) for one in tried if one.aspect == "unequal")
    ]


def _convention_fields(detection: DetectedCapabilities) -> dict[str, Any]:
    """Return the fields of LSE, causal alignment and empty rows as detected."""
    options = detection.options
    right = detection.takes("empty_row")
    lse: bool | str = options.lse or True if detection.exposes_lse else False
    return {
        "lse": lse,
        "causal": options.causal or None,
        "empty_row": options.empty_row or ("zero" if right else None),
    }


def _promises(detection: DetectedCapabilities) -> tuple[tuple[str, ...] | None, list[str]]:
    """Return the usual promises that it keeps, None for all of them, and comment lines."""
    tried = detection.of("promises")
    broken = {one.what: one for one in tried if one.verdict != "takes"}
    intact = [name for name in dict.fromkeys(one.what for one in tried) if name not in broken]
    lines = [
        f"{name} is not promised: {_shorten(one.reason)}"
        for name, one in broken.items()
        if name in _USUAL_PROMISES
    ]
    more = [name for name in intact if name not in _USUAL_PROMISES]
    if more:
        names = " and ".join(more)
        lines.append(f"{names} held where it was tried: add what the kernel promises")
    # Unusual promises may hold by chance in a few problems: only the author can declare them.
    usual = tuple(name for name in _USUAL_PROMISES if name not in broken)
    return (None if usual == _USUAL_PROMISES else usual), lines


def is_capability(one: TrialResult) -> bool:
    """Return whether the result is of a capability, not of a promise, LSE or the convention."""
    return one.aspect not in {"convention", "lse", "promises"}


def group_results(tried: Iterable[TrialResult]) -> list[list[TrialResult]]:
    """Group results by verdict and reason; wrong answers by verdict and broken rule."""
    groups: dict[tuple[str, str], list[TrialResult]] = {}
    for one in tried:
        why = one.reason.partition(":")[0] if one.verdict == "wrong" else without_place(one.reason)
        groups.setdefault((one.verdict, why), []).append(one)
    return list(groups.values())


def _fault_comments(tried: Iterable[TrialResult]) -> list[str]:
    """Return a line for each group of results that were wrong or raised."""
    phrases = {
        "wrong": "wrong, to be mended, refused with a ValueError, or taken out",
        "raises": "raises, and is left out",
    }
    return [
        f"{', '.join(one.what for one in group)}: {phrases[group[0].verdict]}: "
        f"{_shorten(without_place(group[0].reason))}"
        for group in group_results(tried)
        if group[0].verdict in phrases
    ]


def _shorten(reason: str) -> str:
    # TOML allows no control characters in comments.
    line = " ".join("".join(c if c.isprintable() else " " for c in reason).split())
    if len(line) <= _LONGEST_REASON:
        return line
    whole_words = line[: _LONGEST_REASON - 1].rpartition(" ")[0]
    return f"{whole_words or line[: _LONGEST_REASON - 2]} …"

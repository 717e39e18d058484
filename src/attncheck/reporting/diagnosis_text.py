"""A failure as text: the question, what is wrong, by how much, and how to reproduce it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from attncheck.core.judgement import Judgement, Worst
from attncheck.core.sanitize_text import one_line
from attncheck.core.tensor_names import AXES
from attncheck.records.failure_causes import CauseGroup, fault_text
from attncheck.records.failures import StoredFailure
from attncheck.records.problem_summary import problem_of
from attncheck.records.record import Diagnosis, ErrorMap, Explanation, Record, Status, TileMap
from attncheck.reporting import number_text
from attncheck.reporting.document import Card, Facts, Section, card_text
from attncheck.reporting.number_text import plural
from attncheck.reporting.record_text import verdict_remarks

TERMS = {
    "scores": "q·k and its scale: operands as products read them, sums, and what they do to P",
    "LSE": "LSE as the kernel gave it, which P comes from again",
    "score mod": "the score mod in fp32: its own roundings, and how steep it makes those of scores",
    "exponent": "the maximum subtracted, log2 e, exp2, and rescaling where the maximum moves",
    "rounding of P": "P as the product P·V reads it",
    "rounding of V": "V as the product P·V reads it",
    "dO·V": "the products of dO and V added up",
    "delta": "the sum of dO·O, taken off dO·V",
    "saved out": "out as the kernel gave it, rounded, in delta",
    "slope": "the score mod's derivative in fp32",
    "products": "P times what delta left of dO·V",
    "rounding of dS": "the gradient of scores, as the products dS·K and dSᵀ·Q read it",
    "rounding of operands": "q, k and dO as products read them",
    "row sum": "the sum of P added up key by key",
    "accumulation": "P·V added up key by key; gradients likewise, key by key or row by row",
    "division": "out divided by the row sum, whose own error is in it",
    "underflow": "products too small to be normal numbers",
    "logarithm": "the logarithm of the row sum, the maximum added",
    "rounding of heads": "each head's gradient, before those that share a key head are added",
    "rounding of parts": "gradients added up tile by tile in the output format",
    "output rounding": "out rounded once to its format; a gradient likewise",
}
"""Meaning of each part of an error budget, in the order in which a kernel makes the roundings."""

_MOST_EXPLANATIONS = 3
_LIKELY = ("likely", *["or"] * (_MOST_EXPLANATIONS - 1))
_MOST_CAUSES = 10  # causes at the head of a page
_HEADS: dict[Status, str] = {
    "oom": "OUT OF MEMORY",
    "unsupported": "NOT SUPPORTED",
}  # other statuses are written in capitals
_LEAST_SHARE = 1e-3  # share of an allowance below which a part is not listed
_LONGEST = 500  # characters of a line, which may hold a message of the kernel's code

# Largest error ÷ allowance, or largest share of the worst tile, that each character stands for.
_ERROR_SHADES = ((0.1, "·"), (1.0, "░"), (10.0, "▒"), (100.0, "▓"), (math.inf, "█"))
_ERROR_LEGEND = "· ≤ 0.1, ░ ≤ 1, ▒ ≤ 10, ▓ ≤ 100, █ more"
_TILE_SHADES = ((0.01, "·"), (0.1, "░"), (0.3, "▒"), (0.7, "▓"), (math.inf, "█"))
_TILE_LEGEND = "of the largest: · ≤ 1 %, ░ ≤ 10 %, ▒ ≤ 30 %, ▓ ≤ 70 %, █ more"
_LEAST_CELLS = 8  # cells of a map, below which its worst element says as much
_MOST_LINES, _MOST_COLUMNS = 8, 48  # largest size of a map of errors, in characters


def repro_command(identifier: str) -> str:
    """Return the command line that reproduces a kept failure."""
    return f"attncheck repro {identifier}"


def kept_failure_text(failure: StoredFailure) -> str:
    """Return a description of a kept failure, and how to reproduce it."""
    return diagnosis_text(
        failure.record,
        kernel=failure.kernel,
        device=failure.device,
        question_summary=failure.question,
        test=failure.test,
        reproduce=repro_command(failure.id),
    )


def diagnosis_text(  # the arguments are facts that a Record does not hold
    record: Record,
    *,
    kernel: str,
    device: str = "",
    question_summary: str = "",
    test: str = "",
    reproduce: str = "",
) -> str:
    """Return a description of one kernel's answer, as lines of plain text.

    Args:
        device: The device of the run; empty if it is not known.
    """
    facts = failure_facts(
        record, kernel=kernel, device=device, question_summary=question_summary, test=test
    )
    heading = failure_heading(record)
    card = Card(kernel=kernel, heading=heading, facts=tuple(facts), command=_cut(reproduce))
    return "\n".join([heading, *card_text(card)])


def failure_heading(record: Record) -> str:
    """Return ``FAIL bound compare: out[0, 3, 65, 7] = 0.41, but should be 0.31 …``."""
    judgement = record.judgement
    rule = judgement.rule if judgement else ""
    question = str(record.case.get("question", ""))
    reason = (judgement.reason if judgement else record.reason) or ""
    head = _HEADS.get(record.status, record.status.upper())
    title = " ".join(part for part in (head, rule, question) if part)
    return _cut(f"{title}: {reason}" if reason else title)


def failure_facts(
    record: Record, *, kernel: str, device: str = "", question_summary: str = "", test: str = ""
) -> list[tuple[str, str]]:
    """Return labels and texts of all facts of an answer; for the arguments see ``diagnosis_text``.

    A text without a label continues the one above.
    """
    interpreted = " in Triton's interpreter" if record.interpreted else ""
    numbers: Any = record.case.get("parameters")
    parameters = numbers.items() if isinstance(numbers, dict) else ()
    question = [str(record.case.get("question", "")), *(f"{k}={v}" for k, v in parameters)]
    asks = ": ".join(part for part in (" ".join(question), question_summary) if part)
    pairs = [
        ("kernel", f"{kernel} on {device}{interpreted}" if device else kernel),
        ("problem", problem_of(record).full_line),
        ("question", asks),
        ("test", test),
    ]
    facts = [(name, text) for name, text in pairs if text]
    # Possible causes come before the numbers, since readers want them first.
    facts += explanation_facts(record.diagnosis)
    facts += _judgement_facts(record.judgement) if record.judgement else []
    tiles = tile_picture(record.diagnosis) if isinstance(record.diagnosis, Diagnosis) else ()
    for label, lines in (("where", map_lines(record)), ("tiles", tiles)):
        facts += [("" if i else label, line) for i, line in enumerate(lines)]
    return [(name, _cut(text)) for name, text in facts]


def _judgement_facts(judgement: Judgement) -> Iterator[tuple[str, str]]:
    worst = judgement.worst
    if worst is not None:
        tile = f" in {worst.tile}" if worst.tile else ""
        axes = ", ".join(AXES[worst.tensor])
        yield "worst", f"{worst.tensor}[{number_text.element(worst)}] ({axes}){tile}"
        yield "got", f"{worst.got:.9g}"
        yield "should be", f"{worst.exact:.9g}"
        allowance = number_text.scientific(worst.allowance)
        yield "allowed", f"{allowance}{_source(judgement, worst)}"
    if judgement.compared:
        what = "rows" if worst and worst.tensor == "lse" else "elements"
        yield "wrong", f"{judgement.wrong} of {judgement.compared} {what}"
    for remark in verdict_remarks(judgement):
        yield "also", remark.text
    if judgement.arithmetic:
        yield "judged as", judgement.arithmetic


def _source(judgement: Judgement, worst: Worst) -> str:
    """Return the origin of the allowance: the largest parts of its budget, or the rule."""
    if judgement.rule == "relation":
        exactly = " (bit for bit)" if worst.allowance == 0 else ""
        return exactly or " (the judge's bounds of the runs that are compared)"
    if worst.allowance == 0:
        return " (exactly)"
    parts = sorted(worst.budget.items(), key=lambda item: -item[1])
    shown = [f"{name} {part:.1e}" for name, part in parts if part > _LEAST_SHARE * worst.allowance]
    more = ["…"] if len(shown) < sum(part > 0 for _, part in parts) else []
    return f" = {' + '.join(shown + more)}" if shown else ""


def explanation_facts(diagnosis: object) -> Iterator[tuple[str, str]]:
    """Yield labels and texts of possible causes; nothing without a diagnosis.

    A confirmed cause is ``likely``. Otherwise the known family of faults, or ``unknown``, is
    followed by observed facts and by the fault models that were not refuted.
    """
    if not isinstance(diagnosis, Diagnosis):
        return
    ranked = diagnosis.ranked
    if ranked and not diagnosis.tried:  # the failure itself names its cause, without a share
        yield "likely", fault_text(ranked[0])
        yield from (("perhaps", _explain(one)) for one in ranked[1:])
        return
    if ranked and diagnosis.level == "named":
        best = ranked[: max(1, diagnosis.tied)][:_MOST_EXPLANATIONS]
        yield from ((label, _explain(one)) for label, one in zip(_LIKELY, best, strict=False))
        more = diagnosis.tied - len(best)
        if more > 0:
            yield "or", f"{more} more fault models, which explain it equally well"
        return
    tried = diagnosis.tried
    if diagnosis.family:
        no_model = f"none of {tried} fault models alone is confirmed"
        if tried == 1:
            no_model = "the one fault model that applies is not confirmed"
        yield "likely", f"{diagnosis.family}; {no_model}"
    elif tried == 1:
        yield "likely", "unknown: the one fault model that applies does not fit"
    else:
        yield "likely", f"unknown: none of {tried} fault models fits"
    yield from (("perhaps", _explain(one)) for one in ranked[:_MOST_EXPLANATIONS])
    yield from (("seen", fact) for fact in diagnosis.facts)


def _explain(explanation: Explanation) -> str:
    """Return the fault and the share of the error that it explains."""
    share = explanation.share
    # Rounded down, since 99.97 % is not all, and readers of "100 %" would look no further.
    percent = "?" if math.isnan(share) else "100"
    if share < 1:
        percent = f"{math.floor(1000 * share) / 10:.3g}"
    rest = ", and rounding the rest" if explanation.explains_all and share < 1 else ""
    return f"{fault_text(explanation)} (explains {percent} % of the error{rest})"


def causes_section(causes: Sequence[tuple[CauseGroup, Record, str]]) -> Section:
    """Return a section with the number of causes and failures, and the first causes in words.

    Args:
        causes: Each cause with the smallest Record that has it, and the command that repeats it.
    """
    several = len({group.kernel for group, *_ in causes}) > 1
    pairs = []
    for group, record, command in causes[:_MOST_CAUSES]:
        owner = f"{group.kernel}: " if several else ""
        cause = group.cause if group.known else f"of unknown cause: {group.cause}"
        pairs.append((plural(len(group.members), "failure"), _cut(f"{owner}{cause}")))
        pairs.append(("", _cut(f"smallest problem: {problem_of(record).full_line}")))
        pairs += [("", _cut(command))] if command else []
    more = len(causes) - _MOST_CAUSES
    pairs += [("", f"and {plural(more, 'more kind')} of failure")] if more > 0 else []
    title = causes_title([group for group, *_ in causes])
    return Section(title, (Facts(tuple(pairs)),), name="Causes")


def causes_title(groups: Sequence[CauseGroup]) -> str:
    """Return ``2 causes explain 70 of 71 failures``."""
    known = [len(group.members) for group in groups if group.known]
    failures = plural(sum(len(group.members) for group in groups), "failure")
    if not known:
        return f"no cause is certain of {failures}"
    verb = "explains" if len(known) == 1 else "explain"
    title = f"{plural(len(known), 'cause')} {verb} {sum(known):,} of {failures}"
    others = sum(len(group.members) for group in groups) - sum(known)
    if not others:
        return title
    rest = f"the other {others:,} have" if others > 1 else "the other has"
    return f"{title}; {rest} no certain cause"


def tile_picture(diagnosis: Diagnosis) -> Iterator[str]:
    """Yield a map of tiles, rows down and keys to the right, then its legend.

    Yield nothing if there are few cells or all look the same.
    """
    tiles = diagnosis.tiles
    if not isinstance(tiles, TileMap):
        return
    lines = ["".join(_shade(_TILE_SHADES, [cell]) for cell in line) for line in tiles.values]
    characters = "".join(lines)
    if len(characters) < _LEAST_CELLS or len(lines) < 2 or len(set(characters)) < 2:
        return
    yield (
        f"weights that are off; a line is {plural(tiles.rows, 'row')}, "
        f"a column {plural(tiles.keys, 'key')}"
    )
    yield from lines
    yield _TILE_LEGEND


def map_lines(record: Record) -> Iterator[str]:
    """Yield a map of errors, heads down and rows to the right, then its legend.

    Yield nothing if one, every or no cell is beyond its allowance, or if there are few cells, as
    in a shrunk problem: the worst element then says as much.
    """
    error_map = record.error_map
    if not isinstance(error_map, ErrorMap):
        return
    beyond = [not share <= 1 for line in error_map.values for share in line]  # NaN is beyond
    if len(beyond) < _LEAST_CELLS or not 1 < sum(beyond) < len(beyond):
        return
    heads = -(-len(error_map.values) // _MOST_LINES)
    rows = -(-max(map(len, error_map.values)) // _MOST_COLUMNS)
    yield (
        f"error ÷ allowed; a line is {plural(error_map.heads * heads, 'head')}, "
        f"a column {plural(error_map.rows * rows, 'row')}"
    )
    for first in range(0, len(error_map.values), heads):
        group = error_map.values[first : first + heads]
        yield "".join(
            _shade(_ERROR_SHADES, [share for line in group for share in line[i : i + rows]])
            for i in range(0, len(group[0]), rows)
        )
    yield _ERROR_LEGEND


def _shade(shades: Sequence[tuple[float, str]], shares: Sequence[float]) -> str:
    """Return the character of the largest of ``shares``; NaN counts as the largest."""
    places = [
        next((i for i, (most, _) in enumerate(shades) if share <= most), len(shades) - 1)
        for share in shares
    ]
    return shades[max(places)][1] if places else " "


def _cut(text: str) -> str:
    """Return ``text`` as one sanitized line of limited length."""
    line = one_line(text)
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…"

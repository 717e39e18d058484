"""A failure as text: what was asked, what is wrong, by how much, and how to reproduce it."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any

from attncheck.core.outputs import AXES
from attncheck.core.paged_layout import Paging
from attncheck.core.sanitize_text import one_line
from attncheck.mods.spec import Spec
from attncheck.records.problem_summary import ProblemSummary, problem_of
from attncheck.records.record import Diagnosis, TileMap
from attncheck.reporting import figures
from attncheck.reporting.map_text import map_lines
from attncheck.reporting.verdicts import verdict_remarks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncheck.core.judgement import Judgement, Worst
    from attncheck.records.failures import KeptFailure
    from attncheck.records.record import Explanation, Record, Status

__all__ = [
    "diagnosis_text",
    "explanation_facts",
    "kept_failure_text",
    "likely_facts",
    "problem_line",
    "repro_command",
    "tile_lines",
    "tile_picture",
]


_SHADES = ((0.01, "·"), (0.1, "░"), (0.3, "▒"), (0.7, "▓"), (math.inf, "█"))
_LEGEND = "of the largest: · ≤ 1 %, ░ ≤ 10 %, ▒ ≤ 30 %, ▓ ≤ 70 %, █ more"
_LEAST_CELLS = 8


def likely_facts(record: Record) -> Iterator[tuple[str, str]]:
    """Label and text of each line; nothing where nobody looked."""
    if isinstance(record.diagnosis, Diagnosis):
        yield from explanation_facts(record.diagnosis)


def explanation_facts(found: Diagnosis) -> Iterator[tuple[str, str]]:
    """Label and text of each line.

    A fault that explains all is told with those that explain it as well; else the best few are,
    and where none explains anything to speak of, that.
    """
    if not found.ranked:
        yield "likely", f"unknown: none of {found.tried} fault models fits"
        return
    if not found.tried:  # the failure says it by itself: there is no share of an error
        yield "likely", _named(found.ranked[0])
        yield from (("perhaps", _explanation(one)) for one in found.ranked[1:])
        return
    certain = found.ranked[0].explains_all
    told = found.ranked[: max(1, found.tied)] if certain else found.ranked
    label = "likely" if certain else "perhaps"
    for one in told:
        yield label, _explanation(one)
        label = "or"
    more = found.tied - len(found.ranked)
    if certain and more > 0:
        yield "or", f"{more} more fault models, which explain it equally well"
    if not certain:
        yield "", f"none of {found.tried} fault models explains all of the error"


def _named(one: Explanation) -> str:
    form = ", ".join(f"{name} {_value(value)}" for name, value in one.parameters.items())
    return f"{one.sentence}{f' [{form}]' if form else ''}"


def _explanation(one: Explanation) -> str:
    share = _percent(one.share)
    rest = ", and rounding the rest" if one.explains_all and one.share < 1 else ""
    return f"{_named(one)} (explains {share} % of the error{rest})"


def _value(value: float | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _percent(share: float) -> str:
    """Never rounded up to all of it."""
    whole = math.isfinite(share) and share >= 1
    return "100" if whole else f"{math.floor(1000 * share) / 10:.3g}" if share == share else "?"  # noqa: PLR0124


def tile_lines(record: Record) -> Iterator[str]:
    """The map of errors by tiles; nothing where nobody looked."""
    if isinstance(record.diagnosis, Diagnosis):
        yield from tile_picture(record.diagnosis)


def tile_picture(found: Diagnosis) -> Iterator[str]:
    """Groups of rows down, of keys to the right, then the legend; nothing where it is no picture.

    That is where there are few cells, or all are alike.
    """
    tiles = found.tiles
    if not isinstance(tiles, TileMap):
        return
    cells = [cell for line in tiles.values for cell in line]
    signs = {_shade(cell) for cell in cells}
    if len(cells) < _LEAST_CELLS or len(tiles.values) < 2 or len(signs) < 2:
        return
    yield (
        f"weights that are off; a line is {_many(tiles.rows, 'row')}, "
        f"a column {_many(tiles.keys, 'key')}"
    )
    yield from ("".join(map(_shade, line)) for line in tiles.values)
    yield _LEGEND


def _many(count: int, word: str) -> str:
    return f"{count} {word}{'s' * (count != 1)}"


def _shade(share: float) -> str:
    return next((sign for most, sign in _SHADES if share <= most), _SHADES[-1][1])


_HEADS: dict[Status, str] = {
    "pass": "PASS",
    "warn": "WARN",
    "inconclusive": "INCONCLUSIVE",
    "fail": "FAIL",
    "flaky": "FLAKY",
    "error": "ERROR",
    "crash": "CRASH",
    "timeout": "TIMEOUT",
    "oom": "OUT OF MEMORY",
    "oracle disagrees": "ORACLE DISAGREES",
    "unsupported": "NOT TAKEN",
}
_LABEL = 11  # columns of the names on the left
_SHOWN = 1e-3  # share of an allowance below which a part says nothing to a reader
_LONGEST = 500  # characters of what somebody's code says


def repro_command(identifier: str) -> str:
    """The command line that shows a kept failure again."""
    return f"attncheck repro {identifier}"


def kept_failure_text(failed: KeptFailure) -> str:
    """The diagnosis of a failure that is kept, with how to reproduce it."""
    return diagnosis_text(
        failed.record,
        kernel=failed.kernel,
        device=failed.device,
        question_summary=failed.question,
        test=failed.test,
        reproduce=repro_command(failed.id),
    )


def diagnosis_text(
    record: Record,
    *,
    kernel: str,
    device: str = "",
    question_summary: str = "",
    test: str = "",
    reproduce: str = "",
) -> str:
    """What one kernel answered to one Case, in plain text: the same on every machine.

    Args:
        record: The answer.
        kernel: As it was asked for.
        device: ``cpu`` or ``cuda``; empty leaves it out.
        question_summary: What the question asks, in one line.
        test: The property's test.
        reproduce: The command line that shows it again.

    Raises:
        UsageError: for a Record that holds no Problem.
    """
    interpreted = " in Triton's interpreter" if record.interpreted else ""
    facts = {
        "kernel": f"{kernel} on {device}{interpreted}" if device else kernel,
        "problem": problem_line(problem_of(record)),
        "question": ": ".join(part for part in (_question(record), question_summary) if part),
        "test": test,
    }
    lines = [_head(record)]
    lines += [_fact(name, text) for name, text in facts.items() if text]
    lines += [_fact(name, text) for name, text in likely_facts(record)]
    lines += _judged(record)
    lines += _mapped(record)
    lines += [f"Reproduce: {_said(reproduce)}"] if reproduce else []
    return "\n".join(lines)


def problem_line(problem: ProblemSummary) -> str:
    """A Problem in one line: ``bf16 causal B1 H4/2 Q128 K96 D64 normal seed 0``."""
    mods = [str(Spec.from_json(problem.mask))]
    if problem.operation == "softmax":
        shape = problem.shape
        mods = [problem.operation]
    else:
        shape = problem.shape.replace(" Q", f" H{problem.head_counts} Q", 1)
    if problem.score.get("name") != "none":
        mods.append(str(Spec.from_json(problem.score)))
    mods += ["sink"] if problem.sink else []
    mods += [str(Paging.from_json(problem.paging))] if problem.paging else []
    mods += ["backward"] if problem.backward else []
    mods += ["dLSE"] if problem.dlse else []
    mods += ["dcaptured"] if problem.dcaptured else []
    scale = "" if _usual_scale(problem) else f" scale {problem.scale:g}"
    said = [problem.dtype, *mods, shape, problem.distribution, f"seed {problem.seed}"]
    return " ".join(said) + scale


def _usual_scale(problem: ProblemSummary) -> bool:
    """Whether it is 1/√head_dim in fp32; of a softmax there is none."""
    if problem.operation == "softmax":
        return True
    (usual,) = struct.unpack("<f", struct.pack("<f", problem.head_dim**-0.5))
    return bool(problem.scale == usual)


def _head(record: Record) -> str:
    found = record.judgement
    rule = found.rule if found else ""
    name = _question(record).partition(" ")[0]
    said = (found.reason if found else record.reason) or ""
    title = " ".join(part for part in (_HEADS[record.status], rule, name) if part)
    return _said(f"{title}: {said}" if said else title)


def _question(record: Record) -> str:
    """``future_keys row=3``."""
    numbers: Any = record.case.get("parameters")
    given = numbers.items() if isinstance(numbers, dict) else ()
    return " ".join([str(record.case.get("question", "")), *(f"{k}={v}" for k, v in given)])


def _judged(record: Record) -> Iterator[str]:
    found = record.judgement
    if found is None:
        return
    if found.worst is not None:
        yield from _worst(found, found.worst)
    if found.compared:
        what = "rows" if found.worst and found.worst.tensor == "lse" else "elements"
        yield _fact("wrong", f"{found.wrong} of {found.compared} {what}")
    for remark in verdict_remarks(found):
        yield _fact("also", remark.text)
    if found.arithmetic:
        yield _fact("judged as", found.arithmetic)


def _mapped(record: Record) -> Iterator[str]:
    for label, lines in (("where", map_lines(record)), ("tiles", tile_lines(record))):
        name = label
        for line in lines:
            yield _fact(name, line)
            name = ""


def _worst(found: Judgement, worst: Worst) -> Iterator[str]:
    tile = f" in {worst.tile}" if worst.tile else ""
    axes = ", ".join(AXES[worst.tensor])
    yield _fact("worst", f"{worst.tensor}[{figures.element(worst)}] ({axes}){tile}")
    yield _fact("got", f"{worst.got:.9g}")
    yield _fact("should be", f"{worst.exact:.9g}")
    yield _fact("allowed", f"{figures.scientific(worst.allowance)}{_source(found, worst)}")


def _source(found: Judgement, worst: Worst) -> str:
    """Where the allowance comes from."""
    if found.rule == "relation":
        exactly = " (bit for bit)" if worst.allowance == 0 else ""
        return exactly or " (the judge's bounds of the runs that are compared)"
    if worst.allowance == 0:
        return " (exactly)"
    parts = sorted(worst.budget.items(), key=lambda item: -item[1])
    shown = [f"{name} {part:.1e}" for name, part in parts if part > _SHOWN * worst.allowance]
    more = ["…"] if len(shown) < sum(part > 0 for _, part in parts) else []
    return f" = {' + '.join(shown + more)}" if shown else ""


def _fact(name: str, text: str) -> str:
    return f"  {name:<{_LABEL}}{_said(text)}"


def _said(text: str) -> str:
    """One harmless line, of a length to read."""
    line = one_line(text)
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…"

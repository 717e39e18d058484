"""A failed property as a diagnosis: what was asked, what is wrong, by how much, how to see it."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from attncheck.inert import one_line
from attncheck.mods.spec import Spec
from attncheck.paging import Paging
from attncheck.reporting import figures
from attncheck.reporting.asked import Asked, asked
from attncheck.reporting.likely import likely_facts, tile_lines
from attncheck.reporting.map_text import map_lines
from attncheck.reporting.verdicts import verdict_remarks
from attncheck.tensor_names import AXES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncheck.failure_record import Failed
    from attncheck.judgement import Judgement, Worst
    from attncheck.record import Record, Status

__all__ = ["command", "diagnosis", "diagnosis_of", "problem_line"]

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


def command(identifier: str) -> str:
    """The command line that shows a kept failure again."""
    return f"attncheck repro {identifier}"


def diagnosis_of(failed: Failed) -> str:
    """The diagnosis of a failure that is kept, with how to reproduce it."""
    return diagnosis(
        failed.record,
        kernel=failed.kernel,
        device=failed.device,
        question_summary=failed.question,
        test=failed.test,
        reproduce=command(failed.id),
    )


def diagnosis(
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
        "problem": problem_line(asked(record)),
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


def problem_line(problem: Asked) -> str:
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


def _usual_scale(problem: Asked) -> bool:
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

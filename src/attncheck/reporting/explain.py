"""One Record in full: its worst element, what is allowed there, and of what that is made."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TextIO

from rich.text import Text

from attncheck.core.outputs import AXES
from attncheck.core.sanitize_text import one_line
from attncheck.records.problem_summary import problem_of
from attncheck.reporting import figures, screen
from attncheck.reporting.blind_spots import visible
from attncheck.reporting.cells import STYLES, Cell
from attncheck.reporting.diagnosis_text import likely_facts
from attncheck.reporting.gradients import gradient_shares, gradients_of
from attncheck.reporting.sheet import Line, Sheet, terminal_lines
from attncheck.reporting.terms import TERMS
from attncheck.reporting.verdicts import STATUSES, footnote, verdict_remarks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncheck.core.judgement import Judgement, Precision, Worst
    from attncheck.records.record import Record

__all__ = ["as_explanation", "explanation_lines", "show_explanation"]

_LABEL = 14  # columns of the names on the left
_INDENT = "  "


def as_explanation(record: Record) -> str:
    """The explanation of ``record`` as plain text, the same on every machine."""
    return screen.plain(lambda width: explanation_lines(record, width))


def show_explanation(record: Record, stream: TextIO | None = None) -> None:
    """Write it to ``stream`` (default: standard output), with its width and colours."""
    stream = stream or sys.stdout
    screen.put(screen.drawn(lambda width: explanation_lines(record, width), stream), stream)


def explanation_lines(record: Record, width: int) -> Iterator[Text]:
    """The explanation of ``record`` line by line, at most ``width`` columns wide."""
    yield from screen.wrapped(_title(record), width, style="bold cyan")
    verdict = f"{record.status}: {footnote(record)}" if footnote(record) else record.status
    yield from screen.wrapped(verdict, width, style=STYLES[STATUSES[record.status]])
    found = record.judgement
    for remark in verdict_remarks(found):
        yield from screen.wrapped(f"└ {remark.text}", width, style=STYLES[remark.look])
    for name, text in likely_facts(record):
        yield from screen.wrapped(f"{name:<8}{one_line(text)}", width, indent=" " * 8)
    if found is None:
        return
    if found.worst is not None:
        yield from _worst(found)
        yield from _budget(found.worst, width)
    if not found.arithmetic:  # a relation, which no bound was asked about
        return
    yield from _shares(found)
    yield from _gradients(record, width)
    if found.precision is not None:
        yield from _precision(found.precision)
    yield Text("")
    yield from screen.wrapped(f"judged as {found.arithmetic}", width, style="dim")
    if seen := visible([record]):
        yield from screen.wrapped(seen, width, style="dim")


def _title(record: Record) -> str:
    problem = problem_of(record)
    heads = f"{record.heads} {problem.head_counts}" if record.heads else ""
    parts = [record.kernel, record.variant, heads, problem.dtype, problem.shape]
    parts += [problem.distribution, f"seed {problem.seed}", problem.backward_too]
    return " · ".join(part for part in parts if part)


def _worst(found: Judgement) -> Iterator[Text]:
    """The element that a failure rests on, else the largest error as a part of its bound."""
    worst = found.worst
    assert worst is not None, "asked for only where there is one"
    rests = found.status == "fail" and found.rule != "precision"
    title = "the element that shows it" if rests else "the largest error ÷ bound"
    error = abs(worst.got - worst.exact)
    axes = ", ".join(AXES[worst.tensor])
    yield Text("")
    yield Text(f"{title}: {worst.tensor}[{figures.element(worst)}] ({axes})", style="bold")
    if worst.tile:
        yield _fact("in", one_line(worst.tile))
    yield _fact("got", f"{worst.got:.9g}")
    yield _fact("should be", f"{worst.exact:.9g}")
    times = (
        f", {figures.share(error / worst.allowance)} × what is allowed" if worst.allowance else ""
    )
    yield _fact("error", figures.scientific(error) + times)
    exactly = ", bit for bit" if found.rule == "relation" and not worst.allowance else ""
    yield _fact("allowed", figures.scientific(worst.allowance) + exactly)
    if found.compared:
        whose = "rows" if worst.tensor == "lse" else "elements"
        yield _fact("wrong", f"{found.wrong} of {found.compared} {whose}")


def _budget(worst: Worst, width: int) -> Iterator[Text]:
    """What is allowed there, the largest part first."""
    if not worst.budget:
        return
    total = sum(worst.budget.values())
    names = {name: one_line(name) for name in worst.budget}
    longest = max(map(len, names.values()))
    yield Text("")
    yield Text(f"what is allowed there, {figures.scientific(worst.allowance)}:", style="bold")
    for name, part in sorted(worst.budget.items(), key=lambda item: -item[1]):
        of_all = _part(part / total) if total > 0 else ""
        line = f"{names[name]:<{longest}}  {figures.scientific(part):>8}  {of_all:>7}  "
        meaning = TERMS.get(name, "")
        first, *rest = screen.wrapped(meaning, width - len(_INDENT + line)) or [Text("")]
        yield Text(_INDENT + line) + Text(first.plain, style="dim")
        for more in rest:
            yield Text(" " * len(_INDENT + line) + more.plain.strip(), style="dim")


def _part(share: float) -> str:
    least = 1e-4  # a line says that it is there; how little it is says nothing
    return f"{figures.percent(share)} %" if share == 0 or share >= least else "<0.01 %"


def _shares(found: Judgement) -> Iterator[Text]:
    """The largest error ÷ bound, over the whole tensor and over sampled rows."""
    rows = f"{found.rows - found.rows_unbounded} rows"
    shares = {
        f"bound (a proof), {rows}": (found.out_over_bound, found.lse_over_bound),
        f"probable bound, {found.rows_sampled} rows": (
            found.out_over_probable,
            found.lse_over_probable,
        ),
    }
    yield Text("")
    yield Text("largest error ÷", style="bold")
    longest = max(map(len, shares))
    for name, (out, lse) in shares.items():
        said = f"out {_share(out):<8}  LSE {_share(lse)}"
        yield Text(f"{_INDENT}{name:<{longest}}  {said}")


def _gradients(record: Record, width: int) -> Iterator[Text]:
    """A row for each gradient."""
    columns = ("", "÷ bound", "RMSE", "×floor", "×ideal", "max error", "at")
    shares, sheet = gradient_shares(record), Sheet("gradients", columns, cut=0)
    for name, found in gradients_of(record).items():
        texts = (
            name,
            _share(shares.get(name)),
            figures.scientific(found.rmse),
            figures.ratio(found.rmse, found.floor_rmse),
            figures.ratio(found.rmse, found.ideal_rmse),
            figures.scientific(found.max_error),
            figures.place_in(name, found.max_at),
        )
        sheet.lines.append(Line(tuple(map(Cell, texts))))
    if sheet.lines:
        yield Text("")
        yield from terminal_lines(sheet, width)


def _share(share: float | None) -> str:
    return figures.NOTHING if share is None else figures.share(share)


def _precision(found: Precision) -> Iterator[Text]:
    facts = {
        "z": ("rms error ÷ predicted, largest over heads", found.z),
        "spread": ("RMSE ÷ the worst of an ensemble of ideal kernels", found.spread),
        "residual": (
            "distance from the emulation at its own tiling ÷ that one's error",
            found.residual,
        ),
        "bias": ("mean error ÷ RMSE", found.bias),
        "slope": ("of the error on the exact result", found.slope),
        "ulp": ("median and 99th percentile of the error, in units of out", None),
        "frobenius": ("‖error‖ ÷ ‖exact‖", found.frobenius),
    }
    yield Text("")
    yield Text("precision", style="bold")
    for name, (meaning, number) in facts.items():
        text = figures.NOTHING if number is None else f"{number:.3g}"
        if name == "ulp":
            text = f"{found.ulp_p50:.2g}, {found.ulp_p99:.2g}"
        line = _fact(name, f"{text:<12}")
        line.append(meaning, style="dim")
        yield line


def _fact(name: str, value: str) -> Text:
    return Text(f"{_INDENT}{name:<{_LABEL}}{value}")

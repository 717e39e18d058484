"""The pages of ``attncheck check``, and of one Record in full with the parts of its verdict."""

from __future__ import annotations

import itertools
import shlex
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from attncheck.core.judgement import RULE_ORDER, Judgement, Precision, Worst, share_text
from attncheck.core.tensor_names import AXES
from attncheck.records.failure_causes import group_by_cause, unclaimed_findings
from attncheck.records.problem_summary import problem_of
from attncheck.records.record import (
    DEFAULT_DTYPE,
    FAILED_STATUSES,
    UNTRUSTED_STATUSES,
    Record,
    Report,
    gradients_of,
)
from attncheck.reporting import number_text
from attncheck.reporting.diagnosis_text import TERMS, causes_title, explanation_facts
from attncheck.reporting.document import (
    Cell,
    Column,
    Document,
    Facts,
    Note,
    Row,
    Section,
    Table,
    Verdict,
    columns,
    row,
    table_section,
)
from attncheck.reporting.measurement_document import environment_lines, profiles, share_cell
from attncheck.reporting.record_text import (
    JUDGED,
    STATUS_LOOKS,
    bound_shares,
    footnote,
    gradient_shares,
    largest_share,
    missed_faults,
    refusal_lines,
    verdict_remarks,
    visible_faults,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


_COLUMNS = (
    Column("question", words=True),
    Column("verdict", words=True),
    Column("out/bound"),
    Column("LSE/bound", spare=1),
)
_OF_GRADIENTS = Column("grad/bound")
_PROBLEM = Column("problem", words=True, wrap=True)
_WHAT = Column("what it is", words=True, wrap=True)
_OPTION = "--question"
# Options that choose or show questions, and are dropped from the command that repeats one.
_NOT_REPEATED = {"--last-failed", "--watch", "-q", "--quiet", "-v", "--verbose"}
_FAILING = FAILED_STATUSES | {"flaky"}  # an answer that failed once and then not is no pass
_REMEDY = (
    "If the kernel is not written for such sizes, let it raise ValueError or NotImplementedError; "
    "--head-dim asks only the sizes that it takes."
)
_READING = (
    "out/bound, LSE/bound, grad/bound: largest error ÷ its bound, of gradients the largest of all; "
    "above 1, or nan, is proof of a fault."
)
# What a gate asks in its stages bounds, memory and determinism, and no question of a check. Of
# strides, a check tries two kinds while it detects what the kernel takes.
_LEFT_TO_GATE = (
    "left to attncheck gate: scale ≤ 0, most kinds of strides, offsets beyond 2³¹, NaN in hidden "
    "keys, determinism"
)
# Limits that keep verdict, cause, problem and reproducing command on a first screen of 24 lines.
_MOST_CAUSES = 3
_MOST_LIKELY = 3
_MOST_ROWS = 5
_MOST_REFUSALS = 3


def check_document(report: Report) -> Document:
    """Return the page of a check: verdict, cause and problem; every question; the worst in full."""
    return _document(report, report.command, report.records)


def check_summary(
    report: Report, command: str, *, quiet: bool = False, verbose: bool = False
) -> Document:
    """Return ``report`` for a terminal: verdict, cause and problem, and questions not passed.

    Args:
        command: The command line as typed, with its folders, since the reader typed it.
        quiet: Whether to show only verdict, cause and problem.
        verbose: Whether to show every question, and the worst in full.
    """
    odd = [one for one in report.records if one.status not in {"pass", "unsupported"}]
    shown = report.records if verbose else () if quiet else odd[:_MOST_ROWS]
    page = _document(report, command, shown, remarks=verbose)
    if not verbose:
        more = len(odd) - _MOST_ROWS
        notes = [f"and {more:,} more: -v shows every question, and the worst in full"][: more > 0]
        notes += refusal_lines(report.records, _MOST_REFUSALS)
        if check_outcome(report) == "pass":
            notes += [note for note in page.notes if note != _READING]
        page = replace(page, notes=() if quiet else (*notes, *page.facts))
    return replace(page, command="", facts=(), verdict_first=True)


def failures_document(report: Report, repeat: Callable[[Record], str]) -> Document:
    """Return verdict, causes and problems alone, for the text of a failed test.

    Args:
        repeat: (Record of a failure) → the command that repeats it; empty if there is none.
    """
    sections = tuple(_causes(report, repeat))
    verdict = _sentence(report)
    return Document(title="", verdict=verdict, command="", sections=sections, verdict_first=True)


def _repeating(command: str) -> Callable[[Record], str]:
    """Return a function of a failure which returns ``command`` for its question alone."""

    def repeat(record: Record) -> str:
        words = [word for word in shlex.split(command) if word not in _NOT_REPEATED]
        diagnosis = record.diagnosis
        after = msgspec.UNSET if diagnosis is msgspec.UNSET else diagnosis.after
        if after == "":  # it fails only after other calls, and nobody knows after which
            return ""
        # Only the question that failed, so that reproducing it does not wait for the others.
        for name in (record.variant,) if after is msgspec.UNSET else (after, record.variant):
            words += [] if name in words else [_OPTION, name]
        return shlex.join(words)

    return repeat


def _document(
    report: Report, command: str, shown: Sequence[Record], *, remarks: bool = True
) -> Document:
    """Return the page with rows of ``shown``; ``remarks`` adds reasons and the worst in full."""
    worst = worst_record(report.records)
    dtypes = dict.fromkeys(problem_of(record).dtype for record in shown)
    sections = _causes(report, _repeating(command))
    sections += [
        check_section([r for r in shown if problem_of(r).dtype == dtype], remarks=remarks)
        for dtype in dtypes
    ]
    notes: list[str] = [_READING] if shown else []
    if worst is not None and remarks:
        sections += explanation(worst).sections
    elif worst is None:
        notes += [f"judged as {one}" for one in profiles(report.records, brief=not remarks)]
        notes += [visible] if (visible := visible_faults(report.records)) else []
        if check_outcome(report) == "pass" and not _is_chosen_by_hand(report):
            notes.append(_LEFT_TO_GATE)
    notes += refusal_lines(report.records) if remarks else []
    kernels = [" · ".join(filter(None, one)) for one in report.kernels.items()]
    if report.claims is not msgspec.UNSET:
        kernels += [line for lines in report.claims.values() for line in lines]
    return Document(
        title="attncheck check",
        verdict=_sentence(report),
        command=command,
        facts=(*environment_lines(report), *kernels),
        sections=tuple(sections),
        notes=tuple(notes),
    )


def _causes(report: Report, repeat: Callable[[Record], str]) -> list[Section]:
    """Return a section for each cause: the problem that shows it and how to reproduce it."""
    every = [record for record in report.records if record.status in _FAILING]
    # A failure beyond the kernel's claims is a separate finding, which the verdict mentions.
    failed = [record for record in every if record.unclaimed is msgspec.UNSET] or every
    if not failed:
        missed, refused = _blind(report), _all_refused(report)
        notes = [Note(missed, "bad")] if missed else [Note(refused)] if refused else []
        return [Section("", tuple(notes))] if notes else []
    groups = group_by_cause(failed)
    causes = [(group, min((failed[i] for i in group.members), key=_rank)) for group in groups]
    causes.sort(key=lambda one: _rank(one[1]))
    sections: list[Section] = []
    for group, record in causes[:_MOST_CAUSES]:
        facts = [("cause", group.cause)] if group.known else [*explanation_facts(record.diagnosis)]
        facts = facts[: 1 if sections else _MOST_LIKELY] or [("cause", f"not known: {group.cause}")]
        problem = f"{record.variant} · {problem_of(record).dtype} {_full_problem(record)}"
        facts += [("problem", problem), ("shown by", footnote(record))]
        if record.judgement is None:  # a kernel that raised or died has no numbers
            facts = [("cause", f"{record.status}: {footnote(record)}"), ("problem", problem)]
        facts += [("failures", f"{len(group.members)} of {len(failed)}")] if causes[1:] else []
        command = repeat(record)
        again = [Note(f"Reproduce: {command}", "plain", whole=True)] if command else []
        title = "" if sections else causes_title(groups)
        sections.append(Section(title, (Facts(tuple(facts)), *again)))
    last: list[Note] = []
    others = [group for group, _ in causes[_MOST_CAUSES:]]
    if others:
        count = number_text.plural(sum(len(group.members) for group in others), "failure")
        last.append(Note(f"and {number_text.plural(len(others), 'more kind')} of failure, {count}"))
    # An error mostly means a size that the kernel does not support.
    raises = any(record.status == "error" for _, record in causes[:_MOST_CAUSES])
    last += [Note(_REMEDY)] if raises else []
    return [*sections, Section("", tuple(last))] if last else sections


def check_section(records: Sequence[Record], *, remarks: bool = True) -> Section:
    """Return the answers in one dtype, a row each; questions not supported are left out."""
    rows = []
    backward = any(map(gradient_shares, records))
    for record in records:
        if record.status == "unsupported":
            continue
        each = bound_shares(record)
        shares = [each.pop("out", None), each.pop("lse", None)]
        shares += [largest_share(each.values())] if backward else []
        remark = footnote(record) if remarks and record.status != "pass" else ""
        look = STATUS_LOOKS[record.status]
        cells = (*map(share_cell, shares), Cell(_problem(record), "dim"))
        notes = (Note(remark, look),) if remark else ()
        rows.append(Row((Cell(record.variant), Cell(record.status, look), *cells), notes))
    shown = (*_COLUMNS, *([_OF_GRADIENTS] if backward else []), _PROBLEM)
    return Section(problem_of(records[0]).dtype, (Table(shown, tuple(rows)),) if rows else ())


def worst_record(records: Iterable[Record]) -> Record | None:
    """Return the worst failure: by the order of the rules, then by its size; None if none."""
    return min((one for one in records if one.status in _FAILING), key=_rank, default=None)


def _rank(record: Record) -> tuple[bool, int, float]:
    judgement = record.judgement
    is_unclaimed = record.unclaimed is not msgspec.UNSET
    # The kernel raised or died, which tells less of the fault than any wrong number.
    if judgement is None:
        return is_unclaimed, len(RULE_ORDER), 0.0
    if judgement.rule == "structure":  # it names the wrong row and key, so it comes first
        return is_unclaimed, -1, 0.0
    shares = [judgement.out_over_bound, judgement.lse_over_bound]
    shares += gradient_shares(record).values()
    return is_unclaimed, RULE_ORDER.index(judgement.rule), -max(share or 0.0 for share in shares)


def check_outcome(report: Report) -> str:
    """Return ``fail``, ``in doubt`` (oracles disagree), ``pass`` or ``untested`` (no answer)."""
    if worst_record(report.records) is not None or _blind(report):
        return "fail"
    if any(r.status in UNTRUSTED_STATUSES for r in report.records):
        return "in doubt"
    return "pass" if any(r.status in JUDGED for r in report.records) else "untested"


def _full_problem(record: Record) -> str:
    """Return the problem with the parameters of its mods, for which the table has no room."""
    problem = problem_of(record)
    return _problem(record, (*problem.mods, *["backward"] * problem.backward))


def _problem(record: Record, mods: Sequence[str] = ()) -> str:
    problem = problem_of(record)
    parts = [*(mods or problem.mod_names), problem.shape, f"H{problem.head_counts}"]
    parts += [problem.distribution] if record.case.get("question") == "compare" else []
    parts += [] if problem.has_usual_scale else [f"scale {problem.scale:.3g}"]
    return " ".join(parts)


def _sentence(report: Report) -> Verdict:
    name = next(iter(report.kernels), "")
    unclaimed = unclaimed_findings(report.records)
    # Failures beyond the claims are counted apart; a question asked by name may also pass there.
    claimed = [
        one
        for one in report.records
        if one.unclaimed is msgspec.UNSET or one.status not in FAILED_STATUSES
    ]
    count = Counter[str](record.status for record in claimed)
    failed, judged = (
        sum(count[status] for status in statuses) for statuses in (_FAILING, _FAILING | JUDGED)
    )
    questions = number_text.plural(judged, "question")
    odd = [f"{count[status]} {status}" for status in ("warn", "inconclusive") if count[status]]
    odd += [f"{count['unsupported']} not supported"] if count["unsupported"] else []
    odd += [report.incomplete] if report.incomplete else []
    rest = "".join(f", {part}" for part in odd)
    rest += f"; its {report.deviation}" if report.deviation else ""
    match check_outcome(report):
        # Three ways to fail: a wrong answer, a wrong answer beyond the claims instead of a
        # refusal, or questions that could not have seen a fault.
        case "fail" if failed:
            besides = "".join(f"; besides {line}" for line in unclaimed)
            return Verdict("FAIL", f"{name}: {failed} of {questions} failed{rest}{besides}", "bad")
        case "fail" if unclaimed:
            within = f"; {questions} passed within what it supports{rest}" if judged else ""
            return Verdict("FAIL", f"{name}: {'; '.join(unclaimed)}{within}", "bad")
        case "fail":
            blind = f"{questions} passed, but none of them could have seen a whole class of fault"
            return Verdict("FAIL", f"{name}: {blind}{rest}", "bad")
        case "in doubt":
            doubt = "the oracles disagree, so nothing is said of the kernel"
            return Verdict("IN DOUBT", f"{name}: {doubt}{rest}", "bad")
        case "pass":
            return Verdict("PASS", f"{name}: {questions}{_unusual_dtypes(report)}{rest}", "good")
    return Verdict("NOTHING TESTED", f"{name}: it supports none of the questions{rest}", "notable")


def _unusual_dtypes(report: Report) -> str:
    """Return `` in fp32`` if chosen questions were asked in dtypes that nobody typed; else ""."""
    dtypes = dict.fromkeys(problem_of(one).dtype for one in report.records if one.status in JUDGED)
    typed = any(word.partition("=")[0] == "--dtype" for word in shlex.split(report.command))
    if typed or not _is_chosen_by_hand(report) or set(dtypes) <= {DEFAULT_DTYPE}:
        return ""
    return f" in {', '.join(dtypes)}"


def _blind(report: Report) -> str:
    """Return a note on faults that no question would have noticed; "" if not all were asked."""
    # Questions that were chosen by hand need not see every fault.
    if _is_chosen_by_hand(report):
        return ""
    missed = missed_faults([one for one in report.records if one.unclaimed is msgspec.UNSET])
    return f"insensitive: no question would have noticed {', or '.join(missed)}" if missed else ""


def _all_refused(report: Report) -> str:
    """Return a note on what was asked of a kernel that refused it all; "" if any was answered."""
    # A question that was chosen by hand may be refused for what it is about, not for its sizes.
    if check_outcome(report) != "untested" or _is_chosen_by_hand(report) or not report.records:
        return ""
    problems = [problem_of(record) for record in report.records]
    dims = ", ".join(map(str, sorted({problem.head_dim for problem in problems})))
    dtypes = ", ".join(dict.fromkeys(problem.dtype for problem in problems))
    reasons = {record.reason for record in report.records}
    why = f": {reasons.pop().rstrip('.')}" if len(reasons) == 1 else ""
    return (
        f"The kernel refused head_dim {dims} in {dtypes}{why}. If it takes others, name them: "
        "--head-dim N, --dtype NAME."
    )


def _is_chosen_by_hand(report: Report) -> bool:
    words = shlex.split(report.command)
    return any(word.partition("=")[0] in {_OPTION, "--last-failed"} for word in words)


def explanation(record: Record) -> Document:
    """Return one Record in full: its worst element, the allowance there, and its parts."""
    return Document(title=_record_title(record), sections=tuple(_sections_of(record)))


def _sections_of(record: Record) -> Iterator[Section]:
    judgement, reason = record.judgement, footnote(record)
    status = f"{record.status}: {reason}" if reason else record.status
    blocks: list[Note | Facts] = [Note(status, STATUS_LOOKS[record.status])]
    blocks += [Note(f"└ {one.text}", one.look) for one in verdict_remarks(judgement)]
    likely = tuple(explanation_facts(record.diagnosis))
    blocks += [Facts(likely)] if likely else []
    # A single frame is already in the reason.
    frames = () if record.frames is msgspec.UNSET else record.frames
    names = itertools.chain(["raised in"], itertools.repeat(""))
    blocks += [Facts(tuple(zip(names, frames, strict=False)))] if frames[1:] else []
    yield Section(_record_title(record), tuple(blocks))
    if judgement is None:
        return
    if judgement.worst:
        yield _worst(judgement, judgement.worst)
        yield from _budget(judgement.worst)
    if judgement.arithmetic:  # a relation has no bounds, and so no arithmetic
        yield _shares(record, judgement)
        yield from _gradients(record)
        if judgement.precision:
            yield _precision(judgement.precision)
        lines = [f"judged as {judgement.arithmetic}", visible_faults([record])]
        yield Section("", tuple(Note(line) for line in lines if line))


def _record_title(record: Record) -> str:
    problem = problem_of(record)
    heads = f"{record.heads} {problem.head_counts}" if record.heads else ""
    parts = [record.kernel, record.variant, heads, problem.dtype, problem.shape]
    parts += [problem.distribution, f"seed {problem.seed}", problem.backward_too]
    return " · ".join(part for part in parts if part)


def _worst(judgement: Judgement, worst: Worst) -> Section:
    """Return the element that shows a failure, else that with the largest error ÷ bound."""
    shows_failure = judgement.status == "fail" and judgement.rule != "precision"
    title = "the element that shows it" if shows_failure else "the largest error ÷ bound"
    error = abs(worst.got - worst.exact)
    share = f", {share_text(error / worst.allowance)} × what is allowed" if worst.allowance else ""
    # Without an allowance, two runs that must agree have to give the same bits.
    exactly = ", bit for bit" if judgement.rule == "relation" and not worst.allowance else ""
    what = "rows" if worst.tensor == "lse" else "elements"
    pairs = {
        "in": worst.tile,
        "got": f"{worst.got:.9g}",
        "should be": f"{worst.exact:.9g}",
        "error": number_text.scientific(error) + share,
        "allowed": number_text.scientific(worst.allowance) + exactly,
        "wrong": f"{judgement.wrong} of {judgement.compared} {what}" if judgement.compared else "",
    }
    element = f"{worst.tensor}[{number_text.element(worst)}] ({', '.join(AXES[worst.tensor])})"
    facts = Facts(tuple((name, text) for name, text in pairs.items() if text))
    return Section(f"{title}: {element}", (facts,))


def _budget(worst: Worst) -> list[Section]:
    """Return the parts of the allowance of ``worst``, the largest first."""
    if not worst.budget:
        return []
    total = sum(worst.budget.values())
    rows = (
        row(
            name,
            number_text.scientific(part),
            _percent_text(part / total) if total > 0 else "",
            Cell(TERMS.get(name, ""), "dim"),
        )
        for name, part in sorted(worst.budget.items(), key=lambda item: -item[1])
    )
    title = f"what is allowed there, {number_text.scientific(worst.allowance)}"
    return [table_section(title, (*columns(["part"], ["size", "of all"]), _WHAT), rows)]


def _percent_text(share: float) -> str:
    least = 1e-4  # smaller parts are shown as "<0.01 %", since their exact size does not matter
    return f"{number_text.percent(share)} %" if share == 0 or share >= least else "<0.01 %"


def _shares(record: Record, judgement: Judgement) -> Section:
    """Return the largest error ÷ bound, over the whole tensor and over sampled rows."""
    rows = f"{judgement.rows - judgement.rows_unbounded} rows"
    bounds = bound_shares(record)
    shares = {
        f"bound (a proof), {rows}": (bounds.get("out"), bounds.get("lse")),
        f"probable bound, {judgement.rows_sampled} rows": (
            judgement.out_over_probable,
            judgement.lse_over_probable,
        ),
    }
    table = (row(name, *map(share_cell, pair)) for name, pair in shares.items())
    return table_section("largest error ÷", columns([""], ["out", "LSE"]), table)


def _gradients(record: Record) -> list[Section]:
    headings = columns([""], ["÷ bound", "RMSE", "×floor", "×ideal", "max error", "at"])
    shares = bound_shares(record)
    rows = []
    for name, errors in gradients_of(record).items():
        texts = (
            number_text.scientific(errors.rmse),
            number_text.ratio(errors.rmse, errors.floor_rmse),
            number_text.ratio(errors.rmse, errors.ideal_rmse),
            number_text.scientific(errors.max_error),
            number_text.place(errors.max_at, name),
        )
        rows.append(row(name, share_cell(shares.get(name)), *texts))
    return [table_section("gradients", headings, rows)] if rows else []


def _precision(precision: Precision) -> Section:
    allowed = precision.residual_allowed
    numbers = {
        "z": ("rms error ÷ predicted, largest over heads", precision.z),
        "spread": ("RMSE ÷ the worst of an ensemble of ideal kernels", precision.spread),
        "residual": (
            "distance from the emulation at its own tiling ÷ that one's error"
            + ("" if allowed is msgspec.UNSET else ", and the largest allowed"),
            precision.residual,
        ),
        "bias": ("mean error ÷ RMSE", precision.bias),
        "slope": ("of the error on the exact result", precision.slope),
        "ulp": ("median and 99th percentile of the error, in units of out", None),
        "frobenius": ("‖error‖ ÷ ‖exact‖", precision.frobenius),
    }
    rows = []
    for name, (meaning, number) in numbers.items():
        text = number_text.NOTHING if number is None else f"{number:.3g}"
        if name == "ulp":
            text = f"{precision.ulp_p50:.2g}, {precision.ulp_p99:.2g}"
        if name == "residual" and allowed is not msgspec.UNSET:
            text = f"{text}, {allowed:.2g}"
        rows.append(row(name, text, Cell(meaning, "dim")))
    return table_section("precision", (*columns(["", ""]), _WHAT), rows)

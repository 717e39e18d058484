"""Determines by trials what a plain function claims to take, since it declares nothing.

A user's function takes some sizes and dtypes, and does not say which. Aspects that not all callers
would expect (``NOT_CLAIMED``) are tried first, on a tiny problem each. If it refuses or raises, no
question about that aspect is asked. If it is silently wrong, that is one finding, and all other
questions stay within what it gets right, so that sizes it was not written for hide no fault.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from attncheck.cases.check_cases import CheckCase, call_cases, check_cases, crossed_cases
from attncheck.core.errors import UsageError
from attncheck.core.files import write_texts
from attncheck.core.judgement import Unclaimed
from attncheck.inputs.problem import Case, Problem
from attncheck.records.failure_causes import without_place
from attncheck.records.record import DEFAULT_DTYPE
from attncheck.subjects.capabilities.capability_table import ANY, Capabilities, Override, When
from attncheck.subjects.capabilities.subject import Subject
from attncheck.subjects.conventions.convention import Convention, ConventionOptions
from attncheck.subjects.conventions.declarations import CONVENTIONS
from attncheck.subjects.terms import Terms
from attncheck.verify.capability_detection import (
    DetectedCapabilities,
    Detection,
    Trial,
    TrialResult,
    trials,
)
from attncheck.verify.deaths import MOST_DEATHS
from attncheck.verify.environment import environment
from attncheck.verify.isolated import RemoteSubject
from attncheck.verify.kernel_hosts import KernelHost, executor_of, on_terms
from attncheck.verify.kernel_server import loaded_files
from attncheck.verify.proposed_table import propose_table
from attncheck.verify.question_fit import COMPARE, question_problem, taken_problem

CLAIMED = {
    "convention": "one problem of 64 or 128 keys, which fits every tile: else it is no kernel",
    "lengths": "callers have any length: a last tile is masked, or the length refused",
    "batch": "a call has as many sequences as it has",
    "masks": "a parameter is a promise: a causal flag, a mask, a score mod, a scale",
}
"""Aspects of a problem that any attention function claims, with the reason: an exception there is a
failure, unless it is a clean refusal."""

NOT_CLAIMED = {
    "dtypes": "most kernels are written for one or two formats",
    "head_dims": "tiles are powers of two, and values as wide as keys",
    "gqa": "without a flag for it nobody says that heads may share keys",
    "rectangular": "in self-attention queries and keys are equally many",
    "causal": "where lengths differ, conventions disagree on where the diagonal ends",
    "backward": "a forward alone is a kernel too",
    "slopes": "most have a slope for each head, the same in all sequences",
    "attn_mask": "many take boolean masks alone",
    "strides": "most callers have contiguous tensors",
}
"""Aspects that a function claims only where it is right: an exception there is no failure, and a
silently wrong answer is one finding."""

CLAIM_TRIALS = 40  # Approximate number of trials, for progress bars.

_CACHE_FORMAT = 10  # Part of the cache key: a new number invalidates what older versions stored.
_ODD_LENGTH = 77  # No multiple of any tile.
_ODD_TRIAL = f"lengths-{_ODD_LENGTH}"
_USUAL_DTYPES = ("fp32", "fp16", "bf16")


class Claims(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Results of the trials of a plain function."""

    conventions: tuple[str, ...]  # conventions that were tried, the likeliest first
    convention: str  # the one by which it was right; else the likeliest
    others: tuple[str, ...] = ()  # further conventions by which it was right
    lse: str = ""  # base of its LSE's logarithm, if not the convention's
    causal: str = ""  # causal alignment at unequal lengths, if not the convention's
    # The Problem that all trials are changes of, as JSON; None if it takes none.
    base: dict[str, Any] | None = None
    right: bool = False  # whether it was right on ``base``
    tried: tuple[TrialResult, ...] = ()  # in the order of the trials
    # If it is right by none of several conventions, the result by each.
    readings: tuple[TrialResult, ...] = ()
    timeout: str = ""  # the message if a kernel did not answer even the first Problem

    def terms(
        self,
        dtypes: Iterable[str] = (),
        head_dims: Iterable[int] = (),
        names: Iterable[str] = (),
        problems: Iterable[Problem] = (),
    ) -> Terms:
        """Return the terms on which the function is asked.

        Args:
            dtypes: Dtypes that the user requests by name, and so claims.
            head_dims: Head dims that the user requests, and so claims.
            names: Names of questions beyond its claims that the user requests.
            problems: Problems that the user requests; they are never refused for its claims.
        """
        table, limits = self._table(), self.limits()
        terms = Terms(convention=self.convention, causal=self.causal)
        boolean = table is not None and table.scores == _NO_SCORES
        if table is None or not (limits or boolean or self._is_forward_alone()):
            return terms
        unclaimed = (each.case.problem for each in self.unclaimed(names))
        admitted = tuple(each.id for each in (*unclaimed, *problems))
        if not limits:
            # Features that it lacks, like a parameter: no limits, of which its author is told.
            lacking = Capabilities(entry="", backward=table.backward, scores=table.scores)
            lacks = "takes boolean masks alone" if boolean else "gives no gradients"
            return replace(terms, table=lacking, limits=f"not asked: it {lacks}", admitted=admitted)
        dims = table.head_dims
        table = replace(
            table,
            dtypes=(*(table.dtypes or ()), *dtypes),
            head_dims=(*dims, *head_dims) if isinstance(dims, tuple) else dims,
        )
        beside = "; boolean masks alone" if boolean else ""
        return replace(
            terms, table=table, limits=f"not asked: it takes {limits}{beside}", admitted=admitted
        )

    def dtypes(self) -> tuple[str, ...]:
        """Return those of fp32, fp16 and bf16 that it is right in; all if it was not tried.

        If there are none, it takes fp8 alone.
        """
        table = self._table()
        right = table.dtypes if table and table.dtypes else _USUAL_DTYPES
        return tuple(name for name in right if name in _USUAL_DTYPES) or right

    def within(self, problem: Problem) -> bool:
        """Return whether it was right on such gradients and slopes by sequence, if it has any.

        Slopes in a mask or a score mod are not tried by themselves, and are as right as that.
        """
        accepted = {(one.aspect, one.what) for one in self.tried if one.verdict == "takes"}
        needed = set()
        if problem.backward:
            needed.add(("backward", "out and LSE" if problem.dlse else "out"))
        if problem.backward and problem.sink:
            needed.add(("backward", "sinks"))
        by_sequence = any(part.name == "alibi_by_sequence" for part in problem.score.walk())
        return needed <= accepted and not (by_sequence and self._failure_on_sequence_slopes())

    def head_dims(self) -> tuple[int, ...]:
        """Return the head_dims, common to keys and values, that it is right in; empty for any."""
        table = self._table()
        if table is None or not isinstance(table.head_dims, tuple):
            return ()
        return tuple(dim for dim in table.head_dims if isinstance(dim, int))

    def limits(self) -> str:
        """Return what it takes, in one line; empty if it takes all that was tried."""
        table = self._table()
        if table is None:
            return ""
        parts = []
        if set(_USUAL_DTYPES) - set(table.dtypes or ()):
            parts.append(", ".join(self.dtypes()))
        if table.head_dims != ANY:
            tried = [one.what for one in self.tried if one.aspect == "head_dims"]
            alike = [what for what in tried if "/" not in what]
            if len(self.head_dims()) < len(alike):
                parts.append(f"head_dim {', '.join(map(str, self.head_dims()))}")
            if not any(isinstance(dims, tuple) for dims in table.head_dims or ()):
                parts.append("values as wide as keys")
        square = table.rectangular is False
        facts = {
            f"lengths of multiples of {table.length_multiple}": table.length_multiple,
            f"at most {table.max_query} queries": table.max_query,
            f"at most {table.max_rows} rows of all heads that share a key head": table.max_rows,
            "as many queries as keys": square,
            "causal of as many queries as keys": table.override and not square,
            "as many key heads as query heads": table.gqa is False,
        }
        return "; ".join([*parts, *(fact for fact, holds in facts.items() if holds)])

    def deviation(self) -> str:
        """Return, briefly, what is otherwise than in its convention, and tested as it is; or ""."""
        if not self.causal:
            return ""
        corner = self.causal.replace("_", " ")
        return f"causal masks end at the {corner}, unlike those of {self.convention}"

    def lines(self) -> list[str]:
        """Return messages for its author about the terms it is asked on; none if it takes all."""
        lines = []
        if self.others:
            names = " and as ".join((self.convention, *self.others))
            lines.append(
                f"right when called as {names}: called as {self.convention} here; --convention "
                f"{self.others[0]} changes that"
            )
        elif self.right and self.convention != self.conventions[0]:
            lines.append(
                f"called as {self.convention}, the only convention with which it is right; "
                f"--convention {self.conventions[0]} changes that"
            )
        if self.readings:
            readings = "; ".join(
                f"as {one.what} {one.verdict}: {one.reason}" for one in self.readings
            )
            other = next(name for name in self.conventions if name != self.convention)
            lines.append(
                f"wrong with every convention ({readings}): called as {self.convention} here; "
                f"--convention {other} changes that"
            )
        if self.causal:
            own, other = _CORNERS[self.causal], _CORNERS[_OTHER_CORNER[self.causal]]
            lines.append(
                f"where lengths differ, its causal mask is aligned {own}; the {self.convention} "
                f"convention expects it {other}. It is tested as it is; causal = "
                f'"{self.causal}" in the configuration declares that'
            )
        raises = [one for one in self.tried if one.aspect == "backward" and one.verdict == "raises"]
        if raises and raises[0].what == "out":  # A forward alone is a kernel too.
            lines.append(f"gradients are not tested: it raises {raises[0].reason}")
        if limits := self.limits():
            # Deaths are findings of their own, and masks are none of these limits.
            raised = [
                one
                for one in self.tried
                if one.verdict == "raises" and not one.fatal and one.aspect != "attn_mask"
            ]
            reasons = {without_place(one.reason).partition(":")[0] for one in raised}
            # A gradient that is missing is no exception, and its reason no name.
            errors = sorted(reason for reason in reasons if " " not in reason)
            beyond = f"; beyond that it raises {', '.join(errors)}" if errors else ""
            lines.append(
                f"supports {limits}: only this is tested (`attncheck init` writes it into the "
                f"configuration){beyond}"
            )
        return lines

    def unclaimed(
        self,
        names: Iterable[str] = (),
        *,
        dtypes: Iterable[str] = (),
        head_dims: Iterable[int] = (),
    ) -> Iterator[CheckCase]:
        """Yield the trials that it got wrong, or died of, as questions; none if it is never right.

        Args:
            names: Names of trials that are included whatever their result, to ask a mended kernel
                again.
            dtypes: Dtypes that the user requests by name: what is requested is claimed, and its
                failure looked into like any other.
            head_dims: Head dims that the user requests, and so claims.
        """
        requested = {*(("dtypes", one) for one in dtypes)}
        requested |= {("head_dims", str(dim)) for dim in head_dims}
        named = {name.removeprefix("decode-") for name in names}
        base = self._base()
        if base is None or not self.right:
            return
        tried = {(one.aspect, one.what): one for one in self._results(base)}
        for trial in _trials(base, self.convention, "cuda"):
            one = tried.get((trial.aspect, trial.what))
            claimed = trial.aspect in CLAIMED
            name = f"{trial.aspect}-{trial.what}".replace(" ", "-").replace("<", "below")
            name = name.replace(">", "above").replace(",", "")
            wrong = one is not None and one.verdict == "wrong"
            if trial.aspect == "slopes":  # where those of heads are wrong too, questions show it
                own = self._failure_on_sequence_slopes()
                wrong = trial.what == "2 sequences" and own == "wrong"
            wrong = wrong or (one is not None and bool(one.fatal))
            if wrong or name in named or (one and claimed and one.verdict == "raises"):
                question = CheckCase(
                    name=name,
                    summary=f"{trial.aspect} {trial.what}, which it was not found to take",
                    case=Case(problem=trial.of(base), question=trial.question or COMPARE),
                    unclaimed=None
                    if (trial.aspect, trial.what) in requested
                    else Unclaimed(aspect=trial.aspect, what=trial.what),
                )
                yield question
                if question.name == _ODD_TRIAL:
                    # The probe ``decode`` names the keys of a last tile that is not masked.
                    problem = question_problem("decode", question.case.problem)
                    case = Case(problem=problem, question="decode", parameters={"round": 0})
                    yield dataclasses.replace(question, name=f"decode-{_ODD_TRIAL}", case=case)

    def _failure_on_sequence_slopes(self) -> str:
        """Return the verdict on slopes of each sequence if they are a limit of its own, else ""."""
        verdicts = {one.what: one.verdict for one in self.tried if one.aspect == "slopes"}
        # A kernel that is wrong on those of heads too has another fault, which its questions show.
        both = [verdicts.get(what) == "wrong" for what in ("each head", "2 sequences")]
        verdict = verdicts.get("2 sequences", "takes")
        return "" if all(both) or verdict == "takes" else verdict

    def _base(self) -> Problem | None:
        return None if self.base is None else Problem.from_json(self.base)

    def _table(self) -> Capabilities | None:
        """Return the table of what it is right on; None if it takes nothing."""
        base = self._base()
        if base is None:
            return None
        # Wrong answers count as refusals and are asked separately, unless it is right nowhere.
        tried = tuple(
            replace(one, verdict="raises") if one.verdict == "wrong" and self.right else one
            for one in self._results(base)
        )
        detected = DetectedCapabilities(
            convention=self.convention,
            options=ConventionOptions(),
            base=base,
            exposes_lse=False,
            tried=tried,
        )
        table, _ = propose_table(detected, "")
        # Taking one key head for all heads may be mere broadcasting.
        heads = detected.of("gqa")
        one_row = [one for one in heads if one.what.endswith(_ONE_ROW)]
        shared = all(one.verdict == "takes" for one in one_row or heads)
        causal = detected.of("causal")
        square = Override(when=When(mask=("causal", "causal_bottom_right")), rectangular=False)
        # One that takes any short length and refuses longer ones does not need multiples.
        lengths = {int(one.what): one.verdict == "takes" for one in detected.of("lengths")}
        short = [n for n in (*lengths, base.query) if lengths.get(n, True)]
        long_kv = detected.takes("rectangular", "query < kv")
        float_masks = {one.verdict for one in detected.of("attn_mask")}
        if long_kv and max(short) < _ODD_LENGTH and all(lengths.get(n, True) for n in (1, 16, 32)):
            table = replace(table, length_multiple=None, max_query=max(short))
        square_only = causal and causal[-1].verdict != "takes" and table.rectangular is not False
        return replace(
            table,
            gqa=shared if heads else None,
            max_query=None if one_row and shared else table.max_query,
            max_rows=(table.max_query or base.query) if one_row and shared else None,
            lse=None,
            empty_row=None,
            promises=None,
            scores=_NO_SCORES if float_masks & {"refuses", "raises"} else table.scores,
            override=(square,) if square_only else (),
            backward=False if self._is_forward_alone() else None,
        )

    def _results(self, base: Problem) -> tuple[TrialResult, ...]:
        """Return the trials' results, in which a fault of all longer lengths is no limit.

        A kernel that is wrong even at twice the length it was right at, a multiple of the same
        tiles, has a fault from the second tile on, and is not made for multiples or for equal
        lengths: wrong longer lengths count as taken.
        """
        wrong = {(one.aspect, one.what) for one in self.tried if one.verdict == "wrong"}
        if ("lengths", str(2 * base.query)) not in wrong:
            return self.tried
        sizes = {
            (aspect, what)
            for aspect, what in wrong
            if aspect in {"rectangular", "causal"}
            or (aspect == "lengths" and int(what) > base.query)
        }
        return tuple(
            replace(one, verdict="takes") if (one.aspect, one.what) in sizes else one
            for one in self.tried
        )

    def lse_loss_refusal(self) -> str:
        """Return why it refuses gradients of a loss of LSE; empty if it does not."""
        tried = (x for x in self.tried if (x.aspect, x.what) == ("backward", "out and LSE"))
        return next((one.reason for one in tried if one.verdict == "refuses"), "")

    def _is_forward_alone(self) -> bool:
        """Return whether it refuses gradients; one that raises may be meant to have them."""
        return any(
            (one.aspect, one.what, one.verdict) == ("backward", "out", "refuses")
            for one in self.tried
        )


# ------------------------------------------------------------------ trials


def hold_to_claims(
    host: KernelHost,
    *,
    kernel: str,
    device: str,
    advance: Callable[[str], None] = lambda _: None,
    expect: Callable[[Sequence[Problem], Terms], None] = lambda *_: None,
    asks_beyond: bool = False,
    **options: Any,
) -> Claims | None:
    """Try a host's kernel if it is a plain function, and put it on terms within its claims.

    Args:
        host: The kernel's host, whose subject is replaced.
        kernel: As in ``find_claims``, whose result is returned.
        device: ``cpu`` or ``cuda``.
        advance: Called before each question.
        expect: Called with the Problems that will be tried, and their terms.
        asks_beyond: Whether the caller also asks, and reports, what it gets wrong beyond its
            claims. If not, a kernel with such faults is put on no limits, lest it pass in silence.
        options: What the user requests by name, as in ``Claims.terms``.
    """
    claims = find_claims(host.subject, kernel=kernel, device=device, advance=advance, expect=expect)
    # A kernel that timed out would not answer this either.
    if claims is not None and not claims.timeout:
        if not asks_beyond and next(claims.unclaimed(), None) is not None:
            claims = replace(claims, base=None, tried=())
        host.subject = on_terms(host.subject, claims.terms(**options))
    return claims


def hold_to_convention(host: KernelHost, *, kernel: str, device: str) -> str:
    """Put a plain function on the convention that it follows, without limits to its claims.

    This is for callers that ask beyond claims; arguments are as in ``hold_to_claims``.

    Returns:
        The convention; empty for any other kernel, and if it did not answer.
    """
    claims = find_claims(host.subject, kernel=kernel, device=device)
    if claims is None or claims.timeout:
        return ""
    terms = Terms(convention=claims.convention, causal=claims.causal)
    host.subject = on_terms(host.subject, terms)
    return claims.convention


def find_claims(
    subject: Subject,
    *,
    kernel: str,
    device: str,
    advance: Callable[[str], None] = lambda _: None,
    expect: Callable[[Sequence[Problem], Terms], None] = lambda *_: None,
) -> Claims | None:
    """Try a plain function on some thirty tiny Problems, or return the cached claims of its files.

    None for any other kernel, which declares its capabilities.

    Args:
        subject: The kernel; call ``on_terms`` afterwards to choose its convention.
        advance: Called before each question; an exception in it ends the search.
        expect: As in ``hold_to_claims``.
    """
    if not subject.conventions:
        return None
    path = _cache_file(kernel, subject.conventions, device)
    cached = _load_claims(path)
    if cached is not None:
        return cached
    detection = Detection(
        lambda convention, options: on_terms(
            subject, Terms(convention=convention, lse=options.lse, causal=options.causal)
        ),
        ConventionOptions(),
        device,
        advance,
        executor_of(subject),
        brief=True,
    )
    base = detection.choose_base(subject.conventions)
    claims = Claims(conventions=subject.conventions, convention=subject.conventions[0])
    first = detection.result().tried[-1]
    if base is None and first.fatal == "timeout":
        return replace(claims, timeout=first.reason)
    if base is not None:
        right = first.verdict == "takes"
        others = detection.other_conventions(subject.conventions) if right else ()
        result = detection.result()
        terms = Terms(convention=result.convention, lse=result.options.lse)
        # Where slopes are passed in a mask, they are one of many masks.
        passed_elsewhere = "slopes" if on_terms(subject, terms).float_mask else "attn_mask"
        every = _trials(base, result.convention, device)
        tried = [trial for trial in every if trial.aspect != passed_elsewhere]
        expect([trial.of(base) for trial in tried], terms)
        _try_unclaimed(detection, tried)
        result = detection.result()
        claims = Claims(
            conventions=subject.conventions,
            convention=result.convention,
            others=others,
            lse=result.options.lse,
            causal=result.options.causal,
            base=base.to_json(),
            right=right,
            tried=tuple(one for one in result.tried if one.aspect != "convention"),
        )
    readings = tuple(detection.result().of("convention"))
    if base is not None and not claims.right and len(readings) > 1:
        claims = replace(claims, readings=readings)
    files = loaded_files()
    if isinstance(subject, RemoteSubject):
        files = subject.ask("files", None, device)
    _store_claims(claims, path, kernel, files)
    return claims


def _try_unclaimed(detection: Detection, every: Sequence[Trial]) -> None:
    deaths = 0
    for trial, following in itertools.zip_longest(every, every[1:]):
        takes = detection.result().takes
        # One query is a length of 1, which the kernel may not take.
        if trial.what == "one query" and not takes("lengths", "1"):
            continue
        # Skipped if lengths must be equal, or if the mask is wrong even at equal lengths.
        if trial.aspect == "causal":
            square = dataclasses.replace(trial, changes={"mask": trial.changes["mask"]})
            if not takes("rectangular") or detection.verdict(square) != "takes":
                continue
        # Without gradients, those of another layout are skipped.
        if trial.aspect == "strides" and "backward" in trial.changes and not takes("backward"):
            continue
        # In these aspects, the next trial does not depend on the result of this one.
        if following and trial.aspect == following.aspect in {"dtypes", "head_dims", "lengths"}:
            detection.expect(following)
        detection.ask(trial)
        last = detection.result().tried[-1]
        # A kernel for decoding may limit the total rows of all heads that share a key head.
        if trial.aspect == "gqa" and last.verdict == "refuses":
            one_row = {**trial.changes, "query": 1}
            detection.ask(Trial(aspect="gqa", what=f"{trial.what}{_ONE_ROW}", changes=one_row))
        if trial.aspect == "causal" and last.verdict == "wrong":
            detection.other_diagonal(_OTHER_ALIGNMENT[trial.changes["mask"].name])
        deaths += bool(last.fatal)
        if deaths >= MOST_DEATHS:
            return


_CORNERS = {
    "top_left": "at the top left (query 0 sees key 0 alone)",
    "bottom_right": "at the bottom right (the last query sees the last key)",
}
_OTHER_CORNER = {"top_left": "bottom_right", "bottom_right": "top_left"}
_ONE_ROW = ", one query"  # Suffix of ``what`` in a trial.
_NO_SCORES = ("none",)  # In a table: no score mod.
_OTHER_ALIGNMENT = {"causal": "bottom_right", "causal_bottom_right": "top_left"}


def _trials(base: Problem, convention: str, device: str) -> Iterator[Trial]:
    """Yield trials, the likeliest to be taken first, since the process may die of others."""
    chosen = CONVENTIONS[convention]
    plain = chosen if isinstance(chosen, Convention) else None
    shared_heads = () if plain and "enable_gqa" in plain.bound else ("gqa",)
    # Paged keys have no gradients, nor have dtypes with descales.
    forward_only = base.paging is not None or base.formats.scaled
    # A score mod computes slopes of sequences like any others.
    slopes = () if plain and "score_mod" in plain.bound else ("slopes",)
    further = ("lengths", "rectangular", "backward", "strides", *slopes, "attn_mask")
    for aspect in ("dtypes", "head_dims", *shared_heads, *further):
        for trial in trials(aspect, base, device):
            if not (forward_only and "backward" in trial.changes):
                yield trial
    yield trials("causal", base, device)[plain.bottom_right if plain else 0]


_USUAL_HEAD_DIMS = (64, 80, 96, 128)


def _includes_crossed(names: Sequence[str]) -> bool:
    """Return whether ``names`` may include crossed questions; empty ``names`` mean all."""
    return not names or any(name.startswith(("crossed-", "alone-")) for name in names)


def subject_takes(subject: Subject, device: str) -> Callable[[Problem], bool]:
    """Return a predicate: whether the kernel does not refuse a Problem, as it is or paged."""
    executor = executor_of(subject)

    @functools.cache  # Searches for the nearest Problem ask repeatedly.
    def takes(problem: Problem) -> bool:
        return taken_problem(subject, problem, executor, device) is not None

    return takes


def claimed_questions(
    claims: Claims,
    subject: Subject,
    *,
    device: str,
    dtypes: Sequence[str] = (),
    head_dims: Sequence[int] = (),
    names: Sequence[str] = (),
    calls: bool = True,
) -> list[CheckCase]:
    """Return the questions of a quick check within claims, and those it gets wrong beyond them.

    Args:
        subject: The kernel on the terms of these claims.
        dtypes: Requested dtypes; if empty, bf16, or the first that it is right in.
        head_dims: Requested head dims.
        names: Names of requested questions; empty for all. If no dtype is requested and the kernel
            is wrong in bf16, a question about that is included.
        calls: Whether to include checks of calls beside the accuracy of outputs.
    """
    takes = subject_takes(subject, device)
    right, dtypes_requested = claims.dtypes(), bool(dtypes)
    dtypes = dtypes or ((DEFAULT_DTYPE,) if DEFAULT_DTYPE in right else right[:1])
    dims = claims.head_dims()
    usual = head_dims or [dim for dim in dims if dim in _USUAL_HEAD_DIMS] or dims
    questions = call_cases(dtypes[0], usual, takes=takes, names=names) if calls else []
    for dtype in dict.fromkeys(dtypes):
        questions += check_cases(dtype, usual, takes=takes, names=names)
        if _includes_crossed(names):
            questions += crossed_cases(
                dtype, head_dims, lambda problem: claims.within(problem) and takes(problem)
            )
    requested = dtypes if dtypes_requested else ()
    beyond = [*claims.unclaimed(names, dtypes=requested, head_dims=head_dims)]
    # A question beyond its claims is asked once, under its own name.
    admitted = {one.case.id for one in beyond}
    questions = [one for one in questions if one.case.id not in admitted] + beyond
    if not names:
        return questions
    # Named questions are in the usual dtype, unless the kernel does not take it. If it is wrong in
    # it instead, they would pass in another dtype: then this stands beside them.
    wanted = set(names) if dtypes_requested else {*names, f"dtypes-{DEFAULT_DTYPE}"}
    return [question for question in questions if question.name in wanted]


def subject_questions(
    subject: Subject,
    questions: Sequence[CheckCase],
    *,
    device: str,
    dtypes: Sequence[str] = (),
    head_dims: Sequence[int] = (),
    names: Sequence[str] = (),
) -> list[CheckCase]:
    """Return the questions of a quick check of a Subject, with crossed ones for what it takes.

    Args:
        subject: A kernel that declares its capabilities.
        questions: Questions that any kernel is asked.
        device: ``cpu`` or ``cuda``.
        dtypes: Requested dtypes; if empty, bf16.
        head_dims: Requested head dims.
        names: Names of requested questions; empty for all.
    """
    able = subject_takes(subject, device)
    crossed = _includes_crossed(names)
    more = (
        each
        for dtype in dtypes or (DEFAULT_DTYPE,)
        for each in crossed_cases(dtype, head_dims, able)
    )
    every = (*questions, *(more if crossed else ()))
    return [each for each in every if not names or each.name in names]


# ------------------------------------------------------------------ cache


class _CachedClaims(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Claims, with the SHA-256 of each file that the function was loaded from."""

    claims: Claims
    files: dict[str, str]


def cache_folder() -> Path:
    """Return the folder of cached results: ``ATTNCHECK_CACHE_DIR``, or the platform's."""
    if chosen := os.environ.get("ATTNCHECK_CACHE_DIR"):
        return Path(chosen)
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA", "~/AppData/Local")
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "attncheck"


def _load_claims(path: Path) -> Claims | None:
    """Return the cached claims if the function's files have not changed; else None."""
    with suppress(OSError, msgspec.DecodeError, UnicodeError):
        cached = msgspec.json.decode(path.read_bytes(), type=_CachedClaims)
        if all(_digest(Path(name)) == digest for name, digest in cached.files.items()):
            return cached.claims
    return None


def _store_claims(claims: Claims, path: Path, kernel: str, files: Iterable[str]) -> None:
    """Store the claims of a kernel; not of an installed one, whose files are not tracked."""
    file, colons, _ = kernel.partition("::")
    module = kernel.partition(":")[0].replace(".", "/")
    endings = (os.path.abspath(file),) if colons else (f"/{module}.py", f"/{module}/__init__.py")  # noqa: PTH100  # no link is followed, as by import
    # Packages of other environments count as installed; some imported modules have no file.
    uninstalled = (name for name in files if "site-packages" not in Path(name).parts)
    files = [name for name in uninstalled if Path(name).is_file()]
    if not any(name.replace(os.sep, "/").endswith(endings) for name in files):
        return
    # If the folder cannot be written to, the trials are repeated next time.
    with suppress(OSError, UsageError):
        cached = _CachedClaims(claims=claims, files={name: _digest(Path(name)) for name in files})
        write_texts({path.name: msgspec.json.encode(cached).decode()}, path.parent)


def _cache_file(kernel: str, conventions: Sequence[str], device: str) -> Path:
    # The location of its files, the way it is called, and the machine.
    parts = (_CACHE_FORMAT, str(Path.cwd()), kernel, conventions, environment(device).id)
    name = hashlib.sha256(repr(parts).encode()).hexdigest()[:24]
    return cache_folder() / "claims" / f"{name}.json"


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()

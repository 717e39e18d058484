"""Score mutants of a user's kernel: whether a check or a gate catches each one, and how soon.

A worker loads attncheck once, and forks a process for each mutant: no state passes from one to the
next, one that hangs is killed, and none pays for imports. This works on a CPU only, since a process
that has used CUDA cannot fork.
"""

from __future__ import annotations

import fnmatch
import hashlib
import multiprocessing
import os
import re
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec import to_builtins
from msgspec.structs import replace

from attncheck.core.errors import AttncheckError, UsageError
from attncheck.core.mod_spec import Spec
from attncheck.core.outputs import same_numbers
from attncheck.core.sanitize_text import one_line
from attncheck.diagnose.diagnosis import CauseSearch
from attncheck.fault_models.fault_model import FAMILIES
from attncheck.faults.mutation import Mutant, mutants_of
from attncheck.faults.peer_rules import MUTANT_RULES, PeerRules, RecordingExecutor
from attncheck.faults.scoring import GateRun
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Case, Problem
from attncheck.records.failure_causes import certain_explanations
from attncheck.records.fault_scores import MutantOutcome, MutantScore, NameWorth
from attncheck.records.record import FAILED_STATUSES, Diagnosis, Record, reason_of
from attncheck.subjects.capabilities.subject import Subject
from attncheck.subjects.load import load_subject
from attncheck.verify.claims import claimed_questions, find_claims
from attncheck.verify.environment import environment, prepare
from attncheck.verify.executor import Execution, Failure, InProcess
from attncheck.verify.isolated import Deadlines
from attncheck.verify.kernel_hosts import on_terms
from attncheck.verify.question_fit import taken_problem
from attncheck.verify.verify import iter_records
from attncheck.workers.units import Unit, UnitResult

MUTANT = "mutant"
"""Stands in place of a host in a unit's kernel."""
TOOLS = ("check", "smoke", "pr")
TABLE = "mutants.toml"
"""File beside kernels with facts about their mutants."""

_PATIENCE = Deadlines().call + Deadlines().imports  # seconds without a message before a kill
_REFERENCE_DTYPES = ("bf16", "fp32")
_FIRST = Problem(query=64, heads=2, head_dim=64, dtype="bf16")
_REFERENCE_CHANGES: tuple[dict[str, Any], ...] = (
    *({"query": query, "kv": kv} for query, kv in ((64, 64), (77, 77), (1, 70), (33, 130))),
    *({"mask": Spec.of(mask)} for mask in ("causal", "causal_bottom_right")),
    {"mask": Spec.of("sliding_window", window=17), "query": 77, "kv": 77},
    *({"score": Spec.of("softcap", cap=cap)} for cap in (5.0, 500.0)),
    {"score": Spec.of("alibi"), "mask": Spec.of("causal")},
    {"heads": 4, "kv_heads": 2, "batch": 3, "query": 9},
    {"scale": 0.3},
)


class Argument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why a mutant is no fault, or why it is missed."""

    mutants: tuple[str, ...]  # patterns of ids
    because: str


class Family(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Right diagnoses of changes to some lines."""

    name: str
    code: str  # a regular expression that matches the changed line
    operators: tuple[str, ...] = ()  # empty for all
    models: tuple[str, ...]  # patterns of fault models and signs
    kinds: tuple[str, ...] = ()  # families of fault models that describe the change fairly


class MutantTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Facts about mutants that are known without a run."""

    kernels: tuple[str, ...] = ()
    equivalent: tuple[Argument, ...] = ()  # mutants without a fault, which are not scored
    missed: tuple[Argument, ...] = ()  # mutants known to be missed, which count as missed
    families: tuple[Family, ...] = ()

    def family(self, mutant: Mutant) -> Family | None:
        """Return the first family that matches a mutant; None where none does."""
        for family in self.families:
            if mutant.operator in (family.operators or (mutant.operator,)) and re.search(
                family.code, mutant.code
            ):
                return family
        return None


@cache
def read_table(folder: Path) -> MutantTable:
    """Return the table of a folder's kernels; an empty one where there is none.

    Raises:
        UsageError: for an invalid table.
    """
    path = folder / TABLE
    if not path.is_file():
        return MutantTable()
    try:
        return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), MutantTable)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise UsageError(f"{path}: {error}.") from None


def kernels_of_table(path: Path) -> list[str]:
    """Return the kernels that a table names, ``FILE.py::NAME`` with the table's folder.

    Raises:
        UsageError: where the table names none.
    """
    kernels = [str(path.parent / spec) for spec in read_table(path.parent).kernels]
    if not kernels:
        raise UsageError(f"--mutants needs a KERNEL, FILE.py::NAME: {path} names none.")
    return kernels


@cache
def _mutants(file: Path) -> dict[str, Mutant]:
    if not file.is_file():
        raise UsageError(f"there is no file {str(file)!r} to make mutants of.")
    source = file.read_text(encoding="utf-8")
    return {one.id: one for one in mutants_of(file.stem, source)}


def mutant_units(
    specs: Sequence[str], *, tool: str, most: int | None, names: Sequence[str]
) -> list[Unit]:
    """Return the work: one unit for each mutant.

    Units are ordered by digests of the ids, so that an early stop leaves an even sample.

    Args:
        specs: Kernels, ``FILE.py::NAME`` each.
        tool: One of ``TOOLS``.
        most: Most mutants to score; None for all.
        names: Ids, or patterns of ids; empty for all.

    Raises:
        UsageError: where a kernel is no function of a file, or no mutant matches.
    """
    every: list[tuple[str, Mutant]] = []
    for spec in specs:
        file, colons, _ = spec.partition("::")
        if not colons:
            raise UsageError(f"kernel {spec!r} must be FILE.py::NAME: its file is what is changed.")
        every += [(spec, one) for one in _mutants(Path(file).absolute()).values()]
    if names:
        every = [
            (spec, one)
            for spec, one in every
            if any(fnmatch.fnmatchcase(one.id, name) for name in names)
        ]
    if not every:
        raise UsageError("there is no mutant to score: see --list.")
    every = sorted(every, key=lambda each: hashlib.sha256(each[1].id.encode()).digest())[:most]
    return [
        Unit(
            kind="fault",
            stage="contract",
            kernel=f"{one.id}@{MUTANT}",
            device="cpu",
            tier=tool,
            variant=spec,
        )
        for spec, one in every
    ]


class MutantScorer:
    """Scores mutants, one after the other, each in a process forked for it."""

    def close(self) -> None:
        """Do nothing: no resources are held."""

    def do(self, unit: Unit) -> UnitResult:
        """Return the score of ``unit`` in ``facts``; never raises for what the kernel does."""
        prepare("cpu")
        # A fork loses torch's threads, so that there must be none.
        torch.set_num_threads(1)
        spec = unit.variant
        file, _, function = spec.partition("::")
        mutant = _mutants(Path(file).absolute())[unit.kernel.rpartition("@")[0]]
        table = read_table(Path(file).absolute().parent)
        family = table.family(mutant)
        score = MutantScore(
            mutant=mutant.id,
            kernel=Path(file).stem,
            operator=mutant.operator,
            line=mutant.line,
            diff=mutant.diff,
            tool=unit.tier,
            outcome="harness",
            family=family.name if family else "",
        )
        start = time.perf_counter()
        job = _Job(mutant, Path(file).absolute(), function, unit.tier)
        # The folder is made here, since a mutant may end the fork before it has cleaned up.
        with tempfile.TemporaryDirectory(prefix="attncheck_mutant_") as folder:
            outcome = _run_in_fork(partial(job.run, Path(folder)))
        score = settled(replace(score, **outcome), table)
        score = rate_diagnosis(score, family)
        seconds = round(time.perf_counter() - start, 3)
        where = environment("cpu")
        facts = {"score": to_builtins(score), "key": where.id}
        facts["environment"] = to_builtins(where)
        return UnitResult(unit=unit.id, facts=facts, seconds=seconds)


def settled(score: MutantScore, table: MutantTable) -> MutantScore:
    """Return the score with the table's outcome and reason, if the mutant was missed.

    A caught mutant stays caught: then either the table's argument or attncheck is wrong.
    """
    outcomes: dict[MutantOutcome, tuple[Argument, ...]]
    outcomes = {"equivalent": table.equivalent, "missed": table.missed}
    for outcome, arguments in outcomes.items() if score.outcome == "missed" else ():
        for each in arguments:
            if any(fnmatch.fnmatchcase(score.mutant, one) for one in each.mutants):
                return replace(score, outcome=outcome, reason=each.because)
    return score


def rate_diagnosis(score: MutantScore, family: Family | None) -> MutantScore:
    """Return the score with its diagnosis rated against the right ones of ``family``."""
    if score.outcome != "caught" or score.tool != TOOLS[0] or score.status != "fail":
        return score
    return replace(score, named=_worth(score, family))


_TRUE_KINDS = ("lse", "gradient", "overflow")
"""Families that only name the outputs that are wrong or NaN, which is always true."""


def _worth(score: MutantScore, family: Family | None) -> NameWorth:
    if score.level not in {"named", "proven", "family"}:
        return "none"
    certain = score.models[: score.certain]
    if family and any(fnmatch.fnmatchcase(one, each) for one in certain for each in family.models):
        return "right"
    if score.level == "proven":  # A proof holds whatever was changed.
        return "proven"
    fair = score.kind in (*_TRUE_KINDS, *(family.kinds if family else ()))
    if score.level == "family" and fair:
        return "family"
    if family is None:
        return "unjudged"
    return "neighbour" if fair else "wrong"


def _run_in_fork(run: Callable[[Callable[..., None]], None]) -> dict[str, Any]:
    """Run ``run`` in a forked process; return the last value of each field that it sent.

    A process that dies, or sends nothing for longer than a call may take, has failed a question.
    """
    fork = multiprocessing.get_context("fork")
    reader, writer = fork.Pipe(duplex=False)
    child = fork.Process(target=_run_and_exit, args=(run, writer))
    fields: dict[str, Any] = {}
    start, status = time.perf_counter(), "crash"
    child.start()
    writer.close()  # Only the child has it then, whose end is the pipe's.
    with suppress(EOFError, OSError):  # the last message may be cut off
        while reader.poll(_PATIENCE):
            fields |= reader.recv()
        status = "timeout"
        child.kill()
    reader.close()
    child.join()
    if "outcome" not in fields and "reason" not in fields:
        seconds = time.perf_counter() - start
        fields |= {"outcome": "caught", "status": status, "seconds": seconds}
    return fields


def _run_and_exit(run: Callable[[Callable[..., None]], None], writer: Connection) -> None:
    try:
        run(lambda **fields: writer.send(fields))
    except BaseException as error:  # noqa: BLE001  # The mutant or attncheck may raise anything.
        writer.send({"reason": one_line(repr(error))})
    finally:
        os._exit(0)


class _Job:
    """The questions to one mutant, within its process."""

    def __init__(self, mutant: Mutant, file: Path, function: str, tool: str) -> None:
        self._mutant, self._file, self._function = mutant, file, function
        self._tool = tool

    def run(self, folder: Path, send: Callable[..., None]) -> None:
        """Write the mutant to ``folder``, question it, and send each result as it is known."""
        os.environ["ATTNCHECK_CACHE_DIR"] = str(folder)
        path = folder / self._file.name
        path.write_text(self._mutant.text, encoding="utf-8")
        kernel = f"{path}::{self._function}"
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, 1)
        os.dup2(devnull, 2)
        reason = self._immediate_error(kernel)
        if reason:
            send(outcome="stillborn", reason=reason)
        elif self._tool == "check":
            self._check(kernel, send)
        else:
            self._gate(kernel, send)

    def _immediate_error(self, kernel: str) -> str:
        """Return the error that the mutant raises on the plainest problems; empty if none."""
        try:
            subject = load_subject(kernel, None)
        except AttncheckError as error:
            return one_line(str(error))
        reasons = []
        for problem in (_FIRST, _FIRST.replace(backward=True)):
            executor = InProcess()
            accepted = taken_problem(subject, problem, executor, "cpu")
            if accepted is not None:
                result = executor.run(subject, draw_inputs(accepted, "cpu"))
                # A mutant that writes to its inputs does run, and is there to be caught.
                raised = isinstance(result, Failure) and result.kind in {"error", "oom"}
                reasons.append(result.message if raised else "")  # type: ignore[union-attr]
        return one_line(next((reason for reason in reasons if reason), ""))

    def _check(self, kernel: str, send: Callable[..., None]) -> None:
        """Ask the questions of ``attncheck check``, in its order, up to the first failure."""
        start = time.perf_counter()
        subject = load_subject(kernel, None)
        claims = find_claims(subject, kernel=kernel, device="cpu")
        assert claims is not None, "it is a function of a file"
        terms = claims.terms()
        subject = on_terms(subject, terms)
        questions = claimed_questions(claims, subject, device="cpu")
        right = on_terms(load_subject(f"{self._file}::{self._function}", None), terms)
        peers, recording = PeerRules(right, MUTANT_RULES), RecordingExecutor()
        named = [(question.name, question.case) for question in questions]
        failed: Record | None = None
        search = CauseSearch()
        count, spent = 0, 0.0
        for record in iter_records([subject], named, device="cpu", executor=recording):
            # The time that peers' rules take is not counted.
            spent, began = time.perf_counter() - start, time.perf_counter()
            count += record.status != "unsupported"
            if record.status in FAILED_STATUSES:
                failed = record
                break
            send(questions=count, seconds=round(spent, 3))
            search.note(record)
            peers.apply(Case.from_json(record.case), recording.first_call)
            recording.forget()
            start += time.perf_counter() - began
        where: dict[str, Any] = {"questions": count, "seconds": round(spent, 3)}
        if failed is not None:
            where |= {"first": failed.variant, "status": failed.status}
            where |= {"shown": one_line(reason_of(failed))}
        elif not count:  # A kernel that supports nothing is not right.
            where |= {"status": "unsupported", "shown": "nothing could be asked of it"}
        send(outcome="missed" if count and failed is None else "caught", **where)
        send(peers={one.rule: one.caught for one in peers.verdicts})
        # The diagnosis comes first, because an unguarded call below may end the process.
        if failed is not None:
            self._diagnose(failed, subject, search, send)
        self._apply_peers_to_rest(subject, named, peers, after=failed.variant if failed else "")
        send(peers={one.rule: one.caught for one in peers.verdicts})
        if failed is None and count:
            send(identical=_identical(subject, right, [case.problem for _, case in named]))

    @staticmethod
    def _apply_peers_to_rest(
        subject: Subject, named: Sequence[tuple[str, Case]], peers: PeerRules, *, after: str
    ) -> None:
        """Apply peers' rules to the remaining comparisons, too, for the sake of fairness."""
        names = [name for name, _ in named]
        remaining = named[names.index(after) :] if after else ()
        executor = InProcess()
        for _, case in remaining:
            if case.question != "compare" or all(one.caught for one in peers.verdicts):
                continue
            if executor.refusal(subject, case.problem, "cpu") is None:
                inputs = draw_inputs(case.problem, "cpu")
                peers.apply(case, (inputs, executor.run(subject, inputs)))

    @staticmethod
    def _diagnose(
        failed: Record, subject: Subject, search: CauseSearch, send: Callable[..., None]
    ) -> None:
        judgement = failed.judgement
        if judgement is not None and judgement.rule == "memory":
            # The memory rule itself says what was written where, or not: that is the diagnosis.
            send(certain=1, level="proven", models=[judgement.rule], naming=0.0)
            return
        began = time.perf_counter()
        record = search.diagnose(failed, subject, device="cpu")
        diagnosis = record.diagnosis
        labels: dict[str, Any] = {"level": "unknown"}
        if isinstance(diagnosis, Diagnosis):
            proven = diagnosis.level == "named" and bool(diagnosis.ranked) and not diagnosis.tried
            kinds = [name for name, words in FAMILIES.items() if words == diagnosis.family]
            labels["level"] = "proven" if proven else diagnosis.level
            labels["kind"] = kinds[0] if kinds else ""
            labels["models"] = [one.model for one in diagnosis.ranked]
        seconds = round(time.perf_counter() - began, 3)
        send(certain=len(certain_explanations(record)), naming=seconds, **labels)

    def _gate(self, kernel: str, send: Callable[..., None]) -> None:
        unit = Unit(kind="fault", stage="contract", kernel=kernel, device="cpu", tier=self._tool)
        run = GateRun(kernel, unit, "")
        for answer, _ in run.answers():
            facts = {"questions": run.problems, "seconds": round(run.seconds, 3)}
            record = answer.record
            if record.status in FAILED_STATUSES:
                first = f"{answer.stage} {record.case['question']}"
                shown = one_line(reason_of(record))
                send(outcome="caught", first=first, status=record.status, shown=shown, **facts)
                return
            send(**facts)
        send(outcome="missed", questions=run.problems, seconds=round(run.seconds, 3))


def _identical(subject: Subject, right: Subject, problems: Sequence[Problem]) -> bool:
    """Return whether two kernels give the same bits on a reference set of problems.

    The set is every problem of the check in two dtypes, and others, also with a backward.
    """
    executor = InProcess()
    every = dict.fromkeys(_reference_problems(problems))
    count = 0
    for problem in every:
        if executor.refusal(right, problem, "cpu") is not None:
            continue
        one, other = (executor.run(each, draw_inputs(problem, "cpu")) for each in (subject, right))
        if isinstance(one, Execution) and isinstance(other, Execution):
            count += 1
            mine, theirs = one.outputs.tensors(), other.outputs.tensors()
            same = all(map(_same_bits, mine.values(), theirs.values()))
            if mine.keys() != theirs.keys() or not same:
                return False
        elif isinstance(one, Execution) or isinstance(other, Execution):
            return False
    return count > 0


def _reference_problems(problems: Sequence[Problem]) -> Iterator[Problem]:
    for problem in dict.fromkeys(problems):
        if problem.operation != "attention":
            continue
        for dtype in _REFERENCE_DTYPES:
            yield problem.replace(dtype=dtype)
        if problem.paging is None and not problem.backward:
            yield problem.replace(backward=True)
    for changes in _REFERENCE_CHANGES:
        for backward in (False, True):
            yield _FIRST.replace(**changes, backward=backward)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    same = one.shape == other.shape and one.dtype == other.dtype
    return same and same_numbers(one, other)

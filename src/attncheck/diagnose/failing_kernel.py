"""A kernel that has failed a Case, and can be called again, on this and on other problems."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from attncheck.core.errors import AttncheckError
from attncheck.diagnose.explanations import NO_FIT, Response, observed_error, pair_count
from attncheck.diagnose.out_of_bounds_reads import evidence_of_runs
from attncheck.inputs.problem import Case
from attncheck.verify.evidence_builder import EvidenceBuilder
from attncheck.verify.executor import Execution, Executor, Origin, out_of_memory
from attncheck.verify.memory_patterns import allocator_filled
from attncheck.verify.run_case import run_case

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attncheck.inputs.input_tensors import Inputs
    from attncheck.inputs.problem import Problem
    from attncheck.records.record import Record
    from attncheck.subjects.capabilities.subject import Subject

LARGEST_DIAGNOSED = 2**22  # most (row, key) pairs of all heads of a problem that is diagnosed
_MOST_HEADS = 2**12  # heads of all sequences together: models compute each one separately


def is_too_large(problem: Problem) -> bool:
    """Return whether a problem is too large to be diagnosed."""
    return pair_count(problem) > LARGEST_DIAGNOSED or problem.batch * problem.heads > _MOST_HEADS


@contextmanager
def skip_unfit() -> Iterator[None]:
    """Suppress errors of a step that does not suit a Problem, or that runs out of memory.

    A function that this decorates then returns None.
    """
    try:
        yield
    except (*NO_FIT, MemoryError) as error:
        if not isinstance(error, AttncheckError) and not out_of_memory(error):
            raise


@dataclass(frozen=True, slots=True)
class FailingKernel:
    """A Record of a failure, and the kernel, which can be called again."""

    record: Record
    subject: Subject
    device: str
    executor: Executor

    @property
    def case(self) -> Case:
        """Return the Case that the kernel failed."""
        return Case.from_json(self.record.case)

    def status(self, case: Case) -> str:
        """Return the status of the kernel on ``case``."""
        return run_case(
            self.subject, case, device=self.device, executor=self.executor, brief=True
        ).status

    def runs(self, case: Case) -> Iterator[tuple[int, EvidenceBuilder]]:
        """Yield the number of each run of a question, and the evidence on it."""
        for number, evidence in enumerate(evidence_of_runs(case, self.device)):
            if not is_too_large(evidence.case.problem):
                evidence.establish(reference_errors=False)
                yield number, evidence

    def takes(self, problem: Problem) -> bool:
        """Return whether the kernel may be called on ``problem``.

        That is if it is supported, if the failing one is not, or if they differ only in numbers.
        """
        refusal = partial(self.executor.refusal, self.subject, device=self.device)
        own = self.case.problem
        numbers = {"seed": own.seed, "scale": own.scale, "distribution": own.distribution}
        alike = problem.replace(**numbers) == own
        return alike or refusal(problem) is None or refusal(own) is not None

    def ask(self, case: Case) -> list[Response]:
        """Return the kernel's response in each run of ``case``; empty if it does not support it."""
        with skip_unfit():
            if not self.takes(case.problem):
                return []
            runs = []
            for number, evidence in self.runs(case):
                run = self._response(evidence, Origin(case=case, run=number))
                if run is None:
                    return []
                runs.append(run)
            return runs
        return []

    @skip_unfit()
    def call(self, inputs: Inputs) -> Response | None:
        """Return the kernel's response to ``inputs``; None if it does not support them."""
        evidence = EvidenceBuilder(
            Case(problem=inputs.problem), self.device, inputs.to(self.device)
        )
        evidence.establish(reference_errors=False)
        return self._response(evidence)

    def _response(self, evidence: EvidenceBuilder, origin: Origin | None = None) -> Response | None:
        with allocator_filled("pattern"):
            result = self.executor.run(self.subject, evidence.inputs, origin=origin)
        return observed_error(result, evidence) if isinstance(result, Execution) else None

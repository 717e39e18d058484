"""What other projects' rules would have said of the plain problems that a gate asks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attncheck import oracles
from attncheck.examine.executor import Execution, Failure, InProcess
from attncheck.fault_record import PeerSaid
from attncheck.faults import gradient_peers, peers
from attncheck.probes import PROBES
from attncheck.subjects.ideal import Ideal

if TYPE_CHECKING:
    from attncheck.inputs import Inputs
    from attncheck.problem import Case
    from attncheck.subjects.contract import Subject

__all__ = ["Listening", "Peers"]


class Listening(InProcess):
    """Calls a kernel in this process, and keeps what the last question's first call gave."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: tuple[Inputs, Execution | Failure] | None = None

    def run(self, subject: Subject, inputs: Inputs, **how: Any) -> Execution | Failure:
        """As ``InProcess``."""
        given = super().run(subject, inputs, **how)
        if self.heard is None:
            self.heard = inputs, given
        return given

    def forget(self) -> None:
        """The next call is the first one."""
        self.heard = None


class Peers:
    """Counts, rule by rule, up to the first problem where it catches the fault.

    A rule that refuses the right kernel on the same problem has caught nothing there: nobody would
    keep a test that fails whatever is tested.

    Args:
        right: The kernel without the fault.
    """

    def __init__(self, right: Subject) -> None:
        self._right = right
        self._said = {rule: PeerSaid(rule=rule) for rule in peers.RULES}

    @property
    def said(self) -> tuple[PeerSaid, ...]:
        """What each said so far."""
        return tuple(self._said.values())

    def hear(self, case: Case, heard: tuple[Inputs, Execution | Failure] | None) -> None:
        """Asks those that have caught nothing yet.

        Of a plain problem of attention alone, that is one call and what comes of it: ``compare``,
        or a probe's inputs. What raises, no test of theirs accepts. Of fp8 their rules say nothing
        of gradients.
        """
        plain = case.question == "compare" or case.question in PROBES
        asking = [rule for rule, said in self._said.items() if not said.caught]
        if not plain or case.problem.operation != "attention" or heard is None or not asking:
            return
        inputs, given = heard
        if isinstance(given, Failure) and given.kind == "refused":
            return
        beside = _Beside(inputs)
        refused = beside.refused(given, asking)
        alarms = beside.refused(self._by_right(inputs), list(refused)) if refused else set()
        for rule in asking:
            said = self._said[rule]
            self._said[rule] = PeerSaid(
                rule=rule,
                problems=said.problems + 1,
                caught=rule in refused - alarms,
                alarms=said.alarms + (rule in alarms),
            )

    def _by_right(self, inputs: Inputs) -> Execution | Failure:
        executor = InProcess()
        said = executor.refusal(self._right, inputs.problem, inputs.device.type)
        if said is not None:
            return executor.run(Ideal(), inputs)
        return executor.run(self._right, inputs)


class _Beside:
    """What the rules know of one problem."""

    def __init__(self, inputs: Inputs) -> None:
        truth = oracles.truth(inputs)
        self._forward = peers.Given(inputs, truth)
        gradients = inputs.problem.backward and not inputs.problem.formats.scaled
        self._backward = gradient_peers.GivenGradients(inputs, truth) if gradients else None

    def refused(self, given: Execution | Failure, rules: list[str]) -> set[str]:
        """Those of ``rules`` that do not accept what a kernel gave."""
        if isinstance(given, Failure):
            return set(rules)
        outputs = given.outputs
        found = {rule for rule in rules if not peers.RULES[rule](outputs, self._forward)}
        if self._backward is not None:
            accepts = gradient_peers.RULES
            found |= {r for r in set(rules) - found if not accepts[r](outputs, self._backward)}
        return found

"""Inputs whose right answer is known beforehand: questions that no rounding can blur."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from attncheck.errors import UnknownName
from attncheck.probes.constant_logits import NEGATIVE, POSITIVE
from attncheck.probes.decode import DECODE
from attncheck.probes.finding import Finding, Seen
from attncheck.probes.isolated import ISOLATED
from attncheck.probes.mean import MEAN
from attncheck.probes.ones import ONES
from attncheck.probes.probe import Parameters, Probe
from attncheck.probes.ramp import RAMP
from attncheck.probes.two_level import TWO_LEVEL
from attncheck.problem import Case

if TYPE_CHECKING:
    import torch

    from attncheck.inputs import Inputs
    from attncheck.problem import Problem

__all__ = [
    "PROBES",
    "Finding",
    "Parameters",
    "Probe",
    "Seen",
    "case",
    "cases",
    "inputs",
    "probe_named",
]

PROBES: dict[str, Probe] = {
    probe.name: probe
    for probe in (DECODE, ONES, RAMP, NEGATIVE, POSITIVE, TWO_LEVEL, ISOLATED, MEAN)
}


def probe_named(name: str) -> Probe:
    """The probe called ``name``; raises UnknownName with the valid names."""
    if name not in PROBES:
        raise UnknownName("probe", name, PROBES)
    return PROBES[name]


def case(name: str, problem: Problem, parameters: Parameters | None = None) -> Case:
    """The Case that asks the probe ``name`` on the layout, mask, dtype and scale of ``problem``.

    Args:
        name: A name in ``PROBES``.
        problem: Its score mod and distribution are replaced.
        parameters: The probe's numbers; the first allowed ones by default.

    Raises:
        UnknownName, ProblemError: for what cannot be asked.
    """
    probe = probe_named(name)
    asked = probe.problem(problem)
    if parameters is None:
        parameters = {key: numbers[0] for key, numbers in probe.allowed(asked).items()}
    probe.check(asked, parameters)
    return Case(problem=asked, question=name, parameters=dict(parameters))


def cases(name: str, problem: Problem) -> list[Case]:
    """All Cases of the probe ``name`` on ``problem``; none where it cannot be asked."""
    probe = probe_named(name)
    if probe.unfit(problem) is not None:
        return []
    allowed = probe.allowed(probe.problem(problem))
    numbers = itertools.product(*allowed.values())
    return [case(name, problem, dict(zip(allowed, each, strict=True))) for each in numbers]


def inputs(case: Case, device: str | torch.device = "cpu") -> Inputs:
    """The Inputs of a Case whose question is a probe.

    Raises:
        UnknownName, ProblemError: for a question that is none, or that cannot be asked.
    """
    return probe_named(case.question).inputs(case.problem, case.parameters).to(device)

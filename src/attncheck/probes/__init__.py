"""Probes: inputs whose right results are known beforehand and not blurred by rounding."""

from __future__ import annotations

import itertools

import torch

from attncheck.core.errors import look_up
from attncheck.inputs.input_tensors import Inputs
from attncheck.inputs.problem import Case, Parameters, Problem
from attncheck.probes.probe_table import PROBES, Probe
from attncheck.probes.tied_keys import Finding, VisibleKeys, check_tied_keys

__all__ = [
    "PROBES",
    "Finding",
    "Parameters",
    "Probe",
    "VisibleKeys",
    "case",
    "cases",
    "check_tied_keys",
    "inputs",
    "probe_named",
]


def probe_named(name: str) -> Probe:
    """Return the probe called ``name``; raise UnknownName with the valid names."""
    return look_up("probe", name, PROBES)


def case(name: str, problem: Problem, parameters: Parameters | None = None) -> Case:
    """Return the Case of the probe ``name`` on ``problem``'s layout, mask, dtype and scale.

    Args:
        problem: The Problem, whose score mod and distribution are replaced.
        parameters: The probe's parameters; the first allowed values by default.

    Raises:
        UnknownName, ProblemError: for a probe or parameters that do not apply.
    """
    probe = probe_named(name)
    probe_problem = probe.problem(problem)
    if parameters is None:
        parameters = {key: numbers[0] for key, numbers in probe.allowed(probe_problem).items()}
    probe.check(probe_problem, parameters)
    return Case(problem=probe_problem, question=name, parameters=dict(parameters))


def cases(name: str, problem: Problem) -> list[Case]:
    """Return all Cases of the probe ``name`` on ``problem``; none if it does not apply."""
    probe = probe_named(name)
    if probe.unfit(problem) is not None:
        return []
    allowed = probe.allowed(probe.problem(problem))
    numbers = itertools.product(*allowed.values())
    return [case(name, problem, dict(zip(allowed, each, strict=True))) for each in numbers]


def inputs(case: Case, device: str | torch.device = "cpu") -> Inputs:
    """Return the Inputs of a Case whose question is a probe.

    Raises:
        UnknownName, ProblemError: for a question that is no probe, or that does not apply.
    """
    return probe_named(case.question).inputs(case.problem, case.parameters).to(device)

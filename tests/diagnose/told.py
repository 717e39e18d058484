"""Failures of kernels that are planted, and what a diagnosis tells of them."""

import torch
from tests.planted_kernels.other_steps import stepping

from attncheck.diagnose import diagnosis
from attncheck.diagnose.diagnosis import diagnose_failure
from attncheck.diagnose.explanations import explain
from attncheck.fault_models import FAULT_MODELS
from attncheck.inputs.problem import Case, Problem
from attncheck.subjects.ideal import Ideal
from attncheck.verify.run_case import run_case


def told_record(subject, asked, **how):
    """The Record of a Case, or of a comparison on a Problem, that fails, with its diagnosis."""
    case = Case(problem=asked) if isinstance(asked, Problem) else asked
    record = run_case(subject, case, device="cpu")
    assert record.status == "fail"
    return diagnose_failure(record, subject, device="cpu", **how)


def told(subject, asked, **how):
    return told_record(subject, asked, **how).diagnosis


def left_out(monkeypatch, *names):
    """No diagnosis tries these models; all of them unless told."""
    names = names or tuple(FAULT_MODELS)

    def by_others(*values, among=FAULT_MODELS, **named):
        return explain(*values, among=[one for one in among if one not in names], **named)

    monkeypatch.setattr(diagnosis, "explain", by_others)


def wave_added(self, out, total):
    """Wrong as no model is."""
    return Ideal.normalised(self, out, total) + torch.arange(out.numel()).view(out.shape).sin()


WAVY = stepping(normalised=wave_added, name="wavy")

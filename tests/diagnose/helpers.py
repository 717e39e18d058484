"""Diagnoses of planted kernels, and a kernel whose fault no model explains."""

import torch
from tests.planted_kernels.other_steps import stepping

from attncheck.diagnose import diagnosis
from attncheck.diagnose.diagnosis import diagnose_failure
from attncheck.diagnose.explanations import explain
from attncheck.fault_models import FAULT_MODELS
from attncheck.inputs.problem import Case, Problem
from attncheck.subjects.ideal import Ideal
from attncheck.verify.run_case import run_case


def diagnose_record(subject, question, **options):
    """Run a Case, or a comparison on a Problem; it must fail. Return the diagnosed Record."""
    case = Case(problem=question) if isinstance(question, Problem) else question
    record = run_case(subject, case, device="cpu")
    assert record.status == "fail"
    return diagnose_failure(record, subject, device="cpu", **options)


def diagnose(subject, question, **options):
    return diagnose_record(subject, question, **options).diagnosis


def exclude_models(monkeypatch, *names):
    """Keep diagnoses from trying these models, or any if none are named."""
    names = names or tuple(FAULT_MODELS)

    def explain_by_others(*values, among=FAULT_MODELS, **options):
        return explain(*values, among=[one for one in among if one not in names], **options)

    monkeypatch.setattr(diagnosis, "explain", explain_by_others)


def add_wave(self, out, total):
    """Add an error that no model predicts."""
    return Ideal.normalised(self, out, total) + torch.arange(out.numel()).view(out.shape).sin()


WAVY = stepping(normalised=add_wave, name="wavy")

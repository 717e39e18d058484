"""``verify`` and ``iter_records``: which kernels run on which cells, and the Report of them."""

import torch

from attncheck.cases.variants import Cell, plan_cells
from attncheck.core.mod_spec import Spec
from attncheck.core.outputs import Outputs
from attncheck.faults.continuous_faults import CONTINUOUS_FAULTS
from attncheck.inputs.problem import Case, Problem
from attncheck.records.failure_causes import without_place
from attncheck.subjects import ideal
from attncheck.subjects.capabilities.subject import Subject
from attncheck.subjects.ideal import Ideal
from attncheck.subjects.torch_kernels import Sdpa
from attncheck.verify import evidence_builder
from attncheck.verify import run_case as run_case_file
from attncheck.verify.verify import applicable_subjects, case_subjects, iter_records, verify


class Softmax(Subject):
    """A kernel for softmax only, without attention."""

    name = "rows"
    summary = "torch.softmax"

    def concerns(self, problem):
        return problem.operation == "softmax"

    def unsupported(self, problem, device):
        return None

    def prepare(self, inputs):
        x = inputs.x.float()
        out = torch.softmax(x, -1).to(inputs.problem.formats.output.torch_dtype)
        return lambda: Outputs(out, torch.logsumexp(x, -1))


def cells(*variants):
    return plan_cells(
        dtypes=["fp32"],
        variants=variants,
        shapes=["1x2x5x4"],
        distributions=["normal"],
        seed=0,
    )


def measured(cells, subjects):
    cases = [(cell.variant, Case(problem=cell.problem)) for cell in cells]
    return verify(
        subjects, cases, device="cpu", command="the command", applicable_only=True, timed=True
    )


def problems(cells):
    return [cell.problem for cell in cells]


def test_absent_kernel_is_listed_once_and_not_run():
    subjects = [Ideal(), Sdpa("cudnn")]
    report = measured(cells("full", "causal"), subjects)
    records = report.records
    assert report.command == "the command"
    assert report.kernels == {s.name: s.summary for s in subjects}
    assert report.absent == {"sdpa-cudnn": "needs a CUDA GPU"}
    assert [(r.variant, r.heads, r.kernel) for r in records] == [
        (variant, heads, "ideal") for variant in ("full", "causal") for heads in ("MHA", "MQA")
    ]
    assert {r.environment for r in records} == set(report.environments)


def test_ideal_kernel_runs_once_for_its_record_and_as_reference(monkeypatch):
    calls, attention = [], ideal.attention

    def counted(kernel, inputs):
        calls.append(inputs.problem)
        return attention(kernel, inputs)

    monkeypatch.setattr(ideal, "attention", counted)
    subjects, (case, _) = [Ideal(), Sdpa("math")], problems(cells("causal"))
    report = verify(subjects, [Case(problem=case)], device="cpu", timed=True)
    assert len(calls) == 1
    timed, other = report.records
    assert timed.seconds is None
    assert other.seconds > 0
    (alone,) = verify(Ideal(), [Case(problem=case)], device="cpu").records
    assert (timed.digest, timed.out, timed.lse) == (alone.digest, alone.out, alone.lse)


def test_faulty_variants_of_the_ideal_kernel_are_run_themselves():
    """Neither a subclass nor a modified instance shares the outputs kept for the ideal kernel."""

    class ScoresOff(Ideal):
        name = "off"

        def scores(self, products):
            return products * 1.01

    stepped = CONTINUOUS_FAULTS["scale-off"].kernel(0.5)
    assert type(stepped) is Ideal
    (case, _) = problems(cells("causal"))
    for faulty in (ScoresOff(), stepped):
        records = verify([Ideal(), faulty], [Case(problem=case)], device="cpu", timed=True).records
        assert [record.status for record in records] == ["pass", "fail"]
        assert records[1].seconds > 0


def test_exception_in_the_ideal_kernel_is_its_error_record(monkeypatch):
    def broken(*_):
        raise ValueError("planted")

    monkeypatch.setattr(ideal, "attention", broken)
    (case, _) = problems(cells("causal"))
    (record,) = verify([Ideal()], [Case(problem=case)], device="cpu", timed=True).records
    assert (record.status, "planted" in record.reason) == ("error", True)


def test_kernels_run_only_on_the_operations_that_concern_them():
    planned, subjects = cells("full", "softmax"), [Ideal(), Sdpa("math"), Softmax()]
    by_cell = case_subjects(problems(planned), subjects, "cpu")
    names = [[subject.name for subject in group] for group in by_cell]
    assert list(zip([cell.variant for cell in planned], names, strict=True)) == [
        ("full", ["ideal", "sdpa-math"]),
        ("full", ["ideal", "sdpa-math"]),
        ("softmax", ["ideal", "rows"]),
    ]
    report = measured(planned, subjects)
    assert [(r.variant, r.heads, r.kernel, r.status) for r in report.records] == [
        ("full", "MHA", "ideal", "pass"),
        ("full", "MHA", "sdpa-math", "pass"),
        ("full", "MQA", "ideal", "pass"),
        ("full", "MQA", "sdpa-math", "pass"),
        ("softmax", "", "ideal", "pass"),
        ("softmax", "", "rows", "pass"),
    ]


def test_kernel_without_gradients_has_no_backward_records():
    class Forward(Ideal):
        name, backward = "forward", False

        def concerns(self, problem):
            return Subject.concerns(self, problem)

    planned, subjects = cells("full"), [Forward(), Ideal()]
    assert applicable_subjects(problems(planned), subjects) == subjects
    report = measured([cell.asking(backward=True) for cell in planned], subjects)
    assert [(r.kernel, r.status, sorted(r.gradients)) for r in report.records] == [
        ("ideal", "pass", ["dk", "dq", "dv"]) for _ in ("MHA", "MQA")
    ]
    assert list(report.kernels) == ["ideal"]


def test_iter_records_yields_each_record_before_drawing_the_next_case(monkeypatch):
    drawn = []

    class LogsDraws(evidence_builder.EvidenceBuilder):
        def establish(self, **more):
            drawn.append(self.case.problem.operation)
            super().establish(**more)

    monkeypatch.setattr(run_case_file, "EvidenceBuilder", LogsDraws)
    cases = [Case(problem=problem) for problem in problems(cells("full", "softmax"))]
    records = iter_records([Softmax()], [*cases, *cases], device="cpu", applicable_only=True)
    assert next(records).case_id == cases[-1].id
    assert drawn == ["softmax"]


def test_kernel_that_no_cell_concerns_is_not_in_the_report():
    planned = cells("softmax")
    subjects = [Sdpa("math"), Sdpa("cudnn"), Softmax()]
    assert applicable_subjects(problems(planned), subjects) == subjects[2:]
    assert applicable_subjects(problems([*planned, *cells("full")]), subjects) == subjects
    report = measured(planned, subjects)
    assert list(report.kernels) == ["rows"]
    assert report.absent == {}
    assert [r.kernel for r in report.records] == ["rows"]
    assert measured(planned, subjects[:2]).records == ()


def test_concerns_is_not_called_on_an_absent_kernel():
    calls = []

    class Absent(Softmax):
        def absent(self, device):
            return "not here"

        def concerns(self, problem):
            calls.append(problem)
            return True

    assert case_subjects(problems(cells("softmax")), [Absent()], "cpu") == [[]]
    assert calls == []


def test_exception_in_concerns_is_an_error_record():
    class Broken(Softmax):
        def concerns(self, problem):
            raise ValueError("planted")

        def unsupported(self, problem, device):
            return "no" if self.concerns(problem) else None

    planned = [Cell(variant="causal", problem=Problem(query=3, mask=Spec.of("causal")))]
    report = measured(planned, [Broken(), Ideal()])
    assert [(r.kernel, r.status, without_place(r.reason)) for r in report.records] == [
        ("rows", "error", "ValueError: planted"),
        ("ideal", "pass", ""),
    ]

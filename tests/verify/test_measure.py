"""Which kernels are asked which cells, and what a Report says of it."""

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


class Rows(Subject):
    """A softmax alone: it is not asked about attention."""

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


def measured(made, subjects):
    cases = [(cell.variant, Case(problem=cell.problem)) for cell in made]
    return verify(subjects, cases, device="cpu", command="asked", applicable_only=True, timed=True)


def problems(made):
    return [cell.problem for cell in made]


def test_a_kernel_that_is_absent_is_named_once_and_run_nowhere():
    subjects = [Ideal(), Sdpa("cudnn")]
    report = measured(cells("full", "causal"), subjects)
    seen = report.records
    assert report.command == "asked"
    assert report.kernels == {s.name: s.summary for s in subjects}
    assert report.absent == {"sdpa-cudnn": "needs a CUDA GPU"}
    assert [(r.variant, r.heads, r.kernel) for r in seen] == [
        (variant, heads, "ideal") for variant in ("full", "causal") for heads in ("MHA", "MQA")
    ]
    assert {r.environment for r in seen} == set(report.environments)


def test_the_row_of_the_ideal_kernel_is_what_others_are_compared_with(monkeypatch):
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


def test_a_planted_fault_of_the_ideal_kernel_is_no_ideal_kernel():
    class Off(Ideal):
        name = "off"

        def scores(self, products):
            return products * 1.01

    stepped = CONTINUOUS_FAULTS["scale-off"].kernel(0.5)
    assert type(stepped) is Ideal
    (case, _) = problems(cells("causal"))
    for faulty in (Off(), stepped):
        records = verify([Ideal(), faulty], [Case(problem=case)], device="cpu", timed=True).records
        assert [record.status for record in records] == ["pass", "fail"]
        assert records[1].seconds > 0


def test_what_the_ideal_kernel_raises_is_its_record(monkeypatch):
    def broken(*_):
        raise ValueError("planted")

    monkeypatch.setattr(ideal, "attention", broken)
    (case, _) = problems(cells("causal"))
    (record,) = verify([Ideal()], [Case(problem=case)], device="cpu", timed=True).records
    assert (record.status, "planted" in record.reason) == ("error", True)


def test_a_kernel_is_asked_only_what_concerns_it():
    made, subjects = cells("full", "softmax"), [Ideal(), Sdpa("math"), Rows()]
    asked = case_subjects(problems(made), subjects, "cpu")
    assert [(c.variant, [s.name for s in who]) for c, who in zip(made, asked, strict=True)] == [
        ("full", ["ideal", "sdpa-math"]),
        ("full", ["ideal", "sdpa-math"]),
        ("softmax", ["ideal", "rows"]),
    ]
    report = measured(made, subjects)
    assert [(r.variant, r.heads, r.kernel, r.status) for r in report.records] == [
        ("full", "MHA", "ideal", "pass"),
        ("full", "MHA", "sdpa-math", "pass"),
        ("full", "MQA", "ideal", "pass"),
        ("full", "MQA", "sdpa-math", "pass"),
        ("softmax", "", "ideal", "pass"),
        ("softmax", "", "rows", "pass"),
    ]


def test_a_kernel_without_gradients_has_no_row_where_they_are_asked_for():
    class Forward(Ideal):
        name, backward = "forward", False

        def concerns(self, problem):
            return Subject.concerns(self, problem)

    made, subjects = cells("full"), [Forward(), Ideal()]
    assert applicable_subjects(problems(made), subjects) == subjects
    report = measured([cell.asking(backward=True) for cell in made], subjects)
    assert [(r.kernel, r.status, sorted(r.gradients)) for r in report.records] == [
        ("ideal", "pass", ["dk", "dq", "dv"]) for _ in ("MHA", "MQA")
    ]
    assert list(report.kernels) == ["ideal"]


def test_records_come_as_they_are_made_and_nothing_is_drawn_beyond_them(monkeypatch):
    drawn = []

    class Told(evidence_builder.EvidenceBuilder):
        def establish(self, **more):
            drawn.append(self.case.problem.operation)
            super().establish(**more)

    monkeypatch.setattr(run_case_file, "EvidenceBuilder", Told)
    cases = [Case(problem=problem) for problem in problems(cells("full", "softmax"))]
    records = iter_records([Rows()], [*cases, *cases], device="cpu", applicable_only=True)
    assert next(records).case_id == cases[-1].id
    assert drawn == ["softmax"]


def test_a_kernel_that_no_cell_concerns_is_not_in_the_report_at_all():
    made = cells("softmax")
    subjects = [Sdpa("math"), Sdpa("cudnn"), Rows()]
    assert applicable_subjects(problems(made), subjects) == subjects[2:]
    assert applicable_subjects(problems([*made, *cells("full")]), subjects) == subjects
    report = measured(made, subjects)
    assert list(report.kernels) == ["rows"]
    assert report.absent == {}
    assert [r.kernel for r in report.records] == ["rows"]
    assert measured(made, subjects[:2]).records == ()


def test_who_is_absent_is_not_asked_what_concerns_it():
    asked = []

    class Gone(Rows):
        def absent(self, device):
            return "not here"

        def concerns(self, problem):
            asked.append(problem)
            return True

    (who,) = case_subjects(problems(cells("softmax")), [Gone()], "cpu")
    assert (who, asked) == ([], [])


def test_who_cannot_say_what_concerns_it_is_asked_and_its_cell_tells():
    class Moody(Rows):
        def concerns(self, problem):
            raise ValueError("planted")

        def unsupported(self, problem, device):
            return "no" if self.concerns(problem) else None

    made = [Cell(variant="causal", problem=Problem(query=3, mask=Spec.of("causal")))]
    report = measured(made, [Moody(), Ideal()])
    assert [(r.kernel, r.status, without_place(r.reason)) for r in report.records] == [
        ("rows", "error", "ValueError: planted"),
        ("ideal", "pass", ""),
    ]

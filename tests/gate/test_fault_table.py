"""The faults of the page "Gate a kernel", in a gate, with a right Case after each."""

import contextlib
import csv
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.gate import planted_faults as call_faults
from tests.gate.gate_driver import choices
from tests.verify import planted_processes as process_faults

from attncheck import oracles
from attncheck.core.mod_spec import Spec
from attncheck.gate.gate_worker import GateWorker
from attncheck.inputs.problem import Case, Problem
from attncheck.verify.question_fit import question_named
from attncheck.workers.units import Unit

ROOT = Path(__file__).parents[2]
TIMEOUT = 4.0


@dataclass(frozen=True)
class Row:
    """Kernels with a fault, the question for each, and the expected outcome.

    Attributes:
        faults: Functions of a planted file.
        outcome: The expected status or rule.
        reason: Text that the reason contains.
        question: The question of the Case.
        first: How many Cases are answered rightly before the fault shows.
        most: How many Cases are tried until one fails.
    """

    faults: tuple[Any, ...]
    outcome: str
    reason: str = ""
    question: str = "compare"
    first: int = 0
    most: int = 1


P, C = process_faults, call_faults
# Grouped by file: each has a process. Restarting one takes seconds, so one hang is enough.
ROWS = {
    # tests/verify/test_isolated_faults.py has all faults of a process.
    "mutated input": Row((P.mutation_unseen,), "mutation", "wrote to its input"),
    "hang; daemon": Row((P.daemon_and_hang,), "timeout", "it did not answer"),
    "writes beside an output": Row(
        (C.writes_beside_its_output,), "memory", question="guards", reason="out"
    ),
    "unwritten rows": Row((C.leaves_rows_unwritten,), "memory", question="unwritten", reason="out"),
    "reads what is hidden": Row(
        (C.multiplies_what_is_hidden,), "relation", question="hidden_keys_nan", reason="out"
    ),
    "stale bytes": Row((C.stale_bytes,), "bound", first=1, most=2),
    "cache by shape": Row((C.kept_by_shape,), "bound", first=1, most=2),
    "cache by pointer": Row((C.kept_by_pointer,), "bound", most=20),
    "right on the first call alone": Row((C.right_on_the_first_call,), "bound", first=1, most=2),
    "nondeterministic": Row(
        (C.another_order,), "determinism", question="repeats", reason="nondeterministic "
    ),
    # tests/verify/test_memory_checks.py has all faults of memory and state.
    "leaks": Row((C.keeps_memory, C.keeps_descriptors), "leak", question="leaks"),
    "changed state": Row(
        (C.changes_the_default_dtype, C.changes_the_working_directory), "state", question="state"
    ),
}


@pytest.fixture(scope="module")
def gate(tmp_path_factory):
    # An own folder: a file that a fault left earlier would tell that a process has started.
    with contextlib.chdir(tmp_path_factory.mktemp("gate")):
        worker = GateWorker(choices(dtypes="", isolated=True, timeout=TIMEOUT))
        yield worker
        worker.close()


def problem(length, seed=0):
    return Problem(query=length, kv=9, head_dim=8, dtype="fp32", mask=Spec.of("causal"), seed=seed)


def ask(gate, file, length, *, question="compare", seed=0):
    question_problem = problem(length, seed)
    numbers = {
        name: values[0]
        for name, values in question_named(question).allowed(question_problem).items()
    }
    case = Case(problem=question_problem, question=question, parameters=numbers)
    unit = Unit(
        kind="ask",
        stage="contract",
        kernel=f"{file.__file__}::Planted",
        device="cpu",
        tier="smoke",
        case=case.to_json(),
    )
    done = gate.do(unit)
    assert not done.harness, done.harness
    (answer,) = done.answers
    return answer.record


def rule(record):
    return record.judgement.rule if record.judgement and record.judgement.rule else record.status


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_fault_gets_its_verdict_and_the_next_right_case_passes(gate, row):
    file = process_faults if row.faults[0].__module__ == process_faults.__name__ else call_faults
    lengths = {fault: length for length, fault in file.FAULTS.items()}
    for fault in row.faults:
        answers = []
        for seed in range(row.most):
            answers.append(ask(gate, file, lengths[fault], question=row.question, seed=seed))
            if answers[-1].status != "pass":
                break
        record = answers[-1]
        assert rule(record) == row.outcome, (fault.__name__, record)
        assert record.status == ("fail" if rule(record) != record.status else row.outcome)
        assert len(answers) > row.first
        assert row.reason in (record.reason or record.judgement.reason)
        assert ask(gate, file, file.RIGHT, seed=99).status == "pass"


def test_every_planted_fault_has_a_row():
    tested = {fault for row in ROWS.values() for fault in row.faults}
    assert set(call_faults.FAULTS.values()) <= tested


def test_broken_oracle_does_not_blame_the_kernel(gate, monkeypatch):
    truth = oracles.truth

    def broken(inputs):
        outputs = truth(inputs)
        outputs.out[0, 0, -1, 0] += 1
        return outputs

    with monkeypatch.context() as patch:
        patch.setattr(oracles, "truth", broken)
        record = ask(gate, call_faults, call_faults.RIGHT, seed=3)
    assert (record.status, record.judgement) == ("oracle disagrees", None)
    assert "nothing is said of the kernel" in record.reason
    assert ask(gate, call_faults, call_faults.RIGHT, seed=3).status == "pass"


def test_hostile_kernel_names_are_escaped_in_reports_and_file_names(tmp_path, warm_python):
    folder, here = tmp_path / "=cmd()<script>", tmp_path / "here"
    folder.mkdir()
    here.mkdir()
    source = Path(call_faults.__file__).read_text()
    (folder / "<script>alert(1).py").write_text(source)
    kernel = "../=cmd()<script>/<script>alert(1).py::Named"
    little = ("--tier", "smoke", "--dtype", "fp32", "--stage", "contract", "--jobs", "1", "-q")
    words = ("gate", kernel, "-x", "--format", "csv", *little, "--in-process")
    done = warm_python.run("attncheck", *words, cwd=here, timeout=300)
    assert done.returncode == 1, done.stderr
    cells = [cell for line in csv.reader(io.StringIO(done.stdout)) for cell in line]
    assert any("=cmd()" in cell for cell in cells)
    assert not any(cell.startswith(("=", "+", "@")) for cell in cells)
    files = [path for path in here.rglob("*") if path.is_file()]
    assert {path.parent.name for path in files} >= {"gate", "repro", "failures"}
    assert all(re.fullmatch(r"[\w.-]+", path.name) for path in files)
    assert {path.name for path in tmp_path.iterdir()} == {folder.name, "here"}
    assert {path.name for path in folder.iterdir()} <= {"<script>alert(1).py", "__pycache__"}
    page = (here / "reports" / "gate" / "report.html").read_text()
    assert "&lt;script&gt;alert(1)" in page
    assert "<script>alert" not in page


def test_unwritable_folder_and_damaged_baseline_are_one_line_errors(tmp_path):
    from click.testing import CliRunner

    from attncheck.cli.gate import gate as verb
    from attncheck.core.errors import AttncheckError

    (tmp_path / "file").touch()
    damaged = tmp_path / "baseline.json"
    damaged.write_text('{"schema": 1, "entr')
    for words, expected in (
        (("--out", str(tmp_path / "file" / "gate")), "file"),
        (("--out", str(tmp_path / "gate"), "--baseline", str(damaged)), "baseline invalid"),
    ):
        done = CliRunner().invoke(verb, ["ideal", "-q", *words])
        message = str(done.exception) if isinstance(done.exception, AttncheckError) else done.output
        assert expected in message, (done.output, done.exception)
        assert "\n" not in message.strip()
        assert done.exit_code != 0
    assert not (tmp_path / "gate" / "gate.json").exists()

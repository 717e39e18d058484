"""The faults of the page "Gate a kernel", through a gate: after each one a right Case."""

import contextlib
import csv
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.gate import planted_faults as of_calls
from tests.gate.driven import choices
from tests.verify import planted_processes as of_processes

from attncheck import oracles
from attncheck.core.mod_spec import Spec
from attncheck.gate.gate_worker import GateWorker
from attncheck.inputs.problem import Case, Problem
from attncheck.records.run_reports import GateReport
from attncheck.reporting.gate_verdict import gate_exit_code
from attncheck.verify.question_fit import allowed_parameters
from attncheck.workers.units import Unit

ROOT = Path(__file__).parents[2]
TIMEOUT = 4.0


@dataclass(frozen=True)
class Row:
    """Kernels with a fault, what each is asked, and what must become of it.

    Attributes:
        faults: Functions of a planted file.
        question: What they are asked.
        said: A status or a rule.
        why: What the reason has in it.
        first: How many Cases are answered rightly before.
        most: Cases that are asked until one is not right.
    """

    faults: tuple[Any, ...]
    said: str
    why: str = ""
    question: str = "compare"
    first: int = 0
    most: int = 1


P, C = of_processes, of_calls
# One file after the other: each has a process. What ends one takes seconds: a hang stands for it.
ROWS = {
    # Of what a process does, all is asked in tests/verify/test_isolated_faults.py.
    "mutated input": Row((P.mutation_unseen,), "mutation", "wrote to its input"),
    "hang; daemon": Row((P.daemon_and_hang,), "timeout", "it did not answer"),
    "writes beside an output": Row(
        (C.writes_beside_its_output,), "memory", question="guards", why="out"
    ),
    "unwritten rows": Row((C.leaves_rows_unwritten,), "memory", question="unwritten", why="out"),
    "reads what is hidden": Row(
        (C.multiplies_what_is_hidden,), "relation", question="hidden_keys_nan", why="out"
    ),
    "stale bytes": Row((C.stale_bytes,), "bound", first=1, most=2),
    "cache by shape": Row((C.kept_by_shape,), "bound", first=1, most=2),
    "cache by pointer": Row((C.kept_by_pointer,), "bound", most=20),
    "right on the first call alone": Row((C.right_on_the_first_call,), "bound", first=1, most=2),
    "nondeterministic": Row(
        (C.another_order,), "determinism", question="repeats", why="nondeterministic "
    ),
    # Of what a call keeps and changes, all is asked in tests/verify/test_memory_checks.py.
    "leaks": Row((C.keeps_memory, C.keeps_descriptors), "leak", question="leaks"),
    "changed state": Row(
        (C.changes_the_default_dtype, C.changes_the_working_directory), "state", question="state"
    ),
}


@pytest.fixture(scope="module")
def gate(tmp_path_factory):
    # Where faults leave files: one from before would say that a process has started.
    with contextlib.chdir(tmp_path_factory.mktemp("gate")):
        found = GateWorker(choices(dtypes="", isolated=True, timeout=TIMEOUT))
        yield found
        found.close()


def problem(length, seed=0):
    return Problem(query=length, kv=9, head_dim=8, dtype="fp32", mask=Spec.of("causal"), seed=seed)


def ask(gate, file, length, *, question="compare", seed=0):
    asked = problem(length, seed)
    numbers = {name: values[0] for name, values in allowed_parameters(question, asked).items()}
    case = Case(problem=asked, question=question, parameters=numbers)
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
def test_a_fault_has_its_verdict_and_the_next_right_case_passes(gate, row):
    file = of_processes if row.faults[0].__module__ == of_processes.__name__ else of_calls
    lengths = {fault: length for length, fault in file.FAULTS.items()}
    for fault in row.faults:
        answers = []
        for seed in range(row.most):
            answers.append(ask(gate, file, lengths[fault], question=row.question, seed=seed))
            if answers[-1].status != "pass":
                break
        record = answers[-1]
        assert rule(record) == row.said, (fault.__name__, record)
        assert record.status == ("fail" if rule(record) != record.status else row.said)
        assert len(answers) > row.first
        assert row.why in (record.reason or record.judgement.reason)
        assert ask(gate, file, file.RIGHT, seed=99).status == "pass"


def test_every_planted_fault_has_a_row():
    asked = {fault for row in ROWS.values() for fault in row.faults}
    assert set(of_calls.FAULTS.values()) <= asked


def test_a_broken_oracle_says_nothing_of_the_kernel(gate, monkeypatch):
    right = oracles.truth

    def broken(inputs):
        given = right(inputs)
        given.out[0, 0, -1, 0] += 1
        return given

    with monkeypatch.context() as patch:
        patch.setattr(oracles, "truth", broken)
        record = ask(gate, of_calls, of_calls.RIGHT, seed=3)
    assert (record.status, record.judgement) == ("oracle disagrees", None)
    assert "nothing is said of the kernel" in record.reason
    assert ask(gate, of_calls, of_calls.RIGHT, seed=3).status == "pass"


def test_a_name_is_text_and_a_path_is_a_folder_of_ours(tmp_path, warm_python):
    folder, here = tmp_path / "=cmd()<script>", tmp_path / "here"
    folder.mkdir()
    here.mkdir()
    source = Path(of_calls.__file__).read_text()
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


def test_what_cannot_be_written_to_and_a_damaged_baseline_are_said_in_one_line(tmp_path):
    from click.testing import CliRunner

    from attncheck.cli.gate import gate as verb
    from attncheck.core.errors import AttncheckError

    (tmp_path / "file").touch()
    damaged = tmp_path / "baseline.json"
    damaged.write_text('{"schema": 1, "entr')
    for words, said in (
        (("--out", str(tmp_path / "file" / "gate")), "file"),
        (("--out", str(tmp_path / "gate"), "--baseline", str(damaged)), "baseline invalid"),
    ):
        done = CliRunner().invoke(verb, ["ideal", "-q", *words])
        told = str(done.exception) if isinstance(done.exception, AttncheckError) else done.output
        assert said in told, (done.output, done.exception)
        assert "\n" not in told.strip()
        assert done.exit_code != 0
    assert not (tmp_path / "gate" / "gate.json").exists()


def test_nothing_tested_is_no_pass():
    nothing = GateReport(
        command="", tier="smoke", started="", seconds=0.0, environments={}, kernels={}
    )
    assert gate_exit_code(nothing) == 5

"""``attncheck gate``: exit codes, files, going on with a run that was stopped."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from attncheck.cli.gate import GateOptions, plan_run, run_gate
from attncheck.core.errors import UsageError
from attncheck.diagnose.reproduce import new_failure
from attncheck.gate.gate_worker import GateWorker
from attncheck.gate.plan import REPLAYED
from attncheck.inputs.problem import Case, Problem
from attncheck.records.failures import keep_failure
from attncheck.records.json_reports import load_report
from attncheck.records.run_reports import GateReport
from attncheck.verify.run_case import blank_record
from attncheck.workers.journal import Journal, merge_journals, merged_journal_bytes
from attncheck.workers.journal_format import JournalError, read_journal
from attncheck.workers.units import UnitResult

PLANTED = Path(__file__).with_name("planted_kernels.py")
LITTLE = ("--tier", "smoke", "--dtype", "fp32", "--stage", "contract", "--jobs", "1", "-q")


@pytest.fixture(scope="module")
def gate(warm_python):
    return lambda *words, cwd: warm_python.run("attncheck", "gate", *words, cwd=cwd, timeout=300)


def fresh(*words, cwd):
    """In a process that has imported nothing."""
    return subprocess.run(
        [sys.executable, "-m", "attncheck", "gate", *words],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nobody",), "kernel 'nobody' is not known: choose from"),
        (("missing.py::kernel",), "there is no file 'missing.py'"),
        (("ideal", "--tier", "hard"), "tier 'hard' is not known: choose from nightly, pr, smoke"),
        (("ideal", "--stage", "bound"), "stage 'bound' is not known: did you mean 'bounds'?"),
        (("ideal", "--dtype", "fp12"), "dtype 'fp12' is not known: choose from"),
        (("ideal", "--max-time", "soon"), "must be a time above 0, such as 90s, 10m or 2h"),
        (("ideal", "--shard", "3/2"), "shard '3/2' must be I/N"),
        (("ideal", "--tier", "nightly", "--shard", "1/2"), "give all parts the same --seed N"),
        (("ideal", "--format", "pdf"), "'pdf' is not known: choose from"),
        (("ideal", "--changed-since", "main"), "--changed-since"),
        ((), "no kernel is named"),
    ],
)
def test_what_cannot_be_is_one_line_and_2(words, said, tmp_path, attncheck_here):
    code, err = attncheck_here(*words, cwd=tmp_path)
    assert code == 2
    assert said in err
    assert not (tmp_path / "reports").exists()


@pytest.fixture
def attncheck_here(monkeypatch):
    """The verb in this process: nothing is started for what cannot be."""
    from click.testing import CliRunner

    from attncheck.cli.gate import gate as verb

    def run(*words, cwd):
        monkeypatch.chdir(cwd)
        result = CliRunner().invoke(verb, words)
        if isinstance(result.exception, UsageError):
            return 2, str(result.exception)
        return result.exit_code, result.output

    return run


def these_options(shard="", seed=None, directory="reports/gate", stage="contract"):
    """Those of ``attncheck gate ideal --tier nightly``."""
    return GateOptions(
        tier="nightly",
        device="cpu",
        dtypes=("fp32",),
        stages=(stage,),
        seed=seed,
        shard=shard,
        in_process=True,
        directory=str(directory),
        jobs=1,
        quiet=True,
    )


def this_run(*args, **options):
    """What it is to do; nothing is done."""
    return plan_run(these_options(*args, **options), ("ideal",))


def part(shard, seed, folder):
    """The journal of a part of that run, whose kernel is right."""
    this, path = this_run(shard, seed), folder / f"{shard[0]}.jsonl"
    gate = GateWorker(this.choices)
    with Journal.open(path, this.head, resume=False) as journal:
        journal.queued(this.units)
        for unit in this.units:
            journal.done(gate.do(unit))
        for unit in journal.content.unfinished:
            journal.done(UnitResult(unit=unit.id))
    gate.close()
    return path


def test_parts_of_nightly_with_one_seed_are_one_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parts = [part(shard, 7, tmp_path) for shard in ("1/2", "2/2")]
    content = merge_journals({str(path): read_journal(path) for path in parts})
    assert content.units.keys() == content.results.keys()
    assert len(content.results) > len(read_journal(parts[0]).results) > 1
    (tmp_path / "results.jsonl").write_bytes(merged_journal_bytes(content))
    whole = this_run(directory=tmp_path)  # goes on with the numbers that the parts have drawn
    assert (whole.head["seed"], whole.choices.seed) == (7, 7)
    with Journal.open(tmp_path / "results.jsonl", whole.head, resume=True) as journal:
        assert journal.results == content.results
    other = part("2/2", 8, tmp_path)
    with pytest.raises(UsageError, match="no parts of one run: seed is 7 and 8"):
        merge_journals({str(path): read_journal(path) for path in (parts[0], other)})


def test_a_part_asks_nothing_that_failed_on_its_own_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    case = Case(problem=Problem(query=4, dtype="fp32"))
    record = blank_record(case, kernel="ideal", reason="planted")
    keep_failure(
        new_failure(record, kernel="ideal", device="cpu", convention="", test=""),
        "reports/failures",
    )
    variants = [
        [unit.variant for unit in this_run(shard, seed=7, stage="bounds").units]
        for shard in ("", "1/2", "2/2")
    ]
    assert variants == [["", REPLAYED], [""], [""]]


def test_another_seed_is_another_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with Journal.open(tmp_path / "results.jsonl", this_run(seed=7).head, resume=False) as journal:
        journal.queued(this_run(seed=7).units)
    this = this_run(seed=8, directory=tmp_path)
    with pytest.raises(JournalError, match="holds another run: seed is 7 there and 8 here"):
        run_gate(this, these_options(seed=8, directory=tmp_path))
    assert "goes on" not in capsys.readouterr().err


def test_a_wrong_kernel_is_1_with_all_files(tmp_path, warm_python):
    done = fresh(f"{PLANTED}::of_another_dtype", *LITTLE, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "FAIL" in done.stdout
    folder = tmp_path / "reports" / "gate"
    names = {path.name for path in folder.iterdir()}
    assert names >= {"results.jsonl", "gate.json", "report.html", "junit.xml", "summary.md"}
    report = load_report(folder / "gate.json", GateReport)
    assert {answer.record.status for answer in report.answers} >= {"fail"}
    assert report.stages == ("contract",)
    scripts = list((folder / "repro").iterdir())
    assert scripts
    asked = warm_python.run(str(scripts[0]), cwd=Path.cwd())
    assert asked.returncode == 1
    assert "FileNotFoundError" not in asked.stdout  # it finds its kernel
    assert "No such file" not in asked.stdout
    kept = {path.stem for path in (tmp_path / "reports" / "failures").iterdir()}
    assert {answer.failure for answer in report.answers if answer.failure} == kept


def test_nothing_tested_is_5_and_a_stopped_run_goes_on(gate, tmp_path):
    nothing = gate(f"{PLANTED}::takes_nothing", *LITTLE, "--in-process", cwd=tmp_path)
    assert nothing.returncode == 5, nothing.stdout + nothing.stderr

    stopped = gate("ideal", *LITTLE, "--max-time", "0.001s", cwd=tmp_path)
    assert stopped.returncode == 3, stopped.stderr
    assert "the same command goes on" in stopped.stderr
    other = gate("ideal", *LITTLE, "--skip", "probes", "--dtype", "bf16", cwd=tmp_path)
    assert other.returncode == 3
    assert "holds another run" in other.stderr
    journal = tmp_path / "reports" / "gate" / "results.jsonl"
    before = set(read_journal(journal).results)

    rest = gate("ideal", *LITTLE, cwd=tmp_path)
    assert rest.returncode == 0, rest.stdout + rest.stderr
    assert "goes on with" in rest.stderr
    content = read_journal(journal)
    assert before <= set(content.results)
    assert not content.unfinished
    begun = [json.loads(line) for line in journal.read_text().splitlines()]
    results = [line["done"]["unit"] for line in begun if line["kind"] == "result"]
    assert len(results) == len(set(results))


def test_the_first_failure_stops_the_run(gate, tmp_path):
    options = (*LITTLE, "--stage", "bounds", "-x", "--in-process")
    done = gate(f"{PLANTED}::of_another_dtype", *options, cwd=tmp_path)
    assert done.returncode == 1
    report = load_report(tmp_path / "reports" / "gate" / "gate.json", GateReport)
    assert report.unfinished
    assert "stopped early, before the questions of bounds were chosen" in report.unfinished_because
    assert "--in-process" in done.stderr

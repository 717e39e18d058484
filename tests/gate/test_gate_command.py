"""``attncheck gate``: exit codes, files, usage errors, shards and resuming a stopped run."""

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


def run_in_new_process(*words, cwd):
    """Runs the verb in a process that has imported nothing."""
    return subprocess.run(
        [sys.executable, "-m", "attncheck", "gate", *words],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize(
    ("words", "message"),
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
def test_usage_errors_are_one_line_and_exit_with_2(words, message, tmp_path, invoke_gate):
    code, err = invoke_gate(*words, cwd=tmp_path)
    assert code == 2
    assert message in err
    assert not (tmp_path / "reports").exists()


@pytest.fixture
def invoke_gate(monkeypatch):
    """Runs the verb in this process: a usage error starts nothing."""
    from click.testing import CliRunner

    from attncheck.cli.gate import gate as verb

    def run(*words, cwd):
        monkeypatch.chdir(cwd)
        result = CliRunner().invoke(verb, words)
        if isinstance(result.exception, UsageError):
            return 2, str(result.exception)
        return result.exit_code, result.output

    return run


def nightly_options(shard="", seed=None, directory="reports/gate", stage="contract"):
    """Options of ``attncheck gate ideal --tier nightly``."""
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


def nightly_plan(*args, **options):
    """The plan of that run, which is not executed."""
    return plan_run(nightly_options(*args, **options), ("ideal",))


def run_shard(shard, seed, folder):
    """Runs one shard of that plan on the ideal kernel, and returns its journal's path."""
    run_plan, path = nightly_plan(shard, seed), folder / f"{shard[0]}.jsonl"
    gate = GateWorker(run_plan.choices)
    with Journal.open(path, run_plan.head, resume=False) as journal:
        journal.write_queued(run_plan.units)
        for unit in run_plan.units:
            journal.write_result(gate.do(unit))
        for unit in journal.content.unfinished:
            journal.write_result(UnitResult(unit=unit.id))
    gate.close()
    return path


def test_shards_with_one_seed_merge_into_one_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parts = [run_shard(shard, 7, tmp_path) for shard in ("1/2", "2/2")]
    content = merge_journals({str(path): read_journal(path) for path in parts})
    assert content.units.keys() == content.results.keys()
    assert len(content.results) > len(read_journal(parts[0]).results) > 1
    (tmp_path / "results.jsonl").write_bytes(merged_journal_bytes(content))
    whole = nightly_plan(directory=tmp_path)  # resumes with the shards' numbers
    assert (whole.head["seed"], whole.choices.seed) == (7, 7)
    with Journal.open(tmp_path / "results.jsonl", whole.head, resume=True) as journal:
        assert journal.results == content.results
    other = run_shard("2/2", 8, tmp_path)
    with pytest.raises(UsageError, match="no parts of one run: seed is 7 and 8"):
        merge_journals({str(path): read_journal(path) for path in (parts[0], other)})


def test_shard_replays_no_failures_of_its_own_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    case = Case(problem=Problem(query=4, dtype="fp32"))
    record = blank_record(case, kernel="ideal", reason="planted")
    keep_failure(
        new_failure(record, kernel="ideal", device="cpu", convention="", test=""),
        "reports/failures",
    )
    variants = [
        [unit.variant for unit in nightly_plan(shard, seed=7, stage="bounds").units]
        for shard in ("", "1/2", "2/2")
    ]
    assert variants == [["", REPLAYED], [""], [""]]


def test_run_with_another_seed_does_not_resume(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with Journal.open(
        tmp_path / "results.jsonl", nightly_plan(seed=7).head, resume=False
    ) as journal:
        journal.write_queued(nightly_plan(seed=7).units)
    run_plan = nightly_plan(seed=8, directory=tmp_path)
    with pytest.raises(JournalError, match="holds another run: seed is 7 there and 8 here"):
        run_gate(run_plan, nightly_options(seed=8, directory=tmp_path))
    assert "goes on" not in capsys.readouterr().err


def test_wrong_kernel_exits_with_1_and_writes_all_files(tmp_path, warm_python):
    done = run_in_new_process(f"{PLANTED}::of_another_dtype", *LITTLE, cwd=tmp_path)
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
    reproduced = warm_python.run(str(scripts[0]), cwd=Path.cwd())
    assert reproduced.returncode == 1
    assert "FileNotFoundError" not in reproduced.stdout  # it finds its kernel
    assert "No such file" not in reproduced.stdout
    saved = {path.stem for path in (tmp_path / "reports" / "failures").iterdir()}
    assert {answer.failure for answer in report.answers if answer.failure} == saved


def test_nothing_tested_exits_with_5_and_a_stopped_run_resumes(gate, tmp_path):
    nothing = gate(f"{PLANTED}::refuses_everything", *LITTLE, "--in-process", cwd=tmp_path)
    assert nothing.returncode == 5, nothing.stdout + nothing.stderr

    stopped = gate("ideal", *LITTLE, "--max-time", "0.001s", cwd=tmp_path)
    assert stopped.returncode == 3, stopped.stderr
    assert "the same command goes on" in stopped.stderr
    other = gate("ideal", *LITTLE, "--skip", "probes", "--dtype", "bf16", cwd=tmp_path)
    assert other.returncode == 3
    assert "holds another run" in other.stderr
    journal = tmp_path / "reports" / "gate" / "results.jsonl"
    answered = set(read_journal(journal).results)

    resumed = gate("ideal", *LITTLE, cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "goes on with" in resumed.stderr
    content = read_journal(journal)
    assert answered <= set(content.results)
    assert not content.unfinished
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    results = [line["done"]["unit"] for line in lines if line["kind"] == "result"]
    assert len(results) == len(set(results))


def test_fail_fast_stops_the_run_at_the_first_failure(gate, tmp_path):
    options = (*LITTLE, "--stage", "bounds", "-x", "--in-process")
    done = gate(f"{PLANTED}::of_another_dtype", *options, cwd=tmp_path)
    assert done.returncode == 1
    report = load_report(tmp_path / "reports" / "gate" / "gate.json", GateReport)
    assert report.unfinished
    assert "stopped early, before the questions of bounds were chosen" in report.unfinished_because
    assert "--in-process" in done.stderr


def test_kernel_that_gives_no_out_is_not_asked_everything(gate, tmp_path):
    (tmp_path / "mine.py").write_text("def kernel(query, key, value, is_causal=False): ...\n")
    done = gate("mine.py::kernel", *LITTLE, "--in-process", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    report = load_report(tmp_path / "reports" / "gate" / "gate.json", GateReport)
    failed = [one for one in report.answers if one.record.status != "unsupported"]
    assert (len(failed), bool(report.unfinished)) == (12, True)

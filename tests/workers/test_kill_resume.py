"""Killed at a random moment and resumed: nothing acknowledged is lost, nothing is done twice."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

# In processes of their own, since every session of a run is a copy of one, which mostly waits.
RUNS = """
import concurrent.futures, dataclasses, json, multiprocessing, sys, tempfile
sys.path.insert(0, {benchmarks!r})
import kill_resume
with tempfile.TemporaryDirectory() as folder:
    tasks = [kill_resume.Task(n % 8, n, folder) for n in range(25)]
    tasks += [kill_resume.Task(9, 100, folder, cold=True)]
    tasks += [kill_resume.Task(n, n, folder, journal)
              for journal in ("hasty", "forgetful") for n in (1, 2, 3)]
    forks = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(4, mp_context=forks) as pool:
        runs = pool.map(kill_resume.work, tasks)
        found = [(t.journal, dataclasses.asdict(run)) for t, run in zip(tasks, runs, strict=True)]
print(json.dumps(found))
"""


def test_twenty_five_runs_that_are_killed_end_as_if_they_had_not_been():
    code = RUNS.format(benchmarks=str(BENCHMARKS))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    right = [one for journal, one in found if journal == "right"]
    assert sum(one["kills"] for one in right) >= 20
    for one in right:
        assert (one["lost"], one["doubled"], one["different"], one["orphans"]) == (0, 0, 0, 0), one
        assert one["broken"] == ""
        assert one["results"] > 0
    # The planted faults are seen.
    assert sum(one["lost"] for journal, one in found if journal == "hasty") > 0
    assert sum(one["different"] for journal, one in found if journal == "forgetful") > 0

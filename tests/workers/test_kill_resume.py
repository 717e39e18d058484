"""Runs killed at random moments and resumed: nothing acknowledged is lost or done twice."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

# In forked processes of their own: each run forks its sessions and mostly waits for them.
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
outcomes = [(t.journal, dataclasses.asdict(run)) for t, run in zip(tasks, runs, strict=True)]
print(json.dumps(outcomes))
"""


def test_killed_and_resumed_runs_end_like_uninterrupted_ones():
    code = RUNS.format(benchmarks=str(BENCHMARKS))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    outcomes = json.loads(done.stdout)
    right = [run for journal, run in outcomes if journal == "right"]
    assert sum(one["kills"] for one in right) >= 20
    for one in right:
        assert (one["lost"], one["doubled"], one["different"], one["orphans"]) == (0, 0, 0, 0), one
        assert one["broken"] == ""
        assert one["results"] > 0
    # Planted faults: a journal that acknowledges too early, and one that forgets results.
    assert sum(run["lost"] for journal, run in outcomes if journal == "hasty") > 0
    assert sum(run["different"] for journal, run in outcomes if journal == "forgetful") > 0

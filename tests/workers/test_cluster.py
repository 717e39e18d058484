"""Units on a Ray cluster: two nodes, one of which is lost midway."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.workers.stub_work import unit

from attncheck.core.errors import UsageError
from attncheck.workers.journal import Journal
from attncheck.workers.journal_format import read_journal
from attncheck.workers.pool import run_units
from attncheck.workers.worker_pool import Cluster

STUB = "tests.workers.stub_work:work"
ROOT = Path(__file__).parents[2]


def test_missing_ray_is_a_usage_error_with_the_install_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    usage_error = pytest.raises(UsageError, match=r"pip install 'attncheck\[ray\]'")
    with Journal.open(tmp_path / "r.jsonl", {}, resume=True) as journal, usage_error:
        run_units(
            [unit("a")], work=STUB, options={}, journal=journal, workers=Cluster(address="local")
        )
    assert "RAY_USAGE_STATS_ENABLED" in os.environ


# In a process of its own: Ray leaves threads and settings behind.
TWO_NODES = """
import os, sys, signal
os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_DISABLE_IMPORT_WARNING="1", PYTHONPATH={root!r})
sys.path.insert(0, {root!r})
import ray
from ray.cluster_utils import Cluster
from attncheck.workers.pool import run_units
from attncheck.workers.worker_pool import Cluster as Nodes
from attncheck.workers.journal import Journal
from attncheck.workers.journal_format import read_journal as read
from tests.workers.stub_work import unit

nodes = Cluster(initialize_head=True, head_node_args={{"num_cpus": 2, "include_dashboard": False}})
lost = nodes.add_node(num_cpus=2)
nodes.wait_for_nodes()
units = [
    unit(f"u{{n}}", seconds=0.05, follow=[(f"f{{n}}", {{"seconds": 0.05}})]) for n in range(40)
]
units.append(unit("deadly", die=signal.SIGSEGV))
acknowledged = []

def on_event(event):
    if event.kind == "done":
        acknowledged.append((event.unit.id, event.done.facts.get("pid")))
        if len(acknowledged) == 30:
            nodes.remove_node(lost, allow_graceful=False)

with Journal.open({path!r}, {{}}, resume=True) as journal:
    ended = run_units(units, work={work!r}, options={{}}, journal=journal,
                        workers=Nodes(address=nodes.address), on_event=on_event)
print("ended", ended.why or "finished", ended.finished, ended.remaining)
for unit_id, pid in acknowledged:
    print("acknowledged", unit_id, pid)
ray.shutdown()
nodes.shutdown()
"""


def test_lost_node_loses_no_acknowledged_result(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'attncheck[ray]'")
    path = tmp_path / "results.jsonl"
    code = TWO_NODES.format(root=str(ROOT), path=str(path), work=STUB)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["ended", "finished", "81", "0"] in lines
    acknowledged = [(line[1], line[2]) for line in lines if line[:1] == ["acknowledged"]]
    content = read_journal(path)
    results = {i: str(done.facts.get("pid")) for i, done in content.results.items()}
    assert dict(acknowledged) == results  # none lost, none done again
    assert len(acknowledged) == len(results)  # none acknowledged twice
    names = {done.facts.get("name", "deadly") for done in content.results.values()}
    assert names == {f"{kind}{n}" for kind in "uf" for n in range(40)} | {"deadly"}
    harness = [done.harness for done in content.results.values() if done.harness]
    assert len(harness) == 1
    assert "its actor was lost" in harness[0]
    assert any(done.attempts == 2 and not done.harness for done in content.results.values())

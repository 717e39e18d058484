"""Kernels that harm their process: each fault is recorded, and the next right Case passes."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.verify import planted_processes as planted
from tests.workers.planted_servers import is_running

from attncheck.inputs.problem import Case, Problem
from attncheck.verify.isolated import Deadlines, IsolatedKernel
from attncheck.verify.run_case import run_case
from attncheck.workers import process

pytestmark = pytest.mark.usefixtures("forked_workers")

FILE = Path(planted.__file__)
DEADLINES = Deadlines(call=2.0, close=5.0)
LENGTHS = {fault.__name__: length for length, fault in planted.FAULTS.items()}

DIED = "its process died of SIGSEGV before it answered"
SEGFAULT = f'{DIED}; it said: Segmentation fault, File "{FILE}", line '

OUTCOMES = [
    ("raises", "error", "ValueError: planted at planted_processes.py:"),
    ("interrupts", "error", "KeyboardInterrupt"),
    ("wrong_shape", "contract", "out.shape=(1, 1, 4, 7), but should be (1, 1, 4, 8)."),
    ("wrong_dtype", "contract", "out.dtype=torch.float64, but should be torch.float32."),
    ("wrong_device", "contract", "out.device=meta, but should be cpu."),
    ("lazy", "contract", "out is Lazy, but should be a torch.Tensor itself."),
    ("alias", "alias", "out lies in the memory of its input q."),
    ("alias_of_a_part", "error", "RuntimeError: Trying to resize storage that is not resizable"),
    ("mutation", "mutation", "wrote to its input q."),
    ("prints", "pass", ""),
    ("patched", "pass", ""),
    ("wrong_and_patched", "bound", ""),
    ("mutation_unseen", "mutation", "wrote to its inputs."),
    ("segfault", "crash", SEGFAULT),
    ("exits", "crash", "its process ended with exit code 0 before it answered"),
    ("raises_memory_error", "oom", "MemoryError"),
    ("sets_memory_limit", "oom", "MemoryError"),
    ("allocates_too_much", "oom", "RuntimeError: "),
    ("raises_long_message", "error", "ValueError: \N{PILE OF POO}"),
    ("returns_gradients", "pass", ""),
    ("writes_everywhere", "crash", "what its process sent is no answer: "),
]


def problem(length):
    return Problem(query=length, kv=4, head_dim=8, dtype="fp32")


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    folder = tmp_path_factory.mktemp("worker")
    kernel = f"{FILE}::Planted"
    with IsolatedKernel(kernel, deadlines=DEADLINES, folder=str(folder)) as host:
        host.folder = folder
        assert run_length(host, planted.RIGHT).status == "pass"
        yield host


def run_length(host, length):
    case = Case(problem=problem(length))
    return run_case(host.subject, case, device="cpu", executor=host.executor, brief=True)


def test_every_planted_fault_has_a_test():
    tested_below = {"daemon_and_hang", "daemon_and_death"}
    assert {name for name, *_ in OUTCOMES} | tested_below == set(LENGTHS)


@pytest.mark.parametrize(("name", "outcome", "reason"), OUTCOMES)
def test_fault_is_recorded_and_the_next_case_passes(host, name, outcome, reason):
    """``outcome`` is the status of the Record, or the rule by which it failed."""
    record = run_length(host, LENGTHS[name])
    rule = record.judgement.rule if record.judgement else ""
    assert outcome in {record.status, rule}, record
    assert record.status == ("fail" if rule else outcome)
    recorded = record.reason or record.judgement.reason
    assert recorded.startswith(reason)
    assert recorded.isprintable()
    assert record.kernel == host.subject.name == planted.Planted.name
    assert run_length(host, planted.RIGHT).status == "pass"


@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        ("daemon_and_hang", "timeout", "it did not answer with outputs in 2 s."),
        ("daemon_and_death", "crash", "its process died of SIGKILL before it answered."),
    ],
)
def test_daemon_of_a_dead_worker_is_killed(host, monkeypatch, name, status, reason):
    host.close()
    # Daemons are recognised by the environment that their process was started with, which a forked
    # worker would not have.
    monkeypatch.setattr(process, "subprocess", subprocess)
    assert run_length(host, planted.RIGHT).status == "pass"
    record = run_length(host, LENGTHS[name])
    assert (record.status, record.reason) == (status, reason)
    note = host.folder / "grandchild"
    daemon = int(note.read_text())
    note.unlink()
    assert not is_running(daemon)
    assert run_length(host, planted.RIGHT).status == "pass"
    host.close()


def test_closing_the_host_ends_its_process(host):
    assert run_length(host, planted.RIGHT).status == "pass"
    before = host.pid
    assert is_running(before)
    host.close()
    assert host.pid is None
    assert not is_running(before)


def test_kernel_file_is_not_imported_in_this_process(host):
    assert f"attncheck_file_{FILE.stem}" not in sys.modules

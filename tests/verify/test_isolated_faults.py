"""What a kernel does to its process is told of it alone: the next right Case passes."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.verify import planted_processes as planted
from tests.workers.planted_servers import runs

from attncheck.inputs.problem import Case, Problem
from attncheck.verify.isolated import IsolatedKernel
from attncheck.verify.remote_kernel import Deadlines
from attncheck.verify.run_case import run_case
from attncheck.workers import process

pytestmark = pytest.mark.usefixtures("forked_workers")

FILE = Path(planted.__file__)
DEADLINES = Deadlines(call=2.0, close=5.0)
LENGTHS = {fault.__name__: length for length, fault in planted.FAULTS.items()}

DIED = "its process died of SIGSEGV before it answered"
SEGFAULT = f'{DIED}; it said: Segmentation fault, File "{FILE}", line '

SAID = [
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
    ("leaves", "crash", "its process ended with exit code 0 before it answered"),
    ("raises_memory_error", "oom", "MemoryError"),
    ("has_a_limit", "oom", "MemoryError"),
    ("takes_all", "oom", "RuntimeError: "),
    ("raises_at_length", "error", "ValueError: \N{PILE OF POO}"),
    ("gives_gradients", "pass", ""),
    ("writes_everywhere", "crash", "what its process sent is no answer: "),
]


def problem(length):
    return Problem(query=length, kv=4, head_dim=8, dtype="fp32")


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    folder = tmp_path_factory.mktemp("worker")
    kernel = f"{FILE}::Planted"
    with IsolatedKernel(kernel, deadlines=DEADLINES, folder=str(folder)) as found:
        found.folder = folder
        assert ask(found, planted.RIGHT).status == "pass"
        yield found


def ask(host, length):
    case = Case(problem=problem(length))
    return run_case(host.subject, case, device="cpu", executor=host.executor, brief=True)


def test_every_fault_is_asked_about():
    of_their_own = {"daemon_and_hang", "daemon_and_death"}
    assert {name for name, *_ in SAID} | of_their_own == set(LENGTHS)


@pytest.mark.parametrize(("name", "said", "reason"), SAID)
def test_a_fault_is_told_and_the_next_case_passes(host, name, said, reason):
    record = ask(host, LENGTHS[name])
    rule = record.judgement.rule if record.judgement else ""
    assert said in {record.status, rule}, record
    assert record.status == ("fail" if rule else said)
    told = record.reason or record.judgement.reason
    assert told.startswith(reason)
    assert told.isprintable()
    assert record.kernel == host.subject.name == planted.Planted.name
    assert ask(host, planted.RIGHT).status == "pass"


@pytest.mark.parametrize(
    ("name", "said", "reason"),
    [
        ("daemon_and_hang", "timeout", "it did not answer with outputs in 2 s."),
        ("daemon_and_death", "crash", "its process died of SIGKILL before it answered."),
    ],
)
def test_no_daemon_is_left(host, monkeypatch, name, said, reason):
    host.close()
    # A daemon is known by the environment that its process was started with: no fork will do.
    monkeypatch.setattr(process, "subprocess", subprocess)
    assert ask(host, planted.RIGHT).status == "pass"
    record = ask(host, LENGTHS[name])
    assert (record.status, record.reason) == (said, reason)
    note = host.folder / "grandchild"
    daemon = int(note.read_text())
    note.unlink()
    assert not runs(daemon)
    assert ask(host, planted.RIGHT).status == "pass"
    host.close()


def test_a_process_ends_when_its_host_is_closed(host):
    assert ask(host, planted.RIGHT).status == "pass"
    before = host.pid
    assert runs(before)
    host.close()
    assert host.pid is None
    assert not runs(before)


def test_this_process_has_not_imported_it(host):
    assert f"attncheck_file_{FILE.stem}" not in sys.modules

"""IsolatedKernel: a kernel in a process of its own gives the same bits as in this one, and the
host handles its deaths, deadlines and out-of-bounds writes."""

import math
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace
from tests.verify import planted_processes as planted

from attncheck.core.errors import HostError, UsageError
from attncheck.core.mod_spec import Spec
from attncheck.core.paged_layout import Paging
from attncheck.diagnose.reproduce import exact_runs
from attncheck.inputs import input_tensors as inputs_room
from attncheck.inputs.problem import Case, Problem
from attncheck.subjects.ideal import Ideal
from attncheck.verify import kernel_server
from attncheck.verify.call_conditions import CallConditions
from attncheck.verify.deaths import confirm_death
from attncheck.verify.executor import Execution, Failure, InProcess, Origin
from attncheck.verify.isolated import Deadlines, IsolatedExecutor, IsolatedKernel, RemoteSubject
from attncheck.verify.kernel_messages import run_words
from attncheck.verify.kernel_server import KernelServer
from attncheck.verify.run_case import new_record, run_case
from attncheck.verify.verify import iter_records
from attncheck.workers.process import Died
from attncheck.workers.transport import KEY, LARGEST_WORDS, Frame, Receiver, Sender
from attncheck.workers.worker_main import serve

pytestmark = pytest.mark.usefixtures("forked_workers")

FILE = Path(planted.__file__)
SIZES = {"heads": 2, "kv_heads": 1, "query": 6, "kv": 9, "head_dim": 8}
SMALL = Problem(**SIZES, dtype="bf16", mask=Spec.of("causal"))
BACKWARD = SMALL.replace(backward=True, dtype="fp32")
CASES = {
    "compare": Case(problem=SMALL),
    "score mod": Case(problem=SMALL.replace(score=Spec.of("alibi"), batch=2)),
    "probe": Case(problem=SMALL.replace(dtype="fp32"), question="ones"),
    "relation": Case(problem=SMALL, question="head_permutation", parameters={"turn": 1}),
    "far rows": Case(problem=SMALL, question="strides_far", parameters={"tensor": 2}),
    "backward": Case(problem=BACKWARD.replace(dlse=True)),
    "backward of a relation": Case(problem=BACKWARD, question="repeat"),
    "fp8": Case(problem=SMALL.replace(dtype="e4m3", mask=Spec.of("full"))),
    "pages": Case(problem=SMALL.replace(paging=Paging(size=16))),
    "sink": Case(problem=SMALL.replace(sink=True)),
    "dcaptured": Case(problem=BACKWARD.replace(score=Spec.of("alibi"), dcaptured=True)),
    "launches": Case(problem=SMALL, question="launches", parameters={"launch": 0}),
    "another launch": Case(problem=SMALL, question="launches", parameters={"launch": 1}),
    "softmax": Case(problem=Problem(operation="softmax", query=5, kv=7, dtype="fp16")),
    "unsupported dtype": Case(problem=SMALL.replace(dtype="fp64")),
}


@pytest.fixture(scope="module")
def host():
    with IsolatedKernel(f"{FILE}::Launched", deadlines=Deadlines(call=30.0)) as kernel:
        yield kernel


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_records_equal_those_of_this_process(host, case):
    here, there = (
        run_case(subject, case, device="cpu", executor=executor)
        for subject, executor in (
            (planted.Launched(), InProcess()),
            (host.subject, host.executor),
        )
    )
    assert there == here


def test_remote_subject_has_the_attributes_and_answers_of_the_kernel(host):
    kernel, subject = planted.Launched(), host.subject
    for name in ("name", "summary", "promises", "sinks", "backward", "captured", "triton"):
        assert getattr(subject, name) == getattr(kernel, name)
    assert subject.promises_gradients == kernel.promises_gradients
    assert subject.absent("cpu") is None
    for problem in (SMALL, BACKWARD, CASES["softmax"].problem):
        assert subject.concerns(problem) == kernel.concerns(problem)
        assert subject.unsupported(problem, "cpu") == kernel.unsupported(problem, "cpu")
        assert subject.tiling(problem, "cpu") == kernel.tiling(problem, "cpu")
        assert subject.arithmetic(problem, "cpu") == kernel.arithmetic(problem, "cpu")


def test_outputs_have_the_bits_of_this_process(host):
    case = Case(problem=BACKWARD)
    inputs = inputs_room.draw_inputs(case.problem)
    there = host.executor.run(
        host.subject, inputs, origin=Origin(case=case), under=CallConditions(timed=True)
    )
    here = InProcess().run(planted.Launched(), inputs)
    assert isinstance(there, Execution)
    assert there.seconds > 0
    remote, local = there.outputs.tensors(), here.outputs.tensors()
    assert remote.keys() == local.keys()
    assert all(torch.equal(remote[name], local[name]) for name in remote)


def test_exact_runs_have_the_same_bounds_in_the_isolated_process(host):
    for case in (CASES["compare"], CASES["relation"]):
        remote = exact_runs(host.subject, case, device="cpu", executor=host.executor)
        local = exact_runs(planted.Launched(), case, device="cpu")
        for one, other in zip(remote, local, strict=True):
            assert torch.equal(one.allowed.out, other.allowed.out)


def test_call_conditions_apply_in_the_isolated_process(host):
    case = Case(problem=SMALL)
    inputs = inputs_room.draw_inputs(SMALL)
    execution = host.executor.run(
        host.subject, inputs, origin=Origin(case=case), under=CallConditions(calls=3)
    )
    assert execution.notes.further == 2


def test_inputs_that_differ_from_those_of_the_case_break_the_contract(host):
    """The process draws the inputs itself, so it must notice if they are not those of the host."""
    inputs = inputs_room.draw_inputs(SMALL.replace(seed=1))
    result = host.executor.run(host.subject, inputs, origin=Origin(case=Case(problem=SMALL)))
    assert result == Failure(kind="contract", message="in its process the Case has other inputs.")


def test_kernel_called_through_the_wrong_executor_raises_host_error(host):
    inputs = inputs_room.draw_inputs(SMALL)
    with pytest.raises(HostError, match="in another process"):
        host.subject.prepare(inputs)
    with pytest.raises(HostError, match="is in this process"):
        host.executor.run(Ideal(), inputs, origin=Origin(case=Case(problem=SMALL)))


def test_death_while_listing_launches_is_a_crash(host):
    problem = SMALL.replace(query=planted.FAULT_IN_LAUNCHES)
    case = Case(problem=problem, question="launches", parameters={"launch": 0})
    record = run_case(host.subject, case, device="cpu", executor=host.executor)
    assert (record.status, "SIGABRT" in record.reason) == ("crash", True)


@pytest.mark.parametrize(("limit", "value"), [("_MOST_CASES", 1), ("_MOST_GROWTH", -(1 << 50))])
def test_process_is_replaced_after_its_most_cases_or_memory_growth(host, limit, value, monkeypatch):
    monkeypatch.setattr(f"attncheck.verify.isolated.{limit}", value)
    case = Case(problem=SMALL)
    record = run_case(host.subject, case, device="cpu", executor=host.executor, brief=True)
    assert record.status == "pass"
    assert host.pid is None


def test_every_new_process_gets_time_to_compile(host):
    """What an earlier process compiled is lost with it."""
    kernel_host = SimpleNamespace(new=False, deadlines=Deadlines(), device="cuda")
    inputs = SimpleNamespace(problem=SMALL)
    executor = IsolatedExecutor(kernel_host)
    limits = []
    for kernel_host.new in (True, False, False, True, False):
        limits.append(executor._seconds(host.subject, inputs, calls=1)[0])
    assert limits == [180.0, 60.0, 60.0, 180.0, 60.0]


@pytest.mark.parametrize(
    ("timeout", "device", "changes", "seconds", "note"),
    [
        (None, "cuda", {}, 180.0, "compiles"),
        (None, "cuda", {"new": False, "unseen": False}, 60.0, ""),
        (2.0, "cpu", {"compiles": True}, 2.0, ""),
        (2.0, "cuda", {}, 2.0, "a longer --timeout"),
        (2.0, "cuda", {"unseen": False, "compiles": True}, 2.0, ""),
        (2.0, "cuda", {"compiles": True}, 180.0, "compiles"),
        (600.0, "cuda", {"compiles": True}, 600.0, "compiles"),
    ],
)
def test_timeout_option_limits_calls_that_are_not_known_to_compile(
    timeout, device, changes, seconds, note
):
    state = {"new": True, "unseen": True, "compiles": False, **changes}
    limit, reason = Deadlines.of(timeout).of_run(1, device, **state)
    assert limit == seconds
    assert note in reason
    assert bool(note) == bool(reason)


def test_timeout_option_limits_the_import():
    assert Deadlines.of(None).load == Deadlines.of(math.inf).load == 120.0
    assert (Deadlines.of(2.0).load, Deadlines.of(30.0).load) == (4.0, 30.0)


def test_inputs_without_a_case_are_sent_to_the_process(host):
    case = Case(problem=SMALL)
    inputs = inputs_room.draw_inputs(SMALL)
    drawn = host.executor.run(host.subject, inputs, origin=Origin(case=case))
    sent = host.executor.run(host.subject, inputs)
    assert torch.equal(drawn.outputs.out, sent.outputs.out)
    negated = host.executor.run(host.subject, inputs.replace(v=-inputs.v))
    assert torch.equal(drawn.outputs.out, -negated.outputs.out)


@pytest.mark.parametrize("value", ["x" * LARGEST_WORDS, object()], ids=["too long", "no JSON"])
def test_unsendable_answer_fails_and_the_server_goes_on(value):
    reads, writes = os.pipe()
    values = iter([value, 1])
    kernel = SimpleNamespace(answer=lambda value: Frame(kind="answer", words={"value": value}))
    queue = SimpleNamespace(get=lambda: next(values))
    with pytest.raises(StopIteration), os.fdopen(writes, "wb"):
        serve(queue, Sender(writes, bytes(KEY)), kernel)
    with os.fdopen(reads, "rb"):
        receiver = Receiver(reads, bytes(KEY))
        first, second = (receiver.receive(most=0) for _ in range(2))
    assert (first.kind, first.words["kind"]) == ("failed", "error")
    assert first.words["message"].startswith("what it answers is no frame: ")
    assert second.words == {"value": 1}


class CountsReplacements(RemoteSubject):
    """A kernel that counts how often its process was replaced."""

    replacements = 0

    def __init__(self):
        self.host = SimpleNamespace(problems=(), device="cpu", end=self.count)

    def count(self):
        self.replacements += 1


@pytest.mark.parametrize(
    ("statuses", "status", "attempts"),
    [
        (["pass"], "pass", 1),
        (["fail"], "fail", 1),
        (["error"], "error", 1),
        (["crash", "crash"], "crash", 2),
        (["timeout", "pass"], "flaky", 2),
        (["oom", "inconclusive"], "flaky", 2),
        (["crash", "fail"], "crash", 2),
        (["timeout", "crash"], "timeout", 2),
    ],
)
def test_confirm_death_repeats_the_case_once_in_a_new_process(statuses, status, attempts):
    record = new_record(Ideal(), Case(problem=SMALL), device="cpu", variant="", environment="")
    records = (
        replace(record, status=each, reason=f"reason {i}") for i, each in enumerate(statuses)
    )
    kernel = CountsReplacements()
    confirmed, times = confirm_death(kernel, lambda: next(records), slow=True)
    assert (confirmed.status, times, kernel.replacements) == (status, attempts, attempts - 1)
    if statuses[-1] != status:
        again = f"reason 0; asked once more, alone in a new process: {statuses[-1]} (reason 1)"
        assert confirmed.reason.endswith(again)


@pytest.mark.parametrize(
    ("crowded", "statuses", "status"),
    [
        (True, ["oom", "pass"], "pass"),
        (False, ["oom", "pass"], "flaky"),
        (True, ["oom", "oom"], "oom"),
        (True, ["oom", "fail"], "oom"),
        (True, ["crash", "pass"], "flaky"),
    ],
)
def test_out_of_memory_on_a_crowded_gpu_is_judged_by_the_second_attempt(
    crowded, statuses, status, monkeypatch
):
    """If other processes hold the memory, an oom is not the kernel's and does not make it flaky."""
    monkeypatch.setattr("attncheck.verify.deaths.others_hold_memory", lambda _: crowded)
    record = new_record(Ideal(), Case(problem=SMALL), device="cpu", variant="", environment="")
    first, second = (replace(record, status=each) for each in statuses)
    records = iter((replace(first, reason="reason"), second))
    confirmed, times = confirm_death(CountsReplacements(), lambda: next(records), slow=True)
    assert (confirmed.status, times) == (status, 2)
    if status == "pass":
        assert confirmed.reason == "oom: reason; asked once more, alone in a new process: pass"


@pytest.mark.parametrize(("kept", "times"), [(False, 1), (True, 0)])
def test_server_releases_scarce_memory_except_for_kept_calls(kept, times, monkeypatch):
    """Calls that are kept will be timed: releasing memory first would slow them down."""
    released = []
    monkeypatch.setattr("attncheck.core.strided_alloc.release_scarce_memory", released.append)
    server = KernelServer()
    how = {"device": "cpu", "threads": torch.get_num_threads(), "convention": ""}
    assert server.answer(Frame(kind="load", words={"kernel": "ideal"} | how)).kind == "described"
    words = run_words(Origin(case=Case(problem=SMALL)), CallConditions())
    words |= {"kept": True, "graph": False} if kept else {}
    assert server.answer(Frame(kind="run", words=words)).kind == "ran"
    assert released == ["cpu"] * times


def test_lost_gpu_is_reported_as_a_crash(monkeypatch):
    """Any call on a lost GPU raises: as a plain error it would leave the dead process in use."""

    def lost(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("attncheck.core.strided_alloc.release_scarce_memory", lost)
    monkeypatch.setattr(kernel_server, "lost_gpu", lambda: "CUDA error: an illegal address")
    draw = kernel_server.draw_case_inputs
    monkeypatch.setattr(kernel_server, "draw_case_inputs", lambda origin, _: draw(origin, "cpu"))
    monkeypatch.setattr(kernel_server, "restore_process", lambda *_, **__: [])
    server = KernelServer()
    how = {"device": "cpu", "threads": torch.get_num_threads(), "convention": ""}
    assert server.answer(Frame(kind="load", words={"kernel": "ideal"} | how)).kind == "described"
    server._device = "cuda"
    words = run_words(Origin(case=Case(problem=SMALL)), CallConditions())
    answer = server.answer(Frame(kind="run", words=words))
    assert answer.kind == "failed"
    assert answer.words["kind"] == "crash"
    assert answer.words["message"] == "its process lost the GPU: CUDA error: an illegal address"


WRITES = """
import ctypes, os, torch
from torch.nn.functional import scaled_dot_product_attention
wrote = []
def kernel(q, k, v, is_causal=False):
    if wrote and q.shape[2] != 1:
        os.abort()  # as a corrupted heap does at the next allocation
    out = scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    {more}
    if q.shape[2] == 1:
        ctypes.memset(out.data_ptr() + out.nbytes, 65, 4)  # too few to break the heap at once
        wrote.append(1)
    return out
"""


OVERWRITE = "out-of-bounds write: 4 bytes after its output out"


def run_overwriting_kernel(tmp_path, lengths, more):
    (tmp_path / "mine.py").write_text(WRITES.format(more=more))
    with IsolatedKernel("mine.py::kernel", folder=str(tmp_path)) as kernel:
        return [*iter_records([kernel.subject], map(case_of_length, lengths), device="cpu")]


def case_of_length(length):
    return Case(problem=Problem(query=length, kv=8, head_dim=8, dtype="fp32"))


def test_write_past_an_allocation_fails_in_that_call(tmp_path):
    records = run_overwriting_kernel(tmp_path, (4, 1), "out = torch.empty_like(q).copy_(out)")
    assert [record.status for record in records] == ["pass", "fail"]
    assert records[1].judgement.reason == f"{OVERWRITE}, the first 0 bytes behind"


def test_later_death_is_traced_to_the_call_that_wrote_out_of_bounds(tmp_path):
    # torch's operators allocate their outputs in C++: only memory checks put guard bands there.
    records = run_overwriting_kernel(tmp_path, (4, 1, 8), "")
    assert [record.status for record in records] == ["pass", "pass", "fail"]
    judgement = records[-1].judgement
    assert judgement.rule == "memory"
    assert judgement.reason.startswith(OVERWRITE)
    asked = f"; it was asked {case_of_length(1).problem}; without guard bands its process"
    assert asked in judgement.reason
    assert "died of SIGABRT" in judgement.reason


LOGS_CALLS = """
import os
from pathlib import Path
from torch.nn.functional import scaled_dot_product_attention
def kernel(q, k, v, is_causal=False):
    with Path("called").open("a") as file:
        file.write(f"{q.shape[2]} ")
    if q.shape[2] == 5:
        os._exit(9)
    if q.shape[2] == 6:
        raise RuntimeError("planted")
    return scaled_dot_product_attention(q, k, v, is_causal=is_causal)
"""


def test_next_case_is_called_while_the_previous_one_is_judged(tmp_path):
    (tmp_path / "mine.py").write_text(LOGS_CALLS)
    log = tmp_path / "called"
    cases = [case_of_length(n) for n in range(1, 9)]
    cases[6] = Case(problem=cases[6].problem, question="repeat")
    cases.append(Case(problem=case_of_length(9).problem.replace(sink=True)))
    with IsolatedKernel("mine.py::kernel", folder=str(tmp_path)) as kernel:
        records = [next(answers := iter_records([kernel.subject], cases, device="cpu"))]
        late = time.monotonic() + 60.0
        while log.read_text() != "1 2 " and time.monotonic() < late:
            time.sleep(0.01)
        assert log.read_text() == "1 2 "
        records += answers
    # In order and once each, except that the death (5) is confirmed by a second call and the
    # relation (7) takes two; the unsupported sink (9) is not called.
    assert log.read_text() == "1 2 3 4 5 5 6 7 7 8 "
    with IsolatedKernel("mine.py::kernel", folder=str(tmp_path)) as kernel:
        alone = [next(iter_records([kernel.subject], [case], device="cpu")) for case in cases]
    assert records == alone
    statuses = [record.status for record in records]
    assert statuses == [*["pass"] * 4, "crash", "error", "pass", "pass", "unsupported"]


@pytest.mark.parametrize(
    ("text", "load", "error", "message"),
    [
        ("def f(", 120.0, UsageError, "SyntaxError"),
        ("import os\nos._exit(7)", 120.0, Died, "exit code 7 before it answered"),
        ("import time\ntime.sleep(1000)", 1.0, Died, "did not answer what the kernel is in 1 s"),
    ],
    ids=["no Python", "exits", "hangs"],
)
def test_failure_to_load_a_kernel_raises(text, load, error, message, tmp_path):
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(error, match=message):
        IsolatedKernel("mine.py::f", folder=str(tmp_path), deadlines=Deadlines(load=load))


def test_process_that_does_not_start_is_a_host_error_and_no_death(host, monkeypatch):
    """None of the kernel's code has run by then, so it must not be recorded as a crash of it."""
    host.end()
    monkeypatch.setattr(host, "deadlines", Deadlines(start=1e-9))
    inputs = inputs_room.draw_inputs(SMALL)
    with pytest.raises(HostError, match="no process of its own can be had") as caught:
        host.executor.run(host.subject, inputs, origin=Origin(case=Case(problem=SMALL)))
    assert not isinstance(caught.value, Died)


def test_process_has_its_own_folder_gpu_session_and_no_stdin(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import os, sys\n"
        "from attncheck.subjects.ideal import Ideal\n"
        "class Mine(Ideal):\n"
        "    name = 'mine'\n"
        "    summary = f\"{os.environ['CUDA_VISIBLE_DEVICES']} {sys.stdin.read()!r}\"\n"
        "    summary += f' {os.getsid(0) == os.getpid()} {os.getcwd()}'\n"
    )
    with IsolatedKernel("mine.py::Mine", folder=str(tmp_path), gpu="3") as kernel:
        assert kernel.subject.summary == f"3 '' True {tmp_path}"

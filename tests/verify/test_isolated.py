"""A kernel in another process answers as it does in this one, bit for bit."""

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
from attncheck.verify.isolated import IsolatedExecutor, IsolatedKernel
from attncheck.verify.kernel_messages import run_words
from attncheck.verify.kernel_server import KernelServer
from attncheck.verify.remote_kernel import Deadlines, RemoteSubject
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
    "what it does not take": Case(problem=SMALL.replace(dtype="fp64")),
}


@pytest.fixture(scope="module")
def host():
    with IsolatedKernel(f"{FILE}::Launched", deadlines=Deadlines(call=30.0)) as found:
        yield found


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_answers_are_those_of_this_process(host, case):
    here, there = (
        run_case(subject, case, device="cpu", executor=executor)
        for subject, executor in (
            (planted.Launched(), InProcess()),
            (host.subject, host.executor),
        )
    )
    assert there == here


def test_it_says_of_itself_what_the_kernel_says(host):
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


def test_outputs_are_the_same_bits(host):
    case = Case(problem=BACKWARD)
    inputs = inputs_room.draw_inputs(case.problem)
    there = host.executor.run(host.subject, inputs, origin=Origin(case=case), timed=True)
    here = InProcess().run(planted.Launched(), inputs)
    assert isinstance(there, Execution)
    assert there.seconds > 0
    given, expected = there.outputs.tensors(), here.outputs.tensors()
    assert given.keys() == expected.keys()
    assert all(torch.equal(given[name], expected[name]) for name in given)


def test_calls_of_a_case_are_made_there(host):
    for case in (CASES["compare"], CASES["relation"]):
        found = exact_runs(host.subject, case, device="cpu", executor=host.executor)
        expected = exact_runs(planted.Launched(), case, device="cpu")
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one.allowed.out, other.allowed.out)


def test_circumstances_are_made_there(host):
    case = Case(problem=SMALL)
    inputs = inputs_room.draw_inputs(SMALL)
    found = host.executor.run(
        host.subject, inputs, origin=Origin(case=case), under=CallConditions(calls=3)
    )
    assert found.notes.further == 2


def test_inputs_of_another_case_are_seen(host):
    """The process draws them itself: other bits there are no answer to what is asked here."""
    inputs = inputs_room.draw_inputs(SMALL.replace(seed=1))
    found = host.executor.run(host.subject, inputs, origin=Origin(case=Case(problem=SMALL)))
    assert found == Failure(kind="contract", message="in its process the Case has other inputs.")


def test_a_kernel_is_called_where_it_is(host):
    inputs = inputs_room.draw_inputs(SMALL)
    with pytest.raises(HostError, match="in another process"):
        host.subject.prepare(inputs)
    with pytest.raises(HostError, match="is in this process"):
        host.executor.run(Ideal(), inputs, origin=Origin(case=Case(problem=SMALL)))


def test_a_death_while_it_is_asked_for_launches_is_a_crash(host):
    case = Case(problem=SMALL.replace(query=planted.FAULT_IN_LAUNCHES), question="launches")
    case = Case(problem=case.problem, question="launches", parameters={"launch": 0})
    record = run_case(host.subject, case, device="cpu", executor=host.executor)
    assert (record.status, "SIGABRT" in record.reason) == ("crash", True)


@pytest.mark.parametrize(("limit", "value"), [("_MOST_CASES", 1), ("_MOST_GROWTH", -(1 << 50))])
def test_a_process_that_has_done_enough_is_replaced(host, limit, value, monkeypatch):
    monkeypatch.setattr(f"attncheck.verify.remote_kernel.{limit}", value)
    case = Case(problem=SMALL)
    record = run_case(host.subject, case, device="cpu", executor=host.executor, brief=True)
    assert record.status == "pass"
    assert host.pid is None


def test_what_a_process_compiled_is_gone_with_it(host):
    """Each new one has the time to compile, also what another one has called before."""
    connection = SimpleNamespace(new=False, deadlines=Deadlines(), device="cuda")
    given = SimpleNamespace(problem=SMALL)
    executor = IsolatedExecutor(connection)
    calls = []
    for connection.new in (True, False, False, True, False):
        calls.append(executor._seconds(host.subject, given, calls=1)[0])
    assert calls == [180.0, 60.0, 60.0, 180.0, 60.0]


@pytest.mark.parametrize(
    ("typed", "device", "how", "seconds", "says"),
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
def test_a_typed_limit_bounds_what_is_not_known_to_compile(typed, device, how, seconds, says):
    state = {"new": True, "unseen": True, "compiles": False, **how}
    limits = Deadlines.of(typed)
    limit, said = limits.of_run(1, device, **state)
    assert limit == seconds
    assert says in said
    assert bool(says) == bool(said)


def test_a_typed_limit_bounds_the_import_too():
    assert Deadlines.of(None).load == Deadlines.of(math.inf).load == 120.0
    assert (Deadlines.of(2.0).load, Deadlines.of(30.0).load) == (4.0, 30.0)


def test_inputs_that_no_case_draws_travel(host):
    case = Case(problem=SMALL)
    drawn = inputs_room.draw_inputs(SMALL)
    ours = host.executor.run(host.subject, drawn, origin=Origin(case=case))
    sent = host.executor.run(host.subject, drawn)
    assert torch.equal(ours.outputs.out, sent.outputs.out)
    other = host.executor.run(host.subject, drawn.replace(v=-drawn.v))
    assert torch.equal(ours.outputs.out, -other.outputs.out)


@pytest.mark.parametrize("value", ["x" * LARGEST_WORDS, object()], ids=["too long", "no JSON"])
def test_an_answer_that_is_no_frame_is_told_and_the_next_is_given(value):
    reads, writes = os.pipe()
    values = iter([value, 1])
    kernel = SimpleNamespace(answer=lambda value: Frame(kind="answer", words={"value": value}))
    waiting = SimpleNamespace(get=lambda: next(values))
    with pytest.raises(StopIteration), os.fdopen(writes, "wb"):
        serve(waiting, Sender(writes, bytes(KEY)), kernel)
    with os.fdopen(reads, "rb"):
        receiver = Receiver(reads, bytes(KEY))
        first, second = (receiver.receive(most=0) for _ in range(2))
    assert (first.kind, first.words["kind"]) == ("failed", "error")
    assert first.words["message"].startswith("what it answers is no frame: ")
    assert second.words == {"value": 1}


class Counted(RemoteSubject):
    """A kernel that counts how often its process was replaced."""

    started = 0

    def __init__(self):
        self.connection = SimpleNamespace(problems=(), device="cpu")

    def fresh(self):
        self.started += 1


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
def test_a_death_is_confirmed_alone(statuses, status, attempts):
    record = new_record(Ideal(), Case(problem=SMALL), device="cpu", variant="", environment="")
    given = (replace(record, status=each, reason=f"said {i}") for i, each in enumerate(statuses))
    kernel = Counted()
    found, times = confirm_death(kernel, lambda: next(given), slow=True)
    assert (found.status, times, kernel.started) == (status, attempts, attempts - 1)
    if statuses[-1] != status:
        again = f"said 0; asked once more, alone in a new process: {statuses[-1]} (said 1)"
        assert found.reason.endswith(again)


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
def test_who_lacked_memory_that_others_held_is_judged_by_its_second_answer(
    crowded, statuses, status, monkeypatch
):
    monkeypatch.setattr("attncheck.verify.deaths.others_hold_memory", lambda _: crowded)
    record = new_record(Ideal(), Case(problem=SMALL), device="cpu", variant="", environment="")
    first, second = (replace(record, status=each) for each in statuses)
    given = iter((replace(first, reason="said"), second))
    found, times = confirm_death(Counted(), lambda: next(given), slow=True)
    assert (found.status, times) == (status, 2)
    if status == "pass":
        assert found.reason == "oom: said; asked once more, alone in a new process: pass"


@pytest.mark.parametrize(("kept", "times"), [(False, 1), (True, 0)])
def test_a_kernels_process_gives_back_scarce_memory_but_before_no_timed_call(
    kept, times, monkeypatch
):
    released = []
    monkeypatch.setattr("attncheck.core.strided_alloc.release_scarce_memory", released.append)
    server = KernelServer()
    how = {"device": "cpu", "threads": torch.get_num_threads(), "convention": ""}
    assert server.answer(Frame(kind="load", words={"kernel": "ideal"} | how)).kind == "described"
    words = run_words(Origin(case=Case(problem=SMALL)), CallConditions(), timed=False, launch=None)
    words |= {"kept": True, "graph": False} if kept else {}
    assert server.answer(Frame(kind="run", words=words)).kind == "ran"
    assert released == ["cpu"] * times


def test_a_lost_gpu_is_said_before_anything_is_asked_of_it(monkeypatch):
    """Whatever is asked raises, and would be told as an error of a process that can go on."""

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
    words = run_words(Origin(case=Case(problem=SMALL)), CallConditions(), timed=False, launch=None)
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
        os.abort()  # as the heap does, in whatever asks it for memory next
    out = scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    {more}
    if q.shape[2] == 1:
        ctypes.memset(out.data_ptr() + out.nbytes, 65, 4)  # as many as a heap has room for
        wrote.append(1)
    return out
"""


PAST = "out-of-bounds write: 4 bytes after its output out"


def asked_of_who_writes(tmp_path, problems, more):
    (tmp_path / "mine.py").write_text(WRITES.format(more=more))
    with IsolatedKernel("mine.py::kernel", folder=str(tmp_path)) as found:
        return [*iter_records([found.subject], map(as_case, problems), device="cpu")]


def test_who_writes_past_what_it_allocated_is_found_in_that_call(tmp_path):
    problems = [Problem(query=n, kv=8, head_dim=8, dtype="fp32") for n in (4, 1)]
    records = asked_of_who_writes(tmp_path, problems, "out = torch.empty_like(q).copy_(out)")
    assert [record.status for record in records] == ["pass", "fail"]
    assert records[1].judgement.reason == f"{PAST}, the first 0 bytes behind"


def test_who_wrote_beside_its_tensors_is_found_when_its_process_dies_later(tmp_path):
    # An operator of torch's allocates for itself: only who is asked about memory has bands there.
    problems = [Problem(query=n, kv=8, head_dim=8, dtype="fp32") for n in (4, 1, 8)]
    records = asked_of_who_writes(tmp_path, problems, "")
    assert [record.status for record in records] == ["pass", "pass", "fail"]
    judgement = records[-1].judgement
    assert judgement.rule == "memory"
    assert judgement.reason.startswith(PAST)
    assert f"; it was asked {problems[1]}; without guard bands its process" in judgement.reason
    assert "died of SIGABRT" in judgement.reason


CALLED = """
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


def test_the_next_case_is_called_while_one_is_judged(tmp_path):
    (tmp_path / "mine.py").write_text(CALLED)
    called = tmp_path / "called"
    cases = [as_case(Problem(query=n, kv=8, head_dim=8, dtype="fp32")) for n in range(1, 9)]
    cases[6] = Case(problem=cases[6].problem, question="repeat")
    cases.append(as_case(Problem(query=9, kv=8, head_dim=8, dtype="fp32", sink=True)))
    with IsolatedKernel("mine.py::kernel", folder=str(tmp_path)) as found:
        records = [next(answers := iter_records([found.subject], cases, device="cpu"))]
        late = time.monotonic() + 60.0
        while called.read_text() != "1 2 " and time.monotonic() < late:
            time.sleep(0.01)
        assert called.read_text() == "1 2 "
        records += answers
    # In order, each once: but for what died and the relation; what it refuses is not called.
    assert called.read_text() == "1 2 3 4 5 5 6 7 7 8 "
    with IsolatedKernel("mine.py::kernel", folder=str(tmp_path)) as found:
        alone = [next(iter_records([found.subject], [case], device="cpu")) for case in cases]
    assert records == alone
    statuses = [record.status for record in records]
    assert statuses == [*["pass"] * 4, "crash", "error", "pass", "pass", "unsupported"]


def as_case(problem):
    return Case(problem=problem)


@pytest.mark.parametrize(
    ("text", "load", "error", "said"),
    [
        ("def f(", 120.0, UsageError, "SyntaxError"),
        ("import os\nos._exit(7)", 120.0, Died, "exit code 7 before it answered"),
        ("import time\ntime.sleep(1000)", 1.0, Died, "did not answer what the kernel is in 1 s"),
    ],
    ids=["no Python", "leaves", "hangs"],
)
def test_what_cannot_be_loaded_is_told(text, load, error, said, tmp_path):
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(error, match=said):
        IsolatedKernel("mine.py::f", folder=str(tmp_path), deadlines=Deadlines(load=load))


def test_a_process_that_does_not_start_is_no_fault_of_the_kernel(host, monkeypatch):
    """Neither as it is loaded nor as it is asked: nothing of the kernel's has run by then."""
    host.subject.fresh()
    monkeypatch.setattr(host, "deadlines", Deadlines(start=1e-9))
    inputs = inputs_room.draw_inputs(SMALL)
    with pytest.raises(HostError, match="no process of its own can be had") as caught:
        host.executor.run(host.subject, inputs, origin=Origin(case=Case(problem=SMALL)))
    assert not isinstance(caught.value, Died)


def test_a_host_is_given_another_kernel_of_another_folder(tmp_path):
    """What its process sees of the world: a folder, GPUs, no standard input."""
    (tmp_path / "mine.py").write_text(
        "import os, sys\n"
        "from attncheck.subjects.ideal import Ideal\n"
        "class Mine(Ideal):\n"
        "    name = 'mine'\n"
        "    summary = f\"{os.environ['CUDA_VISIBLE_DEVICES']} {sys.stdin.read()!r}\"\n"
        "    summary += f' {os.getsid(0) == os.getpid()} {os.getcwd()}'\n"
    )
    with IsolatedKernel("mine.py::Mine", folder=str(tmp_path), gpu="3") as found:
        assert found.subject.summary == f"3 '' True {tmp_path}"

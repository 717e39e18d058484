"""``run_units``: each unit is done once, deaths are blamed on their own unit, interrupts and time
limits end the run cleanly, and no process outlives it."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.workers.planted_servers import is_running
from tests.workers.stub_work import unit

from attncheck.core.errors import UsageError
from attncheck.workers import pool
from attncheck.workers.journal import Disk, Journal
from attncheck.workers.journal_format import JournalError, read_journal
from attncheck.workers.pool import run_units
from attncheck.workers.units import Shard
from attncheck.workers.worker_pool import Limits, WorkerError, WorkerPlace

STUB = "tests.workers.stub_work:work"
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def import_path(monkeypatch):
    """Let workers import the tests."""
    monkeypatch.syspath_prepend(str(ROOT))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "results.jsonl"


def run(path, units, *, workers=2, work=STUB, resume=True, options=None, disk=None, **rest):
    """Run units with this journal; return how the run ended and its events."""
    events = []
    with Journal.open(path, {"command": "test"}, resume=resume, disk=disk) as journal:
        ended = run_units(
            units,
            work=work,
            options=options or {},
            journal=journal,
            workers=[WorkerPlace() for _ in range(workers)],
            on_event=rest.pop("on_event", events.append),
            **rest,
        )
    return ended, events


def names(path):
    return sorted(done.facts.get("name", "") for done in read_journal(path).results.values())


def test_units_and_their_followers_are_done_once(path):
    deep = unit("a", follow=[("b", {"follow": [("c", {}), ("d", {})]}), ("d", {})])
    ended, events = run(path, [deep, unit("d"), unit("d"), unit("e")])
    assert names(path) == ["a", "b", "c", "d", "e"]
    assert (ended.why, ended.finished, ended.remaining) == ("", 5, 0)
    kinds = [event.kind for event in events]
    assert kinds.count("begun") == kinds.count("done") == 5
    assert events[-1].finished == events[-1].known == 5
    assert events[-1].seconds_left == 0
    assert read_journal(path).why == ""


def test_resumed_run_recalls_results_and_does_the_remaining_followers(path):
    first = unit("a", follow=[("b", {"follow": [("c", {})]})])
    run(path, [first], workers=1, stop=lambda _, done: done.facts["name"] == "b")
    assert names(path) == ["a", "b"]
    ended, events = run(path, [first], workers=1)
    assert names(path) == ["a", "b", "c"]
    assert [(event.kind, event.unit.case["name"]) for event in events] == [
        ("recalled", "a"),
        ("recalled", "b"),
        ("begun", "c"),
        ("done", "c"),
    ]
    assert (ended.why, ended.finished) == ("", 3)


def test_usage_error_of_a_unit_stops_the_run_until_it_is_corrected(path, tmp_path):
    file, errors = tmp_path / "kernel.py", []
    units = [unit("a", usage=str(file)), unit("b")]
    for attempt in range(1, 4):  # usage errors do not count as lost attempts
        stop = lambda _, done: bool(errors.append(done.facts["usage"]))  # noqa: E731
        ended, _ = run(path, units, workers=1, stop=stop)
        assert (ended.why, ended.finished, ended.remaining) == ("stopped early", 0, 2)
        assert (names(path), len(errors)) == ([], attempt)
    file.touch()
    ended, _ = run(path, units, workers=1)
    assert (ended.why, names(path)) == ("", ["a", "b"])
    assert not read_journal(path).quarantined


def test_result_is_in_the_journal_before_its_event(path):
    def check(event):
        if event.kind == "done":
            assert event.unit.id in read_journal(path).results

    run(path, [unit(f"u{n}") for n in range(5)], on_event=check)


def test_units_run_by_priority_and_then_in_order(path):
    units = [unit("c"), unit("b", urgent=1), unit("a"), unit("d", urgent=1)]
    _, events = run(path, units, workers=1, priority=lambda one: (-one.case.get("urgent", 0),))
    begun = [event.unit.case["name"] for event in events if event.kind == "begun"]
    assert begun == ["b", "d", "c", "a"]


def begin_order(path, *units):
    """Run units, and return their names in the order in which they began."""
    ended, events = run(path, units, product=lambda one: one.case.get("makes", ""))
    assert (ended.why, ended.remaining) == ("", 0)
    return [event.unit.case["name"] for event in events if event.kind == "begun"]


def test_unit_waits_for_a_product_being_made_while_other_units_can_run(path, tmp_path):
    file = str(tmp_path / "file")
    maker = unit("a", makes="kernel", wait_for=file)
    rest = [unit("b", makes="kernel"), unit("c", touch=file), unit("d", makes="kernel")]
    assert begin_order(path, maker, *rest) == ["a", "c", "b", "d"]


def test_unit_does_not_wait_for_a_product_if_nothing_else_can_run(path, tmp_path):
    file = str(tmp_path / "file")
    maker = unit("a", makes="kernel", wait_for=file)
    assert begin_order(path, maker, unit("b", makes="kernel", touch=file)) == ["a", "b"]


@pytest.mark.parametrize("lost", [False, True])
def test_units_are_released_when_the_maker_of_their_product_ends(path, lost):
    with Journal.open(path, {"command": "test"}, resume=False) as journal:
        schedule = pool.Schedule(
            journal,
            priority=lambda _: (),
            mine=lambda _: True,
            product=lambda one: one.case.get("makes", ""),
        )
        maker, *users = (unit(name, makes="kernel") for name in "abc")
        rest = [unit(name) for name in "xyz"]
        schedule.add([maker, *users, *rest])

        def take():
            schedule.peek(1)
            return schedule.take().case["name"]

        assert [take(), take()] == ["a", "x"]
        schedule.end(rest[0], lost=False)
        assert (schedule.peek(1), len(schedule)) == (rest[1], 4)
        schedule.end(maker, lost=lost)
        # If the maker was lost, the first of its users makes the product and the others wait.
        assert [take(), take(), take(), take()] == (list("byzc") if lost else list("bcyz"))
        assert schedule.peek(0) is None


@pytest.mark.parametrize("hangs", [False, True])
def test_waiting_ends_when_the_maker_is_done_or_times_out(path, tmp_path, hangs):
    duration = {"wait_for": str(tmp_path / "never")} if hangs else {"seconds": 0.3}
    maker = unit("a", makes="kernel", **duration)
    rest = [unit(f"c{n}", seconds=0.4) for n in range(6)]
    options = {"product": lambda one: one.case.get("makes", ""), "limits": Limits(unit=1.0)}
    _, events = run(path, [maker, unit("b", makes="kernel"), *rest], **options)
    order = [event.unit.case["name"] for event in events if event.kind == "begun"]
    assert order[:2] == ["a", "c0"]
    assert order.index("b") < order.index("c5")


def test_worker_makes_its_work_once_and_closes_it(path, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    run(path, [unit(f"u{n}") for n in range(6)], workers=1, options={"folder": str(folder)})
    facts = [done.facts for done in read_journal(path).results.values()]
    assert [one["count"] for one in facts] == [1, 2, 3, 4, 5, 6]
    assert [one.name for one in folder.iterdir()] == [f"closed.{facts[0]['pid']}"]


def test_all_workers_start_while_the_first_unit_runs(path, tmp_path):
    """Here the only unit waits for the second worker to start, so that it would hang otherwise."""
    first = unit("a", kind="describe", wait_for=str(tmp_path / "second"))
    made = {"work": "tests.workers.stub_work:made_twice", "options": {"folder": str(tmp_path)}}
    ended, _ = run(path, [first], **made)
    assert (ended.why, names(path)) == ("", ["a"])


def test_each_worker_sees_its_own_gpu(path, tmp_path):
    # Each unit waits until the other has begun, so that both workers are used.
    marks = [str(tmp_path / name) for name in "xy"]
    units = [
        unit("a", touch=marks[0], wait_for=marks[1]),
        unit("b", touch=marks[1], wait_for=marks[0]),
    ]
    with Journal.open(path, {}, resume=True) as journal:
        run_units(
            units,
            work=STUB,
            options={},
            journal=journal,
            workers=[WorkerPlace(gpu="7"), WorkerPlace(gpu="5")],
        )
    gpus = sorted(done.facts["gpu"] for done in read_journal(path).results.values())
    assert gpus == ["5", "7"]


def test_dying_worker_quarantines_its_own_unit_only(path, tmp_path):
    bad = unit("bad", die=signal.SIGSEGV)
    others = [unit(f"u{n}") for n in range(8)]
    ended, _ = run(path, [bad, *others])
    content = read_journal(path)
    assert content.quarantined == {bad.id}
    harness = content.results[bad.id].harness
    assert harness.startswith("ask of stub: its process died of SIGSEGV before it answered; ")
    assert harness.endswith(" in do, 2 times")
    assert content.results[bad.id].attempts == 2
    for one in others:
        assert not content.results[one.id].harness
        assert content.results[one.id].attempts == 1
    assert ended.finished == 9


def test_unit_whose_worker_died_is_repeated_last_and_alone(path, tmp_path):
    once = unit("once", die=signal.SIGKILL, times=1, folder=str(tmp_path))
    _, events = run(path, [once, *(unit(f"u{n}") for n in range(6))])
    result = read_journal(path).results[once.id]
    assert (result.attempts, result.harness) == (2, "")
    assert (result.facts["alone"], result.facts["count"]) == (True, 1)
    last = events[-1]
    assert (last.unit.id, last.running, last.finished) == (once.id, 0, 7)


def test_unit_that_raises_is_repeated_once_and_then_is_a_harness_error(path, tmp_path):
    once = unit("once", raises="bad luck", times=1, folder=str(tmp_path))
    twice = unit("twice", raises="no \x1b[31mroom")
    run(path, [once, twice])
    results = read_journal(path).results
    assert results[once.id].harness == ""
    assert results[twice.id].harness == "ask of stub: RuntimeError: no room, 2 times"


def test_unit_that_ended_an_earlier_run_is_done_last_or_quarantined(path):
    """Lost once, it is done last and alone; lost twice, it is quarantined without another try."""
    bad, others = unit("bad"), [unit(f"u{n}") for n in range(3)]
    with Journal.open(path, {"command": "test"}, resume=True) as journal:
        journal.write_start(bad)
    _, events = run(path, [bad, *others])
    assert events[-1].unit.id == bad.id
    assert read_journal(path).results[bad.id].facts["alone"]

    with Journal.open(path, {"command": "test"}, resume=False) as journal:
        journal.write_start(bad)
        journal.write_start(bad)
    _, events = run(path, [bad, *others])
    assert bad.id not in {event.unit.id for event in events if event.kind == "begun"}
    assert read_journal(path).quarantined == {bad.id}
    assert "lost 2 times before it was done" in read_journal(path).results[bad.id].harness
    assert names(path) == ["", "u0", "u1", "u2"]


def test_unit_marked_alone_gets_a_fresh_process(path):
    import msgspec

    alone = msgspec.structs.replace(unit("alone"), alone=True)
    run(path, [unit("a"), unit("b"), alone, unit("c")], workers=1)
    facts = {done.facts["name"]: done.facts for done in read_journal(path).results.values()}
    assert facts["alone"]["count"] == 1
    assert facts["alone"]["pid"] != facts["b"]["pid"]


def test_hanging_worker_and_its_children_are_killed(path, tmp_path):
    hung = unit("hung", wait_for=str(tmp_path / "never"), child=str(tmp_path / "child"))
    ended, _ = run(path, [hung, unit("a")], limits=Limits(unit=0.5))
    result = read_journal(path).results[hung.id]
    assert result.harness == "ask of stub: its process did not come back within 0.5 s, 2 times"
    assert ended.finished == 2
    assert not is_running(int((tmp_path / "child").read_text()))


def test_stopped_run_can_be_resumed(path):
    units = [unit(f"u{n}") for n in range(5)]
    ended, _ = run(path, units, workers=1, stop=lambda _, done: done.facts["name"] == "u1")
    assert (ended.why, ended.finished, ended.remaining) == ("stopped early", 2, 3)
    assert read_journal(path).why == "stopped early"
    assert [one.case["name"] for one in read_journal(path).unfinished] == ["u2", "u3", "u4"]
    assert run(path, units)[0].finished == 5


@pytest.fixture
def hour_later_marker(monkeypatch, tmp_path):
    """A file whose creation advances the clock of the run by an hour.

    The time that a worker takes to start depends on how busy the machine is: no real time limit
    would be sure to expire while it is at work.
    """
    mark = tmp_path / "begun"

    def monotonic():
        return time.monotonic() + 3600.0 * mark.exists()

    monkeypatch.setattr(pool, "time", SimpleNamespace(monotonic=monotonic))
    return mark


def test_units_running_at_the_time_limit_finish_and_the_rest_is_left(path, hour_later_marker):
    units = [unit("long", touch=str(hour_later_marker), seconds=0.6), unit("rest")]
    limits = Limits(unit=7200.0)
    ended, _ = run(path, units, workers=1, seconds=3600.0, limits=limits)
    assert (ended.why, ended.at_once) == ("time is up", False)
    assert names(path) == ["long"]
    assert ended.remaining == 1
    assert run(path, units)[0].finished == 2


def test_units_killed_after_the_grace_period_do_not_count_as_lost(
    path, tmp_path, hour_later_marker
):
    hung = unit("hung", wait_for=str(tmp_path / "never"), touch=str(hour_later_marker))
    limits = Limits(unit=7200.0, grace=0.1)
    ended, _ = run(path, [hung], seconds=3600.0, limits=limits)
    assert (ended.why, ended.at_once, ended.remaining) == ("time is up", True, 1)
    assert read_journal(path).lost.get(hung.id, 0) == 0


@pytest.mark.parametrize("kind", ["describe", "draw", "shrink", "fault"])
def test_units_that_ask_many_questions_are_aborted_at_the_time_limit(
    path, tmp_path, hour_later_marker, kind
):
    options = {"wait_for": str(tmp_path / "never"), "touch": str(hour_later_marker)}
    many = unit("many", kind=kind, **options)
    limits = Limits(unit=7200.0, grace=60.0)  # far longer than a worker takes to start
    units = [unit("first"), many]
    ended, _ = run(path, units, workers=1, seconds=3600.0, limits=limits)
    assert (ended.why, ended.at_once, ended.remaining) == ("time is up", False, 1)
    assert read_journal(path).lost.get(many.id, 0) == 0
    assert [one.case["name"] for one in read_journal(path).unfinished] == ["many"]


def test_first_unit_of_a_run_has_the_grace_whatever_it_asks(path, hour_later_marker):
    """A run whose limit is shorter than its first unit would never get further."""
    describe = unit("a", kind="describe", touch=str(hour_later_marker), seconds=0.6)
    limits = Limits(unit=7200.0, grace=60.0)
    ended, _ = run(path, [describe, unit("b")], workers=1, seconds=3600.0, limits=limits)
    assert (ended.why, ended.finished, ended.remaining) == ("time is up", 1, 1)


def test_run_does_only_the_units_of_its_shard(path):
    units = [unit(f"u{n}", follow=[(f"f{n}", {})]) for n in range(10)]
    shard = Shard(1, 2)
    ended, _ = run(path, [*units, unit("d", kind="describe")], mine=shard.has)
    done = set(read_journal(path).results)
    assert done == {i for i, one in read_journal(path).units.items() if shard.has(one)}
    assert ended.remaining == 0


def test_work_that_cannot_be_made_raises_a_one_line_error(path):
    with pytest.raises(UsageError, match=r"^kernel 'x' is not there\.$"):
        run(path, [unit("a")], work="tests.workers.stub_work:refused")
    with pytest.raises(UsageError, match=r"no work 'tests\.workers\.nothing:work': ModuleNotFound"):
        run(path, [unit("a")], work="tests.workers.nothing:work")
    with pytest.raises(WorkerError, match="cannot be started: its process died of SIGKILL"):
        run(path, [unit("a")], work="tests.workers.stub_work:dead")
    assert not read_journal(path).results
    assert not read_journal(path).lost


def test_printed_output_is_no_message_and_its_last_line_is_in_the_reason(path):
    noisy = unit("noisy", prints="x" * 100_000 + "\n\x1b[31mlast words", die=signal.SIGKILL)
    run(path, [noisy, unit("a", prints='{"n":3}')])
    harness = read_journal(path).results[noisy.id].harness
    start = "ask of stub: its process died of SIGKILL before it answered; it said: xxx"
    assert harness.startswith(start)
    assert harness.endswith("xxx | last words, 2 times")
    assert len(harness) < 1000


def test_result_for_another_unit_is_rejected(path):
    liar = unit("liar", lie="0" * 16)
    run(path, [liar, unit("a")])
    assert "gave the result of" in read_journal(path).results[liar.id].harness
    assert len(read_journal(path).results) == 2


def test_journal_write_failure_ends_the_run_and_its_workers(path, tmp_path):
    class Full(Disk):
        def write(self, descriptor, data):
            if b'"kind":"result"' in data:
                raise OSError(28, "No space left on device")
            return super().write(descriptor, data)

    units = [unit("a", child=str(tmp_path / "child")), unit("b")]
    events = []
    with pytest.raises(JournalError, match="No space left on device"):
        run(path, units, workers=1, disk=Full(), on_event=events.append)
    assert all(event.kind == "begun" for event in events)
    assert not is_running(int((tmp_path / "child").read_text()))


def test_exception_in_the_event_callback_ends_the_run_and_its_workers(path, tmp_path):
    def fail(event):
        if event.kind == "done":
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        run(path, [unit("a", child=str(tmp_path / "child"))], on_event=fail)
    assert not is_running(int((tmp_path / "child").read_text()))
    assert len(read_journal(path).results) == 1


def test_run_without_units_starts_no_worker(path):
    ended, events = run(path, [], work="tests.workers.stub_work:dead")
    assert (ended.why, ended.finished, events) == ("", 0, [])


def test_run_units_works_outside_the_main_thread(path):
    ends = []
    thread = threading.Thread(target=lambda: ends.append(run(path, [unit("a")])[0]))
    thread.start()
    thread.join()
    assert ends[0].finished == 1


RUNS = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.workers.stub_work import unit
from attncheck.workers.journal import Journal
from attncheck.workers.pool import run_units
from attncheck.workers.worker_pool import WorkerPlace
units = {units}
with Journal.open({path!r}, {{"command": "test"}}, resume=True) as journal:
    ended = run_units(units, work="tests.workers.stub_work:work", options={{}}, journal=journal,
                workers=[WorkerPlace(), WorkerPlace()])
print(ended.why, ended.at_once, ended.finished, ended.remaining)
"""


def start_run(path, tmp_path, units, *files):
    """Start a run in a process of its own, and wait until it has created these files."""
    code = RUNS.format(root=str(ROOT), units=units, path=str(path))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    until = time.monotonic() + 60
    while not all((tmp_path / name).exists() for name in files):
        assert time.monotonic() < until
        time.sleep(0.01)
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_interrupt_lets_running_units_finish(path, tmp_path, number):
    go, begun = str(tmp_path / "go"), str(tmp_path / "begun")
    units = f'[unit("a", touch={begun!r}, wait_for={go!r}), unit("b", wait_for={go!r}), unit("c")]'
    process = start_run(path, tmp_path, units, "begun")
    process.send_signal(number)
    Path(go).touch()
    output, _ = process.communicate(timeout=60)
    assert output.startswith("interrupted False")
    assert "c" not in names(path)
    assert "a" in names(path)
    assert read_journal(path).why == "interrupted"
    assert not read_journal(path).lost


def test_second_interrupt_kills_running_units_without_counting_them_as_lost(path, tmp_path):
    begun, child = tmp_path / "begun", tmp_path / "child"
    units = (
        f'[unit("done"), unit("a", child={str(child)!r}, touch={str(begun)!r}, '
        f"wait_for={str(tmp_path / 'never')!r})]"
    )
    process = start_run(path, tmp_path, units, "begun", "child")
    while "done" not in names(path):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)  # a second SIGINT might be merged with the first
    output, _ = process.communicate(timeout=60)
    assert output == "interrupted True 1 1\n"
    assert names(path) == ["done"]
    assert not any(read_journal(path).lost.values())
    assert not is_running(int(child.read_text()))


def test_no_process_outlives_a_killed_run(path, tmp_path):
    begun, child = tmp_path / "begun", tmp_path / "child"
    never = str(tmp_path / "never")
    units = f'[unit("a", child={str(child)!r}, touch={str(begun)!r}, wait_for={never!r})]'
    process = start_run(path, tmp_path, units, "begun", "child")
    child_pid = int(child.read_text() or "0")
    workers = children(process.pid)
    assert is_running(child_pid)
    assert workers
    process.kill()
    process.communicate()
    until = time.monotonic() + 30
    while is_running(child_pid) or any(map(is_running, workers)):
        assert time.monotonic() < until, "a process lives on"
        time.sleep(0.02)
    assert read_journal(path).lost == dict.fromkeys(read_journal(path).units, 1)


def children(parent):
    pids = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                stat = (folder / "stat").read_text()
            except OSError:
                continue
            if int(stat.rpartition(")")[2].split()[1]) == parent:
                pids.append(int(folder.name))
    return pids


def test_importing_the_pool_loads_neither_torch_nor_numpy():
    code = (
        "import sys, attncheck.workers.pool, attncheck.workers.journal, "
        "attncheck.workers.worker_pool, attncheck.workers.ray_pool\n"
        "print([name for name in ('torch', 'numpy', 'ray', 'triton') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"

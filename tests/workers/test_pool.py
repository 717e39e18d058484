"""Units in lanes: each is done once, what dies is told from its neighbours, nothing lives on."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
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
def found(monkeypatch):
    """A lane finds modules where we do."""
    monkeypatch.syspath_prepend(str(ROOT))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "results.jsonl"


def ran(path, units, *, lanes=2, work=STUB, resume=True, options=None, disk=None, **rest):
    """How it ended and the events."""
    events = []
    with Journal.open(path, {"command": "test"}, resume=resume, disk=disk) as journal:
        ended = run_units(
            units,
            work=work,
            options=options or {},
            journal=journal,
            workers=[WorkerPlace() for _ in range(lanes)],
            on_event=rest.pop("on_event", events.append),
            **rest,
        )
    return ended, events


def names(path):
    return sorted(done.facts.get("name", "") for done in read_journal(path).results.values())


def alive(number):
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_units_and_what_follows_from_them_are_done_once(path):
    deep = unit("a", follow=[("b", {"follow": [("c", {}), ("d", {})]}), ("d", {})])
    ended, events = ran(path, [deep, unit("d"), unit("d"), unit("e")])
    assert names(path) == ["a", "b", "c", "d", "e"]
    assert (ended.why, ended.finished, ended.left) == ("", 5, 0)
    kinds = [event.kind for event in events]
    assert kinds.count("begun") == kinds.count("done") == 5
    assert events[-1].finished == events[-1].known == 5
    assert events[-1].seconds_left == 0
    assert read_journal(path).why == ""


def test_what_the_journal_has_is_not_done_again_and_what_follows_from_it_is(path):
    first = unit("a", follow=[("b", {"follow": [("c", {})]})])
    ran(path, [first], lanes=1, stop=lambda _, done: done.facts["name"] == "b")
    assert names(path) == ["a", "b"]
    ended, events = ran(path, [first], lanes=1)
    assert names(path) == ["a", "b", "c"]
    assert [(event.kind, event.unit.case["name"]) for event in events] == [
        ("recalled", "a"),
        ("recalled", "b"),
        ("begun", "c"),
        ("done", "c"),
    ]
    assert (ended.why, ended.finished) == ("", 3)


def test_what_cannot_be_asked_ends_the_run_and_is_done_when_it_is_mended(path, tmp_path):
    file, heard = tmp_path / "kernel.py", []
    units = [unit("a", usage=str(file)), unit("b")]
    for turn in range(1, 4):  # as often as somebody tries: it is none that is lost
        stop = lambda _, done: bool(heard.append(done.facts["usage"]))  # noqa: E731
        ended, _ = ran(path, units, lanes=1, stop=stop)
        assert (ended.why, ended.finished, ended.left) == ("stopped early", 0, 2)
        assert (names(path), len(heard)) == ([], turn)
    file.touch()
    ended, _ = ran(path, units, lanes=1)
    assert (ended.why, names(path)) == ("", ["a", "b"])
    assert not read_journal(path).quarantined


def test_a_result_is_on_the_disk_before_anybody_is_told(path):
    def told(event):
        if event.kind == "done":
            assert event.unit.id in read_journal(path).results

    ran(path, [unit(f"u{n}") for n in range(5)], on_event=told)


def test_priority_decides_and_order_among_equals(path):
    units = [unit("c"), unit("b", urgent=1), unit("a"), unit("d", urgent=1)]
    _, events = ran(path, units, lanes=1, priority=lambda one: (-one.case.get("urgent", 0),))
    begun = [event.unit.case["name"] for event in events if event.kind == "begun"]
    assert begun == ["b", "d", "c", "a"]


def begun(path, *units):
    """The names of units in the order in which they were begun."""
    ended, events = ran(path, units, product=lambda one: one.case.get("makes", ""))
    assert (ended.why, ended.left) == ("", 0)
    return [event.unit.case["name"] for event in events if event.kind == "begun"]


def test_what_a_running_unit_makes_is_waited_for_while_there_is_something_else(path, tmp_path):
    file = str(tmp_path / "file")
    maker = unit("a", makes="kernel", wait_for=file)
    rest = [unit("b", makes="kernel"), unit("c", touch=file), unit("d", makes="kernel")]
    assert begun(path, maker, *rest) == ["a", "c", "b", "d"]


def test_nobody_waits_for_what_is_made_where_there_is_nothing_else(path, tmp_path):
    file = str(tmp_path / "file")
    maker = unit("a", makes="kernel", wait_for=file)
    assert begun(path, maker, unit("b", makes="kernel", touch=file)) == ["a", "b"]


@pytest.mark.parametrize("lost", [False, True])
def test_units_are_released_when_the_one_that_makes_their_product_has_ended(path, lost):
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
        # The first of them makes it, if it is not there.
        assert [take(), take(), take(), take()] == (list("byzc") if lost else list("bcyz"))
        assert schedule.peek(0) is None


@pytest.mark.parametrize("hangs", [False, True])
def test_a_unit_that_is_done_or_took_too_long_is_waited_for_no_longer(path, tmp_path, hangs):
    how = {"wait_for": str(tmp_path / "never")} if hangs else {"seconds": 0.3}
    maker = unit("a", makes="kernel", **how)
    rest = [unit(f"c{n}", seconds=0.4) for n in range(6)]
    options = {"product": lambda one: one.case.get("makes", ""), "limits": Limits(unit=1.0)}
    _, events = ran(path, [maker, unit("b", makes="kernel"), *rest], **options)
    order = [event.unit.case["name"] for event in events if event.kind == "begun"]
    assert order[:2] == ["a", "c0"]
    assert order.index("b") < order.index("c5")


def test_a_lane_makes_its_work_once_and_closes_it(path, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    ran(path, [unit(f"u{n}") for n in range(6)], lanes=1, options={"folder": str(folder)})
    facts = [done.facts for done in read_journal(path).results.values()]
    assert [one["count"] for one in facts] == [1, 2, 3, 4, 5, 6]
    assert [one.name for one in folder.iterdir()] == [f"closed.{facts[0]['pid']}"]


def test_lanes_are_made_while_one_says_what_there_is_to_do(path, tmp_path):
    """Else the only unit that there is would wait for ever."""
    first = unit("a", kind="describe", wait_for=str(tmp_path / "second"))
    made = {"work": "tests.workers.stub_work:made_twice", "options": {"folder": str(tmp_path)}}
    ended, _ = ran(path, [first], **made)
    assert (ended.why, names(path)) == ("", ["a"])


def test_each_lane_sees_its_gpu(path, tmp_path):
    """Both begin before either ends."""
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


def test_a_lane_that_dies_costs_its_own_unit_alone(path, tmp_path):
    bad = unit("bad", die=signal.SIGSEGV)
    others = [unit(f"u{n}") for n in range(8)]
    ended, _ = ran(path, [bad, *others])
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


def test_what_dies_once_is_done_again_when_nothing_else_is_in_a_new_process(path, tmp_path):
    once = unit("once", die=signal.SIGKILL, times=1, folder=str(tmp_path))
    _, events = ran(path, [once, *(unit(f"u{n}") for n in range(6))])
    result = read_journal(path).results[once.id]
    assert (result.attempts, result.harness) == (2, "")
    assert (result.facts["alone"], result.facts["count"]) == (True, 1)
    last = events[-1]
    assert (last.unit.id, last.running, last.finished) == (once.id, 0, 7)


def test_what_raises_is_asked_once_more_and_is_no_kernels_fault(path, tmp_path):
    once = unit("once", raises="bad luck", times=1, folder=str(tmp_path))
    twice = unit("twice", raises="no \x1b[31mroom")
    ran(path, [once, twice])
    results = read_journal(path).results
    assert results[once.id].harness == ""
    assert results[twice.id].harness == "ask of stub: RuntimeError: no room, 2 times"


def test_a_unit_that_took_the_whole_run_down_is_done_last_and_alone(path):
    """Twice, and it is not begun again."""
    bad, others = unit("bad"), [unit(f"u{n}") for n in range(3)]
    with Journal.open(path, {"command": "test"}, resume=True) as journal:
        journal.begun(bad)
    _, events = ran(path, [bad, *others])
    assert events[-1].unit.id == bad.id
    assert read_journal(path).results[bad.id].facts["alone"]

    with Journal.open(path, {"command": "test"}, resume=False) as journal:
        journal.begun(bad)
        journal.begun(bad)
    _, events = ran(path, [bad, *others])
    assert bad.id not in {event.unit.id for event in events if event.kind == "begun"}
    assert read_journal(path).quarantined == {bad.id}
    assert "lost 2 times before it was done" in read_journal(path).results[bad.id].harness
    assert names(path) == ["", "u0", "u1", "u2"]


def test_a_unit_that_is_to_be_alone_gets_a_process_that_has_done_nothing(path):
    import msgspec

    alone = msgspec.structs.replace(unit("alone"), alone=True)
    ran(path, [unit("a"), unit("b"), alone, unit("c")], lanes=1)
    facts = {done.facts["name"]: done.facts for done in read_journal(path).results.values()}
    assert facts["alone"]["count"] == 1
    assert facts["alone"]["pid"] != facts["b"]["pid"]


def test_a_lane_that_hangs_is_ended_and_its_unit_too(path, tmp_path):
    hung = unit("hung", wait_for=str(tmp_path / "never"), child=str(tmp_path / "child"))
    ended, _ = ran(path, [hung, unit("a")], limits=Limits(unit=0.5))
    result = read_journal(path).results[hung.id]
    assert result.harness == "ask of stub: its process did not come back within 0.5 s, 2 times"
    assert ended.finished == 2
    assert not alive(int((tmp_path / "child").read_text()))


def test_stop_ends_a_run_early_and_it_can_be_resumed(path):
    units = [unit(f"u{n}") for n in range(5)]
    ended, _ = ran(path, units, lanes=1, stop=lambda _, done: done.facts["name"] == "u1")
    assert (ended.why, ended.finished, ended.left) == ("stopped early", 2, 3)
    assert read_journal(path).why == "stopped early"
    assert [one.case["name"] for one in read_journal(path).unfinished] == ["u2", "u3", "u4"]
    assert ran(path, units)[0].finished == 5


@pytest.fixture
def an_hour_once_begun(monkeypatch, tmp_path):
    """The run's clock is an hour further as soon as the file that it gives is there.

    A lane takes as long to start as the machine is busy: no real limit is sure to find it at work.
    """
    mark = tmp_path / "begun"

    def monotonic():
        return time.monotonic() + 3600.0 * mark.exists()

    monkeypatch.setattr(pool, "time", SimpleNamespace(monotonic=monotonic))
    return mark


def test_when_time_is_up_running_units_finish_and_the_rest_waits(path, an_hour_once_begun):
    units = [unit("long", touch=str(an_hour_once_begun), seconds=0.6), unit("rest")]
    limits = Limits(unit=7200.0)
    ended, _ = ran(path, units, lanes=1, seconds=3600.0, limits=limits)
    assert (ended.why, ended.at_once) == ("time is up", False)
    assert names(path) == ["long"]
    assert ended.left == 1
    assert ran(path, units)[0].finished == 2


def test_after_the_grace_running_units_are_ended_without_blame(path, tmp_path, an_hour_once_begun):
    hung = unit("hung", wait_for=str(tmp_path / "never"), touch=str(an_hour_once_begun))
    limits = Limits(unit=7200.0, grace=0.1)
    ended, _ = ran(path, [hung], seconds=3600.0, limits=limits)
    assert (ended.why, ended.at_once, ended.left) == ("time is up", True, 1)
    assert read_journal(path).lost.get(hung.id, 0) == 0


def test_another_shard_is_left_to_others(path):
    units = [unit(f"u{n}", follow=[(f"f{n}", {})]) for n in range(10)]
    shard = Shard(1, 2)
    ended, _ = ran(path, [*units, unit("d", kind="describe")], mine=shard.has)
    done = set(read_journal(path).results)
    assert done == {i for i, one in read_journal(path).units.items() if shard.has(one)}
    assert ended.left == 0


def test_a_work_that_cannot_be_made_is_an_error_in_one_line(path):
    with pytest.raises(UsageError, match=r"^kernel 'x' is not there\.$"):
        ran(path, [unit("a")], work="tests.workers.stub_work:refused")
    with pytest.raises(UsageError, match=r"no work 'tests\.workers\.nothing:work': ModuleNotFound"):
        ran(path, [unit("a")], work="tests.workers.nothing:work")
    with pytest.raises(WorkerError, match="cannot be started: its process died of SIGKILL"):
        ran(path, [unit("a")], work="tests.workers.stub_work:dead")
    assert not read_journal(path).results
    assert not read_journal(path).lost


def test_what_a_lane_prints_is_no_message_and_its_last_line_is_in_the_reason(path):
    noisy = unit("noisy", prints="x" * 100_000 + "\n\x1b[31mlast words", die=signal.SIGKILL)
    ran(path, [noisy, unit("a", prints='{"n":3}')])
    harness = read_journal(path).results[noisy.id].harness
    start = "ask of stub: its process died of SIGKILL before it answered; it said: xxx"
    assert harness.startswith(start)
    assert harness.endswith("xxx | last words, 2 times")
    assert len(harness) < 1000


def test_a_lane_that_answers_for_another_unit_is_not_believed(path):
    liar = unit("liar", lie="0" * 16)
    ran(path, [liar, unit("a")])
    assert "gave the result of" in read_journal(path).results[liar.id].harness
    assert len(read_journal(path).results) == 2


def test_a_journal_that_cannot_be_written_ends_the_run_and_its_lanes(path, tmp_path):
    class Full(Disk):
        def write(self, descriptor, data):
            if b'"kind":"result"' in data:
                raise OSError(28, "No space left on device")
            return super().write(descriptor, data)

    units = [unit("a", child=str(tmp_path / "child")), unit("b")]
    told = []
    with pytest.raises(JournalError, match="No space left on device"):
        ran(path, units, lanes=1, disk=Full(), on_event=told.append)
    assert all(event.kind == "begun" for event in told)
    assert not alive(int((tmp_path / "child").read_text()))


def test_what_told_raises_ends_the_run_and_its_lanes(path, tmp_path):
    def told(event):
        if event.kind == "done":
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        ran(path, [unit("a", child=str(tmp_path / "child"))], on_event=told)
    assert not alive(int((tmp_path / "child").read_text()))
    assert len(read_journal(path).results) == 1


def test_nothing_to_do_starts_no_lane(path):
    ended, events = ran(path, [], work="tests.workers.stub_work:dead")
    assert (ended.why, ended.finished, events) == ("", 0, [])


def test_in_another_thread_it_runs_too(path):
    found = []
    thread = threading.Thread(target=lambda: found.append(ran(path, [unit("a")])[0]))
    thread.start()
    thread.join()
    assert found[0].finished == 1


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
print(ended.why, ended.at_once, ended.finished, ended.left)
"""


def started(path, tmp_path, units, *waits):
    """A run in a process of its own, when the files of ``waits`` are there."""
    code = RUNS.format(root=str(ROOT), units=units, path=str(path))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    until = time.monotonic() + 60
    while not all((tmp_path / name).exists() for name in waits):
        assert time.monotonic() < until
        time.sleep(0.01)
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_interrupt_lets_running_units_finish(path, tmp_path, number):
    go, begun = str(tmp_path / "go"), str(tmp_path / "begun")
    units = f'[unit("a", touch={begun!r}, wait_for={go!r}), unit("b", wait_for={go!r}), unit("c")]'
    process = started(path, tmp_path, units, "begun")
    process.send_signal(number)
    Path(go).touch()
    told, _ = process.communicate(timeout=60)
    assert told.startswith("interrupted False")
    assert "c" not in names(path)
    assert "a" in names(path)
    assert read_journal(path).why == "interrupted"
    assert not read_journal(path).lost


def test_the_second_interrupt_ends_everything_at_once_and_blames_nobody(path, tmp_path):
    begun, child = tmp_path / "begun", tmp_path / "child"
    units = (
        f'[unit("done"), unit("a", child={str(child)!r}, touch={str(begun)!r}, '
        f"wait_for={str(tmp_path / 'never')!r})]"
    )
    process = started(path, tmp_path, units, "begun", "child")
    while "done" not in names(path):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)  # a second SIGINT might be one with the first
    told, _ = process.communicate(timeout=60)
    assert told == "interrupted True 1 1\n"
    assert names(path) == ["done"]
    assert not any(read_journal(path).lost.values())
    assert not alive(int(child.read_text()))


def test_no_process_outlives_a_run_that_is_killed(path, tmp_path):
    begun, child = tmp_path / "begun", tmp_path / "child"
    never = str(tmp_path / "never")
    units = f'[unit("a", child={str(child)!r}, touch={str(begun)!r}, wait_for={never!r})]'
    process = started(path, tmp_path, units, "begun", "child")
    number = int(child.read_text() or "0")
    lanes = _lanes(process.pid)
    assert alive(number)
    assert lanes
    process.kill()
    process.communicate()
    until = time.monotonic() + 30
    while alive(number) or any(alive(lane) for lane in lanes):
        assert time.monotonic() < until, "a process lives on"
        time.sleep(0.02)
    assert read_journal(path).lost == dict.fromkeys(read_journal(path).units, 1)


def _lanes(parent):
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                stat = (folder / "stat").read_text()
            except OSError:
                continue
            if int(stat.rpartition(")")[2].split()[1]) == parent:
                found.append(int(folder.name))
    return found


def test_it_loads_neither_torch_nor_numpy():
    code = (
        "import sys, attncheck.workers.pool, attncheck.workers.journal, attncheck.workers.journal, "
        "attncheck.workers.worker_pool, attncheck.workers.ray_pool\n"
        "print([name for name in ('torch', 'numpy', 'ray', 'triton') if name in sys.modules])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "[]\n"

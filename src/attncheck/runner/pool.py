"""Units on this machine: lanes that are processes of their own, spawned, never forked.

```python
with Journal.open(path, header, resume=True) as journal:
    ended = run(units, work="attncheck.gate.work:work", options={...}, journal=journal,
                lanes=[Lane(gpu="0"), Lane(gpu="1")])
```
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from attncheck.runner.crew import Limits, Work
from attncheck.runner.dispatch import Ended, Event, Rules, dispatch, given_up
from attncheck.runner.interruptions import Interruptions
from attncheck.runner.lane import NAME, Hello
from attncheck.runner.orphans import Guard
from attncheck.runner.processes import Lane, LaneError, Processes
from attncheck.runner.schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from attncheck.runner.journal import Journal
    from attncheck.runner.unit import Done, Unit

__all__ = ["Ended", "Event", "Lane", "LaneError", "Limits", "Option", "Work", "run"]

Option = str | int | float | bool


def run(  # noqa: PLR0913  # one run, said once
    units: Sequence[Unit],
    *,
    work: str,
    options: Mapping[str, Option],
    journal: Journal,
    lanes: Sequence[Lane],
    seconds: float | None = None,
    stop: Callable[[Done], bool] = lambda _: False,
    told: Callable[[Event], None] = lambda _: None,
    priority: Callable[[Unit], tuple[Any, ...]] = lambda _: (),
    mine: Callable[[Unit], bool] = lambda _: True,
    lost: Callable[[Unit, str], Done] = given_up,
    limits: Limits | None = None,
) -> Ended:
    """Does ``units`` and what follows from them, each once; what the journal has is not done again.

    A result is in the journal, on the disk, before ``told`` hears of it. A lane that dies, or whose
    Work raises, is replaced; its unit is done once more when nothing else is, in a new lane, and
    given up when that is lost too. Interrupts: the first ends it when the running units are done,
    the second at once; SIGTERM is as the first. No process is left when it returns or raises, nor
    when this process is killed.

    Args:
        units: What is known from the outset; ``Done.units`` follow.
        work: Factory of the lanes' Work, ``module:function``, called with ``options`` by name.
        options: See there.
        journal: Open for writing.
        lanes: One process each, at most; they are started when there is something to do.
        seconds: No unit is begun after so long; running ones have ``limits.grace`` more.
        stop: Whether a result ends the run, as the first interrupt does. Not asked of results that
            the journal had.
        told: Hears of everything, in this thread.
        priority: Of a unit; least first.
        mine: Whether this run does a unit, or another shard.
        lost: The result of a unit that is given up, from the reason; unless told, a harness error.
        limits: Of time.

    Returns:
        How it ended; the journal says so too, and is left open.

    Raises:
        JournalError: where the journal cannot be written. What ``told`` heard of is safe.
        UsageError: where the factory raises one.
        LaneError: where no lane can be started.
    """
    limits = limits or Limits()
    schedule = Schedule(journal, priority=priority, mine=mine)
    rules = Rules(seconds=seconds, stop=stop, told=told, lost=lost, limits=limits)
    name = secrets.token_hex(8)
    with Interruptions() as interruptions, Guard(NAME, name):
        crew = Processes(lanes, Hello(work=work, options=dict(options)), name, limits)
        try:
            return dispatch(
                units,
                schedule,
                crew,
                journal=journal,
                rules=rules,
                interruptions=interruptions,
            )
        finally:
            crew.close()

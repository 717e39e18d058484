"""``Compiling``: the clock that adds up the time which Triton and torch spend compiling."""

import time
from types import SimpleNamespace

from attncheck.verify.kernel_server import Compiling


def report_triton_compilation(clock: Compiling, microseconds: int) -> None:
    """Call the listener as Triton does at the end of a compilation."""
    clock._add_triton(
        src=None,
        metadata={},
        metadata_group={},
        times=SimpleNamespace(total=microseconds),
        cache_hit=False,
    )


def test_triton_compilations_are_added_up():
    clock = Compiling()
    report_triton_compilation(clock, 250_000)
    report_triton_compilation(clock, 500_000)
    assert clock.seconds == 0.75


def test_triton_compilation_within_torch_compile_counts_once():
    clock, start = Compiling(), time.perf_counter()
    clock._torch_starts(None)
    report_triton_compilation(clock, 10**9)
    clock._torch_ends(None)
    assert 0 < clock.seconds <= time.perf_counter() - start


def test_listen_keeps_an_existing_triton_listener(monkeypatch):
    from triton import knobs

    earlier = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda **event: earlier.append(event))
    clock = Compiling()
    clock.listen()
    clock.listen()  # a second call must not count everything twice
    event = {"src": None, "metadata": {}, "metadata_group": {}, "cache_hit": True}
    knobs.compilation.listener(times=SimpleNamespace(total=10**6), **event)
    assert clock.seconds == 1
    assert len(earlier) == 1


def test_torch_compile_time_is_counted():
    import torch
    from torch._dynamo.callback import callback_handler

    clock = Compiling()
    clock.listen()
    try:
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    finally:
        callback_handler.remove_start_callback(clock._torch_starts)
        callback_handler.remove_end_callback(clock._torch_ends)
    assert clock.seconds > 0

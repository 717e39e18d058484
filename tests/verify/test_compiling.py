"""How long was compiled."""

import time
from types import SimpleNamespace

from attncheck.verify.kernel_server import Compiling


def compiled(clock: Compiling, microseconds: int) -> None:
    """What Triton calls at the end of a compilation."""
    clock._add_triton(
        src=None,
        metadata={},
        metadata_group={},
        times=SimpleNamespace(total=microseconds),
        cache_hit=False,
    )


def test_it_adds_up_what_triton_tells():
    clock = Compiling()
    compiled(clock, 250_000)
    compiled(clock, 500_000)
    assert clock.seconds == 0.75


def test_triton_within_torch_counts_once():
    clock, start = Compiling(), time.perf_counter()
    clock._torch_starts(None)
    compiled(clock, 10**9)
    clock._torch_ends(None)
    assert 0 < clock.seconds <= time.perf_counter() - start


def test_triton_takes_it_and_whoever_listened_still_hears(monkeypatch):
    from triton import knobs

    heard = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda **told: heard.append(told))
    clock = Compiling()
    clock.listen()
    clock.listen()  # once is enough
    told = {"src": None, "metadata": {}, "metadata_group": {}, "cache_hit": True}
    knobs.compilation.listener(times=SimpleNamespace(total=10**6), **told)
    assert clock.seconds == 1
    assert len(heard) == 1


def test_torch_tells_when_it_compiles():
    import torch
    from torch._dynamo.callback import CallbackArgs, CallbackTrigger, callback_handler

    clock = Compiling()
    clock.listen()
    try:
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    finally:
        callback_handler.remove_start_callback(clock._torch_starts)
        callback_handler.remove_end_callback(clock._torch_ends)
    assert clock.seconds > 0
    assert CallbackArgs(CallbackTrigger.DYNAMO, "0")  # what it is called with

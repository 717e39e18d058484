"""Memory that is reserved and hardly written."""

import pytest
import torch

from attncheck.core import strided_alloc

WIDE = 2**31 + 4096
BF16 = torch.empty(0, dtype=torch.bfloat16)


def test_what_is_reserved_is_zeros_and_can_be_written():
    whole = strided_alloc.reserve_memory(WIDE, BF16)
    assert (whole.dtype, len(whole)) == (torch.bfloat16, WIDE)
    assert (whole[0], whole[-1]) == (0, 0)
    whole[-1] = 3
    assert whole[-1] == 3


def test_a_copy_has_the_elements_and_the_strides():
    view = strided_alloc.reserve_memory(WIDE, BF16).as_strided((3, 2), (2**30, 1), 4000)
    view.copy_(torch.arange(6).view(3, 2))
    copy = strided_alloc.copy_far_rows(view)
    assert torch.equal(copy, view)
    assert (copy.stride(), copy.storage_offset()) == (view.stride(), view.storage_offset())
    copy.zero_()
    assert int(view.sum()) == 15


@pytest.mark.parametrize(
    ("elements", "shape", "spreads"),
    [
        (WIDE, (3, 2), True),
        (WIDE, (2**26, 2), True),
        (WIDE, (2**29, 2), False),  # a large tensor: all of it is what is meant
        (2**31, (3, 2), False),
        (64, (3, 2), False),
    ],
)
def test_what_is_spread(elements, shape, spreads):
    assert (
        strided_alloc.has_far_rows(
            strided_alloc.reserve_memory(elements, BF16).as_strided(shape, (2, 1))
        )
        == spreads
    )


def test_too_much_is_an_error_that_says_so():
    with pytest.raises(MemoryError, match="cannot allocate memory"):
        strided_alloc.reserve_memory(2**58, BF16)


class _Gpu:
    """A GPU with 10 GiB free."""

    dtype, device = torch.bfloat16, torch.device("cuda")

    def element_size(self) -> int:
        return 2


@pytest.fixture
def released(monkeypatch):
    """A planted GPU of 80 GiB in use here; how often what is cached was given back."""
    times = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: times.append(1))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 30 << 30)
    return times


@pytest.mark.parametrize(("free", "times"), [(19, 1), (21, 0)])
def test_cached_memory_is_given_back_where_little_is_free(free, times, released, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free << 30, 80 << 30))
    strided_alloc.release_scarce_memory("cuda")
    assert len(released) == times


@pytest.mark.parametrize(("device", "initialized"), [("cpu", True), ("cuda", False)])
def test_no_gpu_is_asked_of_its_memory_by_who_uses_none(device, initialized, monkeypatch):
    def asked(_):
        raise AssertionError

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "mem_get_info", asked)
    strided_alloc.release_scarce_memory(device)
    assert not strided_alloc.others_hold_memory(device)


@pytest.mark.usefixtures("released")
@pytest.mark.parametrize(("free", "others"), [(20, True), (45, False)])
def test_others_hold_what_is_neither_free_nor_ours(free, others, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free << 30, 80 << 30))
    assert strided_alloc.others_hold_memory("cuda") == others


@pytest.mark.parametrize(("copies", "able"), [(0, True), (1, False)])
def test_a_gpu_needs_room_for_its_copies(copies, able, monkeypatch):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10 << 30, 16 << 30))
    monkeypatch.setattr(torch, "empty", lambda elements, **_: elements)
    if able:
        assert strided_alloc.reserve_memory(2**32, _Gpu(), copies=copies) == 2**32
    else:
        with pytest.raises(torch.OutOfMemoryError, match="16 GiB are needed, and 10 are free"):
            strided_alloc.reserve_memory(2**32, _Gpu(), copies=copies)

"""Reserving memory for rows far apart, of which little is written, and the limits of a GPU."""

import pytest
import torch

from attncheck.core import strided_alloc

WIDE = 2**31 + 4096
BF16 = torch.empty(0, dtype=torch.bfloat16)


def test_reserved_memory_is_zero_and_writable():
    memory = strided_alloc.reserve_memory(WIDE, BF16)
    assert (memory.dtype, len(memory)) == (torch.bfloat16, WIDE)
    assert (memory[0], memory[-1]) == (0, 0)
    memory[-1] = 3
    assert memory[-1] == 3


def test_copy_of_far_rows_has_the_elements_the_strides_and_its_own_memory():
    view = strided_alloc.reserve_memory(WIDE, BF16).as_strided((3, 2), (2**30, 1), 4000)
    view.copy_(torch.arange(6).view(3, 2))
    copy = strided_alloc.copy_far_rows(view)
    assert torch.equal(copy, view)
    assert (copy.stride(), copy.storage_offset()) == (view.stride(), view.storage_offset())
    copy.zero_()
    assert int(view.sum()) == 15


@pytest.mark.parametrize(
    ("elements", "shape", "far"),
    [
        (WIDE, (3, 2), True),
        (WIDE, (2**26, 2), True),
        (WIDE, (2**29, 2), False),  # a large tensor, which uses much of its memory
        (2**31, (3, 2), False),
        (64, (3, 2), False),
    ],
)
def test_far_rows_are_few_elements_in_more_than_2_to_the_31(elements, shape, far):
    view = strided_alloc.reserve_memory(elements, BF16).as_strided(shape, (2, 1))
    assert strided_alloc.has_far_rows(view) == far


def test_reserving_too_much_raises_memory_error():
    with pytest.raises(MemoryError, match="cannot allocate memory"):
        strided_alloc.reserve_memory(2**58, BF16)


class _CudaTensor:
    """Stands for a bf16 tensor on a GPU."""

    dtype, device = torch.bfloat16, torch.device("cuda")

    def element_size(self) -> int:
        return 2


@pytest.fixture
def released(monkeypatch):
    """A simulated GPU of 80 GiB, 30 of them reserved here; has an entry for each release."""
    calls = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(1))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 30 << 30)
    return calls


@pytest.mark.parametrize(("free", "times"), [(39, 1), (41, 0)])
def test_cached_memory_is_released_if_less_than_half_is_free(free, times, released, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free << 30, 80 << 30))
    strided_alloc.release_scarce_memory("cuda")
    assert len(released) == times


@pytest.mark.parametrize(("device", "initialized"), [("cpu", True), ("cuda", False)])
def test_memory_of_an_unused_gpu_is_not_queried(device, initialized, monkeypatch):
    """A query would initialise CUDA and take memory of the GPU."""

    def query(_):
        raise AssertionError

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "mem_get_info", query)
    strided_alloc.release_scarce_memory(device)
    assert not strided_alloc.others_hold_memory(device)


@pytest.mark.usefixtures("released")
@pytest.mark.parametrize(("free", "others"), [(20, True), (45, False)])
def test_memory_neither_free_nor_ours_is_held_by_others(free, others, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free << 30, 80 << 30))
    assert strided_alloc.others_hold_memory("cuda") == others


def test_gpu_memory_is_reserved_only_if_its_copies_fit_too(monkeypatch):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10 << 30, 16 << 30))
    monkeypatch.setattr(torch, "empty", lambda elements, **_: elements)
    assert strided_alloc.reserve_memory(2**32, _CudaTensor(), copies=0) == 2**32
    with pytest.raises(torch.OutOfMemoryError, match="16 GiB are needed, and 10 are free"):
        strided_alloc.reserve_memory(2**32, _CudaTensor(), copies=1)

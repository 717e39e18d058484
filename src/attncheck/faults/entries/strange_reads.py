"""Edits by which the ideal kernel, which has whole tensors, reads memory as a kernel's code may."""

from __future__ import annotations

from attncheck.faults.fault import Edit

__all__ = ["CONTIGUOUS", "edits_of_reads"]

CONTIGUOUS = """\
def _strides(tensor):
    _, heads, length, dim = tensor.shape
    return heads * length * dim, length * dim, dim, 1
"""
"""Text of ``_strides(tensor)``: those of a tensor that is contiguous."""

_READ = '''def _read(tensor, strides, columns=0, kept=lambda at: at):
    """What lies where these strides lead, in fp32; 0 outside its memory."""
    at = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for axis, stride in enumerate(strides):
        length = columns if axis == 3 and columns else tensor.shape[axis]
        steps = torch.arange(length, device=tensor.device) * stride
        at = at + kept(steps).view([-1 if each == axis else 1 for each in range(4)])
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    memory = tensor.as_strided((size,), (1,), 0)
    at = at + tensor.storage_offset()
    return torch.where((at >= 0) & (at < size), memory[at.clamp(0, size - 1)].float(), 0.0)


{text}

'''
_ATTENTION = "subjects.ideal_attention"
_BEFORE = "def _in_nats(problem: Problem)"


def edits_of_reads(text: str = "", **reads: str) -> tuple[Edit, ...]:
    """The ideal kernel's q, k or v are what other offsets lead to.

    Args:
        text: Python that ``reads`` need.
        reads: By name what each is: an expression with ``_read(tensor, strides, columns, kept)``.
    """
    return (
        Edit(module=_ATTENTION, old=_BEFORE, new=_READ.format(text=text) + _BEFORE),
        *(
            Edit(module=_ATTENTION, old=f"inputs.{name}.float()", new=read)
            for name, read in reads.items()
        ),
    )

"""Patches that several faults share: each is applied before what makes one fault of it."""

from __future__ import annotations

__all__ = [
    "ATOMIC_DQ",
    "IN_PAGES",
    "IN_SPLITS",
    "KNOWN_CALLS",
    "OTHER_SCORE",
    "OTHER_SLOPE",
    "READ_BY_STRIDES",
    "UNGUARDED",
    "UNGUARDED_TRITON",
    "other_part",
]

IN_SPLITS = """
    -    q = self.q[:, :, rows]
    -    running = self._start(q)
    -    for keys in self.key_tiles():
    +    q, tiles, sinks = self.q[:, :, rows], self.key_tiles(), (self.sink, None)
    +    parts = [self._part(rows, q, *each) for each in zip((tiles[:1], tiles[1:]), sinks)]
    +    outs, lses = (torch.stack(each) for each in zip(*parts, strict=True))
    +    largest = lses.amax(0)
    +    shift = finite(largest)
    +    weights = torch.exp(lses - shift)
    +    total = weights.sum(0)
    +    dead = total == 0
    +    out = (weights[..., None] * outs).sum(0) / torch.where(dead, 1.0, total)[..., None]
    +    lse = torch.where(dead, -math.inf, shift + torch.log(total))
    +    return Outputs(out.to(self.problem.formats.output.torch_dtype), lse)
    +def _part(self, rows, q, tiles, sink):
    +    whole, self.sink = self.sink, sink
    +    running = self._start(q)
    +    self.sink = whole
    +    for keys in tiles:

    -return self._finish(running)
    +found = self._finish(running)
    +return found.out, found.lse

    -return Outputs(out.to(self.problem.formats.output.torch_dtype), lse)
    +return Outputs(out, lse)

     lazy_rescale=self._tiling.lazy_rescale,
    +splits=2,
"""
"""The ideal kernel with its keys in two splits: the first tile, and all others."""

READ_BY_STRIDES = '''
    +def _read(tensor, strides, columns=0, kept=lambda at: at):
    +    """What lies where these strides lead, in fp32; 0 outside its memory."""
    +    at = torch.zeros((), dtype=torch.int64, device=tensor.device)
    +    for axis, stride in enumerate(strides):
    +        length = columns if axis == 3 and columns else tensor.shape[axis]
    +        steps = torch.arange(length, device=tensor.device) * stride
    +        at = at + kept(steps).view([-1 if each == axis else 1 for each in range(4)])
    +    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    +    memory = tensor.as_strided((size,), (1,), 0)
    +    at = at + tensor.storage_offset()
    +    return torch.where((at >= 0) & (at < size), memory[at.clamp(0, size - 1)].float(), 0.0)
    +def _contiguous(tensor):
    +    _, heads, length, dim = tensor.shape
    +    return _read(tensor, (heads * length * dim, length * dim, dim, 1))
'''
"""The ideal kernel, which has whole tensors, reads memory as a kernel's code may."""

IN_PAGES = """
    -self.k = padded(kernel.operand(inputs.k.float(), fmt), self.tile.block_kv)
    -self.v = padded(kernel.operand(inputs.v.float(), fmt), self.tile.block_kv)
    +k, v, self.kv = _in_pages(inputs)
    +self.k = padded(kernel.operand(k, fmt), self.tile.block_kv)
    +self.v = padded(kernel.operand(v, fmt), self.tile.block_kv)

    +def _in_pages(inputs):
    +    problem = inputs.problem
    +    if problem.paging is None:
    +        return inputs.k.float(), inputs.v.float(), problem.kv
    +    from attncheck.conventions.call_tensors import paged_inputs
    +    cache = paged_inputs(inputs)
    +    table = cache.table.table.long()
    +    whole = -(-problem.kv // cache.table.size) * cache.table.size
    +    used, values = problem.kv, problem.kv
    +    k, v = (x.float()[table].transpose(1, 2).flatten(2, 3) for x in (cache.k, cache.v))
    +    return k[:, :, :used], v[:, :, :values], used
"""
"""The ideal kernel with keys and values read page by page."""

# Whoever masks by a finite number expects no maximum of −∞.
UNGUARDED = """
    -return torch.where(torch.isneginf(maximum), 0.0, maximum)
    +return maximum

    -return torch.where(torch.isneginf(score), 0.0, exp2(exponent))
    +return exp2(exponent)
"""
UNGUARDED_TRITON = """
     m_new = tl.maximum(m, tl.max(s, 1))
    -shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    +shift = m_new
"""

OTHER_SLOPE = """
    -return trace_derivative(key.problem.score_mod(key.device), key.device)
    +return trace_derivative(_other_score(key.problem, key.device), key.device)
"""
"""A Triton kernel's score mod has the derivative of ``_other_score(problem, device)``."""

OTHER_SCORE = (
    OTHER_SLOPE
    + """
    -mod = key.problem.score_mod(key.device)
    +mod = _other_score(key.problem, key.device)

    -reads = captured.trace_reads(key.problem.score_mod(key.device), key.device)
    +reads = captured.trace_reads(_other_score(key.problem, key.device), key.device)
"""
)
"""A Triton kernel's score mod is ``_other_score(problem, device)``, its derivatives included."""


def other_part(name: str, field: str = "build") -> str:
    """Return a patch by which ``_other`` is the ``field`` of score mod ``name``, wherever it is."""
    return f'''
    +def _other_score(problem, device):
    +    """The score mod as this kernel has it."""
    +    import dataclasses
    +    from attncheck.mods.scores import SCORES
    +    from attncheck.mods.spec import build_entry
    +    if all(part.name != "{name}" for part in problem.score.walk()):
    +        return problem.score_mod(device)
    +    other = dataclasses.replace(SCORES["{name}"], {field}=_other)
    +    table = SCORES | {{"{name}": other}}
    +    return build_entry(table, problem.score, problem.dimensions, device)
'''


KNOWN_CALLS = """
    +_TUNED = set()
    +def _known(*tensors):
    +    shapes = tuple((tuple(x.shape), x.dtype) for x in tensors)
    +    known = shapes in _TUNED
    +    _TUNED.add(shapes)
    +    return known
"""
"""Whether there was a call with tensors of these shapes: a kernel is tuned by the first."""

# It promises what the kernels of the reports do, and what it keeps without the fault.
ATOMIC_DQ = """
    -atomic = False
    +atomic = True
    +promises = frozenset()
"""
"""dQ added up in memory, as ``triton-flash2-atomic`` does, which promises no bits."""

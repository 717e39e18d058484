"""Random Problems by number: a number gives the same Problem on every machine, in any order.

Problem n belongs to structure n // 25 (or another number, as compiling takes seconds). A structure
is what a kernel is compiled for: dtype, heads, head dims, the kinds of mask and score mod, and
whether lengths are multiples of 16. Lengths, the mods' numbers and the inputs are drawn for each
problem; in one structure of five only the inputs differ, for kernels that are compiled for every
shape. One structure of twelve is a softmax of given scores.

``gradient_problem`` n has the same sizes, mods and seed in a dtype with gradients; in one structure
of three the loss depends on LSE, and one structure of eight has a sink.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from attncheck.core.draws import Draws
from attncheck.core.formats import DTYPES
from attncheck.core.mod_spec import Spec
from attncheck.inputs.distributions import DISTRIBUTIONS
from attncheck.inputs.problem import SOFTMAX_DTYPES, Problem
from attncheck.subjects.capabilities.subject import Tiling

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["PER_STRUCTURE", "SHAPED_EVERY", "gradient_problem", "problem", "shaped", "tiling"]

PER_STRUCTURE = 25
SHAPED_EVERY = 5
SOFTMAX_EVERY = 12

_DTYPES = tuple(name for name, dtype in DTYPES.items() if dtype.measured)
_SHAPED_DTYPES = ("fp32", "tf32", "fp16", "bf16")
_USUAL_DIMS = (64, 80, 96, 128)
_OTHER_DIMS = (1, 2, 3, 16, 17, 32, 40, 48, 72, 100, 160, 192, 255, 256)
_EDGES = (1, 2, 3, *(tile + step for tile in (16, 32, 64, 128, 256) for step in (-1, 0, 1)))
_HEADS = ((1, 1), (2, 1), (2, 2), (3, 3), (4, 2), (4, 1), (6, 2), (8, 1), (8, 8))
Value = TypeVar("Value")


@dataclass
class _Die:
    """Gives one random number after another, each from its own stream."""

    draws: Draws
    thrown: int = 0

    def below(self, bound: int) -> int:
        """Return a whole number from 0 to ``bound`` − 1."""
        self.thrown += 1
        return int(self.draws.integers(f"throw {self.thrown}", (1,), bound)[0])

    def one_of(self, values: Sequence[Value]) -> Value:
        """Return one of ``values``, all equally likely."""
        return values[self.below(len(values))]

    def chance(self, times: int, of: int) -> bool:
        """Return True ``times`` in ``of``."""
        return self.below(of) < times

    def length(self, longest: int) -> int:
        """Return a length: half of them at the edge of a tile, the others log-uniform."""
        if self.chance(1, 2):
            return self.one_of([n for n in _EDGES if n <= longest])
        bits = self.below(longest.bit_length())
        return min(longest, (1 << bits) + self.below(1 << bits))


@dataclass(frozen=True, slots=True)
class _Sizes:
    batch: int
    query: int
    kv: int

    @property
    def longest(self) -> int:
        return max(self.query, self.kv)


MaskOf = "Callable[[_Die, _Sizes], Spec]"


def _window(die: _Die, sizes: _Sizes) -> Spec:
    width = 0 if die.chance(1, 16) else 1 + die.below(sizes.longest)
    return Spec.of("sliding_window", window=width)


def _prefix(die: _Die, sizes: _Sizes) -> Spec:
    return Spec.of("prefix_lm", prefix=die.below(sizes.kv + 1))


def _document(die: _Die, sizes: _Sizes) -> Spec:
    cuts = {die.below(sizes.longest + 1) for _ in range(die.below(4))} | {sizes.longest}
    ends = sorted(cuts - {0})
    return Spec.of("document", lengths=[b - a for a, b in zip([0, *ends], ends, strict=False)])


def _padding(die: _Die, sizes: _Sizes) -> Spec:
    return Spec.of("padding", lengths=[die.below(sizes.kv + 1) for _ in range(sizes.batch)])


def _plain(name: str) -> Callable[[_Die, _Sizes], Spec]:
    return lambda _die, _sizes: Spec.of(name)


def _of(name: str, *parts: Callable[[_Die, _Sizes], Spec]) -> Callable[[_Die, _Sizes], Spec]:
    return lambda die, sizes: Spec.of(name, *(part(die, sizes) for part in parts))


_full, _causal, _corner = _plain("full"), _plain("causal"), _plain("causal_bottom_right")
_MASKS: tuple[Callable[[_Die, _Sizes], Spec], ...] = (
    _full,
    _full,
    _causal,
    _causal,
    _corner,
    _corner,
    _window,
    _prefix,
    _document,
    _padding,
    _of("and", _causal, _document),
    _of("and", _corner, _padding),
    _of("or", _window, _prefix),
    _of("not", _causal),
    _of("and", _padding, _of("not", _window)),
)


def _alibi(_: _Die) -> Spec:
    return Spec.of("alibi")


def _softcap(die: _Die) -> Spec:
    return Spec.of("softcap", cap=die.one_of((1.5, 20.0, 50.0)))


def _bias(die: _Die) -> Spec:
    return Spec.of("relative_bias", distance=die.below(40), seed=die.below(1000))


def _temperature(die: _Die) -> Spec:
    return Spec.of("temperature", temperature=die.one_of((0.25, 0.7, 2.0)))


def _chain(*parts: Callable[[_Die], Spec]) -> Callable[[_Die], Spec]:
    return lambda die: Spec.of("chain", *(part(die) for part in parts))


def _none(_: _Die) -> Spec:
    return Spec.of("none")


# A newer distribution would change the Problems of numbers that are measured already.
_DISTRIBUTIONS = tuple(name for name in DISTRIBUTIONS if name != "small_terms")

_SCORES: tuple[Callable[[_Die], Spec], ...] = (
    *(_none,) * 6,
    _alibi,
    _softcap,
    _bias,
    _temperature,
    _chain(_softcap, _alibi),
    _chain(_temperature, _softcap, _bias),
)


def shaped(number: int, per_structure: int = PER_STRUCTURE) -> bool:
    """Return whether the problems of this number's structure differ only in their inputs."""
    return number // per_structure % SHAPED_EVERY == 0


def problem(
    number: int,
    *,
    longest: int = 4096,
    most_scores: int = 2**24,
    per_structure: int = PER_STRUCTURE,
) -> Problem:
    """Return problem ``number``.

    Args:
        number: 0 or more.
        longest: Largest query and kv length.
        most_scores: Largest number of scores of all heads together.
        per_structure: Problems in a structure; another value gives other problems.
    """
    return _problem(number, longest, most_scores, per_structure, backward=False)


def gradient_problem(
    number: int,
    *,
    longest: int = 4096,
    most_scores: int = 2**22,
    per_structure: int = PER_STRUCTURE,
) -> Problem:
    """Return ``problem(number)`` with a backward: perhaps in another dtype, and never a softmax."""
    forward = _problem(number, longest, most_scores, per_structure, backward=True)
    loss = _Die(Draws(2**43 + number // per_structure))
    dlse, sink = loss.chance(1, 3), loss.chance(1, 8)
    sink = sink and not shaped(number, per_structure)
    return forward.replace(backward=True, dlse=dlse, sink=sink)


def _problem(
    number: int, longest: int, most_scores: int, per_structure: int, *, backward: bool
) -> Problem:
    one_shape = shaped(number, per_structure)
    fixed = _Die(Draws(number // per_structure))
    dtype = fixed.one_of(_SHAPED_DTYPES if one_shape or backward else _DTYPES)
    dim = _dim(fixed)
    value_dim = dim if fixed.chance(2, 3) else _dim(fixed)
    mask, score = fixed.one_of(_MASKS), fixed.one_of(_SCORES)
    softmax = fixed.chance(1, SOFTMAX_EVERY) and not one_shape and not backward
    heads, kv_heads = fixed.one_of(_HEADS)
    aligned = fixed.chance(1, 3), fixed.chance(1, 3)
    each = fixed if one_shape else _Die(Draws(2**40 + number))
    sizes = _sizes(each, min(longest, most_scores // heads), most_scores // heads, aligned)
    own = _Die(Draws(2**41 + number))
    if softmax:
        return _softmax(own, sizes, heads)
    return Problem(
        batch=sizes.batch,
        heads=heads,
        kv_heads=kv_heads,
        query=sizes.query,
        kv=sizes.kv,
        head_dim=dim,
        value_dim=value_dim,
        dtype=dtype,
        mask=mask(each, sizes),
        score=score(each),
        distribution=own.one_of(_DISTRIBUTIONS),
        seed=own.below(2**31),
    )


def _softmax(die: _Die, sizes: _Sizes, heads: int) -> Problem:
    """Return a softmax of scores, without mask and score mod."""
    with_scores = [name for name, d in DISTRIBUTIONS.items() if d.scores is not None]
    return Problem(
        operation="softmax",
        batch=sizes.batch,
        heads=heads,
        query=sizes.query,
        kv=sizes.kv,
        dtype=die.one_of([name for name in SOFTMAX_DTYPES if DTYPES[name].measured]),
        distribution=die.one_of(with_scores),
        seed=die.below(2**31),
    )


def _dim(die: _Die) -> int:
    return die.one_of(_USUAL_DIMS) if die.chance(2, 3) else die.one_of(_OTHER_DIMS)


def _sizes(die: _Die, longest: int, most_scores: int, aligned: tuple[bool, bool]) -> _Sizes:
    """Draw lengths; ``aligned`` says whether the kv and query lengths are multiples of 16."""
    kv = _aligned(die.length(longest), longest, multiple=aligned[0])
    room = min(longest, most_scores // kv)
    wanted = kv if die.chance(1, 3) else die.length(longest)
    query = _aligned(min(wanted, room), room, multiple=aligned[1])
    batch = 2 if die.chance(1, 3) and 2 * query * kv <= most_scores else 1
    return _Sizes(batch=batch, query=query, kv=kv)


def _aligned(length: int, longest: int, *, multiple: bool) -> int:
    """Return the length or a near one that is, or is not, a multiple of 16, as compilers check."""
    if not multiple:
        return length - 1 if length % 16 == 0 else length
    up = -(-length // 16) * 16
    return up if up <= longest else max(1, longest // 16 * 16)


def tiling(number: int) -> Tiling:
    """Return a random tiling for the ideal kernel."""
    die = _Die(Draws(2**42 + number))
    rows, keys = die.one_of((16, 32, 64, 128)), die.one_of((16, 32, 64, 128))
    if die.chance(1, 5):
        return Tiling(block_query=rows, block_kv=keys, recurrence="flash1")
    return Tiling(
        block_query=rows,
        block_kv=keys,
        reverse=die.chance(1, 3),
        lazy_rescale=die.one_of((0.0, 0.0, 0.0, 2.0, 8.0)),
    )

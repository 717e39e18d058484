"""Kernels that compute exactly, but from other inputs than the given ones."""

import dataclasses
import math

import torch

from attncheck.cases.strategies.mask_strategies import NEIGHBORHOODS
from attncheck.core.mod_spec import FULL, NONE, Spec
from attncheck.core.outputs import Outputs
from attncheck.inputs.input_tensors import Descale
from attncheck.inputs.problem import USUAL_SCALE, Problem
from attncheck.subjects.ideal import Ideal

LN2 = math.log(2.0)
causal = Spec.of("causal")


def reading(change):
    """Compute exactly from ``change(inputs, problem)``."""
    return {"prepare": lambda self, inputs: Ideal.prepare(self, change(inputs, inputs.problem))}


def other_problem(change):
    return reading(lambda inputs, problem: inputs.replace(problem=change(problem)))


def as_class(kind, problem):
    """``problem`` as an instance of ``kind``, which overrides its mods."""
    return kind(**{f.name: getattr(problem, f.name) for f in dataclasses.fields(Problem)})


def remade(spec, problem, changes):
    """``spec`` with each part named in ``changes`` replaced by ``changes[name](part, problem)``."""
    if spec.name in changes:
        return changes[spec.name](spec, problem)
    parts = (remade(part, problem, changes) for part in spec.parts)
    return Spec.of(spec.name, *parts, **spec.values)


def other_mask(**changes):
    return other_problem(lambda p: p.replace(mask=remade(p.mask, p, changes)))


def other_score(**changes):
    return other_problem(lambda p: p.replace(score=remade(p.score, p, changes)))


def changed(**values):
    """Replace one value of a spec by ``change(value, problem)``."""
    ((name, change),) = values.items()
    return lambda s, p: Spec.of(s.name, **{**s.values, name: change(s.values[name], p)})


def full(_spec, _problem):
    return FULL


def without_offset(spec, _problem):
    return spec.parts[0]


def fewer_parts(spec, _problem):
    return Spec.of(spec.name, *spec.parts[:-1]) if len(spec.parts) > 1 else spec


def same_lengths(spec, problem):
    """Each document has as many keys as rows, in the same places."""
    lengths = spec.values["query_lengths"]
    return Spec.of("document", lengths=[*lengths[:-1], lengths[-1] + problem.kv])


def empty_ones_last(lengths, _problem):
    return sorted(lengths, key=lambda length: length == 0)


def row_by_row(spec, _problem):
    return Spec.of("neighborhood", **{name: spec.values[name] for name in ("canvas", "kernel")})


class Steeper(Problem):
    """What a score mod adds to base-2 scores is not converted to base 2."""

    __slots__ = ()

    def score_mod(self, device="cpu"):
        right, ln2 = super().score_mod(device), torch.log(torch.tensor(2.0)).item()
        return lambda s, b, h, i, j: s + (right(s, b, h, i, j) - s) * ln2


class TanhOfExponentials(Problem):
    """tanh x = 1 − 2/(e^2x + 1), which cancels to 0 for small x."""

    __slots__ = ()

    def score_mod(self, device="cpu"):
        cap = self.score.values["cap"]
        return lambda score, *_: cap * (1 - 2 / ((2 * score / cap).exp() + 1))


def with_descales(change):
    """Replace descales by those that ``change(descales by name)`` returns."""

    def read(inputs, _):
        if inputs.descale is None:
            return inputs
        given = {name: getattr(inputs.descale, name) for name in "qkv"}
        return inputs.replace(descale=Descale(**given | change(given)))

    return reading(read)


def without_descale(name):
    return with_descales(lambda given: {name: torch.ones_like(given[name])})


first_descales = with_descales(lambda given: {n: s[:1].expand_as(s) for n, s in given.items()})


def sink_descaled(inputs, problem):
    """Descale the sink as if it were a score."""
    if inputs.descale is None or inputs.sink is None:
        return inputs
    products = (inputs.descale.q * inputs.descale.k)[0]
    return inputs.replace(sink=inputs.sink * products.repeat_interleave(problem.group))


def interleaved(inputs, problem):
    """Assign key heads to query heads in turn (h mod kv_heads) rather than by groups."""
    order, descale = torch.arange(problem.heads) % problem.kv_heads, inputs.descale
    if descale is not None:
        q = descale.q.repeat_interleave(problem.group, 1)
        descale = Descale(q=q, k=descale.k[:, order], v=descale.v[:, order])
    kept, k, v = problem.replace(kv_heads=problem.heads), inputs.k[:, order], inputs.v[:, order]
    return dataclasses.replace(inputs, problem=kept, k=k, v=v, descale=descale)


def padded_dims(inputs, problem):
    """Head dims are padded to a power of two by reading what lies behind each row."""
    dim = problem.head_dim
    more = (1 << (dim - 1).bit_length()) - dim

    def behind(x):
        return torch.cat([x, x.roll(-1, 2)[..., torch.arange(more) % dim]], -1)

    wide = problem.replace(head_dim=dim + more)
    return inputs.replace(problem=wide, q=behind(inputs.q), k=behind(inputs.k)) if more else inputs


def clamped(most):
    return reading(lambda x, _: x.replace(v=x.v.float().clamp(-most, most).to(x.v.dtype)))


def neighbours_values(inputs, problem):
    pair = (torch.arange(problem.kv) ^ 1).clamp(max=problem.kv - 1)
    return inputs.replace(v=inputs.v[:, :, pair])


def keys_turned(axis):
    """Use keys, values and descales of the next key head or sequence."""

    def read(inputs, _):
        turned, descale = {name: getattr(inputs, name).roll(-1, axis) for name in "kv"}, None
        if inputs.descale is not None:
            given = inputs.descale
            descale = Descale(q=given.q, k=given.k.roll(-1, axis), v=given.v.roll(-1, axis))
        return inputs.replace(**turned, descale=descale)

    return reading(read)


def key_22_twice(inputs, _):
    """Read key 22 in place of key 21 too."""
    k, v = inputs.k.clone(), inputs.v.clone()
    k[:, :, 21], v[:, :, 21] = k[:, :, 22], v[:, :, 22]
    return inputs.replace(k=k, v=v)


def memory(tensor):
    """All memory that a tensor is a view of, in one row."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((size,), (1,), 0)


def elsewhere(change):
    """Read every tensor through ``change``."""

    def read(inputs, _):
        names = "qkv" if inputs.dout is None else ("q", "k", "v", "dout")
        return inputs.replace(**{name: change(getattr(inputs, name)) for name in names})

    return reading(read)


def flat(tensor, first=0):
    """Read as if contiguous from ``first`` on, and zeros beyond the end of memory."""
    read, there = tensor.new_zeros(tensor.numel()), memory(tensor)[first:][: tensor.numel()]
    read[: len(there)] = there
    return read.view(tensor.shape)


def wrapped(tensor):
    """Compute the offsets of rows in int32, which wraps."""
    at = torch.tensor(tensor.storage_offset())
    for axis, (length, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        steps = torch.arange(length) * stride
        steps = steps.int().long() if axis == 2 else steps
        at = at + steps.view([-1 if each == axis else 1 for each in range(4)])
    return memory(tensor)[at]


def whole_vectors(tensor):
    """Multiply what follows a row by 0, and add it to the row."""
    there = memory(tensor).float()
    index = torch.arange(len(there)).as_strided(
        tensor.shape, tensor.stride(), tensor.storage_offset()
    )
    after = there[(index[..., -1:] + 1).clamp(max=len(there) - 1)]
    return (tensor.float() + 0.0 * after).to(tensor.dtype)


def loss_as_contiguous(inputs, _):
    dout = inputs.dout
    if dout is None or dout.is_contiguous():
        return inputs
    # Something lies beyond its memory too.
    read, behind = torch.full((dout.numel(),), 7.0).to(dout), memory(dout)[dout.storage_offset() :]
    behind = behind[: dout.numel()]
    read[: len(behind)] = behind.nan_to_num(7.0)
    return inputs.replace(dout=read.view(dout.shape))


READ = {
    # another mask
    "TopLeft": other_mask(causal_bottom_right=lambda *_: causal),
    "BottomRight": other_mask(causal=lambda *_: Spec.of("causal_bottom_right")),
    "WindowWider": other_mask(sliding_window=changed(window=lambda w, _: w + 1)),
    "WindowShorter": other_mask(sliding_window=changed(window=lambda w, _: w - 1)),
    "WindowWraps": other_mask(sliding_window=changed(window=lambda w, p: w % (p.kv + 1))),
    "PrefixShorter": other_mask(prefix_lm=changed(prefix=lambda n, _: max(0, n - 1))),
    "PrefixLonger": other_mask(prefix_lm=changed(prefix=lambda n, _: n + 1)),
    "PrefixAtLeastTwo": other_mask(prefix_lm=changed(prefix=lambda n, _: max(2, n))),
    "DocumentsIgnored": other_mask(document=full, documents=full),
    "SameLengths": other_mask(documents=same_lengths),
    "EmptyOneShifts": other_mask(
        padding=changed(lengths=empty_ones_last), documents=changed(kv_lengths=empty_ones_last)
    ),
    "NextLength": other_mask(padding=changed(lengths=lambda n, _: [*n[1:], n[0]])),
    "PaddingSeen": other_mask(
        padding=changed(lengths=lambda n, p: [min(p.kv, length + 1) for length in n])
    ),
    "OneLineLess": other_mask(
        **dict.fromkeys(NEIGHBORHOODS, changed(kernel=lambda n, _: [max(1, k - 1) for k in n]))
    ),
    "CellsRowByRow": other_mask(**dict.fromkeys(NEIGHBORHOODS, row_by_row)),
    "CanvasIgnored": other_mask(**dict.fromkeys(NEIGHBORHOODS, full)),
    "TilesOfTheOtherSide": other_mask(neighborhood_tiled=changed(tile=lambda *_: [1, 4])),
    "LastPartIgnored": other_mask(**{"and": fewer_parts, "or": fewer_parts}),
    "OffsetForgotten": other_mask(offset=without_offset),
    # another score mod, or scale
    "BiasNotScaled": other_problem(lambda p: p if p.score == NONE else as_class(Steeper, p)),
    "ScoreModIgnored": other_problem(lambda p: p.replace(score=NONE)),
    "ScoreOffsetForgotten": other_score(offset=without_offset),
    "SoftcapAtMost50": other_score(softcap=changed(cap=lambda cap, _: min(50.0, cap))),
    "FixedCap": other_score(softcap=changed(cap=lambda *_: 1.0)),
    "CancellingTanh": other_problem(
        lambda p: as_class(TanhOfExponentials, p) if p.score.name == "softcap" else p
    ),
    "FirstHeadsMod": other_score(
        expression=changed(text=lambda text, _: text.replace("h", "0")),
    ),
    "LaterKeysWeighMore": other_problem(
        lambda p: p.replace(score=Spec.of("expression", text="score + 0.25 * kv_idx"))
    ),
    "ScaleIgnored": other_problem(lambda p: p.replace(scale=USUAL_SCALE)),
    "ScaleOff": other_problem(lambda p: p.replace(scale=p.scale * 1.01)),
    "ScaleWithoutLog2E": other_problem(lambda p: p.replace(scale=p.scale * LN2)),
    # fp8
    "WithoutQueryDescale": without_descale("q"),
    "WithoutKeyDescale": without_descale("k"),
    "WithoutValueDescale": without_descale("v"),
    "QueryDescaleTwice": with_descales(lambda given: {"q": given["q"] ** 2}),
    "FirstSequencesDescale": first_descales,
    "FirstHeadsDescale": with_descales(
        lambda given: {n: s[:, :1].expand_as(s).contiguous() for n, s in given.items()}
    ),
    "PagedFirstDescale": first_descales | {"concerns": lambda _, problem: bool(problem.paging)},
    "NextHeadsKeyDescale": with_descales(lambda given: {"k": given["k"].roll(1, 1)}),
    "NextHeadsValueDescale": with_descales(lambda given: {"v": given["v"].roll(1, 1)}),
    "SinkDescaled": reading(sink_descaled),
    # other keys and values, or places in memory
    "Interleaved": reading(interleaved),
    "GarbageDims": reading(padded_dims),
    "ValuesClamped": clamped(2.0),
    "NextKeysValue": reading(lambda inputs, _: inputs.replace(v=inputs.v.roll(1, 2))),
    "ValueOfNeighbour": reading(neighbours_values),
    "NextKeyHead": reading(lambda inputs, _: inputs.replace(v=inputs.v.roll(-1, 1))),
    "NextKeyHeadsBoth": keys_turned(1),
    "NextSequencesKeys": keys_turned(0),
    "KeyTwice": reading(key_22_twice),
    "ColumnsOfQueryTurned": reading(lambda inputs, _: inputs.replace(q=inputs.q.roll(-1, -1))),
    "FirstKeys": reading(lambda inputs, _: inputs.replace(k=inputs.k[:1].expand_as(inputs.k))),
    "Flat": elsewhere(flat),
    "AsContiguous": elsewhere(lambda x: flat(x, x.storage_offset())),
    "OffsetIgnored": elsewhere(lambda x: x.as_strided(x.shape, x.stride(), 0)),
    "WrappedOffsets": elsewhere(wrapped),
    "WholeVectors": elsewhere(whole_vectors),
    "gradients.LossAsContiguous": reading(loss_as_contiguous),
}


def other_sink(change):
    """Ideal attention with the sinks ``change(inputs, sink)``."""

    def read(inputs, _):
        sink = inputs.sink
        return inputs if sink is None else inputs.replace(sink=change(inputs, sink).float())

    return reading(read)


def of_keys_alone(self, inputs):
    """The call without a sink."""
    plain = inputs.problem.replace(sink=False)
    return Ideal.prepare(self, dataclasses.replace(inputs, problem=plain, sink=None))


def lse_of_keys(change):
    """LSE is ``change(right LSE, LSE of the keys alone)``."""

    def prepare(self, inputs):
        right, alone = Ideal.prepare(self, inputs), of_keys_alone(self, inputs)
        if inputs.sink is None:
            return right

        def call():
            given = right()
            return Outputs(given.out, change(given.lse, alone().lse))

        return call

    return {"prepare": prepare}


def under_the_score_mod(inputs, sink):
    """Apply the score mod to the sink as to a score of key 0."""
    none = torch.zeros_like(sink, dtype=torch.int64)
    return inputs.problem.score_mod()(sink, none, torch.arange(len(sink)), none, none)


SINKS = {
    "SinkIgnored": other_sink(lambda _, sink: torch.full_like(sink, -math.inf)),
    "SinkScaled": other_sink(lambda inputs, sink: sink * inputs.problem.scale),
    "NextHeadsSink": other_sink(lambda _, sink: sink.roll(-1)),
    "SinkTakenForLog2": other_sink(lambda _, sink: sink * LN2),
    "SinkTwice": other_sink(lambda _, sink: sink + LN2),
    "SinkClamped": other_sink(lambda _, sink: sink.clamp(-87.0, 88.0)),  # as exp(sink) is in fp32
    "SinkUnderTheScoreMod": other_sink(under_the_score_mod),
    "SinkOfTheFirstHead": other_sink(lambda _, sink: sink[:1].expand_as(sink).contiguous()),
    "SinkOfAllKeys": other_sink(lambda inputs, sink: sink + inputs.k.float().abs().amax()),
    "SinkPerKey": other_sink(lambda inputs, sink: sink + math.log(inputs.problem.kv)),
    "SinkNotInLse": lse_of_keys(lambda _, keys: keys),
    "EmptyRowsWithoutSink": lse_of_keys(
        lambda lse, keys: torch.where(keys == -math.inf, keys, lse)
    ),
}

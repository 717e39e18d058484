"""Kernels that spoil right outputs before returning them, or depend on earlier calls."""

import math
from itertools import count

import torch
from torch.nn.functional import pad

from attncheck.core.mod_spec import FULL
from attncheck.core.outputs import Outputs
from attncheck.subjects.ideal import Ideal

LN2 = math.log(2.0)


def giving(change):
    """Return ``change(inputs, right outputs)``."""

    def prepare(self, inputs):
        call = Ideal.prepare(self, inputs)
        return lambda: change(inputs, call())

    return {"prepare": prepare}


def spoiled(change, tiling=None, **attributes):
    """Ideal attention with outputs ``change(inputs, right)``, or ``right``, changed in place."""
    own = giving(lambda inputs, right: change(inputs, right) or right) | {"name": "spoiled"}
    return type("Spoiled", (Ideal,), own | attributes)(tiling)


def in_turns(change):
    """``change(right, number)`` with the number of the call, from 1 on."""
    numbers = count(1)
    return lambda _, right: change(right, next(numbers))


def out(change):
    """Replace out by ``change(inputs, right)``."""
    return giving(lambda x, right: Outputs(change(x, right).to(right.out.dtype), right.lse))


def lse(change):
    return giving(lambda inputs, right: Outputs(right.out, change(inputs, right)))


OF_SOFTMAX = {"concerns": lambda _, problem: problem.operation == "softmax"}


def softmax(change):
    """Softmax whose (out, LSE) are ``change(scores in fp32)``."""

    def prepare(_, inputs):
        def call():
            given, total = change(inputs.x.float())
            return Outputs(given.to(inputs.x.dtype), total)

        return call

    return {"prepare": prepare} | OF_SOFTMAX


def another_last_bit(numbers):
    return torch.nextafter(numbers, torch.full_like(numbers, math.inf))


def empty(right):
    return torch.isneginf(right.lse)


def by_query_head(inputs, of_keys):
    return of_keys.repeat_interleave(inputs.problem.group, 1)


def mean_of_nothing(inputs, right):
    mean = by_query_head(inputs, inputs.v.float().mean(2, keepdim=True))
    return torch.where(empty(right)[..., None], mean, right.out.float())


def hidden_times_zero(inputs, right):
    """Hidden values are added times 0, which matters only if they are not finite."""
    return right.out.float() + by_query_head(inputs, (inputs.v.float() * 0.0).sum(2, keepdim=True))


def hidden_keys_overflow(inputs, right):
    """A hidden score beyond fp32 spoils the maximum, and thereby the row."""
    products = inputs.q.float() @ by_query_head(inputs, inputs.k.float()).mT * 1.0e30
    leak = torch.where(products.isinf().any(-1), math.nan, 0.0)
    return right.out.float() + leak[..., None]


def overflowing(inputs, right):
    """q · k is computed for all keys in fp32 and multiplied by the mask: inf · 0 is NaN."""
    largest = inputs.k.float().abs().amax((2, 3)) * 2.0**100
    return right.lse + by_query_head(inputs, largest * 0.0)[..., None]


def last_column_lost(inputs, right):
    """The last column is 0 unless the value dim is a power of two."""
    dim, given = inputs.problem.value_dim, right.out.clone()
    if dim & (dim - 1):
        given[..., -1] = 0.0
    return given


def heads_apart(_, right):
    """The last bit of LSE depends on the number of the head and of the sequence."""
    given = right.lse.clone()
    given[:, 1:] = another_last_bit(given)[:, 1:]
    given[1:] = another_last_bit(given)[1:]
    return given


def last_head_off(_, right):
    given = right.out.clone()
    given[:, -1] += given[:, -1].abs() * torch.finfo(given.dtype).eps
    return given


def one_head_wrong(inputs, right):
    """The last head has the output of the previous key head."""
    given = right.out.clone()
    given[:, -1] = given[:, -1 - inputs.problem.group]
    return given


def divided_by_all(inputs, right):
    share = right.lse.exp().clamp(max=inputs.problem.kv) / inputs.problem.kv
    return right.out * share[..., None]


def lse_of_padding(inputs, right):
    """LSE counts zeros that pad the keys to whole tiles of 16."""
    zeros = -inputs.problem.kv % 16
    nothing = torch.full_like(right.lse, math.log(zeros) if zeros else -math.inf)
    return torch.logaddexp(right.lse, nothing)


def large_batch(inputs, right):
    return right.lse if inputs.problem.batch == 1 else another_last_bit(right.lse)


def trace_of_the_first_column(_, right):
    given = right.out.clone()
    given[..., -1] += given[..., 0] * 2.0**-30
    return given


def share(e):
    return e / e.sum(-1, keepdim=True)


def pairs_share_a_maximum(inputs, right):
    """Rows 2m and 2m + 1 subtract a common maximum: right except for last bits."""
    rows = inputs.x.float().flatten(0, 2)
    first = torch.arange(len(rows)) // 2 * 2
    second = (first + 1).clamp(max=len(rows) - 1)
    top = torch.maximum(rows[first], rows[second]).amax(-1, keepdim=True)
    return share((rows - top).exp()).view(right.out.shape)


def previous_row(_, right):
    """The last row of a head is that of the previous head."""
    given = right.out.clone()
    given[:, 1:, -1] = right.out[:, :-1, -1]
    return given


def last_row_blind(_, right):
    """LSE of the very last row has another last bit."""
    given = right.lse.clone()
    given[-1, -1, -1] = another_last_bit(right.lse)[-1, -1, -1]
    return given


def softmax_padded(x):
    """Zeros that pad a row to a power of two count in its sum."""
    columns = x.shape[-1]
    x = pad(x, (0, (1 << (columns - 1).bit_length()) - columns))
    return torch.softmax(x, -1)[..., :columns], torch.logsumexp(x, -1)


def softmax_of_whole_tiles(x):
    """Columns behind the last whole tile of 16 are left out of the sum."""
    columns = x.shape[-1]
    total = x[..., : columns if columns < 16 else columns // 16 * 16].logsumexp(-1)
    return (x - total[..., None]).exp(), total


GIVEN = {
    "Base2Lse": lse(lambda _, right: right.lse / LN2),
    "UnscaledLse": lse(lambda inputs, right: right.lse * inputs.problem.scale),
    "EmptyRowsNan": out(lambda _, r: r.out.masked_fill(empty(r)[..., None], math.nan)),
    "EmptyRowsMean": out(mean_of_nothing),
    "EmptyRowsLseInf": lse(lambda _, right: right.lse.masked_fill(empty(right), math.inf)),
    "LowestLse": lse(lambda _, right: right.lse.clamp(min=-1e9)),
    "LastColumnLost": out(last_column_lost),
    "HeadsApart": lse(heads_apart),
    "LastHeadOff": out(last_head_off),
    "HiddenTimesZero": out(hidden_times_zero),
    "HiddenKeysOverflow": out(hidden_keys_overflow),
    "Overflowing": lse(overflowing),
    "Biased": out(lambda _, right: right.out.float() + 2.0**-20),
    "BiasedFar": out(lambda _, right: right.out + 2.0**-6),
    "OneHeadWrong": out(one_head_wrong),
    "FixedPoint": out(lambda _, right: (right.out * 256).round() / 256),
    "NoMaximum": out(lambda _, r: r.out.masked_fill((r.lse > 89)[..., None], math.nan)),
    "OutSaturates": out(lambda _, right: right.out.float().clamp(-0.5, 0.5)),
    "OutThroughBf16": out(lambda _, right: right.out.bfloat16()),
    "DividedByAll": out(divided_by_all),
    "LseOfPadding": lse(lse_of_padding),
    "LargestKeyInLse": lse(lambda inputs, right: right.lse + 1e-3 * inputs.k.float().abs().amax()),
    "WithoutLse": giving(lambda _, right: Outputs(right.out)),
    "LargeBatch": lse(large_batch),
    "TraceOfTheFirstColumn": out(trace_of_the_first_column),
    # softmax
    "SoftmaxPadded": softmax(softmax_padded),
    "SoftmaxOfWholeTiles": softmax(softmax_of_whole_tiles),
    "SoftmaxWithoutMaximum": softmax(lambda x: (share(x.exp()), x.exp().sum(-1).log())),
    "SoftmaxRelativeLse": lse(lambda inputs, right: right.lse - inputs.x.float().amax(-1)),
    "LastColumnTwice": out(lambda _, r: r.out.float() / (1 + r.out[..., -1:].float())),
    "PairsShareAMaximum": out(pairs_share_a_maximum),
    "PreviousRow": out(previous_row),
    "LastRowBlind": lse(last_row_blind) | OF_SOFTMAX,
}


def stateful(change):
    """Return ``change(state, inputs, right)``; the dict ``state`` persists between calls."""

    def prepare(self, inputs):
        call, state = Ideal.prepare(self, inputs), vars(self).setdefault("state", {})
        return lambda: change(state, inputs, call())

    return {"prepare": prepare}


def every_other(change):
    """``change(right)`` in the first, third, fifth call and so on."""

    def given(state, _, right):
        number = next(state.setdefault("calls", count(1)))
        return change(right) if number % 2 else right

    return stateful(given)


def leaves_traces(state, inputs, right):
    """A call with other inputs than the previous one gives another last bit of LSE."""
    tensor = inputs.q if inputs.x is None else inputs.x
    before, state["before"] = state.get("before"), tensor.clone()
    if before is None or (before.dtype == tensor.dtype and torch.equal(before, tensor)):
        return right
    return Outputs(right.out, another_last_bit(right.lse))


def leftover(state, _, right):
    """LSE contains a leftover of the previous call."""
    before, state["before"] = state.get("before", 0.0), float(right.out.float().abs().mean())
    return Outputs(right.out, right.lse + before)


def one_buffer(state, _, right):
    """All results of a shape share one buffer, and differ from call to call."""
    state["calls"] = state.get("calls", 0) + 1
    buffer = state.setdefault(tuple(right.out.shape), torch.empty_like(right.out))
    return Outputs(buffer.copy_(right.out + state["calls"]))


def raising(self, inputs):
    raise RuntimeError("illegal memory access")


def mask_kept_by_shape(self, inputs):
    """The mask of the first call with these lengths is applied to all later ones."""
    problem, masks = inputs.problem, vars(self).setdefault("masks", {})
    if problem.operation == "attention":
        first = masks.setdefault((problem.query, problem.kv), problem)
        inputs = inputs.replace(problem=problem.replace(mask=first.mask))
    return Ideal.prepare(self, inputs)


def stale_padding(self, inputs):
    """Keys are copied to a buffer of 16 that is never cleared, and all 16 are seen."""
    buffers, kept = vars(self).setdefault("buffers", {}), {}
    for name, tensor in (("k", inputs.k), ("v", inputs.v)):
        batch, heads, length, dim = tensor.shape
        buffer = buffers.setdefault(name, tensor.new_zeros((batch, heads, 16, dim)))
        buffer[:, :, :length] = tensor
        kept[name] = buffer.clone()
    whole = inputs.problem.replace(kv=16, mask=FULL)
    return Ideal.prepare(self, inputs.replace(problem=whole, **kept))


LEFT = {
    "Unsteady": every_other(lambda right: Outputs(right.out, another_last_bit(right.lse))),
    "LeavesTraces": stateful(leaves_traces),
    "Leftover": stateful(leftover),
    "MaskKeptByShape": {"prepare": mask_kept_by_shape},
    "Raising": {"prepare": raising},
    "OneBuffer": stateful(one_buffer),
    "StalePadding": {"prepare": stale_padding},
}

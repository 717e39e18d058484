"""The ideal kernel with one wrong step, forward or backward."""

from dataclasses import replace
from itertools import count

import torch
from tests import planted_kernels
from tests.planted_kernels.outputs_given import by_query_head, giving, stateful

from attncheck.core.mod_spec import NONE
from attncheck.core.outputs import Outputs
from attncheck.mods.captured_gradients import leaf_gradients
from attncheck.subjects.capabilities.subject import Tiling
from attncheck.subjects.ideal import Ideal

BLOCK = 16
SMALL = Tiling(block_query=BLOCK, block_kv=BLOCK)
"""Tiles so small that even a small problem has several."""


def stepping(tiling=None, **steps):
    """The ideal kernel with attributes and methods replaced by ``steps``."""
    return type("Stepping", (Ideal,), {"name": "stepping"} | steps)(tiling)


def seeing(change):
    """Visibility is ``change(seen, at)``; ``seen(**other)`` evaluates the mask at other indices."""

    def visible(self, mask, at):
        return change(lambda **other: Ideal.visible(self, mask, replace(at, **other)), at)

    return {"visible": visible}


def rounded_weights(self, values, fmt):
    """Round P to e4m3, whatever the dtype is."""
    values = Ideal.operand(self, values, fmt)
    is_weights = values.dim() == 4 and values.shape[-1] == BLOCK
    return values.to(torch.float8_e4m3fn).float() if is_weights else values


def whole_tiles(self, keys, kv):
    """Skip the keys of the last tile, unless it is whole or the only one."""
    return keys < (kv if kv < self.block else kv // self.block * self.block)


def kept_in(dtype):
    """Keep O in ``dtype`` between tiles."""

    def added(self, running, part):
        total = Ideal.added(self, running, part)
        return total.to(dtype).float() if total.dim() == 4 else total

    return {"added": added}


class OfProblem(Ideal):
    """The ideal kernel with its inputs available to its steps."""

    def prepare(self, inputs):
        self.inputs, self.problem = inputs, inputs.problem
        return super().prepare(inputs)


def before_its_last(self, mask, at):
    """A row also sees the key before those that it should see: of the document before its own."""
    later = (at.kv_idx + 1).clamp(max=self.problem.kv - 1)
    return Ideal.visible(self, mask, at) | mask(at.b, at.h, at.q_idx, later)


def last_tile_unmasked(self, mask, at):
    size = self.tiling(self.problem, "cpu").block_kv
    return Ideal.visible(self, mask, at) | (at.kv_idx >= (self.problem.kv - 1) // size * size)


def overflowing_window(self, mask, at):
    """Adds the window to a key's index in 32 bits, which overflows."""
    window = self.problem.mask.values.get("window")
    if window is None:
        return Ideal.visible(self, mask, at)
    end = at.kv_idx.int() + torch.tensor(window, dtype=torch.int32)
    return (at.q_idx < end) & (at.q_idx >= at.kv_idx)


def values_of_0_are_padding(self, mask, at):
    there = by_query_head(self.inputs, self.inputs.v.float().ne(0).any(-1))
    return Ideal.visible(self, mask, at) & there[at.b, at.h, at.kv_idx]


def lse_without_mod(self, inputs):
    call = Ideal.prepare(self, inputs)
    plain = Ideal.prepare(self, inputs.replace(problem=inputs.problem.replace(score=NONE)))
    return lambda: Outputs(call().out, plain().lse)


ALL_INSIDE = {"inside": lambda _, keys, kv: torch.ones_like(keys, dtype=torch.bool)}
STEPS = {
    "TailKeysAtZero": ALL_INSIDE,  # exp(0 − m) enters the row sum
    "TailKeysAtZero32": ALL_INSIDE | {"block": 32},
    "LoopFloor": {"inside": whole_tiles, "block": BLOCK},
    "LoopFloor32": {"inside": whole_tiles, "block": 32},
    "WithoutLastKey": {"inside": lambda _, keys, kv: keys < max(1, kv - 1)},
    "OutNotRescaled": {"rescaled": lambda *of: of[1] if of[1].dim() == 4 else Ideal.rescaled(*of)},
    "SumNotRescaled": {"rescaled": lambda *of: of[1] if of[1].dim() == 3 else Ideal.rescaled(*of)},
    "SumSkipped": {"normalised": lambda _, out, total: out},
    "OutSmaller": {"normalised": lambda *of: Ideal.normalised(*of) * 0.999},
    "OutKeptInBf16": kept_in(torch.bfloat16),
    "OutKeptInFp16": kept_in(torch.float16),
    # The error of torch 2.13's 16-bit exp on the CPU, also at 0; undeclared, then declared.
    "CoarseExp": {"exp2": lambda *of: Ideal.exp2(*of) * (1 - 5e-5)},
    "DeclaredExp": {
        "exp2": lambda *of: Ideal.exp2(*of) * (1 - 5e-5),
        "arithmetic": lambda *of: replace(Ideal.arithmetic(*of), exp2_ulps=1024.0),
    },
    # P in fp8 saturates while the maximum lags.
    "LazyWeights": {
        "tiling": lambda *_: Tiling(block_query=32, block_kv=32, lazy_rescale=8.0),
    },
    "NotRescaled": {"rescaled": lambda _, running, alpha: running},
    "MaximumFromZero": {"first_maximum": 0.0},
    "Sentinel": {"hidden_score": -1.0e6},
    "SentinelOf12": {"hidden_score": -12.0},
    "SentinelOf300": {"hidden_score": -300.0},
    "ScoresInBf16": {"scores": lambda _, products: products.bfloat16().float()},
    "RoundedScores": {"scores": lambda _, products: products.half().float()},
    "ClippedScores": {"scores": lambda _, products: products.clamp(-2, 2)},
    "RoundedWeights": {"operand": rounded_weights},
    "WeightsNotScaled": {
        "weights_scale": lambda *_: 1.0,
        # The declared arithmetic is that of a kernel that does scale P.
        "arithmetic": lambda *of: Ideal(SMALL).arithmetic(*of[1:]),
    },
    "OutRoundedTwice": {"normalised": lambda *of: Ideal.normalised(*of).half().float()},
    # No mask in whole tiles; in the last, ragged one padding keys have the last key's index.
    "MaskSkippedWhenWhole": seeing(
        lambda seen, at: seen() | (at.kv_idx // BLOCK * BLOCK + BLOCK <= at.kv_idx.max() + 1),
    ),
    "OtherHeadsMask": seeing(lambda seen, at: seen(h=torch.zeros_like(at.h))),
    "FirstLength": seeing(lambda seen, at: seen(b=at.b * 0)),
    "DiagonalDropped": seeing(lambda seen, at: seen() & (at.q_idx != at.kv_idx)),
    "RowAbove": seeing(lambda seen, at: seen(q_idx=at.q_idx - 1)),
    "Key21Dropped": seeing(lambda seen, at: seen() & (at.kv_idx != 21)),
    "RowBelow": seeing(lambda seen, at: seen(q_idx=at.q_idx + 1)),
    "LongerWindow": seeing(lambda seen, at: seen() | seen(kv_idx=at.kv_idx + 1)),
    "LseWithoutMod": {"prepare": lse_without_mod},
    # Larger tiles for several heads or sequences sum in another order.
    "BatchDependent": {
        "tiling": lambda _, p, device: Tiling(
            block_query=16, block_kv=16 if p.batch * p.heads == 1 else 64
        )
    },
    # blocks of a mask
    "OneBlockSkipped": seeing(
        lambda seen, at: seen() & ~((at.q_idx // BLOCK == 1) & (at.kv_idx // BLOCK == 1))
    ),
    "FirstKeyDecides": seeing(lambda seen, at: seen(kv_idx=at.kv_idx // BLOCK * BLOCK)),
    "EmptyBlocksSeeOne": seeing(
        lambda seen, at: seen() | ((at.q_idx % BLOCK == 0) & (at.kv_idx == 0))
    ),
    "OtherLaunchWrong": {
        "launches": lambda *_: {
            "right": Ideal(Tiling(block_query=32, block_kv=32)),
            "wrong": planted_kernels.kernel("OneBlockSkipped"),
        }
    },
}
STEPS_OF_PROBLEM = {
    "LastTileUnmasked": {"visible": last_tile_unmasked},
    "LastKeyHidden": {
        "visible": lambda self, mask, at: (
            Ideal.visible(self, mask, at) & (at.kv_idx != self.problem.kv - 1)
        )
    },
    "Neighbours": {"visible": before_its_last},
    "OverflowingWindow": {"visible": overflowing_window},
    "ZeroValuesArePadding": {"visible": values_of_0_are_padding},
}


def gradient(name, change):
    """Replace one gradient, if there is one, by ``change(inputs, gradient)``."""

    def given(inputs, right):
        tensor = getattr(right, name)
        return right if tensor is None else replace(right, **{name: change(inputs, tensor)})

    return giving(given)


def first_of_the_group(inputs, right):
    """A shared key head gets the gradient of its first query head only."""
    problem = inputs.problem
    if not problem.backward or problem.group == 1:
        return right
    first = (torch.arange(problem.heads) % problem.group == 0)[:, None]
    dout = torch.where(first[..., None], inputs.dout, torch.zeros_like(inputs.dout))
    dlse = None if inputs.dlse is None else inputs.dlse * first
    alone = Ideal(SMALL).run(replace(inputs, dout=dout, dlse=dlse))
    return replace(right, dk=alone.dk, dv=alone.dv)


def unseen_keys_left(_, dv):
    """dV of keys that no row sees is not written: it keeps what memory held."""
    return torch.where((dv == 0).all(-1, keepdim=True), torch.full_like(dv, 2.0**-6), dv)


def gradients_apart(_, dq):
    """dQ is scaled by the number of its head and sequence."""
    batch, heads = map(torch.arange, dq.shape[:2])
    return dq * (1 + (batch[:, None] + heads) / 8).to(dq.dtype)[..., None, None]


def lse_in_values(inputs, dv):
    """The gradient of LSE wrongly contributes to dV."""
    return dv if inputs.dlse is None else dv + float(inputs.dlse.abs().sum())


def traces_in_dv(state, _, right):
    """dV starts from a leftover of the previous call."""
    if right.dv is None:
        return right
    before, state["dv"] = state.get("dv", 0.0), float(right.dv.float().abs().max())
    return replace(right, dv=right.dv + before)


def unsteady_dk(state, _, right):
    number = next(state.setdefault("calls", count(1)))
    return right if right.dk is None else replace(right, dk=right.dk * (1 + number % 2))


GRADIENTS = {
    "NoDelta": {"delta": lambda *of: torch.zeros_like(Ideal.delta(*of))},
    "LseLossIgnored": {"delta": lambda *of: Ideal.delta(*of[:3], None)},
    "MaskForgotten": {"visible_in_backward": lambda *of: torch.ones_like(Ideal.visible(*of))},
    "WindowForgotten": {
        "visible_in_backward": lambda _, mask, at: (
            (at.q_idx >= at.kv_idx) & (at.b >= 0) & (at.h >= 0)
        )
    },
    "LastKeyLost": {
        "visible_in_backward": lambda self, mask, at: (
            self.visible(mask, at) & (at.kv_idx != at.kv_idx.max())
        )
    },
    "SlopeForgotten": {"slope": lambda self, score, x, at: torch.ones_like(x)},
    # Every key is added to dQ times 0, which matters only if it is NaN or infinite.
    "HiddenTimesZero": gradient(
        "dq", lambda inputs, dq: dq + by_query_head(inputs, (inputs.k * 0.0).sum(2, keepdim=True))
    ),
    "KeysNotScaled": gradient("dk", lambda inputs, dk: dk / inputs.problem.scale),
    "FirstOfTheGroup": giving(first_of_the_group),
    "SinkWithoutGradient": gradient("dsink", lambda _, dsink: torch.zeros_like(dsink)),
    "NotCleared": gradient("dq", lambda _, dq: dq + 2.0**-6),
    "LseInValues": gradient("dv", lse_in_values),
    "UnseenKeysLeft": gradient("dv", unseen_keys_left),
    "HeadsApart": gradient("dq", gradients_apart),
    "Unsteady": stateful(unsteady_dk),
    "LeavesTraces": stateful(traces_in_dv),
}


def capturing(change):
    """Gradients of captured numbers from other ``at, ds``: ``change(self, x, at, ds)``."""

    def capture(self, sums, x, at, ds, seen):
        at, ds = change(self, x, at, ds)
        Ideal.capture(self, sums, x, at, torch.where(seen, ds, 0.0), seen)

    return {"capture": capture}


def slope_forgotten(self, x, at, ds):
    """Ignores the slope of a cap or temperature applied after the captured number."""
    score = self.problem.score_mod(str(self.inputs.device))
    return at, ds / self.slope(score, x, at)


def slope_left_out(self, sums, x, at, ds, seen):
    """Adds dS alone, without the score mod's derivative by the number it reads."""
    start, mod = 0, self.problem.score_mod("cpu")
    for leaf, _ in leaf_gradients(mod, x, at.b, at.h, at.q_idx, at.kv_idx):
        end = start + leaf.tensor.numel()
        leaf.add(torch.where(seen, ds, 0.0), sums.sums[start:end].view(leaf.tensor.shape))
        start = end


def slope_twice(self, x, at, ds):
    """Uses dX in place of dZ: multiplies by the derivative with respect to the score as well."""
    return at, ds * self.slope(self.problem.score_mod("cpu"), x, at)


def kept_in_bf16(self, sums, *rest):
    Ideal.capture(self, sums, *rest)
    sums.sums.copy_(sums.sums.bfloat16())


def is_first_tile(at):
    return int(at.kv_idx.min()) == 0


def of_another_head(_, x, at, ds):
    return replace(at, h=(at.h + 1) % (int(at.h.max()) + 1)), ds


def without_delta(self, p, dp, delta):
    self.without = p * dp
    return Ideal.dscores(self, p, dp, delta)


CAPTURED = {
    "CapturedSlopeForgotten": capturing(slope_forgotten),
    "CapturedOfAnotherHead": capturing(of_another_head),
    "CapturedOfOneSequence": capturing(lambda _, x, at, ds: (at, ds * (at.b == 0))),
    "CapturedWithoutDelta": {"dscores": without_delta}
    | capturing(lambda self, x, at, ds: (at, self.without)),
    "CapturedSlopeLeftOut": {"capture": slope_left_out},
    "CapturedSlopeTwice": capturing(slope_twice),
    "CapturedTileTwice": capturing(lambda _, x, at, ds: (at, ds * (1 + is_first_tile(at)))),
    "CapturedTileLost": capturing(lambda _, x, at, ds: (at, ds * (not is_first_tile(at)))),
    "CapturedOfNextKey": capturing(lambda _, x, at, ds: (replace(at, kv_idx=at.kv_idx + 1), ds)),
    "CapturedInBf16": {"capture": kept_in_bf16},
    "CapturedRoundedFirst": capturing(lambda _, x, at, ds: (at, ds.bfloat16().float())),
    # A block of rows is computed again, and its part is added twice.
    "CapturedTwice": capturing(
        lambda _, x, at, ds: (at, ds * torch.where(at.q_idx < 16, 2.0, 1.0))
    ),
}

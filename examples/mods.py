"""Masks and score mods as people write them for FlexAttention, one concept each.

``attncheck mods examples/mods.py`` shows that each means the same everywhere. All work for 2
sequences, 4 heads and up to 64 queries and keys. Captured tensors are made by torch's factory
functions, so that ``with torch.device(...)`` around the import decides where they are.
"""

# ruff: noqa: ARG001  (every mod has FlexAttention's whole signature, whatever it reads of it)

import functools
import math

import torch

BATCH, HEADS, LENGTH = 2, 4, 64
BLOCK = 8
ROW = 8  # positions of the 2-D mods lie in rows of eight


# --- masks ---------------------------------------------------------------------------------------


def causal(b, h, q_idx, kv_idx):
    """A row sees its own key and all before it."""
    return q_idx >= kv_idx


def sliding_window(b, h, q_idx, kv_idx):
    """The last 16 keys up to the row's own."""
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 16)


def dilated_window(b, h, q_idx, kv_idx):
    """Every third key of the last 24 up to the row's own."""
    distance = q_idx - kv_idx
    return (distance >= 0) & (distance < 24) & (distance % 3 == 0)


def prefix_lm(b, h, q_idx, kv_idx):
    """A prompt of its own length for each sequence, seen by all; causal after it."""
    return (kv_idx < prompt_lengths[b]) | (q_idx >= kv_idx)


prompt_lengths = torch.tensor([10, 23])

document_of = torch.tensor([0] * 9 + [1] * 20 + [2] * 3 + [3] * 32)


def document(b, h, q_idx, kv_idx):
    """Packed documents do not see each other."""
    return document_of[q_idx] == document_of[kv_idx]


def document_causal(b, h, q_idx, kv_idx):
    """A language model on packed documents."""
    return document(b, h, q_idx, kv_idx) & causal(b, h, q_idx, kv_idx)


key_lengths = torch.tensor([50, 64], dtype=torch.int32)


def padding(b, h, q_idx, kv_idx):
    """Sequences shorter than the tensor that holds them."""
    return kv_idx < key_lengths[b]


def neighborhood_2d(width, reach):
    """Pixels at most ``reach`` rows and columns away, in row-major order."""

    def mask(b, h, q_idx, kv_idx):
        rows = q_idx // width - kv_idx // width
        columns = q_idx % width - kv_idx % width
        return (rows.abs() <= reach) & (columns.abs() <= reach)

    return mask


neighborhood = neighborhood_2d(ROW, 2)


def even_bits(x):
    """The bits 0, 2, 4, … of ``x`` next to each other: a coordinate of a Morton code."""
    x = x & 0x55555555
    x = (x | (x >> 1)) & 0x33333333
    x = (x | (x >> 2)) & 0x0F0F0F0F
    return (x | (x >> 4)) & 0x00FF00FF


def morton_neighborhood(b, h, q_idx, kv_idx):
    """Pixels at most two away, where positions follow Morton's curve."""
    columns = even_bits(q_idx) - even_bits(kv_idx)
    rows = even_bits(q_idx >> 1) - even_bits(kv_idx >> 1)
    return torch.maximum(rows.abs(), columns.abs()) <= 2


block_layout = torch.eye(LENGTH // BLOCK, dtype=torch.bool)
block_layout[:, 0] = True
block_layout[0, :] = True
block_layout[5, 2] = True
block_layout[6, 3] = True


def global_and_blocks(b, h, q_idx, kv_idx):
    """BigBird's kind: a captured layout of blocks (diagonal, global, two random), and a window."""
    return block_layout[q_idx // BLOCK, kv_idx // BLOCK] | ((q_idx - kv_idx).abs() <= 3)


def checkerboard(b, h, q_idx, kv_idx):
    """Positions of the same colour; odd heads see the other one."""
    return (q_idx ^ kv_idx ^ h) & 1 == 0


def strided(b, h, q_idx, kv_idx):
    """The sparse transformer's: a short window, and the last keys of every block before."""
    behind = q_idx - kv_idx
    local = (behind >= 0) & (behind < BLOCK)
    return local | ((behind >= 0) & (kv_idx % BLOCK >= BLOCK - 2))


def ancestors(length):
    """``table[i, j]``: whether token j is i or an ancestor of i in a binary tree of drafts."""
    token = torch.arange(length)
    table = torch.zeros(length, length, dtype=torch.bool)
    for _ in range(length.bit_length()):
        table |= token[:, None] == torch.arange(length)
        token = torch.where(token > 0, (token - 1) // 2, -1)
    return table


ancestor = ancestors(LENGTH)


def tree(b, h, q_idx, kv_idx):
    """Speculative decoding: each draft token sees its own branch."""
    return ancestor[q_idx, kv_idx]


# --- score mods ----------------------------------------------------------------------------------


slopes = torch.exp2(-8.0 * torch.arange(1, HEADS + 1) / HEADS)


def alibi(score, b, h, q_idx, kv_idx):
    """A penalty that grows with distance, by a slope for each head."""
    return score + slopes[h] * (kv_idx - q_idx)


def tanh_softcap(score, b, h, q_idx, kv_idx, *, cap):
    """Scores bent into (−cap, cap)."""
    return cap * torch.tanh(score / cap)


softcap = functools.partial(tanh_softcap, cap=20.0)


def table_bias(table):
    """A learned number for each head and distance, the same from some distance on."""
    reach = table.shape[1] // 2

    def bias(score, b, h, q_idx, kv_idx):
        return score + table[h, torch.clamp(q_idx - kv_idx, -reach, reach) + reach]

    return bias


relative_bias = table_bias(torch.sin(torch.arange(HEADS * 17.0)).reshape(HEADS, 17))

bucket_bias = torch.cos(torch.arange(16.0 * HEADS)).reshape(16, HEADS)


def log_buckets(score, b, h, q_idx, kv_idx):
    """T5's bias: a bucket for each short distance behind, logarithmic ones for longer."""
    behind = torch.clamp(q_idx - kv_idx, min=0)
    # A quarter more than the whole power of two, so that no logarithm falls on a bucket's edge.
    far = 8 + (torch.log2((behind + 0.25) / 8.0) * 2.5).to(torch.int64)
    bucket = torch.where(behind < 8, behind, torch.clamp(far, max=15))
    return score + bucket_bias[torch.clamp(bucket, min=0), h]


temperatures = torch.tensor([0.7, 1.0, 1.3, 2.1])


def temperature(score, b, h, q_idx, kv_idx):
    """Sharper or softer, by head."""
    return score / temperatures[h]


def inverse_distance(score, b, h, q_idx, kv_idx):
    """Scores fade as keys are further away."""
    return score / (1.0 + 0.1 * (q_idx - kv_idx).abs())


def sigmoid_gate(score, b, h, q_idx, kv_idx):
    """Large scores pass, small ones are held back: the score times its own sigmoid."""
    return score * torch.sigmoid(1.5 * score)


def window_bias_2d(table, width):
    """Swin's bias: a number for each head and each offset of rows and columns in a window."""

    def bias(score, b, h, q_idx, kv_idx):
        rows = q_idx // width - kv_idx // width + width - 1
        columns = q_idx % width - kv_idx % width + width - 1
        return score + table[rows, columns, h]

    return bias


_offsets = torch.arange(2 * ROW - 1.0)
swin_bias = window_bias_2d(
    0.1 * torch.hypot(_offsets[:, None, None] - 7, _offsets[None, :, None] - 6)
    + torch.arange(1.0 * HEADS),
    ROW,
)


def gaussian(score, b, h, q_idx, kv_idx):
    """A soft window: minus the squared distance over twice a width for each head, squared."""
    distance = (q_idx - kv_idx).to(score.dtype) / (4.0 * (h + 1))
    return score - 0.5 * distance * distance


def periodic(score, b, h, q_idx, kv_idx):
    """Scores that come and go with distance."""
    return score * torch.cos((q_idx - kv_idx) * 0.3) + math.pi / 8


def causal_as_score(score, b, h, q_idx, kv_idx):
    """A causal mask written as a score mod, as FlexAttention's paper shows first."""
    return torch.where(q_idx >= kv_idx, score, -math.inf)

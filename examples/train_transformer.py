"""Train a small transformer on a story for a minute, and record what its attention is given.

    python examples/train_transformer.py --seconds 60 --out trained.safetensors
    attncheck rmse --inputs trained.safetensors

The model is a decoder of characters: 4 layers, 128 columns, 4 heads, causal attention by torch's
scaled_dot_product_attention. It is trained on ``text.txt`` beside this file, on the CPU; then one
batch is run inside ``attncheck.capture``, which writes q, k, v, the mask and the scale of each of
its layers to a file. ``--length``, ``--batch`` and ``--dtype`` are those of the recorded batch.

The recorded numbers depend on the machine and on how many steps fit into the time: a recording
that others should have is kept, not made again.
"""

# ruff: noqa: T201  (an example prints)

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import attncheck

TEXT = (Path(__file__).parent / "text.txt").read_text(encoding="utf-8")
LENGTH, WIDTH, HEADS, LAYERS = 128, 128, 4, 4


class Attention(nn.Module):
    """Causal self-attention, (batch, length, WIDTH) in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.to_qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """The mixed values."""
        batch, length, _ = x.shape
        heads = self.to_qkv(x).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        q, k, v = heads  # (batch, heads, length, dim)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))


class Block(nn.Module):
    """Attention and a layer of two linear maps, each added to what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.linear = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.before_attention = nn.LayerNorm(WIDTH)
        self.before_linear = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """What came in, with both added."""
        x = x + self.attention(self.before_attention(x))
        return x + self.linear(self.before_linear(x))


class Transformer(nn.Module):
    """Characters (batch, length) → logits of the next one (batch, length, letters)."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.letter = nn.Embedding(letters, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.out = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, letters))

    def forward(self, text: Tensor) -> Tensor:
        """The logits."""
        position = self.position(torch.arange(text.shape[1], device=text.device))
        return self.out(self.blocks(self.letter(text) + position))


def encoded() -> tuple[Tensor, int]:
    """The text as numbers of its letters, and how many letters there are."""
    letters = sorted(set(TEXT))
    number = {letter: i for i, letter in enumerate(letters)}
    return torch.tensor([number[letter] for letter in TEXT]), len(letters)


def batch_of(text: Tensor, size: int, length: int) -> Tensor:
    """Pieces of the text from anywhere in it, (size, length + 1)."""
    starts = torch.randint(len(text) - length, (size,))
    return torch.stack([text[start : start + length + 1] for start in starts])


def train(model: Transformer, text: Tensor, seconds: float) -> None:
    """Adam on batches of 8 pieces until the time is over, at least one."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    started, step = time.monotonic(), 0
    while step == 0 or time.monotonic() - started < seconds:
        pieces = batch_of(text, 8, LENGTH)
        logits = model(pieces[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), pieces[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step:4}  {time.monotonic() - started:5.1f} s  loss {loss.item():.3f}")
        step += 1
    print(f"step {step:4}  {time.monotonic() - started:5.1f} s  trained: loss {loss.item():.3f}")


def main() -> None:
    """Train, then record one batch."""
    parser = argparse.ArgumentParser(description="Train a small transformer and record it.")
    parser.add_argument("--seconds", type=float, default=60.0, help="of training")
    parser.add_argument("--out", default="trained.safetensors", help="the recording")
    parser.add_argument("--batch", type=int, default=1, help="sequences of the recorded batch")
    parser.add_argument("--length", type=int, default=LENGTH, help=f"of them, up to {LENGTH}")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--calls", type=int, help="how many to keep (default: one a layer)")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    text, letters = encoded()
    model = Transformer(letters)
    train(model, text, arguments.seconds)

    model.eval().to(getattr(torch, arguments.dtype))
    pieces = batch_of(text, arguments.batch, arguments.length)
    with torch.no_grad(), attncheck.capture(arguments.out, model=model, calls=arguments.calls):
        model(pieces[:, :-1])
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()

"""The row softmax kernels: within a bound of their roundings; planted faults exceed it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.kernels.patched_kernels import PLANTED, copy_kernels

from attncheck.core.formats import FORMATS, Format
from attncheck.kernels import softmax_forward as right
from attncheck.kernels.softmax_forward import KINDS, Launch, softmax

UNIT = 2.0**-24  # unit roundoff of fp32
EXP = LOG = 8  # units: 4 ulp, the largest error of numpy's vector code; a GPU's exp2 has 2 ulp
VECTOR = 8  # most elements of 16 bytes
KINDS_THAT_SUBTRACT = ("safe", "online", "blocked")


def half_ulp(values: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Half the spacing of the numbers of ``fmt`` at ``values``."""
    exponent = torch.frexp(values.abs()).exponent - 1
    exponent = exponent.clamp(min=fmt.min_exponent)
    return torch.ldexp(torch.ones_like(values), exponent - fmt.significand)


def bounds(x: torch.Tensor, kind: str, launch: Launch) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest errors of out and LSE that the roundings can cause.

    In units of 2^-24, relative; z = x − m, m the row's maximum (0 in naive):

    * e = exp2(fl(fl(x − m) · fl(log2 e))): three roundings change the exponent, each by at most
      |z| units; then exp2's own error. 3|z| + EXP.
    * A running maximum splits exp(x − m) into factors whose exponents have one sign and add up to
      z, so 3|z| holds for all of them together. Each tile adds one factor's EXP, its product and
      an addition; combining lanes adds one more factor and product.
    * The additions of one tile in any order: block_columns − 1; of the two ends: 2 · VECTOR; two
      to combine them. A sum's relative error is at most the weighted mean of its terms' errors.
    * out: the errors of e and of the sum, the reciprocal and the product, or a division of 2 ulp.
      Then half an ulp of the output format; in fp32 that is the product's own rounding.
    * LSE: the sum's relative error, which is an absolute one of log; log's own; the rounding of
      m + log.

    Below 2^-126 a GPU's exp2 gives 0, and fp32 has no relative precision. (1 + 2^-10) covers the
    products of errors, as there are fewer than 2^13 units.
    """
    x = x.double()
    z = x if kind == "naive" else x - x.amax(-1, keepdim=True)
    z_abs = torch.where(torch.isneginf(z), 0.0, z.abs())
    e = torch.exp(z)
    total = e.sum(-1, keepdim=True)
    exact = e / total
    tiles = -(-x.shape[-1] // launch.block_columns)
    step = EXP + 2 if kind in {"online", "blocked"} else 1
    additions = launch.block_columns + 2 * VECTOR + 1
    sums = (exact * (3 * z_abs + EXP)).sum(-1, keepdim=True) + (tiles + 1) * step + additions
    out = exact * (3 * z_abs + EXP + sums + 4) * UNIT + 2.0**-126 / total
    lse = torch.logsumexp(x, -1)
    log = (sums[..., 0] + LOG * total[..., 0].log().abs() + lse.abs()) * UNIT
    slack = 1 + 2.0**-10
    return out * slack, log * slack


def excess(x: torch.Tensor, kind: str, launch: Launch, module: Any = right) -> float:
    """The largest error in units of its bound: at most 1 in a right kernel; inf for a wrong NaN."""
    out, lse = module.softmax(x, kind, launch)
    assert out.shape == x.shape
    assert out.dtype == x.dtype
    assert lse.dtype == torch.float32
    assert lse.shape == x.shape[:-1]
    exact, bound = torch.softmax(x.double(), -1), bounds(x, kind, launch)
    fmt = next(f for f in FORMATS.values() if f.torch_dtype == x.dtype)
    room = bound[0] + (half_ulp(exact + bound[0], fmt) if fmt.name != "fp32" else 0.0)
    over_out = (out.double() - exact).abs() / room
    over_lse = (lse.double() - torch.logsumexp(x.double(), -1)).abs() / bound[1]
    both = torch.cat([over_out.flatten(), over_lse.flatten()])
    return float(torch.nan_to_num(both, nan=torch.inf).max())


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(shape, generator=generator)).to(dtype)


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize(
    ("columns", "block"), [(1, 16), (3, 64), (37, 64), (37, 16), (64, 64), (64, 32), (101, 32)]
)
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_error_is_within_the_bound_at_every_row_length(kind, dtype, columns, block, aligned):
    x = normal(5, columns, dtype=FORMATS[dtype].torch_dtype, seed=columns)
    launch = Launch(block_rows=4, block_columns=block, aligned=aligned)
    assert excess(x, kind, launch) <= 1


@pytest.mark.parametrize("kind", KINDS_THAT_SUBTRACT)
@pytest.mark.parametrize("columns", [50, 130])
def test_error_is_within_the_bound_for_large_and_small_logits(kind, columns):
    for x in (
        100 * normal(4, columns),
        normal(4, columns) - 128.0,
        normal(4, columns) + 3.0e38,
        normal(4, columns).sort().values * 20,  # the maximum moves in every tile
        torch.full((4, columns), -3.4028234663852886e38),
    ):
        assert excess(x, kind, Launch(block_rows=4, block_columns=64)) <= 1


@pytest.mark.parametrize("block", [16, 64])
def test_naive_softmax_overflows_for_logits_the_others_can_handle(block):
    x = torch.tensor([[89.0] + [0.0] * 39, [88.0] * 40])
    launch = Launch(block_columns=block)
    out, lse = softmax(x, "naive", launch)
    assert torch.isnan(out[0, 0])
    assert (out[0, 1:] == 0).all()
    assert (lse == torch.inf).all()
    assert (out[1] == 0).all()  # exp(88) is finite, the sum of forty is not
    for kind in KINDS_THAT_SUBTRACT:
        assert excess(x, kind, launch) <= 1


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_minus_infinity_and_nan(kind, block):
    nan, inf = float("nan"), float("inf")
    x = normal(7, 45)
    x[0, 3:40] = -inf  # whole tiles of −inf
    x[1] = -inf
    x[2, 0] = x[3, 21] = x[4, 44] = nan
    x[5] = nan
    x[6, :44], x[6, 44] = -inf, nan
    launch = Launch(block_rows=2, block_columns=block)
    assert excess(x[:1], kind, launch) <= 1
    out, lse = softmax(x, kind, launch)
    assert (out[0, 3:40] == 0).all()
    assert lse[1] == -inf
    dead = out[1].isnan() if kind == "naive" else out[1] == 0
    assert dead.all()
    assert out[2:].isnan().all()
    assert lse[2:].isnan().all()


@pytest.mark.parametrize("kind", KINDS_THAT_SUBTRACT)
def test_infinite_logit_makes_only_its_row_nan(kind):
    x = normal(3, 45)
    x[1, 20] = float("inf")
    out, lse = softmax(x, kind, Launch(block_columns=16))
    assert out[1].isnan().all()
    assert lse[1].isnan()
    assert not out[::2].isnan().any()


def views() -> dict[str, torch.Tensor]:
    """4-D scores ``(batch, heads, query, kv)`` with strides of every kind."""
    wide = normal(2, 3, 5, 48)
    return {
        "contiguous": wide.contiguous(),
        "rows every second": wide[:, :, ::2],
        "heads and query swapped": wide.transpose(1, 2),
        "a slice of columns": wide[..., 4:41],
        "a slice off the boundary": wide[..., 1:38],
        "columns every second": wide[..., ::2],
        "columns outermost": wide.permute(3, 1, 2, 0).contiguous().permute(3, 1, 2, 0),
        "one head": wide[:, 1:2],
        "expanded": wide[:1, :1].expand(2, 3, 5, 48),
        "odd": normal(2, 3, 5, 37),
    }


@pytest.mark.parametrize("name", views())
@pytest.mark.parametrize("kind", ["naive", "blocked"])
def test_strided_input_is_read_and_not_written(kind, name):
    x = views()[name]
    before = x.clone()
    for block in (16, 64):
        assert excess(x, kind, Launch(block_rows=16, block_columns=block)) <= 1
    assert torch.equal(x, before)


def plant(tmp_path: Path, old: str, new: str) -> Any:
    """A copy of the kernels' module with ``old`` replaced by ``new``."""
    return copy_kernels(tmp_path, ("softmax_forward",), "", old, new).softmax_forward


@pytest.mark.parametrize("fault", PLANTED["softmax_forward"])
def test_planted_fault_exceeds_the_bound(fault, tmp_path):
    entry = PLANTED["softmax_forward"][fault]
    kinds = entry.get("kinds", KINDS)
    module = plant(tmp_path, entry["right"], entry["wrong"])
    for kind in kinds or KINDS_THAT_SUBTRACT:
        launch, x = Launch(block_rows=4, block_columns=16), normal(4, 37)
        assert excess(x, kind, launch) <= 1
        x = x if kinds else x - 128.0
        assert excess(x, kind, launch, module) > 1, kind


def test_planted_loss_of_nan_shows_in_out(tmp_path):
    """A maximum that drops NaN from the sum too leaves a row that is not all NaN."""
    module = plant(tmp_path, "return x.to(tl.float32)", "return tl.maximum(x.to(tl.float32), -9e9)")
    x = normal(2, 37)
    x[0, 5] = float("nan")
    out, _ = module.softmax(x, "safe", Launch(block_columns=16))
    assert not out[0].isnan().all()

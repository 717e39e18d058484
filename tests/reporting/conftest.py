"""Builds reports by hand for the tests of this folder, and compares pages with snapshots.

``ATTNCHECK_UPDATE_SNAPSHOTS=1 pytest tests/reporting`` writes the snapshots anew; read the
difference before you commit it.
"""

import os
from pathlib import Path

import msgspec
import pytest

from attncheck.core.judgement import BlindSpot, Judgement, Place, Precision, Worst
from attncheck.records.record import (
    Environment,
    GradientErrors,
    LseErrors,
    OutErrors,
    Record,
    Report,
)

SNAPSHOTS = Path(__file__).parent / "snapshots"


class Factory:
    """Builds reports and their parts; plausible values fill the fields that are not passed."""

    def environment(self, **changes):
        return msgspec.structs.replace(
            Environment(
                device="cpu",
                machine="x86_64",
                python="3.11.9",
                torch="2.13.0+cpu",
                triton="3.9.0",
                numpy="2.3.0",
                attncheck="0.1.0",
                interpreter=("bf16 arithmetic", "bf16 casts", "fp8 casts"),
            ),
            **changes,
        )

    def case(self, **changes):
        problem = {
            "batch": 1,
            "heads": 4,
            "kv_heads": 4,
            "query": 128,
            "kv": 96,
            "head_dim": 64,
            "value_dim": 64,
            "dtype": "bf16",
            "mask": {"name": "full"},
            "score": {"name": "none"},
            "scale": 0.125,
            "distribution": "normal",
            "seed": 0,
        }
        return {
            "problem": problem | changes,
            "question": "compare",
            "parameters": {},
            "generator": 1,
        }

    def out(self, **changes):
        return msgspec.structs.replace(
            OutErrors(
                rmse=1.5312e-03,
                floor_rmse=1.5006e-03,
                ideal_rmse=1.5294e-03,
                max_error=1.17e-02,
                max_at=Place(batch=0, head=1, query=127, dim=63),
                bias=-1.237e-06,
                input_rmse=2.4e-03,
                elements=32768,
            ),
            **changes,
        )

    def lse(self, **changes):
        at = Place(batch=0, head=0, query=3)
        return msgspec.structs.replace(
            LseErrors(rmse=1.1e-07, max_error=4.77e-07, max_at=at), **changes
        )

    def gradient(self, **changes):
        return msgspec.structs.replace(
            GradientErrors(
                rmse=2.12e-03,
                floor_rmse=1.06e-03,
                ideal_rmse=2.0e-03,
                max_error=1.5e-02,
                max_at=Place(batch=0, head=1, query=95, dim=7),
                bias=3.1e-06,
                elements=32768,
            ),
            **changes,
        )

    def worst(self, **changes):
        return msgspec.structs.replace(
            Worst(
                tensor="out",
                at=Place(batch=0, head=1, query=127, dim=63),
                tile="query tile 1, rows 64–127",
                got=0.25,
                exact=0.2421875,
                allowance=0.03125,
                budget={"output rounding": 0.0234375, "weights": 0.0078125},
            ),
            **changes,
        )

    def blind_spot(self, **changes):
        return msgspec.structs.replace(
            BlindSpot(
                dropped_keys=0.9987,
                weight=0.0213,
                scale=0.0031,
                accumulator_bits=12,
                half=True,
                zeros=True,
                mean_allowance=0.12,
            ),
            **changes,
        )

    def judgement(self, **changes):
        return msgspec.structs.replace(
            Judgement(
                status="pass",
                out_over_bound=0.25,
                lse_over_bound=0.0421,
                out_over_probable=0.7,
                lse_over_probable=0.3,
                worst=self.worst(),
                rows=512,
                rows_sampled=512,
                precision=Precision(
                    z=1.02,
                    residual=0.04,
                    bias=-0.001,
                    slope=1e-5,
                    ulp_p50=0.25,
                    ulp_p99=0.9,
                    frobenius=0.0017,
                    cosine=0.999998,
                ),
                blind_spot=self.blind_spot(),
                arithmetic="bf16 products, fp32 sums, P in bf16, bf16 out",
            ),
            **changes,
        )

    def judged(self, kernel="flash2_forward", *, record=None, **changes):
        """A record whose judgement has ``changes``; the record's status is the judgement's."""
        judgement = self.judgement(**changes)
        record = {"status": judgement.status, "judgement": judgement} | (record or {})
        return self.record(kernel, **record)

    def record(self, kernel="flash2_forward", *, problem=None, **changes):
        fields = {
            "case_id": "abcdefghij",
            "case": self.case(**(problem or {})),
            "kernel": kernel,
            "variant": "full",
            "heads": "MHA",
            "status": "pass",
            "out": self.out(),
            "lse": self.lse(),
            "judgement": self.judgement(),
            "seconds": 0.123,
            "interpreted": True,
            "tiling": "128×64",
            "environment": "here",
        }
        return Record(**(fields | changes))

    def backward(self, kernel="flash2_forward", *, sink=False, gradients=None, **changes):
        """A record with plausible gradients, replaced by name with those of ``gradients``."""
        shares = {"dq": 0.61, "dk": 0.42, "dv": 0.33} | ({"dsink": 0.9} if sink else {})
        errors = {name: self.gradient() for name in shares}
        if sink:
            at_head = Place(batch=0, head=2, query=0)
            errors["dsink"] = self.gradient(max_at=at_head, elements=4)
        fields = {
            "problem": {"backward": True} | ({"sink": True} if sink else {}),
            "judgement": self.judgement(gradients_over_bound=shares),
            "gradients": errors | (gradients or {}),
        }
        return self.record(kernel, **(fields | changes))

    def softmax(self, kernel="rows", **changes):
        """A record of a softmax of 2·3·128 rows of 96 columns."""
        sizes = {"batch": 2, "heads": 3, "kv_heads": 3, "head_dim": 0, "value_dim": 0}
        problem = {"operation": "softmax", "scale": 1.0} | sizes
        fields = {"variant": "softmax", "heads": "", "tiling": "", "problem": problem}
        return self.record(kernel, **(fields | changes))

    def refused(self, kernel, status, reason, **changes):
        unmeasured = dict.fromkeys(("out", "lse", "judgement", "seconds"))
        unmeasured |= {"interpreted": False, "tiling": ""}
        return self.record(kernel, status=status, reason=reason, **(unmeasured | changes))

    def report(self, *records, **changes):
        fields = {
            "command": "attncheck rmse --dtype bf16",
            "environments": {"here": self.environment()},
            "kernels": {},
            "absent": {},
            "records": records,
        }
        return Report(**(fields | changes))

    def sample(self):
        """Kernels that pass, warn, fail, raise and refuse, in three variants and two dtypes."""
        blocks = [
            ("full", "MHA", {}),
            ("causal", "GQA", {"kv_heads": 2, "mask": {"name": "causal"}}),
            ("document", "MHA", {"mask": {"name": "document", "lengths": [40, 56]}}),
        ]
        records = []
        for dtype in ("bf16", "fp32"):
            for variant, heads, changes in blocks:
                common = {"variant": variant, "heads": heads, "problem": changes | {"dtype": dtype}}
                records += self._kernels(variant, dtype, common)
        return self.report(
            *records,
            kernels={
                "ideal": "A perfect kernel.",
                "flash2_forward": "FlashAttention-2.",
                "sdpa_math": "torch.",
                "sdpa_flash": "torch.",
                "flex": "torch.",
                "sdpa_cudnn": "torch.",
            },
            absent={"sdpa_cudnn": "needs a CUDA device; there is none."},
        )

    def _kernels(self, variant, dtype, common):
        scale = 1.0 if dtype == "bf16" else 2.0**-16
        ideal = 1.5294e-03 * scale
        numbers = {"floor_rmse": 1.5006e-03 * scale, "ideal_rmse": ideal}
        numbers |= {"input_rmse": 2.4012e-03 * scale}
        yield self.record(
            "flash2_forward",
            out=self.out(rmse=1.0012 * ideal, max_error=7.6 * ideal, **numbers),
            seconds=0.732,
            **common,
        )
        yield self.record(
            "ideal",
            out=self.out(rmse=ideal, max_error=7.6 * ideal, bias=3.4e-6, **numbers),
            seconds=0.00184,
            **common,
        )
        less = "z = 3.2 and 2.9 times the RMSE of the worst of four ideal kernels"
        yield self.judged(
            "sdpa_math",
            status="warn",
            rule="precision",
            reason=less,
            warnings=(less,),
            out_over_bound=0.77,
            lse_over_bound=None,
            record={
                "out": self.out(rmse=3.21 * ideal, max_error=20 * ideal, **numbers),
                "lse": None,
                "seconds": 0.000313,
            }
            | common,
        )
        if variant == "document":
            reason = "sdpa_flash takes no mask but causal."
            yield self.refused("sdpa_flash", "unsupported", reason, **common)
            reason = "RuntimeError: expected a power of two, got 96 [flex_attention.py:211]"
            yield self.refused("flex", "error", reason, **common)
            return
        yield self.judged(
            "sdpa_flash",
            status="fail",
            rule="bound",
            reason="out[0, 1, 127, 63] is off by 0.84, 26.9 times what is allowed",
            out_over_bound=26.9,
            lse_over_bound=None,
            worst=self.worst(got=1.0821875),
            record={
                "out": self.out(rmse=41.0 * ideal, max_error=0.84, bias=-7.7e-3, **numbers),
                "lse": None,
                "seconds": 0.0000813,
            }
            | common,
        )
        broken = {"rmse": float("nan"), "max_error": float("inf"), "bias": float("nan")}
        yield self.judged(
            "flex",
            status="fail",
            rule="finite",
            reason="128 elements of out are NaN or infinite",
            out_over_bound=float("inf"),
            lse_over_bound=float("inf"),
            worst=None,
            precision=None,
            record={
                "out": self.out(nonfinite=128, dead_rows=5, dead_rows_wrong=3, **broken, **numbers),
                "lse": self.lse(max_error=float("inf"), nonfinite=2, dead_rows_wrong=3),
                "seconds": 12.9,
            }
            | common,
        )


@pytest.fixture
def make():
    return Factory()


@pytest.fixture
def sample(make):
    return make.sample()


@pytest.fixture
def matches_snapshot():
    def compare(name, text):
        path = SNAPSHOTS / name
        if os.environ.get("ATTNCHECK_UPDATE_SNAPSHOTS") == "1":
            path.write_text(text, encoding="utf-8", newline="")
        assert path.is_file(), f"{name} is missing: run with ATTNCHECK_UPDATE_SNAPSHOTS=1"
        assert text == path.read_bytes().decode(), f"{name} differs: read it, then update it"

    return compare

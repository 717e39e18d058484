"""triton-paged in the interpreter: the bits of triton-flash2, wherever the keys are in pages."""

import dataclasses

import pytest
import torch
from tests.kernels.patched_kernels import PLANTED, faulty_forward

from attncheck.cases.variants import plan_cells
from attncheck.core.mod_spec import Spec
from attncheck.core.paged_layout import Paging
from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Case, Problem
from attncheck.mods.page_table import draw_page_table
from attncheck.subjects import triton_flash
from attncheck.subjects.conventions.call_tensors import (
    inputs_page_table,
    paged_inputs,
    sequence_lengths,
)
from attncheck.subjects.triton_caches import Paged
from attncheck.subjects.triton_flash import Flash2
from attncheck.verify.run_case import run_case
from attncheck.verify.verify import verify

PADDING = Spec.of("padding", lengths=[70, 20])
BOTTOM_RIGHT = Spec.of("causal_bottom_right")
SHARED = Paging(size=16, seed=1, shared=1)


pytestmark = pytest.mark.usefixtures("require_interpreter")


def small(**changes) -> Problem:
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "query": 1, "kv": 70, "head_dim": 16}
    return Problem(**(sizes | {"paging": SHARED} | changes))


def judge(subject, problem, question="compare", **parameters):
    case = Case(problem=problem, question=question, parameters=parameters)
    return run_case(subject, case, device="cpu", brief=True).status


PROBLEMS = {
    "decoding": {},
    "prefill": {"query": 40, "mask": BOTTOM_RIGHT},
    "padding": {"mask": PADDING, "query": 3},
    "no keys": {"mask": Spec.of("padding", lengths=[0, 48]), "query": 2},
    "both": {"mask": Spec.of("and", PADDING, Spec.of("causal")), "query": 33},
    "sink": {"sink": True, "mask": PADDING},
    "score": {"score": Spec.of("alibi"), "query": 5},
    "odd pages": {"paging": Paging(size=3, seed=2), "mask": PADDING},
    "pages of a key": {"paging": Paging(size=1), "kv": 20},
    "pages larger than tiles": {"paging": Paging(size=256), "query": 2},
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, "bf16") for name in PROBLEMS]
    + [("padding", dtype) for dtype in ("fp32", "tf32", "fp16", "e4m3", "e5m2")],
)
def test_paged_attention_has_the_bits_of_unpaged_attention(name, dtype):
    inputs = draw_inputs(small(**PROBLEMS[name], dtype=dtype))
    in_order = Flash2().run(inputs.replace(problem=inputs.problem.replace(paging=None)))
    in_pages = Paged().run(inputs)
    assert torch.equal(in_pages.out, in_order.out)
    assert torch.equal(in_pages.lse, in_order.lse)


def test_kernel_reads_the_pages(monkeypatch):
    """A kernel that never reads pages would pass the test above."""

    def with_zero_keys(inputs):
        pages = paged_inputs(inputs)
        return dataclasses.replace(pages, k=torch.zeros_like(pages.k))

    monkeypatch.setattr(triton_flash, "paged_inputs", with_zero_keys)
    assert judge(Paged(), small()) == "fail"


@pytest.mark.parametrize("fault", PLANTED["pages"])
def test_planted_fault_fails(fault, tmp_path):
    kernel = faulty_forward(tmp_path, "flash2_forward", *PLANTED["pages"][fault].values())

    class Faulty(Paged):
        def forward(self):
            return kernel

    # The full mask shows a key too many; the bottom-right mask of three rows hides some keys.
    mask = {"mask": BOTTOM_RIGHT} if "masked" in fault else {}
    problem = small(query=3, paging=Paging(size=16, seed=3), **mask)
    assert judge(Faulty(), problem) == "fail"


def test_sequence_lengths_are_those_of_padding_and_size_the_table():
    problem = small(mask=Spec.of("and", PADDING, Spec.of("padding", lengths=[33, 90 - 20])))
    assert sequence_lengths(problem) == (33, 20)
    assert sequence_lengths(small()) == (70, 70)
    assert sequence_lengths(small(mask=Spec.of("not", PADDING))) == (70, 70)
    inputs = draw_inputs(problem)
    assert torch.equal(
        inputs_page_table(inputs).table, draw_page_table(SHARED, 2, 70, (33, 20)).table
    )


def test_pages_that_differ_are_not_shared():
    inputs = draw_inputs(small(paging=Paging(size=16, seed=1, shared=3)))
    for key, shared in ((0, 0), (15, 0), (16, 1), (47, 2), (48, 3)):
        v = inputs.v.clone()
        v[1, 0, key, 3] += 1
        expected = draw_page_table(inputs.problem.paging, 2, 70, shared=shared)
        assert torch.equal(inputs_page_table(inputs.replace(v=v)).table, expected.table)


def test_triton_paged_concerns_only_paged_attention():
    assert Paged().concerns(small())
    assert Paged().concerns(small(sink=True))
    assert not Paged().concerns(small(paging=None))
    assert not Paged().concerns(Problem(operation="softmax", query=4))
    assert not Flash2().concerns(small())


@pytest.mark.parametrize("mask", [Spec.of("full"), PADDING], ids=["full", "padding"])
def test_other_pages_give_the_same_result(mask):
    problem = small(query=2, mask=mask, paging=Paging(size=17, seed=4, shared=1))
    assert judge(Paged(), problem, "pages", size=3, order=2, shared=0) == "pass"


def test_nan_in_hidden_keys_changes_nothing():
    assert judge(Paged(), small(query=2, mask=PADDING), "hidden_keys_nan", row=1) == "pass"


def test_rmse_variants_with_pages_pass():
    cells = plan_cells(
        dtypes=["bf16"],
        variants=["full", "paged", "paged_decode"],
        shapes=["1x2x64x16"],
        distributions=["normal"],
        seed=0,
    )
    cases = [(cell.variant, Case(problem=cell.problem)) for cell in cells]
    report = verify(Paged(), cases, device="cpu", applicable_only=True)
    assert {(r.variant, r.status) for r in report.records} == {
        ("paged", "pass"),
        ("paged_decode", "pass"),
    }

"""torch's setting of fp32 products, inside and outside a call; its flash kernel is noticed."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attncheck.inputs.input_tensors import draw_inputs
from attncheck.inputs.problem import Problem
from attncheck.subjects import torch_kernels
from attncheck.subjects.conventions.torch_arithmetic import CpuFlashDetector, fp32_products
from attncheck.subjects.ideal import Ideal
from attncheck.subjects.torch_kernels import Flex, Sdpa
from attncheck.verify.further_calls import _Late
from attncheck.verify.memory_patterns import GuardBands

cuda, mkldnn = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul


def settings() -> tuple[str, str]:
    return cuda.fp32_precision, mkldnn.fp32_precision


@pytest.fixture(autouse=True)
def _put_back():
    before, legacy = settings(), torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(legacy)
    cuda.fp32_precision, mkldnn.fp32_precision = before


@pytest.mark.parametrize("products", ["ieee", "tf32"])
def test_inside_it_is_as_asked(products):
    with fp32_products(products):
        assert cuda.fp32_precision == products
        assert mkldnn.fp32_precision == products
        # torch raises where the older setting and the newer ones disagree.
        assert torch.get_float32_matmul_precision() == {"ieee": "highest", "tf32": "high"}[products]


@pytest.mark.parametrize("products", ["ieee", "tf32"])
@pytest.mark.parametrize("legacy", ["highest", "high", "medium"])
def test_an_older_setting_comes_back(legacy, products):
    torch.set_float32_matmul_precision(legacy)
    before = settings()
    with fp32_products(products):
        assert cuda.fp32_precision == products
    assert settings() == before
    assert torch.get_float32_matmul_precision() == legacy


@pytest.mark.parametrize("products", ["ieee", "tf32"])
@pytest.mark.parametrize("newer", ["none", "ieee", "tf32"])
def test_a_newer_setting_comes_back(newer, products):
    cuda.fp32_precision = newer
    before = settings()
    with fp32_products(products):
        assert cuda.fp32_precision == products
    assert settings() == before


def test_they_come_back_after_an_error():
    before = settings()
    with pytest.raises(ZeroDivisionError), fp32_products("tf32"):
        1 / 0  # noqa: B018  (the error is the point)
    assert settings() == before


def test_calls_may_be_nested():
    with fp32_products("tf32"):
        with fp32_products("ieee"):
            assert cuda.fp32_precision == "ieee"
        assert cuda.fp32_precision == "tf32"


@pytest.mark.parametrize("dtype", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("kernel", [Ideal(), Sdpa("math"), Flex()], ids=lambda k: k.name)
def test_each_kernel_multiplies_as_its_problem_says(kernel, dtype, monkeypatch):
    """The ideal kernel rounds to tf32 itself: its products are fp32's own always."""
    seen = []

    def watched(place, name):
        original = getattr(place, name)

        def call(*arguments, **named):
            seen.append(settings())
            return original(*arguments, **named)

        monkeypatch.setattr(place, name, call)

    watched(torch, "bmm")
    watched(torch.nn.functional, "scaled_dot_product_attention")
    watched(torch_kernels, "_attention")
    torch.set_float32_matmul_precision("medium")
    kernel.run(draw_inputs(Problem(query=9, head_dim=16, dtype=dtype)))
    products = "tf32" if dtype == "tf32" and kernel.name != "ideal" else "ieee"
    assert set(seen) == {(products, products)}


class Plain(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def imports_torchs_compiler(mode):
    """At the first operator that it sees: torch has wrapped its handler."""
    return hasattr(mode.__torch_dispatch__, "__wrapped__")


@pytest.mark.parametrize("mode", [CpuFlashDetector, GuardBands, _Late])
def test_it_imports_no_compiler(mode):
    assert not imports_torchs_compiler(mode)
    assert imports_torchs_compiler(Plain)


@pytest.mark.parametrize("mode", [CpuFlashDetector(), GuardBands("", torch.device("cpu"))])
def test_a_compiled_kernel_is_called_compiled_and_nothing_of_ours_is(mode):
    """Else its operators were compiled one by one as they came by, with warnings of too many."""
    graphs = []

    def backend(graph, _):
        graphs.append([node.name for node in graph.graph.nodes if node.op.startswith("call")])
        return graph.forward

    torch._dynamo.reset()
    attention = torch.nn.functional.scaled_dot_product_attention
    kernel = torch.compile(lambda q: attention(q, q, q).sin() + 1, backend=backend)
    with mode:
        kernel(torch.ones(1, 2, 8, 16))
    assert graphs == [["scaled_dot_product_attention", "sin", "add"]]
    assert getattr(mode, "called", True)

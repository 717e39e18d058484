"""torch's settings of fp32 products around a call, and dispatch modes that observe its kernels."""

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
def _restore_settings():
    before, legacy = settings(), torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(legacy)
    cuda.fp32_precision, mkldnn.fp32_precision = before


@pytest.mark.parametrize("products", ["ieee", "tf32"])
def test_requested_products_are_set_inside(products):
    with fp32_products(products):
        assert cuda.fp32_precision == products
        assert mkldnn.fp32_precision == products
        # torch raises where the older setting and the newer ones disagree.
        assert torch.get_float32_matmul_precision() == {"ieee": "highest", "tf32": "high"}[products]


@pytest.mark.parametrize("products", ["ieee", "tf32"])
@pytest.mark.parametrize("legacy", ["highest", "high", "medium"])
def test_legacy_setting_is_restored(legacy, products):
    torch.set_float32_matmul_precision(legacy)
    before = settings()
    with fp32_products(products):
        assert cuda.fp32_precision == products
    assert settings() == before
    assert torch.get_float32_matmul_precision() == legacy


@pytest.mark.parametrize("products", ["ieee", "tf32"])
@pytest.mark.parametrize("newer", ["none", "ieee", "tf32"])
def test_newer_setting_is_restored(newer, products):
    cuda.fp32_precision = newer
    before = settings()
    with fp32_products(products):
        assert cuda.fp32_precision == products
    assert settings() == before


def test_settings_are_restored_after_an_error():
    before = settings()
    with pytest.raises(ZeroDivisionError), fp32_products("tf32"):
        1 / 0  # noqa: B018  (the error is the point)
    assert settings() == before


def test_nested_settings_are_restored():
    with fp32_products("tf32"):
        with fp32_products("ieee"):
            assert cuda.fp32_precision == "ieee"
        assert cuda.fp32_precision == "tf32"


@pytest.mark.parametrize("dtype", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("kernel", [Ideal(), Sdpa("math"), Flex()], ids=lambda k: k.name)
def test_kernels_multiply_in_the_products_of_the_problem(kernel, dtype, monkeypatch):
    """The ideal kernel rounds to tf32 itself, so its products are always fp32's."""
    observed = []

    def record_settings_of(place, name):
        original = getattr(place, name)

        def call(*arguments, **keywords):
            observed.append(settings())
            return original(*arguments, **keywords)

        monkeypatch.setattr(place, name, call)

    record_settings_of(torch, "bmm")
    record_settings_of(torch.nn.functional, "scaled_dot_product_attention")
    record_settings_of(torch_kernels, "_attention")
    torch.set_float32_matmul_precision("medium")
    kernel.run(draw_inputs(Problem(query=9, head_dim=16, dtype=dtype)))
    products = "tf32" if dtype == "tf32" and kernel.name != "ideal" else "ieee"
    assert set(observed) == {(products, products)}


class PlainMode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def imports_compiler(mode):
    """Whether the mode imports torch's compiler at its first operator: torch wraps its handler."""
    return hasattr(mode.__torch_dispatch__, "__wrapped__")


@pytest.mark.parametrize("mode", [CpuFlashDetector, GuardBands, _Late])
def test_dispatch_modes_do_not_import_the_compiler(mode):
    assert not imports_compiler(mode)
    assert imports_compiler(PlainMode)


@pytest.mark.parametrize("mode", [CpuFlashDetector(), GuardBands("", torch.device("cpu"))])
def test_compiled_kernel_runs_compiled_under_a_dispatch_mode(mode):
    """Otherwise torch compiles the operators one by one in the mode, with warnings of too many."""
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

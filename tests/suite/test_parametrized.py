"""Which tests the fixtures ``kernel`` and ``problem`` parametrize, and which they leave alone."""

FOREIGN_TESTS = """
import pytest

@pytest.mark.parametrize("kernel", ["gaussian", "laplace"])
def test_marked(kernel):
    assert kernel in ("gaussian", "laplace")

@pytest.mark.parametrize(("size", "kernel"), [(3, "box")])
def test_marked_together(size, kernel):
    assert (size, kernel) == (3, "box")

class TestFixture:
    @pytest.fixture
    def problem(self):
        return "mine"

    def test_it(self, problem):
        assert problem == "mine"

def test_generated(kernel):
    assert kernel == "from a conftest"
"""
CONFTEST = """
def pytest_generate_tests(metafunc):
    if metafunc.function.__name__ == "test_generated":
        metafunc.parametrize("kernel", ["from a conftest"])
"""
FIXTURE_TESTS = """
from attncheck.inputs.problem import Case

def test_it(kernel):
    assert kernel.device == "cpu"

def test_both(kernel, problem):
    kernel.must_hold(Case(problem=problem))
"""
TWO = ("--kernel=ideal", "--kernel=sdpa-math", "--device=cpu")


FAMILIES = ("full", "causal", "padding")
NAMES = ("one", "two", "three", "four")
DTYPES = ("fp32", "tf32", "fp16", "bf16", "e4m3", "e5m2")
ASSERT_NO_HEAVY_IMPORTS = """
def pytest_sessionfinish(session):
    import sys
    assert not {"torch", "triton", "hypothesis", "numpy"} & set(sys.modules)
"""


def test_foreign_kernel_and_problem_parameters_are_left_alone(repository):
    done = repository.run_in_new_process(
        conftest=CONFTEST + ASSERT_NO_HEAVY_IMPORTS, test_a=FOREIGN_TESTS
    )
    assert "5 passed" in done.stdout, done.stdout + done.stderr


def test_kernel_fixture_runs_the_requested_kernels(repository):
    done = repository("--collect-only", *TWO, test_a=FIXTURE_TESTS)
    tests = set(done.stdout.splitlines())
    assert tests >= {"test_a.py::test_it[ideal]", "test_a.py::test_it[sdpa-math]"}
    assert "test_a.py::test_both[ideal-causal-wide]" in tests


def test_kernel_that_refuses_a_problem_is_skipped(repository):
    done = repository("-k", "gqa or one-key", "-rs", "--dtype=e4m3", *TWO, test_a=FIXTURE_TESTS)
    assert "2 passed, 2 skipped" in done.stdout, done.stdout
    assert "sdpa-math takes no such problem on cpu: takes no fp8 inputs" in done.stdout


def test_kernel_fixture_defaults_to_the_projects_kernels(repository):
    (repository.path / "attncheck.toml").write_text(
        '[kernels.mine]\nentry = "mine.py::fwd"\nconvention = "sdpa"\n'
    )
    done = repository(
        "--collect-only",
        test_a="def test_it(kernel): pass",
        mine="def fwd(query, key, value, is_causal=False): pass",
    )
    assert done.stdout.splitlines()[0] == "test_a.py::test_it[mine]", done.stdout + done.stderr


PROPERTIES = """
from attncheck.suite import asks

def of_kernels():
    @asks("compare", families=("full", "causal", "padding"))
    def test_it(kernel, case):
        kernel.must_hold(case)
    return test_it

test_one, test_two, test_three, test_four = (of_kernels() for _ in range(4))
"""


def test_unnamed_kernels_run_a_covering_of_the_tests(repository):
    def collect(*words):
        done = repository("--collect-only", "--device=cpu", *words, test_a=PROPERTIES)
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        return {line for line in lines if "[ideal-" in line}, "deselected" in lines[-1]

    chosen, deselected = collect()
    assert deselected
    every = {f"test_a.py::test_{n}[ideal-{d}-{f}]" for n in NAMES for d in DTYPES for f in FAMILIES}
    assert chosen < every
    assert len(chosen) < len(every) / 2
    # Every pair of dtype and family occurs, in one property or another.
    assert len({line.partition("[")[2] for line in chosen}) == len(every) / len(NAMES)
    # Choosing tests, kernels or a higher tier runs all of them.
    for words in (["-k", "test_"], ["--tier=pr"], ["--kernel=ideal"]):
        assert collect(*words) == (every, False), words

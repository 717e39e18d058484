"""Which tests the fixtures ``kernel`` and ``problem`` make of a test, and of whose."""

OF_THEIR_OWN = """
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
OURS = """
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
NOTHING_HEAVY = """
def pytest_sessionfinish(session):
    import sys
    assert not {"torch", "triton", "hypothesis", "numpy"} & set(sys.modules)
"""


def test_kernels_and_problems_of_their_own_are_left_alone(repository):
    done = repository.fresh(conftest=CONFTEST + NOTHING_HEAVY, test_a=OF_THEIR_OWN)
    assert "5 passed" in done.stdout, done.stdout + done.stderr


def test_ours_are_the_kernels_that_are_asked_for(repository):
    done = repository("--collect-only", *TWO, test_a=OURS)
    found = set(done.stdout.splitlines())
    assert found >= {"test_a.py::test_it[ideal]", "test_a.py::test_it[sdpa-math]"}
    assert "test_a.py::test_both[ideal-causal-wide]" in found


def test_a_kernel_that_does_not_take_a_problem_is_skipped(repository):
    done = repository("-k", "gqa or one-key", "-rs", "--dtype=e4m3", *TWO, test_a=OURS)
    assert "2 passed, 2 skipped" in done.stdout, done.stdout
    assert "sdpa-math takes no such problem on cpu: takes no fp8 inputs" in done.stdout


def test_by_default_they_are_the_projects_own(repository):
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


def test_kernels_that_nobody_named_are_asked_a_covering(repository):
    def found(*words):
        done = repository("--collect-only", "--device=cpu", *words, test_a=PROPERTIES)
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        return {line for line in lines if "[ideal-" in line}, "deselected" in lines[-1]

    few, said = found()
    assert said
    every = {f"test_a.py::test_{n}[ideal-{d}-{f}]" for n in NAMES for d in DTYPES for f in FAMILIES}
    assert few < every
    assert len(few) < len(every) / 2
    # Each kernel in every pair, by one property or another.
    assert len({line.partition("[")[2] for line in few}) == len(every) / len(NAMES)
    # Whoever chooses tests, or asks more, has all of them.
    for words in (["-k", "test_"], ["--tier=pr"], ["--kernel=ideal"]):
        assert found(*words) == (every, False), words

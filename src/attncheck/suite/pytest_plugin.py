"""The pytest plugin, which parametrises tests by kernels and Problems.

``--kernel SPEC`` (repeatable) selects a kernel: see ``suite.pytest_options`` for this and the
other options. A property, made by ``suite.asks``, runs once for each kernel × dtype × mask family;
any other test with the fixture ``kernel`` runs once for each kernel, and one with ``problem`` once
for each of a dozen Problems. Slow imports are deferred until a test needs them, since every pytest
in the environment loads this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from attncheck.suite import pytest_options
from attncheck.suite.outcomes import WORKER_OUTPUT, Outcomes, attach_outcome
from attncheck.suite.pytest_options import MARK, is_ours

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from attncheck.inputs.problem import Problem
    from attncheck.suite.known_failures import KnownFailure
    from attncheck.suite.session import Session
    from attncheck.suite.under_test import UnderTest

_OPTIONS = pytest.StashKey[pytest_options.Options]()
_SESSION: pytest.StashKey[Session] = pytest.StashKey()
_KNOWN: pytest.StashKey[KnownFailure] = pytest.StashKey()
_OUTCOMES = "attncheck-outcomes"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options ``--attncheck-kernel`` and others."""
    pytest_options.add(parser)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(parser: pytest.Parser, args: list[str]) -> Generator[None]:
    """Accept ``--kernel`` and other short names, unless a conftest or plugin defines them."""
    result = yield
    args[:] = pytest_options.spelled_out(parser, args)
    # Hypothesis loads the profile before any test is found.
    if any(name in arg for arg in args for name in pytest_options.PROFILES):
        pytest_options.register()
    return result


def pytest_configure(config: pytest.Config) -> None:
    """Load the kernels of the command line, so that a wrong name ends pytest at once."""
    config.addinivalue_line(
        "markers", f"{MARK}(asked): a property of kernels, once for each kernel × dtype × family"
    )
    config.stash[_OPTIONS] = options = pytest_options.options_of(config)
    config.pluginmanager.register(Outcomes(), _OUTCOMES)
    # Only in the main process: pytest-xdist workers would overwrite each other's reports.
    if options.report and not hasattr(config, "workerinput"):
        from attncheck.suite.outcomes import ReportWriter

        args = [str(arg) for arg in config.invocation_params.args]
        config.pluginmanager.register(ReportWriter(options, args, _outcomes(config)))
    if options.kernels or options.device:
        _ = _session(config).kernels


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise properties by kernel × dtype × mask family, other tests by kernel or Problem."""
    ours = [name for name in ("kernel", "problem") if is_ours(metafunc, name)]
    if not ours:
        return
    from attncheck.suite.session import parametrize_kernels, parametrize_problems

    session = _session(metafunc.config)
    if "kernel" in ours:
        parametrize_kernels(metafunc, session)
    if "problem" in ours:
        parametrize_problems(metafunc, session.options.dtypes)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Remove properties that concern no kernel, match known failures, and choose a covering.

    A covering is chosen only for the default kernels on a CPU, if no tests were selected by name.
    """
    if _SESSION not in config.stash:
        return
    from attncheck.suite import known_failures
    from attncheck.suite.session import NO_KERNEL

    items[:] = [item for item in items if not item.name.endswith(f"[{NO_KERNEL}]")]
    try:
        known = known_failures.known_failures(session, items, config.stash[_SESSION])
    except pytest.UsageError as error:
        if not hasattr(config, "workerinput"):
            raise
        # An error in a pytest-xdist worker would end the whole run; it is reported instead.
        _outcomes(config).error = str(error)
        items.clear()
        return
    for item, entry in known.items():
        item.stash[_KNOWN] = entry
    judged, option = config.stash[_SESSION], config.option
    selected = option.keyword or getattr(option, "lf", False) or any("::" in a for a in config.args)
    is_default_run = not judged.options.kernels and not judged.options.tier.each_dtype
    if is_default_run and not selected and judged.device == "cpu":
        beyond = set(known_failures.beyond_covering(items, known))
        items[:] = [item for item in items if item not in beyond]
        config.hook.pytest_deselected(items=list(beyond))


@pytest.fixture(scope="session")
def kernel(request: pytest.FixtureRequest) -> Iterator[UnderTest]:
    """Return the kernel under test; torch may be limited to one thread, see ``few_threads``."""
    from attncheck.suite.session import few_threads

    under_test = _session(request.config).under_test(request.param)
    with few_threads(under_test.device):
        yield under_test


@pytest.fixture(scope="session")
def problem(request: pytest.FixtureRequest) -> Problem:
    """Return one of the Problems of ``attncheck check``, in ``--dtype`` or bf16."""
    chosen: Problem = request.param
    return chosen


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object:
    """Ask the Case of a known failure instead of searching; return None to search."""
    __tracebackhide__ = True
    under_test = _under_test(pyfuncitem)
    if under_test is None or _KNOWN not in pyfuncitem.stash:
        return None
    from attncheck.suite import known_failures

    return known_failures.rerun_known_failure(pyfuncitem.stash[_KNOWN], under_test) or None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Store a failure once it has been shrunk; for a property, fail with its text alone."""
    __tracebackhide__ = True
    under_test = _under_test(item)
    if under_test is not None:
        item.config.stash[_SESSION].skip_without_gpu()
        under_test.begin()
    try:
        return (yield)
    except AssertionError as error:
        keep = getattr(error, "keep", None)
        if keep is None:
            raise
        if under_test is not None and under_test.lost is not None:
            item.config.stash[_SESSION].lost_by = item.nodeid
        text, facts = keep(item.nodeid)
        item.user_properties.extend(facts)
        if item.get_closest_marker(MARK) is None:
            raise
    _fail(text)


def _fail(text: str) -> NoReturn:
    """Fail in a visible frame; if all frames were hidden, pytest would add a note to the text."""
    pytest.fail(text, pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Attach the outcome of a kernel's test to its report."""
    report = yield
    if _SESSION in item.config.stash:
        attach_outcome(report, item, _under_test(item))
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Pass what was learned during collection to the main process."""
    config, outcomes = session.config, _outcomes(session.config)
    if _SESSION in config.stash:
        of_session = config.stash[_SESSION]
        outcomes.add_collected(untaken=of_session.untaken, claims=of_session.claims)
    if hasattr(config, "workeroutput"):
        names = ("untaken", "claims", "error")
        config.workeroutput[WORKER_OUTPUT] = {name: getattr(outcomes, name) for name in names}


def _under_test(item: pytest.Item) -> UnderTest | None:
    """Return the argument ``kernel`` of a test, if it is the plugin's."""
    argument = getattr(item, "funcargs", {}).get("kernel")
    if argument is None or _SESSION not in item.config.stash:
        return None
    from attncheck.suite.under_test import UnderTest

    # A user's fixture may be called ``kernel``, too.
    return argument if isinstance(argument, UnderTest) else None


def _outcomes(config: pytest.Config) -> Outcomes:
    outcomes: Outcomes = config.pluginmanager.getplugin(_OUTCOMES)
    return outcomes


def _session(config: pytest.Config) -> Session:
    if _SESSION not in config.stash:
        from attncheck.suite.session import Session

        pytest_options.register()
        config.stash[_SESSION] = Session(options=config.stash[_OPTIONS])
        config.add_cleanup(config.stash[_SESSION].close)
    return config.stash[_SESSION]

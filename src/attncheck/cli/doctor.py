"""``attncheck doctor``: describe this machine, and test whether attncheck can work on it."""

from __future__ import annotations

import json

import click

from attncheck.cli import verb
from attncheck.cli.standard_output import standard_output
from attncheck.reporting.exit_codes import INCOMPLETE, PASSED


@verb.command
def doctor(
    *,
    as_json: bool = verb.as_json(),
) -> int:
    """Print versions and devices, and run a small test of what works on this machine.

    Exit code 3 if a test fails.
    """
    from attncheck.surveys.machine_checkup import check_machine

    checkup = check_machine()
    with standard_output():
        if as_json:
            click.echo(json.dumps(checkup, indent=2))
        else:
            _echo(checkup)
    # A broken machine is no fault of a kernel, so its code differs from a failure's.
    return PASSED if all(test["ok"] for test in checkup["self_tests"]) else INCOMPLETE


def _echo(checkup: dict[str, object]) -> None:
    environment, tests = checkup["environment"], checkup["self_tests"]
    assert isinstance(environment, dict)
    assert isinstance(tests, list)
    for name, value in environment.items():
        # The repairs of the interpreter are a list.
        text = ", ".join(value) if isinstance(value, list | tuple) else value
        click.echo(f"{name:<12} {text or '—'}")
    click.echo()
    for test in tests:
        click.echo(f"{'ok    ' if test['ok'] else 'FAILED'}  {test['name']}: {test['finding']}")

"""Our Hypothesis profiles; Hypothesis is imported when one is registered, not before."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hypothesis import settings

__all__ = ["PROFILES", "register", "settings_of"]

PROFILES = ("attncheck-dev", "attncheck-ci", "attncheck-nightly")
"""dev: random, and failures of before are tried first. ci: the same examples every time. nightly:
random, and a failure prints what draws it again."""


def register() -> None:
    """Register the profiles; none is made current."""
    from hypothesis import settings

    common = settings_of()
    settings.register_profile("attncheck-dev", common)
    settings.register_profile("attncheck-ci", common, derandomize=True, database=None)
    settings.register_profile("attncheck-nightly", common, database=None, print_blob=True)


def settings_of() -> settings:
    """What all profiles share."""
    from hypothesis import HealthCheck, Phase, settings

    return settings(
        deadline=None,  # an interpreted kernel takes as long as it takes
        # Our own message explains; Hypothesis' needs as many runs again.
        phases=[phase for phase in Phase if phase is not Phase.explain],
        report_multiple_bugs=False,
        # A kernel that takes few problems leaves few examples; none at all is a failure of ours.
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.filter_too_much,
            HealthCheck.data_too_large,
            HealthCheck.large_base_example,
        ],
    )

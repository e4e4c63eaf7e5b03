"""How many examples a property is tried with: `make quick` draws fewer (FEW_EXAMPLES in its environment)."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

FEW = 10


def examples(most: int) -> settings:
    """Without a deadline: the machine may be busy. Fixtures are the same for all examples of a test."""
    return settings(
        max_examples=min(most, FEW) if "FEW_EXAMPLES" in os.environ else most,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )

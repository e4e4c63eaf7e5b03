"""What settings of delays do not go together."""

from __future__ import annotations

import pytest

from headrace.errors import InvalidConfig
from headrace.settings.values import check_topic_overrides, log_settings


def test_records_of_compacted_topics_are_not_delayed() -> None:
    with pytest.raises(InvalidConfig, match="compacted"):
        check_topic_overrides({"headrace.delay.enable": "true", "cleanup.policy": "compact,delete"})
    assert log_settings({}, {"headrace.delay.enable": "true"}).delays
    assert not log_settings({"cleanup.policy": ("compact",)}, {"headrace.delay.enable": "true"}).delays

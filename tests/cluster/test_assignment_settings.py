"""What an assignment makes of an image by itself; what it does to logs and partitions is in test_participant*.py."""

from __future__ import annotations

from typing import Any, cast

from headrace.cluster.assignment import Assignment
from headrace.cluster.image import Image, Topic
from headrace.settings.values import Value

NONE = cast(Any, None)


def test_settings_of_a_topic_are_made_once_for_an_image_and_anew_for_the_next() -> None:
    asked: list[Image] = []

    def defaults(image: Image) -> dict[str, Value]:
        asked.append(image)
        return {"segment.bytes": 1000 * len(asked)}

    assignment = Assignment(1, "first", NONE, NONE, NONE, NONE, defaults)
    image, later = Image("/headrace/x/"), Image("/headrace/x/", revision=5)
    topic = Topic("made", bytes(16), (), {"flush.ms": "7"})
    first = assignment.settings_of(image, topic)
    assert (first.segment_bytes, first.flush_ms) == (1000, 7)
    assert assignment.settings_of(image, topic) is first
    assert assignment.settings_of(later, topic).segment_bytes == 2000
    assert asked == [image, later]

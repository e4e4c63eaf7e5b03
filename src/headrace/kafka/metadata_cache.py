"""Encoded Metadata answers, kept as long as the image is the same: thousands of clients ask for the same few."""

from __future__ import annotations

from typing import Final

from headrace.cluster.image import Image

ANSWERS_MAX: Final = 64

Key = tuple[int, str, tuple[str, ...] | None, tuple[bool, bool]]
"""(version, listener, topics or None for all, whether operations on topics and on the cluster are asked for)"""


class MetadataCache:
    def __init__(self) -> None:
        self._image: Image | None = None
        self._answers: dict[Key, bytes] = {}

    def get(self, image: Image, key: Key) -> bytes | None:
        return self._answers.get(key) if image is self._image else None

    def put(self, image: Image, key: Key, answer: bytes) -> None:
        if image is not self._image or len(self._answers) >= ANSWERS_MAX:
            self._image = image
            self._answers = {}
        self._answers[key] = answer

"""A small synchronous client on blocking sockets: one connection per broker, leader routing, raw record sets."""

from typing import Final

DEFAULT_BOOTSTRAP: Final = "127.0.0.1:9092"
DEFAULT_REGISTRIES: Final = "127.0.0.1:8083"
"""HTTP ports."""

"""Another protocol where Kafka's was expected, recognised by its first bytes.

Kafka's frames begin with their size, so a stranger's first bytes read as one of hundreds of megabytes: that is true
and helps nobody. TLS records begin with their type and the major version 3; HTTP with a method, its answers with
`HTTP`.
"""

from __future__ import annotations

from typing import Final, Literal

HEAD_BYTES: Final = 8
"""As much as is needed to recognise one."""

_TLS: Final = (b"\x16\x03", b"\x15\x03")
_HTTP: Final = (
    *(b"GET ", b"HEAD ", b"POST ", b"PUT ", b"DELETE ", b"PATCH ", b"OPTIONS ", b"CONNECT ", b"TRACE "),
    *(b"PRI * HT", b"HTTP"),
)


def foreign_protocol(head: bytes) -> Literal["TLS", "HTTP"] | None:
    """What these first bytes belong to; None if that cannot be told."""
    if head.startswith(_TLS):
        return "TLS"
    return "HTTP" if head.startswith(_HTTP) else None

"""Certificates that the settings name: whether they can be used, and until when.

A file may hold a chain: the first to end counts. The end is read from the certificate itself (X.509, DER), because the
standard library shows it for authorities only:

    Certificate  SEQUENCE { tbs SEQUENCE { [0] version, serial, algorithm, issuer, validity SEQUENCE { from, to }, ...
"""

from __future__ import annotations

import re
import ssl
import stat
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from headrace.cli.checkup.finding import Finding, fail, ok, warn
from headrace.errors import SettingError
from headrace.kafka import listeners
from headrace.settings.values import BrokerSettings

SOON_DAYS: Final = 30
FILES: Final = ("tls.certificate", "replication.tls.ca", "etcd.tls.ca", "etcd.tls.cert")
KEYS: Final = ("tls.key", "etcd.tls.key")
UTC_TIME: Final = 0x17
EXPLICIT_VERSION: Final = 0xA0
BEFORE_VALIDITY: Final = 3
"""Serial number, algorithm, issuer."""
_PEM: Final = re.compile("-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)


def look(settings: BrokerSettings) -> Iterator[Finding]:
    given: dict[str, str] = {name: str(settings.values[name]) for name in (*FILES, *KEYS)}
    for name in FILES:
        if given[name]:
            yield _judged(name, Path(given[name]))
    for name in KEYS:
        if given[name] and (found := Path(given[name])).exists() and found.stat().st_mode & stat.S_IROTH:
            yield warn("certificate", f"{name}: everyone may read {found}", f"chmod o-r {found}")
    specs = listeners.parse_unadvertised(settings["listen"], "listen")
    try:
        if any(spec.tls for spec in specs):
            listeners.tls_context(settings)
        listeners.replication_tls(settings)
    except SettingError as error:
        yield fail("certificate", str(error), "give a certificate and the key that it was made for")


def _judged(name: str, file: Path) -> Finding:
    try:
        ends = min(not_after(ssl.PEM_cert_to_DER_cert(each)) for each in _PEM.findall(file.read_text()))
    except (OSError, ValueError, IndexError) as error:
        return fail("certificate", f"{name}: {file} cannot be read: {error}", "give a PEM file that this user may read")
    days = (ends - datetime.now(UTC)).days
    text = f"{name}: {file} is valid until {ends:%Y-%m-%d}"
    if days < 0:
        return fail(
            "certificate", f"{name}: {file} has ended on {ends:%Y-%m-%d}", "put a new one there, and start again"
        )
    if days < SOON_DAYS:
        return warn("certificate", f"{text}, {days} days", "put a new one there in time; it is read at the start")
    return ok("certificate", text)


def not_after(der: bytes) -> datetime:
    at = _content(der, _content(der, 0)[1])[1]
    if der[at] == EXPLICIT_VERSION:
        at = _content(der, at)[2]
    for _ in range(BEFORE_VALIDITY):
        at = _content(der, at)[2]
    begins = _content(der, at)[1]
    tag, start, end = _content(der, _content(der, begins)[2])
    text = der[start:end].decode("ascii")
    if tag == UTC_TIME:  # its years have two digits, up to 2049
        text = ("19" if text[:2] >= "50" else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)


def _content(der: bytes, at: int) -> tuple[int, int, int]:
    """The tag of the element there, and where its content begins and ends."""
    tag, length, start = der[at], der[at + 1], at + 2
    if length & 0x80:
        size = length & 0x7F
        length, start = int.from_bytes(der[start : start + size], "big"), start + size
    return tag, start, start + length

"""etcd as the settings name it: which nodes answer, whether this broker is let in, and what time it is there."""

from __future__ import annotations

import asyncio
import email.utils
import http.client
import ssl
import time
from collections.abc import Iterator
from typing import Final

from headrace.cli.checkup.finding import Finding, fail, ok, warn
from headrace.cluster import keys
from headrace.coordination.choice import etcd_addresses, open_etcd
from headrace.errors import HeadraceError
from headrace.settings.values import BrokerSettings
from headrace.system.clock import LoopClock

WHAT: Final = "coordination"
ANSWER_SECONDS: Final = 3.0
READ_SECONDS: Final = 10.0
SKEW_MAX_SECONDS: Final = 2.0
OWNER: Final = "doctor"


def look(settings: BrokerSettings) -> Iterator[Finding]:
    addresses = etcd_addresses(settings["coordination"])
    if not addresses:
        yield ok(WHAT, "embedded: this broker is alone, and needs nobody")
        return
    silent: dict[str, str] = {}
    for address in addresses:
        try:
            skew = _skew(settings, address)
        except (OSError, http.client.HTTPException) as error:
            silent[address] = str(error)
            continue
        if skew > SKEW_MAX_SECONDS:
            yield warn(
                "clock",
                f"the clock of etcd at {address} differs by {skew:.0f} s from the one here",
                "have both kept right by NTP: leases and retention go by them",
            )
    if silent:
        said = "; ".join(f"{address}: {why}" for address, why in silent.items())
        advice = "start etcd there, or correct the setting coordination"
        lost = 2 * len(silent) >= len(addresses)
        yield (fail if lost else warn)(
            WHAT, f"{len(silent)} of {len(addresses)} etcd nodes do not answer: {said}", advice
        )
        if len(silent) == len(addresses):
            return
    yield asyncio.run(_let_in(settings))


def _skew(settings: BrokerSettings, address: str) -> float:
    """Seconds by which the clock there is certain to differ; its answer names whole seconds."""
    host, _, port = address.rpartition(":")
    connection = _connection(settings, host.strip("[]"), int(port))
    try:
        before = time.time()
        connection.request("GET", "/version")
        answer = connection.getresponse()
        answer.read()
        after = time.time()
    finally:
        connection.close()
    there = email.utils.parsedate_to_datetime(answer.headers["Date"]).timestamp() if answer.headers["Date"] else before
    return max(0.0, there - after, before - there - 1)


def _connection(settings: BrokerSettings, host: str, port: int) -> http.client.HTTPConnection:
    if not settings["etcd.tls.ca"]:
        return http.client.HTTPConnection(host, port, timeout=ANSWER_SECONDS)
    context = ssl.create_default_context(cafile=settings["etcd.tls.ca"])
    if settings["etcd.tls.cert"]:
        context.load_cert_chain(settings["etcd.tls.cert"], settings["etcd.tls.key"] or None)
    return http.client.HTTPSConnection(host, port, timeout=ANSWER_SECONDS, context=context)


async def _let_in(settings: BrokerSettings) -> Finding:
    """Reads one key, as a broker would; nothing is written."""
    wanted = settings["cluster.id"]
    try:
        coordination = open_etcd(settings, LoopClock(asyncio.get_running_loop()), OWNER, 0)
        try:
            async with asyncio.timeout(READ_SECONDS):
                found = await coordination.get(keys.CLUSTER_ID)
        finally:
            await coordination.close()
    except HeadraceError as error:
        return fail(WHAT, str(error), "correct the settings etcd.*, and see what etcd's log says")
    except TimeoutError:
        return fail(WHAT, f"etcd did not answer a read in {READ_SECONDS:g} s", "see whether most of its nodes are up")
    if found is None:
        return ok(WHAT, "etcd answers, and holds no cluster yet: the first broker makes it")
    cluster = str(keys.decode(found.key, found.value))
    if wanted and wanted != cluster:
        text = f"etcd holds cluster {cluster!r}, and cluster.id is {wanted!r}"
        return fail(WHAT, text, "correct cluster.id, or the setting coordination")
    return ok(WHAT, f"etcd answers, and holds cluster {cluster}")

"""The end of a program that has not closed its producer: what waits is sent for a while yet, what is lost is told."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from headrace.client.connection.thread_reactor import ThreadReactor
from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from headrace.client.producer.sender import Sender

log = logging.getLogger(__name__)


def at_exit(sender: Sender, since: float) -> Iterator[None]:
    """Until `exit_timeout_ms` after `since`; see `exits.Leaver`."""
    reactor = sender.reactor
    if not isinstance(reactor, ThreadReactor):
        _tell(sender, "its loop has ended; `await producer.close()` in it, or use `async with`")
        return
    within_ms = sender.options.exit_timeout_ms
    failed = sender.count.failed + sender.count.unknown
    try:
        if within_ms > 0:
            _hurry(sender)
            yield
            yield
            mark = _hurry(sender)
            yield
            deadline = since + within_ms / 1000
            reactor.wait(lambda: sender.settled(mark), deadline)
            reactor.wait_told(deadline)
    except (KeyboardInterrupt, SystemExit):
        _tell(sender, "interrupted")
        return
    except HeadraceError as error:
        log.warning("what a producer holds cannot be sent at the end of the program: %s", error)
    failed = sender.count.failed + sender.count.unknown - failed
    if failed:
        log.warning("%d records failed at the end of the program; their deliveries say why", failed)
    _tell(sender, f"the program ended, and {within_ms:g} ms (exit_timeout_ms) were not enough; close the producer")


def _hurry(sender: Sender) -> int:
    with sender.reactor.lock:
        sender.hurry()
        return sender.mark()


def _tell(sender: Sender, why: str) -> None:
    untold = sender.account.untold_records
    lost = sender.quota.records - untold + sender.aside
    client_id = sender.network.client_id
    if lost:
        log.warning("%d records of a producer (%s) are not known to be delivered: %s", lost, client_id, why)
    if untold:
        log.warning("callbacks of up to %d records of a producer (%s) have not ended: %s", untold, client_id, why)

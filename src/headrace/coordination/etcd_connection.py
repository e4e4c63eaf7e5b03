"""Calls to etcd: which node is asked, for how long, as whom, and what its errors mean.

One channel a node, opened when it is first needed. Calls stay with one node until it fails them, then go to the next.
Every attempt has a deadline and so has the call; between rounds over all nodes there
is a short pause. gRPC's own retries and proxies are off: what was sent twice is decided here.
An attempt that failed may still have been carried out, unless the connection was never made: `Doubt` keeps that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import grpc
from aetcd import rpc

from headrace.coordination.waits import pause
from headrace.errors import CoordinationError, OperatorError
from headrace.ports.clock import Clock
from headrace.ports.coordination import CoordinationRefused, OutcomeUnknown

log = logging.getLogger(__name__)

CALL_SECONDS: Final = 8.0
"""How long a call is tried: longer than etcd takes to elect a leader."""
ATTEMPT_SECONDS: Final = 1.0
"""How long one node may take to answer before the next is asked. A write that a node passed on to a leader that has
just died is never answered: this is the gap that a client sees then.
"""
PAUSE_SECONDS_FIRST: Final = 0.02
PAUSE_SECONDS_MAX: Final = 0.25
RECONNECT_MS_MAX: Final = 500
CONNECT_MS: Final = 1000
# A silent connection is closed after both together; etcd allows no ping more often than each 5 s.
PING_MS: Final = 6000
PING_TIMEOUT_MS: Final = 3000

OPTIONS: Final = (
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", CONNECT_MS),
    ("grpc.max_reconnect_backoff_ms", RECONNECT_MS_MAX),
    ("grpc.keepalive_time_ms", PING_MS),
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
)
LEADER_REQUIRED: Final = ("hasleader", "true")
"""A node that has lost its leader ends the stream, rather than being silent on it."""

Metadata = tuple[tuple[str, str], ...]
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class EtcdAccess:
    """Where etcd is and how it lets us in. Files are PEM; an empty name is none."""

    addresses: tuple[str, ...]
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    user: str = ""
    password: str = field(default="", repr=False)


class NoAnswer(Exception):
    """A stream that ended without the message that was awaited."""


@dataclass(slots=True)
class Doubt:
    """Whether an attempt without an answer may have been carried out."""

    any: bool = False


class Node:
    """One etcd node: its channel and the services on it."""

    def __init__(self, address: str, credentials: Any) -> None:
        self.address = address
        if credentials is None:
            self.channel = grpc.aio.insecure_channel(address, options=OPTIONS)
        else:
            self.channel = grpc.aio.secure_channel(address, credentials, options=OPTIONS)
        self.kv = rpc.KVStub(self.channel)
        self.lease = rpc.LeaseStub(self.channel)
        self.watch = rpc.WatchStub(self.channel)
        self.auth = rpc.AuthStub(self.channel)


Ask = Callable[[Node, float, Metadata], Awaitable[Answer]]
"""One attempt at this node, within so many seconds, with this metadata."""


class EtcdLink:
    def __init__(
        self,
        access: EtcdAccess,
        clock: Clock,
        first: int = 0,
        call_seconds: float = CALL_SECONDS,
        attempt_seconds: float = ATTEMPT_SECONDS,
    ) -> None:
        self.clock = clock
        self.closed = False
        self.call_seconds = call_seconds
        self.attempt_seconds = attempt_seconds
        self.on_leave: set[Callable[[Node | None], None]] = set()
        """Told which node calls have just turned away from; None when everything ends."""
        self._access = access
        self._credentials = _credentials(access)
        self._nodes: dict[int, Node] = {}
        self._at = first % len(access.addresses)
        self._token = ""
        self._authenticating = asyncio.Lock()

    @property
    def where(self) -> str:
        return ",".join(self._access.addresses)

    @property
    def nodes(self) -> int:
        return len(self._access.addresses)

    def node(self) -> Node:
        """The node that is asked now."""
        if self.closed:
            raise CoordinationError(f"the link to etcd at {self.where} is closed: the broker is stopping")
        if self._at not in self._nodes:
            self._nodes[self._at] = Node(self._access.addresses[self._at], self._credentials)
        return self._nodes[self._at]

    def leave(self, node: Node) -> None:
        """Ask the next one from now on; streams on this node are told."""
        if self._nodes.get(self._at) is node:
            self._at = (self._at + 1) % self.nodes
            for told in list(self.on_leave):
                told(node)

    async def call(
        self,
        what: str,
        ask: Ask[Answer],
        seconds: float | None = None,
        doubt: Doubt | None = None,
        resend: bool = True,
    ) -> Answer:
        """The answer of the first node that gives one. Without `resend`, no second attempt once there is doubt.

        Raises OutcomeUnknown when time is up and there is doubt, with `doubt` given; else CoordinationError.
        """
        in_all = self.call_seconds if seconds is None else seconds
        give_up = self.clock.now() + in_all
        failure, failures, pause_seconds = "", 0, PAUSE_SECONDS_FIRST
        while (left := give_up - self.clock.now()) > 0:
            node = self.node()
            metadata: Metadata = ()
            try:
                # However short the call, one node that says nothing leaves time for another.
                attempt = min(self.attempt_seconds, in_all / 2, left)
                metadata = await self.metadata(node, attempt)
                return await _not_cancelled(ask(node, attempt, metadata))
            except (grpc.aio.AioRpcError, NoAnswer) as error:
                if self._token_refused(error):
                    self.forget_token(metadata)
                elif refusal := self._refusal(what, node, error):
                    raise refusal from None
                else:
                    failure = f"{node.address}: {_text(error)}"
                    if doubt is not None and not _never_sent(error):
                        doubt.any = True
                    self.leave(node)
            failures += 1
            if doubt is not None and doubt.any and not resend:
                break
            if failures % self.nodes == 0:
                await pause(self.clock, min(pause_seconds, max(0.0, give_up - self.clock.now())))
                pause_seconds = min(2 * pause_seconds, PAUSE_SECONDS_MAX)
        raise self._no_answer(what, failure, doubt)

    async def metadata(self, node: Node, seconds: float) -> Metadata:
        """What goes with every request; asks for a token first when there is none."""
        if not self._access.user:
            return (LEADER_REQUIRED,)
        async with self._authenticating:
            if not self._token:
                request = rpc.AuthenticateRequest(name=self._access.user, password=self._access.password)
                self._token = (await _not_cancelled(node.auth.Authenticate(request, timeout=seconds))).token
        return (LEADER_REQUIRED, ("token", self._token))

    def forget_token(self, used: Metadata) -> bool:
        """The next request asks for a new one, unless another already did. False when we have no user to ask for."""
        if ("token", self._token) in used:
            self._token = ""
        return bool(self._access.user)

    async def close(self) -> None:
        self.closed = True
        for told in list(self.on_leave):
            told(None)
        for node in self._nodes.values():
            await node.channel.close()

    def _token_refused(self, error: Exception) -> bool:
        """etcd forgets tokens when it restarts and when they were not used for minutes."""
        if not self._access.user or not isinstance(error, grpc.aio.AioRpcError):
            return False
        return error.code() == grpc.StatusCode.UNAUTHENTICATED or "revision of auth store is old" in _text(error)

    def _refusal(self, what: str, node: Node, error: Exception) -> CoordinationRefused | None:
        """What etcd decided, which asking again does not change; None for what another attempt may mend."""
        if not isinstance(error, grpc.aio.AioRpcError) or error.code() in _PASSING:
            return None
        text = _text(error)
        for part, advice in _ADVICE.items():
            if part in text:
                return CoordinationRefused(f"etcd at {node.address} refused to {what}: {text}. {advice}")
        if error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED:
            return None
        return CoordinationRefused(f"etcd at {node.address} refused to {what}: {text}; nothing was changed")

    def _no_answer(self, what: str, failure: str, doubt: Doubt | None) -> CoordinationError:
        last = f" (last: {failure})" if failure else ""
        if doubt is not None and doubt.any:
            return OutcomeUnknown(
                f"etcd at {self.where} did not say whether it could {what}{last}: it may have been done. "
                "Look at the keys before trying again"
            )
        return CoordinationError(
            f"etcd at {self.where} did not answer, could not {what}{last}; nothing was changed. "
            "Check that etcd runs there, and the settings coordination and etcd.tls"
        )


_PASSING: Final = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
    }
)
_ADVICE: Final = {
    "invalid user ID or password": "Check the settings etcd.user and etcd.password",
    "authentication is not enabled": "Enable it there (etcdctl auth enable), or leave the setting etcd.user empty",
    "user name is empty": "Set etcd.user and etcd.password",
    "permission denied": "Give the user in etcd.user a role with readwrite on the keys below /headrace/",
    "database space exceeded": "Compact and defragment etcd, then disarm its alarm (etcdctl alarm disarm)",
    "lease not found": "The lease is gone and nothing was changed: register again",
    "request is too large": "Nothing was changed: send it in parts, or raise etcd's max-request-bytes",
}


async def _not_cancelled(call: Awaitable[Answer]) -> Answer:
    """gRPC cancels the calls on a channel that is closed; only a cancelled task may look like one."""
    try:
        return await call
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise NoAnswer("the call was called off") from None


def _text(error: Exception) -> str:
    details = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
    return details or str(error)


def _never_sent(error: Exception) -> bool:
    return "failed to connect to all addresses" in _text(error)


def _credentials(access: EtcdAccess) -> Any:
    """What gRPC needs for TLS; None for a plain connection."""
    if not access.tls_ca:
        if access.tls_cert or access.tls_key:
            raise OperatorError("etcd.tls.cert or etcd.tls.key is set without etcd.tls.ca: name the CA of etcd as well")
        return None
    if bool(access.tls_cert) != bool(access.tls_key):
        raise OperatorError("etcd.tls.cert and etcd.tls.key go together: set both or none")
    return grpc.ssl_channel_credentials(
        _content("etcd.tls.ca", access.tls_ca),
        _content("etcd.tls.key", access.tls_key),
        _content("etcd.tls.cert", access.tls_cert),
    )


def _content(setting: str, path: str) -> bytes | None:
    if not path:
        return None
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise OperatorError(f"setting {setting}: {path} cannot be read: {error.strerror}") from None

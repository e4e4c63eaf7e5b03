"""What can go wrong for a client: a broker that does not answer, a broker that answers no, a record given up.

Whether a second try makes sense comes from the table in `errors`, and from the Kafka protocol for codes that only
other brokers send.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from functools import cache
from typing import Final

from headrace.errors import ErrorCode, ErrorMapping, HeadraceError, InvalidTopicName
from headrace.settings.topic_name import check_topic_name
from headrace.wire import schema

_REMEDIES: Final = {
    ErrorCode.OFFSET_OUT_OF_RANGE: "the log does not reach there; start at `beginning` or `end`",
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION: (
        "there is no such topic or partition; `headrace topic list` shows what there is"
    ),
    ErrorCode.CORRUPT_MESSAGE: (
        "a record batch is damaged on the broker's disk; `headrace log verify DIR` there says which"
    ),
    ErrorCode.MESSAGE_TOO_LARGE: "the batch is above the topic's max.message.bytes; send smaller records or raise it",
    ErrorCode.INVALID_TOPIC_EXCEPTION: "a topic name has 1 to 249 letters, digits, dots, underscores or dashes",
    ErrorCode.NOT_ENOUGH_REPLICAS: "fewer replicas are in sync than min.insync.replicas asks for",
    ErrorCode.INCONSISTENT_GROUP_PROTOCOL: "the group's other members use no assignor that this client has (range)",
    ErrorCode.TOPIC_ALREADY_EXISTS: "a topic of that name is there already",
    ErrorCode.INVALID_REPLICATION_FACTOR: "more replicas were asked for than there are brokers",
    ErrorCode.KAFKA_STORAGE_ERROR: "the broker could not write or read its disk; its log says why",
    ErrorCode.NON_EMPTY_GROUP: "the group has members; stop its consumers first",
    ErrorCode.GROUP_ID_NOT_FOUND: "there is no such group; `headrace group list` shows what there is",
    ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC: "a member of the group reads that topic; stop its consumers first",
    ErrorCode.TRANSACTIONAL_ID_NOT_FOUND: (
        "nothing is known of that transactional id; `headrace transaction list` shows what there is"
    ),
    ErrorCode.INVALID_TRANSACTION_TIMEOUT: (
        "transaction_timeout_ms is above the broker's transaction.max.timeout.ms; ask for less, or raise that"
    ),
    ErrorCode.INVALID_RECORD_STATE: (
        "not all of these records are locked by this member any more: a lock ran out or a session ended, and they are "
        "delivered again; renew what takes long, or raise share.record.lock.duration.ms of the group"
    ),
    ErrorCode.NOT_CONTROLLER: "the request went to a broker that is not the controller",
}


@cache
def _retriable() -> dict[int, bool]:
    of_protocol = {code: retriable for code, (_, retriable) in schema.error_codes().items()}
    # Only brokers' own errors: what a client raises of itself, such as a topic given up, says nothing of a code.
    of_brokers = [kind for kind in HeadraceError.__subclasses__() if kind.__module__ == HeadraceError.__module__]
    return of_protocol | {kind.mapping.kafka_code: kind.mapping.retriable for kind in of_brokers}


def is_retriable(code: int) -> bool:
    return _retriable().get(code, False)


def describe_code(code: int) -> str:
    """The meaning of a Kafka error code in words, with what to do where that is known."""
    name, _ = schema.error_codes().get(code, ("unknown error", False))
    remedy = _REMEDIES.get(code)
    return f"{name} (code {code})" + (f": {remedy}" if remedy else "")


class BrokerUnreachable(HeadraceError):
    """No connection, or one that broke before the answer came."""

    mapping = ErrorMapping(ErrorCode.NETWORK_EXCEPTION, 503, True)


class Refusal(HeadraceError):
    """A broker answered a request with an error code."""

    def __init__(self, code: int, about: str, message: str | None = None) -> None:
        super().__init__(f"{about}: {message or describe_code(code)}")
        self.mapping = ErrorMapping(code, 502, is_retriable(code))


class TopicAlreadyExists(Refusal):
    """A topic of that name is there already."""


class GroupNotFound(Refusal):
    """There is no group of that name."""


class GroupNotEmpty(Refusal):
    """The group has members: it cannot be deleted, nor its offsets changed from outside, until they have gone."""


_REFUSALS: Final[dict[int, type[Refusal]]] = {
    ErrorCode.TOPIC_ALREADY_EXISTS: TopicAlreadyExists,
    ErrorCode.GROUP_ID_NOT_FOUND: GroupNotFound,
    ErrorCode.NON_EMPTY_GROUP: GroupNotEmpty,
    ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC: GroupNotEmpty,
}
"""Those that programs tell apart; the others by their code."""


class NeverSent(BrokerUnreachable):
    """The broker cannot be reached, and not one byte of the request was handed to the kernel: it has not seen it."""


class WrongEndpoint(NeverSent):
    """What is at the address will not become right by waiting: a name that nobody knows, a certificate not trusted."""


class NoBroker(HeadraceError):
    """None of the bootstrap addresses has answered. It is worth another try unless all of them are wrong."""

    mapping = ErrorMapping(ErrorCode.NETWORK_EXCEPTION, 503, True)

    def __init__(self, failures: Iterable[HeadraceError], tried_s: float) -> None:
        told = list(failures)
        self.failures = told
        may_pass = any(isinstance(each, BrokerUnreachable) and not isinstance(each, WrongEndpoint) for each in told)
        reasons = "; ".join(dict.fromkeys(map(str, told)))
        if may_pass:
            super().__init__(f"{reasons} (tried for {tried_s:.1f} s); start a broker with `headrace serve`")
        else:
            super().__init__(reasons)
            self.mapping = ErrorMapping(ErrorCode.NETWORK_EXCEPTION, 503, False)


class EngineClosed(HeadraceError):
    """The client was closed while this was under way, or before it was asked."""


class CalledWithin(HeadraceError):
    """A call that waits was made by code that runs in the middle of another call of the same thread."""

    def __init__(self) -> None:
        super().__init__(
            "this was called in the middle of another call of the same client, by a signal's handler or a finalizer: "
            "use send_async there, or set a flag and send outside of it"
        )


class ForkedEngine(HeadraceError):
    """A client made before a fork was used in the child."""

    def __init__(self) -> None:
        super().__init__(
            "this client was made before the process forked, and its connections belong to the parent; "
            "make the Producer or Consumer in the child, after the fork"
        )


class UnknownTopic(HeadraceError):
    """A topic or partition that the cluster does not have, and that asking again will not bring."""

    mapping = ErrorMapping(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, 404, False)

    def __init__(
        self, topic: str, partition: int | None = None, partition_count: int = 0, *, known: Iterable[str] | None = None
    ) -> None:
        """`known` are the topics that there are, if somebody has asked: the nearest is named."""
        if partition is not None:
            super().__init__(f"topic {topic!r} has no partition {partition}, only 0 to {partition_count - 1}")
            return
        hint = f"`headrace topic create {topic}` makes it"
        if fault := _name_fault(topic):
            hint = fault
        elif known is not None:
            near = difflib.get_close_matches(topic, known)
            hint = (
                f"did you mean {' or '.join(map(repr, near))}?" if near else "`headrace topic list` shows what there is"
            )
        super().__init__(f"there is no topic {topic!r}; {hint}")


def _name_fault(topic: str) -> str | None:
    try:
        check_topic_name(topic)
    except InvalidTopicName as error:
        return str(error)
    return None


class NotDelivered(HeadraceError):
    """The producer has given the record up. It is not in the log and can be sent again, but see DeliveryUnknown."""

    mapping = ErrorMapping(ErrorCode.REQUEST_TIMED_OUT, 504, False)

    def __init__(self, message: str, reason: HeadraceError | None = None) -> None:
        super().__init__(message)
        if reason is not None:
            self.mapping = ErrorMapping(reason.kafka_code, reason.mapping.http_status, False)


class DeliveryUnknown(NotDelivered):
    """The record that was given up may be in the log or not: sent again, it may be there twice."""


class QueueFull(HeadraceError):
    """More waits for acknowledgements than the producer may hold."""

    mapping = ErrorMapping(ErrorCode.UNKNOWN_SERVER_ERROR, 429, True)


class ProducerClosed(HeadraceError):
    """The producer was closed."""


class TransactionError(HeadraceError):
    """Something about a transaction. What is raised is one of those below, which say whether the producer can go on."""

    mapping = ErrorMapping(ErrorCode.INVALID_TXN_STATE, 409, False)

    def __init__(self, message: str, reason: HeadraceError | None = None) -> None:
        super().__init__(message)
        if reason is not None:
            self.mapping = ErrorMapping(reason.kafka_code, 409, False)


class TransactionFailed(TransactionError):
    """The transaction cannot be committed. Abort it, which the end of its block does, and begin again."""


class TransactionTimedOut(TransactionFailed):
    """It was open for longer than `transaction_timeout_ms`, and the broker has aborted it. The producer can go on."""


class TransactionFenced(TransactionError):
    """Another producer has taken over the transactional id: this one can write and commit nothing more."""


class TransactionRefused(TransactionError):
    """The broker does not let this producer have transactions, for a reason that trying again does not change."""


class TransactionInDoubt(TransactionError):
    """Whether the transaction is committed is not known: nobody has answered. `commit` may be called again."""


class NoTransaction(TransactionError):
    """What needs an open transaction was called without one, or the other way round."""


def check(code: int, about: str, message: str | None = None) -> None:
    """Raise a Refusal, of the kind that the code has, unless it is 0. `about` says what was asked, `message` is the
    broker's own."""
    if code != ErrorCode.NONE:
        raise _REFUSALS.get(code, Refusal)(code, about, message)

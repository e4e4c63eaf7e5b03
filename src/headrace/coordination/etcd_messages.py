"""The port's values as etcd's messages, and back. Keys are UTF-8, so their order is the same on both sides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from aetcd import rpc

from headrace.ports.coordination import Compare, Delete, Event, KeyValue, Put

_TARGETS: Final = {
    "version": rpc.Compare.VERSION,
    "create_revision": rpc.Compare.CREATE,
    "mod_revision": rpc.Compare.MOD,
}
_RELATIONS: Final = {
    "=": rpc.Compare.EQUAL,
    "!=": rpc.Compare.NOT_EQUAL,
    "<": rpc.Compare.LESS,
    ">": rpc.Compare.GREATER,
}


def prefix_end(prefix: str) -> bytes:
    """The first key after all that begin with the prefix. UTF-8 has no byte 255, so the last one can be raised."""
    raw = prefix.encode()
    return raw[:-1] + bytes([raw[-1] + 1]) if raw else b"\0"


def range_of(prefix: str, after: bytes, revision: int, limit: int) -> Any:
    """Keys below the prefix behind `after`, at this revision; 0 is the newest."""
    start = after + b"\0" if after else prefix.encode() or b"\0"
    return rpc.RangeRequest(key=start, range_end=prefix_end(prefix), revision=revision, limit=limit)


def compare_of(compare: Compare) -> Any:
    return rpc.Compare(
        key=compare.key.encode(),
        target=_TARGETS[compare.attribute],
        result=_RELATIONS[compare.relation],
        **{compare.attribute: compare.number},
    )


def transaction_of(compares: Sequence[Compare], actions: Sequence[Put | Delete], otherwise: Sequence[Any] = ()) -> Any:
    return rpc.TxnRequest(
        compare=[compare_of(compare) for compare in compares],
        success=[_operation(action) for action in actions],
        failure=otherwise,
    )


def get_operation(key: str) -> Any:
    return rpc.RequestOp(request_range=rpc.RangeRequest(key=key.encode()))


def _operation(action: Put | Delete) -> Any:
    key = action.key.encode()
    if isinstance(action, Put):
        return rpc.RequestOp(request_put=rpc.PutRequest(key=key, value=action.value, lease=action.lease))
    if not action.prefix:
        return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=key))
    end = prefix_end(action.key)
    return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=key or b"\0", range_end=end))


def key_value_of(found: Any) -> KeyValue:
    return KeyValue(
        found.key.decode(), found.value, found.create_revision, found.mod_revision, found.version, found.lease
    )


def event_of(event: Any) -> Event:
    changed = event.kv
    if event.type == rpc.Event.PUT:
        return Event("put", changed.key.decode(), changed.value, changed.mod_revision)
    return Event("delete", changed.key.decode(), b"", changed.mod_revision)

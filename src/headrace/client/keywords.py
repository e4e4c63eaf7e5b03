"""Options of a client as keywords: shown by `help()` with what they mean, a wrong one answered with the nearest.

Options that are declared in a dataclass have their meaning there, as the string behind each field. It is read from the
source when somebody asks for it: a program that just runs does not pay for it.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from functools import wraps
from inspect import Parameter, Signature
from typing import Any, Final, TypeVar

C = TypeVar("C", bound=type)

WIDTH: Final = 100
NEAR: Final = 0.6

KAFKA_NAMES: Final = {
    "auto_commit_interval_ms": "commit_interval_ms",
    "auto_offset_reset": "start",
    "batch_size": "batch_bytes",
    "bootstrap_servers": "bootstrap",
    "buffer_memory": "queue_bytes",
    "client_rack": "rack",
    "compression_type": "codec",
    "enable_idempotence": "idempotent",
    "fetch_max_bytes": "fetch_bytes",
    "fetch_max_wait_ms": "max_wait_ms",
    "fetch_min_bytes": "min_bytes",
    "group_id": "group",
    "group_instance_id": "instance_id",
    "isolation_level": "isolation",
    "linger_ms": "interval_ms",
    "max_in_flight_requests_per_connection": "in_flight",
    "max_partition_fetch_bytes": "partition_fetch_bytes",
    "max_poll_interval_ms": "rebalance_timeout_ms",
    "max_request_size": "max_record_bytes",
    "partition_assignment_strategy": "assignor",
    "share_acknowledgement_mode": "acknowledgement",
    "share_acquire_mode": "acquire_mode",
    "ssl_context": "tls",
    "value_deserializer": "decoder",
    "value_serializer": "encoder",
}
"""What other clients call an option."""


def takes_options(declared: type | None = None) -> Callable[[C], C]:
    """For a class whose `__init__` takes options, itself or as the fields of the dataclass `declared`."""

    def decorate(kind: C) -> C:
        init = kind.__init__  # type: ignore[misc]
        signature = _signature(init, declared)
        known = [name for name, given in signature.parameters.items() if given.kind is not Parameter.VAR_KEYWORD]

        @wraps(init)
        def checked(self: Any, *args: Any, **options: Any) -> None:
            for name in options:
                if name not in known:
                    raise TypeError(_answer(kind.__name__, name, known[1:]))
            init(self, *args, **options)

        checked.__signature__ = signature  # type: ignore[attr-defined]
        kind.__init__ = checked  # type: ignore[misc]
        if declared is not None:
            kind.__doc__ = _OptionsDoc(kind.__doc__ or "", declared)  # type: ignore[assignment]
        return kind

    return decorate


def _signature(init: Callable[..., None], declared: type | None) -> Signature:
    own = inspect.signature(init)
    if declared is None:
        return own
    taken = [given for given in own.parameters.values() if given.kind is not Parameter.VAR_KEYWORD]
    added = [
        Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
        for field in fields(declared)
        if field.default is not MISSING
    ]
    return own.replace(parameters=[*taken, *added])


def _answer(kind: str, given: str, known: Sequence[str]) -> str:
    plain = given.replace(".", "_")
    ours = KAFKA_NAMES.get(plain)
    near = [ours] if ours in known else difflib.get_close_matches(plain, known, 1, NEAR)
    advice = f"did you mean {near[0]!r}?" if near else f"help(headrace.{kind}) shows them all"
    return f"{kind} has no option {given!r}; {advice}"


class _OptionsDoc:
    """The docstring of a class: its own, and what its options mean."""

    def __init__(self, text: str, declared: type) -> None:
        self._text = text
        self._declared = declared

    def __get__(self, instance: object, owner: type) -> str:
        lines = [inspect.cleandoc(self._text), "", "Options:", ""]
        for name, meaning in meanings(self._declared).items():
            text = f"{name}: {meaning}" if meaning else name
            lines += textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="      ")
        return "\n".join(lines)


def meanings(declared: type) -> dict[str, str]:
    """What each field of a dataclass that has a default means, as its source says; nothing where there is no source."""
    found = {field.name: "" for field in fields(declared) if field.default is not MISSING}
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(declared))).body
    except OSError:
        return found
    assert isinstance(tree, ast.ClassDef)
    field_name = ""
    for statement in tree.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            field_name = statement.target.id
        elif field_name in found and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            found[field_name] = " ".join(str(statement.value.value).split())
            field_name = ""
        else:
            field_name = ""
    return found

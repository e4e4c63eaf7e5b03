"""Our table of error codes has Kafka's numbers under Kafka's names."""

from __future__ import annotations

from headrace.errors import ErrorCode, HeadraceError
from headrace.wire import schema


def named() -> dict[str, int]:
    return {name: code for name, code in vars(ErrorCode).items() if name.isupper()}


def test_every_code_has_kafkas_number() -> None:
    protocol = {name.upper().replace(" ", "_"): code for code, (name, _) in schema.error_codes().items()}
    ours = {name.removesuffix("_EXCEPTION"): code for name, code in named().items()}
    assert {name: code for name, code in ours.items() if protocol.get(name) != code} == {}


def test_every_error_is_told_as_a_named_code() -> None:
    kinds: list[type[HeadraceError]] = [HeadraceError, *HeadraceError.__subclasses__()]
    assert {kind.__name__ for kind in kinds if kind.mapping.kafka_code not in named().values()} == set()

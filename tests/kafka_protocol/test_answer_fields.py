"""The fields of every answer are fields of its API. `Message` takes any name, and an encoder leaves out what its
version does not have: a misspelt field would be gone without a word.

Read from the source, so that answers which no test happens to ask for are looked at too.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

import headrace
from headrace.kafka import dispatch, share_partition_requests
from headrace.kafka.api import consumer_group_describe, consumer_group_heartbeat, metadata
from headrace.queues import persister
from headrace.wire import api, schema
from headrace.wire.schema import Direction, Struct

SHARE_PARTITIONS = (
    api.INITIALIZE_SHARE_GROUP_STATE,
    api.READ_SHARE_GROUP_STATE,
    api.WRITE_SHARE_GROUP_STATE,
    api.DELETE_SHARE_GROUP_STATE,
    api.READ_SHARE_GROUP_STATE_SUMMARY,
)
SHARED: list[tuple[int, Callable[..., object]]] = [
    (api.DESCRIBE_TOPIC_PARTITIONS, metadata.partition),
    (api.READ_SHARE_GROUP_STATE, persister.batch_row),
    *((key, share_partition_requests.response) for key in SHARE_PARTITIONS),
    *((key, share_partition_requests.result) for key in SHARE_PARTITIONS),
    (api.SHARE_GROUP_DESCRIBE, consumer_group_describe.assignment),
    (api.SHARE_GROUP_DESCRIBE, consumer_group_describe.response),
    (api.SHARE_GROUP_DESCRIBE, consumer_group_describe.group_row),
    (api.SHARE_GROUP_HEARTBEAT, consumer_group_heartbeat.response),
]
"""Functions that make rows of an API in the module of another."""


def answering() -> dict[ModuleType, set[int]]:
    """The APIs that each module of handlers serves."""
    found: dict[ModuleType, set[int]] = {}
    for key, handle in dispatch.HANDLERS.items():
        module = inspect.getmodule(handle)
        assert module is not None
        found.setdefault(module, set()).add(key)
    return found


def fields_of(spec: Struct, path: str = "") -> Iterator[tuple[str, str]]:
    """(path of the struct, name of the field), of the struct itself and all below it."""
    for field in spec.fields:
        yield path, field.name
        if field.struct is not None:
            yield from fields_of(field.struct, f"{path}.{field.name}")


def structs_of(key: int, direction: Direction) -> list[set[str]]:
    """What each struct of the API's bodies has, in any version."""
    found: dict[str, set[str]] = {}
    for version in schema.versions_with_all_fields(key):
        for path, name in fields_of(schema.load(key, version, direction)):
            found.setdefault(path, set()).add(name)
    return list(found.values())


def answer_structs(keys: set[int]) -> list[set[str]]:
    return [struct for key in keys for struct in structs_of(key, "response")]


def misspelt(source: str, structs: list[set[str]]) -> list[str]:
    """Messages made in the source whose fields are not together in one of the structs."""
    return [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(ast.parse(textwrap.dedent(source)))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Message"
        for names in [{word.arg for word in node.keywords if word.arg is not None}]
        if names and not any(names <= struct for struct in structs)
    ]


def set_later(source: str) -> set[str]:
    """Names of attributes that the source gives to something, unless one of its own classes has them."""
    own: set[str] = set()
    others: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            is_own = isinstance(node.value, ast.Name) and node.value.id == "self"
            (own if is_own else others).add(node.attr)
    return others - own


@pytest.mark.parametrize("module", answering(), ids=lambda module: module.__name__.rpartition(".")[2])
def test_the_fields_of_an_answer_are_those_of_its_api(module: ModuleType) -> None:
    structs = answer_structs(answering()[module])
    source = inspect.getsource(module)
    assert misspelt(source, structs) == []
    assert set_later(source) <= set().union(*structs)


@pytest.mark.parametrize(("key", "makes"), SHARED)
def test_the_fields_of_a_row_are_those_of_every_api_that_has_it(key: int, makes: Callable[..., object]) -> None:
    assert misspelt(inspect.getsource(makes), answer_structs({key})) == []


def test_the_fields_of_every_other_message_are_those_of_some_api() -> None:
    directions: tuple[Direction, ...] = ("request", "response")
    structs = [struct for key in api.ALL_APIS for direction in directions for struct in structs_of(key, direction)]
    sources = {path: path.read_text() for path in Path(headrace.__file__).parent.rglob("*.py")}
    wrong = {
        str(path): misspelt(source, structs)
        for path, source in sources.items()
        if "from headrace.wire.message import" in source
    }
    assert {path: found for path, found in wrong.items() if found} == {}


def test_a_misspelt_field_is_found() -> None:
    structs = [{"topics"}, {"name", "error_code"}]
    source = "Message(topics=[Message(name='t', error_code=0), Message(nane='t'), Message(topics=[], name='t')])"
    assert [line.split(":")[1] for line in misspelt(source, structs)] == [
        " Message(nane='t')",
        " Message(topics=[], name='t')",
    ]
    assert set_later("row.nane = self.x = 1") == {"nane"}

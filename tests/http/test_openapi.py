"""/openapi.json against the code: every route is in it, and what schemathesis draws from it is answered as it says."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from schemathesis import GenerationMode

from brokers import Broker, Brokers
from headrace.errors import HeadraceError
from headrace.http.broker_routes import ROUTES
from headrace.http.description import STATUSES
from headrace.http.openapi import document
from headrace.http.routes import Route
from openapi_fuzz import THERE, fuzz
from proving import proves

EXAMPLES = 8
WRONG_EXAMPLES = 12
LONG_EXAMPLES = 300
SETTINGS = {"partitions.max": 12, "request.timeout.max.ms": 50, "offsets.topic.partitions": 1}
"""What is drawn cannot fill the disk, nor wait for long."""
SEED = 14
PAGE = Path(__file__).parents[2] / "docs" / "HTTP.md"
LABELS = [f"{route.method} {route.path}" for route in ROUTES]
NARROW = [
    f"{route.method} {route.path}"
    for route in ROUTES
    if route.path_names or route.operation.query or route.operation.body
]
"""Those that can be asked wrongly."""


def send(broker: Broker, target: str, body: object, method: str = "POST") -> None:
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(broker.http + target, data, headers, method=method)) as answer:
        answer.read()


@pytest.fixture(scope="module")
def served(brokers: Brokers) -> Iterator[Broker]:
    broker = brokers.start(settings=SETTINGS)
    yield broker
    broker.check_alive()
    broker.discard()


@pytest.fixture
def api(served: Broker) -> Any:
    """The document that the broker serves, which has something of everything that it names."""
    for name in THERE["topic"]:
        if not exists(served, name):
            send(served, "/topics", {"name": name, "partitions": 2, "settings": {"key.index": name == "orders"}})
    records = [{"key": "k", "value": {"n": 1}, "headers": {"h": "v"}, "partition": n % 2} for n in range(4)]
    records.append({"key_base64": "/w==", "value_base64": "/w==", "headers": [{"key": "h", "value_base64": "/w=="}]})
    send(served, "/topics/orders/records", {"records": records})
    send(served, "/groups/readers/offsets", {"offsets": [{"topic": "orders", "partition": 0, "offset": 1}]})
    return schemathesis.openapi.from_url(f"{served.http}/openapi.json")


def exists(broker: Broker, topic: str) -> bool:
    with urllib.request.urlopen(broker.http + "/topics") as answer:
        return topic in {one["name"] for one in json.load(answer)["topics"]}


@proves("U5")
@pytest.mark.thorough
@pytest.mark.parametrize("label", LABELS)
def test_requests_drawn_from_the_document_are_answered_as_it_says(api: Any, label: str) -> None:
    assert fuzz(api, label, GenerationMode.POSITIVE, SEED, EXAMPLES)


@proves("U5")
@pytest.mark.thorough
@pytest.mark.parametrize("label", NARROW)
def test_requests_against_the_document_are_refused(api: Any, label: str) -> None:
    assert fuzz(api, label, GenerationMode.NEGATIVE, SEED, WRONG_EXAMPLES)


@proves("U5")
@pytest.mark.long
def test_many_requests_drawn_from_the_document_find_nothing(
    api: Any, seed: int, proof_report: Callable[..., None]
) -> None:
    for label in LABELS:
        fuzz(api, label, GenerationMode.POSITIVE, seed, LONG_EXAMPLES)
    for label in NARROW:
        fuzz(api, label, GenerationMode.NEGATIVE, seed, LONG_EXAMPLES)
    proof_report(operations=len(LABELS), requests_at_most=LONG_EXAMPLES * (len(LABELS) + len(NARROW)))


@proves("U5")
def test_every_route_is_in_the_document_with_all_that_it_takes() -> None:
    described = document("broker", ROUTES)
    found = {
        (method.upper(), path): operation
        for path, methods in described["paths"].items()
        for method, operation in methods.items()
    }
    assert set(found) == {(route.method, route.path) for route in ROUTES}
    for route in ROUTES:
        operation = found[route.method, route.path]
        assert operation["summary"] == route.operation.summary
        parameters = {(one["in"], one["name"]) for one in operation.get("parameters", ())}
        assert {name for place, name in parameters if place == "query"} == set(route.operation.query)
        assert {name for place, name in parameters if place == "path"} == set(route.path_names)
        assert {400, 413, 500} <= {int(status) for status in operation["responses"]}
    identities = [operation["operationId"] for operation in found.values()]
    assert len(set(identities)) == len(identities)


@proves("U5")
def test_every_status_that_an_error_can_have_is_described() -> None:
    kinds = [kind for kind in HeadraceError.__subclasses__() if kind.__module__ == HeadraceError.__module__]
    assert {kind.mapping.http_status for kind in kinds} <= STATUSES.keys()


@proves("U5")
def test_no_object_of_the_document_is_left_open() -> None:
    """Else a field could be answered that is not described, and no check would find it."""

    def objects(schema: Any) -> Iterator[Any]:
        if isinstance(schema, dict):
            if schema.get("type") == "object":
                yield schema
            for each in schema.values():
                yield from objects(each)
        elif isinstance(schema, list):
            for each in schema:
                yield from objects(each)

    described = document("broker", ROUTES)
    found = list(objects(described["components"]))
    assert len(found) > 20
    assert [schema for schema in found if "additionalProperties" not in schema] == []
    schemathesis.openapi.from_dict(described).validate()


@proves("U5", "U8")
@pytest.mark.parametrize("route", ROUTES, ids=LABELS)
def test_every_route_is_in_the_docs_with_an_example(route: Route) -> None:
    """That the examples print what they say is for tests/test_pages.py."""
    page = PAGE.read_text()
    assert f"| `{route.method} {route.path}` |" in page
    typed = re.findall(r"^\$ (.*(?:\\\n.*)*)", page, re.MULTILINE)
    path = re.sub(r"\\{[a-z]+\\}", "[^/? ]+", re.escape(route.path))
    wanted = re.compile(rf"http://127\.0\.0\.1:8082{path}(?=[?' \n)]|$)")
    methods = {"GET": r"^(?!.*(-X|-d |--json|--data))", "POST": r"(-d |--json|--data)(?!.*-X)"}
    method = re.compile(methods.get(route.method, f"-X {route.method} "), re.DOTALL)
    assert any(wanted.search(line) and method.search(line) for line in typed)

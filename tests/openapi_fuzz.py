"""Requests that schemathesis draws from the OpenAPI document of a port, and the checks of what it answers."""

from __future__ import annotations

from typing import Any

import hypothesis
import schemathesis
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.parameters import ParameterLocation
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
THERE: dict[str, tuple[Any, ...]] = {
    "topic": ("orders", "kept", "empty"),
    "partition": (0, 1),
    "group": ("readers", "gone"),
}
"""What there is: names that are drawn from a pattern would hardly ever meet it."""


@schemathesis.serializer("application/x-ndjson", "application/octet-stream")
def as_it_is(_context: Any, value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode(errors="replace")


def is_valid(case: Any, part: ParameterLocation) -> bool:
    """Whether this part of the request was drawn to be as the document says."""
    described = case.meta.components.get(part)
    return described is None or described.mode is GenerationMode.POSITIVE


def fuzz(api: Any, label: str, mode: GenerationMode, seed: int, examples: int) -> set[int]:
    """The statuses that came back for requests drawn from the document, valid or (with NEGATIVE) not."""
    method, path = label.split(" ")
    operation = api[path][method]
    checks = CHECKS if mode is GenerationMode.POSITIVE else [*CHECKS, negative_data_rejection]
    seen: set[int] = set()

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(operation.as_strategy(generation_mode=mode), st.data())
    def ask(case: Any, data: st.DataObject) -> None:
        if is_valid(case, ParameterLocation.PATH):
            for name in set(case.path_parameters or ()) & THERE.keys():
                case.path_parameters[name] = data.draw(st.sampled_from((*THERE[name], case.path_parameters[name])))
        if is_valid(case, ParameterLocation.BODY) and label == "POST /groups/{group}/offsets":
            for one in case.body["offsets"]:
                one["topic"], one["partition"] = "orders", data.draw(st.sampled_from(THERE["partition"]))
        if is_valid(case, ParameterLocation.QUERY) and label == "POST /groups/{group}/receive":
            case.query["topic"] = data.draw(st.sampled_from((*THERE["topic"], case.query["topic"])))
        response = case.call_and_validate(checks=checks)
        seen.add(response.status_code)

    ask()
    return seen

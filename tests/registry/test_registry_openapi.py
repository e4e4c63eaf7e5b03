"""/openapi.json of a registry against what it answers."""

from __future__ import annotations

import pytest
import schemathesis
from schemathesis import GenerationMode

from openapi_fuzz import fuzz
from proving import proves
from registries import Registry

EXAMPLES = 3
SEED = 14


@proves("U5", "R1")
@pytest.mark.thorough
def test_a_registry_answers_as_its_document_says(registry: Registry, topic: str) -> None:
    api = schemathesis.openapi.from_url(f"{registry.http}/openapi.json")
    paths = {entry.removeprefix("GET ") for entry in registry.ask("/")["paths"] if entry.startswith("GET ")}
    assert {path for path in api if "get" in api[path]} == paths
    # Topics that are made and deleted at random are for a broker of its own; the code is the same.
    wanted = [f"GET {path}" for path in sorted(paths)] + ["PUT /settings/{name}", "DELETE /settings/{name}"]
    for label in wanted:
        assert fuzz(api, label, GenerationMode.POSITIVE, SEED, EXAMPLES), label

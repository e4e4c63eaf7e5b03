"""An Iceberg REST catalog in this process, as its specification has it, over `pyiceberg`'s catalog in a file.

It serves what an archive asks for: configuration, namespaces, and tables that are made, loaded and committed to.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

from pyiceberg.catalog.rest import CreateTableRequest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NamespaceAlreadyExistsError,
    NoSuchNamespaceError,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.table import CommitTableRequest, Table

CODES = {
    CommitFailedException: 409,
    NamespaceAlreadyExistsError: 409,
    NoSuchNamespaceError: 404,
    NoSuchTableError: 404,
    TableAlreadyExistsError: 409,
}


class RestCatalogServer:
    """`catalog` is what it keeps its tables in."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.catalog = SqlCatalog("server", uri=f"sqlite:///{folder}/catalog.db", warehouse=f"file://{folder}")
        served = type("Handler", (_Handler,), {"catalog": self.catalog})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), served)
        self.uri = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    catalog: SqlCatalog

    def do_GET(self) -> None:
        self._answer(None)

    def do_HEAD(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers["Content-Length"])))

    def log_message(self, *_: Any) -> None:
        """Nothing."""

    def _answer(self, body: bytes | None) -> None:
        try:
            code, answer = 200, self._serve(self.path.partition("?")[0].strip("/").split("/")[1:], body)
        except tuple(CODES) as error:
            code = CODES[type(error)]
            answer = {"error": {"message": str(error), "type": type(error).__name__, "code": code}}
        written = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(written)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(written)

    def _serve(self, path: list[str], body: bytes | None) -> dict[str, Any]:
        match path, body:
            case ["config"], None:
                return {"defaults": {}, "overrides": {}}
            case ["namespaces", namespace], None:
                return {"namespace": [namespace], "properties": self.catalog.load_namespace_properties(namespace)}
            case ["namespaces"], bytes():
                names = json.loads(body)["namespace"]
                self.catalog.create_namespace(".".join(names))
                return {"namespace": names, "properties": {}}
            case ["namespaces", namespace, "tables"], bytes():
                asked = CreateTableRequest.model_validate_json(body)
                made = self.catalog.create_table(
                    f"{namespace}.{asked.name}",
                    asked.table_schema,
                    asked.location,
                    asked.partition_spec or PartitionSpec(),
                    properties=asked.properties,
                )
                return _table(made)
            case ["namespaces", namespace, "tables", name], None:
                return _table(self.catalog.load_table(f"{namespace}.{name}"))
            case ["namespaces", namespace, "tables", name], bytes():
                change = CommitTableRequest.model_validate_json(body)
                table = self.catalog.load_table(f"{namespace}.{name}")
                self.catalog.commit_table(table, change.requirements, change.updates)
                return _table(self.catalog.load_table(f"{namespace}.{name}"))
        raise NoSuchTableError(f"{self.command} {self.path}")


def _table(table: Table) -> dict[str, Any]:
    metadata = json.loads(table.metadata.model_dump_json())
    return {"metadata-location": table.metadata_location, "metadata": metadata, "config": {}}

"""The HTTP port of a cluster's registries: any of them will do, the next one is asked when one is not there."""

from __future__ import annotations

import http.client
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

from headrace import errors
from headrace.errors import HeadraceError, OperatorError


@dataclass(frozen=True, slots=True)
class KeptSetting:
    """A cluster-wide setting; `revision` is what a change of it can be bound to."""

    name: str
    value: str
    revision: int


class Registries:
    """Each call goes to the first registry that takes it."""

    def __init__(self, addresses: str, timeout_s: float = 30.0) -> None:
        self._addresses = [text for part in addresses.split(",") if (text := part.strip())]
        self._timeout_s = timeout_s

    def settings(self) -> list[KeptSetting]:
        return [KeptSetting(**found) for found in self.ask("GET", ("settings",))["settings"]]

    def setting(self, name: str) -> KeptSetting:
        return KeptSetting(**self.ask("GET", ("settings", name)))

    def set(self, name: str, value: str, revision: int | None = None) -> KeptSetting:
        """With a revision only if the setting has that one now; 0 is one that is not there."""
        return KeptSetting(**self.ask("PUT", ("settings", name), revision, value))

    def delete(self, name: str, revision: int | None = None) -> None:
        self.ask("DELETE", ("settings", name), revision)

    def ask(self, method: str, path: Sequence[str], revision: int | None = None, body: str | None = None) -> Any:
        target = "/" + "/".join(quote(part, safe="") for part in path)
        if revision is not None:
            target += "?" + urlencode({"revision": revision})
        failures = []
        for address in self._addresses:
            try:
                connection = http.client.HTTPConnection(address, timeout=self._timeout_s)
                connection.connect()
            except (OSError, http.client.InvalidURL) as error:
                failures.append(f"{address}: {getattr(error, 'strerror', None) or error}")
                continue
            try:
                connection.request(method, target, None if body is None else body.encode())
                return _read(connection.getresponse())
            except (OSError, http.client.HTTPException) as error:
                if method != "GET":
                    raise OperatorError(
                        f"the registry at {address} was lost before it answered ({error}): the change may have been "
                        "made; read the setting before trying again"
                    ) from None
                failures.append(f"{address}: {error}")
            finally:
                connection.close()
        told = "; ".join(failures) or "none was named"
        raise OperatorError(f"no registry answers ({told}): name its HTTP port by --registry, or start one")


def _read(answer: http.client.HTTPResponse) -> Any:
    try:
        found = json.loads(answer.read())
    except ValueError:
        raise OperatorError(f"what answers there is no registry: status {answer.status}, and no JSON") from None
    if answer.status < http.client.BAD_REQUEST:
        return found
    told = found.get("error", {}) if isinstance(found, dict) else {}
    kind = getattr(errors, str(told.get("kind")), OperatorError)
    if not (isinstance(kind, type) and issubclass(kind, HeadraceError)):
        kind = OperatorError
    raise kind(told.get("message", f"the registry answers with status {answer.status}"))

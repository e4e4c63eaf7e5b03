"""S3-compatible storage as a process of its own: moto's server, from PyPI. It dies with the test process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from brokers import DIES_WITH_PARENT, wait_for

BUCKET = "archives"
REQUEST_DEADLINE_S = 30.0


class S3Server:
    """`environment` is what programs need to find it; it has one bucket."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "s3.log"
        command = [*DIES_WITH_PARENT, sys.executable, "-m", "moto.server", "--host", "127.0.0.1", "--port", "0"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.endpoint = wait_for("the store to listen", self._listening)
        self.environment = {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "tests",
            "AWS_SECRET_ACCESS_KEY": "of an archive",
            "AWS_REGION": "eu-north-1",
            # For tests that open a table with deltalake alone.
            "AWS_ALLOW_HTTP": "true",
            # Else machines that are not Amazon's are looked for.
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        self.request("PUT", BUCKET, b"<CreateBucketConfiguration/>")

    def _listening(self) -> str | None:
        assert self._process.poll() is None, self._log.read_text()
        found = re.search(r"Running on (http://127\.0\.0\.1:\d+)", self._log.read_text())
        return found[1] if found else None

    def request(self, method: str, path: str, body: bytes | None = None) -> bytes:
        asked = urllib.request.Request(f"{self.endpoint}/{path}", body, method=method)
        with urllib.request.urlopen(asked, timeout=REQUEST_DEADLINE_S) as answer:
            found: bytes = answer.read()
        return found

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def in_environment(variables: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)

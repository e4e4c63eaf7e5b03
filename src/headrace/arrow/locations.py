"""Where an archive lies: in a folder, or in S3-compatible storage as `s3://BUCKET/PREFIX`.

`location` makes a path of either. An `ObjectPath` is a path whose operations are requests to the store, as far as
archives have use for them; all others are refused. Its settings are those of the AWS tools, from the environment:

    AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN   or what else those tools find, as a machine's role
    AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL                         a store that is not Amazon's; http:// is allowed
    AWS_REGION, AWS_DEFAULT_REGION                                us-east-1 if there is none
    AWS_VIRTUAL_HOSTED_STYLE_REQUEST                              true where the bucket stands in the host's name

What survives: an object is there as a whole once the store has answered its upload, and before that it is not to be
seen; there is nothing to sync. A version of a Delta table is an object that is made only if there is none of its name
(`If-None-Match`), so of two that commit the same version one fails. A store that does not know that condition is unfit
for an archive. Parts of an upload that was cut off stay in the store until a rule of the bucket removes them.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Generator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path, PosixPath
from typing import Any, Final, NoReturn

import pyarrow.parquet as pq
from deltalake import DeltaTable
from pyarrow import fs

from headrace.errors import OperatorError

SCHEMES: Final = ("s3://", "s3a://")
CONNECT_TIMEOUT_S: Final = 5.0
REQUEST_TIMEOUT_S: Final = 20.0
ATTEMPTS: Final = 3
CHECK_TIMEOUT_S: Final = 5.0
CHECK_ATTEMPTS: Final = 2
_PLAIN: Final = re.compile(r"[A-Za-z0-9._=/-]+")
"""`deltalake` writes other letters of a name in several ways, and then does not find what it wrote."""
_STYLES: Final = re.compile("\x1b\\[[0-9;]*m|↳")


def location(given: str | Path) -> Path:
    """A folder, or a place in a store; OperatorError for another kind of address."""
    if isinstance(given, Path):
        return given
    for scheme in SCHEMES:
        if given.startswith(scheme):
            path = ObjectPath("s3:", given.removeprefix(scheme))
            if len(path.parts) < 2 or not _PLAIN.fullmatch(path.key):
                raise OperatorError(
                    f"{given} is not understood: write s3://BUCKET/PREFIX, with letters, digits, and ._=-"
                )
            return path
    if "://" in given:
        raise OperatorError(f"{given} is neither a folder nor s3://BUCKET/PREFIX")
    return Path(given)


class ObjectPath(PosixPath):
    """An object of a store, or all that begin with a name and a slash, which takes the part of a folder."""

    __slots__ = ()

    def __str__(self) -> str:
        # What is relative to another has no bucket.
        return f"s3://{self.key}" if self.parts[:1] == ("s3:",) else "/".join(self.parts)

    @property
    def key(self) -> str:
        """With the bucket, as pyarrow names it."""
        return "/".join(self.parts[1:])

    def check(self, timeout_s: float = CHECK_TIMEOUT_S) -> None:
        """OperatorError unless the store answers soon and has the bucket."""
        bucket, where = self.parts[1], _endpoint() or "Amazon S3"
        try:
            (found,) = _store(timeout_s, CHECK_ATTEMPTS).get_file_info([bucket])
        except OSError as error:
            raise OperatorError(
                f"{self} cannot be reached at {where}: {one_line(error)}; see to AWS_ENDPOINT_URL, AWS_REGION, and the "
                "credentials in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            ) from None
        if found.type == fs.FileType.NotFound:
            raise OperatorError(f"there is no bucket {bucket} at {where}: make it, or give another s3://BUCKET/PREFIX")

    def resolve(self, strict: bool = False) -> ObjectPath:
        return self

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        (found,) = _store().get_file_info([self.key])
        if found.type == fs.FileType.NotFound:
            raise FileNotFoundError(2, "there is no such object", str(self))
        mode = stat.S_IFREG if found.is_file else stat.S_IFDIR
        at_s = int((found.mtime_ns or 0) / 1e9)
        return os.stat_result((mode, 0, 0, 1, 0, 0, found.size or 0, at_s, at_s, at_s))

    def iterdir(self) -> Generator[ObjectPath, None, None]:
        return self._listed(recursive=False)

    def glob(self, pattern: str) -> Generator[ObjectPath, None, None]:
        """A pattern of one name."""
        return (path for path in self._listed(recursive=False) if fnmatchcase(path.name, pattern))

    def rglob(self, pattern: str) -> Generator[ObjectPath, None, None]:
        return (path for path in self._listed(recursive=True) if fnmatchcase(path.name, pattern))

    def _listed(self, recursive: bool) -> Generator[ObjectPath, None, None]:
        chosen = fs.FileSelector(self.key, allow_not_found=True, recursive=recursive)
        return (ObjectPath("s3:", each.path) for each in _store().get_file_info(chosen))

    def read_text(self, encoding: str | None = None, errors: str | None = None) -> str:
        with _store().open_input_stream(self.key) as stream:
            text: bytes = stream.read()
        return text.decode(encoding or "utf-8", errors or "strict")

    def write_text(
        self, data: str, encoding: str | None = None, errors: str | None = None, newline: str | None = None
    ) -> int:
        """As one object, in the place of what was there."""
        with _store().open_output_stream(self.key) as stream:
            stream.write(data.encode(encoding or "utf-8", errors or "strict"))
        return len(data)

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            _store().delete_file(self.key)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        """There are no folders."""

    def _refused(self, *_: Any, **__: Any) -> NoReturn:
        raise OperatorError(f"{self} is in a store: this can only be done in a folder")

    open = touch = rename = replace = rmdir = symlink_to = chmod = _refused


def parquet_source(path: str | Path) -> Any:
    """What pyarrow reads a Parquet file from."""
    found = location(path)
    return _store().open_input_file(found.key) if isinstance(found, ObjectPath) else found


def parquet_writer(path: Path, schema: Any, **how: Any) -> pq.ParquetWriter:
    """The file is there when the writer is closed."""
    if isinstance(path, ObjectPath):
        return pq.ParquetWriter(path.key, schema, filesystem=_store(), **how)
    return pq.ParquetWriter(path, schema, **how)


def bytes_written(path: Path, writer: pq.ParquetWriter) -> int:
    """By a writer that is not closed."""
    return int(writer.file_handle.tell()) if isinstance(path, ObjectPath) else path.stat().st_size


def delta_table(path: str | Path) -> DeltaTable:
    found = location(path)
    return DeltaTable(str(found), storage_options=delta_options(found))


def is_delta_table(path: str | Path) -> bool:
    found = location(path)
    return bool(DeltaTable.is_deltatable(str(found), delta_options(found)))


def delta_options(path: Path) -> dict[str, str] | None:
    """For `deltalake`, which reads the rest from the environment itself."""
    if not isinstance(path, ObjectPath):
        return None
    options = {
        "aws_conditional_put": "etag",
        "aws_region": _region(),
        "connect_timeout": f"{CONNECT_TIMEOUT_S:g}s",
        "timeout": f"{REQUEST_TIMEOUT_S:g}s",
        "max_retries": str(ATTEMPTS),
        "retry_timeout": f"{ATTEMPTS * REQUEST_TIMEOUT_S:g}s",
    }
    if endpoint := _endpoint():
        options |= {"aws_endpoint_url": endpoint, "aws_allow_http": str(endpoint.startswith("http://")).lower()}
    return options


def one_line(error: Exception) -> str:
    """What `deltalake` and pyarrow say over many lines, in colours."""
    return " ".join(_STYLES.sub("", str(error)).split())


def _store(timeout_s: float = REQUEST_TIMEOUT_S, attempts: int = ATTEMPTS) -> fs.S3FileSystem:
    virtual_hosted = os.environ.get("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "").lower() == "true"
    return _store_at(_endpoint(), _region(), virtual_hosted, timeout_s, attempts)


@cache
def _store_at(endpoint: str, region: str, virtual_hosted: bool, timeout_s: float, attempts: int) -> fs.S3FileSystem:
    scheme, _, host = endpoint.rpartition("://")
    chosen = {"scheme": scheme or "https", "endpoint_override": host.rstrip("/")} if host else {}
    return fs.S3FileSystem(
        region=region,
        force_virtual_addressing=virtual_hosted,
        connect_timeout=CONNECT_TIMEOUT_S,
        request_timeout=timeout_s,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=attempts),
        **chosen,
    )


def _endpoint() -> str:
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")


def _region() -> str:
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"

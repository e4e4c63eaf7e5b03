"""What an archive's folder remembers of the query that fills it, and who may fill it now.

    checkpoints/archive/            Spark's checkpoint
    checkpoints/archive/query.json  {"query": name of its transactions in the tables, "identity": what it archives}
    archive.json                    {"id": the archive's own, "topics": {name: topic id}}
    archive.lock                    locked by the process that runs; its id is inside

`query.json` is written before the query first starts and never changed, so after a crash the batches that Spark runs
again bear the name they had. A query with other topics or another schema gets a new name and a new checkpoint, and goes
on from the offsets in the tables; the former checkpoint is removed. So does one whose tables were set back to an older
version. `archive.json` outlives checkpoints: offsets of a topic mean nothing in one of the same name that was made
later.

Spark can write its checkpoint to a folder only. That of an archive in a store is in a folder of the driver's machine,
as is the lock, and the archive has a copy of `query.json` and of the last batch in Spark's logs for those who read it.
Two machines that fill one archive are kept apart by the tables: whoever commits an offset that is there already is
refused.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from headrace.arrow import iceberg
from headrace.arrow.locations import ObjectPath
from headrace.arrow.stored_table import FILE_SINK_LOG
from headrace.errors import DataFolderError, OperatorError
from headrace.pipelines import archive_tables, delta, durable
from headrace.pipelines.archive_tables import RECORDS
from headrace.spark.progress import Position

log = logging.getLogger(__name__)

CHECKPOINT: Final = Path("checkpoints") / "archive"
APART: Final = Path(".headrace") / "checkpoints"
"""Where checkpoints of archives in a store are, unless it is said."""
STATE: Final = "query.json"
ORIGIN: Final = "archive.json"
LOCK: Final = "archive.lock"
OURS: Final = (RECORDS, "checkpoints", ORIGIN, LOCK)
KINDS: Final = {"delta": "a Delta table", "iceberg": "an Iceberg table", "parquet": "a Parquet archive"}


@dataclass(frozen=True, slots=True)
class Query:
    """`identity` is all that may not change within a checkpoint; `is_new` if Spark has not run it yet."""

    name: str
    identity: dict[str, Any]
    is_new: bool


@dataclass(frozen=True, slots=True)
class Origin:
    """The archive's own id, and those of the topics that it has records of, or is about to have."""

    id: str
    topics: dict[str, str]


def checkpoint_of(archive: Path) -> Path:
    """Where Spark keeps the checkpoint of an archive of which nothing else is said."""
    if isinstance(archive, ObjectPath):
        return (APART / re.sub(r"[^\w.-]", "-", f"archive-{archive.key}")).resolve()
    return archive / CHECKPOINT


@contextmanager
def locked(archive: Path, checkpoint: Path | None = None) -> Iterator[None]:
    """Hold the archive alone, or at least its checkpoint. The lock goes with the process, however that ends."""
    checkpoint = checkpoint or checkpoint_of(archive)
    if "%" in str(archive):
        # deltalake takes %20 in a path for a blank.
        raise DataFolderError(f"{archive} has a % in its name, which Delta tables do not bear; give another --to")
    lock = archive / LOCK
    try:
        if isinstance(archive, ObjectPath):
            archive.check()
            durable.make_folder(checkpoint.parent)
            lock = checkpoint.with_name(f"{checkpoint.name}.lock")
        durable.make_folder(archive)
        if not any((archive / name).exists() for name in OURS) and any(archive.iterdir()):
            raise DataFolderError(f"{archive} holds something else than an archive; give another folder with --to")
        lock.touch()
    except OSError as error:
        told = error.strerror or error
        raise DataFolderError(f"{archive} cannot be written: {told}; give another folder with --to") from None

    def taken(by: str) -> DataFolderError:
        return DataFolderError(f"{archive} is being written by another archive, process {by}; wait for it, or stop it")

    with durable.locked(lock, taken):
        yield


def known_identity(archive: Path) -> dict[str, Any] | None:
    """What the last query archived, if the folder knows."""
    found = _load(archive / CHECKPOINT)
    return None if found is None else found.identity


def origin(archive: Path, checkpoint: Path | None = None) -> Origin:
    """As the archive remembers it, with topics that only Spark's checkpoint knows the id of; else with a new id."""
    path = archive / ORIGIN
    topics = _checkpoint_ids(checkpoint or checkpoint_of(archive))
    try:
        found = json.loads(path.read_text())
        return Origin(str(found.get("id") or secrets.token_hex(8)), topics | dict(found["topics"]))
    except FileNotFoundError:
        return Origin(secrets.token_hex(8), topics)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OperatorError(
            f"{path} cannot be read: {error}; bring it back from a copy, or give another --to"
        ) from None


def remember(archive: Path, known: Origin) -> None:
    """On disk when this returns."""
    durable.save_json(archive / ORIGIN, {"id": known.id, "topics": known.topics})


def publish(archive: Path, checkpoint: Path) -> None:
    """Tell those who read the archive which batch was the last, where they do not see the checkpoint: after the last
    records of a topic may come offsets that have none."""
    if checkpoint == archive / CHECKPOINT:
        return
    done = max((int(path.name) for path in (checkpoint / "commits").glob("[0-9]*") if path.name.isdigit()), default=-1)
    if done < 0:
        return
    for log in ("offsets", "commits"):
        copies = archive / CHECKPOINT / log
        older = [path for path in copies.glob("[0-9]*") if path.name != str(done)]
        durable.make_folder(copies)
        (copies / str(done)).write_text((checkpoint / log / str(done)).read_text())
        for path in older:
            path.unlink(missing_ok=True)


def _checkpoint_ids(checkpoint: Path) -> dict[str, str]:
    """Of the last batch that Spark has planned. Its file has a version, a line about the query, and one per source."""
    planned = [path for path in (checkpoint / "offsets").glob("[0-9]*") if path.name.isdigit()]
    if not planned:
        return {}
    lines = max(planned, key=lambda path: int(path.name)).read_text().splitlines()
    try:
        return dict(Position.from_json(lines[2]).ids)
    except (IndexError, ValueError, AttributeError):
        # Spark itself says what is wrong with it.
        return {}


def begin(archive: Path, checkpoint: Path, identity: dict[str, Any]) -> Query:
    """The query of the checkpoint if it has this identity, else a new one that the tables can be handed over to."""
    former = _load(checkpoint)
    if former is None and _has_entries(checkpoint):
        raise OperatorError(f"{checkpoint} is a checkpoint, but none of an archive; move it away")
    _refuse_other_kinds(archive, identity["format"])
    if identity["format"] == "parquet":
        _check_plain(archive, former, identity)
    if former is not None and not former.is_new and not _has_entries(archive / RECORDS):
        raise OperatorError(
            f"{archive} has a checkpoint, but its table {RECORDS}/ is gone; remove {checkpoint.parent} "
            "to archive from the beginning, or give another --to"
        )
    is_behind = former is not None and archive_tables.is_behind(archive, checkpoint, former.name)
    if former is not None and former.identity == identity and not is_behind:
        return former
    if former is not None:
        if is_behind:
            log.warning("%s was set back to an older version: archiving goes on from what it has", archive / RECORDS)
        elif archive_tables.half_committed(archive):
            raise OperatorError(
                f"{archive} was interrupted in the middle of a batch; run it once with the topics and schema that it "
                f"had ({json.dumps(former.identity)}), then with others"
            )
        archive_tables.sweep(archive, former.name)
        shutil.rmtree(checkpoint)
    query = Query(secrets.token_hex(8), identity, True)
    for folder in {archive / CHECKPOINT, checkpoint}:
        durable.save_json(folder / STATE, {"query": query.name, "identity": query.identity})
    return query


def _refuse_other_kinds(archive: Path, kind: str) -> None:
    """Before the checkpoint of what is there goes."""
    there = None
    if iceberg.where(archive) is not None:
        there = "iceberg"
    elif delta.exists(archive / RECORDS):
        there = "delta"
    elif (archive / RECORDS / FILE_SINK_LOG).exists():
        there = "parquet"
    if there not in (None, kind):
        raise OperatorError(f"{archive / RECORDS} holds {KINDS[there]}; give --format {there}, or another --to")


def _check_plain(archive: Path, former: Query | None, identity: dict[str, Any]) -> None:
    """Spark's file sink counts batches itself; a new checkpoint beside its old log would leave out the first ones."""
    if (archive / RECORDS / FILE_SINK_LOG).exists() and (former is None or former.identity != identity):
        told = "its checkpoint is gone" if former is None else f"its checkpoint is of {json.dumps(former.identity)}"
        raise OperatorError(f"{archive} holds Parquet files of an archive, and {told}; give another --to")


def _has_entries(folder: Path) -> bool:
    return folder.exists() and any(folder.iterdir())


def _load(checkpoint: Path) -> Query | None:
    path = checkpoint / STATE
    try:
        found = json.loads(path.read_text())
        started = (checkpoint / "metadata").exists()
        return Query(str(found["query"]), dict(found["identity"]), not started)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError) as error:
        raise OperatorError(f"{path} cannot be read: {error}; remove {path.parent} to go on from the tables") from None

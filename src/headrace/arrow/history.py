"""The whole history of a topic: what an archive has of it, and from an exact offset of each partition on, the broker.

A `History` is one version of an archive's tables. `ends` are its cuts: of every partition the next offset that is not
archived. Whoever reads the files that it lists below its cuts, and the broker from the cuts on, has every record once,
also while the archive goes on, and while the broker deletes what is archived. Records that could not be decoded when
they were archived are read from where they were put aside; they have no `timestampType`.

An archive may have begun later than the broker's log (`pipeline archive --starting latest`): what comes before its
first record of a partition (`begin`) is the broker's alone.

Behind the last record of a partition there may be markers of transactions, and records of aborted ones, which nobody
archives, and a broker deletes them too. So the cut is where Spark's last finished batch ended, if that is later, and if
the table has that batch. One that was set back to an older version, by `restore` or a copy, is cut behind its own last
records: what follows is the broker's, or lost.

Records of a batch are archived in two tables, those put aside first. So the table of what was put aside is looked at
last, and as it was when it had no batch that the table of records has not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable

from headrace.arrow import iceberg
from headrace.arrow.archive import (
    WRITER,
    Bounds,
    File,
    drops_values,
    list_files,
    open_records,
    root_of,
    row_group_bounds,
)
from headrace.arrow.locations import ObjectPath, delta_table, is_delta_table, location, parquet_source
from headrace.arrow.table_version import Place, TableVersion, looked_into
from headrace.errors import OperatorError, SettingError
from headrace.records.arrow import BATCH_ROWS, TYPES, schema

RECORDS: Final = "records"
DEAD_LETTERS: Final = "dead_letters"
RESTORE: Final = "RESTORE"
"""The operation that sets a Delta table back."""
ORIGIN: Final = "archive.json"
CHECKPOINT: Final = "checkpoints/archive"
COLUMNS: Final = ("topic", "partition", "offset", "timestamp", "timestampType", "key", "value", "headers")
BATCH_BYTES: Final = 8 << 20
"""Of rows that are read at once, by the mean of their row group."""

Spans = dict[int, tuple[int, int]]
"""By partition, offsets from the first up to but not the second."""


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one file: those of a topic with offsets in the spans of their partitions."""

    path: str
    size_bytes: int
    topic: str
    spans: Spans
    put_aside: bool = False
    """Its records could not be decoded when they were archived."""


class History:
    """One version of the archive in a folder; an OperatorError says what is there instead."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = location(folder)
        if isinstance(self.folder, ObjectPath):
            self.folder.check()
        # Before the tables are looked at: they have all that is finished.
        finished = _finished(self.folder)
        self._tables = _tables(self.folder)
        self.ends: dict[Place, int] = {}
        set_back = self._tables[0].is_set_back()
        if finished is not None and not set_back:
            self.ends = finished.ends_of(self._tables[0].transaction_version(finished.query))
        # What was put aside behind the last record says nothing of the records that are gone.
        for table in self._tables[:1] if set_back else self._tables:
            for place, offset in table.next_offsets().items():
                self.ends[place] = max(self.ends.get(place, 0), offset)
        self._files = [(table, file) for table in self._tables for file in table.files()]
        self._starts: dict[Place, int] | None = None

    def check(self, ids: Mapping[str, str], columns: Iterable[str]) -> None:
        """SettingError unless these columns can be had; OperatorError if a topic is not that which was archived."""
        missing = [name for name in columns if name not in COLUMNS]
        if missing:
            raise SettingError(f"column {missing[0]!r} is not in an archive; it has {', '.join(COLUMNS)}")
        if "value" in columns and drops_values(self.folder):
            raise SettingError(f"the archive {self.folder} was made without values; leave out column value")
        known = self.topic_ids()
        for topic, now in ids.items():
            if known.get(topic, now) != now:
                raise OperatorError(
                    f"the archive {self.folder} has records of a topic {topic} with id {known[topic]}, which was made "
                    f"anew since: its id is {now}; read the topic without its history, or the archive alone"
                )

    def topic_ids(self) -> dict[str, str]:
        """In hex, of the topics that were archived."""
        try:
            return dict(json.loads((self.folder / ORIGIN).read_text())["topics"])
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise OperatorError(f"{self.folder / ORIGIN} cannot be read: {error}") from None

    def starts(self) -> dict[Place, int]:
        """The first offset of each partition that is archived."""
        if self._starts is None:
            self._starts = {}
            for table, file in self._files:
                for place, offset in _firsts(table.root, file):
                    self._starts[place] = min(self._starts.get(place, offset), offset)
        return self._starts

    def begin(self, place: Place) -> int:
        """Before which nothing of a partition is archived."""
        return self.starts().get(place, self.ends.get(place, 0))

    def first_at(self, place: Place, at_ms: int) -> int | None:
        """The offset of the first record not before a time; None if none of those archived is."""
        topic, partition = place
        found: int | None = None
        for part in self.parts(topic, {partition: (0, self.ends.get(place, 0))}, from_ms=at_ms):
            for rows in read_part(part, ("offset", "timestamp"), checked_from_ms=at_ms):
                late = rows.filter(pc.greater_equal(rows["timestamp"], _moment(at_ms)))
                if len(late):
                    least = pc.min(late["offset"]).as_py()
                    found = least if found is None else min(found, least)
        return found

    def next_at(self, place: Place, offset: int) -> int | None:
        """Where, at this offset or after it, the next record may be; None if there is none any more."""
        topic, partition = place
        span = (offset, self.ends.get(place, 0))
        starts = [
            max(offset, (file.bounds.offset or span)[0])
            for _, file in self._files
            if file.topic in (topic, "") and _touches(file.bounds, partition, span)
        ]
        return min(starts, default=None)

    def chosen_offsets(
        self, place: Place, span: tuple[int, int], where: str, *, put_aside: bool = False
    ) -> pa.ChunkedArray:
        """Offsets of records in a span of which a condition in SQL is true; of those put aside, or of the others."""
        from deltalake import QueryBuilder

        records = self._tables[1 if put_aside else 0]
        if not isinstance(records, DeltaVersion):
            raise SettingError(f"a condition in SQL needs a Delta archive, and {self.folder} is in Iceberg")
        topic = place[0].replace("'", "''")
        within = f'"partition" = {place[1]} and "offset" >= {span[0]} and "offset" < {span[1]}'
        query = f"select \"offset\" from records where topic = '{topic}' and {within} and ({where})"
        try:
            rows = pa.table(QueryBuilder().register("records", records.table).execute(query).read_all())
        except Exception as error:  # noqa: BLE001 - its errors have no class in common
            raise SettingError(f"the condition {where!r} cannot be asked: {error}") from None
        return rows["offset"]

    def parts(self, topic: str, spans: Spans, *, from_ms: int | None = None) -> list[Part]:
        """Files that may have rows of these spans, as far as they are archived, in the order of their offsets. Files
        whose records are all before a time are left out."""
        cut = {n: (first, min(end, self.ends.get((topic, n), 0))) for n, (first, end) in spans.items()}
        found: list[tuple[tuple[int, int], Part]] = []
        for table, file in self._files:
            if file.topic not in (topic, ""):
                continue
            bounds = file.bounds
            if from_ms is not None and bounds.timestamp is not None and bounds.timestamp[1] + 999 < from_ms * 1000:
                continue
            touched = {n: span for n, span in cut.items() if _touches(bounds, n, span)}
            if touched:
                order = (bounds.partition or (0, 0))[0], (bounds.offset or (0, 0))[0]
                path, aside = str(table.root / file.path), table is not self._tables[0]
                found.append((order, Part(path, file.size_bytes, topic, touched, aside)))
        return [part for _, part in sorted(found, key=lambda each: each[0])]


def covering(folder: str | Path, log_starts: Callable[[], Mapping[Place, int]]) -> tuple[History, Mapping[Place, int]]:
    """An archive that reaches to where logs begin, if it ever does, and where they begin. Logs are looked at after the
    archive, and both again where a log has deleted what was archived in between."""
    history, starts = History(folder), log_starts()
    while any(history.ends.get(place, start) < start for place, start in starts.items()):
        before, history, starts = history, History(folder), log_starts()
        if history.ends == before.ends:
            break
    return history, starts


def read_part(
    part: Part,
    columns: Sequence[str],
    batch_rows: int = BATCH_ROWS,
    *,
    checked_from_ms: int | None = None,
) -> Iterator[pa.RecordBatch]:
    """The rows of a part, in the order of the file, fewer at once where they are large. With a time, row groups that
    end before it are passed over."""
    try:
        opened = pq.ParquetFile(parquet_source(part.path), pre_buffer=False)
    except FileNotFoundError:
        raise OperatorError(
            f"{part.path} is gone: the archive was compacted and vacuumed while it was read; try again"
        ) from None
    with opened:
        inside = set(opened.schema_arrow.names)
        for number, bounds in row_group_bounds(opened):
            if checked_from_ms is not None and bounds.timestamp and bounds.timestamp[1] + 999 < checked_from_ms * 1000:
                continue
            if not any(_touches(bounds, n, span) for n, span in part.spans.items()):
                continue
            whole = "topic" not in inside and _is_within(bounds, part.spans)
            needed = {*columns, *(() if whole else ("topic", "partition", "offset"))} & inside
            group = opened.metadata.row_group(number)
            fitting = BATCH_BYTES * group.num_rows // max(1, group.total_byte_size)
            for rows in opened.iter_batches(max(1, min(batch_rows, fitting)), [number], sorted(needed)):
                kept = rows if whole else rows.filter(_mask(rows, part))
                if len(kept):
                    yield _shaped(kept, part.topic, columns)


class DeltaVersion:
    """A table of an archive in Delta, at the version that was opened."""

    def __init__(self, table: DeltaTable) -> None:
        self.table = table
        self.root = root_of(table)

    def files(self) -> list[File]:
        return list_files(self.table)

    def paths(self) -> set[str]:
        return set(pa.table(self.table.get_add_actions())["path"].to_pylist())

    def named_paths(self) -> set[str]:
        """`deltalake` does not list files that were replaced; a checkpoint has those of a week, as the log does."""
        log = self.root / "_delta_log"
        newest = self.table.version()
        checkpoints = sorted(path for path in log.glob("*.checkpoint.parquet") if int(path.name[:20]) <= newest)
        found, since = self.paths(), -1
        if checkpoints:
            since = int(checkpoints[-1].name[:20])
            with pq.ParquetFile(parquet_source(checkpoints[-1])) as opened:
                removed = opened.read(columns=["remove.path"])["remove"].combine_chunks()
            found |= {unquote(path) for path in pc.struct_field(removed, "path").to_pylist() if path is not None}
        for version in range(since + 1, newest + 1):
            for line in (log / f"{version:020}.json").read_text().splitlines():
                if '"remove"' in line and (action := json.loads(line).get("remove")) is not None:
                    found.add(unquote(action["path"]))
        return found

    def transaction_version(self, app_id: str) -> int | None:
        known: int | None = self.table.transaction_version(app_id)
        return known

    def last_writer(self) -> tuple[str, int] | None:
        return next((_writer(commit) for commit in self.table.history() if WRITER in commit), None)

    def is_set_back(self) -> bool:
        """The log goes on when a table is restored, with a commit that says so. Rows that somebody deletes are meant to
        be gone."""
        for version in range(self.table.version(), -1, -1):
            actions = _actions(self.table, version)
            if not actions or any(WRITER in action.get("commitInfo", {}) for action in actions):
                return False
            if any(action.get("commitInfo", {}).get("operation") == RESTORE for action in actions):
                return True
        return False

    def next_offsets(self, topics: Iterable[str] | None = None) -> dict[Place, int]:
        return next_offsets(self.table, topics)


def _writer(commit: Mapping[str, Any]) -> tuple[str, int]:
    name, _, batch = str(commit[WRITER]).rpartition(" ")
    return name, int(batch)


def next_offsets(table: DeltaTable, topics: Iterable[str] | None = None) -> dict[Place, int]:
    """One more than the last offset that the table has, for each partition it has anything of.

    From the statistics in the log, in columns: a table may have tens of thousands of files, and every commit asks. A
    file of several partitions, as compaction may make them, is looked into.
    """
    files = pa.table(table.get_add_actions(flatten=True))
    topic, last_topic = _column(files, "partition.topic", "min.topic"), _column(files, "partition.topic", "max.topic")
    partition, last_offset = _column(files, "min.partition"), _column(files, "max.offset")
    single = pc.and_(pc.equal(topic, last_topic), pc.equal(partition, _column(files, "max.partition")))
    single = pc.and_(pc.fill_null(single, False), pc.is_valid(last_offset))
    known = pa.table({"topic": topic, "partition": partition, "offset": last_offset}).filter(single)
    mixed = pa.table({"path": files["path"], "topic": _column(files, "partition.topic")}).filter(pc.invert(single))
    if topics is not None:
        asked = pa.array(list(topics), pa.string())
        known = known.filter(pc.is_in(known["topic"], asked))
        mixed = mixed.filter(pc.or_(pc.is_null(mixed["topic"]), pc.is_in(mixed["topic"], asked)))
    found: dict[Place, int] = {}
    opened = (looked_into(root_of(table), file["path"], file["topic"]) for file in mixed.to_pylist())
    for rows in (known, *opened):
        for row in rows.group_by(["topic", "partition"]).aggregate([("offset", "max")]).to_pylist():
            place = (row["topic"], row["partition"])
            found[place] = max(found.get(place, 0), row["offset_max"] + 1)
    return found


def _column(files: pa.Table, *names: str) -> pa.ChunkedArray:
    """The first of these columns that is there; nulls if none is, as in a table without statistics."""
    for name in names:
        if name in files.column_names:
            column = files[name]
            return column.cast(pa.string()) if name.endswith("topic") else column
    return pa.chunked_array([pa.nulls(len(files), pa.string() if names[0].endswith("topic") else pa.int64())])


def _firsts(root: Path, file: File) -> Iterator[tuple[Place, int]]:
    bounds = file.bounds
    if file.topic and bounds.partition and bounds.offset and bounds.partition[0] == bounds.partition[1]:
        yield (file.topic, bounds.partition[0]), bounds.offset[0]
        return
    rows = looked_into(root, file.path, file.topic or None).group_by(["topic", "partition"])
    for row in rows.aggregate([("offset", "min")]).to_pylist():
        yield (row["topic"], row["partition"]), row["offset_min"]


@dataclass(frozen=True, slots=True)
class _Finished:
    """The last batch that Spark's checkpoint has in its log of commits."""

    checkpoint: Path
    query: str
    batch: int
    ends: dict[Place, int]

    def ends_of(self, archived: int | None) -> dict[Place, int]:
        """Where it ended, or that batch before it which a table has as its last."""
        if archived is None:
            return {}
        return self.ends if archived >= self.batch else _planned_ends(self.checkpoint, archived)


def _finished(folder: Path) -> _Finished | None:
    checkpoint = folder / CHECKPOINT
    done = [int(path.name) for path in (checkpoint / "commits").glob("[0-9]*") if path.name.isdigit()]
    if not done:
        return None
    try:
        query = str(json.loads((checkpoint / "query.json").read_text())["query"])
    except (OSError, ValueError, KeyError):
        return None  # the tables know how far it is, but for what is no record
    return _Finished(checkpoint, query, max(done), _planned_ends(checkpoint, max(done)))


def _planned_ends(checkpoint: Path, batch: int) -> dict[Place, int]:
    """Where a batch was to end: its offsets are as those of Spark's Kafka source, with more under names that no topic
    can bear, in the last line of three."""
    try:
        planned = json.loads((checkpoint / "offsets" / str(batch)).read_text().splitlines()[2])
    except (OSError, ValueError, IndexError):
        return {}
    topics = {name: ends for name, ends in planned.items() if " " not in name}
    return {(topic, int(partition)): end for topic, ends in topics.items() for partition, end in ends.items()}


def _tables(folder: Path) -> list[TableVersion]:
    """Records, and what was put aside, if anything was."""
    known = iceberg.where(folder)
    if known is None:
        records = open_records(folder)
        return [DeltaVersion(records), *map(DeltaVersion, _put_aside(folder, records))]
    kept = iceberg.open_version(folder, known, RECORDS)
    if kept is None:
        raise OperatorError(f"the Iceberg catalog of {folder} has no table {known.namespace}.{RECORDS}")
    aside = iceberg.open_version(folder, known, DEAD_LETTERS)
    if aside is not None and aside.is_set_back():
        raise _dead_letters_lost(folder)

    def is_kept(writer: tuple[str, int]) -> bool:
        batch = kept.transaction_version(writer[0])
        return batch is not None and writer[1] <= batch

    return [kept] if aside is None else [kept, aside.before(is_kept)]


def _put_aside(folder: Path, records: DeltaTable) -> list[DeltaTable]:
    """The table of records that could not be decoded, without those of batches that the table of records has not."""
    path = folder / DEAD_LETTERS
    if not is_delta_table(path):
        return []
    table = delta_table(path)
    if DeltaVersion(table).is_set_back():
        raise _dead_letters_lost(folder)
    newest = version = table.version()
    for number in range(newest, -1, -1):
        writer = _writer_of(table, number)
        if writer is not None:
            known = records.transaction_version(writer[0])
            if known is not None and writer[1] <= known:
                break
            version = number - 1
    if version != newest:
        table.load_as_version(version)
    return [table]


def _dead_letters_lost(folder: Path) -> OperatorError:
    return OperatorError(
        f"{folder / DEAD_LETTERS} was set back to an older version, and lacks records that could not be decoded: bring "
        "it to its newest version again, or read the topic without its history"
    )


def _writer_of(table: DeltaTable, version: int) -> tuple[str, int] | None:
    infos = [info for action in _actions(table, version) if (info := action.get("commitInfo")) is not None]
    return next((_writer(info) for info in infos if WRITER in info), None)


def _actions(table: DeltaTable, version: int) -> list[dict[str, Any]]:
    """Of one commit, from the log itself: `history` numbers those of an older version wrongly. None if it is gone."""
    try:
        lines = (root_of(table) / "_delta_log" / f"{version:020}.json").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line]


def _touches(bounds: Bounds, partition: int, span: tuple[int, int]) -> bool:
    if span[0] >= span[1] or (bounds.partition and not bounds.partition[0] <= partition <= bounds.partition[1]):
        return False
    return bounds.offset is None or (bounds.offset[0] < span[1] and bounds.offset[1] >= span[0])


def _is_within(bounds: Bounds, spans: Spans) -> bool:
    """Whether no row has to be looked at to know that it is in the spans."""
    if bounds.partition is None or bounds.offset is None or bounds.partition[0] != bounds.partition[1]:
        return False
    first, end = spans.get(bounds.partition[0], (0, 0))
    return first <= bounds.offset[0] and bounds.offset[1] < end


def _mask(rows: pa.RecordBatch, part: Part) -> Any:
    of_partition = [
        reduce(
            pc.and_,
            (
                pc.equal(rows["partition"], partition),
                pc.greater_equal(rows["offset"], first),
                pc.less(rows["offset"], end),
            ),
        )
        for partition, (first, end) in part.spans.items()
    ]
    chosen = reduce(pc.or_, of_partition)
    return pc.and_(chosen, pc.equal(rows["topic"], part.topic)) if "topic" in rows.schema.names else chosen


def _shaped(rows: pa.RecordBatch, topic: str, columns: Sequence[str]) -> pa.RecordBatch:
    """The columns as the source has them: in order, with the topic, nulls where the file has no such column."""
    names = rows.schema.names
    arrays = []
    for name in columns:
        if name in names and name != "topic":
            found = rows[name]
            arrays.append(found if found.type == TYPES[name] else found.cast(TYPES[name]))
        elif name == "topic":
            arrays.append(pa.repeat(pa.scalar(topic, TYPES["topic"]), len(rows)))
        else:
            arrays.append(pa.nulls(len(rows), TYPES[name]))
    return pa.RecordBatch.from_arrays(arrays, schema=schema(columns))


def _moment(at_ms: int) -> pa.Scalar:
    return pa.scalar(at_ms * 1000, TYPES["timestamp"])

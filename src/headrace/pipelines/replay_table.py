"""What a replay takes from a Delta or Parquet table: its rows in the order of its files, as a mapping of columns says.

A replay has come to the number of the next row. With it is kept the state of the table that was replayed first: a Delta
table is read at that version to the end, whatever is written to it meanwhile; of Parquet the files have to be the same.
So are a digest of what was asked, so that no other question goes on under its name, and what times were meant.

A condition in SQL is asked of each window of rows, as a Delta table in a temporary folder: `deltalake` asks only such.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, QueryBuilder, write_deltalake

from headrace.arrow.record_columns import RecordColumns
from headrace.arrow.stored_table import Snapshot, StoredTable
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.operations import create_topic
from headrace.client.errors import UnknownTopic
from headrace.errors import OperatorError, SettingError
from headrace.pipelines.replay import Reached, Window
from headrace.pipelines.replay_archive import chosen_rows

PARTITIONS_MADE_MAX: Final = 1000
"""A column that was mapped by mistake makes no topic of a million partitions."""
NUMBER: Final = "_headrace_row"


@dataclass(frozen=True, slots=True)
class TableReplay:
    """`columns` are those of the table by field of a record; none: those that have their names."""

    table: Path
    bootstrap: str
    to: str
    columns: Mapping[str, str] = field(default_factory=dict)
    from_ms: int | None = None
    until_ms: int | None = None
    key: bytes | None = None
    where: str | None = None
    rate: float | None = None
    name: str = ""
    period: tuple[str | None, str | None] | None = None
    """The times as they were typed."""

    @property
    def target(self) -> str:
        return self.to

    @property
    def asked(self) -> str:
        """A digest of the question; at what rate is no part of it."""
        columns = sorted(self.columns.items())
        chosen = (columns, *(self.period or (self.from_ms, self.until_ms)), self.key, self.where)
        return hashlib.sha256(repr((str(self.table.resolve()), self.to, *chosen)).encode()).hexdigest()[:12]

    @property
    def replay(self) -> str:
        return self.name or f"{self.to}-{self.asked}"

    def source(self) -> TableSource:
        return TableSource(self)


class TableSource:
    def __init__(self, options: TableReplay) -> None:
        self._options = options
        self._at = 0
        self._period = options.from_ms, options.until_ms
        self._open(None)

    def _open(self, snapshot: Snapshot | None) -> None:
        options = self._options
        self._table = StoredTable(options.table, snapshot)
        self._columns = RecordColumns(options.columns, self._table.schema)
        for flag, given, needed in (
            ("--from", options.from_ms, "timestamp"),
            ("--until", options.until_ms, "timestamp"),
            ("--key", options.key, "key"),
        ):
            if given is not None and self._columns.column_of(needed) is None:
                raise SettingError(f"{flag} needs a column: name it as --columns {needed}=COLUMN")
        self._read = self._columns.needed
        if options.where is not None:
            # More than the condition means is no harm: it names columns, and perhaps the words of a text.
            named = [name for name in self._table.schema.names if name.lower() in options.where.lower()]
            self._read = [name for name in self._table.schema.names if name in {*self._read, *named}]
            self._condition = [name for name in named if _storable(self._table.schema.field(name))]
            self._numbers(self._table.schema.empty_table().select(self._condition))

    def check(self, cluster: Cluster) -> None:
        """Nothing that a broker knows hinders it."""

    def go_on(self, reached: Reached) -> None:
        snapshot, self._at = Snapshot.of_json(reached["table"]), int(reached["row"])
        if reached["asked"] != self._options.asked:
            raise OperatorError(
                f"the replay {self._options.replay} was begun with another table, topic, mapping or choice of rows; "
                "go on with the same, or give this one another --name"
            )
        if snapshot != self._table.snapshot:
            try:
                self._open(snapshot)
            except OperatorError as error:
                raise OperatorError(
                    f"the replay cannot go on from row {self._at}: {error}; --name begins another one"
                ) from None
        self._period = reached["from_ms"], reached["until_ms"]

    def make_target(self, cluster: Cluster) -> None:
        target, column = self._options.target, self._columns.column_of("partition")
        least, most = (self._table.bounds(column) or (0, -1)) if column is not None else (0, -1)
        if least < 0:
            raise OperatorError(f"partition={column}: the table has {least}, and partitions begin at 0")
        try:
            there = len(cluster.topic(target).partitions)
        except UnknownTopic:
            if most >= PARTITIONS_MADE_MAX:
                raise OperatorError(
                    f"partition={column}: the table has {most}; if that is meant, make the topic first: "
                    f"`headrace topic create {target} --partitions {most + 1}`"
                ) from None
            if most < 0:
                create_topic(cluster, target)
            else:
                create_topic(cluster, target, partitions=most + 1)
            return
        if there <= most:
            raise OperatorError(
                f"topic {target} has {there} partitions, and column {column!r} has partition {most}: enlarge it with "
                f"`headrace topic alter {target} --partitions {most + 1}`, or leave partition={column} out"
            )

    def windows(self, most_rows: int) -> Iterator[Window]:
        snapshot, at = self._table.snapshot, self._at
        from_ms, until_ms = self._period
        reached = {"asked": self._options.asked, "table": snapshot.as_json(), "from_ms": from_ms, "until_ms": until_ms}
        for first, found in self._table.windows(at, self._read, most_rows):
            rows, numbers = self._chosen(found)
            end = first + len(found)
            yield Window(
                rows,
                passed=len(found),
                reached={**reached, "row": end},
                told=f"at row {end:,} of {snapshot.rows:,}",
                place_of=lambda n, first=first, numbers=numbers: f"row {first + numbers[n].as_py()} of the table",  # type: ignore[misc]
            )

    def facts(self) -> Mapping[str, Any]:
        found: dict[str, Any] = {"table": str(self._options.table), "rows": self._table.rows}
        if self._table.snapshot.version is not None:
            found |= {"version": self._table.snapshot.version, "newest_version": self._table.newest_version}
        return found

    def _chosen(self, found: pa.Table) -> tuple[pa.Table, pa.Array]:
        """Records of the rows that are asked for, and the numbers of these among all of the window."""
        options = self._options
        numbers = pa.array(range(len(found)), pa.int64())
        if options.where is not None:
            numbers = self._numbers(found.select(self._condition))
            found = found.take(numbers)
        rows = self._columns.turn(found)
        chosen = chosen_rows(rows, *self._period, options.key)
        if not chosen:
            return rows, numbers
        mask = reduce(pc.and_, chosen)
        return rows.filter(mask), numbers.filter(mask.combine_chunks())

    def _numbers(self, rows: pa.Table) -> pa.Array:
        """Of the rows for which the condition is true, in order."""
        numbered = rows.append_column(NUMBER, pa.array(range(len(rows)), pa.int64()))
        with TemporaryDirectory(prefix="headrace-replay-") as folder:
            try:
                write_deltalake(folder, numbered)
                asked = f'select "{NUMBER}" from rows where ({self._options.where})'
                found = pa.table(QueryBuilder().register("rows", DeltaTable(folder)).execute(asked).read_all())
            except Exception as error:  # noqa: BLE001 - its errors have no class in common
                told = str(error).splitlines()[0]
                has = ", ".join(self._table.schema.names)
                raise SettingError(
                    f"the condition {self._options.where!r} cannot be asked: {told} The table has {has}"
                ) from None
        return found[NUMBER].combine_chunks().sort()


def _storable(column: pa.Field) -> bool:
    """Whether Delta has such a type."""
    kind = column.type
    return not (pa.types.is_time(kind) or pa.types.is_duration(kind) or pa.types.is_null(kind))

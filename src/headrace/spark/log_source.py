"""`format("headrace-log")`: the records of data folders, read without a broker. Nothing is changed.

    spark.read.format("headrace-log").option("topic", "orders").load("/var/lib/headrace")

`table=problems` gives, instead of records, one row for each place where a folder is not whole: `torn` (bytes behind
the last whole batch of a log, as a crash or a running broker leaves them), `corrupt` (a batch whose CRC, place or
records are wrong), `missing` (offsets that are not there), `removed` (deleted by a running broker before they were
read), `index`, `sum`, `epochs`, `snapshot`, `partition`, `checkpoint` (files beside the log; no row depends on
them). A folder may have either layout; `segment` is then a file of the partition, or of the commit log.

`mode=FAILFAST`, the default, fails on the first place from which records are gone that nobody deleted; a torn tail is
none. `mode=PERMISSIVE` leaves such places out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from headrace.errors import CorruptBatch
from headrace.records.arrow import TYPES
from headrace.spark.log_options import LogOptions, parse
from headrace.spark.log_plan import FolderCheck, LogProblem, Split, chosen, plan
from headrace.spark.log_reader import check_folder, read_split
from headrace.system.disk import SystemDisk

PROBLEMS: Final = pa.schema(
    [
        pa.field("folder", pa.string()),
        pa.field("topic", pa.string()),
        pa.field("partition", pa.int32()),
        pa.field("segment", pa.string()),
        pa.field("position", pa.int64()),
        pa.field("offset", pa.int64()),
        pa.field("kind", pa.string()),
        pa.field("reason", pa.string()),
    ]
)


def schema(options: LogOptions) -> pa.Schema:
    if options.table == "problems":
        return PROBLEMS
    return pa.schema([pa.field(name, TYPES.get(name, pa.string())) for name in options.columns])


class LogDataSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "headrace-log"

    def schema(self) -> StructType:
        options = parse(self.options)
        chosen(SystemDisk(), options)  # so that `load` already says what is not there
        return from_arrow_schema(schema(options))

    def reader(self, schema: StructType) -> DataSourceReader:
        return LogReader(parse(self.options))


class LogReader(DataSourceReader):
    def __init__(self, options: LogOptions) -> None:
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        planned = plan(SystemDisk(), self._options)
        found = [InputPartition(each) for each in (*planned.splits, *planned.checks)]
        if self._options.table == "problems" and planned.problems:
            found.append(InputPartition(planned.problems))
        return found

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return iter(self._read(partition.value))

    def _read(self, value: Any) -> Iterator[pa.RecordBatch]:
        if isinstance(value, Split) and self._options.table == "records":
            yield from self._records(value)
            return
        found: Iterable[object] = value or ()
        if isinstance(value, Split):
            found = read_split(value, ["offset"], thorough=True)
        elif isinstance(value, FolderCheck):
            found = check_folder(value)
        problems = [each for each in found if isinstance(each, LogProblem)]
        if problems:
            yield pa.RecordBatch.from_pylist(
                [{name: getattr(problem, name) for name in PROBLEMS.names} for problem in problems], schema=PROBLEMS
            )

    def _records(self, split: Split) -> Iterator[pa.RecordBatch]:
        for found in read_split(split, self._options.columns, isolation=self._options.isolation):
            if not isinstance(found, LogProblem):
                yield found
            elif found.fails and self._options.fail_fast:
                told = "option mode=PERMISSIVE leaves such places out, option table=problems lists them"
                raise CorruptBatch(f"{found}; {told}")

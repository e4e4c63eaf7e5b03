"""Topics as SQL views, made when a statement names them.

A view has the fields of the topic's JSON values as columns, then what every record has:

    _key string, _partition int, _offset bigint, _timestamp timestamp,
    _headers array<struct<key string, value string>>, _value string

Fields and types come from a given schema, else from a sample of the topic's first and last records; a topic whose
sample is not mostly JSON objects has the record columns alone. A value that does not fit has nulls, and `_value` as it
came. A field with the name of a record column gets one more underscore. Bytes that are no UTF-8 pass through strings
unchanged: `cast(_value as binary)` gives them back.

Spark compares names without regard to case, so topics whose names differ only in case are refused.
"""

from __future__ import annotations

import difflib
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Final

from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from headrace.client.admin.cluster import Cluster, Retry
from headrace.client.admin.fetch import Span, list_offsets, record_sets
from headrace.client.connection.metadata import Topic
from headrace.client.fetch_requests import EARLIEST, LATEST
from headrace.errors import OffsetOutOfRange, OperatorError
from headrace.pipelines.archive_tables import RECORDS_SCHEMA
from headrace.pipelines.statements import Statement
from headrace.records.arrow import Decoder
from headrace.records.isolation import Isolation
from headrace.spark import session
from headrace.spark.source import HeadraceSource

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

RECORD_COLUMNS: Final = ("_key", "_partition", "_offset", "_timestamp", "_headers", "_value")
SAMPLE_RECORDS: Final = 1000
SAMPLE_SET_BYTES: Final = 1 << 20
# A statement that names more topics than this is taken for a mistake.
VIEWS_MAX: Final = 1000
NEAR_NAMES_MAX: Final = 3
_AT_ONCE: Final = Retry(first_contact_ms=0)
"""Who types a statement hears at once that there is no broker."""
_NOT_FOUND: Final = "TABLE_OR_VIEW_NOT_FOUND"
_PART: Final = re.compile("`((?:[^`]|``)*)`")
_SOURCE_COLUMNS: Final = "key,value,partition,offset,timestamp,headers"


@dataclass(frozen=True, slots=True)
class TopicView:
    """How one topic is read: `schema` of its JSON values as DDL, or sampled if None; options go to the source."""

    schema: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)


Archived = Callable[[str], "DataFrame | None"]
"""The records of a topic in an archive, with the columns of the source; None if the archive does not have it."""


class Views:
    """The topics of one cluster in one session. Close it to drop the views that it made.

    Spark is asked for nothing that a statement can do without: what it does for the first time takes its JVM a second.
    So the format is registered with the first topic, and where the session ends anyway (`drops` is false) nobody asks
    which views there were before.
    """

    def __init__(
        self,
        spark: SparkSession,
        bootstrap: str,
        *,
        declared: Mapping[str, TopicView] | None = None,
        sample_records: int = SAMPLE_RECORDS,
        archived: Archived | None = None,
        history: str | None = None,
        told: Callable[[str], None] = lambda text: None,
        drops: bool = True,
    ) -> None:
        self.spark = spark
        self.bootstrap = bootstrap
        self.declared = dict(declared or {})
        self.sampled: dict[str, StructType] = {}
        self._sample_records = sample_records
        self._archived = archived
        self._history = {"history": history} if history else {}
        self._told = told
        self._made: list[str] = []
        self._made_of_archive: list[str] = []
        self._streamed: set[str] = set()
        self._registered = False
        self._views_before = self._views() if drops else None
        # Where Spark keeps views that are named with a prefix: `archive.orders`, as `headrace sql` sets it.
        self.archive_prefix: str = spark.conf.get("spark.sql.globalTempDatabase", "global_temp") or "global_temp"

    def close(self) -> None:
        """Drop the views of topics, and those that statements have made."""
        assert self._views_before is not None, "it is not to drop anything"
        for name in self._views() - self._views_before:
            self.spark.catalog.dropTempView(name)
        for name in self._made_of_archive:
            self.spark.catalog.dropGlobalTempView(name)

    def _views(self) -> set[str]:
        with _quiet_lookups():
            return {table.name for table in self.spark.catalog.listTables() if table.isTemporary}

    def topics(self, *, internal: bool = False) -> dict[str, Topic]:
        with Cluster(self.bootstrap, retry=_AT_ONCE, isolation=Isolation.COMMITTED) as cluster:
            found = cluster.retry(cluster.topology).topics
        return {name: topic for name, topic in sorted(found.items()) if internal or not topic.is_internal}

    def sql(self, statement: Statement) -> DataFrame:
        """Run a statement; topics that it names become views first, streams where it says STREAM."""
        if statement.begins("show", "tables") or statement.begins("show", "views"):
            return self._listing(statement)
        self._streamed |= statement.streamed()
        with _quiet_lookups():
            for _ in range(VIEWS_MAX):
                try:
                    return self.spark.sql(statement.text)
                except AnalysisException as error:
                    if isinstance(error, ParseException) or error.getCondition() != _NOT_FOUND:
                        raise
                    named = (error.getMessageParameters() or {}).get("relationName", "")
                    self._make([part.replace("``", "`") for part in _PART.findall(named)])
        raise OperatorError(f"the statement names more than {VIEWS_MAX} topics")

    def frame(self, topic: str, view: TopicView | None = None, *, stream: bool = False) -> DataFrame:
        """The rows of a topic as its view has them."""
        name = self._resolve(topic)
        if not self._registered:
            session.register_source(self.spark, HeadraceSource)
            self._registered = True
        chosen = view or self.declared.get(name) or TopicView()
        options = {"startingOffsets": "earliest", **chosen.options} if stream else dict(chosen.options)
        reader = (self.spark.readStream if stream else self.spark.read).format("headrace")
        source = reader.options(
            **{
                "kafka.bootstrap.servers": self.bootstrap,
                "subscribe": name,
                "columns": _SOURCE_COLUMNS,
                **self._history,
                **options,
            }
        )
        return columns_of(source.load(), self._schema(name, chosen))

    def _listing(self, statement: Statement) -> DataFrame:
        """`show tables [like 'pattern']`: every topic, and the views that earlier statements made."""
        pattern = statement.tokens[-1].name if statement.tokens[-1].kind == "string" else "*"
        rows: list[tuple[str, str, int | None]] = [
            (name, "topic", len(topic.partitions)) for name, topic in self.topics().items()
        ]
        made = {name.lower() for name in self._made}
        rows += [(name, "view", None) for name in sorted(self._views()) if name.lower() not in made]
        shown = [row for row in rows if any(fnmatch(row[0].lower(), each.lower()) for each in pattern.split("|"))]
        return self.spark.createDataFrame(shown, "name string, kind string, partitions int")

    def _make(self, parts: list[str]) -> None:
        if len(parts) == 2 and parts[0].lower() == self.archive_prefix and self._archived:
            rows = self._archived(parts[1])
            if rows is None:
                raise OperatorError(f"the archive has no topic {parts[1]!r}")
            # An archive without values has columns that were decoded from them.
            decoded = [name for name in rows.columns if name not in RECORDS_SCHEMA.names]
            view = columns_of(rows, self._schema_of_rows(rows, parts[1]), decoded)
            view.createOrReplaceGlobalTempView(_quote(parts[1]))
            self._made_of_archive.append(parts[1])
            return
        name = parts[0] if len(parts) == 1 else self._unquoted(parts)
        if any(made.lower() == name.lower() for made in self._made):
            raise OperatorError(f"Spark does not find the view of topic {name!r} that was made for it")
        stream = name.lower() in {streamed.lower() for streamed in self._streamed}
        self.frame(name, stream=stream).createOrReplaceTempView(_quote(name))
        self._made.append(name)

    def _unquoted(self, parts: list[str]) -> str:
        """`a.b` was written without backticks: a topic of that name is surely meant, but Spark reads a path."""
        name = ".".join(parts)
        if parts[0].lower() in ("archive", self.archive_prefix):
            raise OperatorError(f"{name} is a topic in an archive: say which with --archive DIR")
        if name in self.topics(internal=True):
            raise OperatorError(f"the name of topic {name} has a dot: write it in backticks, `{name}`")
        raise unknown_topic(name, self.topics())

    def _resolve(self, name: str) -> str:
        """The topic that a name means; Spark has lost the case of names by now."""
        topics = self.topics(internal=True)
        alike = [topic for topic in topics if topic.lower() == name.lower()]
        if not alike:
            raise unknown_topic(name, topics)
        if len(alike) > 1:
            raise OperatorError(f"topics {' and '.join(alike)} differ only in case, which SQL does not tell apart")
        return alike[0]

    def _schema(self, topic: str, view: TopicView) -> StructType | None:
        if view.schema is not None:
            try:
                given = StructType.fromDDL(view.schema)
            except (ParseException, AnalysisException) as error:
                raise OperatorError(f"the schema given for topic {topic} is not one:\n{words(error)}") from None
            if not isinstance(given, StructType):
                raise OperatorError(f"the schema given for topic {topic} is not one: write such as 'a int, b string'")
            return given
        if topic not in self.sampled:
            with Cluster(self.bootstrap, retry=_AT_ONCE, isolation=Isolation.COMMITTED) as cluster:
                values = sample(cluster, topic, self._sample_records)
            schema = infer(self.spark, values)
            self._told(
                f"{topic}: columns from a sample of {len(values)} records"
                if schema
                else f"{topic}: no columns besides {', '.join(RECORD_COLUMNS)}; its sample of {len(values)} is no JSON"
            )
            if schema is None:
                return None
            self.sampled[topic] = schema
        return self.sampled[topic]

    def _schema_of_rows(self, rows: DataFrame, topic: str) -> StructType | None:
        declared = self.declared.get(topic)
        if declared and declared.schema is not None:
            return self._schema(topic, declared)
        taken = rows.select("value").where("value is not null").limit(self._sample_records).collect()
        return infer(self.spark, [bytes(row[0]) for row in taken])


def columns_of(rows: DataFrame, schema: StructType | None, decoded: Sequence[str] = ()) -> DataFrame:
    """The columns of a view, from rows with those of the source; without a schema those that are `decoded` already."""
    headers = F.transform("headers", lambda each: F.struct(each["key"], each["value"].cast("string").alias("value")))
    record = [
        F.col("key").cast("string").alias("_key"),
        F.col("partition").alias("_partition"),
        F.col("offset").alias("_offset"),
        F.col("timestamp").alias("_timestamp"),
        headers.alias("_headers"),
        F.col("value").cast("string").alias("_value"),
    ]
    if schema is None or not schema.fields:
        return rows.select(*(F.col(_quote(name)).alias(_field(name)) for name in decoded), *record)
    # Of names that differ only in case, which SQL does not tell apart, the last stays; samples sort small letters last.
    distinct = {each.name.lower(): each for each in schema.fields}
    fields = [each for each in schema.fields if distinct[each.name.lower()] is each]
    parsed = F.from_json(F.col("value").cast("string"), StructType(fields)).alias("json")
    named = [F.col("json").getField(each.name).alias(_field(each.name)) for each in fields]
    return rows.select(parsed, *record).select(*named, *RECORD_COLUMNS)


def _field(name: str) -> str:
    return f"_{name}" if name.lower() in RECORD_COLUMNS else name


def sample(cluster: Cluster, topic: str, records: int) -> list[bytes]:
    """Values from both ends of every partition, about `records` together; nulls are left out."""
    numbers = [partition.index for partition in cluster.topic(topic).partitions]
    starts = list_offsets(cluster, topic, dict.fromkeys(numbers, EARLIEST))
    ends = list_offsets(cluster, topic, dict.fromkeys(numbers, LATEST))
    share = max(1, records // (2 * len(numbers)))
    values: list[bytes] = []
    for number in numbers:
        start, end = starts[number].offset, ends[number].offset
        first_end = min(start + share, end)
        for span in (
            Span(topic, number, start, first_end),
            Span(topic, number, max(first_end, end - share), end),
        ):
            values += _values(cluster, span)
    return values


def _values(cluster: Cluster, span: Span) -> list[bytes]:
    decoder = Decoder(span.topic, span.partition, ("value",))
    try:
        return [
            value
            for fetched in record_sets(cluster, span, SAMPLE_SET_BYTES)
            for batch in decoder.decode(fetched.records, span.first_offset, span.next_offset, hidden=fetched.hidden)
            for value in batch.column(0).to_pylist()
            if value is not None
        ]
    except OffsetOutOfRange:
        # Retention was faster; the other spans are sample enough.
        return []


def infer(spark: SparkSession, values: list[bytes]) -> StructType | None:
    """Spark's own merge of the types of JSON objects; None if fewer than half of the values are such."""
    texts = [(value.decode(),) for value in values if _is_object(value)]
    if not texts or 2 * len(texts) < len(values):
        return None
    return spark.read.json(spark.createDataFrame(texts, "value string"), mode="DROPMALFORMED").schema


def _is_object(value: bytes) -> bool:
    try:
        return isinstance(json.loads(value), dict)
    except ValueError:
        return False


def unknown_topic(name: str, topics: Iterable[str]) -> OperatorError:
    by_lower = {topic.lower(): topic for topic in topics}
    near = [by_lower[found] for found in difflib.get_close_matches(name.lower(), by_lower, NEAR_NAMES_MAX)]
    hint = f"did you mean {' or '.join(near)}?" if near else "`show tables` lists the topics there are"
    return OperatorError(f"there is no topic or view {name!r}; {hint}")


def words(error: Exception) -> str:
    """What Spark says of a bad statement, with the place in it, without plans and stack traces."""
    text = re.sub(r"^An error occurred while calling [\w.]+\n: (?:[\w.$]+: )?", "", str(error))
    for cut in ("\n\nJVM stacktrace:", "\n\tat ", ";\n'", "\n\n\n"):
        text = text.partition(cut)[0]
    return text.strip()


def _quote(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


@contextmanager
def _quiet_lookups() -> Iterator[None]:
    """A name that Spark does not know yet is no error here; its logger would print each with a stack trace."""
    logger = logging.getLogger("SQLQueryContextLogger")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before

"""JSON values as columns beside the record they came from, and a reason where that cannot be.

A record without a value (a tombstone) has nulls in all of them. A value that is no JSON object, or has a field of
another type than the schema says, gets a reason. A field with the name of a record's own column gets an underscore
before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.errors import PySparkException
from pyspark.sql import functions as F
from pyspark.sql import types as T

from headrace.client.admin.cluster import Cluster
from headrace.errors import OperatorError
from headrace.pipelines.archive_sink import REASON
from headrace.pipelines.archive_tables import PARTITIONED_BY, RECORD_COLUMNS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pyspark.sql import DataFrame, SparkSession

SAMPLE_RECORDS: Final = 1000
BLANKS: Final = " \t\r\n"
CORRUPT: Final = "_headrace_corrupt"
TAKEN: Final = {name.lower() for name in (*RECORD_COLUMNS, *PARTITIONED_BY, REASON)}
STORABLE: Final = (
    T.StringType, T.BinaryType, T.BooleanType, T.ByteType, T.ShortType, T.IntegerType, T.LongType, T.FloatType,
    T.DoubleType, T.DecimalType, T.DateType, T.TimestampType,
)  # fmt: skip


def given_schema(ddl: str) -> T.StructType:
    """A schema written as DDL, such as `user string, amount double`; needs a session."""
    try:
        found = T.StructType.fromDDL(ddl)
    except (PySparkException, ValueError) as error:
        raise OperatorError(f"--schema {ddl!r} is not understood: {str(error).splitlines()[0]}") from None
    if not isinstance(found, T.StructType):
        raise OperatorError(f"--schema {ddl!r} is one type; write columns such as `user string, amount double`")
    return _checked(found, "--schema")


def sampled_schema(spark: SparkSession, cluster: Cluster, topics: Iterable[str]) -> T.StructType:
    """A schema that fits a sample of all topics together."""
    from headrace.pipelines.views import infer, sample

    topics = list(topics)
    values = [value for topic in topics for value in sample(cluster, topic, SAMPLE_RECORDS)]
    found = infer(spark, values)
    if found is None:
        told = "there are no records to sample" if not values else f"of {len(values)} sampled, most are no JSON objects"
        raise OperatorError(f"no schema for {', '.join(topics)}: {told}; give one with --schema")
    return _checked(found, "the sampled schema")


def _checked(schema: T.StructType, origin: str) -> T.StructType:
    names = [field.name.lower() for field in schema]
    for field in schema:
        if names.count(field.name.lower()) > 1:
            raise OperatorError(f"{origin} has {field.name!r} twice (case does not count); give another with --schema")
        wrong = next(_unstorable(field.dataType), None)
        if wrong is not None:
            raise OperatorError(
                f"{origin}: {field.name} is {wrong}, which the table cannot hold; use string or timestamp"
            )
    return schema


def _unstorable(kind: T.DataType) -> Iterator[str]:
    match kind:
        case T.StructType():
            for field in kind:
                yield from _unstorable(field.dataType)
        case T.ArrayType():
            yield from _unstorable(kind.elementType)
        case T.MapType():
            yield from _unstorable(kind.keyType)
            yield from _unstorable(kind.valueType)
        case _ if not isinstance(kind, STORABLE):
            yield kind.simpleString()


def columns(schema: T.StructType) -> list[T.StructField]:
    """What the fields are called in the table."""
    return [T.StructField(_column(field.name), field.dataType, True) for field in schema]


def _column(name: str) -> str:
    return f"_{name}" if name.lower() in TAKEN else name


def decode(rows: DataFrame, schema: T.StructType, *, drop_value: bool) -> DataFrame:
    """Record columns, those of the schema, and `reason`. Dead letters keep their value whatever `drop_value` says."""
    text = F.col("value").cast("string")
    wanted = T.StructType([*schema, T.StructField(CORRUPT, T.StringType())])
    how = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": CORRUPT}
    parsed = rows.withColumn("_json", F.from_json(text, wanted, how))
    fits = F.col("_json").isNotNull() & F.col("_json").getField(CORRUPT).isNull()
    # Spark's parser stops after the object and leaves unread what follows it.
    ends = F.rtrim(text, F.lit(BLANKS)).endswith("}")
    reason = (
        F.when(F.col("value").isNull(), F.lit(None))
        .when(~F.is_valid_utf8(text), F.lit("the value is not UTF-8"))
        .when(fits & ends, F.lit(None))
        .when(fits, F.lit("the value goes on after its JSON"))
        .when(F.try_parse_json(text).isNull(), F.lit("the value is not JSON"))
        .otherwise(F.lit(f"the value does not fit {schema.simpleString()}"))
    )
    judged = parsed.withColumn(REASON, reason.cast("string"))
    value = F.when(F.col(REASON).isNotNull(), F.col("value")) if drop_value else F.col("value")
    decoded = [F.col("_json").getField(field.name).alias(_column(field.name)) for field in schema]
    record = [value.alias("value") if name == "value" else F.col(name) for name in RECORD_COLUMNS]
    return judged.select(*record, *decoded, REASON)

"""A user's job: what it reads and where it writes, from a file of SQL or of Python.

A job is read once, at the start: it declares its outputs, and `run` starts a streaming query for each. SQL jobs are
Spark SQL with four statements more:

    create topic view NAME [(FIELD TYPE, ...)] [options (NAME = 'VALUE', ...)]      how a topic is read
    insert into topic NAME [options (mode = 'update')] SELECT                       rows become JSON records
    insert into table 'PATH' [partitioned by (COLUMN, ...)] SELECT                  a Delta table
    set, create temporary view, declare                                             as in Spark

`from stream orders` reads a topic as a stream, `from orders` as it is when a batch runs. `watermark _timestamp delay of
interval 1 minute` after the name is Spark's own. `${name}` and `${name:default}` are replaced by --set.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from pyspark.sql import functions as F

from headrace.errors import OperatorError
from headrace.pipelines.statements import Statement, Token, split, substitute
from headrace.pipelines.views import TopicView, Views

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Mode = Literal["append", "update", "complete"]
MODES: Final = ("append", "update", "complete")
RECORD_PARTS: Final = ("_key", "_value", "_headers", "_timestamp", "_partition")
PASSED_ON: Final = ("set", "reset", "create", "declare", "drop")
HEADERS: Final = "array<struct<key: string, value: binary>>"


@dataclass(frozen=True, slots=True)
class Output:
    """One query of a job. `name` is that of its checkpoint; `rows` are as the sink takes them."""

    name: str
    kind: Literal["topic", "table"]
    target: str
    rows: DataFrame
    mode: Mode = "append"
    partition_by: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)


class Topics:
    """What a job in Python is given: `def job(topics): ...`.

    `topics.spark` is the session, `topics.settings` what came with --set. What is written is started when the function
    returns; all of it together is the job.
    """

    def __init__(self, views: Views, settings: Mapping[str, str] | None = None, folder: Path | None = None) -> None:
        self.spark: SparkSession = views.spark
        self.settings = dict(settings or {})
        self.outputs: list[Output] = []
        self._views = views
        self._folder = folder or Path.cwd()

    def read(self, topic: str, schema: str | None = None, **options: str) -> DataFrame:
        """A topic as it is when a batch runs, for joins: its JSON fields, and _key, _offset and the like."""
        return self._views.frame(topic, _view(schema, options))

    def read_stream(self, topic: str, schema: str | None = None, **options: str) -> DataFrame:
        """A topic from its beginning on. `schema` is DDL; without it fields are guessed once and then kept."""
        return self._views.frame(topic, _view(schema, options), stream=True)

    def sql(self, statement: str) -> DataFrame:
        """One statement of Spark SQL, where every topic is a view: `select ... from stream orders`."""
        (parsed,) = split(statement)
        return self._views.sql(parsed)

    def write(self, rows: DataFrame, topic: str, *, mode: Mode = "append", **options: str) -> None:
        """Rows to a topic, as the sink writes them: exactly once, if the broker can. Columns become fields of a JSON
        value, but for _key, _headers, _timestamp and _partition, which are the record's own; a column _value is the
        value as it is."""
        self._add(Output(f"topic-{_slug(topic)}", "topic", topic, records_of(rows), mode, options=options))

    def write_table(self, rows: DataFrame, path: str, *, partition_by: Sequence[str] = ()) -> None:
        """Rows to a Delta table, each once; a relative path counts from the folder of the job's file."""
        if "://" in path:
            raise OperatorError(f"table {path} cannot be written: a job's tables are in folders that all machines see")
        target = (self._folder / path).resolve()
        self._add(Output(f"table-{_slug(target.name)}", "table", str(target), rows, partition_by=tuple(partition_by)))

    def declare(self, topic: str, view: TopicView) -> None:
        self._views.declared[topic] = view

    def _add(self, output: Output) -> None:
        if not output.rows.isStreaming:
            raise OperatorError(
                f"what goes to {output.kind} {output.target} reads no stream: write `from stream TOPIC` in SQL, "
                "or use read_stream in Python"
            )
        if output.mode not in MODES:
            raise OperatorError(f"mode {output.mode!r} of {output.target} is not known; write {', '.join(MODES)}")
        if any(known.name == output.name for known in self.outputs):
            raise OperatorError(
                f"the job has two outputs called {output.name}: unite what goes to one topic, and put tables "
                "into folders of different names"
            )
        self.outputs.append(output)


def _view(schema: str | None, options: Mapping[str, str]) -> TopicView | None:
    return TopicView(schema, options) if schema is not None or options else None


def records_of(rows: DataFrame) -> DataFrame:
    """Rows as the sink for topics takes them: key, value, and headers, timestamp, partition where they are given."""
    if "_offset" in rows.columns:
        rows = rows.drop("_offset")
    fields = [name for name in rows.columns if name not in RECORD_PARTS]
    if "_value" in rows.columns and fields:
        raise OperatorError(
            f"_value is the whole value of a record, but there is {fields[0]} as well: select one of them"
        )
    if "_value" not in rows.columns and not fields:
        raise OperatorError("a record needs a value: select _value, or fields that become JSON")
    value = (
        F.col("_value") if "_value" in rows.columns else F.to_json(F.struct(*[F.col(f"`{name}`") for name in fields]))
    )
    parts = [value.cast("binary").alias("value")]
    kinds = {"_key": "binary", "_headers": HEADERS, "_timestamp": "timestamp", "_partition": "int"}
    parts += [F.col(name).cast(kind).alias(name[1:]) for name, kind in kinds.items() if name in rows.columns]
    return rows.select(*parts)


def load(path: Path, topics: Topics) -> None:
    """Let the file declare its outputs."""
    text = read(path)
    if path.suffix == ".sql":
        for statement in split(substitute(text, topics.settings)):
            try:
                _take(statement, topics)
            except OperatorError as error:
                raise OperatorError(f"{path}, line {statement.line}: {error}") from None
    else:
        _function(path)(topics)
    if not topics.outputs:
        raise OperatorError(f"{path} writes nothing: a job needs an output, such as `insert into topic x select ...`")


def read(path: Path) -> str:
    if path.suffix not in (".sql", ".py"):
        raise OperatorError(f"{path} is no job: the name of a job's file ends in .sql or .py")
    try:
        return path.read_text()
    except OSError as error:
        raise OperatorError(f"{path} cannot be read: {error.strerror}") from None


def fingerprint(path: Path, settings: Mapping[str, str]) -> str:
    """The same for jobs that differ only in comments and layout."""
    text = read(path)
    if path.suffix == ".sql":
        meant = "\n".join(statement.fingerprint for statement in split(substitute(text, settings)))
    else:
        try:
            meant = ast.dump(ast.parse(text)) + repr(sorted(settings.items()))
        except SyntaxError as error:
            raise OperatorError(f"{path}, line {error.lineno}: {error.msg}") from None
    return hashlib.blake2b(meant.encode(), digest_size=16).hexdigest()


def _function(path: Path) -> Callable[[Topics], object]:
    spec = importlib.util.spec_from_file_location(f"headrace_job_{_slug(path.stem).replace('-', '_')}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Callable[[Topics], object] | None = getattr(module, "job", None)
    if not callable(found):
        raise OperatorError(f"{path} has no function `job`: write `def job(topics): ...`")
    return found


def _take(statement: Statement, topics: Topics) -> None:
    tokens = statement.tokens
    if statement.begins("create", "topic", "view"):
        _declare(statement, topics)
    elif statement.begins("insert", "into", "topic") and len(tokens) > 3:
        options, rest = _options(statement, 4)
        mode = options.pop("mode", "append")
        topics.write(topics.sql(_select(statement, rest)), tokens[3].name, mode=mode, **options)  # type: ignore[arg-type]
    elif statement.begins("insert", "into", "table") and len(tokens) > 3 and tokens[3].kind == "string":
        columns, rest = _partitioned_by(statement, 4)
        topics.write_table(topics.sql(_select(statement, rest)), tokens[3].name, partition_by=columns)
    elif statement.begins("insert"):
        raise OperatorError("write `insert into topic NAME select ...` or `insert into table 'PATH' select ...`")
    elif tokens[0].word in PASSED_ON:
        topics.sql(statement.text)
    else:
        raise OperatorError(f"a job cannot do anything with `{tokens[0].text}`; its results go out by insert into")


def _select(statement: Statement, index: int) -> str:
    if index >= len(statement.tokens):
        raise OperatorError("the insert has no select")
    return statement.rest(index)


def _declare(statement: Statement, topics: Topics) -> None:
    tokens = statement.tokens
    if len(tokens) < 4:
        raise OperatorError("write `create topic view NAME (FIELD TYPE, ...)`")
    at, schema = 4, None
    if at < len(tokens) and tokens[at].text == "(":
        end = _closing(tokens, at)
        schema = statement.text[tokens[at].at + 1 : tokens[end].at]
        at = end + 1
    options, at = _options(statement, at)
    if at < len(tokens):
        raise OperatorError(f"`{tokens[at].text}` is not understood after `create topic view {tokens[3].text}`")
    topics.declare(tokens[3].name, TopicView(schema, options))


def _options(statement: Statement, at: int) -> tuple[dict[str, str], int]:
    """`options (a = 'x', b 'y')`, if it is there, and the token after it."""
    tokens = statement.tokens
    if at + 1 >= len(tokens) or tokens[at].word != "options" or tokens[at + 1].text != "(":
        return {}, at
    end = _closing(tokens, at + 1)
    inside = [token for token in tokens[at + 2 : end] if token.text not in (",", "=")]
    if len(inside) % 2 or any(token.kind != "string" for token in inside[1::2]):
        raise OperatorError("write options as `options (name = 'value', ...)`")
    return {name.name: value.name for name, value in zip(inside[::2], inside[1::2], strict=True)}, end + 1


def _partitioned_by(statement: Statement, at: int) -> tuple[list[str], int]:
    tokens = statement.tokens
    if at + 2 >= len(tokens) or (tokens[at].word, tokens[at + 1].word) != ("partitioned", "by"):
        return [], at
    end = _closing(tokens, at + 2)
    return [token.name for token in tokens[at + 3 : end] if token.text != ","], end + 1


def _closing(tokens: Sequence[Token], opening: int) -> int:
    depth = 0
    for nth in range(opening, len(tokens)):
        depth += {"(": 1, ")": -1}.get(tokens[nth].text, 0)
        if depth == 0:
            return nth
    raise OperatorError("a parenthesis is not closed")


def _slug(name: str) -> str:
    return re.sub(r"[^\w.-]", "-", name)

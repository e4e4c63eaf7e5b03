"""Options of format("headrace"), without Spark: what is read from them, and how a wrong one is told."""

from __future__ import annotations

import pytest

from headrace.client.fetch_requests import EARLIEST, LATEST
from headrace.errors import SettingError
from headrace.spark import options, sink
from headrace.spark.options import Bound, SourceOptions
from headrace.spark.source import HeadraceSource
from proving import proves


def parsed(streaming: bool = False, **given: str) -> SourceOptions:
    chosen = {"subscribe": "orders"} if not {"subscribe", "subscribePattern", "assign"} & set(given) else {}
    named = {name.replace("__", "."): value for name, value in given.items()}
    return options.parse({**chosen, **named}, streaming=streaming)


def refused(streaming: bool = False, **given: str) -> str:
    with pytest.raises(SettingError) as error:
        parsed(streaming, **given)
    return str(error.value)


def test_names_come_in_any_case() -> None:
    lower = options.parse({"subscribe": "a, b,a", "startingoffsets": "Latest"}, streaming=False)
    assert lower.topics.names == ("a", "b")
    assert lower.start == Bound(offset=LATEST)
    assert options.parse({"SUBSCRIBE": "a,b", "startingOffsets": "latest"}, streaming=False) == lower


def test_a_batch_starts_at_the_beginning_and_a_stream_at_the_end() -> None:
    assert parsed().start == Bound(offset=EARLIEST)
    assert parsed().end == Bound(offset=LATEST)
    assert parsed(streaming=True).start == Bound(offset=LATEST)


def test_bounds_per_partition_and_their_precedence() -> None:
    bounds = parsed(startingOffsets='{"orders": {"0": 7, "1": -2}}', endingOffsets='{"orders": {"0": -1, "1": 9}}')
    assert bounds.start == Bound(offsets={"orders": {0: 7, 1: EARLIEST}})
    assert bounds.end == Bound(offsets={"orders": {0: LATEST, 1: 9}})
    by_time = parsed(startingOffsetsByTimestamp='{"orders": {"0": 1700000000000}}', startingOffsets="earliest")
    assert by_time.start == Bound(times_ms={"orders": {0: 1700000000000}})
    assert parsed(startingTimestamp="5", startingOffsetsByTimestamp='{"orders": {"0": 6}}').start == Bound(time_ms=5)


def test_a_kafka_jobs_other_options_are_taken_or_ignored() -> None:
    chosen = parsed(
        streaming=True,
        kafka__bootstrap__servers="a:1,b:2",
        kafka__group__id="mine",
        kafka__max__poll__records="500",
        kafka__security__protocol="PLAINTEXT",
        failOnDataLoss="False",
        maxOffsetsPerTrigger="100",
        minOffsetsPerTrigger="10",
        maxTriggerDelay="2m",
        timeout="1500",
    )
    assert (chosen.bootstrap, chosen.group_id, chosen.fail_on_data_loss) == ("a:1,b:2", "mine", False)
    assert (chosen.max_offsets, chosen.min_offsets, chosen.trigger_delay_ms) == (100, 10, 120_000)
    assert chosen.timeout_ms == 1500


@proves("S1")
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"startingOfsets": "latest"}, "unknown option 'startingofsets'; did you mean startingOffsets?"),
        ({"kafka__fetch__max": "5"}, "unknown option 'kafka.fetch.max'"),
        ({"kafka__security__protocol": "SSL"}, "option kafka.security.protocol=SSL is not served; only PLAINTEXT is"),
        ({"subscribe": "a", "assign": "{}"}, "subscribe and assign were given"),
        ({"subscribe": " , "}, "option subscribe is empty; write topics such as orders,payments"),
        ({"subscribePattern": "a("}, "option subscribePattern='a(' is not a regular expression"),
        ({"assign": "[1]"}, 'write JSON such as {"orders": [0, 1]}'),
        ({"assign": '{"a": ["x"]}'}, "option assign="),
        ({"startingOffsets": "first"}, "option startingOffsets='first' is not understood; write earliest, latest or"),
        ({"startingOffsets": '{"a": {"0": -3}}'}, "option startingOffsets gives -3 for a-0"),
        ({"startingOffsets": '{"a": {"0": true}}'}, "option startingOffsets="),
        ({"endingOffsets": "earliest"}, "option endingOffsets=earliest would read nothing"),
        ({"endingOffsets": '{"a": {"0": -2}}'}, "option endingOffsets gives -2 (earliest) for a-0"),
        ({"startingTimestamp": "yesterday"}, "write milliseconds since 1970"),
        ({"maxOffsetsPerTrigger": "0"}, "option maxOffsetsPerTrigger='0' is not understood; write a number above 0"),
        ({"maxOffsetsPerTrigger": "5", "minOffsetsPerTrigger": "9"}, "minOffsetsPerTrigger=9 is above"),
        ({"maxTriggerDelay": "soon"}, "write such as 15m, 10s or 500ms"),
        ({"failOnDataLoss": "yes"}, "option failOnDataLoss='yes' is not understood; write true or false"),
        ({"columns": "key,valu"}, "option columns has 'valu'; write some of key,value,topic"),
        ({"startingOffsetsByTimestampStrategy": "x"}, "write error or latest"),
        ({"kafka__bootstrap__servers": "host:port"}, "'host:port' is not an address; write host:port"),
    ],
)
def test_a_wrong_option_is_told_with_what_to_write(given: dict[str, str], told: str) -> None:
    assert told in refused(False, **given)


def test_a_stream_has_no_end() -> None:
    assert "option endingOffsets has no meaning for a stream" in refused(streaming=True, endingOffsets="latest")


def test_nothing_to_read_is_told() -> None:
    with pytest.raises(SettingError, match="one of the options subscribe, subscribePattern and assign is needed"):
        options.parse({}, streaming=False)


def test_columns_in_the_order_asked_for() -> None:
    assert parsed(columns="Offset, value,digest").columns == ("offset", "value", "digest")
    assert parsed(columns="offset", includeHeaders="true").columns == ("offset", "headers")
    assert parsed(includeHeaders="true").columns[-1] == "headers"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"topik": "t"}, "unknown option 'topik'; did you mean topic?"),
        ({"kafka.acks": "1"}, "option kafka.acks=1 is not served"),
        ({"kafka.compression.type": "brotli"}, "write none, gzip, snappy, lz4, zstd"),
    ],
)
def test_a_wrong_option_of_the_sink_is_told(given: dict[str, str], told: str) -> None:
    with pytest.raises(SettingError) as error:
        sink.parse(given)
    assert told in str(error.value)


def test_a_session_without_our_settings_gets_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = HeadraceSource({"subscribe": "t"})
    monkeypatch.setenv("PYTHON_UNIX_DOMAIN_ENABLED", "true")
    source.schema()
    assert caplog.text == ""
    monkeypatch.setenv("PYTHON_UNIX_DOMAIN_ENABLED", "false")
    source.schema()
    source.schema()
    (line,) = caplog.messages
    assert "spark.python.unix.domain.socket.enabled=true" in line

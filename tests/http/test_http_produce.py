"""Producing over HTTP: one record or many, as bytes, JSON or lines of JSON; what is refused and how it is told."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from brokers import wait_for
from headrace.http import bodies
from headrace.records.partitioner import partition_for_key
from http_port import HttpPort
from proving import proves

BINARY = "application/octet-stream"
EVERY_BYTE = bytes(range(256))


def fetched(port: HttpPort, topic: str, partition: int = 0) -> list[dict[str, Any]]:
    answer = port.get(f"/topics/{topic}/partitions/{partition}/records?count=10000&max_bytes=8000000")
    assert answer.status == 200, answer.body
    records: list[dict[str, Any]] = answer.json["records"]
    return records


# One record


@proves("J4")
@pytest.mark.parametrize("kind", [BINARY, "text/plain", "text/plain; charset=utf-8", "TEXT/Plain"])
def test_a_body_is_the_value_of_one_record(port: HttpPort, kind: str) -> None:
    answer = port.produce("/topics/orders/records", b"a value", kind)
    assert (answer.status, answer.json) == (200, {"offsets": [{"partition": 0, "offset": 0}]})
    (record,) = fetched(port, "orders")
    assert (record["key"], record["value"]) == (None, "a value")
    assert abs(record["timestamp"] - port.clock.wall_ms()) < 60_000


def test_any_bytes_are_a_value_and_so_are_none(port: HttpPort) -> None:
    port.produce("/topics/orders/records", EVERY_BYTE, BINARY)
    port.produce("/topics/orders/records", b"", BINARY)
    all_bytes, nothing = fetched(port, "orders")
    assert base64.b64decode(all_bytes["value_base64"]) == EVERY_BYTE
    assert nothing["value"] == ""


def test_a_body_without_a_type_is_taken_as_bytes(port: HttpPort) -> None:
    assert port.ask("POST", "/topics/orders/records", b"plain").status == 200
    assert fetched(port, "orders")[0]["value"] == "plain"


@pytest.mark.parametrize(
    ("query", "headers", "key"),
    [
        ("?key=caf%C3%A9", {}, "café"),
        ("?key=", {}, ""),
        ("?key_base64=aGVsbG8=", {}, "hello"),
        ("", {"X-Key": "100%25 plain"}, "100%25 plain"),
        ("", {"X-Key-Base64": "aGVsbG8="}, "hello"),
        ("", {}, None),
    ],
)
def test_a_key_comes_from_query_or_header(port: HttpPort, query: str, headers: dict[str, str], key: str | None) -> None:
    assert port.produce(f"/topics/orders/records{query}", b"v", BINARY, **headers).status == 200
    assert fetched(port, "orders")[0]["key"] == key


def test_headers_of_the_record_keep_their_case_and_order(port: HttpPort) -> None:
    headers = {"X-Header-Trace": "abc", "X-Header-empty": "", "x-header-Trace": "again"}
    connection = port.connection()
    connection.putrequest("POST", "/topics/orders/records")
    for name, value in {**headers, "Content-Length": "1"}.items():
        connection.putheader(name, value)
    connection.endheaders(b"v")
    assert connection.getresponse().status == 200
    connection.close()
    assert fetched(port, "orders")[0]["headers"] == [
        {"key": "Trace", "value": "abc"},
        {"key": "empty", "value": ""},
        {"key": "Trace", "value": "again"},
    ]


@proves("G17")
def test_a_record_goes_where_it_is_told_else_by_its_key_else_round(port: HttpPort) -> None:
    port.create("orders", 5)
    told = port.produce("/topics/orders/records?partition=3", b"v", BINARY)
    assert told.json["offsets"] == [{"partition": 3, "offset": 0}]
    for key in ("a", "b", "longer key"):
        answer = port.produce(f"/topics/orders/records?key={key.replace(' ', '+')}", b"v", BINARY)
        assert answer.json["offsets"][0]["partition"] == partition_for_key(key.encode(), 5)
    unkeyed = [port.produce("/topics/orders/records", b"v", BINARY).json["offsets"][0]["partition"] for _ in range(5)]
    assert sorted(unkeyed) == [0, 1, 2, 3, 4]


# Many records


@proves("J4", "J9")
def test_a_json_batch_goes_to_many_partitions_and_each_record_gets_its_offset(port: HttpPort) -> None:
    port.create("orders", 3)
    records = [{"key": f"k{n}", "value": f"v{n}"} for n in range(50)]
    answer = port.produce("/topics/orders/records", {"records": records})
    assert answer.status == 200
    stored = {
        (partition, record["offset"]): (record["key"], record["value"])
        for partition in range(3)
        for record in fetched(port, "orders", partition)
    }
    assert [stored[place["partition"], place["offset"]] for place in answer.json["offsets"]] == [
        (f"k{n}", f"v{n}") for n in range(50)
    ]
    logs = [port.partitions.get("orders", partition).log for partition in range(3)]
    assert port.on_loop(lambda: [len(list(log.headers(0))) for log in logs]) == [1, 1, 1]


@proves("J4")
def test_each_field_of_a_json_record_is_stored(port: HttpPort) -> None:
    record = {
        "key_base64": base64.b64encode(EVERY_BYTE).decode(),
        "value": "grüße",
        "headers": {"trace": "abc", "none": None},
        "timestamp": 1_700_000_000_123,
        "partition": 0,
    }
    listed = {"headers": [{"key": "h", "value": "1"}, {"key": "h", "value_base64": "//8="}]}
    assert port.produce("/topics/orders/records", {"records": [record, listed]}).status == 200
    first, second = fetched(port, "orders")
    assert first == {
        "offset": 0,
        "timestamp": 1_700_000_000_123,
        "key_base64": record["key_base64"],
        "value": "grüße",
        "headers": [{"key": "trace", "value": "abc"}, {"key": "none", "value": None}],
    }
    assert second["headers"] == [{"key": "h", "value": "1"}, {"key": "h", "value_base64": "//8="}]


def test_what_fetch_shows_can_be_produced_again(port: HttpPort) -> None:
    records = [{"key": "a", "value": "b", "headers": [{"key": "h", "value_base64": "/w=="}], "timestamp": 5}]
    port.produce("/topics/one/records", {"records": records})
    (shown,) = fetched(port, "one")
    del shown["offset"]
    port.produce("/topics/two/records", {"records": [shown]})
    assert fetched(port, "two") == fetched(port, "one")


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        ({"a": [1, 2.5, None, "ü"], "b": {}}, '{"a":[1,2.5,null,"ü"],"b":{}}'),
        ([], "[]"),
        (17, "17"),
        (False, "false"),
        (None, None),
        ("", ""),
    ],
)
def test_a_value_that_is_not_text_is_stored_as_compact_json(port: HttpPort, value: object, stored: str | None) -> None:
    assert port.produce("/topics/orders/records", {"records": [{"value": value}]}).status == 200
    assert fetched(port, "orders")[0]["value"] == stored


def test_lines_of_json_are_records(port: HttpPort) -> None:
    body = b'{"key":"a","value":"1"}\r\n\n{"value":{"n":2}}\n'
    answer = port.produce("/topics/orders/records", body, "application/x-ndjson")
    assert [place["offset"] for place in answer.json["offsets"]] == [0, 1]
    assert [record["value"] for record in fetched(port, "orders")] == ["1", '{"n":2}']


def test_the_broker_stamps_the_time_where_the_topic_says_so(port: HttpPort) -> None:
    port.create("stamped", message_timestamp_type="LogAppendTime")
    port.produce("/topics/stamped/records", {"records": [{"value": "v", "timestamp": 5}]})
    assert fetched(port, "stamped")[0]["timestamp"] > 1_600_000_000_000


# Acknowledgement


@proves("G5")
@pytest.mark.parametrize("durability", ["memory", "os", "disk"])
@pytest.mark.parametrize("acks", ["0", "1", "-1", "all"])
def test_every_acks_is_answered_under_every_durability(port: HttpPort, acks: str, durability: str) -> None:
    port.create("orders", durability=durability)
    answer = port.produce(f"/topics/orders/records?acks={acks}", b"v", BINARY)
    assert (answer.status, answer.json) == (200, {"offsets": [{"partition": 0, "offset": 0}]})
    wait_for("the record", lambda: fetched(port, "orders"))


def test_too_few_replicas_in_sync_refuse_acks_all_only(port: HttpPort) -> None:
    port.create("orders", min_insync_replicas=2)
    refused = port.produce("/topics/orders/records?acks=-1", b"v", BINARY)
    assert refused.status == 503
    assert refused.json["offsets"][0]["error"]["kind"] == "NotEnoughReplicas"
    assert refused.json["offsets"][0]["error"]["retriable"]
    assert port.produce("/topics/orders/records?acks=1", b"v", BINARY).status == 200


def test_a_wait_that_is_too_long_is_told(faulty_port: HttpPort) -> None:
    port = faulty_port
    port.create("orders", durability="disk")
    port.on_loop(port.faults.hold_syncs)
    answer = port.produce("/topics/orders/records?timeout_ms=10", b"v", BINARY)
    assert (answer.status, answer.json["offsets"][0]["error"]["kind"]) == (504, "RequestTimedOut")
    assert fetched(port, "orders") == []
    port.on_loop(port.faults.release_syncs)
    wait_for("the record", lambda: fetched(port, "orders"))


# What is refused


@pytest.mark.parametrize(
    ("body", "kind", "says"),
    [
        (b"", "application/json", "the body is not valid JSON"),
        (b"{", "application/json", "the body is not valid JSON"),
        (b"\xff\xfe", "application/json", "the body is not valid JSON"),
        (b"[" * 100_000, "application/json", "the body is not valid JSON"),
        (b'{"records":[{"value":' + b"[" * 90_000 + b"]" * 90_000 + b"}]}", "application/json", "JSON"),
        (b'{"records":[{"value":NaN}]}', "application/json", "NaN is not JSON"),
        (b'{"records":[{"value":' + b"9" * 10_000 + b"}]}", "application/json", "the body is not valid JSON"),
        (b"[]", "application/json", 'the body must be {"records": ['),
        (b'{"value":"v"}', "application/json", 'the body must be {"records": ['),
        (b'{"records":{}}', "application/json", 'the body must be {"records": ['),
        (b'{"records":[],"extra":1}', "application/json", 'the body must be {"records": ['),
        (b'{"records":[]}', "application/json", "there is no record in this request"),
        (b"\n\n", "application/x-ndjson", "there is no record in this request"),
        (b'{"value":"v"}\n{bad}', "application/x-ndjson", "line 2 is not valid JSON"),
        (b'{"value":"v"}\n"text"', "application/x-ndjson", "record 1 is not an object"),
    ],
)
def test_a_body_that_cannot_be_read_is_refused_whole(port: HttpPort, body: bytes, kind: str, says: str) -> None:
    answer = port.produce("/topics/orders/records", body, kind)
    assert answer.status == 400
    assert says in answer.error["message"]
    assert port.get("/topics").json == {"topics": []}


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (5, "record 1 is not an object"),
        ({"vlaue": "v"}, "record 1 has an unknown field 'vlaue'; a record has key, key_base64, value"),
        ({"key": 5}, "record 1: key is not text; give bytes as key_base64"),
        ({"key": "k", "key_base64": "aa=="}, "record 1 has both key and key_base64"),
        ({"value": 0, "value_base64": "aa=="}, "record 1 has both value and value_base64"),
        ({"value_base64": "not base64"}, "record 1: value_base64 is not base64"),
        ({"value_base64": "aGVsbG8"}, "record 1: value_base64 is not base64"),
        ({"value_base64": 5}, "record 1: value_base64 is not base64"),
        ({"value_base64": "gr\u00fc\u00df"}, "record 1: value_base64 is not base64"),
        ({"value": "\ud800"}, "record 1: value is not valid text"),
        ({"value": {"a": "\ud800"}}, "record 1: value cannot be written as JSON text"),
        ({"key": "x" * (bodies.KEY_MAX_BYTES + 1)}, "a key may have"),
        ({"partition": "0"}, "record 1: partition is not a whole number"),
        ({"partition": True}, "record 1: partition is not a whole number"),
        ({"partition": -1}, "record 1: partition: '-1' is not a whole number from 0"),
        ({"partition": 1 << 31}, "is not a whole number from 0 to 2147483647"),
        ({"timestamp": 1.5}, "record 1: timestamp is not a whole number"),
        ({"timestamp": -5}, "record 1: timestamp: '-5' is not a whole number from 0"),
        ({"timestamp": 1 << 62}, "is not a whole number from 0"),
        ({"headers": "h"}, "record 1: headers are neither"),
        ({"headers": [5]}, "record 1: headers: each is"),
        ({"headers": [{"value": "v"}]}, "record 1: headers: each is"),
        ({"headers": [{"key": "h", "valve": "v"}]}, "record 1: headers: each is"),
        ({"headers": {"h": 5}}, "record 1: headers: the value of 'h' is not text"),
        ({"headers": {"\ud800": "v"}}, "record 1: headers is not valid text"),
        ({"headers": [{"key": "h", "value_base64": "?"}]}, "record 1: headers: value_base64 is not base64"),
    ],
)
def test_a_record_that_is_wrong_is_named_and_nothing_is_taken(tmp_path: Any, record: object, says: str) -> None:
    port = HttpPort(tmp_path / "data")
    answer = port.produce("/topics/orders/records", {"records": [{"value": "good"}, record]})
    assert answer.status == 400
    assert says in answer.error["message"]
    assert port.get("/topics").json == {"topics": []}
    port.close()


@pytest.mark.parametrize(
    ("query", "headers", "says"),
    [
        ("?acks=2", {}, "acks: '2' is not one of 0, 1, -1, all"),
        ("?acks=", {}, "acks: '' is not one of"),
        ("?timeout_ms=-1", {}, "timeout_ms: '-1' is not a whole number from 0"),
        ("?timeout_ms=99999999999", {}, "timeout_ms: '99999999999' is not a whole number from 0 to 300000"),
        ("?partition=x", {}, "partition: 'x' is not a whole number from 0"),
        ("?partition=1e3", {}, "partition: '1e3' is not a whole number"),
        ("?partition=%D9%A3", {}, "is not a whole number"),
        ("?kye=a", {}, "unknown query parameter 'kye'; "),
        ("?key=a&key=b", {}, "a query parameter is given twice"),
        ("?key", {}, "cannot be read"),
        ("?" + "&".join(f"k{n}=1" for n in range(100)), {}, "cannot be read"),
        ("?key_base64=%%%", {}, "query parameter key_base64 is not base64"),
        ("", {"X-Key-Base64": "?"}, "header X-Key-Base64 is not base64"),
        ("?key=a", {"X-Key": "b"}, "the key is given more than once"),
    ],
)
def test_a_query_that_is_wrong_says_what_would_be_right(
    port: HttpPort, query: str, headers: dict[str, str], says: str
) -> None:
    answer = port.produce(f"/topics/orders/records{query}", b"v", BINARY, **headers)
    assert answer.status == 400
    assert says in answer.error["message"]


def test_a_key_in_the_query_is_for_one_record(port: HttpPort) -> None:
    answer = port.produce("/topics/orders/records?key=a", {"records": [{"value": "v"}]})
    assert (answer.status, "each record has its own key" in answer.error["message"]) == (400, True)


@pytest.mark.parametrize("header", ["X-Key", "x-key-base64", "X-Header-Trace"])
def test_a_key_or_header_in_the_head_is_for_one_record(port: HttpPort, header: str) -> None:
    answer = port.produce("/topics/orders/records", {"records": [{"value": "v"}]}, **{header: "YQ=="})
    assert answer.status == 400
    assert f"header {header} is for one record" in answer.error["message"]


def test_a_content_type_that_is_not_taken_names_those_that_are(port: HttpPort) -> None:
    answer = port.produce("/topics/orders/records", b"a=b", "application/x-www-form-urlencoded")
    assert answer.status == 415
    assert "application/octet-stream or text/plain for one record" in answer.error["message"]


def test_too_many_records_are_refused(port: HttpPort, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "RECORDS_MAX", 10)
    records: list[dict[str, str]] = [{} for _ in range(11)]
    assert "one request takes 10 records" in port.produce("/topics/a/records", {"records": records}).error["message"]
    lines = b"{}\n" * 11
    answer = port.produce("/topics/a/records", lines, "application/x-ndjson")
    assert "one request takes 10 records" in answer.error["message"]
    assert port.produce("/topics/a/records", {"records": records[:10]}).status == 200


def test_a_batch_above_the_topics_limit_is_too_large(port: HttpPort) -> None:
    port.create("small", max_message_bytes=1000)
    answer = port.produce("/topics/small/records", bytes(2000), BINARY)
    assert answer.status == 413
    assert "max.message.bytes is 1000" in answer.json["offsets"][0]["error"]["message"]


def test_an_unknown_topic_is_created_where_that_is_allowed(port: HttpPort) -> None:
    assert port.produce("/topics/orders/records", b"v", BINARY).status == 200
    port.auto_create = False
    answer = port.produce("/topics/other/records", b"v", BINARY)
    assert (answer.status, answer.error["kind"], answer.error["code"]) == (404, "UnknownPartition", 3)
    assert "auto.create.topics.enable is off" in answer.error["message"]


@pytest.mark.parametrize("name", ["..", "a%2Fb", "%00", "x" * 250, "a%20b", ""])
def test_a_name_against_the_rules_is_refused(port: HttpPort, name: str) -> None:
    answer = port.produce(f"/topics/{name}/records", b"v", BINARY)
    assert (answer.status, answer.error["kind"]) == (400, "InvalidTopicName")


def test_nobody_writes_to_an_internal_topic(port: HttpPort) -> None:
    port.create("__consumer_offsets", internal=True)
    answer = port.produce("/topics/__consumer_offsets/records", b"v", BINARY)
    assert (answer.status, answer.error["kind"]) == (403, "PolicyViolation")


@pytest.mark.parametrize("partition", [1, 2_147_483_647])
def test_a_partition_that_is_not_there_is_told(port: HttpPort, partition: int) -> None:
    port.create("orders")
    answer = port.produce(f"/topics/orders/records?partition={partition}", b"v", BINARY)
    assert answer.status == 404
    assert f"has partitions 0 to 0, not {partition}" in answer.json["offsets"][0]["error"]["message"]


def test_some_records_that_fail_are_told_beside_those_that_do_not(port: HttpPort) -> None:
    port.create("orders", 2)
    records = [{"value": "a", "partition": 0}, {"value": "b", "partition": 9}, {"value": "c", "partition": 1}]
    answer = port.produce("/topics/orders/records", {"records": records})
    assert answer.status == 207
    first, second, third = answer.json["offsets"]
    assert first == {"partition": 0, "offset": 0}
    assert (second["partition"], second["error"]["kind"]) == (9, "UnknownPartition")
    assert third == {"partition": 1, "offset": 0}
    assert port.metrics.request_errors == {}


def test_a_full_disk_is_told_and_mended_without_a_restart(faulty_port: HttpPort) -> None:
    port = faulty_port
    port.create("orders")
    assert port.produce("/topics/orders/records", b"before", BINARY).status == 200
    port.faults.capacity_bytes = 0
    answer = port.produce("/topics/orders/records", b"refused", BINARY)
    assert answer.status == 507
    assert answer.json["offsets"][0]["error"]["kind"] == "StorageFull"
    assert answer.json["offsets"][0]["error"]["retriable"]
    assert [record["value"] for record in fetched(port, "orders")] == ["before"]
    port.faults.capacity_bytes = 1 << 40
    assert port.produce("/topics/orders/records", b"after", BINARY).json["offsets"][0]["offset"] == 1
    assert [record["value"] for record in fetched(port, "orders")] == ["before", "after"]

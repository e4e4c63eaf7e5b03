"""Records by key over HTTP: order, bounds, time, paging, and what is said where there is no index."""

from __future__ import annotations

import base64

import pytest

from http_port import Answer, HttpPort
from proving import proves

START_MS = 1_750_000_000_000


def produce(port: HttpPort, count: int = 30, partitions: int = 3) -> None:
    port.create("orders", partitions, key_index="true")
    records = [
        {"key": f"k{n % 5}", "value": f"v{n}", "timestamp": START_MS + n * 1000, "partition": n % partitions}
        for n in range(count)
    ]
    assert port.produce("/topics/orders/records", {"records": records}).status == 200


def query(port: HttpPort, asked: str) -> Answer:
    return port.get(f"/topics/orders/query?{asked}")


def values(answer: Answer) -> list[str]:
    assert answer.status == 200, answer.body
    return [record["value"] for record in answer.json["records"]]


@proves("R3")
def test_records_are_found_by_key_newest_first_or_by_offset(port: HttpPort) -> None:
    produce(port)
    assert values(query(port, "key=k2")) == ["v27", "v22", "v17", "v12", "v7", "v2"]
    assert values(query(port, "key=k2&order=offset")) == ["v12", "v27", "v7", "v22", "v2", "v17"]
    coded = base64.b64encode(b"k2").decode()
    assert values(query(port, f"key_base64={coded}&partition=2")) == ["v17", "v2"]
    assert query(port, "key=k7").json == {"topic": "orders", "records": [], "more": False, "elsewhere": 0}


@proves("R3")
def test_times_bound_the_answer(port: HttpPort) -> None:
    produce(port)
    assert values(query(port, f"key=k2&from={START_MS + 7000}&to={START_MS + 22000}")) == ["v17", "v12", "v7"]


def test_a_long_answer_comes_in_pages(port: HttpPort) -> None:
    produce(port, count=300, partitions=1)
    for order, bound in (("newest", "next"), ("offset", "first")):
        found: list[str] = []
        at = ""
        while True:
            answer = query(port, f"key=k3&count=7&partition=0&order={order}{at}")
            found += values(answer)
            if not answer.json["more"]:
                break
            at = f"&{bound}={answer.json['searched']}"
        expected = [f"v{n}" for n in range(3, 300, 5)]
        assert found == (expected[::-1] if order == "newest" else expected)


def test_the_description_of_a_topic_tells_how_far_its_index_is(port: HttpPort) -> None:
    produce(port, partitions=1)
    assert values(query(port, "key=k1"))
    described = port.get("/topics/orders").json["partition_list"][0]["key_index"]
    assert (described["next_offset"], described["behind"], described["error"]) == (30, 0, None)
    assert "key index 0 records behind" in port.get("/").body.decode()
    assert 'headrace_key_index_behind{topic="orders",partition="0"} 0' in port.get("/metrics").body.decode()


@proves("R3")
def test_a_topic_without_an_index_says_how_to_have_one(port: HttpPort) -> None:
    port.create("orders")
    answer = query(port, "key=k")
    assert answer.status == 409
    assert "`headrace topic alter orders --config key.index=true`" in answer.error["message"]


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("", "give the key once"),
        ("key=a&key_base64=YQ%3D%3D", "give the key once"),
        ("key_base64=*", "key_base64 is not base64"),
        ("key=a&order=up", "neither newest nor offset"),
        ("key=a&next=4", "give partition too"),
        ("key=a&count=0", "from 1 to 10000"),
        ("key=a&partition=9", "partitions 0 to 2, not 9"),
    ],
)
def test_a_query_that_is_wrong_says_why(port: HttpPort, asked: str, says: str) -> None:
    produce(port)
    answer = query(port, asked)
    assert answer.status in (400, 404)
    assert says in answer.error["message"]


@proves("R3")
def test_a_record_is_read_by_time(port: HttpPort) -> None:
    produce(port, partitions=1)
    at = f"/topics/orders/partitions/0/records?offset=@{START_MS + 11_500}&count=1"
    assert values(port.get(at)) == ["v12"]
    assert values(port.get(f"/topics/orders/partitions/0/records?offset=@{START_MS + 10**9}")) == []
    assert values(port.get(f"/topics/orders/partitions/0/records?offset=@{START_MS // 1000 + 12}&count=1")) == ["v12"]
    neither = port.get("/topics/orders/partitions/0/records?offset=@175000000000")
    assert neither.status == 400
    assert "neither seconds since 1970" in neither.error["message"]

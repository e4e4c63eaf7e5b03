"""`headrace query` against a broker: by key, by id and by time, also after kill -9 and the loss of index files."""

from __future__ import annotations

import json
from collections.abc import Callable

from brokers import Broker
from cli.conftest import Run
from headrace.client.admin import query
from headrace.client.admin.cluster import Cluster
from headrace.client.producer.producer import Producer
from proving import proves

Start = Callable[..., Broker]
MakeTopic = Callable[..., str]


def lines(count: int, start: int = 0) -> str:
    return "".join(
        json.dumps({"key": f"k{n % 10}", "value": f"v{n}", "timestamp": 1_750_000_000_000 + n * 1000}) + "\n"
        for n in range(start, start + count)
    )


@proves("R3")
def test_records_are_found_by_key_id_and_time(run: Run, broker: Broker, topic: MakeTopic) -> None:
    name = topic(3, "--config", "key.index=true")
    run("produce", name, "--json-lines", stdin=lines(100))
    by_key = run("query", "--topic", name, "--key", "k4", "--format", "%v")
    assert by_key.stdout.split() == [f"v{n}" for n in range(94, 0, -10)]
    assert "10 records, found in" in by_key.stderr
    window = ("--from", "@1750000030000", "--to", "@1750000050000", "--order", "offset", "-n", "2", "--json")
    found = [
        json.loads(line) for line in run("query", "--topic", name, "--hex-key", "6b34", *window).stdout.split("\n")[:-1]
    ]
    assert [record["value"] for record in found] == ["v34", "v44"]
    place = f"{found[0]['partition']}:{found[0]['offset']}"
    by_id = run("query", "--topic", name, "--offset", place, "--offset", "0:99999", "--format", "%v")
    assert by_id.stdout == "v34\n"
    by_time = run("query", "--topic", name, "--from", "@1750000095000", "--limit", "4", "--format", "%v")
    assert by_time.stdout.split() == ["v99", "v98", "v97", "v96"]
    assert "KEY_INDEX_BEHIND" in run("topic", "describe", name).stdout
    with Cluster(broker.bootstrap) as cluster:
        asked = query.RecordQuery(name, b"k5", ids=((found[0]["partition"], found[0]["offset"]),))
        assert list(query.find(cluster, asked)) == []
        newest = list(query.find(cluster, query.RecordQuery(name, b"k4"), limit=3))
        assert [record.value for _, record in newest] == [b"v94", b"v84", b"v74"]
        earlier = list(query.find(cluster, query.RecordQuery(name, to_ms=1_750_000_003_000), newest_first=False))
        assert sorted(record.value or b"" for _, record in earlier) == [b"v0", b"v1", b"v2"]


@proves("R3", "U1")
def test_a_topic_without_an_index_is_searched_and_says_how_to_have_one(inside: Run, topic: MakeTopic) -> None:
    name = topic(2)
    inside("produce", name, "--json-lines", "--compression", "lz4", stdin=lines(100))

    def found(*options: str) -> list[str]:
        return inside("query", "--topic", name, "--key", "k7", "--format", "%v", *options).stdout.split()

    expected = [f"v{n}" for n in range(97, 0, -10)]
    searched = inside("query", "--topic", name, "--key", "k7", "--format", "%v")
    assert searched.stdout.split() == expected
    assert "; 100 offsets were searched, as there is no key index" in searched.stderr
    assert f"`headrace topic alter {name} --config key.index=true` has one built" in searched.stderr
    scanned = [found(), found("--limit", "3"), found("--order", "offset", "--from", "@1750000050000")]
    assert scanned == [expected, expected[:3], ["v57", "v67", "v77", "v87", "v97"]]
    inside("topic", "alter", name, "--config", "key.index=true")
    assert [found(), found("--limit", "3"), found("--order", "offset", "--from", "@1750000050000")] == scanned
    assert "searched" not in inside("query", "--topic", name, "--key", "k7").stderr


@proves("R3")
def test_kill_and_lost_files_cost_a_query_nothing(fresh_broker: Start) -> None:
    broker = fresh_broker(settings={"log.key.index": True, "key.index.entries": 3000, "key.index.slots": 700})
    count = 0
    for harm in (None, "killed", "damaged", "lost"):
        if harm is not None:
            broker.stop() if harm == "lost" else broker.kill()
        for path in broker.data.rglob("*.keys"):
            if harm == "lost":
                path.unlink()
            elif harm == "damaged":
                content = bytearray(path.read_bytes())
                content[len(content) // 2] ^= 0x10
                path.write_bytes(content)
        if harm is not None:
            broker.start()
        with Cluster(broker.bootstrap) as cluster:
            count = produce(cluster, "orders", count)
            for key in range(10):
                found = query.find(cluster, query.RecordQuery("orders", b"k%d" % key), newest_first=False)
                assert [record.value for _, record in found] == [b"v%d" % n for n in range(key, count, 10)]
            (position,) = query.index_positions(cluster, cluster.topic("orders"))
            assert position.behind == 0


def produce(cluster: Cluster, topic: str, start: int) -> int:
    """Five thousand records more; how many there are then."""
    cluster.topic(topic, create=True)
    with Producer(cluster.bootstrap, codec="zstd") as producer:
        sent = [
            producer.send_async(topic, b"v%d" % n, key=b"k%d" % (n % 10), timestamp_ms=1_750_000_000_000 + n)
            for n in range(start, start + 5000)
        ]
        assert all(delivery.result().offset >= 0 for delivery in sent)
    return start + 5000

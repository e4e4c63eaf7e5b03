"""Keys land where every other Kafka client puts them."""

import random

from aiokafka.partitioner import murmur2 as aiokafka_murmur2
from hypothesis import given
from hypothesis import strategies as st
from kafka.partitioner.default import murmur2 as kafka_python_murmur2

from headrace.records.partitioner import murmur2, partition_for_key
from proving import proves


@proves("G17")
@given(st.binary(max_size=300))
def test_the_hash_is_that_of_kafka_python_and_aiokafka(key: bytes) -> None:
    assert murmur2(key, 0, len(key)) == kafka_python_murmur2(key) & 0xFFFFFFFF == aiokafka_murmur2(key) & 0xFFFFFFFF


@proves("G17")
def test_the_hash_has_the_published_values_of_the_java_client() -> None:
    # Vectors of org.apache.kafka.common.utils.UtilsTest.
    vectors = {
        b"21": -973932308,
        b"foobar": -790332482,
        b"a-little-bit-long-string": -985981536,
        b"a-little-bit-longer-string": -1486304829,
        b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
        b"abc": 479470107,
    }
    for key, expected in vectors.items():
        assert murmur2(key, 0, len(key)) == expected & 0xFFFFFFFF


@proves("G17")
def test_a_key_always_goes_to_one_partition_of_those_there_are() -> None:
    rng = random.Random(1)
    for count in (1, 2, 7, 64, 10_000):
        key = rng.randbytes(12)
        chosen = {partition_for_key(key, count) for _ in range(5)}
        assert len(chosen) == 1
        assert 0 <= chosen.pop() < count

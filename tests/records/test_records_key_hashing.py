"""Keys of batches in a hash table of numbers: what was put in is found, compiled and not, whatever the bytes."""

from __future__ import annotations

import random
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace.records.key_hashes as installed
from headrace.records import kernel
from headrace.records.batch import APPEND_TIME, CONTROL
from headrace.records.codecs import Codec
from headrace.records.record import NewRecord
from hypotheses import examples
from proving import proves

BASE_MS = 1_700_000_000_000
ALWAYS = (-(1 << 62), 1 << 62)
KEYS = st.none() | st.binary(max_size=3) | st.binary(min_size=60, max_size=200)
TIMES_MS = st.integers(BASE_MS - 100_000, BASE_MS + 100_000) | st.integers(-(1 << 61), 1 << 61)
BATCHES = st.lists(st.lists(st.tuples(TIMES_MS, KEYS), min_size=1, max_size=12), min_size=1, max_size=8)

both_forms = examples(40)


def table(module: ModuleType, room: int, slots: int, first_offset: int = 0, hash_mask: int = (1 << 64) - 1) -> Any:
    made = module.KeyTable(first_offset, BASE_MS, hash_mask)
    made.attach(memoryview(bytearray(4 * slots)).cast("I"), memoryview(bytearray(20 * room)).cast("I"))
    return made


def find(made: Any, module: ModuleType, key: bytes, times: tuple[int, int] = ALWAYS, first: int = 0) -> list[int]:
    found: list[int] = []
    entry = made.newest(module.key_hash(key))
    while entry:
        entry, offsets = made.find(module.key_hash(key), entry, first, 1 << 61, *times, 3)
        found += offsets
    return found


def built(records: list[NewRecord], base_offset: int, **how: Any) -> bytes:
    return bytes(kernel.build(records, base_offset=base_offset, leader_epoch=3, **how))


@proves("R3")
@both_forms
@given(drawn=BATCHES, codec=st.sampled_from(list(Codec)), slots=st.integers(1, 5), mask=st.sampled_from([64, 33, 2, 0]))
def test_every_key_leads_to_its_offsets_and_with_all_bits_to_no_others(
    key_hashing: ModuleType, drawn: list[list[tuple[int, bytes | None]]], codec: Codec, slots: int, mask: int
) -> None:
    made = table(key_hashing, 200, slots, 5, (1 << mask) - 1)
    data, offset = b"", 5
    where: dict[bytes, list[tuple[int, int]]] = {}
    for records in drawn:
        data += built([(at, key, b"value", [("h", b"x")]) for at, key in records], offset, codec=codec)
        for at, key in records:
            if key is not None:
                where.setdefault(key, []).insert(0, (offset, at))
            offset += 1
    assert made.add(data) == len(data)
    assert (made.next_offset, made.unreadable, made.last_epoch) == (offset, 0, 3)
    assert made.count == sum(len(places) for places in where.values())
    for key, places in where.items():
        found = find(made, key_hashing, key)
        offsets = [place for place, _ in places]
        assert found == offsets if mask == 64 else set(offsets) <= set(found)
        late = find(made, key_hashing, key, (BASE_MS, BASE_MS + 50_000))
        assert {place for place, at in places if BASE_MS <= at < BASE_MS + 50_000} <= set(late)


def test_the_table_is_the_same_whoever_makes_it(key_hashing: ModuleType) -> None:
    chance = random.Random(7)
    records: list[NewRecord] = [
        (BASE_MS + chance.randrange(-(10**6), 10**6), chance.randbytes(chance.randrange(9)), b"", [])
        for _ in range(500)
    ]
    made = []
    for module in (key_hashing, installed):
        slots, entries = bytearray(4 * 64), bytearray(20 * 500)
        each = module.KeyTable(0, BASE_MS)
        each.attach(memoryview(slots).cast("I"), memoryview(entries).cast("I"))
        each.add(built(records, 0, codec=Codec.LZ4))
        made.append((slots, entries))
    assert made[0] == made[1]
    assert key_hashing.key_hash(b"orders") == 0xCEA6B13840EE1F1D


def test_it_stops_before_a_batch_that_has_no_room_and_goes_on_with_more(key_hashing: ModuleType) -> None:
    made = table(key_hashing, 5, 2)
    first, second = (built([(BASE_MS, b"k", b"", [])] * 3, base) for base in (0, 3))
    assert made.add(first + second) == len(first)
    assert (made.stopped, made.wanted, made.next_offset) == (key_hashing.ROOM, 3, 3)
    far = built([(BASE_MS, b"k", b"", [])], 1 << 33)
    assert made.add(far) == 0
    assert made.stopped == key_hashing.RANGE
    assert made.add(second[:-1]) == 0
    assert made.stopped == key_hashing.WHOLE


def test_control_batches_and_batches_seen_before_have_no_entries(key_hashing: ModuleType) -> None:
    made = table(key_hashing, 9, 2)
    data = built([(BASE_MS, b"k", b"", [])], 0) + built([(BASE_MS, b"k", b"", [])], 1, attributes=CONTROL)
    assert made.add(data) == made.add(data) == len(data)
    assert (made.count, made.next_offset) == (1, 2)


def test_the_brokers_time_counts_where_the_batch_says_so(key_hashing: ModuleType) -> None:
    made = table(key_hashing, 9, 2)
    made.add(built([(BASE_MS, b"k", b"", []), (BASE_MS + 60_000, b"k", b"", [])], 0, attributes=APPEND_TIME))
    assert find(made, key_hashing, b"k", (BASE_MS + 60_000, BASE_MS + 60_001)) == [1, 0]
    assert find(made, key_hashing, b"k", (BASE_MS, BASE_MS + 1)) == []


@both_forms
@given(seed=st.integers(0, 1 << 30), codec=st.sampled_from([Codec.NONE, Codec.ZSTD]))
def test_damaged_records_are_passed_over_and_never_read_beyond_their_end(
    key_hashing: ModuleType, seed: int, codec: Codec
) -> None:
    chance = random.Random(seed)
    whole = built([(BASE_MS, b"key%d" % n, b"v" * 20, []) for n in range(5)], 0, codec=codec)
    damaged = bytearray(whole)
    for _ in range(chance.randrange(1, 4)):
        damaged[chance.randrange(61, len(damaged))] = chance.randrange(256)
    behind = built([(BASE_MS, b"behind", b"", [])], 5)
    made = table(key_hashing, 50, 3)
    assert made.add(bytes(damaged) + behind) == len(damaged) + len(behind)
    assert find(made, key_hashing, b"behind") == [5]


@both_forms
@given(drawn=BATCHES, cut_to=st.integers(0, 60), slots=st.integers(1, 5))
def test_entries_can_be_taken_back(
    key_hashing: ModuleType, drawn: list[list[tuple[int, bytes | None]]], cut_to: int, slots: int
) -> None:
    kept, made = table(key_hashing, 200, slots), table(key_hashing, 200, slots)
    offset = 0
    for records in drawn:
        data = built([(at, key, b"", []) for at, key in records], offset)
        made.add(data)
        if offset + len(records) <= cut_to:
            kept.add(data)
        offset += len(records)
    while not made.cut(kept.next_offset, 2):
        pass
    assert made.count == kept.count
    for key in {key for records in drawn for _, key in records if key is not None}:
        assert find(made, key_hashing, key) == find(kept, key_hashing, key)


@pytest.mark.parametrize("place", [4, 9])
def test_a_chain_that_does_not_lead_back_is_refused(key_hashing: ModuleType, place: int) -> None:
    slots, entries = memoryview(bytearray(4)).cast("I"), memoryview(bytearray(20 * 9)).cast("I")
    made = key_hashing.KeyTable(0, BASE_MS)
    made.attach(slots, entries)
    made.add(built([(BASE_MS, b"k", b"", [])] * 2, 0))
    entries[place] = 7
    with pytest.raises(ValueError, match=r"entry|chain"):
        find(made, key_hashing, b"k")
    slots[:] = memoryview(bytearray(4)).cast("I")
    assert not made.link(0, 2)
    made.detach()
    assert made.newest(1) == 0
    with pytest.raises(ValueError, match="chain"):
        made.find(1, 1, 0, 9, *ALWAYS, 9)

"""Buffers are used again when, and only when, nobody has a view of them."""

from __future__ import annotations

import random
import tracemalloc

import pyarrow as pa

from headrace.records import kernel
from headrace.records.arrow import Decoder
from headrace.records.buffers import GRAIN_BYTES, MOST_BUFFERS, BufferPool

SIZE = 4 * GRAIN_BYTES


def lent(pool: BufferPool, size: int = SIZE) -> memoryview:
    buffer = pool.take(size)
    view = memoryview(buffer)[:size]
    pool.lend(buffer)
    return view


def test_a_buffer_is_used_again_once_its_views_are_gone() -> None:
    pool = BufferPool(1 << 30)
    view = lent(pool)
    first = id(view.obj)
    part = view[10:20]
    del view
    assert id(lent(pool).obj) != first
    del part
    assert first in {id(view.obj) for view in [lent(pool), lent(pool)]}


def test_what_an_arrow_array_is_made_of_is_not_used_again_while_any_part_of_it_lives() -> None:
    pool = BufferPool(1 << 30)
    buffer = pool.take(SIZE)
    numbers = pa.Array.from_buffers(pa.int64(), SIZE // 8, [None, pa.py_buffer(buffer)], 0)
    pool.lend(buffer)
    first = id(buffer)
    del buffer
    kept = numbers.slice(5, 3).to_numpy()
    del numbers
    assert id(lent(pool).obj) != first
    del kept
    assert first in {id(view.obj) for view in [lent(pool), lent(pool)]}


def test_views_keep_their_bytes_whatever_comes_after_them(seed: int) -> None:
    draw = random.Random(seed)
    pool = BufferPool(3 * SIZE)
    kept: list[tuple[memoryview, int]] = []
    for nth in range(2000):
        view = lent(pool, draw.choice((SIZE // 3, SIZE, 2 * SIZE)))
        view[:] = bytes([nth % 256]) * len(view)
        kept.append((view, nth % 256))
        while len(kept) > draw.choice((1, 4, 12)):
            old, filled = kept.pop(draw.randrange(len(kept)))
            assert old[0] == old[-1] == old[len(old) // 2] == filled


def test_the_size_is_what_was_asked_for_or_half_more_at_most() -> None:
    pool = BufferPool(1 << 30)
    for size in (1, 100, GRAIN_BYTES - 1, GRAIN_BYTES, SIZE, SIZE + 1, 5 << 20):
        lent(pool, size)
        for wanted in (size, size - size // 5, size // 2 + 1):
            assert wanted <= len(pool.take(wanted)) <= max(wanted + wanted // 2, 2 * GRAIN_BYTES)


def test_a_pool_remembers_no_more_than_told() -> None:
    pool = BufferPool(4 * SIZE)
    views = [lent(pool) for _ in range(20)]
    assert 0 < sum(map(len, pool._known)) <= 4 * SIZE
    assert all(buffer is view.obj for buffer, view in zip(reversed(pool._known), reversed(views), strict=False))
    many = BufferPool(1 << 40)
    views = [lent(many, GRAIN_BYTES) for _ in range(2 * MOST_BUFFERS)]
    assert len(many._known) == MOST_BUFFERS


def test_small_ones_and_those_above_the_bound_are_left_to_the_allocator() -> None:
    pool = BufferPool(SIZE)
    for size in (GRAIN_BYTES - 1, 2 * SIZE):
        view = lent(pool, size)
        pool_view = lent(pool, size)
        assert view.obj is not pool_view.obj
        assert pool._known == []


def test_decoders_of_many_partitions_keep_no_buffers_beside_the_pool() -> None:
    pool = BufferPool(4 << 20)
    values_bytes = 1 << 20
    data = bytes(kernel.build([(1, None, bytes(values_bytes // 64), [])] * 64))
    tracemalloc.start()
    try:
        decoders = [Decoder("t", partition, ("value", "offset"), batch_rows=64, pool=pool) for partition in range(20)]
        for decoder in decoders * 2:
            assert sum(map(len, decoder.decode(data))) == 64
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept_bytes < (4 << 20) + values_bytes

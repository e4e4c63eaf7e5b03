"""Damaged record sets that end where the process may read no further: a byte too many ends it. Run as a program.

beyond_the_buffer.py <seed> <rounds>
"""

import ctypes
import mmap
import random
import sys

from headrace.errors import HeadraceError
from headrace.records import batch, consumer_records, kernel
from headrace.records.codecs import Codec

PAGE = mmap.PAGESIZE
ROOM = 16 * PAGE


def guarded() -> tuple[mmap.mmap, memoryview]:
    """Memory, the last page of which may not be touched; the view ends before it."""
    memory = mmap.mmap(-1, ROOM + PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(start + ROOM), ctypes.c_size_t(PAGE), 0) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")
    return memory, memoryview(memory)[:ROOM]


def record_set(chance: random.Random) -> bytearray:
    data = bytearray()
    offset = chance.randrange(1000)
    for _ in range(chance.randint(1, 4)):
        new = [
            (
                1_700_000_000_000 + chance.randrange(-500, 500),
                chance.choice([None, chance.randbytes(chance.randrange(20))]),
                chance.choice([None, chance.randbytes(chance.randrange(200))]),
                [("h" * chance.randrange(9), chance.randbytes(3)) for _ in range(chance.choice([0, 0, 1, 3]))],
            )
            for _ in range(chance.randint(1, 12))
        ]
        data += kernel.build(new, chance.choice([0, 0, 0, *Codec]), base_offset=offset)
        offset += len(new)
    return data


def damage(chance: random.Random, data: bytearray) -> None:
    for _ in range(chance.randint(1, 6)):
        at = chance.randrange(len(data))
        if chance.random() < 0.5:
            data[at] = chance.choice([0, 1, 0x7F, 0x80, 0xFF])
        elif chance.random() < 0.7:
            data[at] ^= 1 << chance.randrange(8)
        else:
            data[at : at + 9] = b"\xff" * min(9, len(data) - at)


def sign_all(data: bytearray) -> None:
    """Let the damage through: right CRCs wherever a batch still has its size."""
    pos = 0
    while pos + batch.HEADER_BYTES <= len(data):
        size = int.from_bytes(data[pos + 8 : pos + 12], "big", signed=True) + batch.LENGTH_END
        if size < batch.HEADER_BYTES or pos + size > len(data):
            return
        view = memoryview(data)[pos : pos + size]
        batch.sign(view)
        pos += size


def main(seed: int, rounds: int) -> None:
    chance = random.Random(seed)
    _memory, room = guarded()
    whole = cut = refused = 0
    for _ in range(rounds):
        data = record_set(chance)
        if chance.random() < 0.8:
            damage(chance, data)
        if chance.random() < 0.4:
            del data[chance.randrange(len(data)) :]
        signed = chance.random() < 0.7
        if signed:
            sign_all(data)
        if len(data) > ROOM:
            continue
        placed = room[ROOM - len(data) :]
        placed[:] = data
        found: list[consumer_records.ReceivedRecord] = []
        records = consumer_records.RecordSet(placed, "orders", 0, 0, check_crc=chance.random() < 0.7)
        try:
            while not records.finished:
                records.take(found, chance.choice([1, 3, 1000]))
        except HeadraceError as error:
            refused += "orders-0 at offset" in str(error)
        else:
            whole += 1
            cut += not found
        for record in found:
            assert len(record.headers) >= 0
    print(f"{whole} read, {cut} of them without a record, {refused} refused")
    assert whole > rounds // 10
    assert refused > rounds // 10


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

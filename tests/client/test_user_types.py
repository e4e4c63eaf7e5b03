"""A user's project under `mypy --strict`: the types of the public names are seen, and mistakes are found."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from proving import proves

PROGRAM = """
import headrace
from headrace import Admin, Consumer, HeadraceError, Producer, Record, aio

def main() -> None:
    with Producer("127.0.0.1:9092", codec="zstd") as producer:
        reveal_type(producer.send("t", "v", key="k", headers={"a": "b"}))  # Report
        reveal_type(producer.send_async("t", b"v", callback=lambda d: print(d.result())))  # Delivery
        reveal_type(producer.send_ordered("t", b"v", "order-7").result().offset)  # int
    with Consumer("t", bootstrap="127.0.0.1:9092", group="g") as consumer:
        for record in consumer:
            reveal_type(record)  # ReceivedRecord
            reveal_type(record.key)  # bytes | None
        reveal_type(consumer.poll(100))  # list[ReceivedRecord]
        reveal_type(consumer.lag())  # dict[tuple[str, int], int]
        with consumer.listen(lambda record: print(record.offset)) as listening:
            reveal_type(listening.wait(1))  # bool
    with Admin("127.0.0.1:9092") as admin:
        reveal_type(admin)  # Admin
    reveal_type(headrace.read("127.0.0.1:9092", "t", 0, 0, 1))  # list[ReceivedRecord]

async def later() -> None:
    async with aio.Producer() as producer, aio.Consumer("t") as consumer:
        reveal_type(await producer.send("t", "v"))  # Report
        reveal_type(await producer.send_async("t", "v"))  # Report
        async for record in consumer:
            reveal_type(record)  # ReceivedRecord
        reveal_type(await consumer.poll(100))  # list[ReceivedRecord]

Producer(codek="zstd")                     # error: Unexpected keyword argument "codek" for "Producer"
Consumer("t", grop="g")                    # error: Unexpected keyword argument "grop" for "Consumer"
Consumer("t", mode="everybody")            # error: Argument "mode" to "Consumer" has incompatible type
Producer().send("t", b"v", key=7)          # error: Argument "key" to "send" of "Producer" has incompatible type "int"
headrace.Producr                           # error: Module has no attribute "Producr"
"""
MODULE = re.compile(r"\bheadrace(\.\w+)+\.(?=[A-Z])")


@proves("U2")
def test_types_and_mistakes_are_seen_in_a_users_project(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    kept = {name: value for name, value in os.environ.items() if name not in ("MYPYPATH", "PYTHONPATH")}
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir", "cache", "program.py"]
    done = subprocess.run(command, cwd=tmp_path, env=kept, capture_output=True, text=True, check=False)
    told = dict(re.findall(r"^program\.py:(\d+): ((?:note: Revealed type is|error:) .*)$", done.stdout, re.M))
    lines = PROGRAM.splitlines()
    expected = {str(number): line.split("  # ")[1] for number, line in enumerate(lines, 1) if "  # " in line}
    assert told.keys() == expected.keys(), done.stdout + done.stderr
    for number, said in told.items():
        plain = MODULE.sub("", said)
        assert expected[number] in plain, f"{lines[int(number) - 1].strip()}: {said}"
        assert not re.search(r"\bAny\b", said), said

"""A member of a share group as a process, so that a test can kill it: `share_member.py SETTINGS-AS-JSON`.

It says on standard output, a JSON object a line: `record` for each record with its delivery count, and with
`acknowledge` set `kept` for each that was accepted, once that is committed. It ends with standard input.
"""

from __future__ import annotations

import json
import select
import sys
from typing import Any

from confluent_kafka import ShareConsumer


def say(event: str, **what: object) -> None:
    sys.stdout.write(json.dumps({"event": event, **what}) + "\n")
    sys.stdout.flush()


def main(given: dict[str, Any]) -> None:
    consumer = ShareConsumer(
        {
            "bootstrap.servers": given["bootstrap"],
            "group.id": given["group"],
            "share.acknowledgement.mode": "explicit",
            "log_level": 0,
        }
    )
    consumer.subscribe([given["topic"]])
    while not select.select([sys.stdin], [], [], 0)[0]:
        places = []
        for message in consumer.poll(0.2):
            if message.error() is not None:
                continue
            places.append((message.partition(), message.offset()))
            say("record", value=(message.value() or b"").decode(), count=message.delivery_count())
            if given["acknowledge"]:
                consumer.acknowledge(message)
        if not given["acknowledge"] and places:
            sys.stdin.read()
            return
        if places:
            results = consumer.commit_sync(30)
            failed = {place.partition for place, error in results.items() if error is not None}
            for partition, offset in places:
                if partition not in failed:
                    say("kept", partition=partition, offset=offset)
    consumer.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

"""A member of a share group as a process, so that a test can kill it: `sharing_program.py BOOTSTRAP GROUP TOPIC`.

It says each value that it was handed, a line each, and holds what the first poll gave until its standard input ends.
"""

from __future__ import annotations

import sys

from headrace import ShareConsumer


def main(bootstrap: str, group: str, topic: str) -> None:
    with ShareConsumer(topic, bootstrap=bootstrap, group=group, acknowledgement="explicit") as consumer:
        for record in consumer.poll(60_000):
            sys.stdout.write(f"{record.value.decode()}\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])

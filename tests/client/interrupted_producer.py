"""A program that sends, is interrupted by real SIGINTs at random moments, and goes on: `bootstrap topic interrupts`.

Prints how many records were delivered.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from itertools import count

from headrace import Delivery, Producer


def main(bootstrap: str, topic: str, interrupts: int) -> None:
    numbers, told = count(), list[Delivery]()
    deliveries: list[Delivery] = []
    with Producer(bootstrap, batch_bytes=2000, interval_ms=1, delivery_timeout_ms=20_000) as producer:
        producer.send(topic, b"first")
        for nth in range(interrupts):
            thread = threading.Timer(random.uniform(0, 0.006), os.kill, (os.getpid(), signal.SIGINT))
            try:
                thread.start()
                while True:
                    if nth % 2:
                        producer.send(topic, b"%d" % next(numbers))
                    else:
                        deliveries.append(producer.send_async(topic, b"%d" % next(numbers), callback=told.append))
            except KeyboardInterrupt:
                thread.join()
        producer.flush(15)
        assert all(delivery.exception() is None for delivery in deliveries)
        metrics = producer.metrics()
    assert metrics["failed"] == metrics["unknown"] == metrics["queue_records"] == metrics["retries"] == 0, metrics
    # A record whose delivery was being handed to the program when it was interrupted is told all the same.
    assert len(deliveries) <= len(told) <= len(deliveries) + interrupts
    print(metrics["delivered"])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))

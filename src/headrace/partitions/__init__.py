"""Partitions: role, epoch, high watermark, in-sync set, and the requests that wait for them."""

"""The partitioned layout: the contract of logs, and what only a log of segments has."""

from __future__ import annotations

from storage.log_contract import LogContract


class TestPartitionedLog(LogContract):
    pass

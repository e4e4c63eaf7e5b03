"""The shared layout: the contract of logs, and what only a log inside a commit log has."""

from __future__ import annotations

from headrace.storage.folder import SHARED
from storage.log_contract import LogContract


class TestSharedLog(LogContract):
    layout = SHARED

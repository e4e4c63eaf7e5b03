"""Stores of the layout that a run is for: `--layout shared` chooses it, by HEADRACE_LOG_LAYOUT."""

from __future__ import annotations

import os

from brokers import LAYOUT_VARIABLE
from headrace.ports.clock import Clock
from headrace.ports.disk import Disk
from headrace.storage.commitlog.store import SharedStore
from headrace.storage.folder import PARTITIONED, SHARED
from headrace.storage.layouts import Store
from headrace.storage.log import TopicPartition
from headrace.storage.segments.store import PartitionedStore


def chosen_layout() -> str:
    return SHARED if os.environ.get(LAYOUT_VARIABLE) == SHARED else PARTITIONED


def new_store(disk: Disk, clock: Clock, data: str, layout: str = "") -> Store:
    """Of the layout given, else of the one chosen."""
    return (SharedStore if (layout or chosen_layout()) == SHARED else PartitionedStore)(disk, clock, data)


def log_path(data: str, where: TopicPartition, layout: str = "") -> str:
    """The first file that a partition's batches are written to."""
    folder = "@commitlog" if (layout or chosen_layout()) == SHARED else f"{where.topic}/{where}"
    return f"{data}/{folder}/{0:020d}.log"

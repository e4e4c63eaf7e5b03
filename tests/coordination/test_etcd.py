from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from coordination.coordination_contract import CoordinationContract, Store
from coordination.etcd_clients import client
from etcd_nodes import EtcdNodes, etcd_nodes
from headrace.ports.coordination import Delete

LEASE_SECONDS = 1.0


@pytest.fixture(scope="module")
def one_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdNodes]:
    with etcd_nodes(tmp_path_factory.mktemp("etcd")) as etcd:
        yield etcd


@asynccontextmanager
async def emptied(etcd: EtcdNodes) -> AsyncIterator[Store]:
    coordination = client(etcd)
    try:
        await coordination.transact([], [Delete("", prefix=True)])
        yield Store(coordination, asyncio.sleep, LEASE_SECONDS)
    finally:
        await coordination.close()


class OnEtcd(CoordinationContract):
    etcd: EtcdNodes

    @pytest.fixture(autouse=True)
    def _etcd(self, one_node: EtcdNodes) -> None:
        self.etcd = one_node

    def open(self, folder: Path) -> AbstractAsyncContextManager[Store]:
        return emptied(self.etcd)


class TestEtcd(OnEtcd):
    """On the loop that the broker runs on."""

    def run_loop(self, main: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main)


@pytest.mark.long
class TestEtcdOnAsyncio(OnEtcd):
    """On asyncio's own loop, which the tests of faults use as well."""

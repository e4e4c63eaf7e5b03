"""One machine of a simulated cluster: a disk that stays, and one process after another that runs a broker on it.

The broker is the real one, on the disk, clock, network and coordination of the simulation. A supervisor
starts it again when it ends by itself.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, Protocol

from headrace.cluster.participant import Participant
from headrace.errors import HeadraceError
from headrace.kafka.front_end import FrontEnd
from headrace.partitions.partition import Partition
from headrace.ports.network import Part
from headrace.records import kernel
from headrace.simulator.history import Trace
from headrace.storage import folder
from headrace.storage.commitlog import frames
from headrace.storage.log import TopicPartition
from headrace.storage.segments.segment import LOG
from headrace.virtual.coordination import CoordinationStore
from headrace.virtual.disk import UNLIMITED_BYTES, VirtualDisk
from headrace.virtual.loop import VirtualLoop
from headrace.virtual.network import VirtualChannel, VirtualHost, VirtualNetwork
from headrace.virtual.process import Process

RESTART_SECONDS: Final = 0.5
PERHAPS_TORN_BYTES: Final = 1024
TORN_SHARE: Final = 0.5
"""Of kills, those that come in the middle of a write."""
A_BATCH: Final = bytes(kernel.build([(0, None, b"nobody was told of it", [])]))
DATA: Final = "/data"
COMMIT_LOG: Final = "/data/@commitlog"


class Broker(Protocol):
    participant: Participant
    front_end: FrontEnd

    async def start(self) -> None: ...

    async def stop(self) -> None:
        """Safe at any point of a start that failed."""
        ...


class Machine:
    def __init__(
        self,
        id: int,
        loop: VirtualLoop,
        network: VirtualNetwork,
        store: CoordinationStore,
        trace: Trace,
        seed: int,
        sync_seconds: tuple[float, float],
        build: Callable[[Machine, Process, VirtualHost], Broker],
    ) -> None:
        self.id = id
        self.name = f"b{id}"
        self.loop = loop
        self.network = network
        self.store = store
        self.random = random.Random(seed)
        self._tears = random.Random(f"tears {seed}")
        self.disk = VirtualDisk(loop.clock)
        self.disk.make_folder(DATA)
        self.disk.sync_folder("/")
        self.participant: Participant | None = None
        """The broker, once it has started."""
        self.overheard: Callable[[Machine, VirtualChannel, Sequence[Part]], None] | None = None
        """Is told of everything that its broker sends."""
        self.process: Process | None = None
        self.buried: list[Process] = []
        self.boots = 1
        self._opened_in_boot = 1
        """The last boot in which a broker has opened its logs, so that a later start knows what was torn before it."""
        self.lives = 0
        self.stopped_lives: set[str] = set()
        """Those that were asked to stop."""
        self.clock_was_set = False
        self.sync_seconds = self.quick_sync_seconds = sync_seconds
        self.wall_offset_ms = self._furthest_offset_ms = 0
        self.wanted = False
        """Whether the supervisor keeps it running."""
        self.stopping = False
        self._trace = trace
        self._build = build
        self._host: VirtualHost | None = None

    @property
    def life(self) -> str:
        """Name of this run of the process."""
        return f"{self.name}.{self.lives}"

    @property
    def boot(self) -> str:
        return f"{self.name}-boot-{self.boots}"

    def step_clock(self, offset_ms: int) -> None:
        """Its wall clock is off by so much from now on."""
        self.wall_offset_ms = offset_ms
        self.clock_was_set = True
        self._furthest_offset_ms = max(self._furthest_offset_ms, offset_ms)
        if self.process is not None:
            self.process.wall_offset_ms = offset_ms

    def take_furthest_wall_ms(self) -> int:
        """The latest that its clock has been, as of now, since this was asked for the last time."""
        furthest, self._furthest_offset_ms = self._furthest_offset_ms, self.wall_offset_ms
        return self.loop.clock.wall_ms() + furthest

    @property
    def up(self) -> bool:
        return self.process is not None

    @property
    def paused(self) -> bool:
        return self.process is not None and self.process.paused

    def replica(self, where: TopicPartition) -> Partition | None:
        """The partition, if a broker runs here that holds a replica of it, whatever its role."""
        if self.participant is None:
            return None
        return self.participant.partitions.find_replica(where.topic, where.partition)

    def leading(self, where: TopicPartition) -> Partition | None:
        """The partition, if a broker runs here that leads it by its own account."""
        return None if self.participant is None else self.participant.partitions.find(where.topic, where.partition)

    def transaction_state(self, transactional_id: str) -> str:
        """As the broker here has it in memory; empty if it coordinates no such id."""
        return "" if self.participant is None else self._broker.front_end.transactions.describe(transactional_id).state

    def start(self) -> None:
        """Have a broker run here."""
        self.wanted = True
        if self.process is not None:
            return
        self.lives += 1
        self.note("starts")
        process = self.process = Process(self.loop, self.name)
        process.wall_offset_ms = self.wall_offset_ms
        self.disk.serve(process, lambda: self.random.uniform(*self.sync_seconds))
        self._host = self.network.host(self.name, process)
        if self.overheard is not None:
            self._host.overheard = partial(self.overheard, self)
        process.run(self._serve(process, self._host)).add_done_callback(self._done)

    async def _serve(self, process: Process, host: VirtualHost) -> None:
        broker = self._broker = self._build(self, process, host)
        try:
            await broker.start()
        except (HeadraceError, OSError) as error:
            self.note(f"cannot start: {error}")
            await self._close(process, broker)
            return
        self.participant = broker.participant
        self._opened_in_boot = self.boots
        self.note("serves")

    def _done(self, task: asyncio.Task[None]) -> None:
        """A start or a stop has ended: what it raised by mistake is a finding."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failed(error)

    def failed(self, error: BaseException) -> None:
        """A part of the broker that must run has died: the process ends, as server/node.py has it."""
        self.note(f"fails: {error!r}")
        if not isinstance(error, HeadraceError | OSError):
            raise error
        self.loop.clock.call_soon(self.kill)

    def _ended(self, process: Process) -> None:
        """The process has come to its own end."""
        if self.process is process:
            self.loop.clock.call_soon(self._clear)

    def stop(self) -> None:
        """Ask the broker to stop in order, as SIGTERM does."""
        if self.process is None or self.participant is None or self.stopping:
            return
        self.note("stops")
        self.stopped_lives.add(self.life)
        self.stopping = True
        self.process.run(self._close(self.process, self._broker)).add_done_callback(self._done)

    async def _close(self, process: Process, broker: Broker) -> None:
        try:
            await broker.stop()
            self.note("stopped")
        except OSError as error:
            self.note(f"stopped, not in order: {error}")
        self._ended(process)

    def kill(self) -> None:
        """kill -9: what was written stays in the page cache, perhaps with the beginning of what was under way;
        peers hear that the connections end."""
        if self.process is not None:
            self.note("is killed")
            if self._tears.random() < TORN_SHARE and self.disk.trouble is None and not self.disk.limited:
                self._begin_write()
            self._clear()

    def _begin_write(self) -> None:
        logs = [each for each in self.participant.store.logs() if not each.offline] if self.participant else []
        if not logs:
            return
        log = self._tears.choice(logs)
        key, first = (log.topic_id, log.topic_partition.partition), log.written_offset
        begun = first.to_bytes(8, "big") + A_BATCH[8:]
        shared = self.disk.exists(COMMIT_LOG)
        if shared:
            begun = frames.pack(frames.APPEND, len(begun), *key, first, first + 1) + begun
        path = COMMIT_LOG if shared else folder.partition_folder(DATA, log.topic_partition)
        names = self._logs().get(path)
        if names:
            file = self.disk.open(f"{path}/{max(names)}", writable=True)
            file.pwritev([begun[: self._tears.randrange(1, len(begun))]], file.size())

    def cut_power(self) -> None:
        """What was not synced is lost in part; peers hear nothing."""
        self.note("loses power")
        self._clear(silent=self.random.random() < 0.7)
        self.boots += 1
        self.disk.crash(self.random.randrange(1 << 30))

    def fail_sync(self, *, unheard: bool) -> str:
        """The next sync of a file that is being written fails; answers which. `unheard`: the broker hears of no sync
        any more, and is killed when the disk is well again.
        """
        newest = [f"{path}/{max(names)}" for path, names in self._logs().items() if names]
        path = self.random.choice(newest) if newest else DATA
        self.disk.fail_sync(path)
        if unheard:
            self.disk.answer_no_sync()
        return path

    def well(self) -> None:
        """Its disk fails no call any more, and has room."""
        self.disk.trouble = None
        self.disk.capacity_bytes = UNLIMITED_BYTES

    def flip_byte(self, spared: Mapping[str, Sequence[range]], *, power_may_go: bool) -> tuple[str, int] | None:
        """A byte that is safe on disk is another one from now on; answers its file and position. It is none of those
        that are spared, by file, and none of the last if power was lost since a broker opened its logs, or may be
        before the next one does: nobody could tell it from a write that was torn.
        """
        assert self.process is None
        perhaps_torn = power_may_go or self._opened_in_boot != self.boots
        sizes = self.safe_bytes(PERHAPS_TORN_BYTES if perhaps_torn else 0)
        if not sizes:
            return None
        path = self.random.choices(list(sizes), list(sizes.values()))[0]
        position = self.random.randrange(sizes[path])
        if any(position in each for each in spared.get(path, ())):
            return None
        self.disk.flip(path, position, 1 << self.random.randrange(8))
        return path, position

    def safe_bytes(self, spared_bytes: int) -> dict[str, int]:
        """How many bytes at the beginning of each file with records are safe, but for the last of each log."""
        sizes: dict[str, int] = {}
        for path, names in self._logs().items():
            spared = spared_bytes
            for name in sorted(names, reverse=True):
                size = self.disk.synced_bytes(f"{path}/{name}")
                if size > spared:
                    sizes[f"{path}/{name}"] = size - spared
                spared = max(0, spared - size)
        return sizes

    def _logs(self) -> dict[str, list[str]]:
        """The files with records, by their folders."""
        disk = self.disk
        folders = [COMMIT_LOG] if disk.exists(COMMIT_LOG) else [path for _, path in folder.partitions(disk, DATA)]
        return {path: [name for name in disk.list(path) if name.endswith(LOG)] for path in folders}

    def holds(self, where: TopicPartition) -> bool:
        """Whether a log of the partition is open here, or would be at the next start."""
        opened = self.participant is not None and self.participant.store.get(where) is not None
        return opened or self.disk.exists(folder.partition_folder(DATA, where))

    def mend_disk(self) -> None:
        """Nothing fails any more, and a broker that has a log offline, or hears nothing, is started again."""
        self.disk.mend()
        self.well()
        if self.disk.silent or (
            self.participant is not None and any(each.offline for each in self.participant.store.logs())
        ):
            self.kill()

    def _clear(self, *, silent: bool = False) -> None:
        process, self.process, self.participant, self.stopping = self.process, None, None, False
        if process is None:
            return
        assert self._host is not None
        process.die()
        self.network.vanish(self._host, silent=silent)
        self.disk.release()
        self.buried.append(process)
        if self.wanted:
            self.loop.clock.call_later(RESTART_SECONDS, self._supervise)

    def _supervise(self) -> None:
        if self.wanted and self.process is None:
            self.start()

    def pause(self) -> None:
        if self.process is not None:
            self.note("pauses")
            self.process.pause()

    def resume(self) -> None:
        if self.process is not None and self.process.paused:
            self.note("goes on")
            self.process.resume()

    def note(self, text: str) -> None:
        self._trace.note(self.loop.clock.now(), f"{self.life} {text}")

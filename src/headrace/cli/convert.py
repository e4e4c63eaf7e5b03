"""`headrace log convert`: give the data folder of a stopped broker the other layout."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from tempfile import TemporaryDirectory

import click

from headrace.cli.options import json_option, pairs
from headrace.cli.output import format_bytes, show_json
from headrace.cluster import keys
from headrace.cluster.config import effective
from headrace.cluster.image import Image, from_listing
from headrace.coordination.choice import FILE
from headrace.coordination.embedded import EmbeddedCoordination
from headrace.errors import DataFolderError
from headrace.ports.clock import Clock
from headrace.settings import values
from headrace.storage import folder
from headrace.storage.offline.convert import ConversionOptions, Summary, Tell
from headrace.storage.offline.convert import convert as convert_folder
from headrace.system.clock import LoopClock
from headrace.system.disk import SystemDisk, raise_open_files_limit


@click.command()
@click.option("--data", required=True, metavar="DIR", help="The data folder of a stopped broker.")
@click.option("--to", "layout", required=True, type=click.Choice([folder.SHARED, folder.PARTITIONED]), help="Layout.")
@click.option("--keep", is_flag=True, help="Keep the old files, in a folder beside the new ones.")
@click.option("--dry-run", is_flag=True, help="Check the folder and say what would be done; change nothing.")
@click.option("--config", "config_file", metavar="FILE", help="The broker's settings as TOML.")
@click.option("--set", "assignments", multiple=True, metavar="NAME=VALUE", help="Any other of its settings; repeat.")
@json_option
def convert(
    data: str,
    layout: str,
    keep: bool,
    dry_run: bool,
    config_file: str | None,
    assignments: tuple[str, ...],
    as_json: bool,
) -> int:
    """Give a data folder the other layout, with the same content.

    The new form is built beside the old one and compared with it byte for byte before that is removed, so the disk
    needs room for both. An interrupted run leaves the old or the new one; run it again to go on.

    Files get the size that the broker's settings ask for (commitlog.file.bytes, log.segment.bytes), given as to `serve`
    by --config, the environment and --set; segments that of their topic (segment.bytes), if the topics are in the
    folder and not in etcd.
    """
    given = values.load(config_file, flags=dict(pairs(assignments, "--set")))
    path = os.path.abspath(data)
    disk = SystemDisk()
    if not os.path.isdir(path) or not disk.exists(f"{path}/{folder.LOCK_FILE}"):
        raise DataFolderError(
            f"{path} is not the data folder of a broker; it is what `headrace serve --data` was given"
        )
    raise_open_files_limit()
    loop = asyncio.new_event_loop()
    try:
        with _progress() as tell:
            options = ConversionOptions(
                layout,
                keep=keep,
                dry_run=dry_run,
                commit_file_bytes=given["commitlog.file.bytes"],
                settings=_topic_settings(loop, path, given),
            )
            done = convert_folder(disk, LoopClock(loop), path, options, tell)
    finally:
        loop.close()
    if as_json:
        show_json(asdict(done) | {"set_aside": list(done.set_aside)})
    else:
        _show(done)
    return 0


def _topic_settings(
    loop: asyncio.AbstractEventLoop, path: str, given: values.BrokerSettings
) -> Callable[[str], values.LogSettings]:
    """Settings by topic. The topics are read when they are first asked for: then the folder is known to be stopped."""

    @cache
    def image() -> Image:
        return loop.run_until_complete(stopped_image(path, LoopClock(loop))) or Image("")

    @cache
    def of(topic: str) -> values.LogSettings:
        found = image().topics.get(topic)
        defaults = effective(given, image(), given["node.id"]).topic_defaults()
        return values.log_settings(defaults, found.overrides if found else {})

    return of


def _show(done: Summary) -> None:
    content = f"{done.partitions} partitions, {done.records} records, {format_bytes(done.size_bytes)}"
    for stray in done.set_aside:
        click.echo(f"set aside, left as it is: {stray}")
    if done.dry_run:
        recover = "" if done.was_clean else "; it was not stopped cleanly and would be recovered first"
        click.echo(f"{done.data} could be converted from {done.source} to {done.target}: {content}{recover}")
        return
    if not done.partitions and done.resumed:
        content = "an interrupted conversion was finished"
    click.echo(f"{done.data} is now {done.target}, was {done.source}; {content}, {done.seconds:.1f} s")
    if done.kept:
        click.echo(f"the old files are in {done.kept}; remove it when you do not need them")


@contextmanager
def _progress() -> Iterator[Tell]:
    """A bar on the terminal that follows the steps."""
    if not sys.stderr.isatty():
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as progress:
        task, shown = progress.add_task("check", total=None), "check"

        def tell(step: str, done: int, total: int) -> None:
            nonlocal task, shown
            if step != shown:
                progress.remove_task(task)
                task, shown = progress.add_task(step, total=total or None), step
            progress.update(task, completed=done)

        yield tell


async def stopped_image(folder: str, clock: Clock) -> Image | None:
    """What the broker's metadata file says, read from a copy: nothing in its folder is touched. None if the folder has
    no such file, as that of a broker on etcd, or nothing is in it. DataFolderError: it is damaged."""
    with TemporaryDirectory() as copy:
        if not _copy(folder, copy):
            return None
        coordination = EmbeddedCoordination(f"{copy}/{FILE}", clock)
        try:
            found = await coordination.get(keys.CLUSTER_ID)
            if found is None:
                return None
            prefix = keys.cluster_prefix(str(keys.decode(found.key, found.value)))
            return from_listing(prefix, await coordination.list(prefix))
        finally:
            await coordination.close()


def _copy(folder: str, target: str) -> bool:
    """With what is written ahead, as a kill leaves it. Answers whether there is anything."""
    there = [name for name in (FILE, f"{FILE}-wal") if os.path.exists(f"{folder}/{name}")]
    for name in there:
        shutil.copyfile(f"{folder}/{name}", f"{target}/{name}")
    return FILE in there

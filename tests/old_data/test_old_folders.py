"""Data folders that earlier code has written are opened by today's, and nothing in them is lost (see `make.py`)."""

from __future__ import annotations

import json
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from brokers import Broker
from old_data.content import KEEP, content
from old_data.kept import check_log_bytes, check_same, check_served, check_whole, headrace, log_bytes, unpack
from proving import proves

Start = Callable[..., Broker]
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SETTINGS = {**KEEP, "log.layout": "auto"}


@pytest.fixture
def start(fresh_broker: Start, request: pytest.FixtureRequest) -> Start:
    if request.config.getoption("--apache-kafka"):
        pytest.skip("Apache Kafka does not read these folders")
    return fresh_broker


def put_kernel(data: Path, this_boot: bool) -> None:
    """Have the folder left on the kernel that runs now, which still has all that was written, or on one before."""
    boot = BOOT_ID.read_text().strip() if this_boot else "of another kernel"
    last_run = data / "incarnation.json"
    last_run.write_text(json.dumps({**json.loads(last_run.read_text()), "boot": boot}))


def found_by_key(broker: Broker, key: str) -> list[tuple[int, str]]:
    query = urllib.parse.urlencode({"key": key, "order": "offset", "count": 1000})
    with urllib.request.urlopen(f"{broker.http}/topics/by-key/query?{query}", timeout=20) as answer:
        return [(record["offset"], record["value"]) for record in json.load(answer)["records"]]


def check_keys(broker: Broker, told: dict[str, Any]) -> None:
    """The key index finds what the records say."""
    wanted: dict[str, list[tuple[int, str]]] = {}
    for offset, _, _, _, key, value, _ in told["content"]["topics"]["by-key"]["partitions"]["0"]["records"]:
        wanted.setdefault(key, []).append((offset, value))
    assert len(wanted) > 3
    assert {key: found_by_key(broker, key) for key in wanted} == wanted


@proves("G12", "J6", "R4")
@pytest.mark.parametrize("left", ["stopped", "killed", "without power", "without checkpoint"])
@pytest.mark.parametrize("layout", ["partitioned", "shared"])
def test_a_folder_of_earlier_code_opens_and_goes_on(layout: str, left: str, start: Start, tmp_path: Path) -> None:
    stopped, data = left == "stopped", tmp_path / "data"
    told = unpack(f"{layout}-stopped" if stopped else f"{layout}-killed", tmp_path)
    before = log_bytes(data)
    if stopped:
        check_whole(data)
    else:
        put_kernel(data, this_boot=left != "without power")
    if left == "without checkpoint":
        (data / "@checkpoint").unlink()  # Where logs begin is told by markers and frames too.
    broker = start(settings=SETTINGS, data=data)
    check_served(broker.bootstrap, told)
    check_keys(broker, told)
    assert broker.stop() == 0
    check_log_bytes(data, before)
    check_whole(data)
    names = (str(data), *told["content"]["topics"])
    complaints = [line for line in broker.stderr().splitlines() if " info " not in line and any(map(line.count, names))]
    assert left not in ("stopped", "killed") or complaints == []


@proves("L5", "R2")
@pytest.mark.parametrize("layout", ["partitioned", "shared"])
def test_a_folder_of_earlier_code_is_converted(layout: str, start: Start, tmp_path: Path) -> None:
    told, data = unpack(f"{layout}-stopped", tmp_path), tmp_path / "data"
    other = {"partitioned": "shared", "shared": "partitioned"}[layout]
    headrace("log", "convert", "--data", str(data), "--to", other)
    check_whole(data)
    broker = start(settings=SETTINGS, data=data)
    check_same(content(broker.bootstrap, told["content"]["groups"]), told["content"])
    check_keys(broker, told)

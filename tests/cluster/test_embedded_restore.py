"""The metadata file of a single broker put back to an older copy."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from brokers import Broker, wait_for
from cli.conftest import run_command
from headrace.coordination.choice import FILE
from proving import proves


@proves("J6")
@pytest.mark.thorough
def test_a_broker_on_an_older_metadata_file_waits_for_its_operator(tmp_path: Path) -> None:
    broker = Broker(tmp_path / "data", {})
    file, copy = tmp_path / "data" / FILE, tmp_path / "copy"
    broker.start()
    run_command("topic", "create", "t", bootstrap=broker.bootstrap)
    run_command("produce", "t", stdin="kept\n", bootstrap=broker.bootstrap)
    broker.stop()
    shutil.copyfile(file, copy)
    broker.start()
    run_command("topic", "create", "newer", bootstrap=broker.bootstrap)
    broker.stop()
    shutil.copyfile(copy, file)
    try:
        broker.start()
        refused = run_command("cluster", "accept-metadata", "--dry-run", bootstrap=broker.bootstrap, exit_code=1)
        assert "vanished" in refused.stdout
        run_command("cluster", "accept-metadata", bootstrap=broker.bootstrap)
        wait_for(
            "the topic is led again",
            lambda: run_command("consume", "t", bootstrap=broker.bootstrap).stdout == "kept\n",
        )
        assert (tmp_path / "data" / "newer" / "newer-0").is_dir()
    finally:
        broker.kill()

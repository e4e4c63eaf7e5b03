"""What needs no broker: help, versions, wrong usage, settings, and a broker that is not there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from brokers import free_port
from cli.conftest import Run, environment
from headrace import __version__
from headrace.cli.main import COMMANDS, main
from proving import proves


def test_help_names_every_command_and_imports_none(alone: Run) -> None:
    shown = alone("--help").stdout
    assert all(f"\n  {name} " in shown for name in COMMANDS)
    assert len(shown.splitlines()) < 40
    assert max(map(len, shown.splitlines())) <= 80
    script = "import sys; from headrace.cli.main import main; main(['--help']); print(sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(None), capture_output=True, text=True, check=True
    )
    loaded = done.stdout.splitlines()[-1]
    for heavy in ("kio", "rich", "uvloop", "headrace.client", "headrace.wire", "asyncio"):
        assert f"'{heavy}'" not in loaded


def test_a_command_that_reads_no_records_loads_neither_checksums_nor_codecs() -> None:
    """They take as long to load as all the rest of `headrace topic create`."""
    script = "import sys; import headrace.cli.topic; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert not {"crc32c", "cramjam", "lz4", "headrace.records.batch"} & set(loaded.stdout.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(alone: Run, command: str) -> None:
    assert alone(command, "--help").stdout.startswith(f"Usage: headrace {command}")


def test_the_version_is_printed(alone: Run) -> None:
    assert alone("--version").stdout == f"headrace {__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("nonsense",),
        ("topic",),
        ("topic", "create"),
        ("topic", "create", "t", "--partitions", "0"),
        ("topic", "create", "t", "--config", "x"),
        ("topic", "alter", "t"),
        ("topic", "list", "--nonsense"),
        ("consume", "t", "--from", "x"),
        ("consume", "t", "--from-time", "x"),
        ("consume", "t", "--from", "end", "--from-time", "1h ago"),
        ("consume", "t", "--group", "g", "--partition", "0"),
        ("consume", "t", "--format", "nonsense"),
        ("produce", "t", "--acks", "2"),
        ("produce", "t", "--json-lines", "--key-separator", ":"),
        ("config", "describe", "broker", "x"),
        ("config", "describe", "nonsense", "x"),
        ("topic", "list", "--bootstrap", "x:y"),
        ("serve", "--set", "nonsense"),
        ("serve", "--set", "nonsense=1"),
        ("serve", "--set", "num.partitions=-1"),
        ("serve", "--config", "/does/not/exist"),
    ],
)
def test_wrong_usage_is_told_on_stderr_with_exit_code_2(alone: Run, arguments: tuple[str, ...]) -> None:
    done = alone(*arguments, exit_code=2)
    assert done.stdout == ""
    assert done.stderr.strip()


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (("topc",), "'topic'"),
        (("pipeline", "archve"), "'archive'"),
        (("topic", "lst"), "'list'"),
        (("topic", "list", "--jsn"), "'--json'"),
    ],
)
@proves("U1")
def test_an_unknown_command_or_flag_is_told_with_the_nearest_one(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], meant: str
) -> None:
    assert main(list(arguments)) == 2
    told = capsys.readouterr().err
    assert meant in told[told.index("Did you mean") :]


def test_a_broker_that_is_not_there_is_one_clear_line(alone: Run) -> None:
    port = free_port()
    done = alone("topic", "list", "--bootstrap", f"127.0.0.1:{port}", "--timeout", "0.2", exit_code=1)
    assert re.fullmatch(
        rf"headrace: no broker answers at 127\.0\.0\.1:{port} \(tried for \d+\.\d s\); "
        "start a broker with `headrace serve`\n",
        done.stderr,
    )


@proves("R15")
def test_effective_settings_are_printed_with_their_source(
    alone: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text("num.partitions = 3\n[log]\nretention.ms = 5000\nsegment.bytes = 4096\n")
    shown = alone(
        *("serve", "--print-config", "--json", "--config", str(file), "--data", "/d", "--listen", "a=127.0.0.1:1"),
        *(
            "--listen",
            "b=tls://127.0.0.1:2",
            "--advertise",
            "b=host:3",
            "--http",
            "off",
            "--set",
            "log.segment.bytes=8192",
        ),
    ).stdout
    rows = {row["setting"]: row for row in json.loads(shown)}
    found = {name: (row["value"], row["source"]) for name, row in rows.items()}
    assert found["num.partitions"] == (3, f"file {file}")
    assert found["log.retention.ms"] == (5000, f"file {file}")
    assert found["log.segment.bytes"] == (8192, "flag")
    assert found["data"] == ("/d", "flag")
    assert found["listen"] == (["a=127.0.0.1:1", "b=tls://127.0.0.1:2"], "flag")
    assert found["advertise"] == (["b=host:3"], "flag")
    assert found["http.listen"] == ("off", "flag")
    assert found["node.id"] == (1, "default")
    assert all(row["meaning"] for row in rows.values())


@proves("R15")
def test_settings_come_from_the_environment_and_the_clients_own_variable_is_passed_over() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "headrace.cli.main", "serve", "--print-config"],
        env={**environment("127.0.0.1:1"), "HEADRACE_NUM_PARTITIONS": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("num.partitions "))
    assert line.split()[:5] == ["num.partitions", "7", "partitions", "environment", "HEADRACE_NUM_PARTITIONS"]


@proves("R15")
def test_an_unknown_setting_is_refused_with_the_nearest_one(alone: Run) -> None:
    done = alone("serve", "--set", "num.partition=1", exit_code=2)
    assert done.stderr == "headrace: flag: unknown setting 'num.partition'; did you mean 'num.partitions'?\n"

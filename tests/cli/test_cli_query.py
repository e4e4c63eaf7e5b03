"""`headrace query` as a person runs it: by key, by offset, by time, over an archive that nobody has indexed yet."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from archive_tables import MIDNIGHT_MS, Row, append
from headrace.cli.main import main
from proving import proves

Ask = Callable[..., list[str]]
Finished = subprocess.CompletedProcess[str]

ROWS = [
    Row("123", 0, 0, MIDNIGHT_MS, b"a", b"first"),
    Row("123", 0, 1, MIDNIGHT_MS + 1000, b"b", b"other", (("trace", b"\xff"),)),
    Row("123", 1, 7, MIDNIGHT_MS + 2000, b"\xff\x00", b"binary"),
    Row("123", 0, 2, MIDNIGHT_MS + 90_000_000, b"a", None),
    Row("orders", 0, 0, MIDNIGHT_MS, b"a", b"another topic"),
    Row("123", 1, 8, MIDNIGHT_MS + 3000, None, b"no key"),
]


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("my archive")
    append(folder, ROWS[:3])
    append(folder, ROWS[3:])
    return folder


@pytest.fixture
def ask(archive: Path, capfd: pytest.CaptureFixture[str]) -> Ask:
    def run(*arguments: str) -> list[str]:
        assert main(["query", "--archive", str(archive), *arguments]) == 0
        return capfd.readouterr().out.splitlines()

    return run


@proves("R3")
def test_by_key_newest_first_or_by_offset(ask: Ask) -> None:
    assert ask("--topic", "123", "--key", "a", "--format", "%p:%o") == ["0:2", "0:0"]
    assert ask("--topic", "123", "--key", "a", "--format", "%p:%o", "--order", "offset", "-n", "1") == ["0:0"]
    assert ask("--topic", "123", "--hex-key", "ff00", "--format", "value") == ["binary"]
    assert ask("--topic", "orders", "--key", "a") == [f"0:0 {MIDNIGHT_MS} a another topic"]
    assert ask("--topic", "123", "--key", "unknown") == []


@proves("R3")
def test_by_partition_and_offset(ask: Ask) -> None:
    found = ask(
        "--topic", "123", "--offset", "0:1", "--offset", "1:7", "--offset", "0:99", "--json", "--order", "offset"
    )
    assert [json.loads(line) for line in found] == [
        {
            "topic": "123", "partition": 0, "offset": 1, "timestamp": MIDNIGHT_MS + 1000, "key": "b", "value": "other",
            "headers": [{"name": "trace", "value_base64": "/w=="}],
        },
        {
            "topic": "123", "partition": 1, "offset": 7, "timestamp": MIDNIGHT_MS + 2000, "key_base64": "/wA=",
            "value": "binary", "headers": [],
        },
    ]  # fmt: skip
    assert ask("--topic", "123", "--offset", "0:1", "--key", "a") == []


@proves("R3")
def test_by_time_the_end_left_out(ask: Ask) -> None:
    window = ("--from", f"@{MIDNIGHT_MS + 1000}", "--to", f"@{MIDNIGHT_MS + 3000}")
    assert ask("--topic", "123", *window, "--format", "%p:%o") == ["1:7", "0:1"]
    assert ask("--topic", "123", "--from", "2026-11-16T00:00:00+00:00", "--format", "%p:%o") == ["0:2"]
    assert ask("--topic", "123", "--key", "a", "--to", f"@{MIDNIGHT_MS + 1}", "--format", "%p:%o") == ["0:0"]


def test_says_what_was_searched_without_an_index(alone: Callable[..., Finished], archive: Path) -> None:
    done = alone("query", "--archive", str(archive), "--topic", "123", "--key", "a")
    assert done.stdout.splitlines() == [f"0:2 {MIDNIGHT_MS + 90_000_000} a ", f"0:0 {MIDNIGHT_MS} a first"]
    assert done.stderr.startswith("2 records, ")
    assert "4 files are newer than the index and were searched" in done.stderr


def test_says_what_is_kept_elsewhere_or_not_at_all(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    append(tmp_path, [Row("123", 0, 0, MIDNIGHT_MS, b"a", None), Row("123", 0, 1, MIDNIGHT_MS, b"b", b"kept")])
    at = datetime.fromtimestamp(MIDNIGHT_MS / 1000, UTC)
    dead = [
        {"topic": topic, "partition": 0, "offset": n, "timestamp": at, "key": b"a", "value": b"{", "reason": "not JSON"}
        for topic, n in [("123", 2), ("123", 3), ("orders", 4)]
    ]
    write_deltalake(str(tmp_path / "dead_letters"), pa.Table.from_pylist(dead))

    def told(*arguments: str) -> str:
        assert main(["query", "--archive", str(tmp_path), "--topic", "123", *arguments]) == 0
        return capfd.readouterr().err

    assert "2 dead letters match" in told("--key", "a")
    assert "0:2 (not JSON), 0:3 (not JSON)" in told("--from", "@0")
    assert "1 dead letters match" in told("--offset", "0:3")
    assert "dead letters" not in told("--key", "b")
    assert "--drop-value" not in told("--key", "a")
    state = tmp_path / "checkpoints" / "archive" / "query.json"
    state.parent.mkdir(parents=True)
    state.write_text(json.dumps({"query": "q", "identity": {"drop_value": True}}))
    assert "1 records have no value because the archive keeps none" in told("--key", "a")
    assert "--drop-value" not in told("--key", "b")


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (["--key", "k", "--bootstrap", "127.0.0.1:1", "--timeout", "0.1"], 1, "no broker answers at 127.0.0.1:1"),
        (["--archive", "ARCHIVE"], 2, "give --key, --hex-key, --offset, --from or --to"),
        (["--archive", "ARCHIVE", "--offset", "1-2"], 2, "'1-2' is not PARTITION:OFFSET"),
        (["--archive", "ARCHIVE", "--hex-key", "xy"], 2, "'xy' is not hexadecimal"),
        (["--archive", "ARCHIVE", "--from", "then"], 2, "'then' is not a time"),
        (["--archive", "ARCHIVE", "--key", "k", "--format", "%z"], 2, "%z is none of"),
        (["--archive", "ARCHIVE/none", "--key", "k"], 1, "has no archive; `headrace pipeline archive --to"),
        (["--archive", "PARQUET", "--key", "k"], 1, "is archived as plain Parquet"),
        (
            ["--archive", "ARCHIVE", "--key", "k", "--isolation", "uncommitted"],
            2,
            "an archive has only what is committed",
        ),
    ],
)
def test_says_what_is_wrong(
    archive: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    exit_code: int,
    message: str,
) -> None:
    monkeypatch.delenv("HEADRACE_BOOTSTRAP", raising=False)
    (tmp_path / "records" / "_spark_metadata").mkdir(parents=True)
    given = [text.replace("ARCHIVE", str(archive)).replace("PARQUET", str(tmp_path)) for text in arguments]
    assert main(["query", "--topic", "123", *given]) == exit_code
    assert message in " ".join(capfd.readouterr().err.split())

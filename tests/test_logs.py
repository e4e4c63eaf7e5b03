"""The broker's own log: readable lines, JSON lines, and no flood from a hostile peer."""

from __future__ import annotations

import io
import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace import logs
from proving import proves

Setup = Callable[[str, str], io.StringIO]


@pytest.fixture
def setup() -> Iterator[Setup]:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level

    def start(format: str, level: str) -> io.StringIO:
        stream = io.StringIO()
        logs.setup(format, level, stream)
        return stream

    yield start
    for handler in root.handlers[:]:
        if handler not in before:
            root.removeHandler(handler)
    root.setLevel(level)


log = logging.getLogger("headrace.kafka.connection")


def test_a_text_line_has_time_level_origin_message_and_fields(setup: Setup) -> None:
    stream = setup("text", "info")
    log.warning("closing the connection from %s", "10.0.0.7:4711", extra={"api": "Produce", "version": 9})
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} warning kafka\.connection: "
        r"closing the connection from 10\.0\.0\.7:4711 api=Produce version=9\n",
        stream.getvalue(),
    )


def test_a_json_line_has_the_same_as_fields(setup: Setup) -> None:
    stream = setup("json", "info")
    log.error("disk %s is full", "/data", extra={"free_bytes": 0, "odd": {1, 2}})
    line = json.loads(stream.getvalue())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    assert line == {
        "level": "error",
        "logger": "headrace.kafka.connection",
        "message": "disk /data is full",
        "free_bytes": 0,
        "odd": "{1, 2}",
    }


def test_an_exception_comes_with_its_traceback(setup: Setup) -> None:
    for format in ("text", "json"):
        stream = setup(format, "info")
        try:
            raise ValueError("broken")
        except ValueError:
            log.exception("it failed")
        assert "ValueError: broken" in stream.getvalue()
        assert "Traceback" in stream.getvalue()
    assert "ValueError: broken" in json.loads(stream.getvalue())["exception"]


def test_a_strangers_bytes_cannot_begin_a_new_line(setup: Setup) -> None:
    for format in ("text", "json"):
        stream = setup(format, "info")
        log.warning("client %s", "evil\n2026-01-01 00:00:00 info node: all is well\r\x1b[2J\u2028")
        assert len(stream.getvalue().splitlines()) == 1
        assert "\x1b" not in stream.getvalue()


def test_an_endless_message_is_cut(setup: Setup) -> None:
    stream = setup("text", "info")
    log.warning("client %s", "x" * 1_000_000)
    assert len(stream.getvalue()) < 2 * logs.MESSAGE_CHARACTERS_MAX
    assert "(1000007 characters)" in stream.getvalue()


def test_the_level_holds_back_what_is_below(setup: Setup) -> None:
    stream = setup("text", "warning")
    log.info("unseen")
    log.warning("seen")
    assert "unseen" not in stream.getvalue()
    assert "seen" in stream.getvalue()


def test_a_template_that_does_not_fit_still_tells_of_the_event() -> None:
    record = logging.LogRecord("peer", logging.WARNING, "", 0, "one %s two %s", ("only one",), None)
    assert "one %s two %s ('only one',) (the template does not fit" in logs.TextLines().format(record)


def test_setup_again_replaces_the_first(setup: Setup) -> None:
    first, second = setup("text", "info"), setup("text", "info")
    log.warning("once")
    assert first.getvalue() == ""
    assert second.getvalue().count("once") == 1


class Limited:
    """A limited handler on a clock of its own."""

    def __init__(self) -> None:
        self.stream = io.StringIO()
        target = logging.StreamHandler(self.stream)
        target.setFormatter(logging.Formatter("%(levelname)s %(name)s %(message)s"))
        self.now = 0.0
        self.handler = logs.LimitedHandler(target, lambda: self.now)

    def say(self, template: str, *args: object, name: str = "peer") -> None:
        self.handler.emit(logging.LogRecord(name, logging.WARNING, "", 0, template, args, None))

    def lines(self) -> list[str]:
        return self.stream.getvalue().splitlines()


def test_a_repeated_message_is_written_so_often_and_then_counted() -> None:
    limited = Limited()
    for n in range(10_000):
        limited.say("bad frame from %d", n)
    assert len(limited.lines()) == logs.REPEATS_MAX
    limited.say("something else")
    assert limited.lines()[-1] == "WARNING peer something else"
    limited.now += logs.WINDOW_SECONDS
    limited.say("bad frame from %d", 10_000)
    assert limited.lines()[-2:] == [
        f"WARNING peer {10_000 - logs.REPEATS_MAX} more like this were not written: bad frame from %d",
        "WARNING peer bad frame from 10000",
    ]


def test_other_origins_and_templates_have_their_own_count() -> None:
    limited = Limited()
    for n in range(logs.REPEATS_MAX + 5):
        limited.say("bad frame from %d", n)
        limited.say("bad frame from %d", n, name="other peer")
        limited.say("bad length from %d", n)
    assert len(limited.lines()) == 3 * logs.REPEATS_MAX


def test_what_was_dropped_is_told_at_the_end() -> None:
    limited = Limited()
    for _ in range(logs.REPEATS_MAX + 3):
        limited.say("bad frame")
    limited.handler.close()
    assert limited.lines()[-1] == "WARNING peer 3 more like this were not written: bad frame"


def test_templates_without_end_do_not_fill_the_memory() -> None:
    limited = Limited()
    for n in range(3 * logs.TEMPLATES_MAX):
        limited.say(f"a message made by hand {n}")
    assert len(limited.handler._windows) <= logs.TEMPLATES_MAX


@proves("U6")
def test_a_line_for_the_journal_has_a_priority_and_no_time(setup: Setup) -> None:
    stream = setup("journal", "debug")
    for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL):
        log.log(level, "said at %d", level, extra={"api": "Produce"})
    assert stream.getvalue().splitlines() == [
        f"<{priority}>kafka.connection: said at {level} api=Produce"
        for priority, level in ((7, 10), (6, 20), (4, 30), (3, 40), (2, 50))
    ]


@proves("U6")
def test_each_line_of_a_traceback_has_the_priority_of_its_event(setup: Setup) -> None:
    stream = setup("journal", "info")
    try:
        raise ValueError("why")
    except ValueError:
        log.exception("it failed")
    lines = stream.getvalue().splitlines()
    assert lines[0] == "<3>kafka.connection: it failed"
    assert lines[-1] == "<3>    ValueError: why"
    assert all(line.startswith("<3>") for line in lines)


@proves("U6")
def test_only_the_stream_that_systemd_has_connected_is_the_journal(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "journal").open("w") as journal, (tmp_path / "redirected").open("w") as redirected:
        found = os.fstat(journal.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{found.st_dev}:{found.st_ino}")
        for stream in (journal, redirected):
            logs.setup("auto", "info", stream)
            log.warning("said")
    assert (tmp_path / "journal").read_text() == "<4>kafka.connection: said\n"
    assert (tmp_path / "redirected").read_text().endswith(" warning kafka.connection: said\n")

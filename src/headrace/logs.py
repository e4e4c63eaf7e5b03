"""The broker's own log: one line per event on standard error, for people or as JSON, never a flood.

    text     2026-03-01 12:00:00.123 warning kafka.connection: closing the connection from 10.0.0.7:4711: ... api=Fetch
    json     {"time":"2026-03-01T11:00:00.123Z","level":"warning","logger":"headrace.kafka.connection","message":"...",}
    journal  <4>kafka.connection: closing the connection from 10.0.0.7:4711: ... api=Produce

Text has the local time, JSON has UTC; for systemd's journal, which has times of its own, the level stands in front as
sd-daemon(3) wants it, of each line. `auto` is `journal` where standard error goes there, and `text` elsewhere. What is
given as `extra` becomes fields of their own. A stranger's bytes in a
message cannot begin a new line. Of messages with one origin and one template only so many are written in a minute; how
many more there were is said once, when the minute is over and something is written again, or at the end.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, TextIO

REPEATS_MAX: Final = 60
WINDOW_SECONDS: Final = 60.0
TEMPLATES_MAX: Final = 1000
MESSAGE_CHARACTERS_MAX: Final = 4000
OWN_PREFIX: Final = "headrace."

DEBUG_PRIORITY: Final = 7
_PRIORITIES: Final = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
"""From which level on a line has which priority of syslog(3)."""
_STANDARD_FIELDS: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_CONTROLS: Final = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160), 0x2028, 0x2029)}


def setup(format: str, level: str, stream: TextIO | None = None) -> logging.Handler:
    """Send everything that is logged in this process to the stream (standard error); replaces an earlier setup."""
    target = sys.stderr if stream is None else stream
    if format == "auto":
        format = "journal" if goes_to_journal(target) else "text"
    handler = logging.StreamHandler(target)
    handler.setFormatter(_FORMATTERS[format]())
    limited = LimitedHandler(handler)
    root = logging.getLogger()
    for old in root.handlers[:]:
        if isinstance(old, LimitedHandler):
            root.removeHandler(old)
            old.close()
    root.addHandler(limited)
    root.setLevel(level.upper())
    return limited


def goes_to_journal(stream: TextIO, environment: Mapping[str, str] = os.environ) -> bool:
    """systemd names the device and the inode that it has connected; what was redirected since then has others."""
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError):  # a stream in memory
        return False
    return environment.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD_FIELDS}


def _message(record: logging.LogRecord) -> str:
    try:
        message = record.getMessage()
    except (TypeError, ValueError, KeyError) as error:  # a wrong template must not lose the event
        message = f"{record.msg} {record.args!r} (the template does not fit: {error})"
    if len(message) > MESSAGE_CHARACTERS_MAX:
        message = f"{message[:MESSAGE_CHARACTERS_MAX]}... ({len(message)} characters)"
    return message


class TextLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        return f"{moment}.{int(record.msecs):03d} {record.levelname.lower()} {self.event(record)}"

    def event(self, record: logging.LogRecord) -> str:
        """Who says what."""
        fields = "".join(f" {name}={value}" for name, value in _fields(record).items())
        text = (_message(record) + fields).translate(_CONTROLS)
        line = f"{record.name.removeprefix(OWN_PREFIX)}: {text}"
        if record.exc_info:
            line += "\n    " + self.formatException(record.exc_info).replace("\n", "\n    ")
        return line


class JournalLines(TextLines):
    def format(self, record: logging.LogRecord) -> str:
        priority = next((number for least, number in _PRIORITIES if record.levelno >= least), DEBUG_PRIORITY)
        return "\n".join(f"<{priority}>{line}" for line in self.event(record).split("\n"))


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "time": moment.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _message(record),
        }
        for name, value in _fields(record).items():
            line.setdefault(name, value)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, separators=(",", ":"))


_FORMATTERS: Final[Mapping[str, type[logging.Formatter]]] = {
    "text": TextLines,
    "json": JsonLines,
    "journal": JournalLines,
}


class _Window:
    """How often one template was seen since it began."""

    __slots__ = ("began", "count", "level", "name", "template")

    def __init__(self, record: logging.LogRecord, began: float) -> None:
        self.began = began
        self.count = 0
        self.level = record.levelno
        self.name = record.name
        self.template = str(record.msg)


class LimitedHandler(logging.Handler):
    """Passes on what is within bounds and counts the rest."""

    def __init__(self, target: logging.Handler, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._target = target
        self._now = now
        self._windows: OrderedDict[tuple[str, str], _Window] = OrderedDict()

    def emit(self, record: logging.LogRecord) -> None:
        now = self._now()
        self._end_windows(now)
        key = (record.name, str(record.msg))
        window = self._windows.get(key)
        if window is None:
            if len(self._windows) >= TEMPLATES_MAX:
                self._report(self._windows.popitem(last=False)[1])
            window = self._windows[key] = _Window(record, now)
        window.count += 1
        if window.count <= REPEATS_MAX:
            self._target.handle(record)

    def _end_windows(self, now: float) -> None:
        """Windows stand in the order of their beginning."""
        while self._windows:
            first = next(iter(self._windows.values()))
            if now - first.began < WINDOW_SECONDS:
                return
            self._windows.popitem(last=False)
            self._report(first)

    def _report(self, window: _Window) -> None:
        dropped = window.count - REPEATS_MAX
        if dropped > 0:
            text = "%d more like this were not written: %s"
            self._target.handle(
                logging.LogRecord(window.name, window.level, "", 0, text, (dropped, window.template), None)
            )

    def close(self) -> None:
        while self._windows:
            self._report(self._windows.popitem(last=False)[1])
        self._target.flush()
        super().close()

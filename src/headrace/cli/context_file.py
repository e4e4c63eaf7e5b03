"""Changes of the file with the contexts, line by line: comments, order and everything else stay as they are.

The changed text is read again before it is written. What does not come out as it was meant, because somebody wrote the
file in another form (inline tables, dotted keys), is refused and left to an editor. The file is replaced in one step,
by one that only its owner can read; a crash leaves the old or the new one. Who changes it holds a lock from
reading to writing, on a file beside it that stays: of two at once neither undoes the other.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from headrace.client.contexts import CONTEXTS, CURRENT
from headrace.errors import OperatorError, SettingError

NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_BARE: Final = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)
_ASSIGNED: Final = re.compile(
    r"""\s*"?([A-Za-z0-9_-]+)"?\s*=\s*(?:"(?:[^"\\]|\\.)*"|'[^']*'|[^\s#"'\[{]+)(\s*(?:\#.*)?)"""
)


def changed_context(text: str, name: str, values: Mapping[str, str | None]) -> str:
    """The file's text with these keys of a context set, or removed where None; a context that is new stands last."""
    lines = text.splitlines()
    found = _section(lines, name)
    if found is None:
        lines += ["", f"[{_path(name)}]"] if lines and lines[-1].strip() else [f"[{_path(name)}]"]
        found = len(lines) - 1, len(lines)
    begin, end = found
    body = _assigned(lines[begin + 1 : end], values)
    return "\n".join([*lines[: begin + 1], *body, *lines[end:]]) + "\n"


def without_context(text: str, name: str) -> str:
    lines = text.splitlines()
    found = _section(lines, name)
    if found is None:
        return text
    begin, end = found
    while end - 1 > begin and re.fullmatch(r"\s*(#.*)?", lines[end - 1]):
        end -= 1  # what stands above the next one is its own
    while begin and re.fullmatch(r"\s*#.*", lines[begin - 1]):
        begin -= 1
    if begin and end < len(lines) and not lines[begin - 1].strip() and not lines[end].strip():
        end += 1
    return "\n".join([*lines[:begin], *lines[end:]]).strip("\n") + "\n"


def with_current(text: str, name: str | None) -> str:
    lines = text.splitlines()
    end = next((nth for nth, line in enumerate(lines) if line.lstrip().startswith("[")), len(lines))
    if any((match := _ASSIGNED.fullmatch(line)) and match[1] == CURRENT for line in lines[:end]):
        head = _assigned(lines[:end], {CURRENT: name})
    else:
        head = lines[:end] if name is None else [f"{CURRENT} = {_literal(CURRENT, name)}", "", *lines[:end]]
    return "\n".join([*head, *lines[end:]]) + "\n"


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Nobody else changes the file meanwhile. Others change it in a moment: that is waited for."""
    target = Path(os.path.realpath(path))
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = open(target.with_name(f".{target.name}.lock"), "ab")  # noqa: SIM115 - closed below
    except OSError as error:
        raise OperatorError(f"config file {target} cannot be written: {error.strerror}") from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def write(path: Path, old: str, new: str, meant: Mapping[str, Any]) -> None:
    """Replace the file, if the new text says what is meant."""
    try:
        says = tomllib.loads(new)
    except tomllib.TOMLDecodeError:
        says = None
    if says is None or _said(says) != _said(meant):
        raise SettingError(
            f"config file {path} is written in a form that this command does not change: write each context as "
            f"[{CONTEXTS}.NAME] with a line for each key, or change it with an editor"
        )
    if new == old:
        return
    target = Path(os.path.realpath(path))  # a link, as of those who keep their files elsewhere, stays one
    try:
        _replace(target, new)
    except OSError as error:
        raise OperatorError(f"config file {target} cannot be written: {error.strerror}") from None


def _said(document: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in document.items() if value not in (None, {})}


def _replace(target: Path, text: str) -> None:
    descriptor, beside = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with open(descriptor, "w", encoding="utf-8") as file:  # mkstemp gives it mode 0600
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, target)
    except BaseException:
        os.unlink(beside)
        raise


def _path(name: str) -> str:
    return f"{CONTEXTS}.{name if _BARE.fullmatch(name) else json.dumps(name)}"


def _section(lines: list[str], name: str) -> tuple[int, int] | None:
    """Where a context's lines begin and end."""
    header = re.compile(rf"\s*\[\s*{CONTEXTS}\s*\.\s*(?:{re.escape(name)}|\"{re.escape(name)}\")\s*\]\s*(#.*)?")
    begin = next((nth for nth, line in enumerate(lines) if header.fullmatch(line)), None)
    if begin is None:
        return None
    following = (nth for nth in range(begin + 1, len(lines)) if lines[nth].lstrip().startswith("["))
    return begin, next(following, len(lines))


def _assigned(lines: list[str], values: Mapping[str, str | None]) -> list[str]:
    """The lines with these keys set or removed; new ones stand behind the last that says something."""
    left = dict(values)
    kept = []
    for line in lines:
        match = _ASSIGNED.fullmatch(line)
        if match is None or match[1] not in left:
            kept.append(line)
        elif (value := left.pop(match[1])) is not None:
            kept.append(f"{match[1]} = {_literal(match[1], value)}{match[2]}")
    said = max((nth + 1 for nth, line in enumerate(kept) if _ASSIGNED.fullmatch(line)), default=None)
    at = said if said is not None else _behind_comments(kept)
    return [
        *kept[:at],
        *(f"{key} = {_literal(key, text)}" for key, text in left.items() if text is not None),
        *kept[at:],
    ]


def _behind_comments(lines: list[str]) -> int:
    return next((nth for nth, line in enumerate(lines) if not line.lstrip().startswith("#")), len(lines))


def _literal(key: str, value: str) -> str:
    return value if key == "tls" else json.dumps(value, ensure_ascii=False)

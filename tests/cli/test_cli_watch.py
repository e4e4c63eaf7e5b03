"""`--watch`: the same command, shown again and again."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable

import pytest

from cli.conftest import Run, Running, Terminal
from proving import proves

MakeTopic = Callable[..., str]


@proves("U1")
def test_a_watched_list_is_printed_again_with_the_time_above(start: Callable[..., Running], topic: MakeTopic) -> None:
    name = topic()
    watching = start("topic", "describe", name, "--watch", "0.1")
    watched = watching.lines(8)
    assert [line[:4] for line in watched if line.startswith("---")] == ["--- ", "--- "]
    assert [line for line in watched if line.startswith(f"topic {name}")] == [watched[1]] * 2
    code, said = watching.end(signal.SIGINT)
    assert (code, said.strip()) == (130, "")


@proves("U1")
def test_watched_json_is_one_document_behind_the_other(start: Callable[..., Running], topic: MakeTopic) -> None:
    name = topic()
    watching = start("topic", "describe", name, "--json", "--watch", "100ms")
    decoder, text = json.JSONDecoder(), ""
    found: list[str] = []
    while len(found) < 2:
        text += watching.lines(1)[0]
        try:
            document, end = decoder.raw_decode(text)
        except ValueError:
            continue
        found.append(document["topic"])
        text = text[end:]
    assert found == [name, name]


@proves("U1")
def test_a_watched_list_is_drawn_over_on_a_terminal(
    inside: Run, terminal: Callable[..., Terminal], topic: MakeTopic
) -> None:
    name = topic(60)
    screen = terminal("partition", "list", "--topic", name, "--watch", "0.1")
    drawn = screen.until("lines more").replace("\r", "")
    assert "\x1b[?1049h" in drawn, "what was on the terminal is kept aside"
    assert f"every 0.1 s: headrace partition list --topic {name}" in drawn
    assert drawn.count("\n") == 23, "no more lines than the terminal has"
    assert "\x1b[H" in screen.until("lines more")
    screen.type(b"\x03")
    assert screen.wait() == 130


@pytest.mark.parametrize(
    "command",
    ["topic list", "group list", "broker list", "partition list", "cluster describe", "cluster status"],
)
def test_lists_and_states_can_be_watched(inside: Run, command: str) -> None:
    assert "--watch [SECONDS]" in inside(*command.split(), "--help").stdout
    assert "is no time" in inside(*command.split(), "--watch", "0", exit_code=2).stderr


def test_what_is_wrong_at_first_ends_it(inside: Run) -> None:
    assert "no topic" in inside("topic", "describe", "nothing-of-the-kind", "--watch", exit_code=1).stderr

"""Tables on a terminal of 80 columns: each row a card where the table is wider, and no word is cut."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from brokers import Broker
from cli.conftest import Run, on_terminal
from headrace.cli.main import main
from headrace.cli.output import show_table
from proving import proves

WIDTH = 80
# Each command twice in one process: into a file, as a pipe would get it, and to the terminal.
SCRIPT = """
import contextlib, io, json, sys
from headrace.cli.main import main
told = []
for command in json.loads(sys.argv[1]):
    piped = io.StringIO()
    with contextlib.redirect_stdout(piped):
        assert main(command) == 0, command
    told.append(piped.getvalue())
    assert main(command) == 0, command
    print("\\f", flush=True)
with open(sys.argv[2], "w") as file:
    json.dump(told, file)
"""


@proves("U1")
def test_no_word_of_a_listing_is_cut_on_a_terminal_of_80_columns(
    run: Run, topic: Callable[..., str], broker: Broker, tmp_path: Path
) -> None:
    name = topic(3, "--config", "retention.ms=86400000")
    group = f"a-group-with-a-long-name-of-{name}"
    run("produce", name, stdin="".join(f"{n}\n" for n in range(30)))
    assert len(run("consume", name, "--group", group).stdout.split()) == 30
    commands = [
        ["topic", "levels"],
        ["topic", "list"],
        ["topic", "describe", name],
        ["partition", "list", "--topic", name],
        ["partition", "list", "--topic", name, "--by", "broker"],
        ["group", "list"],
        ["group", "describe", group],
        ["config", "describe", "topic", name],
        ["broker", "list"],
        ["cluster", "describe"],
        ["serve", "--print-config"],
    ]
    piped = tmp_path / "piped.json"
    shown = on_terminal(["-c", SCRIPT, json.dumps(commands), str(piped)], broker.bootstrap).split("\f")
    for command, text, screen in zip(commands, json.loads(piped.read_text()), shown[:-1], strict=True):
        words = set(screen.split())
        for line in text.splitlines():
            cut = [word for word in line.split() if word not in words and not word.isupper()]
            assert not cut, f"{cut} of {command}\n{screen}"
        for line in screen.splitlines():
            assert len(line) <= WIDTH or len(line.split()) <= 2, f"{line!r} of {command}"


@proves("U1")
def test_levels_are_cards_on_80_columns_and_a_table_on_a_wide_terminal(broker: Broker) -> None:
    command = ["-m", "headrace.cli.main", "topic", "levels"]
    cards = on_terminal(command, broker.bootstrap).split("\n\n")
    assert len(cards) > 3
    assert cards[0].startswith("level:              ")
    assert "\nloses records when: " in cards[0]
    assert "─" in on_terminal(command, broker.bootstrap, columns=300)


def test_a_pipe_gets_aligned_text_however_wide(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topic", "levels"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) > WIDTH
    assert lines[0].startswith("LEVEL ")


@proves("U1")
def test_columns_that_a_user_has_named_are_shown_as_they_are(broker: Broker) -> None:
    code = "from headrace.cli.output import show_table; show_table([{'my_Col': 1}], ['my_Col'], named_by_user=True)"
    assert "my_Col" in on_terminal(["-c", code], broker.bootstrap)


def test_columns_that_a_user_has_named_are_piped_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    show_table([{"my_Col": 1}], ["my_Col"], named_by_user=True)
    assert capsys.readouterr().out.split() == ["my_Col", "1"]


@proves("U1")
def test_a_table_that_fits_only_without_its_frame_has_none(broker: Broker) -> None:
    code = (
        "from headrace.cli.output import show_table; "
        "show_table([{f'column_{n}': 'x' * 12 for n in range(5)}] * 2, [f'column_{n}' for n in range(5)])"
    )
    shown = on_terminal(["-c", code], broker.bootstrap, columns=68).splitlines()
    assert [len(line) for line in shown] == [64, 68, 68]
    assert shown[0].split() == [word for n in range(5) for word in ("column", str(n))]

"""Shell completion: what is offered, by a real bash too, and that a broker that is silent holds nobody up."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.shell_completion import BashComplete

from brokers import Broker
from cli.conftest import environment
from headrace import Producer
from headrace.cli.completers import ANSWER_MS
from headrace.cli.completion import VARIABLE
from headrace.cli.main import main, root
from headrace.client.admin.cluster import Cluster
from headrace.client.admin.groups import commit_offsets
from proving import proves

Offer = Callable[..., list[str]]


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch, broker: Broker) -> Offer:
    """What is offered for the last word of a line."""
    monkeypatch.setenv("HEADRACE_BOOTSTRAP", broker.bootstrap)

    def call(*words: str) -> list[str]:
        found = BashComplete(root, {}, "headrace", VARIABLE).get_completions(list(words[:-1]), words[-1])
        return [item.value for item in found]

    return call


@proves("U7")
def test_commands_flags_and_choices_are_completed(offer: Offer) -> None:
    assert offer("con") == ["consume", "context", "config"]
    assert offer("topic", "d") == ["delete", "describe"]
    assert offer("topic", "list", "--tls-c") == ["--tls-ca", "--tls-cert"]
    assert offer("config", "set", "b") == ["broker"]


@proves("U7")
def test_topics_and_groups_are_asked_of_the_broker(offer: Offer, topic: Callable[..., str], broker: Broker) -> None:
    name, other = topic(), topic()
    group = f"group-of-{name}"
    with Cluster(broker.bootstrap) as cluster:
        commit_offsets(cluster, group, {(name, 0): 0})
    for line in (
        *(("consume",), ("produce",), ("load",), ("topic", "describe"), ("topic", "alter"), ("partition", "move")),
        *(
            ("query", "--topic"),
            ("topic", "create", "t", "--like"),
            ("config", "describe", "topic"),
            ("group", "reset", group, "--topic"),
        ),
    ):
        assert offer(*line, name[:-1]) == [name], line
    assert offer("topic", "delete", name, "cli-") != []
    assert name not in offer("topic", "delete", name, "cli-")
    assert other in offer("topic", "delete", name, "cli-")
    assert offer("topic", "create", name[:-1]) == []
    for line in (("group", "describe"), ("group", "delete"), ("consume", name, "--group"), ("config", "set", "group")):
        assert offer(*line, group[:-1]) == [group], line
    assert offer("config", "describe", "broker", "") == ["1"]
    assert not [found for found in offer("consume", "") if found.startswith("__")]


@proves("T5", "U7")
def test_transactional_ids_are_asked_of_the_broker(offer: Offer, topic: Callable[..., str], broker: Broker) -> None:
    name = f"id-of-{topic()}"
    with Producer(broker.bootstrap, transactional_id=name) as producer, producer.transaction():
        pass
    for line in (("transaction", "describe"), ("transaction", "abort"), ("transaction", "commit")):
        assert offer(*line, name[:-1]) == [name], line


@proves("U7")
def test_settings_are_completed_by_their_names(offer: Offer) -> None:
    assert offer("topic", "create", "t", "--config", "retention.") == [
        *("retention.archived=", "retention.bytes=", "retention.ms="),
    ]
    assert offer("topic", "alter", "t", "--unset", "retention.m") == ["retention.ms"]
    assert offer("config", "set", "topic", "t", "retention.m") == ["retention.ms="]
    assert offer("config", "unset", "broker", "1", "offsets.ret") == ["offsets.retention.ms"]
    assert offer("serve", "--set", "broker.le") == ["broker.lease.ms="]


@proves("U7")
def test_contexts_are_completed_and_asked(
    offer: Offer, topic: Callable[..., str], broker: Broker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = topic()
    monkeypatch.setenv("HEADRACE_CONFIG", str(tmp_path / "config.toml"))
    assert main(["context", "set", "mine", "--bootstrap", broker.bootstrap]) == 0
    monkeypatch.setenv("HEADRACE_BOOTSTRAP", "127.0.0.1:1")
    assert offer("context", "use", "") == ["mine", "none"]
    assert offer("topic", "list", "--context", "m") == ["mine"]
    assert offer("consume", name[:-1]) == []
    assert offer("consume", "--bootstrap", broker.bootstrap, name[:-1]) == [name]
    monkeypatch.delenv("HEADRACE_BOOTSTRAP")
    assert offer("consume", "--context", "mine", name[:-1]) == [name]
    (tmp_path / "config.toml").write_text("not = = toml")
    assert offer("context", "use", "") == offer("consume", "") == []


@proves("U7")
def test_a_silent_broker_holds_nobody_up(offer: Offer, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        assert offer("consume", "--bootstrap", f"127.0.0.1:{silent.getsockname()[1]}", "") == []
        assert time.monotonic() - began < ANSWER_MS / 1000 + 30, "it is bounded; how close, a busy machine decides"
    assert offer("consume", "--bootstrap", "not an address", "") == []
    assert capfd.readouterr() == ("", "")


@proves("U7")
def test_a_real_bash_completes(topic: Callable[..., str], broker: Broker, tmp_path: Path) -> None:
    name = topic()
    program = tmp_path / "headrace"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m headrace.cli.main "$@"\n')
    program.chmod(0o755)
    script = """
        compopt() { echo "compopt ${@: -1}"; }
        eval "$(headrace completion bash)"
        try() {
            COMP_WORDS=(headrace "$@"); COMP_CWORD=$#; COMPREPLY=()
            _headrace_completion headrace
            echo "${COMPREPLY[@]}"
        }
        complete -p headrace
        try topic des
        try consume "$1"
        try topic create t --config retention.m
    """
    done = subprocess.run(
        ["bash", "-c", script, "bash", name[:-1]],
        env={**environment(broker.bootstrap), "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.stderr == ""
    registered, *completed = done.stdout.splitlines()
    assert registered.endswith("-F _headrace_completion headrace")
    assert completed == ["describe", name, "compopt nospace", "retention.ms="]


@proves("U7")
@pytest.mark.parametrize(("shell", "says"), [("zsh", "behind=(-S '')"), ("fish", "complete --no-files")])
def test_other_shells_get_a_script_of_their_own(capsys: pytest.CaptureFixture[str], shell: str, says: str) -> None:
    assert main(["completion", shell]) == 0
    printed = capsys.readouterr().out
    assert says in printed
    assert f"{VARIABLE}={shell}_complete" in printed

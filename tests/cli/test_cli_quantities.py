"""Durations and sizes on the command line, and what listings say beside numbers."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    ConfigResource,
    NewTopic,
)

from brokers import Broker
from headrace.cli.main import main
from proving import proves


@proves("U7")
@pytest.mark.parametrize("timeout", ["-5", "0", "0s", "-5s", "soon", "1M"])
def test_a_timeout_that_is_no_time_is_refused(capsys: pytest.CaptureFixture[str], timeout: str) -> None:
    assert main(["topic", "list", "--timeout", timeout, "--bootstrap", "127.0.0.1:1"]) == 2
    told = capsys.readouterr().err
    assert "'--timeout'" in told
    assert "write such as 7d, 1h30m, 10s or 500ms" in told


@proves("U7")
@pytest.mark.parametrize("timeout", ["60", "60s", "2m", "60000ms"])
def test_a_timeout_is_taken_as_people_write_it(broker: Broker, timeout: str) -> None:
    assert main(["topic", "list", "--timeout", timeout, "--bootstrap", broker.bootstrap]) == 0


@pytest.fixture
def say(broker: Broker, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command here; what it printed."""

    def call(*arguments: str, exit_code: int = 0) -> str:
        capsys.readouterr()
        assert main([*arguments, "--bootstrap", broker.bootstrap]) == exit_code
        printed = capsys.readouterr()
        return printed.err if exit_code else printed.out

    return call


@proves("U7")
def test_a_topics_settings_are_given_as_people_write_them_and_kept_as_numbers(
    say: Callable[..., str], topic: Callable[..., str]
) -> None:
    name = topic(1, "--config", "retention.ms=7d", "--config", "segment.bytes=64MB")
    say("topic", "alter", name, "--config", "max.message.bytes=512k")
    say("config", "set", "topic", name, "flush.ms=1500ms")
    own = {
        "flush.ms": "1500",
        "max.message.bytes": "524288",
        "retention.ms": "604800000",
        "segment.bytes": "64000000",
    }
    assert json.loads(say("topic", "describe", name, "--json"))["settings"] == own
    shown = say("topic", "describe", name)
    assert "  retention.ms = 604800000 (7d)\n" in shown
    assert "  segment.bytes = 64000000 (64MB)\n" in shown
    assert "524288 (512KiB)" in say("config", "describe", "topic", name, "--changed")
    rows = json.loads(say("config", "describe", "topic", name, "--json"))
    assert {row["setting"]: row["value"] for row in rows}["retention.ms"] == "604800000"
    assert "64MB (64,000,000)" in say("config", "set", "topic", name, "segment.bytes=64mb", exit_code=1)


@proves("U7")
def test_other_clients_see_numbers_however_a_value_was_written(broker: Broker, topic: Callable[..., str]) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    name = topic() + "-kafka"
    (made,) = admin.create_topics([NewTopic(name, 1, config={"retention.ms": "7d"})]).values()
    made.result(timeout=30)
    (found,) = admin.describe_configs([ConfigResource(ConfigResource.Type.TOPIC, name)]).values()
    assert found.result(timeout=30)["retention.ms"].value == "604800000"


@proves("U7")
def test_print_config_says_numbers_as_people_do_and_json_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--print-config", "--set", "log.retention.ms=7d"]) == 0
    assert " 604800000 (7d) " in capsys.readouterr().out
    assert main(["serve", "--print-config", "--set", "log.retention.ms=7d", "--json"]) == 0
    rows = {row["setting"]: row["value"] for row in json.loads(capsys.readouterr().out)}
    assert rows["log.retention.ms"] == 604_800_000

"""`--print-config --toml`: a config file that says what every setting means, and gives the same settings again."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.cli.server_settings import toml_of
from headrace.settings.values import BROKER_BY_NAME, REGISTRY_BY_NAME, load
from proving import proves

GIVEN = {
    "num.partitions": "3",
    "log.retention.ms": "-1",
    "coordination": "etcd://10.0.0.1:2379,10.0.0.2:2379",
    "coordination.wait.ms": "5s",
    "sync.helper": "false",
    "rack": 'a "rack"\\in the back',
    "offsets.loss.accepted": "3:17,4:1",
    "commitlog.rewrite.share": "0.125",
}


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([*arguments, "--print-config", "--toml"]) == 0
    return capsys.readouterr().out


@proves("U6")
def test_the_settings_printed_as_toml_are_the_same_settings_when_they_are_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_PARTITIONS_MAX", "77")
    flags = [part for name, value in GIVEN.items() for part in ("--set", f"{name}={value}")]
    file = tmp_path / "headrace.toml"
    file.write_text(printed(capsys, "serve", "--data", "/d", "--listen", "a=0.0.0.0:1", "--advertise", "a=h:1", *flags))
    monkeypatch.delenv("HEADRACE_PARTITIONS_MAX")
    wanted = load(flags={**GIVEN, "data": "/d", "listen": "a=0.0.0.0:1", "advertise": "a=h:1", "partitions.max": 77})
    read = load(str(file))
    assert {name: read.values[name] for name in BROKER_BY_NAME} == {
        name: wanted.values[name] for name in BROKER_BY_NAME
    }
    in_file = {name for name in BROKER_BY_NAME if read.sources[name].startswith("file")}
    assert in_file == {*GIVEN, "data", "listen", "advertise", "partitions.max"}
    assert printed(capsys, "serve", "--config", str(file)).count(f"# from file {file}\n") == len(in_file)
    assert "# from environment HEADRACE_PARTITIONS_MAX\n" in file.read_text()


@proves("U6")
@pytest.mark.parametrize(("command", "settings"), [("serve", BROKER_BY_NAME), ("registry", REGISTRY_BY_NAME)])
def test_what_is_commented_out_is_every_setting_at_its_default(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str, settings: dict[str, object]
) -> None:
    lines = printed(capsys, command).splitlines()
    assert all(line.startswith("#") or not line for line in lines)
    assert max(map(len, lines)) <= 120
    file = tmp_path / "all.toml"
    file.write_text("\n".join(line.removeprefix("# ") for line in lines if re.match(r'# (?:"[\w.]+"|\w+) = ', line)))
    read, defaults = load(str(file)), load()
    assert {name for name, source in read.sources.items() if source != "default"} == set(settings)
    for name in set(settings) - {"etcd.password"}:
        assert read.values[name] == defaults.values[name]


def test_a_password_is_not_in_the_file_and_where_it_was_given_is(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "serve", "--set", "etcd.password=open sesame")
    assert "sesame" not in text
    assert '\n# "etcd.password" = ""\n# given by flag, and not shown' in text
    assert tomllib.loads(text) == {}


@pytest.mark.parametrize("text", ['"', "\\", "\n\t\x01\x7f", "ünï\u2028", "\N{PARTY POPPER}"])
def test_any_text_is_a_string_of_toml(text: str) -> None:
    assert tomllib.loads(f"a = {toml_of(text)}") == {"a": text}


@proves("U1")
@pytest.mark.parametrize("flags", [("--toml",), ("--json",), ("--print-config", "--json", "--toml")])
def test_forms_that_do_not_go_together_are_refused(flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *flags]) == 2
    assert "--" in capsys.readouterr().err

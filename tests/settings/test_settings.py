"""Settings: one declaration, three sources, clear refusals."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from headrace.errors import InvalidConfig, SettingError
from headrace.settings import names
from headrace.settings.values import (
    BROKER_BY_NAME,
    BROKER_SETTINGS,
    REGISTRY_BY_NAME,
    TOPIC_BY_NAME,
    check_topic_overrides,
    load,
    log_settings,
    read_topic_overrides,
    text_of,
)
from proving import proves

ROOT = Path(__file__).resolve().parent.parent


@proves("R15")
def test_a_flag_beats_the_environment_which_beats_the_file_which_beats_the_default(tmp_path: Path) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text('"num.partitions" = 2\nrack = "r1"\n[log.segment]\nbytes = 4096\n')
    settings = load(str(file), {"HEADRACE_NUM_PARTITIONS": "3", "HEADRACE_RACK": "r2"}, {"num.partitions": "4"})
    names = ("num.partitions", "rack", "log.segment.bytes", "node.id")
    assert [settings.values[name] for name in names] == [4, "r2", 4096, 1]
    assert [settings.sources[name] for name in names] == [
        "flag",
        "environment HEADRACE_RACK",
        f"file {file}",
        "default",
    ]


@pytest.mark.parametrize(
    ("flags", "environment", "says"),
    [
        ({"num.partitons": 1}, {}, "did you mean 'num.partitions'"),
        ({"num.partitions": "many"}, {}, "not a whole number"),
        ({"num.partitions": 0}, {}, "below the least allowed"),
        ({"frame.max.bytes": 1 << 40}, {}, "above the most allowed"),
        ({"log.durability": "maybe"}, {}, "not one of memory, os, disk"),
        ({"sync.helper": "yes"}, {}, "true or false"),
        ({"offsets.loss.accepted": "3:17,4"}, {}, "'4' is not of the form partition:offset"),
        ({}, {"HEADRACE_NUM_PARTITION": "1"}, "unknown variable HEADRACE_NUM_PARTITION"),
    ],
)
def test_what_is_wrong_is_refused_by_name(flags: dict[str, object], environment: dict[str, str], says: str) -> None:
    with pytest.raises(SettingError, match=says):
        load(None, environment, flags)


def test_a_config_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("this is = = not toml")
    with pytest.raises(SettingError, match=r"broken\.toml: not valid TOML"):
        load(str(broken), {})
    with pytest.raises(SettingError, match="No such file"):
        load(str(tmp_path / "absent.toml"), {})


@proves("R15")
def test_topic_overrides_are_checked_against_the_declaration() -> None:
    settings = log_settings({"retention.ms": 5}, {"segment.bytes": "2048", "cleanup.policy": "compact,delete"})
    assert (settings.retention_ms, settings.segment_bytes, settings.compact, settings.delete) == (5, 2048, True, True)
    with pytest.raises(InvalidConfig, match=r"unknown topic setting 'segment\.byte'; did you mean 'segment\.bytes'"):
        check_topic_overrides({"segment.byte": "1"})
    with pytest.raises(
        InvalidConfig, match=r"unknown topic setting 'foo\.bar'; .*`headrace config describe topic NAME`"
    ):
        check_topic_overrides({"foo.bar": "1"})
    for check in (check_topic_overrides, read_topic_overrides):
        with pytest.raises(InvalidConfig, match="not one of"):
            check({"cleanup.policy": "shred"})
    assert read_topic_overrides({"segment.byte": "1", "segment.bytes": "2048"}) == {"segment.bytes": 2048}


def test_every_topic_setting_has_a_broker_wide_default_of_the_same_kind() -> None:
    for name, setting in TOPIC_BY_NAME.items():
        assert BROKER_BY_NAME["log." + name].default == setting.default


def test_a_password_is_shown_nowhere() -> None:
    loaded = load(environment={"HEADRACE_ETCD_PASSWORD": "open sesame"})
    assert loaded["etcd.password"].reveal() == "open sesame"
    assert "sesame" not in f"{loaded} {loaded['etcd.password']} {loaded['etcd.password']!r}"
    assert "sesame" not in text_of(loaded["etcd.password"])
    printed = subprocess.run(
        [sys.executable, "-m", "headrace.cli.main", "serve", "--print-config", "--json"],
        env={**os.environ, "HEADRACE_ETCD_PASSWORD": "open sesame"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "(hidden)" in printed.stdout
    assert "sesame" not in printed.stdout + printed.stderr


def test_a_type_checker_knows_every_setting_of_a_server_by_its_type() -> None:
    declared = {
        names.Number: {"int"},
        names.Fraction: {"float"},
        names.Flag: {"bool"},
        names.Text: {"str", "choice"},
        names.TextList: {"list"},
        names.Hidden: {"secret"},
    }
    servers = {setting.name: setting for setting in BROKER_SETTINGS} | REGISTRY_BY_NAME
    for known, kinds in declared.items():
        assert set(get_args(known)) == {name for name, setting in servers.items() if setting.kind in kinds}

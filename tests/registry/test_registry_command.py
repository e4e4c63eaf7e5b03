"""`headrace registry`: its help, and where its settings come from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.settings.registry import REGISTRY_SETTINGS
from headrace.settings.values import BROKER_BY_NAME, REGISTRY_BY_NAME
from proving import proves


def test_its_help_is_short_and_names_the_setting_behind_each_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["registry", "--help"]) == 0
    said = capsys.readouterr().out
    assert said.count("\n") < 40
    for name in ("coordination", "registry.listen", "registry.http.listen"):
        assert f"[{name}]" in said
    assert main(["--help"]) == 0
    assert "Run a registry" in capsys.readouterr().out


@proves("R1", "R15")
def test_one_file_serves_broker_and_registry_and_flags_beat_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text(
        '"node.id" = 3\ncoordination = "etcd://h:1"\n[registry]\nlisten = ["127.0.0.1:1"]\ndrop.after.ms = 7\n'
    )
    monkeypatch.setenv("HEADRACE_REGISTRY_HTTP_LISTEN", "off")
    monkeypatch.setenv("HEADRACE_REGISTRY", "127.0.0.1:8083")
    arguments = ["--config", str(file), "--print-config", "--json"]
    assert main(["registry", *arguments, "--listen", "127.0.0.1:2", "--etcd", "a:1,b:2"]) == 0
    rows = {row["setting"]: (row["value"], row["source"].split()[0]) for row in json.loads(capsys.readouterr().out)}
    assert rows["coordination"] == ("etcd://a:1,b:2", "flag")
    assert rows["registry.listen"] == (["127.0.0.1:2"], "flag")
    assert rows["registry.http.listen"] == ("off", "environment")
    assert rows["registry.drop.after.ms"] == (7, "file")
    assert "node.id" not in rows
    assert main(["serve", *arguments]) == 0
    assert "registry.listen" not in {row["setting"] for row in json.loads(capsys.readouterr().out)}


def test_a_setting_that_is_not_known_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["registry", "--set", "registry.lisen=x", "--print-config"]) == 2
    assert "did you mean 'registry.listen'" in capsys.readouterr().err


def test_no_setting_is_declared_twice() -> None:
    assert not {setting.name for setting in REGISTRY_SETTINGS} & set(BROKER_BY_NAME)
    assert set(REGISTRY_BY_NAME) - set(BROKER_BY_NAME) == {setting.name for setting in REGISTRY_SETTINGS}

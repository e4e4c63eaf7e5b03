"""Named contexts: their file, the order of what holds, and commands that talk to the cluster that one names."""

from __future__ import annotations

import json
import os
import stat
import threading
import tomllib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from brokers import Broker
from headrace import Producer, context
from headrace.cli import context as context_commands
from headrace.cli.main import main
from headrace.client import contexts
from headrace.errors import SettingError
from headrace.settings.values import CLIENT_VARIABLES, load
from proving import proves

Say = Callable[..., str]

WRITTEN = """\
# which cluster
current = "here" # for now

# my machine
[contexts.here]
bootstrap = "127.0.0.1:1"  # not up today
timeout = 5

# the shared one
[contexts.staging]
# asked for in May
bootstrap = ["broker1:9093", "broker2:9093"]
tls-ca = "ca.pem"
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "config" / "headrace.toml"
    for name in CLIENT_VARIABLES | {contexts.TLS_KEY_VARIABLE}:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HEADRACE_CONFIG", str(path))
    return path


@pytest.fixture
def written(config: Path) -> Path:
    config.parent.mkdir()
    config.write_text(WRITTEN)
    return config


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """Run a command here; what it printed, or what it told on standard error."""

    def call(*arguments: str, exit_code: int = 0) -> str:
        capsys.readouterr()
        code = main(list(arguments))
        printed = capsys.readouterr()
        assert code == exit_code, printed.err
        return printed.err if exit_code else printed.out

    return call


@proves("U7")
def test_a_context_is_made_used_listed_and_deleted(config: Path, say: Say, broker: Broker) -> None:
    assert say("context", "set", "mine", "--bootstrap", broker.bootstrap) == "made context mine\n"
    assert "127.0.0.1:9092" in say("context", "show")
    assert say("context", "use", "mine") == "commands use context mine now\n"
    assert isinstance(json.loads(say("topic", "list", "--json")), list)
    (row,) = json.loads(say("context", "list", "--json"))
    assert row == {"context": "mine", "current": True, "bootstrap": broker.bootstrap}
    assert tomllib.loads(config.read_text()) == {
        "current": "mine",
        "contexts": {"mine": {"bootstrap": broker.bootstrap}},
    }
    assert say("context", "delete", "mine") == "deleted context mine; commands use no context now\n"
    assert config.read_text().strip() == ""


@proves("U7")
def test_only_its_owner_reads_the_file_and_a_link_to_it_stays_one(config: Path, say: Say, tmp_path: Path) -> None:
    kept = tmp_path / "dotfiles" / "headrace.toml"
    kept.parent.mkdir()
    config.parent.mkdir()
    config.symlink_to(kept)
    say("context", "set", "a", "--bootstrap", "a:1")
    assert config.is_symlink()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert set(os.listdir(kept.parent)) == {kept.name, f".{kept.name}.lock"}


def test_a_folder_that_cannot_be_written_is_told(monkeypatch: pytest.MonkeyPatch, say: Say) -> None:
    monkeypatch.setenv("HEADRACE_CONFIG", "/proc/none/headrace.toml")
    assert "cannot be written" in say("context", "set", "a", "--bootstrap", "a:1", exit_code=1)


@proves("U1")
def test_of_two_changes_at_once_both_are_kept(config: Path, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    read, between = context_commands._read, threading.Barrier(2)

    def read_slowly() -> tuple[contexts.ContextFile, str]:
        found = read()
        # Where the other may read too, before this one has written, it does.
        with suppress(threading.BrokenBarrierError):
            between.wait(0.3)
        return found

    monkeypatch.setattr(context_commands, "_read", read_slowly)
    others = [threading.Thread(target=main, args=(["context", "set", name, "--tls", "true"],)) for name in "ab"]
    for other in others:
        other.start()
    for other in others:
        other.join()
    assert set(contexts.read(config).contexts) == {"a", "b"}


@proves("U7")
def test_comments_and_other_contexts_stay_as_they_are(written: Path, say: Say) -> None:
    say("context", "set", "here", "--bootstrap", "127.0.0.1:2", "--registry", "127.0.0.1:3", "--unset", "timeout")
    say("context", "set", "third.one", "--bootstrap", "c:1", "--tls", "true", "--use")
    assert written.read_text() == (
        WRITTEN.replace('"here" # for now', '"third.one" # for now').replace(
            '"127.0.0.1:1"  # not up today\ntimeout = 5', '"127.0.0.1:2"  # not up today\nregistry = "127.0.0.1:3"'
        )
        + '\n[contexts."third.one"]\nbootstrap = "c:1"\ntls = true\n'
    )
    say("context", "delete", "third.one")
    say("context", "delete", "here")
    assert written.read_text() == ("# which cluster\n\n# the shared one\n" + WRITTEN.split("# the shared one\n")[1])


def test_a_file_in_another_form_is_left_to_an_editor(config: Path, say: Say) -> None:
    config.parent.mkdir()
    config.write_text('contexts = { a = { bootstrap = "a:1" } } # inline\n')
    told = say("context", "set", "a", "--bootstrap", "a:2", exit_code=2)
    assert "a form that this command does not change" in told
    assert config.read_text() == 'contexts = { a = { bootstrap = "a:1" } } # inline\n'
    assert "a:1" in say("context", "show", "a")


@proves("U7")
def test_a_flag_beats_the_environment_which_beats_the_context_which_beats_the_default(
    written: Path, monkeypatch: pytest.MonkeyPatch, say: Say
) -> None:
    def found(*arguments: str) -> dict[str, tuple[str, str]]:
        rows = json.loads(say("context", "show", *arguments, "--json"))["values"]
        return {row["key"]: (row["value"], row["source"]) for row in rows}

    shown = found()
    assert shown["bootstrap"] == ("127.0.0.1:1", "context here")
    assert shown["timeout"] == ("5", "context here")
    assert shown["registry"] == ("127.0.0.1:8083", "default")
    monkeypatch.setenv("HEADRACE_BOOTSTRAP", "127.0.0.1:2")
    assert found()["bootstrap"] == ("127.0.0.1:2", "environment HEADRACE_BOOTSTRAP")
    assert found("staging")["tls-ca"] == (str(written.parent / "ca.pem"), "context staging")
    monkeypatch.setenv("HEADRACE_CONTEXT", "staging")
    assert found()["tls-ca"][1] == "context staging"
    assert found("none")["tls-ca"] == ("", "default")
    resolved = contexts.resolve({"bootstrap": "127.0.0.1:3", "timeout": "250ms"})
    assert (resolved["bootstrap"], resolved.source("bootstrap"), resolved.timeout_ms) == ("127.0.0.1:3", "flag", 250)


@proves("U7")
def test_every_command_that_connects_takes_a_context(written: Path, say: Say, broker: Broker) -> None:
    say("context", "set", "running", "--bootstrap", broker.bootstrap)
    assert "127.0.0.1:1" in say("topic", "list", "--timeout", "1ms", exit_code=1)
    say("topic", "list", "--context", "running")
    say("group", "list", "--context", "running")
    say("topic", "list", "--context", "none", "--bootstrap", broker.bootstrap)
    assert "127.0.0.1:8083" in say("config", "cluster", "list", "--context", "running", exit_code=1)
    told = say("sql", "select 1", "--context", "staging", exit_code=2)
    assert "commands on Spark do not speak it yet" in told


@proves("U7")
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("curent = 'a'", "unknown key 'curent'; did you mean 'current'?"),
        ("[contexts.a]\ntls_ca = 'x'", "context a: unknown key 'tls_ca'; did you mean 'tls-ca'?"),
        ("[contexts.a]\npassword = 'x'", "context a: unknown key 'password'"),
        ("[contexts.a]\ntimeout = 'soon'", "'soon' is not a duration: write such as 7d"),
        ("[contexts.a]\ntls = 'maybe'", "'maybe' is neither true nor false"),
        ("[contexts.a]\nbootstrap.servers = 'a:1'", "bootstrap has to be one value"),
        ("contexts = 3", "contexts have to be tables"),
        ("current = 3", "has to be the name of a context"),
        ("x = = 1", "not valid TOML"),
        ("current = 'stagin'\n[contexts.staging]", "there is no context 'stagin' in .*did you mean 'staging'"),
        ("current = 'b'", "there is no context 'b' in .*`headrace context set b` makes it"),
    ],
)
def test_what_is_wrong_in_the_file_is_told_by_name(config: Path, text: str, says: str) -> None:
    config.parent.mkdir()
    config.write_text(text)
    with pytest.raises(SettingError, match=says):
        contexts.resolve({})
    assert contexts.resolve({}, "none")["bootstrap"] == "127.0.0.1:9092"


def test_wrong_names_and_values_are_refused_before_the_file_is_touched(config: Path, say: Say) -> None:
    for arguments in (
        ("none", "--bootstrap", "a:1"),
        ("a b", "--bootstrap", "a:1"),
        ("a", "--timeout", "-5"),
        ("a", "--tls", "perhaps"),
        ("a", "--timeout", "5", "--unset", "timeout"),
        ("a", "--unset", "nonsense"),
        ("a", "--bootstrap", "a\x00b"),
    ):
        say("context", "set", *arguments, exit_code=2)
    say("context", "use", "a", exit_code=2)
    say("context", "delete", "a", exit_code=2)
    assert not config.exists()


@proves("U7")
def test_the_file_is_where_other_programs_have_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert contexts.config_path({"HOME": "/h"}) == Path.home() / ".config/headrace/config.toml"
    assert contexts.config_path({"XDG_CONFIG_HOME": "/x"}) == Path("/x/headrace/config.toml")
    assert contexts.config_path({"XDG_CONFIG_HOME": "/x", "HEADRACE_CONFIG": "/y.toml"}) == Path("/y.toml")


@proves("U7")
def test_a_program_asks_for_the_context_by_name(
    written: Path, broker: Broker, topic: Callable[..., str], say: Say
) -> None:
    say("context", "set", "running", "--bootstrap", broker.bootstrap)
    with Producer(**context("running")) as producer:
        assert producer.send(topic(), b"hello").offset == 0
    assert context()["bootstrap"] == "127.0.0.1:1"


def test_a_server_passes_over_the_variables_of_clients() -> None:
    variables = {key.variable for key in contexts.KEYS} | {
        contexts.FILE_VARIABLE,
        contexts.CONTEXT_VARIABLE,
        contexts.PASSWORD_VARIABLE,
    }
    assert variables - CLIENT_VARIABLES == {contexts.TLS_KEY_VARIABLE}, "tls.key is a broker's setting too"
    loaded = load(None, dict.fromkeys(variables, "x"), {})
    assert {name for name, source in loaded.sources.items() if source.startswith("environment")} == {"tls.key"}


def test_the_first_lines_of_a_file_stay_with_what_they_are_about(config: Path, say: Say) -> None:
    config.parent.mkdir()
    config.write_text("# mine\n[contexts.a]\n# nothing yet\n")
    say("context", "use", "a")
    say("context", "set", "a", "--bootstrap", 'a"\\:1')
    assert config.read_text() == ('current = "a"\n\n# mine\n[contexts.a]\n# nothing yet\nbootstrap = "a\\"\\\\:1"\n')
    say("context", "set", "a", "--unset", "bootstrap")
    assert config.read_text() == 'current = "a"\n\n# mine\n[contexts.a]\n# nothing yet\n'

"""Which cluster a person talks to, and how: from flags, environment, a named context and defaults, strongest first.

Contexts stand in `~/.config/headrace/config.toml` (below XDG_CONFIG_HOME if that is set; HEADRACE_CONFIG names another
file). Keys are those in KEYS, called as the flags are; each has a variable, HEADRACE_ and its name in capitals. Files
are meant from the folder of the config file. A private key's password is in no file of ours: it stands in a file of its
own, or in HEADRACE_TLS_KEY_PASSWORD.

    current = "staging"

    [contexts.staging]
    bootstrap = "broker1:9093,broker2:9093"
    tls-ca = "staging-ca.pem"
"""

from __future__ import annotations

import difflib
import os
import ssl
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypedDict

from headrace.client import DEFAULT_BOOTSTRAP, DEFAULT_REGISTRIES
from headrace.client.connection.tls import fault_of
from headrace.errors import SettingError
from headrace.settings.quantities import DURATION_FORMS, parse_duration_ms

FILE_VARIABLE: Final = "HEADRACE_CONFIG"
CONTEXT_VARIABLE: Final = "HEADRACE_CONTEXT"
PASSWORD_VARIABLE: Final = "HEADRACE_TLS_KEY_PASSWORD"
TLS_KEY_VARIABLE: Final = "HEADRACE_TLS_KEY"
"""Also a broker's setting, tls.key: alone, where a broker's environment is used for a command, it says nothing."""
NO_CONTEXT: Final = "none"
"""No context has this name: who names it uses none."""
CURRENT: Final = "current"
CONTEXTS: Final = "contexts"


@dataclass(frozen=True, slots=True)
class Key:
    """What a context can say."""

    name: str
    meaning: str
    default: str = ""
    is_file: bool = False

    @property
    def variable(self) -> str:
        return "HEADRACE_" + self.name.upper().replace("-", "_")


KEYS: Final = (
    Key("bootstrap", "any broker of the cluster, or a registry's Kafka port: HOST:PORT,...", DEFAULT_BOOTSTRAP),
    Key("registry", "HTTP ports of registries, for `headrace config cluster`: HOST:PORT,...", DEFAULT_REGISTRIES),
    Key("timeout", f"how long to wait and retry: {DURATION_FORMS}; a number is of seconds", "30s"),
    Key("tls", "true: speak TLS, and trust the system's authorities unless tls-ca is given; false: do not"),
    Key("tls-ca", "PEM file with the authority of the brokers' certificates; TLS is spoken", is_file=True),
    Key("tls-cert", "PEM file with the certificate to show to brokers; TLS is spoken", is_file=True),
    Key("tls-key", "PEM file with its private key, unless that stands in the same file", is_file=True),
    Key("tls-key-password-file", f"file with the key's password; or {PASSWORD_VARIABLE}", is_file=True),
)
KEY_BY_NAME: Final = {key.name: key for key in KEYS}


class ContextArguments(TypedDict):
    """What producers, consumers and admin clients take."""

    bootstrap: str
    tls: ssl.SSLContext | None


def context(name: str | None = None) -> ContextArguments:
    """Where the command line would connect to, as arguments: `Producer(**headrace.context())`.

    name: a context of `headrace context list`; without it that of HEADRACE_CONTEXT, or the current one. The
    environment (HEADRACE_BOOTSTRAP, HEADRACE_TLS_CA and so on) goes before what the context says.
    """
    found = resolve({}, name)
    return {"bootstrap": found["bootstrap"], "tls": found.tls()}


@dataclass(frozen=True, slots=True)
class ContextFile:
    path: Path
    current: str | None = None
    contexts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def named(self, name: str) -> Mapping[str, str]:
        """What a context says; SettingError if it is not there."""
        if name in self.contexts:
            return self.contexts[name]
        close = difflib.get_close_matches(name, self.contexts, 1)
        there = f"there are {', '.join(sorted(self.contexts))}" if self.contexts else "there are none"
        hint = f"did you mean {close[0]!r}?" if close else f"{there}; `headrace context set {name}` makes it"
        raise SettingError(f"there is no context {name!r} in {self.path}; {hint}")


def config_path(environment: Mapping[str, str] = os.environ) -> Path:
    if environment.get(FILE_VARIABLE):
        return Path(environment[FILE_VARIABLE])
    base = environment.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(base).expanduser() / "headrace" / "config.toml"


def read(path: Path) -> ContextFile:
    """The file with everything checked; one that is not there has no contexts."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ContextFile(path)
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"config file {path}: {getattr(error, 'strerror', None) or error}") from None
    return parse(text, path)


def parse(text: str, path: Path) -> ContextFile:
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SettingError(f"config file {path}: not valid TOML: {error}") from None
    for name in document:
        _check_known(name, (CURRENT, CONTEXTS), f"config file {path}")
    current, tables = document.get(CURRENT), document.get(CONTEXTS, {})
    if not (current is None or isinstance(current, str)):
        raise SettingError(f"config file {path}: {CURRENT} has to be the name of a context")
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise SettingError(f"config file {path}: contexts have to be tables, such as [{CONTEXTS}.staging]")
    return ContextFile(path, current, {name: _checked(name, table, path) for name, table in tables.items()})


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """Each key's value, and who said it."""

    context: str | None
    levels: tuple[tuple[str, Mapping[str, str]], ...]
    """(who, what they say), strongest first."""
    password: str | None = None

    def __getitem__(self, key: str) -> str:
        return self._found(key)[1]

    def source(self, key: str) -> str:
        return self._found(key)[0].format(variable=KEY_BY_NAME[key].variable)

    @property
    def timeout_ms(self) -> int:
        return parse_duration_ms(self["timeout"], "s")

    @property
    def speaks_tls(self) -> bool:
        """As the strongest says who says anything of it."""
        for _, said in self.levels:
            if "tls" in said:
                return said["tls"] == "true"
            if said.keys() & {"tls-ca", "tls-cert"}:
                return True
        return False

    def tls(self) -> ssl.SSLContext | None:
        """How to speak TLS; SettingError says which file cannot be used, and who named it."""
        if self["tls-key"] and not self["tls-cert"] and self.source("tls-key") != f"environment {TLS_KEY_VARIABLE}":
            raise SettingError(f"{self._named('tls-key')}: a key needs its certificate, tls-cert")
        if not self.speaks_tls:
            return None
        try:
            made = ssl.create_default_context(cafile=self["tls-ca"] or None)
        except (OSError, ssl.SSLError) as error:
            raise SettingError(f"{self._named('tls-ca')}: {fault_of(error)}") from None
        if self["tls-cert"]:
            self._load_certificate(made)
        return made

    def _found(self, key: str) -> tuple[str, str]:
        for who, said in self.levels:
            if key in said:
                return who, said[key]
        return "default", KEY_BY_NAME[key].default

    def _named(self, key: str) -> str:
        return f"{key} {self[key]} ({self.source(key)})"

    def _load_certificate(self, made: ssl.SSLContext) -> None:
        for key in ("tls-cert", "tls-key"):
            if self[key]:
                _check_readable(self[key], self._named(key))
        was_asked = False

        def password() -> str:
            nonlocal was_asked
            was_asked = True
            return self._password()

        key_file = self["tls-key"] or self["tls-cert"]
        try:
            made.load_cert_chain(self["tls-cert"], key_file, password)
        except (ssl.SSLError, ValueError) as error:
            if was_asked:
                raise SettingError(self._wrong_password(key_file)) from None
            if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
                key = self._named("tls-key") if self["tls-key"] else "the key in that file"
                raise SettingError(f"{key} is not the key of {self._named('tls-cert')}") from None
            raise SettingError(
                f"{self._named('tls-cert')}: {fault_of(error)}; "
                "it has to be PEM, with its key in it or given as tls-key"
            ) from None

    def _password(self) -> str:
        if self.password is not None:
            return self.password
        if not self["tls-key-password-file"]:
            return ""
        _check_readable(self["tls-key-password-file"], self._named("tls-key-password-file"))
        return Path(self["tls-key-password-file"]).read_text().strip("\r\n")

    def _wrong_password(self, key_file: str) -> str:
        if self.password is None and not self["tls-key-password-file"]:
            return (
                f"the key {key_file} is encrypted: put its password into a file and name that by "
                f"--tls-key-password-file, or into {PASSWORD_VARIABLE}"
            )
        given = PASSWORD_VARIABLE if self.password is not None else self._named("tls-key-password-file")
        return f"the key {key_file} is encrypted, and its password is not that of {given}"


def resolve(
    flags: Mapping[str, str | None], name: str | None = None, environment: Mapping[str, str] = os.environ
) -> ConnectionSettings:
    """What holds now. `name` is the context that a flag names."""
    given = {key: value for key, value in flags.items() if value is not None}
    variables = {key.name: text for key in KEYS if (text := environment.get(key.variable))}
    for key, text in variables.items():
        check_value(key, text, KEY_BY_NAME[key].variable)
    levels: list[tuple[str, Mapping[str, str]]] = [("flag", given), ("environment {variable}", variables)]
    chosen = name or environment.get(CONTEXT_VARIABLE)
    if chosen != NO_CONTEXT:
        file = read(config_path(environment))
        chosen = chosen or file.current
        if chosen is not None:
            levels.append((f"context {chosen}", file.named(chosen)))
    return ConnectionSettings(
        None if chosen == NO_CONTEXT else chosen, tuple(levels), environment.get(PASSWORD_VARIABLE)
    )


def check_value(key: str, text: str, where: str) -> str:
    """The text, or SettingError that says what would be right."""
    if key == "tls" and text not in ("true", "false"):
        raise SettingError(f"{where}: {text!r} is neither true nor false")
    if key == "timeout":
        try:
            if parse_duration_ms(text, "s") <= 0:
                raise ValueError
        except ValueError:
            raise SettingError(f"{where}: {text!r} is not a duration: write such as {DURATION_FORMS}") from None
    return text


def _checked(name: str, table: Mapping[str, object], path: Path) -> dict[str, str]:
    """A context's keys as text; files from the folder of the config file."""
    said = {}
    for key, value in table.items():
        where = f"config file {path}: context {name}"
        _check_known(key, KEY_BY_NAME, where)
        if isinstance(value, list):
            value = ",".join(map(str, value))
        elif isinstance(value, bool):
            value = "true" if value else "false"
        elif isinstance(value, dict):
            raise SettingError(f"{where}: {key} has to be one value")
        text = check_value(key, str(value), f"{where}: {key}")
        said[key] = str(path.parent / Path(text).expanduser()) if KEY_BY_NAME[key].is_file and text else text
    return said


def _check_known(name: str, known: Iterable[str], where: str) -> None:
    if name not in known:
        close = difflib.get_close_matches(name, list(known), 1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}"
        raise SettingError(f"{where}: unknown key {name!r}; {hint}")


def _check_readable(file: str, named: str) -> None:
    try:
        with open(file, "rb"):
            pass
    except OSError as error:
        raise SettingError(f"{named}: {error.strerror}") from None

"""`headrace doctor`: what it finds on this machine, beside a broker, and in settings; and that it changes nothing."""

from __future__ import annotations

import ast
import datetime
import json
import os
import resource
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from brokers import Broker, free_port
from certificates import self_signed
from etcd_nodes import etcd_nodes
from headrace.cli.checkup import certificates, data_folder, machine, risks
from headrace.cli.checkup.finding import Finding, Level
from headrace.cli.main import main
from headrace.settings.values import load
from proving import proves

ROOT = Path(__file__).resolve().parents[2]
Examine = Callable[..., list[dict[str, str]]]


@pytest.fixture
def examine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Examine:
    """Run it on ports that are free and a folder that is not there, unless flags say otherwise; what it found."""

    def run(*flags: str, exit_code: int = 0, **settings: object) -> list[dict[str, str]]:
        given = [part for name, value in settings.items() for part in ("--set", f"{name.replace('__', '.')}={value}")]
        named = {"--data": str(tmp_path / "data"), "--listen": f"127.0.0.1:{free_port()}", "--http": "off"}
        defaults = [part for pair in named.items() if pair[0] not in flags for part in pair]
        assert main(["doctor", "--json", *defaults, *flags, *given]) == exit_code
        found: list[dict[str, str]] = json.loads(capsys.readouterr().out)
        return found

    return run


def told(found: list[dict[str, str]], what: str, level: str) -> str:
    """What was said of it at that level, with what to do."""
    return "\n".join(
        f"{each['says']} -> {each['advice']}" for each in found if (each["what"], each["level"]) == (what, level)
    )


@proves("U6")
def test_a_machine_that_is_fit_passes_and_warnings_count_when_asked_for(
    examine: Examine, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = examine(log__durability="disk")
    assert {each["what"] for each in found} >= {"version", "kernels", "open files", "clock", "data folder", "disk"}
    assert {each["what"] for each in found} >= {"space", "port default", "coordination", "setting"}
    assert "nothing in the settings is known to be unsafe" in told(found, "setting", "ok")
    assert not (tmp_path / "data").exists()
    assert "up to 500 ms of acknowledged records" in told(examine(), "setting", "warn")
    examine("--strict", exit_code=1)
    assert main(["doctor", "--data", str(tmp_path), "--http", "off"]) in (0, 1)
    shown = capsys.readouterr().out
    assert "\n      -> set durability=disk for the topics that matter" in shown
    assert shown.splitlines()[-1].endswith(" failed")


@proves("U6")
def test_beside_a_running_broker_it_is_asked_and_nothing_is_touched(examine: Examine, broker: Broker) -> None:
    def state() -> list[tuple[str, int]]:
        return [
            (name, (broker.data / name).stat().st_mtime_ns)
            for name in ("@lock", "layout")
            if (broker.data / name).exists()
        ]

    before = state()
    http = broker.addresses["http"]
    found = examine("--data", str(broker.data), "--listen", broker.bootstrap, "--http", http)
    assert f"in use by the broker with process id {broker.pid}" in told(found, "data folder", "ok")
    for port in ("port default", "port http"):
        assert f"is held by the broker of this data folder, process {broker.pid}" in told(found, port, "ok")
    assert "1 broker, " in told(found, "cluster", "ok") + told(found, "cluster", "warn")
    assert f"of the broker, process {broker.pid}" in told(found, "open files", "ok") + told(found, "open files", "warn")
    assert state() == before


@proves("U6")
def test_a_port_that_is_taken_is_told_with_who_has_it(examine: Examine, broker: Broker) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        found = examine("--http", address, "--listen", broker.bootstrap, exit_code=1)
    assert f"{address} is held by process {os.getpid()} (" in told(found, "port http", "fail")
    assert "choose another with --http" in told(found, "port http", "fail")
    other = told(found, "port default", "fail")
    assert f"{broker.bootstrap} is held by process {broker.pid} (headrace), which answers for cluster " in other
    assert "choose another with --listen" in other


@proves("U6")
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"log.durability": "memory"}, "log.durability is memory"),
        (
            {"default.replication.factor": 3, "log.min.insync.replicas": 1},
            "log.min.insync.replicas is 1 with 3 replicas",
        ),
        ({"default.replication.factor": 2, "log.min.insync.replicas": 2}, "while one broker is away nothing is taken"),
        ({"log.unclean.leader.election.enable": "true"}, "a replica that lacks acknowledged records may lead"),
        ({"log.retention.ms": -1}, "nothing is ever deleted"),
        ({"listen": "0.0.0.0:9092", "advertise": "h:1"}, "0.0.0.0:9092 takes anyone who can reach it"),
        ({"listen": "10.0.0.1:9092"}, "10.0.0.1:9092 takes anyone who can reach it"),
        ({"http.listen": "0.0.0.0:8082"}, "whoever reaches 0.0.0.0:8082 may write"),
        ({"coordination": "etcd://127.0.0.1:1"}, "default.replication.factor is 1 in a cluster"),
        ({"coordination": "etcd://127.0.0.1:1", "offsets.topic.replication.factor": 1}, "groups stop"),
        ({"coordination": "etcd://e:1"}, "clients of listener default are told 127.0.0.1:9092"),
        ({"coordination": "etcd://e:1"}, "other brokers are told 127.0.0.1:0 for replication"),
        ({"coordination": "etcd://e:1"}, "etcd is spoken to without TLS"),
        ({"coordination": "etcd://e:1", "replication.listen": "10.0.0.1:1"}, "links between brokers are not encrypted"),
    ],
)
def test_what_is_unsafe_in_the_settings_is_told_with_what_to_do(settings: dict[str, object], says: str) -> None:
    found = list(risks.look(load(None, {}, settings)))
    assert any(says in each.says for each in found), found
    assert all(each.level is Level.WARN and each.advice for each in found)


def test_settings_that_are_safe_are_not_warned_of() -> None:
    alone = {"log.durability": "disk", "listen": "tls://0.0.0.0:9092", "advertise": "h:9092"}
    replicated = {"default.replication.factor": 3, "coordination": "etcd://127.0.0.1:1"}
    for settings in (alone, replicated):
        assert [each.level for each in risks.look(load(None, {}, settings))] == [Level.OK]


def certificate(ends: datetime.datetime) -> x509.Certificate:
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.datetime(1990, 1, 1, tzinfo=datetime.UTC))
        .not_valid_after(ends)
        .sign(key, hashes.SHA256())
    )


@pytest.mark.parametrize("year", [1999, 2026, 2049, 2050, 2090])
def test_the_end_of_a_certificate_is_read_from_it(year: int) -> None:
    ends = datetime.datetime(year, 12, 31, 23, 59, 58, tzinfo=datetime.UTC)
    assert certificates.not_after(certificate(ends).public_bytes(serialization.Encoding.DER)) == ends


@proves("U6")
def test_certificates_that_end_soon_have_ended_or_do_not_fit_are_told(examine: Examine, tmp_path: Path) -> None:
    soon = self_signed(tmp_path)
    listen = f"tls://127.0.0.1:{free_port()}"
    given: dict[str, Any] = {"tls__certificate": soon.certificate_path, "tls__key": soon.key_path}
    found = examine("--listen", listen, **given)
    assert f"tls.certificate: {soon.certificate_path} is valid until" in told(found, "certificate", "warn")
    ended = tmp_path / "ended.pem"
    past = datetime.datetime(2001, 2, 3, tzinfo=datetime.UTC)
    ended.write_bytes(certificate(past).public_bytes(serialization.Encoding.PEM))
    found = examine("--listen", listen, exit_code=1, **{**given, "tls__certificate": ended})
    assert f"{ended} has ended on 2001-02-03" in told(found, "certificate", "fail")
    assert f"cannot use {ended}" in told(found, "certificate", "fail")
    found = examine("--listen", listen, exit_code=1)
    assert "needs the settings tls.certificate and tls.key" in told(found, "certificate", "fail")


@proves("U6")
def test_etcd_that_is_away_fails_and_one_that_answers_is_told_with_its_cluster(
    examine: Examine, tmp_path: Path
) -> None:
    away = f"127.0.0.1:{free_port()}"
    found = examine(coordination=f"etcd://{away}", exit_code=1)
    assert f"1 of 1 etcd nodes do not answer: {away}: " in told(found, "coordination", "fail")
    with etcd_nodes(tmp_path / "etcd", 1) as etcd:
        found = examine(coordination=etcd.uri)
        assert "etcd answers, and holds no cluster yet" in told(found, "coordination", "ok")
        found = examine(coordination=f"{etcd.uri},{away}", exit_code=1)
        assert "1 of 2 etcd nodes do not answer" in told(found, "coordination", "fail")


@proves("U6")
def test_a_folder_in_memory_a_failed_sync_and_a_file_in_its_place_are_told(examine: Examine, tmp_path: Path) -> None:
    found = examine("--data", "/dev/shm/headrace-is-not-here")
    assert "tmpfs, mounted on /dev/shm: memory, gone at the next boot" in told(found, "disk", "warn")
    marked = tmp_path / "marked" / "t" / "t-0"
    marked.mkdir(parents=True)
    (marked / "sync-failed").touch()
    assert f"a sync has failed in {marked}" in told(examine("--data", str(tmp_path / "marked")), "data folder", "warn")
    (tmp_path / "file").touch()
    found = examine("--data", str(tmp_path / "file"), exit_code=1)
    assert f"{tmp_path / 'file'} is not a folder" in told(found, "data folder", "fail")


def test_the_deepest_mount_is_the_one_that_counts() -> None:
    assert data_folder.mount_of(Path("/proc/self")).kind == "proc"
    assert data_folder.mount_of(Path("/")).point == "/"


def test_settings_that_no_broker_takes_are_refused_as_serve_refuses_them(
    examine: Examine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--set", "num.partition=1"]) == 2
    assert "did you mean 'num.partitions'?" in capsys.readouterr().err
    found = examine("--listen", "0.0.0.0:0", exit_code=1)
    assert "say what they should use" in told(found, "ports", "fail")


def test_the_kernels_that_are_looked_for_are_those_that_are_compiled() -> None:
    tree = ast.parse((ROOT / "setup.py").read_text())
    named = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "KERNELS"
    ]
    assert ast.literal_eval(named[0]) == machine.KERNELS


def test_few_open_files_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (1024, 4096))
    found: list[Finding] = list(machine._open_files(load(None, {}), None))
    assert [each.level for each in found] == [Level.WARN]
    assert "ulimit -n 4096 is allowed here" in found[0].advice

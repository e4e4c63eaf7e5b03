"""The files of deploy/: the unit, the image and the compose files say what the broker takes."""

from __future__ import annotations

import configparser
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy import dockerfile
from headrace.cluster.participant import LEAVE_SECONDS
from headrace.coordination.choice import on_etcd
from headrace.kafka import listeners
from headrace.server.process import STOP_SECONDS
from headrace.settings.values import BrokerSettings, load
from proving import proves

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = ("compose.yaml", "compose.cluster.yaml")
EXPOSURE_MAX = 2.5
SERVICE_KEYS = frozenset({
    "build", "cap_drop", "command", "depends_on", "environment", "image", "ports", "read_only", "restart",
    "security_opt", "stop_grace_period", "tmpfs", "ulimits", "volumes",
})  # fmt: skip
"""Of a compose file's services, as its specification names them."""


def unit() -> configparser.ConfigParser:
    read = configparser.ConfigParser(interpolation=None, comment_prefixes=("#",), delimiters=("=",))
    read.optionxform = str  # type: ignore[assignment,method-assign]
    read.read(DEPLOY / "headrace.service")
    return read


@proves("U6")
def test_the_unit_gives_the_broker_the_time_it_takes() -> None:
    service = unit()["Service"]
    assert service["Type"] == "notify"
    assert service["TimeoutStartSec"] == "infinity"
    assert int(service["TimeoutStopSec"]) > STOP_SECONDS > LEAVE_SECONDS
    assert service["Restart"] == "on-failure"
    assert service["KillMode"] == "mixed"
    assert int(service["WatchdogSec"]) > 0
    user = (DEPLOY / "headrace.sysusers").read_text().splitlines()[-1].split()
    assert user[:2] == ["u", service["User"]]
    assert user[-1] == f"/var/lib/{service['StateDirectory']}"


@proves("U6")
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not here")
    copy = tmp_path / "headrace.service"
    copy.write_text((DEPLOY / "headrace.service").read_text().replace("/opt/headrace/bin/headrace", "/bin/true"))
    verified = subprocess.run([analyze, "verify", str(copy)], capture_output=True, text=True, check=False, timeout=60)
    assert (verified.returncode, verified.stdout, verified.stderr) == (0, "", "")
    judged = subprocess.run(
        [analyze, "security", "--offline=true", str(copy)], capture_output=True, text=True, check=False, timeout=60
    )
    level = judged.stdout.partition("Overall exposure level for headrace.service: ")[2].split()[0]
    assert float(level) <= EXPOSURE_MAX


@proves("U6")
def test_the_image_runs_as_nobody_special_with_settings_that_the_broker_takes() -> None:
    stages = dockerfile.read(DEPLOY / "Dockerfile")
    assert list(stages) == ["build", "etcd", "broker"], "the last stage is what docker build makes"
    broker = stages["broker"]
    assert len({stage.base for stage in stages.values()}) == 1
    for stage in ("etcd", "broker"):
        user, group = stages[stage].last("USER").text.split(":")
        assert f"--uid {user} " in stages[stage].all("RUN")[0].text
        assert f"--gid {group} " in stages[stage].all("RUN")[0].text
    assert broker.last("STOPSIGNAL").words == ["SIGTERM"]
    assert broker.last("ENTRYPOINT").words + broker.last("CMD").words == ["headrace", "serve"]
    settings = load(None, _headrace(broker.environment()))
    assert broker.last("VOLUME").words == [settings["data"]]
    ports = [settings["listen"][0].rpartition(":")[2], settings["http.listen"].rpartition(":")[2]]
    assert broker.last("EXPOSE").words == ports
    assert f":{ports[1]}/health" in broker.last("HEALTHCHECK").text
    assert listeners.parse(settings["listen"], settings["advertise"])


def test_everything_that_the_image_copies_is_there() -> None:
    ignored = dockerfile.read_ignored(DEPLOY / "Dockerfile.dockerignore")
    taken: set[str] = set()
    for stage in dockerfile.read(DEPLOY / "Dockerfile").values():
        for copy in stage.all("COPY"):
            if not copy.words[0].startswith("--from="):
                assert all((ROOT / name).exists() for name in copy.words[:-1]), copy.text
                assert set(copy.words[:-1]) <= ignored.taken
                taken |= set(copy.words[:-1])
    assert taken == ignored.taken


def _headrace(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith("HEADRACE_")}


def brokers(file: str) -> dict[str, tuple[dict[str, Any], BrokerSettings]]:
    """Each broker of a compose file, with its settings: those of the image below its own."""
    image = _headrace(dockerfile.read(DEPLOY / "Dockerfile")["broker"].environment())
    composed = yaml.safe_load((DEPLOY / file).read_text())
    return {
        name: (service, load(None, image | service["environment"]))
        for name, service in composed["services"].items()
        if service["build"]["target"] == "broker"
    }


@proves("U6")
@pytest.mark.parametrize(("file", "count"), [("compose.yaml", 1), ("compose.cluster.yaml", 3)])
def test_every_broker_of_a_compose_file_can_be_reached_where_it_says(file: str, count: int) -> None:
    found = brokers(file)
    assert len(found) == count
    outside = set()
    for name, (service, settings) in found.items():
        published = dict(reversed(port.split(":")[1:]) for port in service["ports"])
        specs = {spec.name: spec for spec in listeners.parse(settings["listen"], settings["advertise"])}
        told = specs["outside"].advertised
        assert told is not None
        assert published[str(specs["outside"].address.port)] == str(told.port)
        outside.add(told)
        assert str(specs["inside"].advertised) == f"{name}:{specs['inside'].address.port}"
        listen, advertise = listeners.replication(settings, clustered=on_etcd(settings))
        assert (listen is not None) == (count > 1)
        assert listen is None or str(advertise) == f"{name}:{listen.port}"
        assert settings["http.listen"].rpartition(":")[2] in published
        assert int(service["stop_grace_period"].removesuffix("s")) > STOP_SECONDS
    assert len(outside) == count
    assert len({settings["node.id"] for _, settings in found.values()}) == count


@proves("U6")
@pytest.mark.parametrize("file", COMPOSE)
def test_a_compose_file_names_only_what_is_in_it(file: str) -> None:
    composed = yaml.safe_load((DEPLOY / file).read_text())
    stages = dockerfile.read(DEPLOY / "Dockerfile")
    used = set()
    for service in composed["services"].values():
        assert set(service) <= SERVICE_KEYS
        build = service["build"]
        assert build["target"] in stages
        assert (DEPLOY / build["context"] / build["dockerfile"]).samefile(DEPLOY / "Dockerfile")
        assert set(service.get("depends_on", ())) <= set(composed["services"])
        mounted = {volume.split(":")[1] for volume in service["volumes"]}
        assert mounted == set(stages[build["target"]].last("VOLUME").words)
        used |= {volume.split(":")[0] for volume in service["volumes"]}
    assert used == set(composed["volumes"])


def test_the_brokers_of_the_cluster_survive_the_loss_of_one() -> None:
    for _, settings in brokers("compose.cluster.yaml").values():
        assert settings["coordination"] == "etcd://etcd:2379"
        assert settings["default.replication.factor"] == 3
        assert settings.topic_defaults()["min.insync.replicas"] == 0, "a majority"


@pytest.mark.parametrize("file", COMPOSE)
def test_docker_takes_the_compose_file(file: str) -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode:
        pytest.skip("docker compose is not here")
    subprocess.run([docker, "compose", "-f", str(DEPLOY / file), "config", "--quiet"], check=True, timeout=60)

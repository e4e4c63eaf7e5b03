#!/usr/bin/env python3
"""Sees to it that the commands named are there, from Debian packages: `packages.py kcat node npm strace`.

As root what is missing is installed, and a service that an installation started is stopped again; one that
ran before is left alone. As anyone else the exact line to type is printed and the exit status is 1.
Needs only a Python 3 with its standard library, because it runs before anything is installed.
"""

import os
import shutil
import subprocess
import sys

PACKAGE_OF = {
    "debootstrap": "debootstrap",
    "etcd": "etcd-server",
    "ip": "iproute2",
    "java": "default-jre-headless",
    "kcat": "kcat",
    "mvn": "maven",
    "nats-server": "nats-server",
    "node": "nodejs",
    "npm": "npm",
    "redis-server": "redis-server",
    "strace": "strace",
}


def running_programs() -> dict[int, str]:
    """The program file of every process that we may see, by process id."""
    programs = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                programs[int(entry)] = os.readlink(f"/proc/{entry}/exe")
            except OSError:
                continue
    return programs


def files_of(package: str) -> set[str]:
    listed = subprocess.run(["dpkg", "-L", package], capture_output=True, text=True, check=False)
    return set(listed.stdout.splitlines())


def stop_started(before: dict[int, str], packages: set[str]) -> None:
    """Stop the services of new packages that run now and did not run before."""
    files = set().union(*(files_of(package) for package in packages)) if packages else set()
    started = {pid: program for pid, program in running_programs().items() if pid not in before and program in files}
    if not started:
        return
    scripts = {os.path.basename(file) for file in files if file.startswith("/etc/init.d/")}
    units = {os.path.basename(file) for file in files if file.endswith(".service") and "@" not in file}
    for name in sorted(scripts | {unit.removesuffix(".service") for unit in units}):
        print(f"packages: stopping {name}, which the installation started")
        subprocess.run(["service", name, "stop"], capture_output=True, check=False)


def installed() -> set[str]:
    listed = subprocess.run(["dpkg-query", "-W", "-f", "${Package}\n"], capture_output=True, text=True, check=False)
    return set(listed.stdout.splitlines())


def install(missing: list[str]) -> int:
    print(f"packages: installing {' '.join(missing)}", flush=True)
    before, had = running_programs(), installed()
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing]
    done = None
    for refresh in (False, True):
        if refresh:
            subprocess.run(["apt-get", "update", "-qq"], env=environment, capture_output=True, check=False)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            break
    stop_started(before, installed() - had)
    if done is None or done.returncode:
        print(done.stderr if done else "", file=sys.stderr)
        print(f"packages: {' '.join(command)} failed", file=sys.stderr)
        return 1
    return 0


def main(commands: list[str]) -> int:
    unknown = [command for command in commands if command not in PACKAGE_OF]
    if unknown:
        print(f"packages: no Debian package is known for {', '.join(unknown)}", file=sys.stderr)
        return 2
    missing = sorted({PACKAGE_OF[command] for command in commands if shutil.which(command) is None})
    if not missing:
        return 0
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        print("packages: some programs are missing; as root:", file=sys.stderr)
        print(f"  apt-get install -y {' '.join(missing)}", file=sys.stderr)
        return 1
    return install(missing)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

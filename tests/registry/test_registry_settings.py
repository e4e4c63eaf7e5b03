"""Cluster-wide settings: kept in etcd, told by every registry, changed by one writer at a time."""

from __future__ import annotations

import json
import threading

import pytest

from brokers import free_port, wait_for
from headrace.cli.main import main
from proving import proves
from registries import Registry

WRITERS = 4
STEPS = 10


@proves("R1")
def test_a_setting_is_told_by_every_registry_until_it_is_deleted(registries: list[Registry]) -> None:
    first, second = registries
    stored = first.ask("/settings/mail.limit", "PUT", "30 a day, ä")
    assert stored["value"] == "30 a day, ä"
    wait_for("the other registry to have it", lambda: second.ask("/settings/mail.limit") == stored)
    assert stored in second.ask("/settings")["settings"]
    assert second.ask("/settings/mail.limit", "DELETE") == {"name": "mail.limit", "deleted": True}
    wait_for("it to be gone", lambda: first.ask("/settings/mail.limit").get("status") == 404)
    assert first.ask("/settings/mail.limit", "DELETE")["status"] == 404


@proves("R1")
def test_a_change_for_another_revision_is_refused(registries: list[Registry]) -> None:
    first, second = registries
    made = first.ask("/settings/once?revision=0", "PUT", "a")
    assert first.ask("/settings/once?revision=0", "PUT", "b")["error"]["kind"] == "ChangedMeanwhile"
    # What one registry has just told is taken by the other, however far behind it is.
    changed = second.ask(f"/settings/once?revision={made['revision']}", "PUT", "c")
    assert changed["value"] == "c"
    assert first.ask(f"/settings/once?revision={made['revision']}", "DELETE")["status"] == 409
    assert first.ask(f"/settings/once?revision={changed['revision']}", "DELETE")["deleted"]


@proves("R1")
def test_no_change_is_lost_among_writers_at_several_registries(registries: list[Registry]) -> None:
    registries[0].ask("/settings/counter", "PUT", "0")

    def count(registry: Registry) -> None:
        done = 0
        while done < STEPS:
            found = registry.ask("/settings/counter")
            if "revision" not in found:
                continue
            value = int(found["value"]) + 1
            changed = registry.ask(f"/settings/counter?revision={found['revision']}", "PUT", str(value))
            done += "revision" in changed

    writers = [threading.Thread(target=count, args=(registries[n % 2],), daemon=True) for n in range(WRITERS)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert not any(writer.is_alive() for writer in writers)
    # A registry tells what it has watched so far: a change made at the other one comes a moment later.
    wait_for(
        f"both registries to tell {WRITERS * STEPS}",
        lambda: {registry.ask("/settings/counter")["value"] for registry in registries} == {str(WRITERS * STEPS)},
    )


@proves("R1")
def test_settings_from_the_command_line(registries: list[Registry], capsys: pytest.CaptureFixture[str]) -> None:
    addresses = f"127.0.0.1:{free_port()},{registries[0].addresses['http']}"

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(["config", "cluster", *arguments, "--registry", addresses])
        said = capsys.readouterr()
        return code, said.out, said.err

    code, out, _ = run("set", "shop.open", "9 to 5", "--revision", "0")
    revision = out.split()[-1]
    assert (code, out) == (0, f"set shop.open, revision {revision}\n")
    assert run("get", "shop.open")[:2] == (0, "9 to 5\n")
    assert f"shop.open  9 to 5  {revision.rjust(8)}" in " ".join(run("list")[1].split("\n"))
    found = json.loads(run("get", "shop.open", "--json")[1])
    assert found == {"name": "shop.open", "value": "9 to 5", "revision": int(revision)}
    code, _, err = run("set", "shop.open", "never", "--revision", "1")
    assert (code, err.count("\n")) == (1, 1)
    assert f"has revision {revision}, and the change was made for revision 1" in err
    assert run("delete", "shop.open", "--revision", revision)[:2] == (0, "deleted shop.open\n")
    assert run("get", "shop.open")[0] == 1
    code, _, err = run("get", "no/name")
    assert (code, "is no name of a setting" in err) == (1, True)
    assert main(["config", "cluster", "list", "--registry", f"127.0.0.1:{free_port()},nowhere:x"]) == 1
    assert "no registry answers" in capsys.readouterr().err

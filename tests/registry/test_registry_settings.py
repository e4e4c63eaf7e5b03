"""Cluster-wide settings: kept in etcd, told by every registry, changed by one writer at a time."""

from __future__ import annotations

import threading

from brokers import wait_for
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
    assert registries[0].ask("/settings/counter")["value"] == str(WRITERS * STEPS)

"""TLS and users of etcd: who is let in, and what the others are told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from aetcd import rpc

from certificates import self_signed
from coordination.etcd_clients import DEADLINE_SECONDS, reaching
from etcd_nodes import EtcdNodes, EtcdTls, etcd_nodes
from headrace.coordination.etcd import EtcdCoordination
from headrace.coordination.etcd_connection import EtcdAccess, EtcdLink, Metadata, Node
from headrace.errors import CoordinationError
from headrace.ports.coordination import Put
from headrace.system.clock import LoopClock

USER, PASSWORD = "headrace", "open sesame"
Body = Callable[[EtcdCoordination], Coroutine[Any, Any, None]]


def use(access: EtcdAccess, body: Body, call_seconds: float = DEADLINE_SECONDS) -> None:
    async def within() -> None:
        subject = reaching(access, call_seconds=call_seconds)
        try:
            await asyncio.wait_for(body(subject), DEADLINE_SECONDS)
        finally:
            await subject.close()

    asyncio.run(within())


async def works(subject: EtcdCoordination) -> None:
    start = await subject.put("/headrace/a", b"1")
    lease = await subject.grant_lease(10)
    assert await subject.keep_alive(lease)
    watch = subject.watch("/headrace/", start)
    assert (await anext(watch)).events[0].value == b"1"
    await subject.revoke_lease(lease)


def refused(says: str) -> Body:
    async def body(subject: EtcdCoordination) -> None:
        with pytest.raises(CoordinationError, match=says) as told:
            await subject.put("/headrace/a", b"")
        assert PASSWORD not in str(told.value)

    return body


def test_tls_lets_in_who_has_a_certificate_and_trusts_no_stranger(tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
    ours, theirs = self_signed(tmp_path / "ours"), self_signed(tmp_path / "theirs")
    certificate, key = str(ours.certificate_path), str(ours.key_path)
    tls = EtcdTls(ours.certificate_path, ours.key_path, ours.certificate_path)
    with etcd_nodes(tmp_path, tls=tls) as etcd:
        addresses = tuple(etcd.addresses)
        use(EtcdAccess(addresses, certificate, certificate, key), works)
        use(EtcdAccess((addresses[0].replace("127.0.0.1", "localhost"),), certificate, certificate, key), works)
        nobody = refused(r"did not answer.*Check that etcd runs there, and the settings coordination and etcd\.tls")
        use(EtcdAccess(addresses, certificate), nobody, 0.4)
        use(EtcdAccess(addresses, str(theirs.certificate_path), certificate, key), nobody, 0.4)
        use(EtcdAccess(addresses), nobody, 0.4)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdNodes]:
    """A node with users: root, and one who may touch what is below /headrace/ alone."""
    with etcd_nodes(tmp_path_factory.mktemp("guarded"), flags=["--bcrypt-cost=4"]) as etcd:
        asyncio.run(_guard(etcd))
        yield etcd


async def _guard(etcd: EtcdNodes) -> None:
    link = EtcdLink(EtcdAccess(tuple(etcd.addresses)), LoopClock(asyncio.get_running_loop()))
    allowed = rpc.Permission(permType=rpc.Permission.READWRITE, key=b"/headrace/", range_end=b"/headrace0")

    async def ask(node: Node, seconds: float, metadata: Metadata) -> None:
        auth = node.auth
        await auth.RoleAdd(rpc.AuthRoleAddRequest(name="root"))
        await auth.RoleAdd(rpc.AuthRoleAddRequest(name="broker"))
        await auth.RoleGrantPermission(rpc.AuthRoleGrantPermissionRequest(name="broker", perm=allowed))
        for user, role in (("root", "root"), (USER, "broker")):
            await auth.UserAdd(rpc.AuthUserAddRequest(name=user, password=PASSWORD))
            await auth.UserGrantRole(rpc.AuthUserGrantRoleRequest(user=user, role=role))
        await auth.AuthEnable(rpc.AuthEnableRequest())

    await link.call("set up users", ask)
    await link.close()


def test_a_user_with_a_role_on_our_keys_has_all_that_a_broker_needs(guarded: EtcdNodes) -> None:
    use(EtcdAccess(tuple(guarded.addresses), user=USER, password=PASSWORD), works)


def test_a_token_that_etcd_has_forgotten_is_asked_for_again(guarded: EtcdNodes) -> None:
    async def body(subject: EtcdCoordination) -> None:
        start = await subject.put("/headrace/t/a", b"")
        waiting = asyncio.ensure_future(anext(subject.watch("/headrace/t/", start + 1)))
        await subject.get("/headrace/t/a")
        guarded.kill(0)
        guarded.start(0)
        result = await subject.transact([], [Put("/headrace/t/b", b"")])
        assert [(event.key, event.mod_revision) for event in (await waiting).events] == [
            ("/headrace/t/b", result.revision)
        ]

    use(EtcdAccess(tuple(guarded.addresses), user=USER, password=PASSWORD), body)


def test_the_wrong_password_is_named_and_no_password_shown(guarded: EtcdNodes) -> None:
    addresses = tuple(guarded.addresses)
    use(EtcdAccess(addresses, user=USER, password="wrong"), refused(r"invalid user ID or password.*etcd\.password"))
    use(EtcdAccess(addresses, user="nobody", password=PASSWORD), refused(r"settings etcd\.user and etcd\.password"))
    use(EtcdAccess(addresses), refused(r"user name is empty.*Set etcd\.user"))
    assert PASSWORD not in repr(EtcdAccess(addresses, user=USER, password=PASSWORD))


def test_keys_that_the_user_may_not_touch_are_named(guarded: EtcdNodes) -> None:
    async def body(subject: EtcdCoordination) -> None:
        with pytest.raises(CoordinationError, match=r"refused to write /else: .*permission denied.*below /headrace/"):
            await subject.put("/else", b"")
        with pytest.raises(CoordinationError, match=r"does not let us watch /else"):
            await anext(subject.watch("/else", 1))

    use(EtcdAccess(tuple(guarded.addresses), user=USER, password=PASSWORD), body)


def test_a_user_for_an_etcd_without_users_is_told_so(tmp_path: Path) -> None:
    with etcd_nodes(tmp_path) as etcd:
        use(EtcdAccess(tuple(etcd.addresses), user=USER, password=PASSWORD), refused(r"not enabled.*etcd\.user empty"))

"""What a shell completes beside commands and flags: names that brokers, the config file and the settings' tables know.

A shell waits for it while somebody types. So a broker has half a second to answer, and what goes wrong is not told:
nothing is completed then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

import click

from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from headrace.client.admin.cluster import Cluster

ANSWER_MS: Final = 500

Complete = Callable[[click.Context, click.Parameter, str], list[str]]


def topic_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Those that brokers keep for themselves only to who has begun to write them."""

    def listed(cluster: Cluster) -> Iterable[str]:
        topics = cluster.topology().topics.items()
        return (name for name, topic in topics if incomplete.startswith("_") or not topic.is_internal)

    return _unsaid(ctx, param, _beginning(incomplete, _ask(ctx, listed)))


def group_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    def listed(cluster: Cluster) -> Iterable[str]:
        from headrace.client.admin.groups import list_groups

        return (group.group_id for group in list_groups(cluster))

    return _unsaid(ctx, param, _beginning(incomplete, _ask(ctx, listed)))


def transactional_ids(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    def listed(cluster: Cluster) -> Iterable[str]:
        from headrace.client.admin.transactions import list_transactions

        return (listed.transactional_id for listed in list_transactions(cluster))

    return _unsaid(ctx, param, _beginning(incomplete, _ask(ctx, listed)))


def context_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from headrace.client import contexts

    try:
        known = contexts.read(contexts.config_path()).contexts
    except HeadraceError:
        return []
    return _beginning(incomplete, [*known, contexts.NO_CONTEXT])


def topic_settings(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """`name=`, for a value to follow."""
    return _beginning(incomplete, [f"{name}=" for name in _settings_of("topic")])


def topic_setting_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    return _beginning(incomplete, _settings_of("topic"))


def server_setting_assignments(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    return _beginning(incomplete, [f"{name}=" for name in _settings_of("server")])


def resource_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Of `headrace config`: names of the kind that was said before."""
    kind = ctx.params.get("kind")
    if kind == "broker":
        return _beginning(incomplete, _ask(ctx, lambda cluster: map(str, cluster.topology([]).brokers)))
    return {"topic": topic_names, "group": group_names}[str(kind)](ctx, param, incomplete) if kind else []


def resource_settings(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    return [f"{name}=" for name in resource_setting_names(ctx, param, incomplete)]


def resource_setting_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    return _beginning(incomplete, _settings_of(str(ctx.params.get("kind"))))


def _settings_of(kind: str) -> Iterable[str]:
    from headrace.cluster.config import DYNAMIC
    from headrace.settings.values import BROKER_BY_NAME, GROUP_BY_NAME, REGISTRY_BY_NAME, TOPIC_BY_NAME

    tables: dict[str, Iterable[str]] = {
        "topic": TOPIC_BY_NAME,
        "group": GROUP_BY_NAME,
        "broker": DYNAMIC,
        "server": BROKER_BY_NAME | REGISTRY_BY_NAME,
    }
    return tables.get(kind, ())


def _ask(ctx: click.Context, question: Callable[[Cluster], Iterable[str]]) -> Iterable[str]:
    from headrace.cli.options import connection_flags
    from headrace.client import contexts
    from headrace.client.admin.cluster import Cluster, Retry

    try:
        found = contexts.resolve(connection_flags(ctx.params), ctx.params.get("context"))
        retry = Retry(within_ms=ANSWER_MS, first_contact_ms=ANSWER_MS)
        with Cluster(found["bootstrap"], timeout_ms=ANSWER_MS, retry=retry, tls=found.tls()) as cluster:
            return list(question(cluster))
    except HeadraceError:
        return ()


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if name.startswith(incomplete))


def _unsaid(ctx: click.Context, param: click.Parameter, names: list[str]) -> list[str]:
    """Without those that stand in the line already, where several can."""
    said = ctx.params.get(param.name or "")
    return [name for name in names if not (isinstance(said, tuple) and name in said)]

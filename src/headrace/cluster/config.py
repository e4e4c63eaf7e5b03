"""Altering settings while the cluster runs: a topic's overrides, and broker settings for one broker or for all.

An effective broker setting is, strongest first: the broker's own altered value, the cluster's, then file, environment
and flags. Only settings in DYNAMIC can be altered; the others say that they need a restart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final

from headrace.cluster import keys
from headrace.cluster.changes import Changes, Plan, Step, unchanged
from headrace.cluster.image import Image, Topic, encode_topic
from headrace.cluster.names import check_not_reserved
from headrace.errors import InvalidConfig, InvalidRequest, SettingError, UnknownPartition
from headrace.ports.coordination import Delete, Put
from headrace.settings.values import (
    BROKER_BY_NAME,
    DEFAULTS_FOR_TOPICS,
    GROUP_BY_NAME,
    TOPIC_BY_NAME,
    BrokerSettings,
    Setting,
    Value,
    check_topic_overrides,
    nearest,
    plain_texts,
    text_of,
)

DURABILITY: Final = ("durability", "reliability")
"""The settings that say what durability a topic has."""
DYNAMIC: Final = frozenset(setting.name for setting in DEFAULTS_FOR_TOPICS) | {
    "archive.group",
    "auto.create.topics.enable",
    "default.replication.factor",
    "errors.deadletterqueue.auto.create.topics.enable",
    "errors.deadletterqueue.topic.name.prefix",
    "group.consumer.heartbeat.interval.ms",
    "group.consumer.max.size",
    "group.consumer.migration.policy",
    "group.consumer.session.timeout.ms",
    "group.share.delivery.count.limit",
    "group.share.heartbeat.interval.ms",
    "group.share.max.share.sessions",
    "group.share.max.size",
    "group.share.partition.max.record.locks",
    "group.share.record.lock.duration.ms",
    "group.share.session.timeout.ms",
    "num.partitions",
    "partitions.max",
    "offsets.loss.accepted",
    "offsets.retention.ms",
    "share.state.loss.accepted",
    "transaction.max.timeout.ms",
    "transaction.two.phase.commit.enable",
    "transactional.id.expiration.ms",
    "transactional.id.two.phase.expiration.ms",
    "transactions.loss.accepted",
    "transactions.open.max",
    "replica.catchup.bytes.per.second",
    "follower.replication.throttled.rate",
    "replica.alter.log.dirs.io.max.bytes.per.second",
    "log.level",
    "background.threads",
    "log.cleaner.threads",
    "num.io.threads",
    "num.network.threads",
    "num.recovery.threads.per.data.dir",
    "num.replica.fetchers",
    "sasl.kerberos.min.time.before.relogin",
}
"""Broker settings that take effect without a restart."""


class Operation(IntEnum):
    """How one setting is altered, numbered as on the wire."""

    SET = 0
    DELETE = 1
    APPEND = 2
    SUBTRACT = 3


@dataclass(frozen=True, slots=True)
class ConfigChange:
    name: str
    operation: Operation
    value: str | None = None


Alteration = Sequence[ConfigChange] | Mapping[str, str]
"""Changes of single settings, or all the values that a resource has from then on."""


def effective(settings: BrokerSettings, image: Image, broker: int) -> BrokerSettings:
    """The broker's settings with what was altered while running laid over them."""
    values, sources = dict(settings.values), dict(settings.sources)
    for source, altered in (("cluster", image.cluster_config), ("broker", image.broker_configs.get(broker, {}))):
        for name, text in altered.items():
            if name in DYNAMIC:
                values[name] = BROKER_BY_NAME[name].parse(text)
                sources[name] = source
    return BrokerSettings(values, sources)


class EffectiveSettings:
    """The settings of one broker, or of none, as they are now; made anew only when the image has changed."""

    def __init__(self, settings: Callable[[], BrokerSettings], image: Callable[[], Image], broker: int) -> None:
        self._settings = settings
        self._image = image
        self._broker = broker
        self._made: tuple[Image, BrokerSettings] | None = None

    def __call__(self) -> BrokerSettings:
        image = self._image()
        if self._made is None or self._made[0] is not image:
            self._made = image, effective(self._settings(), image, self._broker)
        return self._made[1]


def changed(
    current: Mapping[str, str],
    alteration: Alteration,
    known: Mapping[str, Setting],
    defaults: Mapping[str, Value],
) -> dict[str, str]:
    """The altered values. A list is appended to, or subtracted from, as it is in effect."""
    if isinstance(alteration, Mapping):
        return dict(alteration)
    if len({change.name for change in alteration}) != len(alteration):
        raise InvalidRequest("a setting can be altered once in a request")
    altered = dict(current)
    for change in alteration:
        setting = known.get(change.name)
        if setting is None:
            raise InvalidConfig(f"unknown setting {change.name!r}{nearest(change.name, known)}")
        if change.operation is Operation.DELETE:
            altered.pop(change.name, None)
            continue
        if change.value is None:
            raise InvalidRequest(f"setting {change.name}: {change.operation.name} needs a value")
        if change.operation is Operation.SET:
            altered[change.name] = change.value
            continue
        if setting.kind != "list":
            raise InvalidConfig(f"setting {change.name} is not a list: {change.operation.name} does not fit it")
        present = altered.get(change.name, text_of(defaults.get(change.name, setting.default))).split(",")
        given = [item.strip() for item in change.value.split(",")]
        if change.operation is Operation.APPEND:
            kept = present + [item for item in given if item not in present]
        else:
            kept = [item for item in present if item not in given]
        altered[change.name] = ",".join(item for item in kept if item)
    return altered


def plan_topic(image: Image, name: str, alter: Callable[[Mapping[str, str]], Mapping[str, str]]) -> Plan:
    check_not_reserved(name)
    topic = image.topics.get(name)
    if topic is None:
        raise UnknownPartition(f"there is no topic {name!r}")
    overrides = alter(topic.overrides)
    check_topic_overrides(_to_check(topic.overrides, overrides, TOPIC_BY_NAME))
    overrides = plain_texts(overrides, TOPIC_BY_NAME)
    key = keys.topic_key(image.prefix, name)
    altered = topic.durability_altered or any(overrides.get(each) != topic.overrides.get(each) for each in DURABILITY)
    after = replace(topic, overrides=overrides, durability_altered=altered)
    put = Put(key, encode_topic(after, len(topic.partitions)))
    return Plan((Step((unchanged(key, topic.revision),), (put,)),))


def durability_altered_at(image: Image, topic: Topic) -> int:
    """The newest revision at which the topic may have begun to count another durability than before; 0: it never
    has."""
    own = topic.revision if topic.durability_altered else 0
    if "durability" in topic.overrides or not any(f"log.{each}" in image.cluster_config for each in DURABILITY):
        return own
    return max(own, image.config_revisions.get(keys.cluster_config_key(image.prefix), 0))


def plan_broker(image: Image, broker: int | None, alter: Callable[[Mapping[str, str]], Mapping[str, str]]) -> Plan:
    """Settings of one broker, or with None of all."""
    if broker is None:
        key, current = keys.cluster_config_key(image.prefix), image.cluster_config
    else:
        key, current = keys.broker_config_key(image.prefix, broker), image.broker_configs.get(broker, {})
    altered = alter(current)
    _check_broker_settings(_to_check(current, altered, BROKER_BY_NAME))
    action = Put(key, keys.encode(plain_texts(altered, BROKER_BY_NAME))) if altered else Delete(key)
    return Plan((Step((unchanged(key, image.config_revisions.get(key, 0)),), (action,)),))


def plan_group(image: Image, group: str, alter: Callable[[Mapping[str, str]], Mapping[str, str]]) -> Plan:
    """Settings of a group, which need not be there."""
    if not group:
        raise InvalidRequest("settings of a group need its name")
    key = keys.group_config_key(image.prefix, group)
    current = image.group_configs.get(group, {})
    altered = alter(current)
    for name, text in _to_check(current, altered, GROUP_BY_NAME).items():
        if name not in GROUP_BY_NAME:
            raise InvalidConfig(f"unknown group setting {name!r}")
        try:
            GROUP_BY_NAME[name].parse(text)
        except SettingError as error:
            raise InvalidConfig(str(error)) from None
    action = Put(key, keys.encode(plain_texts(altered, GROUP_BY_NAME))) if altered else Delete(key)
    return Plan((Step((unchanged(key, image.config_revisions.get(key, 0)),), (action,)),))


def _to_check(current: Mapping[str, str], altered: Mapping[str, str], known: Mapping[str, Setting]) -> dict[str, str]:
    """All but what this version does not know and finds as it was: a newer broker has checked that."""
    return {name: text for name, text in altered.items() if name in known or current.get(name) != text}


def _check_broker_settings(altered: Mapping[str, str]) -> None:
    for name, text in altered.items():
        setting = BROKER_BY_NAME.get(name)
        if setting is None:
            raise InvalidConfig(f"unknown broker setting {name!r}{nearest(name, BROKER_BY_NAME)}")
        if name not in DYNAMIC:
            raise InvalidConfig(f"broker setting {name} cannot be altered while running: change the file and restart")
        try:
            setting.parse(text)
        except SettingError as error:
            raise InvalidConfig(str(error)) from None


class Configs:
    """Carries alterations out; `validate_only` changes nothing."""

    def __init__(self, changes: Changes, settings: Callable[[], BrokerSettings]) -> None:
        self._changes = changes
        self._settings = settings

    async def alter_topic(self, name: str, alteration: Alteration, *, validate_only: bool = False) -> None:
        def alter(current: Mapping[str, str]) -> Mapping[str, str]:
            return changed(current, alteration, TOPIC_BY_NAME, self._settings().topic_defaults())

        await self._run(lambda image: plan_topic(image, name, alter), validate_only)

    async def alter_broker(self, broker: int | None, alteration: Alteration, *, validate_only: bool = False) -> None:
        def alter(current: Mapping[str, str]) -> Mapping[str, str]:
            return changed(current, alteration, BROKER_BY_NAME, self._settings().values)

        await self._run(lambda image: plan_broker(image, broker, alter), validate_only)

    async def alter_group(self, group: str, alteration: Alteration, *, validate_only: bool = False) -> None:
        def alter(current: Mapping[str, str]) -> Mapping[str, str]:
            return changed(current, alteration, GROUP_BY_NAME, {})

        await self._run(lambda image: plan_group(image, group, alter), validate_only)

    async def _run(self, plan_on: Callable[[Image], Plan], validate_only: bool) -> None:
        if validate_only:
            plan_on(self._changes.view.image)
        else:
            await self._changes.run(plan_on)

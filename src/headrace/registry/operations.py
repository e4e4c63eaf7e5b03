"""What the HTTP port of a registry takes and answers, for its /openapi.json: the paths that brokers do not have."""

from __future__ import annotations

from typing import Final

from headrace.http.description import (
    BROKER,
    COUNT,
    DONE,
    PARTITION,
    TEXT,
    TRUTH,
    Answer,
    Body,
    Operation,
    Parameter,
    choice,
    closed,
    list_of,
    map_of,
    nullable,
    number,
)
from headrace.http.message import PLAIN

REVISION_MAX: Final = (1 << 63) - 1
REPLICAS_MAX: Final = 1000

_REVISION: Final = number(0, REVISION_MAX)
_TOLD: Final = {"revision": _REVISION}
"""Everything that is made once for an image says for which."""
_IF_REVISION: Final = (Parameter("revision", "Only if this is its revision, 0 if there is none.", _REVISION),)
_SETTING: Final = closed({"name": TEXT, "value": TEXT, "revision": _REVISION}, title="Setting")
_POINT: Final = {"type": "string", "pattern": "^[0-9a-f]{16}$"}
_HELD: Final = closed({"topic": TEXT, "partition": PARTITION, "in_sync": TRUTH}, title="HeldReplica")

INDEX: Final = Operation(
    "What there is", {200: Answer.json("The paths.", closed({"registry_of": TEXT, "paths": list_of(TEXT)}))}
)
HEALTH: Final = Operation(
    "Whether the process lives, and how long etcd has been silent",
    {
        200: Answer.json(
            "It lives.",
            closed(
                {
                    "status": choice("alive"),
                    "cluster": TEXT,
                    "revision": _REVISION,
                    "brokers": COUNT,
                    "etcd": closed(
                        {"status": choice("silent", "heard"), "silent_ms": COUNT, "trouble": nullable(TEXT)}
                    ),
                }
            ),
        )
    },
)
BROKERS: Final = Operation(
    "Who is there, and at which addresses",
    {
        200: Answer.json(
            "By number.",
            closed(
                {
                    **_TOLD,
                    "controller": BROKER,
                    "brokers": list_of(
                        closed(
                            {
                                "broker": BROKER,
                                "listeners": map_of(TEXT),
                                "http": nullable(TEXT),
                                "rack": TEXT,
                                "state": TEXT,
                                "draining": TRUTH,
                                "started_ms": number(),
                            },
                            title="Broker",
                        )
                    ),
                }
            ),
        )
    },
)
RING: Final = Operation(
    "The hash ring, or where one partition falls on it",
    {
        200: Answer.json(
            "The ring, or the place.",
            {
                "anyOf": [
                    closed(
                        {
                            **_TOLD,
                            "points_a_broker": COUNT,
                            "shares": map_of({"type": "number"}),
                            "points": list_of(list_of({"anyOf": [_POINT, BROKER]}, minItems=2, maxItems=2)),
                        },
                        title="Ring",
                    ),
                    closed(
                        {"topic": TEXT, "partition": PARTITION, "point": _POINT, "replicas": list_of(BROKER)},
                        title="RingPlace",
                    ),
                ]
            },
        )
    },
    (
        Parameter("topic", "With partition: where that one falls.", TEXT),
        Parameter("partition", "With topic.", PARTITION),
        Parameter("replicas", "How many (1).", number(1, REPLICAS_MAX)),
    ),
)
BY_TOPIC: Final = Operation(
    "Every partition and its replicas",
    {
        200: Answer.json(
            "By topic and partition.",
            closed(
                {
                    **_TOLD,
                    "partitions": list_of(
                        closed(
                            {
                                "topic": TEXT,
                                "partition": PARTITION,
                                "leader": BROKER,
                                "leader_epoch": number(-1),
                                "replicas": list_of(closed({"broker": BROKER, "in_sync": TRUTH, "live": TRUTH})),
                                "target": list_of(BROKER),
                            },
                            title="PlacedPartition",
                        )
                    ),
                }
            ),
        )
    },
)
BY_BROKER: Final = Operation(
    "Every broker and what it leads and follows",
    {
        200: Answer.json(
            "By broker.",
            closed(
                {
                    **_TOLD,
                    "brokers": list_of(
                        closed(
                            {
                                "broker": BROKER,
                                "live": TRUTH,
                                "draining": TRUTH,
                                "rack": TEXT,
                                "leads": list_of(_HELD),
                                "follows": list_of(_HELD),
                            },
                            title="BrokerLoad",
                        )
                    ),
                }
            ),
        )
    },
)
SETTINGS: Final = Operation(
    "The cluster-wide settings of the users' own",
    {200: Answer.json("By name.", closed({**_TOLD, "settings": list_of(_SETTING)}))},
)
SETTING: Final = Operation("One of them", {200: Answer.json("The setting.", _SETTING)}, errors=(404,))
PUT_SETTING: Final = Operation(
    "Set one of them",
    {200: Answer.json("As it is now.", _SETTING)},
    _IF_REVISION,
    Body({PLAIN: TEXT}),
    (403, 404, 409, 503, 504),
)
DELETE_SETTING: Final = Operation(
    "Delete one of them",
    {200: Answer.json("It is deleted.", closed({"name": TEXT, "deleted": DONE}))},
    _IF_REVISION,
    errors=(404, 409, 503, 504),
)

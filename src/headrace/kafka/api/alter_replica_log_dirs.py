"""AlterReplicaLogDirs, versions 1 to 2. 2: flexible.

A broker has one folder, so there is nothing to move between: for a replica that is asked to be where it is all is well,
any other folder is LOG_DIR_NOT_FOUND, and a replica that is not here REPLICA_NOT_AVAILABLE.
"""

from __future__ import annotations

import os.path

from headrace.errors import ErrorCode
from headrace.kafka.connection import Request
from headrace.wire.message import Message


def handle(request: Request) -> Message:
    results = [
        Message(
            topic_name=topic.name,
            partitions=[
                Message(partition_index=index, error_code=_code(request, asked.path, topic.name, index))
                for index in topic.partitions
            ],
        )
        for asked in request.body.dirs
        for topic in asked.topics
    ]
    return Message(throttle_time_ms=0, results=results)


def _code(request: Request, path: str, topic: str, index: int) -> int:
    folder = request.services.data_folder
    if folder is None or os.path.normpath(path) != os.path.normpath(folder):
        return ErrorCode.LOG_DIR_NOT_FOUND
    here = request.services.partitions.find_replica(topic, index) is not None
    return ErrorCode.NONE if here else ErrorCode.REPLICA_NOT_AVAILABLE

"""The consumer group that an archive tells how far it is.

Brokers delete by the offsets of one group, so for a topic only one archive may move them. Its commits bear its name:

    metadata   headrace archive <id of the archive>

Commits with other metadata, such as `headrace group reset` makes, are nobody's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from headrace.client.admin import groups
from headrace.client.admin.cluster import Cluster
from headrace.errors import OperatorError
from headrace.spark.plan import Place, TopicsFound
from headrace.spark.progress import Position

DEFAULT_GROUP: Final = "headrace-archive"
MARK: Final = groups.ARCHIVE


class NotOurs(OperatorError):
    """The group speaks for another archive."""


def refuse_others(cluster: Cluster, group: str, archive_id: str, places: tuple[Place, ...]) -> groups.Committed:
    """What the group has committed; NotOurs if that is what another archive has."""
    commits = groups.fetch_commits(cluster, group, places)
    for (topic, partition), commit in sorted(commits.items()):
        if commit.metadata.startswith(MARK) and commit.metadata != MARK + archive_id:
            raise NotOurs(
                f"group {group} tells what another archive (id {commit.metadata.removeprefix(MARK)}) has of "
                f"{topic}-{partition}; give this one a --group of its own, or take the group from the other with "
                f"`headrace group reset {group} --topic {topic} --to earliest`"
            )
    return {place: commit.offset for place, commit in commits.items()}


def refuse_passing_over(group: str, committed: Mapping[Place, int], starts: Mapping[Place, int]) -> None:
    """A first commit at `starts` would say that all before is archived or not waited for."""
    for place, start in sorted(starts.items()):
        if committed.get(place, start) < start:
            raise OperatorError(
                f"group {group} waits for {place[0]}-{place[1]} from offset {committed[place]} on, and --starting "
                f"latest would begin at {start}: what is between could be deleted; give --starting earliest or another "
                "--group"
            )


def tell(cluster: Cluster, group: str, archive_id: str, reached: Position, found: TopicsFound) -> dict[Place, int]:
    """Commit what the archive has, of topics that are still those it was read from. What was committed."""
    offsets = {
        place: at
        for place, at in reached.offsets.items()
        if place in found.places and reached.ids.get(place[0]) == found.ids[place[0]]
    }
    if offsets:
        refuse_others(cluster, group, archive_id, tuple(offsets))
        groups.commit_offsets(cluster, group, offsets, metadata=MARK + archive_id)
    return offsets

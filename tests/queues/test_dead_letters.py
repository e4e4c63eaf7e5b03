"""Dead letters of share groups (KIP-1191): what they say, that none is lost and none written twice, and what happens to
those that cannot be written."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.errors import ErrorCode
from headrace.queues import letter_delivery
from headrace.queues.dead_letters import DELIVERY_COUNT, GROUP, MESSAGE, OFFSET, PARTITION, TIMESTAMP, TOPIC
from headrace.queues.messages import AcknowledgeType, DeliveryState
from headrace.records import kernel
from headrace.records.codecs import Codec
from headrace.records.record import NewRecord
from headrace.storage.folder import PARTITIONED, SHARED
from proving import proves
from queues.letter_scene import LETTERS, LetterScene
from queues.scene import RELEASE

REJECT = (int(AcknowledgeType.REJECT),)
TIME_MS = 1_750_000_000_000


@pytest.fixture(params=[PARTITIONED, SHARED])
def scene(request: pytest.FixtureRequest) -> LetterScene:
    return LetterScene(request.param)


def produce(scene: LetterScene, partition: object, *records: NewRecord, codec: int = Codec.NONE) -> None:
    scene.led.partitions.submit(partition, kernel.build(records, codec), -1, 1000, lambda *_: None)  # type: ignore[arg-type]
    scene.led.partitions.end_turn()
    scene.clock.run_soon()


@proves("R10", "Q1")
@pytest.mark.parametrize("near", [True, False])
def test_a_rejected_record_is_told_of_and_not_copied_unless_asked(near: bool) -> None:
    scene = LetterScene(near=near)
    partition = scene.lead(records=3)
    scene.fetch(partition)
    assert scene.acknowledge(partition, 1, 1, REJECT).code == ErrorCode.NONE
    scene.clock.run_soon()
    (letter,) = scene.written()
    assert (letter.key, letter.value) == (None, None)
    assert letter.headers == [
        (TOPIC, b"orders"),
        (PARTITION, b"0"),
        (OFFSET, b"1"),
        (GROUP, b"workers"),
        (DELIVERY_COUNT, b"1"),
        (MESSAGE, b"Offset rejected by client."),
        (TIMESTAMP, b"%d" % TIME_MS),
    ]
    assert letter.timestamp_ms == scene.clock.wall_ms()
    assert scene.acknowledge(partition, 0, 0).code == ErrorCode.NONE
    assert scene.kept(partition).start == 2


@proves("R10", "Q1")
def test_a_copied_letter_has_key_value_headers_and_codec_of_its_record(scene: LetterScene) -> None:
    scene.config = replace(scene.config, copies_dead_letters=True)
    partition = scene.lead()
    old = (GROUP, b"another")
    produce(scene, partition, (5, b"k", b"v" * 500, [("a", b"b"), ("a", None), old]), codec=Codec.ZSTD)
    scene.fetch(partition)
    scene.acknowledge(partition, 0, 0, REJECT)
    scene.clock.run_soon()
    ((header, (letter,)),) = scene.letter_batches()
    assert header.codec == Codec.ZSTD
    assert (letter.key, letter.value, letter.headers[:2]) == (b"k", b"v" * 500, [("a", b"b"), ("a", None)])
    assert [value for name, value in letter.headers if name == GROUP] == [b"workers"]
    assert dict(letter.headers)[TIMESTAMP] == b"5"


def test_a_record_that_was_delivered_as_often_as_may_be_becomes_a_letter() -> None:
    scene = LetterScene(delivery_count_limit=2)
    partition = scene.lead(records=1)
    scene.fetch(partition)
    scene.acknowledge(partition, 0, 0, RELEASE)
    scene.fetch(partition)
    scene.clock.advance(31)
    (letter,) = scene.written()
    said = dict(letter.headers)
    assert (said[DELIVERY_COUNT], said[MESSAGE]) == (b"2", b"Offset delivery count exceeded the threshold.")
    assert scene.kept(partition).start == 1


def test_gaps_have_no_letters(scene: LetterScene) -> None:
    partition = scene.lead(records=2)
    scene.fetch(partition)
    scene.acknowledge(partition, 0, 1, (int(AcknowledgeType.GAP),))
    assert (scene.written(), scene.kept(partition).start) == ([], 2)


def test_a_letter_is_written_when_its_record_is_kept_as_given_up_and_not_before(scene: LetterScene) -> None:
    partition = scene.lead(records=1)
    scene.fetch(partition)
    scene.persister.held = True
    heard = scene.acknowledge(partition, 0, 0, REJECT)
    scene.clock.run_soon()
    assert (scene.asked, heard.replies) == ([], [])
    scene.persister.answer()
    scene.clock.run_soon()
    scene.persister.answer()
    scene.clock.run_soon()
    assert heard.code == ErrorCode.NONE
    assert scene.offsets() == [0]
    assert scene.kept(partition).offsets[0].state == DeliveryState.ARCHIVING, "until that is kept too"
    scene.persister.answer()
    assert scene.kept(partition).start == 1


@pytest.mark.parametrize("wrong", ["there is none", "it takes none", "the name"])
def test_letters_wait_for_their_topic_and_others_go_on(wrong: str, caplog: pytest.LogCaptureFixture) -> None:
    scene = LetterScene(creates=False)
    if wrong == "it takes none":
        scene.create_letters(enabled=False)
    elif wrong == "the name":
        scene.create_letters()
        scene.settings = {**scene.settings, "errors.deadletterqueue.topic.name.prefix": "dead."}
    partition = scene.lead(records=3)
    scene.fetch(partition)
    scene.acknowledge(partition, 0, 0, REJECT)
    assert scene.acknowledge(partition, 1, 2).code == ErrorCode.NONE
    scene.clock.advance(100)
    assert scene.kept(partition).offsets[0].state == DeliveryState.ARCHIVING
    assert scene.kept(partition).start == 0
    scene.produce(partition, 2)
    assert scene.fetch(partition, member="b").ranges(partition) == [(3, 4, 1)]
    assert len([said for said in caplog.messages if "dead letters cannot be written now" in said]) == 1
    assert samples(scene)["headrace_share_records_held", "archiving"] == 1
    assert 5 < samples(scene)["headrace_share_dead_letter_failures_total", ""] < 20, "with growing pauses"
    scene.settings = {**scene.settings, "errors.deadletterqueue.topic.name.prefix": ""}
    if wrong == "it takes none":
        scene.alter_letters(errors_deadletterqueue_group_enable="true")
    elif wrong == "there is none":
        scene.create_letters()
    scene.clock.advance(31)
    assert scene.offsets() == [0]
    assert scene.kept(partition).start == 3
    assert samples(scene)["headrace_share_dead_letters_total", ""] == 1


def samples(scene: LetterScene) -> dict[tuple[str, str], float]:
    """Of the one group, by name and the label behind the group."""
    return {(each.family.name, "".join(each.labels[1:])): each.value for each in scene.shares.samples() if each.labels}


def test_a_topic_is_created_where_the_cluster_allows_it() -> None:
    scene = LetterScene(creates=False)
    scene.settings = {**scene.settings, "errors.deadletterqueue.auto.create.topics.enable": True}
    partition = scene.lead(records=1)
    scene.fetch(partition)
    scene.acknowledge(partition, 0, 0, REJECT)
    scene.clock.run_soon()
    assert (scene.created, scene.offsets()) == ([LETTERS], [0])


def test_a_letter_that_its_topic_does_not_take_holds_up_no_others() -> None:
    scene = LetterScene(creates=False, copies_dead_letters=True)
    scene.create_letters(max_message_bytes=2000)
    partition = scene.lead()
    for each in range(6):
        value = b"x" * 5000 if each == 2 else b"%d" % each
        produce(scene, partition, (TIME_MS, None, value, []))
    scene.fetch(partition)
    scene.acknowledge(partition, 0, 5, REJECT)
    scene.clock.advance(1)
    assert sorted(scene.offsets()) == [0, 1, 3, 4, 5]
    assert scene.kept(partition).start == 2
    scene.alter_letters(max_message_bytes=1 << 20)
    scene.clock.advance(letter_delivery.ASIDE_SECONDS)
    assert sorted(scene.offsets()) == [0, 1, 2, 3, 4, 5]
    assert scene.kept(partition).start == 6


def test_letters_that_wait_bound_what_is_in_flight_and_what_is_done_with_behind_them_does_not() -> None:
    scene = LetterScene(creates=False, record_locks_max=10)
    partition = scene.lead()
    for _ in range(20):
        scene.produce(partition, 5)
    for turn in range(9):
        ((first, last, _),) = scene.fetch(partition, most=5).ranges(partition)
        scene.acknowledge(partition, first, first, REJECT)
        assert scene.acknowledge(partition, first + 1, last).code == ErrorCode.NONE
        assert scene.kept(partition).offsets[5 * turn].state == DeliveryState.ARCHIVING
    scene.fetch(partition, most=5)
    assert not scene.fetch(partition, member="b", most=5).replies, "there is room for so many"


# What is lost on the way.


@proves("R10", "Q1")
def test_a_letter_whose_answer_was_lost_is_not_written_twice(scene: LetterScene) -> None:
    partition = scene.lead(records=4)
    scene.fetch(partition)
    scene.lost_answers = 3
    scene.acknowledge(partition, 0, 1, REJECT)
    scene.clock.advance(1)
    scene.acknowledge(partition, 2, 3, REJECT)
    scene.clock.advance(60)
    assert len(scene.asked) >= 4
    assert scene.offsets() == [0, 1, 2, 3]
    assert scene.kept(partition).start == 4


@proves("R10", "Q1")
def test_the_next_leader_goes_on_with_letters_and_writes_none_twice(scene: LetterScene) -> None:
    partition = scene.lead(records=4)
    scene.fetch(partition)
    scene.lost_answers = 1
    scene.acknowledge(partition, 0, 1, REJECT)
    scene.acknowledge(partition, 3, 3, REJECT)
    assert scene.offsets() == [0, 1], "though its leader has not heard so"
    partition = scene.lead_again(partition)
    scene.shares.follow()
    scene.fetch(partition, member="b")
    scene.clock.advance(1)
    assert scene.offsets() == [0, 1, 3]
    assert scene.kept(partition).start == 2
    assert scene.acknowledge(partition, 2, 2).code == ErrorCode.NONE
    assert scene.kept(partition).start == 4


def test_what_was_written_and_could_not_be_kept_as_such_is_not_written_again(scene: LetterScene) -> None:
    partition = scene.lead(records=1)
    scene.fetch(partition)
    scene.persister.held = True
    heard = scene.acknowledge(partition, 0, 0, REJECT)
    for _ in range(2):
        scene.persister.answer()
        scene.clock.run_soon()
    assert (heard.code, scene.offsets()) == (ErrorCode.NONE, [0])
    scene.persister.faults = [("write", ErrorCode.COORDINATOR_NOT_AVAILABLE)]
    scene.persister.held = False
    scene.persister.answer()
    scene.clock.advance(10)
    assert scene.offsets() == [0]
    assert scene.kept(partition).start == 1, "nobody had to ask for it"


def test_letters_that_follow_each_other_have_one_identity_and_batches_of_bounded_size(scene: LetterScene) -> None:
    partition = scene.lead(records=250)
    scene.fetch(partition)
    scene.acknowledge(partition, 0, 249, REJECT)
    scene.clock.advance(1)
    headers = [header for header, _ in scene.letter_batches()]
    assert [(each.producer_id, each.base_sequence, each.record_count) for each in headers] == [
        (101, 0, 100), (101, 100, 100), (101, 200, 50),
    ]  # fmt: skip


def test_an_identity_that_the_topic_does_not_know_any_more_is_given_up(scene: LetterScene) -> None:
    partition = scene.lead(records=2)
    scene.fetch(partition)
    scene.acknowledge(partition, 0, 0, REJECT)
    scene.clock.run_soon()
    letters = scene.letters
    assert letters is not None
    scene.away = True
    scene.acknowledge(partition, 1, 1, REJECT)
    scene.clock.run_soon()
    scene.clock.advance(0)
    other = kernel.build([(1, None, b"x", [])] * 5, producer_id=101, producer_epoch=0, base_sequence=1)
    scene.far.partitions.submit(letters, other, -1, 1000, lambda *_: None)
    scene.far.partitions.end_turn()
    scene.away = False
    scene.clock.advance(60)
    assert [header.producer_id for header, _ in scene.letter_batches()] == [101, 101, 102]
    assert scene.kept(partition).start == 2


# What changes meanwhile.


def test_letters_that_wait_are_archived_when_the_group_wants_none_any_more() -> None:
    scene = LetterScene(creates=False)
    partition = scene.lead(records=2)
    scene.fetch(partition)
    scene.acknowledge(partition, 0, 1, REJECT)
    scene.clock.advance(1)
    scene.config = replace(scene.config, dead_letter_topic="")
    scene.clock.advance(60)
    assert (scene.kept(partition).start, scene.written()) == (2, [])


def test_who_reads_dead_letters_does_not_write_them_again() -> None:
    scene = LetterScene(near=True)
    assert scene.letters is not None
    scene.produce(scene.letters, 1)
    scene.fetch(scene.letters)
    scene.acknowledge(scene.letters, 0, 0, REJECT)
    scene.clock.advance(10)
    assert scene.letters.log.end_offset == 1
    assert scene.kept(scene.letters).start == 1


def test_retention_takes_records_that_wait_for_their_letters_and_that_is_told(scene: LetterScene) -> None:
    scene.away = True
    partition = scene.lead()
    for _ in range(4):
        scene.produce(partition, 1)
    scene.fetch(partition)
    scene.acknowledge(partition, 0, 3, REJECT)
    scene.clock.advance(1)
    scene.led.partitions.delete_before(partition, 2)
    scene.away = False
    scene.clock.advance(31)
    assert scene.offsets() == [2, 3]
    assert samples(scene)["headrace_share_archived_total", "deleted"] == 2
    assert scene.kept(partition).start == 4

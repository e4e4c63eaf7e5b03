"""The compiled codec against kio's own, byte for byte in both directions, for every API and version."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.errors import ProtocolError, Unsupported
from headrace.wire import codec, schema
from headrace.wire.api import FETCH, KAFKA_APIS, LIST_GROUPS, METADATA, OFFSET_FETCH
from headrace.wire.decoder import MAX_ELEMENTS, walk
from headrace.wire.message import ZERO_UUID, Message
from headrace.wire.schema import Direction
from proving import proves
from wire import kio_peer, tokens

EXAMPLES_PER_BODY = 8

bodies = pytest.mark.parametrize(
    ("api_key", "version", "direction"),
    [pytest.param(*body, id=f"{KAFKA_APIS[body[0]].name}-{body[1]}-{body[2]}") for body in kio_peer.every_body()],
)


def decode(api_key: int, version: int, direction: Direction, body: bytes) -> Message:
    read = codec.decode_request if direction == "request" else codec.decode_response
    return read(api_key, version, memoryview(body), 0)


def encode(api_key: int, version: int, direction: Direction, message: Message) -> bytes:
    write = codec.encode_request if direction == "request" else codec.encode_response
    return write(api_key, version, message)


@proves("G4")
@bodies
@settings(
    max_examples=EXAMPLES_PER_BODY,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(data=st.data())
def test_bodies_agree_with_an_independent_codec_in_both_directions(
    api_key: int, version: int, direction: Direction, data: Any
) -> None:
    cls = kio_peer.entity_type(api_key, version, direction)
    entity = data.draw(kio_peer.entities(cls))
    message = kio_peer.to_message(entity)
    theirs = kio_peer.write(entity)

    ours = encode(api_key, version, direction, message)
    assert ours == theirs
    assert kio_peer.read(cls, ours) == entity

    decoded = decode(api_key, version, direction, theirs)
    assert decoded == message
    assert encode(api_key, version, direction, decoded) == theirs


@bodies
def test_an_empty_message_is_encoded_with_the_defaults_and_read_by_the_independent_codec(
    api_key: int, version: int, direction: Direction
) -> None:
    body = encode(api_key, version, direction, Message())
    entity = kio_peer.read(kio_peer.entity_type(api_key, version, direction), body)
    assert kio_peer.write(entity) == body
    assert encode(api_key, version, direction, decode(api_key, version, direction, body)) == body


@pytest.mark.thorough
@bodies
@settings(max_examples=2, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_body_cut_at_any_byte_is_refused(api_key: int, version: int, direction: Direction, data: Any) -> None:
    body = kio_peer.write(data.draw(kio_peer.entities(kio_peer.entity_type(api_key, version, direction))))
    for length in range(len(body)):
        with pytest.raises(ProtocolError):
            decode(api_key, version, direction, body[:length])
    if direction == "request":  # a client's stray bytes are passed over, as librdkafka 2.16 needs
        assert decode(api_key, version, direction, body + b"\0\1\2") == decode(api_key, version, direction, body)
        return
    with pytest.raises(ProtocolError, match="after the last field"):
        decode(api_key, version, direction, body + b"\0")


@proves("G4")
@pytest.mark.thorough
@bodies
@settings(max_examples=2, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_hostile_length_is_refused_at_every_length(
    api_key: int, version: int, direction: Direction, data: Any
) -> None:
    message = kio_peer.to_message(data.draw(kio_peer.entities(kio_peer.entity_type(api_key, version, direction))))
    pieces = list(tokens.tokens(schema.load(api_key, version, direction), message))
    assert b"".join(piece.data for piece in pieces) == encode(api_key, version, direction, message)
    for nth, piece in enumerate(pieces):
        for hostile in piece.hostile():
            body = b"".join((*(p.data for p in pieces[:nth]), hostile, *(p.data for p in pieces[nth + 1 :])))
            with pytest.raises(ProtocolError):
                decode(api_key, version, direction, body)


@bodies
def test_a_decoded_message_answers_for_every_field_that_the_api_ever_had(
    api_key: int, version: int, direction: Direction
) -> None:
    message = decode(api_key, version, direction, encode(api_key, version, direction, Message()))
    api = KAFKA_APIS[api_key]
    for other in range(api.min_version, api.max_version + 1):
        for field in schema.load(api_key, other, direction).fields:
            getattr(message, field.name)


@pytest.mark.parametrize("api_key", KAFKA_APIS)
@pytest.mark.parametrize("direction", ["request", "response"])
def test_versions_with_all_fields_have_those_of_every_version(api_key: int, direction: Direction) -> None:
    def names(versions: Any) -> set[tuple[str, ...]]:
        structs = (pair for v in versions for pair in walk(schema.load(api_key, v, direction)))
        return {(*keys, field.name) for keys, spec in structs for field in spec.fields}

    lowest, highest = schema.api_versions_known(api_key)
    assert names(schema.versions_with_all_fields(api_key)) == names(range(lowest, highest + 1))


def test_absent_fields_answer_their_default_or_nothing_and_are_not_shared() -> None:
    body = codec.encode_request(FETCH, 4, Message(topics=[Message(topic="t", partitions=[])]))
    request = codec.decode_request(FETCH, 4, memoryview(body))
    assert request.forgotten_topics_data == []
    request.forgotten_topics_data.append("mine alone")
    assert request.forgotten_topics_data == []
    assert (request.session_epoch, request.rack_id, request.cluster_id) == (-1, "", None)
    assert request.topics[0].topic_id is None
    assert request.replica_state.replica_epoch == -1
    with pytest.raises(AttributeError):
        _ = request.no_such_field


def test_uuid_times_and_records_are_plain_values() -> None:
    message = Message(
        transactional_id=None,
        acks=-1,
        timeout_ms=1500,
        topic_data=[Message(topic_id=b"0123456789abcdef", partition_data=[Message(index=7, records=b"batch")])],
    )
    body = memoryview(codec.encode_request(0, 13, message))
    request = codec.decode_request(0, 13, body)
    assert request == message
    records = request.topic_data[0].partition_data[0].records
    assert isinstance(records, memoryview)
    assert records.obj is body.obj


def test_fields_of_other_versions_are_ignored() -> None:
    message = Message(groups=[Message(group_id="g", member_epoch=4)], group_id="g", topics=None)
    assert codec.decode_request(OFFSET_FETCH, 7, memoryview(codec.encode_request(OFFSET_FETCH, 7, message))) == Message(
        group_id="g", topics=None, require_stable=False
    )


def test_unknown_tagged_fields_are_skipped_at_every_level() -> None:
    tags = b"\x02\x63\x03abc\xff\x7f\x00"
    topic = b"\x11" * 16 + b"\x02t" + tags
    body = b"\x02" + topic + b"\x01\x00" + tags
    request = codec.decode_request(METADATA, 12, memoryview(body))
    assert [topic.name for topic in request.topics] == ["t"]
    assert request.allow_auto_topic_creation is True
    assert request.include_topic_authorized_operations is False


@pytest.mark.parametrize(
    "tags",
    [b"\x01", b"\x01\x05", b"\x01\x05\x04ab", b"\x7f\x00\x00", b"\xff\xff\xff\xff\xff\x01", b"\xff\xff\xff\xff\x7f"],
)
def test_malformed_tag_sections_are_refused(tags: bytes) -> None:
    with pytest.raises(ProtocolError, match="metadata v12 request: field tags"):
        codec.decode_request(METADATA, 12, memoryview(b"\x01\x01\x00" + tags))


def test_a_known_tag_whose_size_is_not_that_of_its_value_is_refused() -> None:
    good = codec.encode_request(FETCH, 17, Message(cluster_id="abc"))
    assert good.endswith(b"\x01\x00\x04\x04abc")
    with pytest.raises(ProtocolError, match="cluster_id"):
        codec.decode_request(FETCH, 17, memoryview(good[:-5] + b"\x05\x04abcd"))


def test_an_error_names_api_version_field_and_position() -> None:
    body = codec.encode_request(METADATA, 1, Message(topics=[Message(name="topic")]))
    with pytest.raises(ProtocolError, match=r"metadata v1 request: field topics\[\].name at byte 6 of 9: .* 5 bytes"):
        codec.decode_request(METADATA, 1, memoryview(body[:-2]))


def test_text_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(ProtocolError, match=r"topics\[\].name"):
        codec.decode_request(METADATA, 1, memoryview(b"\0\0\0\1\0\2\xc3\x28"))


def test_null_is_refused_where_the_schema_has_none() -> None:
    with pytest.raises(ProtocolError, match="null"):
        codec.decode_request(METADATA, 0, memoryview(b"\xff\xff\xff\xff"))
    assert codec.decode_request(METADATA, 1, memoryview(b"\xff\xff\xff\xff")).topics is None


def test_the_elements_of_one_message_are_limited() -> None:
    # Empty strings of one byte each: the frame could hold them, the limit does not.
    count = MAX_ELEMENTS + 1
    body = tokens.varint(count + 1) + b"\x01" * count + b"\x01\x00"
    with pytest.raises(ProtocolError, match="limit"):
        codec.decode_request(LIST_GROUPS, 5, memoryview(body))


def test_values_that_do_not_fit_are_the_callers_fault_and_named() -> None:
    with pytest.raises(AttributeError) as caught:
        codec.encode_response(METADATA, 12, Message(brokers=[Message(node_id=1, host=None)]))
    assert "brokers[].host of metadata v12 response" in caught.value.__notes__[0]


def test_apis_and_versions_without_a_schema_are_unsupported() -> None:
    for api_key, version in ((FETCH, 99), (FETCH, -1), (4242, 0)):
        with pytest.raises(Unsupported):
            codec.decode_request(api_key, version, memoryview(b""))


def test_messages_compare_by_the_fields_they_carry() -> None:
    assert Message(a=1, b=[Message(c=2)]) == Message(b=[Message(c=2)], a=1)
    assert Message(a=1) != Message(a=1, b=2)
    assert Message(a=1) != 1
    assert repr(Message(a=1, b="x")) == "Message(a=1, b='x')"
    assert len(ZERO_UUID) == 16

"""Headers against kio's own, the table of APIs against the schemas, frames in pieces."""

from __future__ import annotations

import struct

import pytest
from kio.schema.request_header.v1.header import RequestHeader as RequestHeaderV1
from kio.schema.request_header.v2.header import RequestHeader as RequestHeaderV2
from kio.static.primitive import i16, i32

from headrace.errors import ProtocolError
from headrace.wire import codec, schema
from headrace.wire.api import API_VERSIONS, KAFKA_APIS, METADATA, PRODUCE
from proving import proves
from wire import kio_peer

each_api = pytest.mark.parametrize("api_key", KAFKA_APIS, ids=lambda key: KAFKA_APIS[key].name)


@each_api
def test_the_table_of_apis_agrees_with_the_schemas(api_key: int) -> None:
    api = KAFKA_APIS[api_key]
    assert (api.min_version, api.max_version) == schema.api_versions_known(api_key)
    assert api.name.lower() == schema.api_name(api_key).replace("_", "")
    for version in range(api.min_version, api.max_version + 1):
        for direction in (schema.load(api_key, version, "request"), schema.load(api_key, version, "response")):
            assert direction.flexible == (version >= api.flexible_from)
    assert api.serves(api.max_version)
    assert not api.serves(api.max_version + 1)


def test_produce_is_advertised_from_zero_but_served_from_three() -> None:
    assert (KAFKA_APIS[PRODUCE].advertised_min, KAFKA_APIS[PRODUCE].min_version) == (0, 3)
    assert all(api.advertised_min == api.min_version for api in KAFKA_APIS.values() if api.key != PRODUCE)


@proves("G4")
@each_api
def test_headers_are_of_the_version_that_the_schema_says(api_key: int) -> None:
    api = KAFKA_APIS[api_key]
    for version in range(api.min_version, api.max_version + 1):
        request = kio_peer.entity_type(api_key, version, "request").__header_schema__
        response = kio_peer.entity_type(api_key, version, "response").__header_schema__
        theirs = kio_peer.write(
            request(
                request_api_key=i16(api_key),
                request_api_version=i16(version),
                correlation_id=i32(77),
                client_id="ключ",
            )
        )
        frame = codec.write_request(api_key, version, 77, "ключ", b"body")
        assert frame == struct.pack(">i", len(theirs) + 4) + theirs + b"body"
        read = codec.read_request_header(memoryview(frame), 4)
        assert read == (api_key, version, 77, "ключ", len(frame) - 4)

        theirs = kio_peer.write(response(correlation_id=i32(-5)))
        frame = codec.write_response(api_key, version, -5, b"body")
        assert frame == struct.pack(">i", len(theirs) + 4) + theirs + b"body"
        assert codec.read_response_header(api_key, version, memoryview(frame), 4) == (-5, len(frame) - 4)


def test_the_apiversions_response_has_header_v0_in_every_version() -> None:
    for version in range(5):
        assert codec.write_response(API_VERSIONS, version, 1, b"") == b"\0\0\0\4\0\0\0\1"


def test_a_null_client_id_and_unknown_header_tags_are_accepted() -> None:
    theirs = kio_peer.write(
        RequestHeaderV1(
            request_api_key=i16(METADATA), request_api_version=i16(1), correlation_id=i32(1), client_id=None
        )
    )
    assert codec.read_request_header(memoryview(theirs)).client_id is None
    flexible = kio_peer.write(
        RequestHeaderV2(
            request_api_key=i16(METADATA), request_api_version=i16(12), correlation_id=i32(1), client_id="c"
        )
    )
    tagged = flexible[:-1] + b"\x01\x05\x03abc"
    assert codec.read_request_header(memoryview(tagged)).body == len(tagged)


def test_a_version_above_the_known_ones_still_yields_its_correlation_id() -> None:
    frame = codec.write_request(API_VERSIONS, 99, 31, "new", b"")
    assert codec.read_request_header(memoryview(frame), 4)[:4] == (API_VERSIONS, 99, 31, "new")


def test_a_header_is_read_with_any_client_id_and_tags_and_refused_when_malformed() -> None:
    start = struct.pack(">hhi", METADATA, 12, 1)
    for client_id in (b"\xff\xff", b"\0\0", b"\0\1c"):
        for tags in (b"\0", b"\x01\x05\x03abc"):
            frame = memoryview(start + client_id + tags)
            assert codec.read_request_header(frame).body == len(frame)
    for malformed in (b"", start, start + b"\xff\xfe\0", start + b"\0\5abc", start + b"\0\1a\x01\x05\x7f"):
        with pytest.raises(ProtocolError, match="request header"):
            codec.read_request_header(memoryview(malformed))


@each_api
def test_a_client_id_longer_than_the_frame_is_refused_with_the_body(api_key: int) -> None:
    frame = memoryview(struct.pack(">hhih", api_key, KAFKA_APIS[api_key].min_version, 1, 500))

    def serve() -> None:
        _, version, _, _, body = codec.read_request_header(frame)
        codec.decode_request(api_key, version, frame, body)

    with pytest.raises(ProtocolError):
        serve()


def test_the_one_request_with_header_v0_is_read() -> None:
    assert codec.read_request_header(memoryview(b"\0\7\0\0\0\0\0\x09")) == (7, 0, 9, None, 8)


@pytest.mark.parametrize(
    "tail", [b"\x7f\xff", b"\0\5abc", b"\xff\xfe", b"\0\1\xff\0", b"\0\1a\x01", b"\0\1a\x01\x05\x7f"]
)
def test_malformed_request_headers_are_refused(tail: bytes) -> None:
    start = struct.pack(">hhi", METADATA, 12, 1)
    for length in range(len(start)):
        with pytest.raises(ProtocolError, match="request header"):
            codec.read_request_header(memoryview(start[:length]))
    with pytest.raises(ProtocolError, match="request header"):
        codec.read_request_header(memoryview(start + tail))


def test_malformed_response_headers_are_refused() -> None:
    for frame in (b"", b"\0\0\0", b"\0\0\0\1", b"\0\0\0\1\x01\x05\x7f"):
        with pytest.raises(ProtocolError, match="response header"):
            codec.read_response_header(METADATA, 12, memoryview(frame))

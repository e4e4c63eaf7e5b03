"""Mutants of valid frames against the decoders: decoded or refused with ProtocolError, in bounded memory.

The short form runs always, the long form in `make prove`. Both count decoded and refused mutants per version.
"""

from __future__ import annotations

import itertools
import resource
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from headrace.errors import ProtocolError
from headrace.wire import codec, fetch, produce
from headrace.wire.api import FETCH, KAFKA_APIS, METADATA, PRODUCE
from headrace.wire.decoder import compile_decoder
from headrace.wire.message import Message
from headrace.wire.schema import Direction
from proving import proves
from wire import fast_paths
from wire.mutate import Mutator
from wire.samples import valid_bodies, valid_request_frames

SHORT_REQUESTS = 28_200
SHORT_RESPONSES = 6_000
LONG_REQUESTS = 200_000
LONG_RESPONSES = 50_000
MAX_FRAME_BYTES = 1 << 20
SPARE_ADDRESS_SPACE_BYTES = 64 << 20
PLANTED_MUTANTS = 600
PLANTED_ROUNDS = 10
"""One of 30 rounds has no mutant of the one byte that matters."""

# What decoding may allocate: the objects of a body of one-byte elements, and the text of an error.
PEAK_BYTES = 64 << 10
PEAK_BYTES_PER_FRAME_BYTE = 300

Decode = Callable[[bytes], tuple[int, int]]
"""Decodes a mutant or raises; answers its (API, version)."""


class NotServed(Exception):
    """A mutant whose header names an API or version that is not served."""


@dataclass(slots=True)
class Findings:
    decoded: Counter[tuple[int, int]] = field(default_factory=Counter)
    refused: Counter[tuple[int, int]] = field(default_factory=Counter)
    not_served: int = 0
    failures: list[str] = field(default_factory=list)
    peak_bytes: int = 0

    def total(self) -> str:
        decoded, refused = self.decoded.total(), self.refused.total()
        return (
            f"{decoded + refused + self.not_served}: {decoded} decoded, {refused} refused, {self.not_served} not served"
        )

    def table(self) -> str:
        """Decoded/refused of each version, one API after the other."""
        rows = []
        for api in KAFKA_APIS.values():
            versions = range(api.min_version, api.max_version + 1)
            counts = (f"v{v} {self.decoded[api.key, v]}/{self.refused[api.key, v]}" for v in versions)
            rows.append(f"{api.name} {' '.join(counts)}")
        return "decoded/refused: " + "; ".join(rows)


@contextmanager
def bounded_memory() -> Iterator[None]:
    """An allocation without bound fails at once instead of taking the machine's memory; tracemalloc is on."""
    with open("/proc/self/statm") as statm:
        in_use = int(statm.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (in_use + SPARE_ADDRESS_SPACE_BYTES, before[1]))
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()
        resource.setrlimit(resource.RLIMIT_AS, before)


def fuzz(mutants: Iterator[tuple[tuple[int, int], bytes]], decode: Decode) -> Findings:
    """Decode every mutant; a refusal is counted for the (API, version) that the mutant was made from."""
    findings = Findings()
    with bounded_memory():
        for origin, mutant in mutants:
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            try:
                findings.decoded[decode(mutant)] += 1
            except ProtocolError:
                findings.refused[origin] += 1
            except NotServed:
                findings.not_served += 1
            except Exception as error:  # noqa: BLE001 - anything else is what the fuzzer is looking for
                findings.failures.append(f"{origin} {type(error).__name__} {error}: {mutant[:200].hex()}")
            peak = tracemalloc.get_traced_memory()[1] - before
            findings.peak_bytes = max(findings.peak_bytes, peak)
            if peak > PEAK_BYTES + PEAK_BYTES_PER_FRAME_BYTE * len(mutant):
                findings.failures.append(f"{origin} took {peak} bytes: {mutant[:200].hex()}")
    return findings


def decode_frame(frame: bytes) -> tuple[int, int]:
    """The way of a request through the wire layer; the fast paths must judge as the compiled codec does."""
    view = memoryview(frame)
    length = int.from_bytes(view[:4], "big", signed=True) if len(view) >= 4 else -1
    if not 0 <= length <= min(len(view) - 4, MAX_FRAME_BYTES):
        raise ProtocolError("an incomplete frame")
    content = view[4 : 4 + length]
    head = codec.read_request_header(content)
    api = KAFKA_APIS.get(head.api_key)
    if api is None or not api.serves(head.version):
        raise NotServed
    if api.key == PRODUCE:
        compare_with_fast_path(api.key, head.version, content, head.body, produce.decode, fast_paths.produce_of)
    elif api.key == FETCH:
        compare_with_fast_path(api.key, head.version, content, head.body, fetch.decode, fast_paths.fetch_of)
    else:
        codec.decode_request(api.key, head.version, content, head.body)
    return api.key, head.version


def compare_with_fast_path(
    api_key: int,
    version: int,
    content: memoryview,
    pos: int,
    fast: Callable[[int, memoryview, int, int], object],
    expected: Callable[[Message, int], object],
) -> None:
    """Both must refuse with the same words, or both decode the same; raises what they refuse with."""
    judged = outcome(lambda: expected(codec.decode_request(api_key, version, content, pos), version))
    assert outcome(lambda: fast(version, content, pos, len(content))) == judged
    if isinstance(judged, Refusal):
        raise ProtocolError(judged.reason)


@dataclass(frozen=True, slots=True)
class Refusal:
    reason: str


def outcome(decode: Callable[[], object]) -> object:
    try:
        return decode()
    except ProtocolError as refusal:
        return Refusal(str(refusal))


def request_mutants(count: int, seed: int) -> Iterator[tuple[tuple[int, int], bytes]]:
    valid = list(valid_request_frames(seed, per_version=3))
    for frame in valid:
        assert decode_frame(frame.data) == (frame.api_key, frame.version)
    mutator = Mutator(seed, [frame.data for frame in valid])
    for frame in itertools.islice(itertools.cycle(valid), count):
        yield (frame.api_key, frame.version), mutator.frame(frame.data)


def fuzz_requests(count: int, seed: int) -> Findings:
    mutants = request_mutants(count, seed)
    first = next(mutants)
    return fuzz(itertools.chain((first,), mutants), decode_frame)


def fuzz_responses(count: int, seed: int) -> Findings:
    valid = list(valid_bodies("response", seed, per_version=3))
    mutator = Mutator(seed, [body.data for body in valid])
    for body in valid:
        codec.decode_response(body.api_key, body.version, memoryview(body.data))
    findings = Findings()
    for (key, version), group in itertools.groupby(valid, lambda body: (body.api_key, body.version)):
        bodies = list(group)
        share = count * len(bodies) // len(valid)
        mutants = (((key, version), mutator.body(bodies[nth % len(bodies)].data)) for nth in range(share))
        part = fuzz(mutants, decoder_of(key, version, "response"))
        findings.decoded += part.decoded
        findings.refused += part.refused
        findings.failures += part.failures
        findings.peak_bytes = max(findings.peak_bytes, part.peak_bytes)
    return findings


def decoder_of(api_key: int, version: int, direction: Direction, checked: bool = True) -> Decode:
    decode = compile_decoder(api_key, version, direction, checked)

    def run(body: bytes) -> tuple[int, int]:
        decode(memoryview(body), 0)
        return api_key, version

    return run


def every_version() -> set[tuple[int, int]]:
    return {
        (api.key, version) for api in KAFKA_APIS.values() for version in range(api.min_version, api.max_version + 1)
    }


@proves("G4")
@pytest.mark.thorough
def test_mutants_are_decoded_or_refused_and_nothing_else(seed: int) -> None:
    requests = fuzz_requests(SHORT_REQUESTS, seed)
    responses = fuzz_responses(SHORT_RESPONSES, seed)
    assert requests.failures + responses.failures == []
    assert requests.refused.keys() == every_version()
    assert responses.refused.keys() == every_version()


@proves("G4")
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_many_mutants_are_decoded_or_refused_and_nothing_else(seed: int, proof_report: Callable[..., None]) -> None:
    for direction, findings in (
        ("requests", fuzz_requests(LONG_REQUESTS, seed)),
        ("responses", fuzz_responses(LONG_RESPONSES, seed)),
    ):
        figures = {f"mutants of {direction}": findings.total(), f"{direction} by version": findings.table()}
        proof_report(**figures, **{f"peak bytes of one mutant of {direction}": findings.peak_bytes})
        assert findings.failures == []
        assert findings.refused.keys() == every_version()
        assert findings.decoded.keys() == every_version()


@pytest.mark.parametrize(("api_key", "version"), [(METADATA, 12), (METADATA, 4)])
@pytest.mark.thorough
def test_a_planted_unchecked_length_is_found(api_key: int, version: int, seed: int) -> None:
    bodies = [b.data for b in valid_bodies("request", seed) if (b.api_key, b.version) == (api_key, version)]

    def failures(checked: bool) -> Iterator[list[str]]:
        mutator, decode = Mutator(seed, bodies), decoder_of(api_key, version, "request", checked)
        for _ in range(PLANTED_ROUNDS):
            mutants = (((api_key, version), mutator.body(bodies[nth % len(bodies)])) for nth in range(PLANTED_MUTANTS))
            yield fuzz(mutants, decode).failures

    assert next(failures(checked=True)) == []
    planted = next(filter(None, failures(checked=False)), [])
    assert planted
    assert all("MemoryError" in failure or "took" in failure for failure in planted)


def test_the_same_seed_gives_the_same_mutants(seed: int) -> None:
    valid = [frame.data for frame in valid_request_frames(seed, per_version=1)]
    first, second = ([m.frame(data) for data in valid] for m in (Mutator(seed, valid), Mutator(seed, valid)))
    assert first == second
    assert first != valid
    assert [frame.data for frame in valid_request_frames(seed, per_version=1)] == valid

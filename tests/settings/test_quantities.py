"""Durations and sizes as people write them: what is taken, what is refused, and how numbers are said."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import InvalidConfig, SettingError
from headrace.settings.quantities import friendly, parse_duration_ms, parse_quantity, parse_size
from headrace.settings.values import BROKER_BY_NAME, TOPIC_BY_NAME, check_topic_overrides, load, plain_texts
from proving import proves


@proves("U7")
@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("7d", 604_800_000),
        ("1h30m", 5_400_000),
        ("500ms", 500),
        ("1m", 60_000),
        ("1.5h", 5_400_000),
        ("2w", 1_209_600_000),
        ("7 days", 604_800_000),
        ("5min", 300_000),
        ("1d 12h", 129_600_000),
        ("250", 250),
    ],
)
def test_durations_are_taken_as_people_write_them(text: str, ms: int) -> None:
    assert parse_duration_ms(text) == ms


@pytest.mark.parametrize("text", ["", "d", "-5s", "30m1h", "1h2h", "1M", "0.5ms", "1e3s", "7 months", "1h30", "٣d"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(text))):
        parse_duration_ms(text)


@proves("U7")
@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1GiB", 1 << 30),
        ("64MB", 64_000_000),
        ("64 MiB", 64 << 20),
        ("512k", 512 << 10),
        ("512K", 512 << 10),
        ("1.5g", 3 << 29),
        ("10kB", 10_000),
        ("2T", 2 << 40),
        ("12B", 12),
        ("4096", 4096),
    ],
)
def test_sizes_are_taken_as_people_write_them(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "k", "64mb", "1gb", "-1k", "0.3k", "1GiB512MiB", "1Gb", "1kib", "5s"])
def test_what_is_no_size_or_is_read_in_two_ways_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(text))):
        parse_size(text)


@given(st.integers(0, 2**63 - 1), st.sampled_from(["ms", "bytes"]))
def test_what_is_said_beside_a_number_is_that_number(value: int, unit: str) -> None:
    said = friendly(value, unit)
    assert not said or parse_quantity(said, unit) == value


def test_numbers_are_said_shortly_or_not_at_all() -> None:
    assert [friendly(value, "ms") for value in (604_800_000, 5_400_000, 300_000, 500, 90_061_001)] == [
        *("7d", "1h30m", "5m"),
        *("", ""),
    ]
    assert [friendly(value, "bytes") for value in (1 << 30, 64_000_000, 1536, 1_048_588, 100)] == [
        *("1GiB", "64MB", "1.5KiB"),
        *("", ""),
    ]
    assert friendly(100_000, "partitions") == ""


@proves("U7")
def test_settings_of_ms_and_bytes_take_them_from_file_environment_and_flag(tmp_path: Path) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text('"broker.lease.ms" = "3s"\n[log]\nretention.ms = "7d"\nsegment.bytes = 4096\n')
    found = load(str(file), {"HEADRACE_FRAME_MAX_BYTES": "64MiB"}, {"checkpoint.ms": "1m30s"})
    names = ("broker.lease.ms", "log.retention.ms", "log.segment.bytes", "frame.max.bytes", "checkpoint.ms")
    assert [found.values[name] for name in names] == [3000, 604_800_000, 4096, 64 << 20, 90_000]


@proves("U7")
def test_a_refusal_says_which_forms_are_taken() -> None:
    with pytest.raises(SettingError, match=r"retention\.ms: '7x' is not a whole number of ms, nor such as 7d, 1h30m"):
        load(None, {}, {"log.retention.ms": "7x"})
    with pytest.raises(InvalidConfig, match=r"segment\.bytes: '64mb' is not .* nor such as 1GiB .*64MB \(64,000,000\)"):
        check_topic_overrides({"segment.bytes": "64mb"})
    with pytest.raises(SettingError, match="below the least allowed"):
        load(None, {}, {"broker.lease.ms": "1ms"})
    with pytest.raises(SettingError, match="above the most allowed"):
        load(None, {}, {"log.retention.ms": "99999999999999w"})
    with pytest.raises(SettingError, match=r"'7d' is not a whole number of partitions$"):
        load(None, {}, {"num.partitions": "7d"})


def test_what_is_stored_is_a_plain_number_for_every_client() -> None:
    given = {
        "retention.ms": "7d",
        "segment.bytes": "1_000_000",
        "cleanup.policy": "compact, delete",
        "of.tomorrow": "1h",
    }
    assert plain_texts(given, TOPIC_BY_NAME) == {**given, "retention.ms": "604800000", "segment.bytes": "1000000"}


def test_every_setting_of_ms_or_bytes_can_be_written_so() -> None:
    quantities = [setting for setting in BROKER_BY_NAME.values() if setting.unit in ("ms", "bytes")]
    assert {setting.kind for setting in quantities} == {"int"}

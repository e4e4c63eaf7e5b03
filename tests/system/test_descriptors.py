from __future__ import annotations

import pytest

from headrace.system.descriptors import A_SEGMENT, OTHERS, SEGMENTS_MAX, shared_out


@pytest.mark.parametrize("limit", [128, 300, 1024, 4096, 20_000, 1 << 20])
def test_clients_and_storage_together_never_need_more_than_there_is(limit: int) -> None:
    shares = shared_out(limit)
    used = shares.kafka_connections + shares.http_connections + shares.segments * A_SEGMENT
    assert used + shares.sync_files < limit - OTHERS
    assert min(shares.kafka_connections, shares.http_connections, shares.segments, shares.sync_files) > 0


def test_a_usual_limit_costs_neither_of_them_anything() -> None:
    shares = shared_out(20_000)
    assert shares.kafka_connections >= 10_000
    assert shares.segments == SEGMENTS_MAX

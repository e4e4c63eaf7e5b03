"""The tool that says what tests need: `make test ARGS=...` installs that, and `make quick` takes what needs nothing."""

from __future__ import annotations

import needs
import pytest
from side_by_side import quick_tests

EVERYTHING = " ".join(needs.NEEDS)
NEEDED = {
    "tests/wire tests/groups -k fetch": "",
    "tests/test_needs.py": "",
    "tests/client/test_group_progress.py::test_the_clock_does_not_undo_a_commit": "",
    "tests/clients/test_matrix.py": "kcat node",
    "tests/clients/test_errors.py": "node",
    "tests/client/test_group_failover.py": "etcd ip",
    "tests/cli/test_cli_placement.py": "etcd",
    "tests/client/test_connection_writes.py": "strace",
    "tests/spark": "spark java etcd ip",
    "tests/clients/test_matrix.py tests/spark": "spark java etcd ip kcat node",
    "-k without_a_file": EVERYTHING,
    "": EVERYTHING,
}
"""By arguments of pytest."""


@pytest.mark.parametrize("arguments", NEEDED)
def test_what_tests_need_is_read_from_them(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert needs.main(arguments.split()) == 0
    assert capsys.readouterr().out.split() == NEEDED[arguments].split()


def test_most_of_what_is_to_be_quick_needs_nothing() -> None:
    """Else `make quick` has become empty without a word."""
    for part, paths in quick_tests().items():
        chosen = needs.tests_of(paths)
        assert sum(not needs.needs_of(test) for test in chosen) > 0.8 * len(chosen), part

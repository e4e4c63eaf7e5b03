"""The asynchronous clients are what tools/unasync.py makes of those for threads."""

from __future__ import annotations

import pytest
import unasync


@pytest.mark.parametrize("module", unasync.MODULES, ids=lambda module: module.target)
def test_the_asynchronous_module_is_made_of_the_one_for_threads(module: unasync.Module) -> None:
    assert (unasync.SOURCE / module.target).read_text() == unasync.made(module), "run `make unasync`"

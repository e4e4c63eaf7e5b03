"""Checks outside of the test files explain themselves too when they fail."""

import pytest

pytest.register_assert_rewrite("old_data.kept")

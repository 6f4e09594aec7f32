"""What is said when an optional library is not installed."""

from __future__ import annotations

import pytest

from aiokvoffload.errors import ConfigurationError
from aiokvoffload.extras import import_extra


def test_a_missing_library_is_named_with_who_needs_it_and_the_command_that_installs_it() -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"a valkey:// tier needs .*'no_such_client'.*run: pip install 'aiokvoffload\[valkey\]'",
    ):
        import_extra("no_such_client", extra="valkey", needed_by="a valkey:// tier")
    assert import_extra("json", extra="json", needed_by="a test").dumps([]) == "[]"

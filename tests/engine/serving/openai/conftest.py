"""One application before one scripted engine, for a file's tests."""

from __future__ import annotations

import pytest

from support.scripted_api import serve


@pytest.fixture(scope="module")
def shared():
    """(the engine, the application before it, which refuses fields that it does not know)"""
    return serve(strict_fields=True)

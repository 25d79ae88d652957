"""A secret of a test's own, and callers who know it."""

from __future__ import annotations

import pytest

from engine.distributed import handshake


@pytest.fixture
def secret(monkeypatch):
    monkeypatch.setenv("VLLM_ENGINE_SECRET", "for these tests alone")
    return handshake.secret()


def greeted(address, key):
    """A caller who knows the secret."""
    return handshake.dial(address, key, 20)

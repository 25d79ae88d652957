"""Requests for tests that look at who they are given to, not at what comes of them."""

from __future__ import annotations

from engine.request import Request, SamplingParams


def request_of(tokens, name="r", **about):
    return Request(name, list(tokens), SamplingParams(max_tokens=1), **about)

"""Several answers in one stream."""

from __future__ import annotations

from support.scripted_api import Letters, M, ask, read_events, serve, text_of


def test_n_answers_share_a_stream_and_silence_sends_nothing():
    pieces = [(1, "b", False, False), (0, "", False, False), (0, "a", True, False), (1, "", False, False),
              (1, "c", False, False), (1, "", True, True)]  # fmt: skip
    _, app = serve(Letters(pieces))
    events = read_events(ask(app, "/v1/chat/completions", M | {"n": 2, "stream": True}).text)
    assert (text_of(events, 0), text_of(events, 1)) == ("a", "bc")
    sent = [(c["index"], c["delta"].get("content")) for e in events[:-1] for c in e["choices"]]
    assert sent == [(1, ""), (1, "b"), (0, ""), (0, "a"), (1, "c"), (1, "")], (
        "a role first, then only what says something"
    )
    assert events[-2]["choices"][0]["finish_reason"] == "stop", "the end is something to say"

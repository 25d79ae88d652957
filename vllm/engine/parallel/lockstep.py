"""What engines that share experts agree on in every step: whether there is another one.

Owns one engine's view of that; asked by its loop, told by its workers. It never waits, and knows no request.
vLLM: `ParallelConfig.has_unfinished_dp` in `vllm/config/parallel.py`, and the waves of `DPEngineCoreProc`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence


class Lockstep:
    """Every rank of every engine tells all others its engine's `state` at the beginning of a step.

    An engine that has nothing to do still steps while another has, as its experts are needed. None may stop too early,
    or the others would wait for it for ever; nor begin alone. So the front end tells *all* engines of each request, one
    of them by the request itself, and engines count what they were told. They stop when nobody has a request inside and
    all have counted the same: then no news is on its way to anybody. (vLLM numbers waves instead: a coordinator starts
    one, and an engine that hears of an old one ignores it.)
    """

    def __init__(self) -> None:
        self.heard = 0  # requests that this engine was told of
        self.running = False  # is there another step?
        self.inside: Callable[[], bool] = lambda: False  # has this engine a request?

    @property
    def state(self) -> tuple[int, int]:
        """What this engine tells the others."""
        return int(self.inside()), self.heard

    def told(self, requests: int) -> None:
        """The front end has told us of requests: our own or others'."""
        self.heard += requests
        self.running = self.running or requests > 0

    def agree(self, states: Iterable[Sequence[int]]) -> None:
        """All states of the step that was taken are here; all engines have the same, and so decide the same."""
        unfinished, heard = zip(*states)
        self.running = any(unfinished) or len(set(heard)) > 1

"""What the scheduler counts.

Owns numbers; written by the scheduler, read by metrics and stories. It never decides.
vLLM: `vllm/v1/spec_decode/metrics.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class SpecDecodingStats:
    """Counted where drafts were verified."""

    num_drafts: int = 0  # times that a request had any
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)

    def observe(self, num_draft_tokens: int, num_accepted: int) -> None:
        """One request in one step: so many drafted, the first `num_accepted` of them accepted."""
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted
        per_pos = self.num_accepted_tokens_per_pos
        per_pos += [0] * (num_draft_tokens - len(per_pos))
        for j in range(num_accepted):
            per_pos[j] += 1

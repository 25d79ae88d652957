"""How long people's prompts and answers are, and lengths drawn like them.

Owns published means; called by the lessons' numbers. It never reads a trace, which `workload_files.py` does.
vLLM: `vllm/benchmarks/datasets.py`.
"""

from __future__ import annotations

import math
import random

# Mean prompt and output tokens. Alpaca and ShareGPT as in Kwon et al. 2023, §6.1; Azure: the conversation trace of
# November 2023 in AzurePublicDataset.
WORKLOADS = {"Alpaca": (19.31, 58.45), "ShareGPT": (161.31, 337.99), "Azure conversation": (1154.7, 211.0)}


def geometric(rng: random.Random, mean: float) -> int:
    """A length from {1, 2, …} with this mean: after every token, the text ends with probability 1/mean.

    One parameter, so a published mean is enough to draw from it. By inversion: ⌊ln(1 − u) / ln(1 − 1/mean)⌋ + 1.
    """
    return 1 + int(math.log1p(-rng.random()) / math.log1p(-1 / mean))

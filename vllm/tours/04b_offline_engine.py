"""04b · The offline engine: from logits to text.

The question: lesson 04 decides which requests run, and gets back one row of logits for each. What happens between that
row and the words a caller reads, if 32 callers in one batch want 32 different things?

The mechanism:
  1. Adjust: forbid stopping too early (min_tokens), add logit_bias, apply penalties. This can change even the argmax.
  2. Shape: temperature, then min_p, top_k, top_p. Each row its own values, all rows in the same few tensor operations.
  3. Draw: one uniform number per row, a hash of the request's seed and of how many tokens it has written. So the rest
     of the batch, the step, or a preemption cannot change this number.
  4. Text: token -> bytes -> an incremental UTF-8 decoder. Half a character is never shown, and a token costs O(1).
  5. Stop strings are found in text, because they may begin in one token and end in the next; what could still become
     one is held back from a stream.
  6. `n` samples are n requests with seeds seed, seed+1, …; they meet again only in the answer.
  7. A prompt is scored where it is computed: row i of a chunk holds what the model expects as token i + 1.
  8. `LLMEngine` validates, queues, steps and answers; `LLM.generate` and `LLM.chat` are loops around it.

Numbers to remember: a seeded request needs 2 integers of state (seed, count). An emoji may be 4 tokens, of which 3 show
nothing. With a stop string of s characters a stream always stays s − 1 characters behind.

How to run:
  uv run python -m vllm.tours.04b_offline_engine                    the whole story
  uv run python -m vllm.tours.04b_offline_engine --temperature 1.5  what the model says at a high temperature
  uv run python -m vllm.tours.04b_offline_engine --decode-tokens    break it: decode token by token, and the check fails
  uv run python -m vllm.tours.04b_offline_engine --bench            a minute: what each kind of sampling costs a step

Read for this: vLLM 0.32 `v1/sample/sampler.py`, `v1/sample/ops/topk_topp_sampler.py`, `v1/engine/detokenizer.py`,
`v1/engine/parallel_sampling.py`, `outputs.py`; Holtzman et al. 2020 (top-p), Nguyen et al. 2024 (min-p), Keskar et al.
2019 (repetition penalty), Steele et al. 2014 (SplitMix), Salmon et al. 2011 (counter-based random numbers).
"""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used

import argparse
import functools
import random
from collections.abc import Sequence

import numpy as np
import torch

from engine import arguments
from engine.front_end import RequestOutput
from engine.llm import LLM
from engine.model import llama, loader
from engine.model.tokenizer import Tokenizer
from engine.request import Request, SamplingParams
from engine.sampling.detokenizer import IncrementalDetokenizer, TokenBytes
from engine.sampling.sampler import GREEDY, Sampler, SamplingState, adjust_logits, distribution, draw_tokens
from lab import cli, naive
from lab.naive_sampler import reference_distribution

KEY = "04b_offline_engine"

# Adjusting, shaping and drawing for a batch are in engine/sampling/sampler.py, token ids to text in its detokenizer.py;
# what a caller sees is in engine/front_end.py and engine/llm.py.


# --- What we want, without cleverness ---------------------------------------------------------------------------------
#
# One row's distribution in plain Python is in lab/naive_sampler.py; scores of a text need no cache:


def reference_scores(model: llama.Llama, token_ids: Sequence[int]) -> torch.Tensor:
    """log p(xᵢ | x₀…xᵢ₋₁) for every token but the first, in one pass and without a cache. fp32 [tokens − 1]."""
    ids = torch.tensor(token_ids, device=model.device)
    hidden = model.forward(ids, torch.arange(len(ids), device=model.device), naive.recompute)
    return model.logits(hidden[:-1]).float().log_softmax(1).gather(1, ids[1:, None])[:, 0]


# --- A batch in which everybody wants something else ------------------------------------------------------------------


def random_case(rng: random.Random, vocab: int) -> tuple[SamplingParams, list[int], list[int]]:
    """Random parameters, prompt and output over a small vocabulary."""
    params = SamplingParams(
        temperature=rng.choice([0, 0.3, 0.7, 1, 2]),
        top_k=rng.choice([0, 1, 3, vocab]),
        top_p=rng.choice([0.1, 0.6, 0.95, 1]),
        min_p=rng.choice([0, 0.05, 0.5]),
        repetition_penalty=rng.choice([0.8, 1, 1.7]),
        presence_penalty=rng.choice([0, 1.5, -1]),
        frequency_penalty=rng.choice([0, 0.7, -0.5]),
        logit_bias=rng.choice([None, {0: 4.0, 3: -100.0}]),
        min_tokens=rng.choice([0, 6]),
        allowed_token_ids=rng.choice([None, None, [0, 5, 9, 2], [5]]),
        _bad_words_token_ids=rng.choice([None, [[9], [5, 2], [2, 5, 0, 7]]]),
    )
    return params, rng.choices(range(vocab), k=5), rng.choices(range(vocab), k=rng.choice([0, 4]))


def batch_distributions(cases: Sequence[tuple], logits: torch.Tensor, eos: int) -> torch.Tensor:
    """What `Sampler` would draw from, for all cases in one batch. [R, V]; greedy rows have one 1."""
    states = []
    for i, (params, prompt, output) in enumerate(cases):
        request = Request(str(i), prompt, params)
        for token in output:
            request.append_output_token_id(token)
        states.append(SamplingState(request, seed=i, eos_token_ids=[eos]))
    adjusted = adjust_logits(logits.clone(), states)
    probs = torch.nn.functional.one_hot(adjusted.argmax(1), logits.shape[1]).to(logits.dtype)
    drawn = [row for row, state in enumerate(states) if not state.greedy]
    probs[drawn] = Sampler.probabilities(adjusted[drawn], [states[row] for row in drawn])
    return probs


# --- Eight words ------------------------------------------------------------------------------------------------------

LOGITS = [3.0, 2.5, 2.0, 1.5, 0.5, -0.5, -2.0, -3.0]  # of a vocabulary that fits on a screen
POINTS = 20_000


def shaped(temperature: float, min_p: float = 0.0, top_p: float = 1.0) -> list[float]:
    """What is drawn from: the probabilities of the eight words, 0 for those that are cut. The temperature is first."""
    row = functools.partial(torch.tensor, dtype=torch.float64)
    top_k = torch.tensor([len(LOGITS)])
    return distribution(row([LOGITS]), row([temperature]), row([min_p]), top_k, row([top_p]))[0].tolist()


def swept(probs: torch.Tensor, points: int) -> torch.Tensor:
    """The share of `points` equally spaced u that lead to each token: what `draw_tokens` really does. [V] -> [V]."""
    u = (np.arange(points) + 0.5) / points
    tokens = draw_tokens(probs.expand(points, -1), u)
    return torch.bincount(tokens, minlength=len(probs)).double() / points


def worst_share() -> float:
    """How far the share of `POINTS` numbers u that lead to one of the eight words is from its probability, at most."""
    probs = torch.tensor(LOGITS, dtype=torch.float64).softmax(0)
    return (swept(probs, POINTS) - probs).abs().max().item()


# --- The story --------------------------------------------------------------------------------------------------------

TEXT = "Zoë paid 5 € for 寿司; 👩‍🚀 said: “bon”"
PROMPTS = ["Hello, my name is", "The president of the United States is", "The capital of France is", "2, 4, 6, 8,"]
ENDINGS = (" Paris.", " Rome.", " Tuesday.")  # of the third


def check_sampler(seed: int) -> None:
    """256 random requests in one batch against the reference, and draws against probabilities. Raises CheckFailed."""
    rng, vocab, eos = random.Random(seed), 32, 5
    cases = [random_case(rng, vocab) for _ in range(256)]
    logits = 3 * torch.randn(len(cases), vocab, generator=torch.Generator().manual_seed(seed))
    reference = [reference_distribution(row.tolist(), *case, [eos]) for row, case in zip(logits, cases)]
    got = batch_distributions(cases, logits, eos)
    common.check("distributions of 256 random requests in one batch", got, torch.tensor(reference))
    worst = worst_share()
    if worst > 1 / POINTS:
        raise common.CheckFailed(f"draws: a probability is off by {worst:.1e}")
    common.say(f"✓ {POINTS:,} equally spaced u give every token its probability to {worst:.0e}")


def show_text(tokenizer: Tokenizer, decode_tokens: bool) -> None:
    """What each token adds to what a reader sees; with `decode_tokens`, each turned into text alone."""
    ids = tokenizer.encode(TEXT)
    if decode_tokens:
        pieces = [tokenizer.decode([token]) for token in ids]
    else:
        detokenizer = IncrementalDetokenizer(TokenBytes(tokenizer), SamplingParams())
        pieces = []
        for token in ids:
            detokenizer.append(token)
            pieces.append(detokenizer.get_next_output_text(finished=False))
    common.say(f"{len(TEXT)} characters, {len(ids)} tokens; what each token adds to what a reader sees:")
    common.say("|".join(pieces))
    # Not TEXT: a tokenizer may lack some of its characters. Llama 2's puts a space before every first word.
    text, whole = "".join(pieces).removeprefix(" "), tokenizer.decode(ids).removeprefix(" ")
    common.check_equal("the pieces make up the text", text, whole)


def show_engine(args: argparse.Namespace, llm: LLM, tokenizer: Tokenizer) -> None:
    """Four prompts that want four things, together and alone; a chat; and nothing is left behind."""
    drawn = functools.partial(SamplingParams, temperature=args.temperature, top_p=args.top_p, max_tokens=12)
    greedy = functools.partial(SamplingParams, temperature=0, max_tokens=12)
    n = 1 if args.temperature < GREEDY else 2  # greedy ones would be the same
    params = [
        drawn(seed=args.seed),
        drawn(seed=args.seed + 1, n=n),
        greedy(stop=[". "]),
        greedy(repetition_penalty=1.2, logprobs=2),
    ]
    together = llm.generate(PROMPTS, params)
    for output in together:
        for answer in output.outputs:
            common.say(f"{output.prompt} …{answer.text!r} ({answer.finish_reason})")
    alone = [llm.generate(prompt, one)[0] for prompt, one in zip(PROMPTS, params)]
    what = "each prompt alone gets the same tokens, sampled ones included"
    common.check_equal(what, tokens_of(together), tokens_of(alone))
    if tokenizer.chat_template:
        ask = [{"role": "user", "content": "What is 2+2?"}]
        (answer,) = llm.chat(ask, SamplingParams(temperature=0, max_tokens=16))[0].outputs
        common.say(f"chat: {answer.text!r} ({answer.finish_reason})")
    else:
        common.skipped("chat", "this model has no chat template")
    pool = llm.llm_engine.core.scheduler.kv_cache_manager.block_pool
    common.check_equal("all KV blocks are free again", pool.num_free_blocks, pool.num_blocks - 1)


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[list[int]]]:
    """Token ids by prompt and by sample."""
    return [[answer.token_ids for answer in output.outputs] for output in outputs]


def show_scores(llm: LLM, model: llama.Llama, tokenizer: Tokenizer) -> None:
    """Three endings of one sentence by their log probabilities, compared with those of a pass without a cache."""
    prompt = PROMPTS[2]
    params = SamplingParams(max_tokens=1, prompt_logprobs=1)
    outputs = llm.generate([prompt + ending for ending in ENDINGS], params)
    scores, first = [], len(tokenizer.encode(prompt))
    for output in outputs:
        assert output.prompt_logprobs
        entries = zip(output.prompt_token_ids, output.prompt_logprobs)
        chosen = [entry[t] for t, entry in entries if entry]  # of the first token nothing is known
        scores += [x.logprob for x in chosen]
        ending = chosen[first - 1 :]
        said = "  ".join(f"{x.decoded_token!r} {x.logprob:.2f} (rank {x.rank})" for x in ending)
        common.say(f"{said}: together {sum(x.logprob for x in ending):.2f}")
    reference = torch.cat([reference_scores(model, output.prompt_token_ids) for output in outputs])
    common.check("log probabilities of all prompt tokens", torch.tensor(scores), reference.cpu())


def show_temperature() -> None:
    """The surprise: a hotter row keeps more words under either cut, and a word of the tail becomes likely."""
    rows = []
    for temperature in (0.5, 1, 2):
        left = [sum(p > 0 for p in shaped(temperature, **cut)) for cut in ({"top_p": 0.75}, {"min_p": 0.2})]
        rows.append([temperature, *left, f"{shaped(temperature)[-2]:.5f}"])
    common.table(["temperature", "words left by top_p 0.75", "by min_p 0.2", "the seventh word, uncut"], rows)


def build_parser() -> arguments.Parser:
    p = cli.parser(__doc__)
    shown = "of step 3 (default %(default)s)"
    p.add_argument("--temperature", type=arguments.number(float, 0, 2), default=0.8, help=shown)
    p.add_argument("--top-p", type=arguments.number(float, 0.01, 1), default=0.95, help=shown)
    p.add_argument("--decode-tokens", action="store_true", help="the bug: turn every token into text on its own")
    return p


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    cli.start(args)
    loader.check_context(args.model, 512)

    common.heading("1. One batch, every row its own parameters, against the row-by-row reference")
    check_sampler(args.seed)
    common.heading("2. From tokens to text")
    model, tokenizer = loader.load(args.model)
    show_text(tokenizer, args.decode_tokens)
    common.heading("3. The offline engine: what vLLM's documentation calls LLM")
    llm = LLM(model, tokenizer=tokenizer, max_model_len=512, max_num_seqs=16, kv_cache_gib=0.4)
    show_engine(args, llm, tokenizer)
    common.heading("4. How probable is what is there already? Three endings of one sentence")
    show_scores(llm, model, tokenizer)
    common.heading("5. Eight words: how many does a cut leave, if the temperature comes first?")
    show_temperature()
    cli.hand_over(KEY, args)


if __name__ == "__main__":
    cli.run(main)

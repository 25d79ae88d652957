"""05 · Optimizations: what does each one save, and where does it stop saving?

The question: memory is paged (02), attention is tiled (03), the batch is always full (04). What is left to gain is a
list of smaller things, each a few lines on top of that engine. Which of them matter on your workload?

The mechanism, one entry each:
  prefix caching    a full block is never written again: key it by a hash of all tokens up to its end, and share it
  CUDA graphs       record the kernels of a decode step once, replay them with one launch
  torch.compile     let a compiler merge neighbouring operations into one kernel
  async scheduling  plan the next step while the model runs this one, with placeholders for tokens not yet known
  prompt lookup     guess the next tokens from the prompt, check all of them in one pass over the weights
Four more have tours of their own: quantized weights (05b), tensor parallelism (05c), a quantized KV cache (05d), and
experts (05e).
The engine has the first again in engine/core/kv_cache_manager.py and block_pool.py, where it meets everything else. The
second is engine/worker/cuda_graphs.py, and planning ahead is part of engine/core/scheduler.py: both are used here.

Numbers to remember: a hit skips 95 % of a prompt if 95 % of it was sent before, and not one token if a single
character in front differs. A decode step is hundreds of launches; as one graph it is one, and the step gets faster
only where launching was slower than computing. For one sequence that is at most 56x for SmolLM2 and 1.15x for an 8B, if
a launch takes 10 us and a kernel only the time of its bytes. An H200, at 22 us a launch in Python, measured 5x and 2x.

How to run:
  uv run python vllm/05_optimizations.py                       the whole story
  uv run python vllm/05_optimizations.py --hash-bits 8         break it: serve another user's text
  uv run python vllm/05_optimizations.py --host-ms 40          a server that plans for longer than its model runs
  uv run python vllm/05_optimizations.py --bench               minutes: everything measured

Read for this: vLLM 0.32 `v1/core/block_pool.py`, `v1/core/kv_cache_utils.py`, `v1/core/sched/async_scheduler.py`,
`v1/spec_decode/ngram_proposer.py`; Saxena 2023 (prompt lookup), vLLM's blog on 0.6.0.
"""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used

import array
import hashlib
import json
import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from engine import arguments, registry
from engine.attention.metadata import AttentionMetadata
from engine.config import SchedulerConfig
from engine.core.scheduler import make_scheduler
from engine.llm import LLM
from engine.model import llama, loader
from engine.model.packed_linear import pack_weights
from engine.model.tokenizer import Tokenizer
from engine.request import Request, SamplingParams
from engine.worker.cuda_graphs import CapturedModel, Tape
from engine.worker.model_runner import ModelRunner
from lab import chats, cli, offline_run, roofline
from lab.hardware import HARDWARE

KEY = "05_optimizations"
BLOCK = 16  # tokens in a block, vLLM's default

PagedKVCache = registry.fill("cache.paged")  # lesson 02's


# --- 1. Prefix caching: what we want, obviously right -----------------------------------------------------------------


def naive_hits(served: Sequence[tuple[list[int], list[int]]], block_size: int) -> list[int]:
    """What a cache should find, (prompt, answer) after (prompt, answer), if it forgot nothing and compared tokens."""
    seen: set[tuple[int, ...]] = set()
    hits = []
    for prompt, answer in served:
        tokens, blocks = prompt + answer[:-1], 0  # the last token of an answer is sampled, never computed
        while (blocks + 1) * block_size < len(prompt) and tuple(tokens[: (blocks + 1) * block_size]) in seen:
            blocks += 1
        hits.append(blocks * block_size)
        seen |= {tuple(tokens[:end]) for end in range(block_size, len(tokens) + 1, block_size)}
    return hits


# --- The mechanism: keys, an index, and a queue in the right order ----------------------------------------------------
#
# Attention is causal, so the keys and values in a full block depend on the tokens up to its end, and on nothing behind
# it. Whoever begins with the same tokens can read the same block. A tuple of all tokens would name it; a hash of 32
# bytes does, too, because it is chained:
#
#     key(block i) = sha256( key(block i − 1), the tokens of block i, what else must agree )
#
# A block whose last owner has left is free and still known: it is found until somebody takes it for other tokens. So
# there is no policy of eviction, only a queue. What is given back goes to its end, what is taken comes from its front,
# and a request's last block goes first: the queue is in least-recently-used order, without a clock.

ROOT_HASH = hashlib.sha256(b"the parent of every first block").digest()


def hash_block_tokens(parent_hash: bytes, token_ids: Sequence[int], extra_keys: tuple = ()) -> bytes:
    """The key of a full block, 32 bytes. It names a whole prefix: the parent's key stands for all that came before.

    The fields cannot run into each other: 32 bytes of parent, 8 bytes per token, then what remains is the extra keys.
    """
    tail = json.dumps(extra_keys).encode() if extra_keys else b""
    return hashlib.sha256(parent_hash + array.array("q", token_ids).tobytes() + tail).digest()


class PrefixCache:
    """The blocks of a KV cache: who owns them, which are free, and which prefix each of them holds.

    Block 0 is the null block, which pads block tables and is never handed out. With everything else switched off, the
    engine's manager and pool decide as this class does, block by block.
    """

    def __init__(self, num_blocks: int, block_size: int, hash_bits: int = 256) -> None:
        self.block_size, self.hash_bytes = block_size, hash_bits // 8  # fewer than 32 bytes are a bug: `--hash-bits`
        self.tables: dict[str, list[int]] = {}  # entry i holds the request's tokens [i·block_size, (i+1)·block_size)
        self.ref_count = [0] * num_blocks  # in how many tables a block stands
        self.free_queue = OrderedDict.fromkeys(range(1, num_blocks))  # a queue that can be left from its middle
        self.block_hash: list[bytes | None] = [None] * num_blocks
        self.index: dict[bytes, list[int]] = {}  # key -> blocks. Two requests may compute the same; oldest first

    def update_block_hashes(self, request: Request) -> list[bytes]:
        """The keys of all its full blocks so far. A salt in the first one is in all of them, through the chain."""
        hashes, size = request.block_hashes, self.block_size
        for end in range((len(hashes) + 1) * size, request.num_tokens + 1, size):
            extra_keys = (("cache_salt", request.cache_salt),) if request.cache_salt and not hashes else ()
            parent = hashes[-1] if hashes else ROOT_HASH
            key = hash_block_tokens(parent, request.all_token_ids[end - size : end], extra_keys)
            hashes.append(key[: self.hash_bytes])
        return hashes

    def get_computed_blocks(self, request: Request) -> list[int]:
        """The blocks of the longest known prefix. One token is always left to compute: without it, no logits."""
        hits = []
        for key in self.update_block_hashes(request)[: (request.num_tokens - 1) // self.block_size]:
            if key not in self.index:
                break
            hits.append(self.index[key][0])
        return hits

    def allocate_slots(self, request: Request, num_new_tokens: int, hits: Sequence[int] = ()) -> list[int] | None:
        """Room for so many tokens behind the computed ones, in a table that begins with `hits` if it is new.

        Returns the new blocks; or None, and nothing has changed, if too few are free. A block that is found while
        nobody owns it counts as one of these: it leaves the queue.
        """
        end = request.num_computed_tokens + num_new_tokens
        table = self.tables.get(request.request_id, list(hits))
        missing = max(0, -(-end // self.block_size) - len(table))
        if missing + sum(self.ref_count[block] == 0 for block in hits) > len(self.free_queue):
            return None
        for block in hits:
            self.free_queue.pop(block, None)
            self.ref_count[block] += 1
        new_blocks = [self._take() for _ in range(missing)]
        table += new_blocks
        self.tables[request.request_id] = table
        # Indexed before the model has run: who is admitted next, in the same step, shares them already. A layer writes
        # its keys and values before attention reads any.
        keys = self.update_block_hashes(request)[: end // self.block_size]
        for block, key in zip(table, keys):
            if self.block_hash[block] is None:
                self.block_hash[block] = key
                self.index.setdefault(key, []).append(block)
        return new_blocks

    def _take(self) -> int:
        """The block at the front of the queue. Now what it held is forgotten: this is eviction."""
        block, _ = self.free_queue.popitem(last=False)
        self.ref_count[block] = 1
        key, self.block_hash[block] = self.block_hash[block], None
        if key is not None:
            self.index[key].remove(block)
            if not self.index[key]:
                del self.index[key]
        return block

    def free(self, request: Request) -> None:
        """Give its blocks back, the last one first, so that a beginning outlives what came after it."""
        for block in reversed(self.tables.pop(request.request_id)):
            self.ref_count[block] -= 1
            if self.ref_count[block] == 0:
                self.free_queue[block] = None
                if self.block_hash[block] is None:  # nobody can find it: it is taken before anything that is known
                    self.free_queue.move_to_end(block, last=False)


def pass_through(cache: PrefixCache, prompt: list[int], answer: Sequence[int] = (0,), salt: str | None = None) -> int:
    """A request's life without a model. Returns how many tokens of its prompt were found."""
    request = Request("it", prompt, SamplingParams(), cache_salt=salt)
    hits = cache.get_computed_blocks(request)
    request.num_computed_tokens = len(hits) * cache.block_size
    request.all_token_ids += answer[:-1]  # the last one is sampled, never computed
    if cache.allocate_slots(request, request.num_tokens - request.num_computed_tokens, hits) is None:
        raise common.InputError(f"{len(cache.ref_count) - 1} blocks cannot hold {request.num_tokens} tokens")
    cache.free(request)
    return request.num_computed_tokens


def hit_rate(served: Sequence[tuple[list[int], list[int]]], num_blocks: int) -> float:
    """Share of the prompts' tokens that a pool of so many blocks finds, one request after the other."""
    cache = PrefixCache(num_blocks + 1, BLOCK)
    found = sum(pass_through(cache, prompt, answer) for prompt, answer in served)
    return found / sum(len(prompt) for prompt, _ in served)


# --- On the model -----------------------------------------------------------------------------------------------------


def compute(
    model: llama.Llama, kv: Any, table: list[int], tokens: list[int], computed: int, rows: int = 1
) -> torch.Tensor:
    """One pass over T tokens of a sequence, behind those `computed` in its blocks: the last rows' logits [rows, V]."""
    meta = AttentionMetadata.build([table], [computed + len(tokens)], [len(tokens)], BLOCK, model.device)
    hidden = model.forward(torch.tensor(tokens, device=model.device), meta.positions, kv.attend(meta))
    return model.logits(hidden[-rows:])


def answer(
    model: llama.Llama, kv: Any, cache: PrefixCache, prompt: list[int], max_tokens: int
) -> tuple[Request, float]:
    """Serve one prompt, greedily: the request, and the seconds until its first token. What `cache` finds in `kv` is not
    computed again."""
    request = Request("it", prompt, SamplingParams(temperature=0, max_tokens=max_tokens))
    start, ttft = time.perf_counter(), 0.0
    hits = cache.get_computed_blocks(request)
    computed = request.num_cached_tokens = len(hits) * BLOCK
    while request.num_output_tokens < max_tokens:
        request.num_computed_tokens = computed
        cache.allocate_slots(request, request.num_tokens - computed, hits)
        logits = compute(model, kv, cache.tables["it"], request.all_token_ids[computed:], computed)
        hits, computed = [], request.num_tokens
        request.append_output_token_id(int(logits.argmax()))
        ttft = ttft or time.perf_counter() - start
    cache.free(request)
    return request, ttft


# A key that is cut to 8 bits has 256 values. Some account number gives the first block of a prompt the key that the
# first block of another user's prompt has, and the cache compares keys, not tokens.


def account_prompt(tokenizer: Tokenizer, number: int, word: str) -> list[int]:
    """One block that says the code word of an account, and the beginning of a sentence that repeats it."""
    first = f"Account {number}. The code word is {word}. Remember it well, please, it will be needed soon enough again."
    question = "\nQuestion: What is the code word?\nAnswer: The code word is"
    return tokenizer.encode(first)[:BLOCK] + tokenizer.encode(question)


def colliding_account(tokenizer: Tokenizer, other: Sequence[int], word: str, hash_bits: int) -> int | None:
    """The first of 2,000 account numbers whose first block has the key of `other`'s, or None."""

    def key(tokens: Sequence[int]) -> bytes:
        return hash_block_tokens(ROOT_HASH, tokens[:BLOCK])[: hash_bits // 8]

    return next((n for n in range(2000, 4000) if key(account_prompt(tokenizer, n, word)) == key(other)), None)


# --- 2. CUDA graphs: what a launch costs, and what is left of it ------------------------------------------------------
#
# Python hands a GPU one kernel after the other, and each takes the CPU some 10 µs. The CPU runs ahead, so a step takes
#
#     eager    max( launches · 10 µs, what the GPU computes and moves )
#     a graph  max(            10 µs, what the GPU computes and moves )
#
# A graph is the recording of all these launches: kernels with the addresses of what they read and write, no Python. So
# what changes from step to step lies where it always lay, and shapes are those of the recording: a batch is padded to
# the next size there is. Where there is no GPU, a tape of operations stands in for a graph, and counts them.

LAUNCH = 10e-6  # seconds: the source's figure; an H200's host took 22 for each of an eager step, Python included


def record_step(model: llama.Llama, num_seqs: int = 8) -> Tape:
    """The launches of one decode step of B sequences, as on a GPU: attention and cache are lesson 02's kernels.

    Those get meta tensors: there a wrapper launches its kernel, and a tape records the launch without running it.
    """
    cache, meta = PagedKVCache(model, 2, BLOCK), torch.device("meta")
    cache.layers = [layer.to(meta) for layer in cache.layers]
    launch = cache.attend(AttentionMetadata.build([[1]] * num_seqs, [9] * num_seqs, [1] * num_seqs, BLOCK, meta))
    positions, tape = torch.full((num_seqs,), 8, device=model.device), Tape()

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        launch(layer, *(torch.empty(x.shape, dtype=x.dtype, device=meta) for x in (q, k, v)))
        return torch.empty_like(q)

    tape.capture_begin()
    token_ids = torch.zeros(num_seqs, dtype=torch.int64, device=model.device)
    model.logits(model.forward(token_ids, positions, attend)).argmax(1)
    tape.capture_end()
    return tape


def kind_of(operation: Any) -> str:
    """What a recorded operation is: a matrix product, one of our Triton kernels (attention, cache), or small."""
    if isinstance(operation, common.Launch):
        return "triton"
    name = operation.name().split("::")[1].split(".")[0]
    return "product" if name in ("mm", "addmm", "linear", "bmm") else "small"


# --- 3. torch.compile: bytes between two matrix products --------------------------------------------------------------
#
# Between two products a layer does small things: a norm, a rotation, a SiLU, an addition. Each is a kernel that reads
# its input from memory and writes its output back. A compiler that sees them together makes one kernel of them, whose
# results in between never leave the chip.

OUTSIDE_LAYERS = ("aten::embedding", "aten::index.Tensor", "aten::argmax")


def small_operations(tape: Tape) -> list[tuple[str, int]]:
    """(name, bytes that it reads and writes) of each small operation: merging all of them saves at most this sum."""

    def moved(tensors: Any) -> int:
        return sum(x.numel() * x.element_size() for x in tree_leaves(tensors) if isinstance(x, torch.Tensor))

    small = [step for step in tape.tape if kind_of(step[0]) == "small" and step[0].name() not in OUTSIDE_LAYERS]
    return [(operation.name(), moved((args, out))) for operation, args, _, out in small]


# --- 4. Between two steps: multi-step and async scheduling ------------------------------------------------------------
#
# `step()` is a chain: schedule, run, update, schedule, run, … While the CPU plans, the GPU waits. Two ways out; both
# plan steps whose tokens are not known yet. The plan does not need to know *which* token it will be, only *that* there
# will be one: the engine's scheduler counts a placeholder.
#   n-step (vLLM until 2025): plan n steps in one go, run them, hear of all n, plan again. A request that stops inside
#     computes to the end of the n for nothing, and new requests are not admitted before that end.
#   async (vLLM's default since 0.14): plan step i + 1 while the model runs step i.

LOOPS = {"synchronous": (1, False), "n-step": (4, False), "async": (2, True)}  # (steps planned ahead, while one runs?)


def on_a_clock(kind: str, stops: Sequence[int], host_ms: float = 5, step_ms: float = 10) -> dict[str, Any]:
    """One of LOOPS, eight seats, without a model: a plan takes `host_ms`, a step `step_ms`. Plans, steps, tokens
    sampled in vain, when all is done, and how long each answer became.

    Request i says the stop token, 1, as its `stops[i]`-th. No plan can foresee that.
    """
    (depth, overlap), samples, told = LOOPS[kind], Counter[str](), Counter[str]()
    limits = SchedulerConfig(max_model_len=256, max_num_seqs=8)
    scheduler = make_scheduler(limits, 8 * 16 + 1, BLOCK, enable_prefix_caching=False, async_scheduling=True)
    for i in range(len(stops)):
        scheduler.add_request(Request(str(i), [0], SamplingParams(max_tokens=200, stop_token_ids=[1])))
    in_flight: deque[tuple[Any, dict[str, list[int]], float]] = deque()  # step, its tokens, when they are there
    host = model = 0.0  # when each of the two is free
    plans = steps = wasted = 0
    while scheduler.has_unfinished_requests() or in_flight:
        # Plan: `depth` steps ahead, while one runs or when none does.
        if overlap or not in_flight:
            plans, host = plans + 1, host + host_ms
            while len(in_flight) < depth and (output := scheduler.schedule()).num_scheduled_tokens:
                steps, model = steps + 1, max(model, host) + step_ms
                samples.update(output.num_scheduled_tokens.keys())
                tokens = {i: [int(samples[i] == stops[int(i)])] for i in output.num_scheduled_tokens}
                in_flight.append((output, tokens, model))
        # Hear of the oldest step.
        output, tokens, there = in_flight.popleft()
        host = max(host, there)
        heard = scheduler.update_from_output(output, tokens)
        told.update(each.request_id for each in heard)
        wasted += len(tokens) - len(heard)  # of requests that have ended: nobody waits for them, they do no harm
    lengths, idle = [told[str(i)] for i in range(len(stops))], 1 - steps * step_ms / model
    return {"plans": plans, "steps": steps, "wasted": wasted, "ms": model, "idle": idle, "lengths": lengths}


# --- 5. A first look at speculative decoding --------------------------------------------------------------------------
#
# A decode step reads all weights to compute one row; a second row would cost next to nothing. If the next k tokens are
# guessed, one pass over 1 + k rows says for each what the model would have written there. The guesses that agree
# are free tokens, the first that does not is replaced by the model's own. Where do guesses come from? In a task
# to quote, edit or summarise: from the prompt.


def prompt_lookup(tokens: Sequence[int], k: int, longest: int = 3) -> list[int]:
    """The up to `k` tokens that followed the last 3 (or 2, or 1) tokens where they first occurred. vLLM's "ngram"."""
    for n in range(min(longest, len(tokens) - 1), 0, -1):
        for start in range(len(tokens) - n):
            if tokens[start : start + n] == tokens[-n:]:
                return list(tokens[start + n : start + n + k])
    return []


def generate_with_lookup(model: llama.Llama, prompt: Sequence[int], max_tokens: int, k: int) -> tuple[list[int], int]:
    """Greedy decoding with guesses from the prompt. Returns the tokens, and how many passes they took. k = 0: none."""
    tokens, computed, passes = list(prompt), 0, 0
    table = list(range(1, 2 + (len(prompt) + max_tokens + k) // BLOCK))
    kv = PagedKVCache(model, len(table) + 1, BLOCK)
    while len(tokens) < len(prompt) + max_tokens:
        draft = prompt_lookup(tokens, k) if computed else []
        logits = compute(model, kv, table, tokens[computed:] + draft, computed, rows=1 + len(draft))
        choice = logits.argmax(1).tolist()  # what the model writes after the last token, and after each guess
        agreed = next((i for i, (guess, chosen) in enumerate(zip(draft, choice)) if guess != chosen), len(draft))
        tokens += choice[: agreed + 1]  # the guesses that agreed, and the model's own next token
        computed = len(tokens) - 1  # keys and values of rejected guesses lie behind it, and will be overwritten
        passes += 1
    return tokens[len(prompt) : len(prompt) + max_tokens], passes


# --- The story --------------------------------------------------------------------------------------------------------

STOPS = [5, 9, 14, 20, 7, 11, 26, 3] * 4  # where the requests on the clock stop
SYSTEM = """You are the assistant of a public library. Answer in one short sentence. Be friendly, be exact, and if you
do not know something, say so. The library opens at nine in the morning and closes at eight in the evening, on Sundays
at five. Books may be kept for four weeks, films for one week. A reader's card costs nothing for children."""
TURNS = ["When do you close on Sundays?", "And how long may I keep a film?", "Thank you! Does a card cost anything?"]
QUOTE = "The library opens at nine in the morning and closes at eight in the evening, on Sundays at five."
TASKS = {
    "repeat": f"Repeat the text exactly.\nText: {QUOTE}\nText: {QUOTE[:11]}",
    "invent": "Once upon a time, in a small village by the sea,",
}


def show_index() -> None:
    """One prompt behind another, then a day of chats beside the reference."""
    served, rows = list(range(64)), []
    for what, tokens, salt in (
        ("the same 64", served, None),
        ("the same, a question behind", [*served, 99, 98], None),
        ("the same, token 60 differs", [*served[:60], 99, *served[61:]], None),
        ("the same, one more in front", [99, *served], None),
        ("the same, another salt", served, "b"),
    ):
        cache = PrefixCache(64, BLOCK)
        pass_through(cache, served)
        rows.append([what, len(tokens), pass_through(cache, tokens, salt=salt)])
    common.table(["64 tokens were served; then come", "tokens", "found"], rows)
    common.say("One token in front, and nothing is found: the key of each block names all that came before it.")
    workload = chats.chat_workload()
    best = sum(naive_hits(workload, BLOCK)) / sum(len(prompt) for prompt, _ in workload)
    rates = {n: hit_rate(workload, n) for n in (192, 512, 768, 4096)}
    shown = ", ".join(f"{rate:.0%} by {n} blocks" for n, rate in rates.items())
    common.say(f"{len(workload)} turns of {chats.CHATS['conversations']} chats, found: {shown}")
    common.check_equal(f"comparing tokens, forgetting nothing, finds the same {best:.1%}", rates[4096], best)


def show_model(model: llama.Llama, tokenizer: Tokenizer) -> None:
    """Three questions behind one instruction, with a cache for all of them, and with a new one for each."""
    kv, cache = PagedKVCache(model, 160, BLOCK), PrefixCache(160, BLOCK)
    shared, rows = tokenizer.encode(SYSTEM * 6)[:304], []
    for turn in TURNS:
        prompt = shared + tokenizer.encode(f"{turn} " * 16)[:16]
        alone, slow = answer(model, PagedKVCache(model, 160, BLOCK), PrefixCache(160, BLOCK), prompt, 4)
        request, fast = answer(model, kv, cache, prompt, 4)
        if request.output_token_ids != alone.output_token_ids:
            raise common.CheckFailed(f"{turn}: the cache changed the tokens")
        rows.append([turn, len(prompt), request.num_cached_tokens, f"{1e3 * slow:.0f} ms", f"{1e3 * fast:.0f} ms"])
    common.table(["304 tokens of instruction, then", "tokens", "found", "first token", "with the cache"], rows)
    common.say("✓ every token is the same with and without the cache")


def show_short_key(model: llama.Llama, tokenizer: Tokenizer, hash_bits: int) -> None:
    """Two accounts whose first blocks have one key, if keys are so short: the second hears the first one's word."""
    tiger = account_prompt(tokenizer, 1234, "tiger")
    number = colliding_account(tokenizer, tiger, "banana", hash_bits)
    if number is None:
        common.say(f"keys of {hash_bits} bits: none of 2,000 other accounts has the key of account 1234's first block")
        return
    banana, kv = account_prompt(tokenizer, number, "banana"), PagedKVCache(model, 99, BLOCK)
    short, whole = (PrefixCache(99, BLOCK, bits) for bits in (hash_bits, 256))
    said = []
    for cache, prompt in ((short, tiger), (short, banana), (whole, banana)):
        request, _ = answer(model, kv, cache, prompt, 2)
        said.append(tokenizer.decode(request.output_token_ids))
    common.say(f"keys of {hash_bits} bits: account 1234 says {said[0]!r}. Account {number}, whose prompt says banana,")
    common.say(f"has the same key and hears {said[1]!r} (with 256 bits {said[2]!r}). WRONG")


def show_launches() -> None:
    """Launches of a step, and what they cost beside the GPU's work."""
    gpu, rows = HARDWARE["H100 80GB"], []
    for name in ("SmolLM2-135M", "Llama-3.1-8B"):
        config = roofline.MODELS[name]
        # What a step launches depends on the layers, not on their width: a narrow model will do.
        tape = record_step(llama.random_model(num_hidden_layers=config["num_hidden_layers"])).tape
        kinds, n, factors = Counter(kind_of(operation) for operation, *_ in tape), len(tape), []
        for num_seqs in (1, 16, 256):
            on_gpu = gpu.seconds(*roofline.step_cost(config, num_seqs, 1, 1024))
            factors.append(f"{max(n * LAUNCH, on_gpu) / max(LAUNCH, on_gpu):.2f}x")
        rows.append([name, n, *(kinds[kind] for kind in ("product", "triton", "small")), *factors])
    common.table(["a decode step launches", "all", "products", "Triton", "small", "B=1", "B=16", "B=256"], rows)
    common.say("(eager over one graph: 10 µs a launch, B sequences of 1,024 tokens on an H100 by roofline)")


def show_replay(model: llama.Llama, tokenizer: Tokenizer) -> None:
    """An engine that replays its steps, beside one that does not."""
    if model.moe and not common.HAS_GPU:
        return common.skipped("CUDA graphs", "no GPU, and a CPU's steps differ: each runs the experts that it asks for")
    if not common.HAS_GPU:
        common.skipped("CUDA graphs", "no GPU. A tape of operations takes their place: same buckets, padding, buffers")
    eager, captured = (offline_run.make_core(model, 129, 256) for _ in range(2))
    runner, limits = captured.runner, captured.scheduler.config
    assert isinstance(runner, ModelRunner)
    recorder = torch.cuda.CUDAGraph if common.HAS_GPU else Tape
    graphs = CapturedModel(runner.model, runner.cache, runner.attend, limits, graph_class=recorder, largest=32)
    runner.graphs = graphs  # from now on its steps are replayed
    prompts = [tokenizer.encode(f"{turn} The answer is") for turn in TURNS]
    expected, replayed = (offline_run.serve(core, prompts, [6, 3, 5]).token_ids for core in (eager, captured))
    buckets, pieces = sorted({n for n, _ in graphs.captured}), max(len(s.graphs) for s in graphs.captured.values())
    what = (
        f"{graphs.num_replays} steps from buckets of {buckets} tokens, {pieces} graphs each: the same tokens as eager"
    )
    common.check_equal(what, replayed, expected)


def show_compile(model: llama.Llama) -> None:
    """What the small operations of a layer move, beside the weights that have to be read in any case."""
    layers, operations = model.config.num_hidden_layers, small_operations(record_step(model, 8))
    names = Counter(name.removeprefix("aten::").split(".")[0] for name, _ in operations)
    shown = ", ".join(f"{n // layers} {name}" for name, n in names.items() if n >= layers)
    common.say(f"between the products and attention of a layer: {shown}")
    parameters = {name: math.prod(shape) for name, shape in llama.tensor_shapes(model.config).items()}
    weights = sum(n for name, n in parameters.items() if ".layers.0." in name) * model.dtype.itemsize
    for T in (1, 256, 2048):
        small = T * sum(moved for _, moved in operations) / layers / 8
        share = small / (small + weights)
        common.say(
            f"{T:>5,} tokens: they move {small / 1e6:6.2f} MB, the weights are {weights / 1e6:.0f} MB: {share:.1%}"
        )


def show_loops(path: str | None, host_ms: float) -> None:
    """The three loops on the clock; then one step ahead in the engine, on the model."""
    rows = []
    for kind in LOOPS:
        loop = on_a_clock(kind, STOPS, host_ms)
        if loop["lengths"] != STOPS:
            raise common.CheckFailed(f"{kind}: answers of {loop['lengths']} tokens")
        counts = [loop[name] for name in ("plans", "steps", "wasted")]
        rows.append([kind, *counts, f"{loop['idle']:.0%}", f"{loop['ms']:,.0f} ms"])
    common.table([f"{sum(STOPS)} tokens", "plans", "steps", "in vain", "model idle", "all done after"], rows)
    params, said = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), []
    for ahead in (False, True):
        llm = LLM(path, async_scheduling=ahead, max_model_len=256, num_gpu_blocks_override=64, enforce_eager=True)
        said.append([each.outputs[0].token_ids for each in llm.generate(TURNS, params)])
    common.check_equal("the engine on the model, in step and one step ahead: the same tokens", said[1], said[0])


def show_lookup(model: llama.Llama, tokenizer: Tokenizer) -> None:
    """Tokens per pass with guesses out of the text itself, where it repeats and where it does not."""
    for name, text in TASKS.items():
        prompt = tokenizer.encode(text)
        (plain, _), (tokens, passes) = (generate_with_lookup(model, prompt, 16, k) for k in (0, 4))
        if tokens != plain:
            raise common.CheckFailed(f"{name}: guesses changed the tokens")
        common.say(f"{name}: {len(tokens)} tokens in {passes} passes, up to 4 guesses in each")
    common.say("✓ the same tokens without guesses. Who else can guess, and how to sample exactly: lesson 07")


def catalog() -> dict[str, str]:
    """What each entry saves, counted. The unit is a step, or a prompt, of Llama-3.1-8B in bf16."""
    config = roofline.MODELS["Llama-3.1-8B"]
    weights, (linear, head) = roofline.weight_bytes(config), roofline.weights_read(config)
    read, read_int4 = 2 * (linear + head), linear / 8 * (4 + 20 / 128) + 2 * head  # 20: a scale and a zero for 128
    reduces, kv = 2 * config["num_hidden_layers"] + 1, roofline.KVCacheSpec.from_config(config).bytes_per_token()
    return {
        "prefix caching": f"prefill: {2000 / 2105:.0%} of 2,000 + 105 tokens if the 2,000 are known",
        "CUDA graphs": "launches of a decode step: 519 -> 1",
        "torch.compile": "small operations between two products: one kernel, one round trip to memory",
        "async scheduling": "a step's time: plan + run -> max(plan, run)",
        "prompt lookup": "passes over the weights: each gives 1 + the guesses that agree, not 1",
        "tensor parallelism": f"weights per GPU: {weights / 1e9:.1f} -> {weights / 2e9:.1f} GB on 2, for {reduces} "
        "all-reduces a step; tour 05c",
        "quantized weights": f"weights read: {read / 1e9:.1f} -> {read_int4 / 1e9:.1f} GB a step, in 4 bits; tour 05b",
        "quantized KV cache": f"cache: {kv:,} -> {kv // 2:,} bytes per token, in fp8; tour 05d",
    }


def build_parser() -> arguments.Parser:
    p = cli.parser(__doc__)
    help = "bits of a block's key (default %(default)s; 8 serves another user's text)"
    p.add_argument("--hash-bits", type=int, choices=(8, 16, 64, 256), default=256, help=help)
    help = "what a plan takes on the clock, beside 10 ms of the model (default %(default)s)"
    p.add_argument("--host-ms", type=arguments.number(float, 0, 1000), default=5.0, metavar="MS", help=help)
    return p


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    cli.start(args)
    loader.check_context(args.model, 2112 if args.bench else 1024)

    common.heading("1 · Prefix caching: an index of blocks, beside one that compares tokens and forgets nothing")
    show_index()
    common.heading("2 · The real model: what was sent before is not computed again")
    model, tokenizer = loader.load(args.model)
    packed = pack_weights(model)
    show_model(packed, tokenizer)
    show_short_key(packed, tokenizer, args.hash_bits)
    common.heading("3 · CUDA graphs: a step without launches")
    show_launches()
    show_replay(model, tokenizer)
    common.heading("4 · torch.compile: round trips to memory")
    show_compile(model)
    common.heading(f"5 · Async scheduling, on a clock: a plan takes {args.host_ms:g} ms, the model 10 ms a step")
    show_loops(args.model, args.host_ms)
    common.heading("6 · Prompt lookup: several tokens from one pass")
    show_lookup(model, tokenizer)
    common.heading("7 · The catalog, counted for Llama-3.1-8B in bf16")
    common.say("\n".join(f"{name:<20}{saves}" for name, saves in catalog().items()))
    cli.hand_over(KEY, args)


if __name__ == "__main__":
    cli.run(main)

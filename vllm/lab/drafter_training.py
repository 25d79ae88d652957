"""Training drafters on text that the target wrote itself. Companion 07b shows them; this file makes them.

Three small networks learn to guess what SmolLM2-135M-Instruct says next:
  * EAGLE: one decoder layer that continues the target's own features, one token ahead of it;
  * Medusa: three heads on one feature, each for another distance;
  * a draft model: a Llama of two layers that sees tokens only.

The steps:
  1. `write_text`: the target answers some thousand prompts on the engine. While it does, the runner keeps
     what training needs and would otherwise have to compute again: the final hidden state at every position, and the
     16 most probable next tokens with their log-probabilities. So an epoch costs no pass of the target.
  2. `choose_vocab`: the output matrix has 49,152 rows, and a drafter of 4M parameters would spend most of its time in
     them. Draft over the most frequent tokens only (FR-Spec 2025; EAGLE-3's `d2t` map). A token outside can never be
     drafted, which costs acceptance and not exactness.
  3. `train`: packed sequences, fp32, one thread; a loss that unrolls the drafter on its own features (EAGLE-3's
     "training-time test"), because that is how it will be used.
  4. `count_chains`: three guesses behind every position of answers kept out, checked as the engine checks them.

Everything is resumable: `07b_trained_drafters.py train --minutes 30` goes on where the last run stopped.
Read for this: Li et al. 2024, 2025 (EAGLE, EAGLE-3), Cai et al. 2024 (Medusa), Zhao et al. 2025 (FR-Spec).
"""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import itertools
import json
import operator
import pydoc_data.topics
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from engine.config import SchedulerConfig, VllmConfig
from engine.core.engine_core import EngineCore
from engine.core.kv_cache_manager import KVCacheManager
from engine.model import llama
from engine.model.tokenizer import Tokenizer
from engine.request import Request, SamplingParams
from engine.spec_decode.trained import HEADS, Network, fused, network_shapes
from engine.spec_decode.verifier import Sampled
from engine.worker.assemble import make_runner
from engine.worker.model_runner import ModelRunner
from lab.reserving import ReservingScheduler

TOP_K = 16  # next tokens remembered per position
PER_FILE = 48  # answers

# --- Prompts --------------------------------------------------------------------------------------------------------

TOPICS = """photosynthesis|black holes|the water cycle|volcanoes|electric cars|the human heart|gravity|vaccines
|coral reefs|the French Revolution|ancient Egypt|the Roman Empire|the printing press|the Silk Road
|the Industrial Revolution|machine learning|computer networks|databases|encryption|operating systems
|compilers|search engines|the internet|sourdough bread|green tea|pasta|vegetable soup|chocolate|cheese
|coffee|a healthy breakfast|spices|jazz|the piano|oil painting|photography|poetry|the novel|theatre
|architecture|folk dance|film music|football|chess|swimming|running a marathon|yoga|mountain climbing
|cycling|sailing|tennis|basketball|friendship|honesty|courage|patience|time management|public speaking
|job interviews|saving money|learning a language|cats|dogs|elephants|honey bees|whales|owls|butterflies
|wolves|penguins|dolphins|rain forests|deserts|rivers|glaciers|earthquakes|hurricanes|the ocean floor
|the moon|the solar system|comets|inflation|supply and demand|taxes|trade between countries
|small businesses|marketing|insurance|banks|fractions|prime numbers|geometry|probability|statistics
|linear equations|the Pythagorean theorem|calculus|trains|bridges|airplanes|ships|bicycles|batteries
|solar panels|wind power|nuclear energy|lasers|sleep|exercise|the immune system|the brain|vitamins
|stress|allergies|eye sight|teeth|posture|schools|libraries|museums|newspapers|elections|courts
|volunteering|recycling|public transport|city parks|gardening|camping|knitting|woodworking|bird watching
|fishing|board games|travelling alone|moving to a new city|robots|satellites|telescopes|microscopes
|clocks|maps|the calendar|money|writing systems|mirrors"""
TOPICS = [topic.strip() for topic in TOPICS.replace("\n", "").split("|")]

ASK = """Explain {} to a child.|What is important to know about {}?|Write a short paragraph about {}.
|Give me five facts about {}.|Why do people care about {}?|What are the advantages and disadvantages of {}?
|Write a short story in which {} plays a role.|Write an email to a friend about {}.
|Tell me about the history of {}.|I want to learn more about {}. Where should I start?
|What are common mistakes when it comes to {}?|Write three questions and answers about {}.
|How would you describe {} in simple words?|Give me some tips on {}.
|Write the introduction of an essay about {}.|Make a list of things that are related to {}.
|How has {} changed over time?|What is the most surprising thing about {}?|Write a dialogue about {}."""
ASK = [template.strip() for template in ASK.replace("\n", "").split("|")]

CODE = """returns the sum of a list|reverses a string|checks whether a number is prime|counts the words in a text
|finds the largest element of a list|computes the factorial of n|removes duplicates from a list
|sorts a list of numbers|merges two sorted lists|checks whether a string is a palindrome
|reads a file line by line|computes the average of a list|converts Celsius to Fahrenheit
|counts the vowels in a string|returns the n-th Fibonacci number|finds the smallest number
|prints a multiplication table|checks whether two words are anagrams|flattens a nested list
|computes the greatest common divisor|finds the index of an element|writes a dictionary to a file
|counts how often each letter occurs|returns all even numbers|removes spaces from a string
|computes the area of a circle|finds the second largest number|rotates a list by k places
|capitalizes each word|transposes a matrix|multiplies two matrices
|computes the length of a list without len|searches a sorted list by bisection|converts a number to binary
|generates random passwords|validates an email address"""
CODE = [task.strip() for task in CODE.replace("\n", "").split("|")]
CODE_ASK = ["Write a Python function that {}.", "Write a Python program that {} and explain it.",
            "How do I write a function in Python that {}?", "Write a JavaScript function that {}."]  # fmt: skip

REWRITE = ["Summarize the following text:\n\n{}", "Rewrite the following text in simpler words:\n\n{}",
           "Repeat the most important sentences of this text:\n\n{}", "What does this text say?\n\n{}"]  # fmt: skip


def passages() -> list[str]:
    """Python's own documentation, cut at paragraphs into pieces of 300 to 600 characters, in a fixed order."""
    found = []
    for name in sorted(pydoc_data.topics.topics):
        piece = ""
        for paragraph in pydoc_data.topics.topics[name].split("\n\n"):
            piece += paragraph.strip() + "\n\n"
            if len(piece) >= 300:
                if len(piece) <= 600:
                    found.append(piece.strip())
                piece = ""
    random.Random(0).shuffle(found)
    return found


# What no drafter was trained on: other topics, other tasks, passages that no model wrote.
HELD_OUT = {
    "chat": [
        "Explain magnets to a child.", "What is important to know about kites?", "Write a short paragraph about bread.",
        "Give me five facts about horses.", "Why do people care about mountains?", "Give me some tips on drawing.",
        "Write an email to a friend about a concert.", "What are the advantages and disadvantages of living alone?",
    ],
    "code": [
        "Write a Python function that computes the median of a list.",
        "Write a Python program that counts the lines of a file and explain it.",
        "How do I write a function in Python that splits a list in two halves?",
        "Write a JavaScript function that repeats a string n times.",
        "Write a Python function that returns the product of a list.",
        "Write a Python function that checks whether a year is a leap year.",
        "Write a Python class for a bank account.", "Write a Python function that finds the longest word.",
    ],
    "summary": [REWRITE[i % 2].format(passage) for i, passage in enumerate(passages()[:4])] + [
        "Summarize the following text:\n\nThe lighthouse at the end of the bay was built in 1874, after three ships "
        "had been lost in one winter. For ninety years a keeper lit the lamp every evening. In 1964 the lamp was made "
        "electric, and the keeper's house became a small museum that opens on Sundays.",
        "Repeat the most important sentences of this text:\n\nOur town council met on Tuesday to discuss the old "
        "market hall. The roof leaks, and repairs would cost more than the town can pay this year. Some members want "
        "to sell the building. Others want to ask the citizens for donations. A decision will be made in March.",
        "Rewrite the following text in simpler words:\n\nThe committee concluded that the proposed modifications to "
        "the irrigation system would substantially reduce water consumption, provided that farmers receive adequate "
        "training and that the equipment is maintained at regular intervals.",
        "What does this text say?\n\nA battery stores energy in chemical form. When it is connected to a lamp, a "
        "reaction at one end sets electrons free, and they travel through the wire to the other end. When all of the "
        "material has reacted, the battery is empty.",
    ],
}  # fmt: skip


def training_prompts(seed: int) -> Iterator[str]:
    """An endless stream of prompts: questions, coding tasks, and passages to work on. The first four are held out."""
    rng, pieces = random.Random(seed), passages()[4:]
    while True:
        kind = rng.random()
        if kind < 0.2:
            yield rng.choice(REWRITE).format(rng.choice(pieces))
        elif kind < 0.5:
            yield rng.choice(CODE_ASK).format(rng.choice(CODE))
        else:
            yield rng.choice(ASK).format(rng.choice(TOPICS))


# --- Text, and what the target thought while it wrote it ------------------------------------------------------------


class RecordingRunner(ModelRunner):
    """The engine's runner, keeping each request's final hidden states and its 16 most probable next tokens."""

    temperature = 0.7  # two answers of three; one of three is greedy, as drafters are measured

    def __post_init__(self) -> None:
        super().__post_init__()
        self.records, self.rngs = {}, {}

    def forward(self, token_ids: torch.Tensor, meta: Any, requests: Sequence[Request]) -> torch.Tensor:
        """As the parent, and keeps every row's features [T, hidden] in fp16."""
        hidden = super().forward(token_ids, meta, requests)
        features = final_norm(self.model, hidden).half()
        for request, rows in zip(requests, features.split(list(meta.query_lens))):
            self.records.setdefault(request.request_id, ([], [], []))[0].append(rows)
        return hidden

    def sample(self, logits: torch.Tensor, requests: Sequence[Request]) -> Sampled:
        """Draw from the top 16 at the given temperature; each request has its own stream of random numbers."""
        top = logits.topk(TOP_K)
        logprobs = top.values - logits.logsumexp(1, keepdim=True)  # [R, 16]
        cumulative = (top.values / self.temperature).softmax(1).cumsum(1).cpu().numpy()
        sampled = {}
        for i, request in enumerate(requests):
            name = request.request_id
            rng = self.rngs.setdefault(name, np.random.default_rng([self.seed, int(name)]))
            greedy = int(name) % 3 == 0
            place = 0 if greedy else min(TOP_K - 1, int((cumulative[i] < rng.random()).sum()))
            sampled[name] = [int(top.indices[i, place])]
            self.records[name][1].append(top.indices[i])
            self.records[name][2].append(logprobs[i])
        return sampled, {}


def final_norm(model: llama.Llama, hidden: torch.Tensor) -> torch.Tensor:
    """The feature that drafters work with: the hidden state as the output matrix sees it. [T, hidden]."""
    return F.rms_norm(hidden, hidden.shape[-1:], model.norm, model.config.rms_norm_eps)


def write_text(
    model: llama.Llama,
    tokenizer: Tokenizer,
    folder: Path,
    minutes: float,
    seed: int = 0,
    seats: int = 48,
    max_tokens: int = 160,
) -> int:
    """Let the target answer prompts for some minutes. Adds files of PER_FILE answers each, one at least; returns new
    tokens.

    A file holds, for its answers one behind the other: token_ids, lengths, prompt_lengths, hidden (fp16, at every
    position but each answer's last), top_ids and top_logprobs (at every position that predicts an answer's token).
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = sorted(folder.glob("text_*.npz"))
    config = SchedulerConfig(max_model_len=448, max_num_seqs=seats, max_num_batched_tokens=2048)
    # Nobody is preempted: what is computed twice would be recorded twice.
    scheduler = ReservingScheduler(config, KVCacheManager(896, 16, 448, enable_caching=False))
    paged = VllmConfig(attention_backend="paged", enforce_eager=True)
    runner = make_runner(model, config, 896, 16, paged, seed=seed + len(files), runner_class=RecordingRunner)
    assert isinstance(runner, RecordingRunner)
    core = EngineCore(scheduler, runner)
    prompts, stop = training_prompts(seed + len(files)), time.monotonic() + 60 * minutes
    started, tokens, done, begin, first = 0, 0, [], time.monotonic(), len(files)
    live: dict[str, Request] = {}
    while time.monotonic() < stop or len(files) == first:
        while len(scheduler.waiting) < 4:
            text = next(prompts)
            ids = tokenizer.ask(text)
            request = Request(
                str(started), ids, SamplingParams(max_tokens=max_tokens), eos_token_id=model.config.eos_token_ids[0]
            )
            core.add_request(request)
            live[request.request_id] = request
            started += 1
        for output in core.step():
            if output.finish_reason:
                request = live.pop(output.request_id)
                record = runner.records.pop(output.request_id)
                runner.rngs.pop(output.request_id)
                done.append((request, record))
                tokens += request.num_output_tokens
        if len(done) >= PER_FILE:
            path = folder / f"text_{len(files):04d}.npz"
            _save_answers(path, done)
            files.append(path)
            done = []
            rate = tokens / (time.monotonic() - begin)
            print(f"{path.name}: {tokens:,} tokens written, {rate:.0f} tokens/s", flush=True)
    return tokens


def _save_answers(path: Path, done: Sequence[tuple]) -> None:
    arrays: dict[str, list] = {"token_ids": [], "hidden": [], "top_ids": [], "top_logprobs": []}
    for request, (hidden, top_ids, top_logprobs) in done:
        arrays["token_ids"].append(np.array(request.all_token_ids, dtype=np.uint16))
        arrays["hidden"].append(torch.cat(hidden).cpu().numpy())
        arrays["top_ids"].append(torch.stack(top_ids).cpu().numpy().astype(np.uint16))
        arrays["top_logprobs"].append(torch.stack(top_logprobs).half().cpu().numpy())
    scratch = path.with_suffix(".part")
    content: dict[str, Any] = {name: np.concatenate(parts) for name, parts in arrays.items()}
    content["lengths"] = [r.num_tokens for r, _ in done]
    content["prompt_lengths"] = [r.num_prompt_tokens for r, _ in done]
    with scratch.open("wb") as file:
        np.savez(file, **content)
    scratch.rename(path)


# --- A smaller vocabulary to draft from -----------------------------------------------------------------------------


def choose_vocab(token_ids: np.ndarray, size: int, vocab_size: int, keep: Sequence[int] = ()) -> torch.Tensor:
    """The `size` tokens that occur most often, and those in `keep`, ascending: int64 [size], EAGLE-3's d2t."""
    counts = np.bincount(token_ids, minlength=vocab_size)
    counts[list(keep)] = counts.max() + 1
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:size]))


# --- Three networks -------------------------------------------------------------------------------------------------
#
# They are those of engine/spec_decode/trained.py: the code that trains is the code that drafts.

METHODS = ("eagle", "medusa", "draft_model")


def new_network(
    method: str, target: llama.Llama, d2t: torch.Tensor, data: Text, heads: int = 3, seed: int = 0
) -> Network:
    """Weights to start from. Where a feature is to be guessed from a feature, the best linear guess is solved for."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in network_shapes(method, target.config, heads).items():
        tensors[name] = torch.ones(shape)
        if len(shape) > 1:
            tensors[name] = torch.randn(shape, generator=generator) / shape[1] ** 0.5
        if name.endswith(("o_proj", "down_proj", "down")):  # what is added to a residual starts small
            tensors[name] *= 0.2 if method != "medusa" else 0.0
    tensors = {name: tensor.to(target.device) for name, tensor in tensors.items()}
    if method == "medusa":
        for k in range(heads):
            rows = data.feature_rows(k + 1)[:20_000]
            weight, bias = ridge(data.hidden[rows].float(), data.hidden[rows + k + 1].float())
            tensors |= {f"heads.{k}.linear": weight, f"heads.{k}.bias": bias}
        return Network(method, target, d2t, tensors)
    tensors["norm"] = target.norm.clone()
    network = Network(method, target, d2t, tensors)
    ahead = int(method == "eagle")  # EAGLE: x_{i+1} and f_i give f_{i+1}; draft model: x_i gives f_i
    rows = data.feature_rows(ahead)[:20_000]
    tokens, features = (data.next_token, data.hidden[rows].float()) if ahead else (data.token, None)
    x = fused(F.embedding(tokens[rows], target.embed_tokens), features)
    tensors["fc"], tensors["fc_bias"] = ridge(x, data.hidden[rows + ahead].float() / target.norm)
    return network


def ridge(x: torch.Tensor, y: torch.Tensor, strength: float = 1e-2) -> tuple[torch.Tensor, torch.Tensor]:
    """The linear map with the least squared error, y ≈ W x + b. x [N, in], y [N, out] -> W [out, in], b [out]."""
    mean_x, mean_y = x.mean(0), y.mean(0)
    x, y = (x - mean_x).double(), (y - mean_y).double()
    gram = x.T @ x / len(x)
    gram.diagonal().add_(strength * gram.diagonal().mean())
    weight = torch.linalg.solve(gram, x.T @ y / len(x)).T.float().contiguous()
    return weight, mean_y - weight @ mean_x


# --- What the target wrote, as training data ------------------------------------------------------------------------


class Text:
    """All answers in a folder, one behind the other, with features and labels by position, on `device`."""

    def __init__(self, folder: Path, device: torch.device, limit: int | None = None) -> None:
        """Raises InputError if the folder holds no text."""
        self.files = sorted(folder.glob("text_*.npz"))[:limit]
        if not self.files:
            raise common.InputError(f"{folder}: holds no text_*.npz; write some first (--write MINUTES)")
        chunks = [dict(np.load(file)) for file in self.files]

        def join(name: str) -> np.ndarray:
            return np.concatenate([chunk[name] for chunk in chunks])

        def put(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(device)

        self.raw_tokens, self.lengths = join("token_ids"), join("lengths").astype(np.int64)
        self.prompt_lengths = join("prompt_lengths").astype(np.int64)
        token_start = np.concatenate(([0], self.lengths.cumsum()))
        # Positions that have a feature: all but the last of each answer. Their token, and the one behind it:
        has = np.ones(len(self.raw_tokens), dtype=bool)
        has[token_start[1:] - 1] = False
        place = np.flatnonzero(has)
        tokens = self.raw_tokens.astype(np.int64)
        self.token, self.next_token = put(tokens[place]), put(tokens[place + 1])
        self.hidden = put(join("hidden"))  # [P, hidden] fp16
        self.start = np.concatenate(([0], (self.lengths - 1).cumsum()))  # of each answer in the arrays by position
        # label[i]: the row of top_ids that says what the target predicts at position i, or −1 within a prompt
        label = np.full(len(place), -1, dtype=np.int64)
        answers = self.lengths - self.prompt_lengths
        offset = np.concatenate(([0], answers.cumsum()))
        for i in range(len(self.lengths)):
            label[self.start[i] + self.prompt_lengths[i] - 1 : self.start[i + 1]] = np.arange(offset[i], offset[i + 1])
        self.label = put(label)
        self.top_ids = put(join("top_ids").astype(np.int64))  # [M, 16]
        self.top_probs = put(join("top_logprobs")).float().exp()
        self.owner = put(np.repeat(np.arange(len(self.lengths)), self.lengths - 1))
        self.draft_ids, self.draft_probs = self.top_ids, self.top_probs

    def restrict(self, d2t: torch.Tensor, vocab_size: int) -> None:
        """Express the labels in the draft vocabulary; what lies outside weighs nothing."""
        t2d = torch.full((vocab_size,), -1)
        t2d[d2t] = torch.arange(len(d2t))
        ids = t2d.to(self.top_ids.device)[self.top_ids]
        self.draft_probs = self.top_probs * (ids >= 0)
        self.draft_ids = ids.clamp(min=0)
        self.best = torch.where(ids[:, 0] >= 0, ids[:, 0], -1)  # what greedy decoding takes; −1: cannot be drafted

    def feature_rows(self, ahead: int) -> torch.Tensor:
        """Positions i of answers such that position i + ahead belongs to the same one."""
        i = torch.arange(len(self.label) - ahead, device=self.label.device)
        return i[(self.owner[i] == self.owner[i + ahead]) & (self.label[i] >= 0)]


def batches(data: Text, answers: Sequence[int], size: int, rng: random.Random) -> Iterator[list[int]]:
    """Answers of similar length together, about `size` tokens in each batch, in random order."""
    order = sorted(answers, key=lambda i: (data.lengths[i] + rng.randrange(8), rng.random()))
    groups, group = [], []
    for i in order:
        if group and (len(group) + 1) * data.lengths[i] > size:
            groups.append(group)
            group = []
        group.append(i)
    groups.append(group)
    rng.shuffle(groups)
    yield from groups


# --- Losses ---------------------------------------------------------------------------------------------------------


Counts = list[tuple[int, int]]  # by distance: rows where drafter and target have the same favourite, and all rows


def distill(
    network: Network, features: torch.Tensor, label: torch.Tensor, data: Text
) -> tuple[torch.Tensor, tuple[int, int]]:
    """Cross-entropy with the target's top 16, Σ p_k (log Σ exp z − z_k); in how many rows both have the same favourite,
    and of how many.

    Shapes: features [R, hidden], label int64 [R] rows of data.draft_ids.
    """
    z = network.logits(features)  # [R, draft vocab]
    p = data.draft_probs[label]  # [R, 16]
    loss = (p * (z.logsumexp(1, keepdim=True) - z.gather(1, data.draft_ids[label]))).sum(1).mean()
    with torch.no_grad():
        return loss, (int((z.argmax(1) == data.best[label]).sum()), len(label))


def padded(data: Text, group: Sequence[int], more: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Position indices [N, L + more] of a group of answers (0 where there is none) and whether there is one."""
    n, start = (torch.from_numpy(x[group]).to(data.label.device)[:, None] for x in (data.lengths, data.start))
    column = torch.arange(int(n.max()) - 1 + more, device=n.device)
    inside = column < n - 1
    return torch.where(inside, start + column, 0), inside


def rollout_attention(N: int, L: int) -> llama.Attend:
    """Attention of rollout step s from every position i at once. Step s is the s-th call for a layer.

    Row i of step 0 sees step-0 keys of positions ≤ i. Row i of step s stands at position i + s; what lies between is
    the drafter's own past, so it sees the same step-0 keys, and the keys of row i from steps 1 … s (its diagonal).
    """
    kept: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}  # by layer: keys and values of every step

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        G, past = q.shape[1] // k.shape[1], kept.setdefault(layer, [])

        def split(t: torch.Tensor) -> torch.Tensor:
            return t.view(N, L, t.shape[1], t.shape[2]).transpose(1, 2)

        q = split(q)  # [N, Hq, L, D]
        k, v = (split(t).repeat_interleave(G, 1) for t in (k, v))
        past.append((k, v))
        if len(past) == 1:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scale = q.shape[-1] ** -0.5
            causal = torch.ones(L, L, dtype=torch.bool, device=q.device).tril()
            scores = [(q @ past[0][0].transpose(2, 3) * scale).masked_fill(~causal, float("-inf"))]
            scores += [((q * own).sum(-1, keepdim=True) * scale) for own, _ in past[1:]]
            w = torch.cat(scores, -1).softmax(-1)  # [N, Hq, L, L + s]
            out = w[..., :L] @ past[0][1]
            for s, (_, own) in enumerate(past[1:]):
                out = out + w[..., L + s, None] * own
        return out.transpose(1, 2).reshape(N * L, -1, q.shape[-1])

    return attend


def eagle_loss(network: Network, data: Text, group: Sequence[int], rollout: int) -> tuple[torch.Tensor, Counts]:
    """Unroll the drafter `rollout` steps on its own features, weighted 0.8^s: what it will have to live with."""
    place, inside = padded(data, group, rollout)
    N, L = place.shape[0], place.shape[1] - rollout
    features = data.hidden[place[:, :L]].float().view(N * L, -1)
    row = torch.arange(L, device=place.device).repeat(N)
    attend, loss, agreement = rollout_attention(N, L), torch.zeros((), device=place.device), []
    for s in range(rollout):
        tokens = data.next_token[place[:, s : L + s]].flatten()  # x_{i+1+s}
        features = network.forward(network.inputs(tokens, features), row + s, attend)  # now stands for f_{i+1+s}
        label = torch.where(inside[:, s + 1 : L + s + 1], data.label[place[:, s + 1 : L + s + 1]], -1).flatten()
        rows = (label >= 0).nonzero()[:, 0]
        one, agree = distill(network, features[rows], label[rows], data)
        loss = loss + 0.8**s * one
        agreement.append(agree)
    return loss, agreement


def draft_model_loss(network: Network, data: Text, group: Sequence[int], rollout: int) -> tuple[torch.Tensor, Counts]:
    """A language model of its own, distilled: it always sees true tokens, so there is nothing to unroll."""
    place, inside = padded(data, group, 0)
    N, L = place.shape
    row = torch.arange(L, device=place.device).repeat(N)
    hidden = network.forward(network.inputs(data.token[place].flatten()), row, rollout_attention(N, L))
    label = torch.where(inside, data.label[place], -1).flatten()
    rows = (label >= 0).nonzero()[:, 0]
    loss, agree = distill(network, hidden[rows], label[rows], data)
    return loss, [agree]


def medusa_loss(network: Network, data: Text, group: Sequence[int], rollout: int) -> tuple[torch.Tensor, Counts]:
    """Every head on every feature: head k learns what the target says k + 1 positions later."""
    place, inside = padded(data, group, rollout)
    loss, agreement, L = torch.zeros((), device=place.device), [], place.shape[1] - rollout
    for k in range(rollout):
        ahead = torch.where(inside[:, k + 1 : L + k + 1], data.label[place[:, k + 1 : L + k + 1]], -1)
        use = (ahead >= 0) & (data.label[place[:, :L]] >= 0) & inside[:, :L]
        one, agree = distill(network, network.medusa(data.hidden[place[:, :L][use]].float(), k), ahead[use], data)
        loss = loss + 0.8**k * one
        agreement.append(agree)
    return loss, agreement


LOSSES = {"eagle": eagle_loss, "medusa": medusa_loss, "draft_model": draft_model_loss}


# --- The loop -------------------------------------------------------------------------------------------------------

SHARES = {"eagle": 0.5, "draft_model": 0.35, "medusa": 0.15}  # of the training time
LEARNING_RATE = {"eagle": 8e-4, "draft_model": 1e-3, "medusa": 6e-4}  # at the start of a run; it ends near 0
BATCH, ROLLOUT, AVERAGE = 768, HEADS, 0.995  # tokens per step; distances drafted; decay of the shipped moving average


class Trainer:
    """One drafter in training: its network, AdamW, a moving average of its weights, and how far it has come."""

    def __init__(
        self,
        method: str,
        target: llama.Llama,
        d2t: torch.Tensor,
        data: Text,
        folder: Path,
        learning_rate: float | None = None,
    ) -> None:
        self.method, self.path = method, folder / f"{method}.pt"
        self.network = new_network(method, target, d2t, data)
        self.state = {"steps": 0, "tokens": 0, "seconds": 0.0, "history": []}
        self.average = {name: tensor.clone() for name, tensor in self.network.tensors.items()}
        for tensor in self.network.parameters():
            tensor.requires_grad_(True)
        self.learning_rate = learning_rate or LEARNING_RATE[method]
        self.optimizer = torch.optim.AdamW(self.network.parameters(), betas=(0.9, 0.95), weight_decay=0.05)
        if self.path.is_file():
            kept = torch.load(self.path, map_location=target.device)
            for name, tensor in self.network.tensors.items():
                tensor.data.copy_(kept["weights"][name])
            self.average, self.state = kept["average"], kept["state"]
            self.optimizer.load_state_dict(kept["optimizer"])

    def step(self, data: Text, group: Sequence[int], pace: float = 1.0) -> None:
        """One update, `pace` times as long as at the start."""
        begin = time.monotonic()
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = self.learning_rate * min(1.0, (self.state["steps"] + 1) / 50) * pace
        loss, _ = LOSSES[self.method](self.network, data, group, ROLLOUT)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()
        decay = min(AVERAGE, 1 - 1 / (self.state["steps"] + 1))
        with torch.no_grad():
            for name, tensor in self.network.tensors.items():
                self.average[name].lerp_(tensor, 1 - decay)
        self.state["steps"] += 1
        self.state["tokens"] += int(sum(data.lengths[i] for i in group))
        self.state["seconds"] += time.monotonic() - begin

    def save(self) -> None:
        """Write the whole state next to the old one, then take its name: a cut leaves one of the two."""
        scratch = self.path.with_suffix(".part")
        weights = {name: tensor.detach() for name, tensor in self.network.tensors.items()}
        torch.save(
            {
                "weights": weights,
                "average": self.average,
                "optimizer": self.optimizer.state_dict(),
                "state": self.state,
            },
            scratch,
        )
        scratch.rename(self.path)

    @torch.no_grad()
    def evaluate(self, data: Text, answers: Sequence[int]) -> list[float]:
        """By distance, the share of positions where the averaged weights have the target's favourite, on answers that
        were kept out of training. What they said at shorter distances plays no part: `count_chains` asks for that."""
        averaged = Network(self.method, self.network.target, self.network.d2t, self.average)
        counts = [
            LOSSES[self.method](averaged, data, group, ROLLOUT)[1]
            for group in batches(data, answers, 4 * BATCH, random.Random(0))
        ]
        return [sum(same for same, _ in column) / sum(rows for _, rows in column) for column in zip(*counts)]


def train(
    model: llama.Llama,
    text: Path,
    work: Path,
    minutes: float,
    methods: Sequence[str] = METHODS,
    draft_vocab: int = 4096,
    seed: int = 0,
) -> None:
    """Train `methods` in turns of half a minute, each for its share of `minutes`; goes on from what `work` holds."""
    work.mkdir(parents=True, exist_ok=True)
    data = Text(text, model.device)
    vocab_file = work / "d2t.pt"
    if not vocab_file.is_file():
        tokens, config = data.raw_tokens.astype(np.int64), model.config
        torch.save(choose_vocab(tokens, draft_vocab, config.vocab_size, config.eos_token_ids), vocab_file)
    d2t = torch.load(vocab_file)
    data.restrict(d2t, model.config.vocab_size)
    answers = list(range(len(data.lengths)))
    n = min(PER_FILE, len(answers) // 4)
    kept_out, used = answers[:n], answers[n:]  # the first file measures, or a quarter of the only one
    print(f"{len(answers):,} answers, {len(data.label):,} positions; {len(d2t):,} tokens to draft from cover "
          f"{(data.best >= 0).float().mean():.1%} of the target's favourites", flush=True)  # fmt: skip
    trainers = {method: Trainer(method, model, d2t, data, work) for method in methods}
    feeds: dict[str, Iterator] = {}
    begin = saved = time.monotonic()
    turn_seconds, spent = min(30, 20 * minutes), dict.fromkeys(methods, 0.0)
    rng = random.Random(seed + sum(t.state["steps"] for t in trainers.values()))
    while time.monotonic() - begin < 60 * minutes or (minutes and not all(spent.values())):
        method = min(methods, key=lambda m: spent[m] / SHARES[m])
        trainer, turn = trainers[method], time.monotonic()
        while time.monotonic() - turn < turn_seconds:
            group = next(feeds.get(method, iter(())), None)
            if group is None:
                feeds[method] = batches(data, used, BATCH, rng)
                continue
            # Batches are small and gradients noisy: the last steps of a run are short, and only then does it converge.
            trainer.step(data, group, pace=max(0.02, 1 - (time.monotonic() - begin) / (60 * minutes)))
        spent[method] += time.monotonic() - turn
        if time.monotonic() - saved > 180 or time.monotonic() - begin > 60 * minutes:
            for name, one in trainers.items():
                found, state = one.evaluate(data, kept_out), one.state
                state["history"].append([state["tokens"], *found])
                one.save()
                print(f"{(time.monotonic() - begin) / 60:5.1f} min  {name:11}  {state['steps']:6,} steps  "
                      f"{state['tokens']:10,} tokens {state['tokens'] / state['seconds']:5.0f}/s  same favourite, "
                      f"by distance {' '.join(f'{a:.3f}' for a in found)}", flush=True)  # fmt: skip
            saved = time.monotonic()


# --- How far a chain of guesses is right -----------------------------------------------------------------------------
#
# A guess is worth something only where all guesses before it were right. So aₖ = P(guess k is right | 1 … k − 1 were),
# which is not how often guess k agrees with the target wherever it stands: behind two right guesses, the text is easy.


@torch.no_grad()
def write_chains(network: Network, data: Text, answer: int) -> torch.Tensor:
    """The guesses that the drafter makes behind every position of an answer, each from its own guesses before.

    Returns tokens [L − 1, ROLLOUT]: row j − 1 says what follows token j; it knows tokens to j and features to j − 1.
    """
    mine = slice(*data.start[answer : answer + 2])
    tokens, features, guesses = data.token[mine], data.hidden[mine].float(), []
    if network.method == "medusa":
        guesses = [network.logits(network.medusa(features[:-1], k)).argmax(1) for k in range(ROLLOUT)]
        return network.d2t[torch.stack(guesses, 1)]
    eagle = network.method == "eagle"
    if eagle:  # feature j − 1 beside token j; a draft model reads tokens alone, from the first
        tokens, features = tokens[1:], features[:-1]
    row, attend = torch.arange(len(tokens), device=tokens.device), rollout_attention(1, len(tokens))
    for s in range(ROLLOUT):
        features = network.forward(network.inputs(tokens, features if eagle else None), row + s, attend)
        tokens = network.d2t[network.logits(features).argmax(1)]
        guesses.append(tokens if eagle else tokens[1:])
    return torch.stack(guesses, 1)


def judge_chains(target: llama.Llama, text: torch.Tensor, last: torch.Tensor, guesses: torch.Tensor) -> torch.Tensor:
    """The target's favourite behind each guess, in one pass: a text, and chains that leave it behind its tokens `last`.

    Shapes: text int64 [L], last int64 [R], guesses int64 [R, K] -> tokens [R, K].
    """
    (R, K), L = guesses.shape, len(text)
    start = torch.arange(K * R, device=text.device) % R  # guesses of one distance stand side by side
    ids, depth = torch.cat((text, guesses.T.flatten())), torch.arange(1, K + 1, device=text.device).repeat_interleave(R)
    positions = torch.cat((torch.arange(L, device=text.device), last[start] + depth))
    sees = torch.ones(len(ids), len(ids), dtype=torch.bool, device=text.device).tril()
    sees[L:, :L] = torch.arange(L, device=text.device) <= last[start][:, None]
    sees[L:, L:] &= start == start[:, None]  # of the guesses, those before it in its own chain

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, sees, enable_gqa=True)[0].transpose(0, 1)

    return target.logits(target.forward(ids, positions, attend)[L:]).argmax(1).view(K, R).T


def count_chains(network: Network, data: Text) -> tuple[list[int], list[int]]:
    """At every position of all answers, a chain of guesses, checked as greedy decoding checks it. Returns by distance
    how many guesses had only right ones before them, and how many of these were right.

    Text that was sampled may leave the target's favourites: what is right behind a right guess, the target must say.
    """
    asked, right = [0] * ROLLOUT, [0] * ROLLOUT
    for answer in range(len(data.lengths)):
        mine = slice(*data.start[answer : answer + 2])
        label, chains = data.label[mine], write_chains(network, data, answer)
        last = torch.arange(int(data.prompt_lengths[answer]), len(label), device=label.device)
        guesses = chains[last - 1]
        same = guesses[:, 0] == data.top_ids[label[last], 0]
        asked[0], right[0] = asked[0] + len(last), right[0] + int(same.sum())
        last, guesses = last[same], guesses[same]
        favourites = judge_chains(network.target, data.token[mine], last, guesses[:, :-1])
        alive = torch.ones_like(last, dtype=torch.bool)
        for k in range(1, ROLLOUT):
            alive &= last + k < len(label)  # the answer ends
            asked[k] += int(alive.sum())
            alive &= guesses[:, k] == favourites[:, k - 1]
            right[k] += int(alive.sum())
    return asked, right


def expected_tokens(agreement: Sequence[float]) -> float:
    """1 + a₁ + a₁a₂ + …: tokens per pass if guess k is right with probability aₖ, given that all before it are."""
    return 1 + sum(itertools.accumulate(agreement, operator.mul))


# --- Files ----------------------------------------------------------------------------------------------------------


def export(model: llama.Llama, text: Path, work: Path, folder: Path) -> list[Path]:
    """Write the averaged weights of what is in `work` as fp16 safetensors, with how they came about as metadata."""
    from safetensors.torch import save_file

    data, written = Text(text, model.device, 1), []
    d2t = torch.load(work / "d2t.pt")
    data.restrict(d2t, model.config.vocab_size)
    folder.mkdir(parents=True, exist_ok=True)
    for method in METHODS:
        if not (work / f"{method}.pt").is_file():
            continue
        kept = torch.load(work / f"{method}.pt", map_location=model.device)
        weights = {name: tensor.half().contiguous() for name, tensor in kept["average"].items()}
        network = Network(method, model, d2t, {name: tensor.float() for name, tensor in weights.items()})
        (asked, right), state = count_chains(network, data), kept["state"]
        about = {
            "method": method, "parameters": sum(t.numel() for t in weights.values()), "draft_vocab": len(d2t),
            "coverage": float((data.best >= 0).float().mean()), "steps": state["steps"], "tokens": state["tokens"],
            "minutes": state["seconds"] / 60, "history": state.get("history", []), "asked": asked, "right": right,
            "agreement": [n / max(1, of) for n, of in zip(right, asked)],
        }  # fmt: skip
        if method == "medusa":
            about["ranks"] = rank_table(network, data)
        path = folder / f"{method}.safetensors"
        scratch = path.with_suffix(".part")
        save_file({**weights, "d2t": d2t.int()}, scratch, metadata={"about": json.dumps(about)})
        scratch.chmod(0o644)
        scratch.rename(path)
        written.append(path)
    return written


@torch.no_grad()
def rank_table(network: Network, data: Text, ranks: int = 8) -> list[list[float]]:
    """How often the target's favourite is a Medusa head's first choice, second, …: what a tree is planned with."""
    table = []
    for k in range(ROLLOUT):
        rows = data.feature_rows(k + 1)
        top = network.logits(network.medusa(data.hidden[rows].float(), k)).topk(ranks).indices  # [R, ranks]
        table.append((top == data.best[data.label[rows + k + 1]][:, None]).float().mean(0).tolist())
    return table

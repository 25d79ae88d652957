"""Drafters that were trained on what the target writes: a draft model, Medusa, EAGLE; and early exit, which was not.

Owns their weights beside the target's, and the keys and values of those that have a cache; made by `drafters`, called
by the verifier after every step. It never trains (`lab/drafter_training.py` does), and never decides what stands.
vLLM: `vllm/v1/spec_decode/eagle.py`, `draft_model.py` beside it, and `medusa.py`, which is gone in 0.33.
"""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import copy
import dataclasses
import inspect
import itertools
import json
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from engine.attention.metadata import AttentionMetadata
from engine.core.block_pool import BlockPool, OutOfBlocks
from engine.model import llama
from engine.model.config import LlamaConfig
from engine.model.packed_linear import pack_weights
from engine.registry import fill
from engine.sampling.sampler import draw_tokens, uniforms
from engine.spec_decode.drafters import Draft, DraftContext, Drafter

WEIGHTS = common.HERE / "drafters"  # eagle.safetensors, medusa.safetensors, draft_model.safetensors
HEADS = 3  # of Medusa; as far ahead as the others are trained to guess


# --- Networks: a dict of tensors and a function -----------------------------------------------------------------------


def network_shapes(method: str, target: LlamaConfig, heads: int = HEADS) -> dict[str, tuple[int, ...]]:
    """Every trained tensor. EAGLE: `fc` and one layer like the target's own. Draft model: two layers, narrower."""
    c, H = target, target.hidden_size
    if method == "medusa":
        return {
            f"heads.{k}.{name}": (H,) if name == "bias" else (H, H)
            for k in range(heads)
            for name in ("linear", "bias", "up", "down")
        }
    layers, width = (1, c.intermediate_size) if method == "eagle" else (2, c.intermediate_size // 2)
    shapes: dict[str, tuple[int, ...]] = {"fc": (H, 2 * H if method == "eagle" else H), "fc_bias": (H,)}
    for i in range(layers):
        shapes |= {
            f"layers.{i}.input_norm": (H,),
            f"layers.{i}.post_attention_norm": (H,),
            f"layers.{i}.qkv_proj": ((c.num_attention_heads + 2 * c.num_key_value_heads) * c.head_dim, H),
            f"layers.{i}.o_proj": (H, c.num_attention_heads * c.head_dim),
            f"layers.{i}.gate_up_proj": (2 * width, H),
            f"layers.{i}.down_proj": (H, width),
        }
    return shapes | {"norm": (H,)}


class Network:
    """Weights of one drafter beside its target: what it may draft (`d2t`), and how it gets from input to logits."""

    def __init__(self, method: str, target: llama.Llama, d2t: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        self.method, self.target, self.d2t, self.tensors = method, target, d2t.to(target.device), tensors
        self.head = target.output_head(self.d2t)  # hidden to draft vocabulary; not trained
        self.body: llama.Llama | None = None
        if method != "medusa":  # a Llama with the target's heads, angles and embedding, and layers of its own
            self.body = body = copy.copy(target)  # of a target in shards, whole: each rank has the drafter (06c)
            body.num_heads, body.num_kv_heads = target.config.num_attention_heads, target.config.num_key_value_heads
            layers = sum(name.endswith("input_norm") for name in tensors)
            body.config = dataclasses.replace(target.config, num_hidden_layers=layers, vocab_size=len(d2t))
            body.norm = tensors["norm"]
            body.input_norm = [tensors[f"layers.{i}.input_norm"] for i in range(layers)]
            body.post_attention_norm = [tensors[f"layers.{i}.post_attention_norm"] for i in range(layers)]
            body.q_norm = body.k_norm = []
            body.moe = {}
            body.linear = {name: llama.Linear(tensors[name]) for name in tensors if name.endswith("_proj")}

    def parameters(self) -> list[torch.Tensor]:
        return list(self.tensors.values())

    def inputs(self, token_ids: torch.Tensor, features: torch.Tensor | None = None) -> torch.Tensor:
        """What the decoder layers get: embeddings, in EAGLE fused with the feature one position before. [T, hidden]."""
        x = self.target.embed(token_ids)
        return F.linear(fused(x, features), self.tensors["fc"], self.tensors["fc_bias"])

    def forward(self, x: torch.Tensor, positions: torch.Tensor, attend: llama.Attend) -> torch.Tensor:
        """Through the decoder layers and the final norm: [T, hidden] -> [T, hidden], in EAGLE the next feature."""
        body = self.body
        assert body  # Medusa has no layers
        # The decoder layers are `llama`'s; whoever trains them must have them without its inference mode.
        h = inspect.unwrap(llama.Llama.forward)(body, None, positions, attend, hidden=x)
        return F.rms_norm(h, h.shape[-1:], body.norm, body.config.rms_norm_eps)

    def medusa(self, features: torch.Tensor, head: int) -> torch.Tensor:
        """Head k = 0, 1, 2 guesses the feature k + 1 positions ahead: A h + W₂ silu(W₁ h). [R, hidden] -> same."""

        def w(name: str) -> torch.Tensor:
            return self.tensors[f"heads.{head}.{name}"]

        return F.linear(features, w("linear"), w("bias")) + F.linear(F.silu(F.linear(features, w("up"))), w("down"))

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """Over the draft vocabulary: [R, hidden] -> [R, draft vocab]."""
        return self.head(features)


class EarlyExit(Network):
    """The target's first layers, its final norm and its whole output matrix. Trains nothing, copies nothing."""

    def __init__(self, target: llama.Llama, layers: int) -> None:
        self.method, self.target, self.tensors = "early_exit", target, {}
        self.d2t = torch.arange(target.config.vocab_size, device=target.device)
        self.body = copy.copy(target)
        self.body.config = dataclasses.replace(target.config, num_hidden_layers=layers)

    def inputs(self, token_ids: torch.Tensor, features: torch.Tensor | None = None) -> torch.Tensor:
        return self.target.embed(token_ids)

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        return self.target.linear["lm_head"](features)


def fused(embedding: torch.Tensor, feature: torch.Tensor | None) -> torch.Tensor:
    """Side by side, each at norm √hidden: their scales differ a hundredfold. [T, hidden] twice -> [T, 2·hidden]."""
    parts = (embedding,) if feature is None else (embedding, feature)
    return torch.cat([F.rms_norm(x, x.shape[-1:]) for x in parts], -1)


# --- Files of weights -------------------------------------------------------------------------------------------------


def about(path: Path) -> dict[str, Any]:
    """How a file of weights came about. Raises InputError if it is none of ours."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            return json.loads((file.metadata() or {})["about"])
    except (OSError, SafetensorError, KeyError, ValueError):
        raise common.InputError(f"{path}: not a drafter's weights (made by `07b_trained_drafters.py train`)") from None


def load_network(path: Path, target: llama.Llama) -> Network:
    """A drafter's weights for `target`, in the target's dtype. Raises InputError if they do not fit it."""
    from safetensors.torch import load_file

    method, tensors = about(path)["method"], load_file(path)
    d2t = tensors.pop("d2t").long()
    shapes = network_shapes(method, target.config)
    if {name: tuple(tensor.shape) for name, tensor in tensors.items()} != shapes:
        raise common.InputError(f"{path}: made for another target (hidden size {target.config.hidden_size} here)")
    if int(d2t.max()) >= target.config.vocab_size:
        raise common.InputError(f"{path}: drafts token {int(d2t.max())}, the target has {target.config.vocab_size}")
    return Network(method, target, d2t, {name: t.to(target.device, target.dtype) for name, t in tensors.items()})


# --- A KV cache for drafters: pages that can be taken back ------------------------------------------------------------


class DraftTable:
    """A request's map from positions to a drafter's pages. Its end can be cut off, where a guess was rejected."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.pool, self.block_size = pool, block_size
        self.blocks: list[int] = []
        self.num_tokens = 0

    def append(self, num_tokens: int) -> None:
        """Make room for `num_tokens` more. Raises OutOfBlocks, changing nothing."""
        end = self.num_tokens + num_tokens
        self.blocks += self.pool.allocate(-(-end // self.block_size) - len(self.blocks))
        self.num_tokens = end

    def cut(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens; whole blocks behind them go back to the pool."""
        keep = -(-num_tokens // self.block_size)
        self.pool.free(self.blocks[keep:])
        del self.blocks[keep:]
        self.num_tokens = num_tokens


class DraftCache:
    """The pages of a drafter's own layers, one block table per request. Grows when it is full."""

    def __init__(self, body: llama.Llama, num_blocks: int = 64, block_size: int = 16) -> None:
        self.pool = BlockPool(num_blocks)
        self.pages = fill("cache.paged")(body, num_blocks, block_size)
        self.tables: dict[str, DraftTable] = {}

    def table(self, request_id: str) -> DraftTable:
        """Its own; a new one if it has none."""
        if request_id not in self.tables:
            self.tables[request_id] = DraftTable(self.pool, self.pages.block_size)
        return self.tables[request_id]

    def free(self, request_id: str) -> None:
        """It has none any more."""
        if table := self.tables.pop(request_id, None):
            table.cut(0)

    def append(self, table: DraftTable, num_tokens: int) -> None:
        """Room for `num_tokens` more; the cache grows where it is full."""
        try:
            table.append(num_tokens)
        except OutOfBlocks:
            self._grow(-(-num_tokens // table.block_size) + self.pool.num_blocks)
            table.append(num_tokens)

    def _grow(self, more: int) -> None:
        old, self.pool.num_blocks = self.pool.num_blocks, self.pool.num_blocks + more
        self.pool.free_queue.update(dict.fromkeys(range(old, old + more)))
        self.pool.ref_count += [0] * more
        self.pool.block_hash += [None] * more
        self.pages.layers = [
            torch.cat((layer, torch.zeros_like(layer[:, :1]).expand(-1, more, -1, -1, -1)), 1)
            for layer in self.pages.layers
        ]


# --- Drafters that write one token after another ----------------------------------------------------------------------


class AutoregressiveDrafter(Drafter):
    """Guess, feed the guess back, guess again: the draft model, early exit and EAGLE, all requests in one batch.

    Each subclass knows which rows its cache lacks when it is asked (`catch_up`), and what follows a guess.
    """

    def __init__(self, network: Network) -> None:
        assert network.body, "Medusa's heads have no layers"
        self.network, self.body = network, pack_weights(network.body)
        network.body = self.body
        self.cache = DraftCache(self.body)
        self.offset: dict[str, int] = {}  # position of the first cached row (EAGLE behind a cached prefix)

    def catch_up(self, context: DraftContext, table: DraftTable) -> tuple[list[int], torch.Tensor | None]:
        """Cut the table back to what is true, and name the tokens (and features) to compute. At least one."""
        raise NotImplementedError

    @torch.inference_mode()
    def propose(self, contexts: list[DraftContext]) -> list[Draft]:
        """What the drafter has missed in one pass [T], then one row for everybody K times."""
        tables = [self.cache.table(context.request_id) for context in contexts]
        behind = [self.catch_up(context, table) for context, table in zip(contexts, tables)]
        counts = [len(tokens) for tokens, _ in behind]
        known = [rows for _, rows in behind if rows is not None]  # of EAGLE's requests all, of others none
        features = torch.cat(known) if known else None
        token_ids = torch.tensor([t for tokens, _ in behind for t in tokens], device=self.network.target.device)
        offsets = [self.offset.get(context.request_id, 0) for context in contexts]
        rows = self.compute(tables, counts, offsets, token_ids, features)  # [T, hidden]
        last = rows[torch.tensor(list(itertools.accumulate(counts)), device=rows.device) - 1]  # [B, hidden]

        K = max(context.max_tokens for context in contexts)
        guesses: list[list[int]] = [[] for _ in contexts]
        probs: list[list[torch.Tensor]] = [[] for _ in contexts]  # of those who draw
        for j in range(K):
            token_ids, q = choose(self.network, last, contexts, j)
            for b, token in enumerate(token_ids.tolist()):
                guesses[b].append(token)
                if (drawn_from := q[b]) is not None:
                    probs[b].append(drawn_from)
            if j + 1 < K:
                last = self.compute(tables, [1] * len(contexts), offsets, token_ids, None if features is None else last)
        limits = [context.max_tokens for context in contexts]
        return [Draft(x[:n], torch.stack(q[:n]) if q[:n] else None) for x, q, n in zip(guesses, probs, limits)]

    def compute(
        self,
        tables: Sequence[DraftTable],
        counts: Sequence[int],
        offsets: Sequence[int],
        token_ids: torch.Tensor,
        features: torch.Tensor | None,
    ) -> torch.Tensor:
        """Some more tokens of each request through the drafter's layers: [T] -> features [T, hidden]."""
        for table, n in zip(tables, counts):
            self.cache.append(table, n)
        pages = self.cache.pages
        meta = AttentionMetadata.build(
            [t.blocks for t in tables], [t.num_tokens for t in tables], counts, pages.block_size, token_ids.device
        )
        shift = torch.tensor(offsets).repeat_interleave(torch.tensor(counts)).to(token_ids.device)
        positions = (meta.positions + shift).clamp(max=len(self.body.cos) - 1)
        return self.network.forward(self.network.inputs(token_ids, features), positions, pages.attend(meta))

    def forget(self, request_id: str) -> None:
        self.cache.free(request_id)
        self.offset.pop(request_id, None)


def choose(
    network: Network, features: torch.Tensor, contexts: Sequence[DraftContext], step: int
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """The next guess of each request and the distribution it was drawn from (None: it is the favourite, one-hot).

    Shapes: features [B, hidden] -> tokens int64 [B], B times [vocab] or None. A sampling request draws from
    softmax(z/T) over the draft vocabulary, with random numbers that nothing else uses.
    """
    z = network.logits(features)  # [B, draft vocab]
    token_ids = network.d2t[z.argmax(1)]
    probs: list[torch.Tensor | None] = [None] * len(contexts)
    if drawn := [b for b, context in enumerate(contexts) if context.params.temperature > 0]:
        temperature = torch.tensor([contexts[b].params.temperature for b in drawn], device=z.device)[:, None]
        q = (z[drawn].float() / temperature).softmax(1)
        seeds = [zlib.crc32(f"{contexts[b].params.seed} {contexts[b].request_id}".encode()) ^ 0xD2AF7 for b in drawn]
        u = uniforms(seeds, [len(contexts[b].token_ids) + step for b in drawn])
        token_ids[drawn] = network.d2t[draw_tokens(q, u)]
        full = torch.zeros(len(drawn), network.target.config.vocab_size, device=z.device)
        for b, row in zip(drawn, full.index_copy_(1, network.d2t, q)):
            probs[b] = row
    return token_ids, probs


class DraftModelDrafter(AutoregressiveDrafter):
    """A language model of its own. Of its cache, whatever agrees with the tokens that were accepted stays."""

    def __init__(self, network: Network) -> None:
        super().__init__(network)
        self.known: dict[str, int] = {}  # tokens that it was given when it last drafted; all of them are cached
        self.drafted: dict[str, list[int]] = {}

    def catch_up(self, context: DraftContext, table: DraftTable) -> tuple[list[int], torch.Tensor | None]:
        """Keeps the drafts that were right, cuts the rest: the tokens that it has not read, no features."""
        name, tokens = context.request_id, context.token_ids
        start = known = self.known.get(name, 0)
        for guess in self.drafted.get(name, [])[: table.num_tokens - known]:
            if start == len(tokens) - 1 or guess != tokens[start]:
                break
            start += 1
        table.cut(start)
        self.known[name] = len(tokens)
        return tokens[start:], None

    def propose(self, contexts: list[DraftContext]) -> list[Draft]:
        drafts = super().propose(contexts)
        for context, draft in zip(contexts, drafts):
            self.drafted[context.request_id] = draft.token_ids
        return drafts

    def forget(self, request_id: str) -> None:
        super().forget(request_id)
        self.known.pop(request_id, None)
        self.drafted.pop(request_id, None)


class EagleDrafter(AutoregressiveDrafter):
    """Row i of its cache is computed from the target's feature i and token i + 1. Rows of guesses were computed from
    its own features: they go, and come again from the target's."""

    needs_hidden = True

    def __init__(self, network: Network) -> None:
        super().__init__(network)
        self.true_rows: dict[str, int] = {}

    def catch_up(self, context: DraftContext, table: DraftTable) -> tuple[list[int], torch.Tensor | None]:
        """Cuts its own guesses, then: the tokens behind the target's new features [n, hidden], with those."""
        assert context.hidden is not None, "the verifier hands them to who needs them"
        name, n = context.request_id, len(context.hidden)
        if name not in self.true_rows:  # a cached prefix has no features: start behind it
            self.offset[name] = len(context.token_ids) - 1 - n
        table.cut(self.true_rows.get(name, 0))
        self.true_rows[name] = table.num_tokens + n
        return context.token_ids[-n:], context.hidden

    def forget(self, request_id: str) -> None:
        super().forget(request_id)
        self.true_rows.pop(request_id, None)


# --- One that does not ------------------------------------------------------------------------------------------------


class MedusaDrafter(Drafter):
    """Three heads on one feature: no cache, nothing to forget. At most three guesses, each the head's favourite."""

    needs_hidden = True

    def __init__(self, network: Network) -> None:
        self.network = network

    @torch.inference_mode()
    def propose(self, contexts: list[DraftContext]) -> list[Draft]:
        last = torch.stack([context.hidden[-1] for context in contexts if context.hidden is not None])  # [B, hidden]
        heads = [self.network.logits(self.network.medusa(last, k)).argmax(1) for k in range(HEADS)]
        guesses = self.network.d2t[torch.stack(heads, 1)].tolist()  # [B][heads]
        return [Draft(guess[: context.max_tokens]) for context, guess in zip(contexts, guesses)]


# --- Which one --------------------------------------------------------------------------------------------------------


DRAFTERS: dict[str, Callable[[Network], Drafter]] = {
    "draft_model": DraftModelDrafter,
    "early_exit": DraftModelDrafter,
    "medusa": MedusaDrafter,
    "eagle": EagleDrafter,
}


def make_drafter(method: str, model: llama.Llama, num_speculative_tokens: int, path: str | None = None) -> Drafter:
    """A trained drafter for `model`. `path` is a file of weights (default: the shipped ones, made for SmolLM2-135M), or
    for early_exit the number of layers (default: two thirds). Raises InputError."""
    layers = model.config.num_hidden_layers
    if method == "early_exit":
        if path is not None and (not path.isdecimal() or not 1 <= int(path) < layers):
            raise common.InputError(f"early_exit: model {path!r}: must be a number of layers from 1 to {layers - 1}")
        return DraftModelDrafter(EarlyExit(model, int(path) if path else max(1, layers * 2 // 3)))
    network = load_network(Path(path) if path else WEIGHTS / f"{method}.safetensors", model)
    if network.method != method:
        raise common.InputError(f"{path}: holds weights for {network.method}, not for {method}")
    if method == "medusa" and num_speculative_tokens > HEADS:
        raise common.InputError(f"medusa: num_speculative_tokens {num_speculative_tokens}: there are {HEADS} heads")
    return DRAFTERS[method](network)

"""Fewer KV heads in a model that exists: they are merged, and the model is trained to live with it. For lesson 09.

The GQA paper turns a checkpoint with many KV heads into one with fewer: each new head is the mean of those it replaces,
and then the model is trained on. Here is the same in minutes on a CPU, in the cheapest form of training there is: each
attention layer learns, by itself, to give the original layer's output for the same input.

  uv run python vllm/09_gqa.py --heal 4

Its curve is stored beside the lesson's own results, under a key of its own. Read for this: Ainslie et al. 2023 (GQA).
"""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import copy
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from engine.attention.torch_paged import prefill_attention
from engine.model import llama, loader
from engine.model.tokenizer import Tokenizer
from lab import recorded

KEY = "09_gqa_heal"  # in lessons/results/: a run of the lesson's own measurements does not replace it
WINDOW, HELD_OUT = 512, 10  # tokens of a window; windows that training never sees


def pool_kv_heads(model: llama.Llama, num_kv_heads: int, how: str = "mean") -> llama.Llama:
    """The model with fewer KV heads: each new one is the mean (or the first) of those it replaces, as in Ainslie et al.

    Only `qkv_proj` is new; everything else is shared with `model`, which is left alone. Raises InputError.
    """
    Hq, Hkv, D = model.num_heads, model.num_kv_heads, model.config.head_dim
    if num_kv_heads < 1 or Hkv % num_kv_heads:
        allowed = [n for n in range(1, Hkv + 1) if Hkv % n == 0]
        raise common.InputError(f"num_kv_heads is {num_kv_heads}; allowed for {Hkv} KV heads: {allowed}")
    q, kv = Hq * D, Hkv * D

    def pooled(packed: torch.Tensor) -> torch.Tensor:
        """Rows of q stay; rows of k and v [Hkv, D, …] become [num_kv_heads, D, …]."""
        parts = [packed[:q]]
        for x in packed[q:].split((kv, kv)):
            groups = x.view(num_kv_heads, Hkv // num_kv_heads, D, -1)
            merged = groups.mean(1) if how == "mean" else groups[:, 0]
            parts.append(merged.reshape(-1, *packed.shape[1:]))
        return torch.cat(parts)

    new = copy.copy(model)
    new.config = dataclasses.replace(model.config, num_key_value_heads=num_kv_heads)
    new.num_kv_heads, new.linear = num_kv_heads, dict(model.linear)
    for i in range(model.config.num_hidden_layers):
        old = model.linear[f"layers.{i}.qkv_proj"]
        bias = None if old.bias is None else pooled(old.bias)
        new.linear[f"layers.{i}.qkv_proj"] = llama.Linear(pooled(old.weight), bias)
    return new


# --- How well it predicts -------------------------------------------------------------------------------------------


@functools.cache
def corpus(tokenizer: Tokenizer, num_tokens: int | None = None) -> torch.Tensor:
    """Python's own language reference, which every Python brings along, in windows: int64 [N, WINDOW]."""
    from pydoc_data import topics

    tokens: list[int] = []
    for name in sorted(topics.topics):
        tokens += tokenizer.encode(topics.topics[name])
        if num_tokens and len(tokens) >= num_tokens:
            break
    count = (num_tokens or len(tokens)) // WINDOW
    return torch.tensor(tokens[: count * WINDOW]).view(count, WINDOW)


def without_overlap(train: torch.Tensor, held_out: torch.Tensor, run: int = 24) -> torch.Tensor:
    """The windows of `train` that have no `run` tokens in a row in common with `held_out`: topics repeat each other."""
    flat = held_out.flatten().tolist()
    known = {tuple(flat[i : i + run]) for i in range(len(flat) - run + 1)}
    kept = [w for w in train if known.isdisjoint(tuple(w[i : i + run].tolist()) for i in range(len(w) - run + 1))]
    return torch.stack(kept)


def whole_prompt(heads: Sequence[int] | None = None) -> llama.Attend:
    """An `attend` for one prompt without a cache; `heads` is a head map other than the right one."""

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if heads is not None:
            k, v = k[:, heads], v[:, heads]  # every query head its own copy, as the map says
        return prefill_attention(q, k, v)

    return attend


def perplexity(model: llama.Llama, windows: torch.Tensor, heads: Sequence[int] | None = None) -> float:
    """exp(mean −log p) of all tokens of a window [W] but its first, at most a billion: floats end. windows [N, W]."""
    total, positions = 0.0, torch.arange(windows.shape[1], device=model.device)
    for tokens in windows.to(model.device):
        logits = model.logits(model.forward(tokens, positions, whole_prompt(heads)))  # [W, vocab]
        total += F.cross_entropy(logits[:-1].float(), tokens[1:], reduction="sum").item()
    return min(1e9, math.exp(min(100.0, total / (len(windows) * (windows.shape[1] - 1)))))


# --- Training -------------------------------------------------------------------------------------------------------


def record_attention(model: llama.Llama, tokens: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(what goes into qkv_proj, what comes out of o_proj) of every layer, [T, hidden] each, for one window."""
    spy, seen = copy.copy(model), []
    spy.linear = dict(model.linear)

    def recording(layer: Callable[[torch.Tensor], torch.Tensor], inside: bool) -> Callable:
        def call(x: torch.Tensor) -> torch.Tensor:
            y = layer(x)
            seen.append(x if inside else y)
            return y

        return call

    for i in range(model.config.num_hidden_layers):
        for name, inside in (("qkv_proj", True), ("o_proj", False)):
            spy.linear[f"layers.{i}.{name}"] = recording(model.linear[f"layers.{i}.{name}"], inside)
    spy.forward(tokens, torch.arange(len(tokens), device=model.device), whole_prompt())
    return [(x.clone(), y.clone()) for x, y in zip(seen[::2], seen[1::2])]  # clones can take part in autograd


def heal(
    teacher: llama.Llama,
    student: llama.Llama,
    train: torch.Tensor,
    seconds: float,
    evaluate: Callable[[], float],
    evaluations: int = 6,
) -> list[dict[str, float]]:
    """Train the student's attention layers to do what the teacher's do. Returns the curve: seconds, tokens, perplexity.

    Each layer is a small regression of its own: given the input that the teacher's layer had, give the output that it
    gave. That needs one forward pass of the teacher and no backward pass through the model, the cheapest start there
    is. `train` [N, W] is walked in a shuffled order, again and again; `seconds` counts training, not evaluation.
    """
    names = [f"layers.{i}.{n}" for i in range(student.config.num_hidden_layers) for n in ("qkv_proj", "o_proj")]
    for name in names:
        old = student.linear[name]
        student.linear[name] = llama.Linear(old.weight.detach().clone().requires_grad_(), old.bias)
    optimizer = torch.optim.Adam([student.linear[name].weight for name in names], lr=1e-3)
    cos, sin = student.cos[: train.shape[1]], student.sin[: train.shape[1]]
    Hq, Hkv, D = student.num_heads, student.num_kv_heads, student.config.head_dim
    curve = [{"seconds": 0.0, "tokens": 0, "perplexity": evaluate()}]
    spent, tokens, order = 0.0, 0, iter(())
    while spent < seconds:
        began = time.perf_counter()
        window = next(order, None)
        if window is None:
            order = iter(train[torch.randperm(len(train))].to(student.device))
            window = next(order)
        for group in optimizer.param_groups:  # down to a tenth at the end, along a cosine
            group["lr"] = 1e-3 * (0.55 + 0.45 * math.cos(math.pi * min(1.0, spent / seconds)))
        optimizer.zero_grad()
        for i, (x, target) in enumerate(record_attention(teacher, window)):
            qkv = student.linear[f"layers.{i}.qkv_proj"](x).view(len(x), Hq + 2 * Hkv, D)
            q, k = student.queries_and_keys(i, qkv, cos, sin)
            o = prefill_attention(q, k, qkv[:, Hq + Hkv :])
            y = student.linear[f"layers.{i}.o_proj"](o.reshape(len(x), -1))
            (F.mse_loss(y, target) / target.square().mean()).backward()
        optimizer.step()
        spent += time.perf_counter() - began
        tokens += len(window)
        if spent >= min(1.0, len(curve) / evaluations) * seconds:
            curve.append({"seconds": spent, "tokens": tokens, "perplexity": evaluate()})
    return curve


def run(path_or_id: str | None, minutes: float, file: str | None, machine: Mapping[str, Any]) -> None:
    """`--heal MINUTES`: pool to one KV head, train, print the curve, store it in `file`. Raises InputError."""
    config = loader.check_context(path_or_id, WINDOW)
    if config.num_key_value_heads == 1:
        raise common.InputError(f"--heal: {path_or_id} has one KV head; it takes a model with more")
    common.heading(f"{config.num_attention_heads} query heads, one KV head: {minutes:g} minutes of training")
    model, tokenizer = loader.load(path_or_id)
    windows = corpus(tokenizer)
    held_out, train = windows[:HELD_OUT], without_overlap(windows[HELD_OUT:], windows[:HELD_OUT])
    common.say(f"{held_out.numel():,} tokens to measure on, {train.numel():,} others to train on, none in both")
    student = pool_kv_heads(model, 1)
    base = perplexity(model, held_out)
    curve = heal(model, student, train, minutes * 60, lambda: perplexity(student, held_out))
    common.table(["seconds", "tokens", "perplexity"], [[f"{x:,.0f}" for x in point.values()] for point in curve])
    common.say(f"as trained, with {model.num_kv_heads} KV heads: {base:.1f}")
    if file:
        found = {"curve": curve, "teacher": base, "train_tokens": train.numel()}
        recorded.merge_json(file, KEY, {"machine": dict(machine), **found})

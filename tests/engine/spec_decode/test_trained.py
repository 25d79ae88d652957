"""Lesson 07b: drafters that keep their books, trees checked in one pass, and what training made of them."""

from __future__ import annotations

import common

import copy
import dataclasses
import functools
import inspect
import itertools
import json
import math
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine import registry
from engine.config import SchedulerConfig, VllmConfig
from engine.core.engine_core import EngineCore
from engine.core.scheduler import make_scheduler
from engine.model import folders, llama, loader
from engine.request import Request, SamplingParams
from engine.sampling import sampler
from engine.sampling.sampler import uniforms
from engine.spec_decode import trained, verifier
from engine.spec_decode.drafters import Draft, DraftContext, Drafter, SpeculativeConfig
from engine.worker.assemble import make_runner
from lab import cli, drafts_ahead, naive
from lab import drafter_training as training
from lab import tree as trees
from lab.tree import Tree
from support.close import assert_close
from support.networks import random_network
from support.scripts import execute, script_job

lesson, page = registry.lesson("07b_trained_drafters"), cli.numbers("07b_trained_drafters")
speculative = registry.lesson("07_spec_decode")

GREEDY = SamplingParams(temperature=0)


def features_of(model: llama.Llama, tokens: list[int]) -> torch.Tensor:
    """The target's final hidden states, by one pass without a cache. [S, hidden]."""
    ids = torch.tensor(tokens, device=model.device)
    recompute = naive.recompute
    hidden = model.forward(ids, torch.arange(len(tokens), device=model.device), recompute)
    return training.final_norm(model, hidden)


def context(name: str, tokens: list[int], features: torch.Tensor | None = None, since: int = 0, most: int = 3,
            params: SamplingParams = GREEDY) -> DraftContext:  # fmt: skip
    hidden = None if features is None else features[since : len(tokens) - 1]
    return DraftContext(request_id=name, token_ids=tokens, max_tokens=most, params=params, hidden=hidden)


def drafter_for(method: str, model: llama.Llama) -> Drafter:
    if method == "early_exit":
        return trained.make_drafter(method, model, 3, "1")
    return trained.DRAFTERS[method](random_network(method, model))


# --- Drafters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", lesson.NAMES)
def test_a_drafter_that_goes_on_says_what_a_fresh_one_says(method, tiny_model):
    """Cached == recomputed: whatever was accepted, rejected or drafted for somebody else in the same batch."""
    rng, drafter = random.Random(0), drafter_for(method, tiny_model)
    texts = {name: [rng.randrange(128) for _ in range(60)] for name in "abc"}
    features = {name: features_of(tiny_model, text) for name, text in texts.items()}
    length, told = {"a": 17, "b": 3, "c": 16}, dict.fromkeys("abc", 0)
    for _ in range(6):
        batch = [name for name in "abc" if length[name] < 50]
        contexts = [context(n, texts[n][: length[n]], features[n], told[n], rng.choice([1, 3, 3])) for n in batch]
        drafts = drafter.propose(contexts)
        for name, c, draft in zip(batch, contexts, drafts):
            fresh = drafter_for(method, tiny_model).propose(
                [context(name, c.token_ids, features[name], 0, c.max_tokens)]
            )
            assert draft.token_ids == fresh[0].token_ids and len(draft.token_ids) == c.max_tokens
            told[name] = length[name] - 1
            accepted = rng.randrange(c.max_tokens + 1)  # the next text begins with some of the guesses
            texts[name][length[name] : length[name] + accepted] = draft.token_ids[:accepted]
            features[name] = features_of(tiny_model, texts[name])
            length[name] += accepted + 1
    if hasattr(drafter, "cache"):
        assert drafter.cache.pool.num_free_blocks < drafter.cache.pool.num_blocks - 1
        for name in "abc":
            drafter.forget(name)
        drafter.cache.pool.check()
        assert drafter.cache.pool.num_free_blocks == drafter.cache.pool.num_blocks - 1 and not drafter.cache.tables


def test_exit_behind_the_last_layer_is_the_target(tiny_model):
    """All layers: a perfect drafter, so every guess stands, and its cache holds what the target's holds."""
    tokens = [5, 9, 77, 12, 60]
    plain = naive.generate(tiny_model, tokens, 9)
    drafter = trained.DraftModelDrafter(trained.EarlyExit(tiny_model, 2))
    for start in (0, 4):
        draft = drafter.propose([context("a", tokens + plain[: start + 1], most=4)])[0]
        assert draft.token_ids == plain[start + 1 : start + 5]


def test_eagle_behind_a_cached_prefix(tiny_model):
    """Features come only for what was computed: the rows stand at their true positions, not at 0."""
    text = [random.Random(1).randrange(128) for _ in range(30)]
    features, drafter = features_of(tiny_model, text), drafter_for("eagle", tiny_model)
    late = drafter.propose([context("a", text, features, since=16)])[0].token_ids
    assert drafter.offset["a"] == 16
    drafter.offset["a"] = 0  # RoPE is relative: the same guesses, as long as all rows shift together
    drafter.forget("a")
    short = drafter_for("eagle", tiny_model).propose([context("b", text[16:], features[16:])])[0].token_ids
    assert late == short


@pytest.mark.parametrize("method", ["eagle", "draft_model"])
def test_a_drafter_has_a_llamas_layers_also_for_a_target_that_norms_heads(method):
    """Layers of its own have no norms but their own two; all else of the two targets is the same."""
    plain, normed = llama.random_model(), llama.random_model(qk_norm=True)
    for name in ("embed_tokens", "linear"):
        setattr(normed, name, getattr(plain, name))
    ids, outs = torch.arange(5, device=plain.device), []
    for target in (plain, normed):
        network = random_network(method, target)
        features = torch.ones(5, 80, device=plain.device) if method == "eagle" else None
        x = network.inputs(ids, features)
        outs.append(network.forward(x, ids, naive.recompute))
    assert torch.equal(*outs)


def test_guesses_that_nobody_verified_are_not_kept(tiny_model):
    """Asked again some tokens later: the rows of the old guesses go, although none of them was ever rejected."""
    text, drafter = [9, 8, 7, 6, 5], drafter_for("draft_model", tiny_model)
    guesses = drafter.propose([context("a", text)])[0].token_ids
    text += [(token + 1) % 128 for token in guesses] + [3]
    fresh = drafter_for("draft_model", tiny_model)
    assert drafter.propose([context("a", text)])[0].token_ids == fresh.propose([context("a", text)])[0].token_ids
    for layers in zip(*(one.cache.pages.layers for one in (drafter, fresh))):
        cached = [
            layer[:, one.cache.tables["a"].blocks[0], : len(text)] for one, layer in zip((drafter, fresh), layers)
        ]
        assert_close(*cached)


def test_the_cache_grows(tiny_model):
    drafter, rng = drafter_for("draft_model", tiny_model), random.Random(2)
    drafter.cache = trained.DraftCache(drafter.network.body, num_blocks=3)
    texts = [[rng.randrange(128) for _ in range(n)] for n in (20, 90, 33)]
    drafts = drafter.propose([context(str(i), text) for i, text in enumerate(texts)])
    assert drafter.cache.pool.num_blocks > 3
    drafter.cache.pool.check()
    for text, draft in zip(texts, drafts):
        assert draft.token_ids == drafter_for("draft_model", tiny_model).propose([context("x", text)])[0].token_ids


def test_medusa_reads_one_feature(tiny_model):
    network = random_network("medusa", tiny_model)
    feature = features_of(tiny_model, [3, 4, 5])
    draft = trained.MedusaDrafter(network).propose([context("a", [3, 4, 5, 6], feature)])[0]
    for k, token in enumerate(draft.token_ids):
        w = {name: network.tensors[f"heads.{k}.{name}"] for name in ("linear", "bias", "up", "down")}
        h = w["linear"] @ feature[2] + w["bias"] + w["down"] @ F.silu(w["up"] @ feature[2])
        assert token == int(network.d2t[(tiny_model.embed_tokens[network.d2t] @ h).argmax()])
    assert len(draft.token_ids) == 3 and draft.probs is None


def test_sampled_guesses_come_with_their_distribution(tiny_model):
    network = random_network("draft_model", tiny_model)
    params = SamplingParams(temperature=0.5, seed=3)
    contexts = [context(str(i), [1, 2, 3], params=params if i else GREEDY) for i in range(24)]
    drafts = trained.DraftModelDrafter(network).propose(contexts)
    assert drafts[0].probs is None
    tokens, positions = (torch.tensor(x, device=tiny_model.device) for x in ([1, 2, 3], [0, 1, 2]))
    first = network.forward(network.inputs(tokens), positions, naive.recompute)
    q = (network.logits(first[-1:])[0] / 0.5).softmax(0)
    for draft in drafts[1:]:
        assert draft.probs.shape == (3, 128)
        torch.testing.assert_close(draft.probs.sum(1), torch.ones_like(draft.probs[:, 0]))
        torch.testing.assert_close(draft.probs[0, network.d2t], q)
        assert all(draft.probs[j, token] > 0 for j, token in enumerate(draft.token_ids))
    assert len({tuple(draft.token_ids) for draft in drafts}) > 10  # each request draws its own


def test_a_short_round_has_as_many_distributions_as_guesses(tiny_model):
    """Beside one that may guess more, and one that may not guess at all."""
    params = SamplingParams(temperature=0.5, seed=3)
    contexts = [context(str(most), [1, 2, 3], most=most, params=params) for most in (3, 1, 0)]
    drafts = trained.DraftModelDrafter(random_network("draft_model", tiny_model)).propose(contexts)
    assert [len(draft.token_ids) for draft in drafts] == [3, 1, 0]
    assert [None if draft.probs is None else len(draft.probs) for draft in drafts] == [3, 1, None]


def test_guesses_are_drawn_from_what_is_reported(tiny_model):
    """3,000 seeds, two rounds of two guesses: pairs within a round and across rounds come as often as the reported q
    say. Σ|frequency − probability| has a bound that holds with probability 1 − 1e-6 (Bretagnolle–Huber–Carol)."""
    n, V = 3000, 5
    drafter = trained.DraftModelDrafter(random_network("draft_model", tiny_model, V))
    for tensor in drafter.network.tensors.values():
        tensor *= 0.5  # so that no guess is sure
    found, q, place = [], [], {int(token): i for i, token in enumerate(drafter.network.d2t)}
    for text in ([1, 2, 3], [1, 2, 3, 9, 7]):
        drafts = []
        for b in range(0, n, 500):
            batch = [context(str(i), text, most=2, params=SamplingParams(temperature=0.8, seed=i // 2))
                     for i in range(b, b + 500)]  # fmt: skip
            drafts += drafter.propose(batch)
            for one in batch:
                drafter.forget(one.request_id)
        found.append(np.array([[place[token] for token in draft.token_ids] for draft in drafts]))  # [n, 2]
        q.append(torch.stack([draft.probs for draft in drafts])[:, :, drafter.network.d2t].double().cpu().numpy())
    bound = ((V * V * math.log(2) - math.log(1e-6)) * 2 / n) ** 0.5
    assert bound < 0.15
    for (r, j), (s, k) in [((0, 0), (0, 1)), ((0, 0), (1, 0)), ((0, 1), (1, 1)), ((1, 0), (1, 1))]:
        have, want = np.zeros((V, V)), np.zeros((V, V))
        np.add.at(have, (found[r][:, j], found[s][:, k]), 1 / n)
        for a in range(V):  # what the later guess was drawn from depends on the earlier one, if it is of its round
            after = q[s][found[r][:, j] == a, k] if r == s else q[s][:, k]
            first = q[r][:, j, a].mean()
            assert 0.02 < first < 0.7, "a q as flat as this shows what is wrong"
            want[a] = first * after.mean(0)
        assert np.abs(have - want).sum() < bound, ((r, j), (s, k))


def test_random_numbers_of_guesses_are_nobody_elses(tiny_model, monkeypatch):
    """In the engine: each round's first number is new, and none of them decides or draws in verification."""
    drawn, others, choosing = {}, [], []
    choose = trained.choose

    def listening(seeds, steps):
        u = uniforms(seeds, steps)
        if choosing:
            contexts, step = choosing
            for one, number in zip(contexts, u):
                drawn.setdefault((one.request_id, step), []).append(float(number))
        else:
            others.extend(u.tolist())
        return u

    def watched(network, features, contexts, step):
        choosing[:] = contexts, step
        result = choose(network, features, contexts, step)
        choosing.clear()
        return result

    monkeypatch.setattr(trained, "choose", watched)
    monkeypatch.setattr(verifier, "uniforms", listening)
    monkeypatch.setattr(sampler, "uniforms", listening)
    monkeypatch.setattr(trained, "uniforms", listening)
    answers(tiny_model, drafter_for("draft_model", tiny_model), temperature=1.0)
    firsts = [number for (_, step), numbers in drawn.items() if step == 0 for number in numbers]
    assert len(firsts) == len(set(firsts)) > 20
    every = {number for numbers in drawn.values() for number in numbers}
    assert len(others) > 40 and every.isdisjoint(others)


def answers(tiny_model: llama.Llama, drafter: Drafter | None, temperature: float = 0.0) -> list[list[int]]:
    rng = random.Random(0)
    prompts = [[rng.randrange(128) for _ in range(n)] for n in (3, 15, 17, 40)]
    limits = SchedulerConfig(max_model_len=96, max_num_seqs=3, max_num_batched_tokens=128)
    config = SpeculativeConfig(num_speculative_tokens=3) if drafter else None
    scheduler = make_scheduler(limits, 64, 16, enable_prefix_caching=False, drafts=config)
    about = VllmConfig(speculative_config=config, plug={"drafter": lambda config, model: drafter})
    core = EngineCore(scheduler, make_runner(tiny_model, limits, 64, 16, about))
    done: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    for i, prompt in enumerate(prompts):
        params = SamplingParams(temperature=temperature, seed=i, max_tokens=16 - 4 * i, ignore_eos=True)
        core.add_request(Request(str(i), prompt, params))
    while scheduler.has_unfinished_requests():
        for output in core.step():
            done[output.request_id] += output.new_token_ids
    core.step()  # tells the runner who has finished
    assert scheduler.kv_cache_manager.block_pool.num_free_blocks == 63
    return list(done.values())


class Cuts(RuleBasedStateMachine):
    """Tables that grow and are cut, in a pool that grows."""

    @initialize()
    def start(self) -> None:
        self.cache = trained.DraftCache(llama.random_model(num_hidden_layers=1), num_blocks=4, block_size=4)
        self.lengths: dict[str, int] = {}

    @rule(name=st.sampled_from("abc"), n=st.integers(1, 20))
    def append(self, name: str, n: int) -> None:
        self.cache.append(self.cache.table(name), n)
        self.lengths[name] = self.lengths.get(name, 0) + n

    @rule(name=st.sampled_from("abc"), share=st.floats(0, 1))
    def cut(self, name: str, share: float) -> None:
        if name in self.lengths:
            self.lengths[name] = int(self.lengths[name] * share)
            self.cache.table(name).cut(self.lengths[name])

    @rule(name=st.sampled_from("abc"))
    def free(self, name: str) -> None:
        self.cache.free(name)
        self.lengths.pop(name, None)

    @invariant()
    def books(self) -> None:
        pool = self.cache.pool
        pool.check()
        used = [block for table in self.cache.tables.values() for block in table.blocks]
        assert len(used) == len(set(used)) == pool.num_blocks - 1 - pool.num_free_blocks
        for name, n in self.lengths.items():
            table = self.cache.table(name)
            assert table.num_tokens == n and len(table.blocks) == -(-n // 4)
        assert all(len(layer[0]) == pool.num_blocks for layer in self.cache.pages.layers)


TestCuts = Cuts.TestCase
TestCuts.settings = settings(max_examples=15, stateful_step_count=15)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(("eagle", 3), "another target"), (("medusa", 3), "another target"),
     (("early_exit", 3, "two"), "number of layers"), (("early_exit", 3, "2"), "from 1 to 1"),
     (("draft_model", 3, "/no/such.safetensors"), "not a drafter")],
)  # fmt: skip
def test_weights_that_do_not_fit(arguments, word, tiny_model):
    method, K, *path = arguments
    with pytest.raises(common.InputError, match=word):
        trained.make_drafter(method, tiny_model, K, *path)


def test_whoever_names_no_layers_exits_behind_two_thirds():
    for layers, first in ((2, 1), (3, 2), (4, 2), (6, 4)):
        model = llama.random_model(0, num_hidden_layers=layers)
        drafter = trained.make_drafter("early_exit", model, 3)
        assert drafter.network.body.config.num_hidden_layers == first


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"about": "not JSON"}])
def test_a_file_that_does_not_say_how_it_came_about_is_none_of_ours(tmp_path, metadata):
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / "weights.safetensors", metadata)
    with pytest.raises(common.InputError, match="not a drafter's weights"):
        trained.about(tmp_path / "weights.safetensors")


# --- Trees ----------------------------------------------------------------------------------------------------------


def random_tree(n: int, rng: random.Random, vocab: int = 5) -> Tree:
    return Tree([rng.randrange(vocab) for _ in range(n)], [-1, *(rng.randrange(i) for i in range(1, n))])


def test_masks_are_paths():
    for n in (1, 2, 9, 64):
        tree = random_tree(n, random.Random(n))
        for i in range(n):
            assert {j for j in range(n) if tree.masks[i] >> j & 1} == {0, *tree.path(i)}
            assert tree.depths[i] == len(tree.path(i))
    with pytest.raises(common.InputError, match="64"):
        random_tree(65, random.Random(0))


@pytest.mark.parametrize("size", [1, 3, 7, 20])
def test_planned_trees_are_the_best_connected_ones(size):
    ranks = [[0.5, 0.2, 0.1], [0.4, 0.3, 0.05], [0.3, 0.1, 0.02]]
    every = [n for k in (1, 2, 3) for n in itertools.product(range(3), repeat=k)]
    value = {n: math.prod(ranks[k][r] for k, r in enumerate(n)) for n in every}
    shape = trees.plan_tree(ranks, size)
    assert len(set(shape)) == size and all(n[:-1] in [(), *shape[:i]] for i, n in enumerate(shape))
    assert page.expected_path(ranks, shape) == pytest.approx(1 + sum(sorted(value.values())[-size:]))


CASES = [  # contexts, block size
    ([0], 4), ([1], 4), ([3, 4, 5], 4), ([15, 16, 17], 16), ([70, 0], 16), ([63, 64, 2], 8),
]  # fmt: skip


@pytest.mark.parametrize(("contexts", "block_size"), CASES)
def test_tree_attention_is_one_path_at_a_time(contexts, block_size, dtype):
    arguments, reference = lesson.random_trees(contexts, 1, 6, 2, 16, block_size, dtype)
    assert_close(trees.tree_attention(*arguments), reference)


@pytest.mark.parametrize(("contexts", "block_size"), CASES)
def test_tree_attention_kernel(contexts, block_size, kernels, guarded):
    (q, kv, table, bounds, lens, masks, most, longest), reference = lesson.random_trees(
        contexts, 1, 6, 2, 24, block_size
    )
    before = trees.tree_attention_kernel.launches
    q, kv, table, masks = guarded(q), guarded(kv), guarded(table), guarded(masks)
    assert_close(trees.tree_attention(q, kv, table, bounds, lens, masks, most, longest), reference)
    assert trees.tree_attention_kernel.launches == before + 1


@pytest.mark.parametrize("G", [1, 3])
def test_tree_attention_kernel_in_16_bits_and_many_nodes(G, kernels, dtype, device):
    """64 nodes: several row tiles, and a mask that uses its sign bit."""
    tree, Hkv, D = random_tree(64, random.Random(3)), 2, 16
    q, kv = (torch.randn(shape).to(device, dtype) for shape in ((64, G * Hkv, D), (2, 8, 16, Hkv, D)))
    table, lens = torch.tensor([[5, 2, 7, 1, 3, 6]], device=device).int(), torch.tensor([9], device=device).int()
    slots = [int(table[0, p // 16]) * 16 + p % 16 for p in range(9 + 64)]
    reference = lesson.tree_attention_reference(q, *kv.flatten(1, 2)[:, slots], 9, tree)
    bounds = torch.tensor([0, 64], device=device)
    out = trees.tree_attention(q, kv, table, bounds, lens, tree.mask_tensor(device), 64, 73)
    assert_close(out, reference.to(dtype))


def test_tree_attention_kernel_with_16_bits_as_they_are(kernels, half, device):
    test_tree_attention_kernel_in_16_bits_and_many_nodes(3, kernels, half, device)


@pytest.mark.parametrize("path", ["torch", "kernel"])
def test_dead_slots_may_hold_anything(path, request):
    (q, kv, table, bounds, lens, *rest), reference = lesson.random_trees([5, 2], 4, 6, 2, 24, 16)
    used = torch.zeros(kv.shape[1] * 16, dtype=torch.bool)
    for b, n in enumerate((lens + bounds.diff()).tolist()):
        used[[int(table[b, p // 16]) * 16 + p % 16 for p in range(n)]] = True
    kv.flatten(1, 2)[:, ~used] = math.nan
    if path == "kernel":
        request.getfixturevalue("kernels")
    assert_close(trees.tree_attention(q, kv, table, bounds, lens, *rest), reference)


ACCEPTED = [[[1, 2, 3]], [[3, 4, 5]], [[2, 3, -1], [5, 6, 7], [-1, -1, -1]], [[1, 7, 9]], [[4, -1, -1], [2, 5, -1]]]


@pytest.mark.parametrize("accepted", ACCEPTED)
@pytest.mark.parametrize("path", ["torch", "kernel"])
def test_accepted_nodes_move_together(accepted, path, request, guarded, device):
    if path == "kernel":
        request.getfixturevalue("kernels")
    B, size = len(accepted), 4
    blocks = (torch.randperm(4 * B) + 1).view(B, 4)
    kv, contexts = torch.randn(2, 4 * B + 1, size, 2, 20), torch.tensor([0, 3, 5][:B])
    want = kv.clone()
    for b, nodes in enumerate(accepted):
        slot = lambda p: (int(blocks[b, p // size]), p % size)  # noqa: B023, E731
        for s, node in enumerate(n for n in nodes if n > 0):
            block, offset = slot(int(contexts[b]) + 1 + s)
            source, place = slot(int(contexts[b]) + node)
            want[:, block, offset] = kv[:, source, place]
    kv = guarded(kv)
    trees.compact_slots(kv, *(x.int().to(device) for x in (blocks, contexts, torch.tensor(accepted))))
    assert torch.equal(kv.cpu(), want)


def test_blocks_beyond_31_bits(kernels, device, far):
    (q, kv, table, *rest), reference = lesson.random_trees([5, 2], 1, 6, 2, 16, 8, torch.float16)
    big, first = far(kv, 1)
    assert_close(trees.tree_attention(q, big, table + first, *rest), reference)
    trees.compact_slots(big, *(torch.tensor(x, device=device).int() for x in ([[first, first + 1]], [6], [[3]])))
    assert torch.equal(big[:, first, 7], big[:, first + 1, 1])


def test_wide_caches_move_in_several_pieces(kernels, guarded, device):
    """An 8B model's 1,024 columns and one more head: two programs per half. The last slot of all moves."""
    kv = guarded(torch.randn(2, 2, 8, 9, 128))
    want = kv.clone()
    want[:, 1, 1] = kv[:, 1, 7]
    before = trees.compact_kernel.launches
    trees.compact_slots(kv, *(torch.tensor(x, device=device).int() for x in ([[1]], [0], [[7]])))
    assert torch.equal(kv, want) and trees.compact_kernel.launches == before + 1


def test_the_longest_path_that_the_target_would_write():
    rng = random.Random(5)
    for _ in range(600):
        tree = random_tree(rng.randrange(1, 12), rng, vocab=3)
        pairs = [*zip(tree.parents[1:], tree.token_ids[1:])]
        if len(set(pairs)) < len(pairs):  # a head's choices differ
            continue
        favourite = [rng.randrange(3) for _ in tree.parents]
        path, written = trees.verify_greedy(tree, favourite)
        right = [i for i in range(1, len(tree.parents))
                 if all(tree.token_ids[j] == favourite[tree.parents[j]] for j in tree.path(i))]  # fmt: skip
        assert len(path) == max((tree.depths[i] for i in right), default=0)
        assert written == [*(tree.token_ids[i] for i in path), favourite[path[-1] if path else 0]]


# --- Exact sampling -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("distinct", [False, True])
@pytest.mark.parametrize("guesses", range(5))
def test_several_guesses_leave_the_distribution_alone(guesses, distinct):
    rng = random.Random(guesses)
    pairs = [*lesson.PAIRS.values()]
    for _ in range(4):
        rows = [[rng.choice([0, 0, 1, 2, 5]) + (i == 0) for i in range(4)] for _ in range(2)]
        pairs.append([[x / sum(row) for x in row] for row in rows])
    for p, q in pairs:
        p, q = (torch.tensor(x, dtype=torch.float64) for x in (p, q))
        written, accepted = lesson.exact_node(p, q, guesses, distinct)
        assert (written - p).abs().max() < 1e-12 and -1e-12 < accepted < 1 + 1e-12
    with lesson.broken("same-p"):
        wrong, _ = lesson.exact_node(
            *(torch.tensor(x, dtype=torch.float64) for x in lesson.PAIRS["half right"]), guesses, distinct
        )
    assert guesses < 1 or (wrong - torch.tensor([0.6, 0.3, 0.1])).abs().max() > 0.05


def test_the_script_enumerates_the_rule_as_it_is(monkeypatch, capsys):
    """`--break same-p` is noticed by step 4; whatever needs the model has a stand-in."""
    run = SimpleNamespace(token_ids=[[0] * 20] * 2, acceptance=0.0, tokens_per_step=1.0)
    tree = SimpleNamespace(token_ids=[0] * 20, passes=20, rows=20, tokens_per_pass=1.0)
    monkeypatch.setattr(loader, "load", lambda path: (None, SimpleNamespace(ask=lambda text: [1])))
    monkeypatch.setattr(lesson, "serve", lambda *args: run)
    monkeypatch.setattr(lesson, "generate_with_tree", lambda *args: tree)
    monkeypatch.setattr(trained, "load_network", lambda *args: None)
    monkeypatch.setattr(drafts_ahead, "demonstrate", lambda *args: None)
    monkeypatch.setattr(common, "HAS_TRITON", False)
    for flags, mark in ([], "✓"), (["--break", "same-p"], "✗"):
        lesson.main(flags)
        assert f"  {mark} several guesses per place, 50 cases" in capsys.readouterr().out
    monkeypatch.setattr(trees, "left_over", lambda p, token, q: p)
    with pytest.raises(common.CheckFailed, match="what is written misses p"):
        lesson.main([])


class Chance:
    """A random number that takes every side: `walk` calls a function again and again until all were taken."""

    def __init__(self) -> None:
        self.script: list[int] = []

    def walk(self, function) -> dict:
        found, todo = {}, [[]]
        while todo:
            self.script, self.taken, self.weight, self.todo = todo.pop(), [], 1.0, todo
            outcome = function()
            found[outcome] = found.get(outcome, 0.0) + self.weight
        return found

    def pick(self, weights: list[float]) -> int:
        sides = [i for i, w in enumerate(weights) if w > 0]
        step = len(self.taken)
        if step == len(self.script):
            self.todo += [[*self.taken, side] for side in sides[1:]]
            self.script = [*self.script, sides[0]]
        self.taken.append(self.script[step])
        self.weight *= weights[self.script[step]]
        return self.script[step]

    def __lt__(self, keep: float) -> bool:
        return self.pick([keep, 1 - keep]) == 0


@pytest.mark.parametrize("kind", ["one-hot", "drawn"])
def test_sampling_down_a_tree_is_sampling(kind, monkeypatch):
    """`verify_sampled` itself, every outcome of every random number: the distribution of the first three tokens."""
    chance, V, rng = Chance(), 3, random.Random(7)
    monkeypatch.setattr(trees, "draw_token", lambda p, uniform: chance.pick((p / p.sum()).tolist()))
    model = {prefix: torch.tensor([rng.choice([0, 1, 2, 4]) + (i == 1) for i in range(V)], dtype=torch.float64)
             for k in range(3) for prefix in itertools.product(range(V), repeat=k)}  # fmt: skip
    model = {prefix: w / w.sum() for prefix, w in model.items()}
    q = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)

    def one_pass() -> tuple[int, ...]:
        if kind == "one-hot":
            tree = Tree([0, 2, 1, 0, 2, 1], [-1, 0, 0, 1, 1, 2])
            source = [None] * 6
        else:  # two guesses for each of two places, drawn now
            draw = [chance.pick(q.tolist()) for _ in range(4)]
            tree, source = Tree([0, *draw], [-1, 0, 0, 1, 1]), [None, *[q] * 4]
        p = torch.stack([model[tuple(tree.token_ids[j] for j in tree.path(i))] for i in range(len(tree.parents))])
        written = trees.verify_sampled(tree, p, source, lambda: chance)[1]
        while len(written) < 3:  # and on without guesses
            written.append(chance.pick(model[tuple(written)].tolist()))
        return tuple(written)

    found = chance.walk(one_pass)
    for output in itertools.product(range(V), repeat=3):
        want = math.prod(float(model[output[:i]][token]) for i, token in enumerate(output))
        assert found.get(output, 0.0) == pytest.approx(want, abs=1e-12)


def test_draw_token_never_takes_what_is_impossible():
    p = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0], dtype=torch.float64)
    assert [trees.draw_token(p, lambda u=u: u) for u in (0.0, 0.2499, 0.2501, 0.999999)] == [1, 1, 3, 3]


# --- Decoding with trees --------------------------------------------------------------------------------------------


class Oracle:
    """Medusa heads that know the answer: choice (i + k) mod 3 of head k is right."""

    def __init__(self, model: llama.Llama, text: list[int]) -> None:
        self.text, self.features, self.d2t = text, features_of(model, text), torch.arange(model.config.vocab_size)

    def medusa(self, feature: torch.Tensor, k: int) -> tuple[int, int]:
        return int((self.features - feature).norm(dim=1).argmin()), k

    def logits(self, place: tuple[int, int]) -> torch.Tensor:
        i, k = place
        row = torch.zeros(1, len(self.d2t))
        row[0, [100, 101, 102]] = torch.tensor([3.0, 2.0, 1.0])
        if i + 2 + k < len(self.text):
            row[0, self.text[i + 2 + k]] = 3.5 - (i + k) % 3
        return row


SHAPE = [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1), (0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 1, 1)]


@pytest.fixture(scope="module")
def told():
    """A model, a prompt, what greedy decoding makes of it, and heads that know. (Tied, it would repeat one word.)"""
    model, prompt = llama.random_model(seed=3, tie_word_embeddings=False), [7, 8, 9, 10, 11, 12, 13]
    plain = naive.generate(model, prompt, 40)
    assert len(set(plain)) >= 8
    return model, prompt, plain, Oracle(model, prompt + plain)


@pytest.mark.parametrize("shape", [[], trees.chain(3), SHAPE])
def test_trees_write_what_greedy_decoding_writes(shape, told):
    model, prompt, plain, oracle = told
    run = lesson.generate_with_tree(model, oracle, shape, prompt, 30)
    assert run.token_ids == plain[:30]
    assert (run.passes == 30) == (not shape)
    if shape == SHAPE:
        assert run.passes < 22 and run.rows == (run.passes - 1) * 11


@pytest.mark.parametrize("bug", ["no-mask", "no-move"])
def test_a_broken_tree_writes_something_else(bug, told):
    model, prompt, plain, oracle = told
    with lesson.broken(bug):
        assert lesson.generate_with_tree(model, oracle, SHAPE, prompt, 30).token_ids != plain[:30]
    assert lesson.generate_with_tree(model, oracle, SHAPE, prompt, 10).token_ids == plain[:10]


def test_tree_decoding_runs_the_kernels(told, kernels):
    model, prompt, plain, oracle = told
    before = [kernel.launches for kernel in (trees.tree_attention_kernel, trees.compact_kernel)]
    run = lesson.generate_with_tree(model, oracle, SHAPE, prompt, 8)
    assert run.token_ids == plain[:8]
    after = [kernel.launches for kernel in (trees.tree_attention_kernel, trees.compact_kernel)]
    assert after[0] - before[0] == 2 * (run.passes - 1) and after[1] > before[1]


def test_sampled_trees_are_seeded(told):
    model, prompt, _, oracle = told
    runs = [lesson.generate_with_tree(model, oracle, SHAPE, prompt, 12, 1.0, seed).token_ids for seed in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2] and len(runs[0]) == 12


# --- Simulation, facts, figures -------------------------------------------------------------------------------------


def test_the_widget_writes_what_plain_decoding_writes():
    for shape, heads in itertools.product(page.SHAPES, page.SKILLS):
        trace = page.simulate({"shape": shape, "heads": heads, "bug": "none", "seed": 1})
        assert trace["written"] == trace["plain"] and trace["same"] == page.TOY_TOKENS
        assert trace["rows"] == trace["passes"] * (len(page.SHAPES[shape]) + 1)
    assert page.simulate({**page.WIDGET_DEFAULT, "shape": "nothing"})["passes"] == page.TOY_TOKENS
    json.dumps(trace)


@pytest.mark.parametrize("bug", ["no-mask", "no-move"])
def test_the_widget_breaks(bug):
    seeds = [page.simulate({**page.WIDGET_DEFAULT, "bug": bug, "seed": seed}) for seed in range(6)]
    assert all(trace["same"] < page.TOY_TOKENS for trace in seeds)


@pytest.mark.parametrize("name", ["verify_greedy", "compact_slots", "ancestor_masks", "fill_tree"])
def test_the_widget_runs_the_real_code(name, monkeypatch):
    right = page.simulate(page.WIDGET_DEFAULT)
    wrong = {
        "verify_greedy": lambda tree, favourite: ([], [favourite[0]]),
        "compact_slots": lambda *args: None,
        "ancestor_masks": lambda parents: [(2 << i) - 1 for i in range(len(parents))],
        "fill_tree": lambda shape, root, choices: Tree([root, choices[0][0]], [-1, 0]),
    }
    monkeypatch.setattr(page if hasattr(page, name) else trees, name, wrong[name])
    assert page.simulate(page.WIDGET_DEFAULT) != right


def test_facts_describe_the_shipped_files():
    known = page.facts()
    assert set(known["drafters"]) == {"eagle", "medusa", "draft_model"}
    for name, d in known["drafters"].items():
        assert d["megabytes"] < 10 and d["tokens"] > 100_000, name
        weights = (trained.WEIGHTS / f"{name}.safetensors").read_bytes()
        assert b'"F16"' in weights[:4000] and b'"F32"' not in weights[:4000]
        # Whole positions, divided once; a guess is asked for where all before it were right and the answer goes on.
        assert d["agreement"] == [right / asked for right, asked in zip(d["right"], d["asked"])], name
        assert d["right"][0] >= d["asked"][1] >= d["right"][1] >= d["asked"][2] >= d["right"][2] > 300, name
        assert d["expected"] == training.expected_tokens(d["agreement"])
    medusa = known["drafters"]["medusa"]  # the same head at the same positions: one number
    assert known["ranks"][0][0] == pytest.approx(medusa["right"][0] / medusa["asked"][0], abs=1e-6)
    assert known["exact"]["error"] < 1e-12 and known["same_p"]["distance"] > 0.05
    assert known["tree"]["15"] > known["tree"]["3"] >= known["chain"] > 1


@pytest.mark.slow  # the default run draws them once
def test_figures_are_reproducible(tmp_path):
    first, second = page.draw(tmp_path / "a"), page.draw(tmp_path / "b")
    assert [a.read_bytes() == b.read_bytes() for a, b in zip(first, second)] == [True] * len(first)
    assert {path.name for path in first} == {"07b_tree.svg", "07b_chains.svg"}


# --- Training -------------------------------------------------------------------------------------------------------


class Prompts:
    """A tokenizer for the tiny model: texts become a few tokens."""

    def ask(self, question: str) -> list[int]:
        return [ord(c) % 128 for c in question[:6]]


@pytest.fixture(scope="module")
def text(tiny_model, tmp_path_factory):
    """Some files of text that the tiny model wrote."""
    folder, patch = tmp_path_factory.mktemp("text"), pytest.MonkeyPatch()
    patch.setattr(training, "PER_FILE", 4)
    model = llama.random_model(seed=0)
    model.config = dataclasses.replace(model.config, eos_token_ids=(1,))
    training.write_text(model, Prompts(), folder, 0.012, seats=8, max_tokens=9)
    patch.undo()
    return folder


def test_written_text_holds_what_the_target_thought(text, tiny_model):
    data = training.Text(text, tiny_model.device, 1)
    assert len(data.lengths) == 4
    start = 0
    for i, n in enumerate(data.lengths.tolist()):
        tokens = data.raw_tokens[start : start + n].tolist()
        rows = slice(int(data.start[i]), int(data.start[i + 1]))
        features = features_of(tiny_model, tokens[:-1])
        assert common.relative_error(data.hidden[rows].float(), features) < 1e-3
        assert data.token[rows].tolist() == tokens[:-1] and data.next_token[rows].tolist() == tokens[1:]
        logits = F.linear(features, tiny_model.linear["lm_head"].weight)
        for j, label in enumerate(data.label[rows].tolist()):
            assert (label >= 0) == (j >= data.prompt_lengths[i] - 1)
            if label >= 0:
                top = logits[j].softmax(0).topk(16)
                assert top.indices[0] == data.top_ids[label, 0]
                torch.testing.assert_close(data.top_probs[label], top.values, rtol=5e-3, atol=1e-4)
        start += n


def test_rollout_attention_sees_its_own_past():
    N, L, Hq, Hkv, D = 2, 5, 4, 2, 8
    attend = training.rollout_attention(N, L)
    steps = [[torch.randn(N * L, heads, D) for heads in (Hq, Hkv, Hkv)] for _ in range(3)]
    outs = []
    for step in steps:
        outs.append(attend(0, *step).view(N, L, Hq, D))
        attend(1, *(torch.randn_like(x) for x in step))  # another layer's past is its own
    row = lambda s, which, n, i, h: steps[s][which].view(N, L, -1, D)[n, i, h]  # noqa: E731
    for s, n, i, h in itertools.product(range(3), range(N), range(L), range(Hq)):
        seen = [(0, j) for j in range(i + 1)] + [(r, i) for r in range(1, s + 1)]
        keys = torch.stack([row(r, 1, n, j, h // 2) for r, j in seen])
        values = torch.stack([row(r, 2, n, j, h // 2) for r, j in seen])
        want = (keys @ row(s, 0, n, i, h) / D**0.5).softmax(0) @ values
        torch.testing.assert_close(outs[s][n, i, h], want)


def test_ridge_is_least_squares():
    x = torch.randn(400, 6)
    weight, bias = torch.randn(3, 6), torch.randn(3)
    found, shift = training.ridge(x, x @ weight.T + bias, strength=1e-9)
    torch.testing.assert_close(found, weight, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(shift, bias, rtol=1e-3, atol=1e-4)


def test_the_draft_vocabulary_is_the_frequent_tokens():
    ids = np.array([5] * 9 + [3] * 7 + [8] * 5 + [1])
    assert training.choose_vocab(ids, 3, 12, keep=[11]).tolist() == [3, 5, 11]


def in_step(method: str, model: llama.Llama, text: Path) -> tuple[trained.Network, training.Text]:
    """A drafter that is right now and then: on the tiny model's embedding, one that learned nothing is never."""
    data = training.Text(text, model.device, 1)
    d2t = training.choose_vocab(data.raw_tokens.astype(np.int64), 60, 128)
    data.restrict(d2t, 128)
    trainer = training.Trainer(method, model, d2t, data, Path("/no/such/folder"), 2e-2)
    for _ in range(6):
        trainer.step(data, range(len(data.lengths)))
    weights = {name: t.detach() for name, t in trainer.network.tensors.items()}
    return trained.Network(method, model, d2t, weights), data


@pytest.mark.parametrize("method", training.METHODS)
def test_chains_are_counted_as_they_are_drafted_and_verified(method, text, tiny_model):
    """At every position: the drafter that the engine uses, asked from scratch, and the target, one token at a time."""
    network, data = in_step(method, tiny_model, text)
    favourite = functools.cache(lambda tokens: int(tiny_model.logits(
        tiny_model.forward(*(torch.tensor(x, device=tiny_model.device) for x in (tokens, range(len(tokens)))),
                           naive.recompute)[-1:]).argmax()))  # fmt: skip
    asked, right, left_the_text, start = [0] * 3, [0] * 3, 0, 0
    for n, prompt in zip(data.lengths.tolist(), data.prompt_lengths.tolist()):
        tokens = data.raw_tokens[start : start + n].tolist()
        features, start = features_of(tiny_model, tokens), start + n
        for j in range(prompt, n - 1):  # token j was sampled last
            known = tokens[: j + 1]
            drafter = trained.DRAFTERS[method](copy.copy(network))
            for k, guess in enumerate(drafter.propose([context("a", known, features)])[0].token_ids[: n - 1 - j]):
                asked[k] += 1
                if guess != favourite(tuple(known)):
                    break
                right[k] += 1
                known.append(guess)
                left_the_text += k < 2 and known != tokens[: len(known)]
    assert training.count_chains(network, data) == (asked, right)
    assert right[1] > 0 and left_the_text > 0, "or this shows nothing"


@pytest.mark.parametrize("method", training.METHODS)
def test_agreement_is_a_share_of_positions(method, text, tiny_model):
    """Whatever the batches: of 1, 2 and 3 answers, or of all."""
    network, data = in_step(method, tiny_model, text)
    split = [[0], [1, 2], [3]], [[0, 1, 2, 3]]
    parts, whole = ([training.LOSSES[method](network, data, group, 3)[1] for group in groups] for groups in split)
    assert [tuple(map(sum, zip(*column))) for column in zip(*parts)] == whole[0]
    assert all(0 < same <= rows for same, rows in whole[0][:1])
    trainer = training.Trainer(method, tiny_model, network.d2t, data, Path("/no/such/folder"))
    trainer.average = network.tensors
    for size in (1, 10_000):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(training, "BATCH", size)
            assert trainer.evaluate(data, range(4)) == [same / rows for same, rows in whole[0]]
    if method == "medusa":
        ranks = training.rank_table(network, data)
        assert [row[0] for row in ranks] == pytest.approx([same / rows for same, rows in whole[0]])


def test_tokens_per_pass_of_a_chain():
    assert training.expected_tokens([0.5, 0.4, 0.25]) == pytest.approx(1 + 0.5 + 0.2 + 0.05)
    assert training.expected_tokens([]) == 1


@pytest.mark.parametrize("method", training.METHODS)
def test_training_learns_stops_and_goes_on(method, text, tiny_model, tmp_path):
    data = training.Text(text, tiny_model.device)
    d2t = training.choose_vocab(data.raw_tokens.astype(np.int64), 60, 128)
    data.restrict(d2t, 128)
    group = list(range(4))
    trainer = training.Trainer(method, tiny_model, d2t, data, tmp_path, 1e-2)
    loss = lambda t: float(training.LOSSES[method](t.network, data, group, 3)[0].detach())  # noqa: E731
    before = loss(trainer)
    for _ in range(4):
        trainer.step(data, group)
    trainer.save()
    again = training.Trainer(method, tiny_model, d2t, data, tmp_path, 1e-2)
    assert again.state == trainer.state and again.state["steps"] == 4
    for one in (trainer, again):
        one.step(data, group)
    for name, tensor in trainer.network.tensors.items():
        assert torch.equal(tensor, again.network.tensors[name]), name
    for _ in range(8):
        trainer.step(data, group)
    assert loss(trainer) < before


def test_shipping(text, tiny_model, tmp_path, monkeypatch):
    data = training.Text(text, tiny_model.device, 1)
    training.train(tiny_model, text, tmp_path / "work", 0.0, draft_vocab=50)
    d2t = torch.load(tmp_path / "work" / "d2t.pt")
    for method in training.METHODS:
        training.Trainer(method, tiny_model, d2t, data, tmp_path / "work").save()
    paths = training.export(tiny_model, text, tmp_path / "work", tmp_path / "out")
    assert [path.stem for path in paths] == list(training.METHODS)
    for path in paths:
        network = trained.load_network(path, tiny_model)
        assert network.d2t.tolist() == d2t.tolist() and network.head.weight.shape == (50, 80)
        assert trained.make_drafter(path.stem, tiny_model, 3, str(path)).network.method == path.stem
    with pytest.raises(common.InputError, match="not for eagle"):
        trained.make_drafter("eagle", tiny_model, 3, str(tmp_path / "out" / "medusa.safetensors"))
    with pytest.raises(common.InputError, match="3 heads"):
        trained.make_drafter("medusa", tiny_model, 4, str(tmp_path / "out" / "medusa.safetensors"))
    with pytest.raises(common.InputError, match="holds no text"):
        training.Text(tmp_path, tiny_model.device)


# --- What was learned -----------------------------------------------------------------------------------------------

ANSWER = """Here is a Python function that returns the product of a list:

```python
def product(numbers):
    result = 1
    for number in numbers:
        result *= number
    return result
```

The function takes a list of numbers as input and returns the product of all the numbers in the list."""


@pytest.fixture(scope="module")
def taught(real_model):
    """A held-out prompt with a plausible answer: tokens, features, and the target's own favourite at every place."""
    model, tokenizer = real_model
    prompt = tokenizer.chat([{"role": "user", "content": training.HELD_OUT["code"][4]}])
    tokens = prompt + tokenizer.encode(ANSWER)
    features = features_of(model, tokens)
    favourite = F.linear(features, model.linear["lm_head"].weight).argmax(1).tolist()
    return model, tokens, features, favourite, range(len(prompt), len(tokens) - 1)


def first_guesses_right(drafter: Drafter, taught: tuple) -> float:
    """One request that grows by a token at a time."""
    _, tokens, features, favourite, places = taught
    right, told = 0, 0
    for n in places:
        draft = drafter.propose([context("a", tokens[: n + 1], features, told, most=1)])[0]
        right, told = right + (draft.token_ids[0] == favourite[n]), n
    return right / len(places)


@pytest.mark.parametrize(("method", "least"), [("draft_model", 0.25), ("medusa", 0.2), ("eagle", 0.3)])
def test_shipped_heads_learned_and_shuffled_ones_did_not(method, least, taught):
    network = trained.load_network(trained.WEIGHTS / f"{method}.safetensors", taught[0])
    assert first_guesses_right(trained.DRAFTERS[method](network), taught) >= least
    assert first_guesses_right(trained.DRAFTERS[method](page.shuffled(network)), taught) <= 0.05


# --- One step ahead ---------------------------------------------------------------------------------------------------


class Prophet(Drafter):
    """Knows the answers. Says `right` tokens of them, then a wrong one, if there is room; every third time, nothing."""

    def __init__(self, answers, right):
        self.answers, self.right, self.asked = answers, right, 0

    def propose(self, contexts):
        drafts = []
        for each in contexts:
            self.asked += 1
            whole = next(answer for answer in self.answers if answer[: len(each.token_ids)] == each.token_ids)
            guess = whole[len(each.token_ids) :][: self.right]
            guess += [(token + 1) % 128 for token in whole[len(each.token_ids) + len(guess) :][:1]]
            drafts.append(Draft([] if self.asked % 3 == 0 else guess[: each.max_tokens]))
        return drafts


@pytest.fixture(scope="module")
def answered(tiny_model):
    """Prompts of 3 to 40 tokens, and the 13 greedy tokens that each gets alone."""
    rng = random.Random(2)
    lengths = (3, 17, 40, 16, 15, 9, 31, 5, 8)  # nine, for eight seats
    prompts = [[rng.randrange(128) for _ in range(n)] for n in lengths]
    return prompts, [naive.generate(tiny_model, prompt, 13) for prompt in prompts]


@pytest.mark.parametrize("K", [1, 3, 5])
@pytest.mark.parametrize("right", [0, 2, 9])
def test_a_step_ahead_writes_the_same(K, right, tiny_model, answered):
    """However many stand: each row is computed where it belongs, no step is planned behind a sure end."""
    prompts, plain = answered
    whole = [[*prompt, *answer] for prompt, answer in zip(prompts, plain)]
    runs = drafts_ahead.compare_loops(tiny_model, prompts, 13, K, lambda config, model: Prophet(whole, right))
    for kind, run in runs.items():
        assert run["token_ids"] == plain, kind
        assert 0 < run["drafts"] < run["places"]
    assert runs["synchronous"]["in_vain"] == 0
    assert (runs["async"]["in_vain"] > 0) == (right > 0)  # only accepted drafts bring an end early
    assert runs["async"]["steps"] - runs["synchronous"]["steps"] in range(4)


def test_places_follow_the_batch_as_drafts_do():
    """The served engine's scheduler asks for no more places than its drafter may fill in a batch of that size."""
    config = SpeculativeConfig(num_speculative_tokens_per_batch_size=[[1, 1, 3], [2, 8, 0]])
    batching, limits = registry.lesson("04_continuous_batching"), SchedulerConfig(max_model_len=64, max_num_seqs=8)
    scheduler, planned = make_scheduler(limits, 9, 16, drafts=config, async_scheduling=True), []
    for name in ("a", "b"):
        scheduler.add_request(batching.Request(name, [1, 2], batching.SamplingParams(max_tokens=9)))
    for _ in range(2):
        scheduler.schedule()
        planned.append([request.spec_token_ids for request in scheduler.running])
        scheduler.finish_requests(["a"], batching.RequestStatus.FINISHED_ABORTED)
    assert planned == [[[], []], [[-1, -1, -1]]]


def test_rows_where_the_plan_has_them(tiny_model, answered, monkeypatch):
    """Without the worker's correction, rows behind a rejected draft would lie beyond what is known."""
    prompts, plain = answered
    whole = [[*prompt, *answer] for prompt, answer in zip(prompts, plain)]
    monkeypatch.setattr(verifier, "min", lambda planned, known: planned, raising=False)
    with pytest.raises(RuntimeError, match="a sample was lost"):
        drafts_ahead.compare_loops(tiny_model, prompts, 13, 3, lambda config, model: Prophet(whole, 1))


@pytest.fixture(scope="module")
def plain_answers(real_model):
    """To a prompt of each task."""
    return lesson.serve(*real_model, lesson.held_out(1), 48, None).token_ids


@pytest.mark.slow
@pytest.mark.parametrize("method", lesson.NAMES)
def test_on_the_real_model_answers_are_plain_ones(method, real_model, plain_answers):
    model, tokenizer = real_model
    run = lesson.serve(model, tokenizer, lesson.held_out(1), 48, lambda: trained.make_drafter(method, model, 3))
    assert run.token_ids == plain_answers
    assert run.tokens_per_step > (1.0 if method == "early_exit" else 1.2)


@pytest.mark.slow
def test_medusas_tree_on_the_real_model(real_model, plain_answers):
    model, tokenizer = real_model
    network = trained.load_network(trained.WEIGHTS / "medusa.safetensors", model)
    ids = [tokenizer.chat([{"role": "user", "content": text}]) for text in lesson.held_out(1)]
    passes = {}
    for size in (3, 15):
        shape = trees.plan_tree(page.facts()["ranks"], size)
        runs = [lesson.generate_with_tree(model, network, shape, prompt, 48) for prompt in ids]
        assert [run.token_ids for run in runs] == plain_answers
        passes[size] = sum(run.passes for run in runs)
    assert passes[15] <= passes[3]


def test_a_question_needs_no_chat_template(real_model):
    tokenizer = copy.copy(real_model[1])
    assert tokenizer.ask("Why?") == tokenizer.chat([{"role": "user", "content": "Why?"}])
    tokenizer.chat_template = None
    assert tokenizer.ask("Why?") == tokenizer.encode("Why?")
    model = llama.random_model(vocab_size=49152)
    run = lesson.serve(model, tokenizer, ["Why?"], 2, None)
    assert run.token_ids == [naive.generate(model, tokenizer.encode("Why?"), 2)]
    assert page.agreement_by_layer(model, tokenizer, ["Why?"], [2]) == {"2": 1.0}
    with pytest.raises(common.InputError, match="no chat template"):
        tokenizer.chat([])
    for part in (lesson, training):
        assert "tokenizer.chat(" not in inspect.getsource(part), "it would refuse such a model"


@pytest.mark.long
def test_its_story_without_a_chat_template(real_model, tmp_path):
    """Those of the others: test_scripts, with a model that the shipped drafters cannot serve."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in folders.model_folder().iterdir():
        (folder / file.name).symlink_to(file)
    about = json.loads((folder / "tokenizer_config.json").read_text())
    assert about.pop("chat_template")
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    done = execute(script_job("07b_trained_drafters", "--model", folder)[1])
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-2000:]


def test_what_was_trained_is_told_of_the_model_it_was_trained_for(tiny_model, monkeypatch, capsys):
    """Another model of its shapes may be the target: what is recorded is not about that one."""
    heading = common.heading

    def first(text):
        if text[0] != "1":
            raise StopIteration
        heading(text)

    monkeypatch.setattr(common, "heading", first)
    monkeypatch.setattr(loader, "check_context", lambda *args: tiny_model.config)
    monkeypatch.setattr(loader, "load", lambda name: (tiny_model, None))
    monkeypatch.setattr(trained, "load_network", lambda *args: None)
    with pytest.raises(StopIteration):
        lesson.main(["--model", "another"])
    told = capsys.readouterr().out
    assert f"text that {folders.DEFAULT_MODEL} wrote" in told and "target" not in told


@pytest.mark.long
def test_the_train_command(tmp_path, capsys, monkeypatch):
    """The whole of it, short: text, three drafters, files that load."""
    monkeypatch.setattr(training, "PER_FILE", 12)
    for flags in (["--write", "0.1"], []):  # at least one file, at least one turn for each
        lesson.main(["train", "--minutes", "0.1", "--work", str(tmp_path), *flags])
    assert (tmp_path / "eagle.safetensors").is_file() and "tokens, agreement" in capsys.readouterr().out
    assert SimpleNamespace(**trained.about(tmp_path / "medusa.safetensors")).steps > 0


def test_training_names_the_folder_that_it_cannot_use(tmp_path, capsys):
    with pytest.raises(common.InputError, match="holds no text") as error:
        training.Text(tmp_path, torch.device("cpu"))
    assert str(error.value).startswith(str(tmp_path)), "and no flag that the script does not have"
    (tmp_path / "file").write_text("")
    for flag in ("--work", "--ship"):
        with pytest.raises(SystemExit):
            lesson.build_parser().parse_args(["train", flag, str(tmp_path / "file")])
        assert f"{flag}: {tmp_path / 'file'} is not a folder" in capsys.readouterr().err

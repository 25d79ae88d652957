"""An engine from its flags: each does what it says, and all is warm before anybody is served."""

from __future__ import annotations

import common

import functools
import json
import time

import pytest

from engine import registry
from engine.engine_args import EngineArgs
from engine.llm import make_llm_engine
from engine.llm_engine import LLMEngine
from engine.model import llama
from engine.parallel.memory import kv_cache_memory
from engine.quantization.kv_codes import KV_CACHE_DTYPES, block_bytes
from engine.quantization.methods import METHODS
from engine.request import SamplingParams
from engine.serving.start import copies, make_engine, warm_up
from engine.worker import assemble, cuda_graphs
from support.latents import latent_model


@pytest.mark.parametrize(
    ("flags", "lower"),
    [({"num_gpu_blocks_override": 10**20}, "num_gpu_blocks_override"), ({"kv_cache_gib": 1e6}, "kv_cache_gib"),
     ({"block_size": 10**20}, "block_size")],
)  # fmt: skip
def test_a_cache_that_no_memory_holds_is_refused_at_once(tiny_load, flags, lower):
    """It once took minutes and all of the memory to find that out."""
    start = time.perf_counter()
    with pytest.raises(common.InputError, match=f"KV cache: .* GiB in blocks of .*; lower {lower}"):
        make_engine(EngineArgs(**{"max_model_len": 64, **flags}))
    assert time.perf_counter() - start < 5


def test_what_ranks_keep_twice_is_counted(tiny_model):
    """Two KV heads on two ranks are divided, on four copied; of latents there is one, on every rank."""
    assert [copies(tiny_model.config, n) for n in (1, 2)] == ["", ""]
    assert copies(tiny_model.config, 4) == ", 2 copies of each on 4 ranks (of 2 KV heads)"
    assert copies(latent_model().config, 2) == ", 2 copies of each on 2 ranks (latents have no heads)"


def make(**flags):
    reported = []
    engine = make_engine(EngineArgs(**{"kv_cache_gib": 0.002, "max_model_len": 64, "max_num_seqs": 4, **flags}),
                                reported.append)  # fmt: skip
    assert [line.split()[0] for line in reported] == ["device", "load", "profile", "kv", "warm-up"]
    return engine


def test_speculative_config_changes_the_engine_and_no_token(tiny_load, tiny_model, real_model):
    config = {"method": "suffix", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    engines = [make(), make(speculative_config=json.dumps(config))]
    engines.append(make_llm_engine(tiny_model, real_model[1], speculative_config=config, max_model_len=64,
                                         num_gpu_blocks_override=20, max_num_seqs=4))  # fmt: skip
    answers = []
    for engine in engines:
        engine.add_request("a", {"prompt_token_ids": [5, 6, 7] * 3}, SamplingParams(temperature=0, max_tokens=12))
        engine.add_request("b", {"prompt_token_ids": [5, 6] * 3}, SamplingParams(seed=1, max_tokens=12, logprobs=1))
        heard = []
        while engine.has_unfinished_requests():
            heard += engine.step()
        answers.append({h.request_id: (h.outputs[0].token_ids, h.outputs[0].text) for h in heard})
    assert answers[0] == answers[1] == answers[2]
    for engine in engines[1:]:
        assert engine.core.runner.drafts.config.num_speculative_tokens == 3
        assert engine.core.scheduler.spec_decoding_stats.num_accepted_tokens > 0


@pytest.mark.skipif(common.HAS_GPU, reason="there, every test of this file serves from graphs")
@pytest.mark.parametrize("flags", [{}, {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 2}'}])
def test_every_batch_size_is_captured_before_anybody_is_served(tiny_load, monkeypatch, flags):
    taped = functools.partial(cuda_graphs.CapturedModel, graph_class=cuda_graphs.Tape, largest=8)
    monkeypatch.setattr(assemble, "CapturedModel", taped)
    graphs = make(**flags).core.runner.graphs
    assert [size for size, whole in graphs.captured] == [8, 4, 2, 1] and graphs.num_replays > 0
    assert make(enforce_eager=True, **flags).core.runner.graphs is None


def answer(engine, *token_ids, **fields):
    engine.add_request("r", {"prompt_token_ids": list(token_ids)},
                       SamplingParams(**{"temperature": 0, "max_tokens": 6, "ignore_eos": True, **fields}))  # fmt: skip
    while not (outputs := engine.step()):
        pass
    return outputs[0].outputs[0].token_ids


def test_every_flag_does_what_it_says(tiny_load, tiny_model):
    engine = make()
    scheduler, manager = engine.core.scheduler, engine.core.scheduler.kv_cache_manager
    assert type(engine.core.runner.attention).__name__ == "UnifiedAttention"
    config = scheduler.config
    budget = 8192 if common.HAS_GPU else 512
    assert (config.max_model_len, config.max_num_seqs, config.max_num_batched_tokens) == (64, 4, budget)
    assert config.enable_chunked_prefill and manager.enable_caching and config.policy == "fcfs"
    block = block_bytes(tiny_model, 16, "auto")
    if not common.HAS_GPU:  # whose own memory says how many
        assert manager.block_pool.num_blocks == 1 + int(0.002 * 2**30) // block
    assert (
        not engine.has_unfinished_requests() and manager.block_pool.num_free_blocks == manager.block_pool.num_blocks - 1
    )
    reference = answer(engine, *range(40))

    other = make(max_num_batched_tokens=8, block_size=4, enable_prefix_caching=False, scheduling_policy="priority",
                 num_gpu_blocks_override=20, long_prefill_token_threshold=3)  # fmt: skip
    config, manager = other.core.scheduler.config, other.core.scheduler.kv_cache_manager
    assert (config.max_num_batched_tokens, config.policy, config.long_prefill_token_threshold) == (8, "priority", 3)
    assert (manager.block_size, manager.block_pool.num_blocks, manager.enable_caching) == (4, 20, False)
    assert answer(other, *range(40)) == reference, "chunks of 8, blocks of 4: the same tokens"
    whole = make(enable_chunked_prefill=False, max_num_batched_tokens=8).core.scheduler.config
    assert not whole.enable_chunked_prefill and whole.max_num_batched_tokens == 64, "a prompt must fit into a step"
    with pytest.raises(common.InputError, match="max_model_len"):
        make(num_gpu_blocks_override=3)
    assert make(max_model_len=None).core.scheduler.config.max_model_len == 512


def test_quantized_weights_and_cache_by_flag(tiny_load, tiny_model):
    dtype = next(dtype for dtype in KV_CACHE_DTYPES if dtype != "auto")
    engine = make(quantization=METHODS[0])
    assert any(type(layer) is not llama.Linear for layer in engine.model.linear.values())
    assert len(answer(engine, 1, 2, 3)) == 6
    plain, small = make(), make(kv_cache_dtype=dtype)
    count = lambda engine: engine.core.scheduler.kv_cache_manager.block_pool.num_blocks  # noqa: E731
    assert count(small) > 1.4 * count(plain), "the same memory holds more blocks"
    assert count(small) == 1 + int(0.002 * 2**30) // block_bytes(tiny_model, 16, dtype)
    assert len(answer(small, 1, 2, 3)) == 6


def test_the_flag_chooses_the_attention(tiny_load):
    """Lesson 02's and lesson 10's write the same tokens; what there is not is refused."""
    answers = {}
    for name in ("unified", "paged"):
        engine = make(attention_backend=name)
        assert type(engine.core.runner.attention).__name__.lower().startswith(name)
        answers[name] = answer(engine, *range(5, 40))
    assert answers["unified"] == answers["paged"]
    with pytest.raises(common.InputError, match="attention_backend 'flashy': must be one of unified, paged"):
        EngineArgs(attention_backend="flashy")


def test_graphs_unless_eager(tiny_load, monkeypatch):
    """On a CPU they change nothing; what counts is that the flag decides, and that the parts fit together."""
    monkeypatch.setattr(
        assemble, "CapturedModel", functools.partial(cuda_graphs.CapturedModel, graph_class=cuda_graphs.Tape)
    )
    graphs, eager = make(), make(enforce_eager=True)
    assert graphs.core.runner.graphs and not eager.core.runner.graphs
    assert answer(graphs, 5, 6, 7) == answer(eager, 5, 6, 7)


def test_guided_in_a_batch_with_the_others(tiny_load):
    engine, vocabulary_of = make(), registry.lesson("06b_guided_decoding").vocabulary_of
    vocabulary_of.cache_clear()
    assert answer(engine, 1, structured_outputs={"regex": "7{4}"}, ignore_eos=False)
    texts = {}
    for name, wanted in (("guided", {"regex": "[12]{3}"}), ("free", None)):
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, structured_outputs=wanted)
        engine.add_request(name, {"prompt_token_ids": [1, 2]}, params)
    while engine.has_unfinished_requests():
        texts |= {output.request_id: output.outputs[0].text for output in engine.step()}
    assert set(texts["guided"]) <= {"1", "2"} and len(texts["guided"]) == 3 and not set(texts["free"]) <= {"1", "2"}
    assert vocabulary_of.cache_info().currsize == 1, "what is checked on arrival need not be compiled again"
    engine.add_request("r", {"prompt_token_ids": [1]}, SamplingParams(structured_outputs={"regex": "7{9}"}))
    engine.step()
    engine.core.scheduler.requests["r"].append_output_token_id(1)
    with pytest.warns(UserWarning, match="breaks its grammar"):
        while engine.has_unfinished_requests():
            outputs = engine.step()
    assert outputs[0].outputs[0].finish_reason == "error", "no mask allowed that token"


@pytest.mark.parametrize(("on_gpu", "heights"), [(False, {8}), (True, {2, 4, 8, 16, 32, 62})])
def test_a_warm_up_takes_prompts_of_every_length_that_has_a_kernel(
    monkeypatch, tiny_model, real_model, on_gpu, heights
):
    """Each alone and whole: nothing of it is found in the prefix cache, or shares its step with a longer one."""
    engine = LLMEngine(tiny_model, real_model[1], max_model_len=63, num_gpu_blocks_override=9)
    found, execute = [], engine.core.runner.execute_model

    def watched(output):
        found.append(list(output.num_scheduled_tokens.values()))
        return execute(output)

    monkeypatch.setattr(engine.core.runner, "execute_model", watched)
    monkeypatch.setattr(common, "HAS_GPU", on_gpu)
    warm_up(engine)
    assert all(len(each) == 1 for each in found) and {each[0] for each in found} == heights | {1}
    assert sum(each != [1] for each in found) >= 2 * len(heights), "greedy and not"


def test_a_cache_in_bytes_comes_before_one_in_gib(tiny_load, tiny_model, monkeypatch):
    block = block_bytes(tiny_model, 16, "auto")
    assert make(kv_cache_memory_bytes=30 * block).core.scheduler.kv_cache_manager.block_pool.num_blocks == 31
    monkeypatch.setattr(common, "HAS_GPU", True)
    assert kv_cache_memory(EngineArgs(kv_cache_memory_bytes=5), tiny_model, 16) == 5, "no profile is needed"

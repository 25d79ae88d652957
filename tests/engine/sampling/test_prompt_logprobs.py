"""Prompts are scored as one pass without a cache would, in chunks and in any company."""

from __future__ import annotations

import random

import pytest
import torch

from engine.llm import make_llm_engine
from engine.llm_engine import LLMEngine
from engine.request import SamplingParams
from engine.sampling import prompt_logprobs
from lab import naive
from support.engines import free, ids


def test_prompts_are_scored_beside_drafts(tiny_model, real_model):
    """Whose rows stand between the prompt's: another request is verified in the same step."""
    config = {"method": "suffix", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    found = []
    for flags in ({}, {"speculative_config": config, "max_num_batched_tokens": 9}):
        engine = make_llm_engine(tiny_model, real_model[1], max_model_len=64, num_gpu_blocks_override=20,
                                 max_num_seqs=4, **flags)  # fmt: skip
        heard = {}
        engine.add_request("a", {"prompt_token_ids": [5, 6, 7] * 3}, SamplingParams(temperature=0, max_tokens=30))
        for _ in range(4):
            engine.step()
        params = SamplingParams(max_tokens=1, prompt_logprobs=1)
        engine.add_request("b", {"prompt_token_ids": [*range(40)]}, params)
        while engine.has_unfinished_requests():
            heard |= {output.request_id: output.prompt_logprobs for output in engine.step()}
        found.append(heard["b"][1:])
    assert engine.core.scheduler.spec_decoding_stats.num_accepted_tokens > 0
    assert len(found[0]) == len(found[1]) == 39
    for alone, beside in zip(*found, strict=True):
        assert {t: x.rank for t, x in alone.items()} == {t: x.rank for t, x in beside.items()}
        values = {t: x.logprob for t, x in alone.items()}
        assert {t: x.logprob for t, x in beside.items()} == pytest.approx(values, abs=1e-4)


def check_scores(found, model, prompt, k):
    """Against every position of one pass without a cache: `log_softmax`, and ranks by counting."""
    assert found[0] is None and len(found) == len(prompt)
    positions = torch.arange(len(prompt), device=model.device)
    hidden = model.forward(torch.tensor(prompt, device=model.device), positions, naive.recompute)
    for row, token, entry in zip(model.logits(hidden).float().log_softmax(1).cpu(), prompt[1:], found[1:]):
        assert next(iter(entry)) == token and k <= len(entry) <= k + 1
        order = row.sort(descending=True)
        assert {t for t, x in entry.items() if x.rank <= k} == set(order.indices[:k].tolist())
        for t, x in entry.items():
            assert x.logprob == pytest.approx(float(row[t]), abs=2e-4) and x.rank == int((row >= row[t]).sum())


def scored(engine, prompts, stream=False, max_tokens=4):
    """{request id: its scores}; they are told once, and in a stream with the first token."""
    for i, (prompt, k) in enumerate(prompts):
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, prompt_logprobs=k)
        engine.add_request(str(i), ids(*prompt), sampling, stream=stream)
    found, heard = {}, set()
    while engine.has_unfinished_requests():
        for output in engine.step():
            wanted = prompts[int(output.request_id)][1] is not None and output.request_id not in heard
            assert (output.prompt_logprobs is not None) == wanted
            heard.add(output.request_id)
            if output.prompt_logprobs is not None:
                assert output.request_id not in found
                found[output.request_id] = output.prompt_logprobs
    assert not engine.core.runner.prompts.scored
    return found


@pytest.mark.parametrize("rows", [1, 3, 256])
def test_prompts_are_scored_in_any_company(llm, monkeypatch, rows):
    monkeypatch.setattr(prompt_logprobs, "SCORED_ROWS", rows)
    rng = random.Random(rows)
    prompts = [
        ([rng.randrange(40, 128) for _ in range(n)], k) for n, k in ((1, 2), (2, 0), (9, 3), (12, None), (5, 20))
    ]
    found = scored(llm.llm_engine, prompts, stream=rows == 3)
    assert sorted(found) == ["0", "1", "2", "4"], "and nobody else"
    for name, scores in found.items():
        check_scores(scores, llm.llm_engine.model, *prompts[int(name)])
    decode = llm.llm_engine.tokenizer.decode
    token = prompts[2][0][1]
    assert found["2"][1][token].decoded_token == decode([token])
    assert free(llm)


def test_each_of_n_samples_comes_with_the_prompts_scores(llm):
    params = SamplingParams(n=3, max_tokens=3, prompt_logprobs=1, logprobs=1)
    (output,) = llm.generate(ids(4, 5, 6), params)
    check_scores(output.prompt_logprobs, llm.llm_engine.model, [4, 5, 6], 1)
    assert len(output.outputs) == 3 and llm.generate(ids(4, 5, 6))[0].prompt_logprobs is None
    assert free(llm)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
def test_prompts_are_scored_in_chunks_and_across_preemptions(tiny_model, real_model, seed, stream):
    """Nothing is missing and nothing is told twice, whatever is computed again; and no cached block is skipped."""
    engine = LLMEngine(
        tiny_model, real_model[1], max_model_len=40, max_num_seqs=6, max_num_batched_tokens=7, block_size=4,
        num_gpu_blocks_override=12,
    )  # fmt: skip
    rng, common_part = random.Random(seed), list(range(12))
    prompts = [
        (common_part[: rng.choice([4, 12])] + [rng.randrange(128) for _ in range(rng.randint(1, 16))], 2)
        for _ in range(10)
    ]
    preempted, preempt = [], engine.core.scheduler._preempt_request

    def watch(request, *about):
        preempted.append(request.num_computed_tokens < request.num_prompt_tokens)
        preempt(request, *about)

    engine.core.scheduler._preempt_request = watch
    found = scored(engine, prompts, stream, max_tokens=12)
    assert len(found) == 10
    for name, scores in found.items():
        check_scores(scores, tiny_model, *prompts[int(name)])
    assert any(preempted), "in the middle of a prompt"


def test_whoever_leaves_in_the_middle_of_a_prompt_leaves_no_scores(tiny_model, real_model):
    engine = LLMEngine(tiny_model, real_model[1], max_model_len=40, max_num_seqs=2, max_num_batched_tokens=8,
                    num_gpu_blocks_override=20)  # fmt: skip
    engine.add_request("a", ids(*range(20)), SamplingParams(prompt_logprobs=1))
    engine.step()
    assert len(engine.core.runner.prompts.scored["a"]) == 9
    engine.abort_request(["a"])
    engine.core.step()
    assert not engine.core.runner.prompts.scored


def test_a_scored_prompt_reads_no_cache_but_fills_it():
    assert SamplingParams(prompt_logprobs=0).skip_reading_prefix_cache is True
    assert SamplingParams().skip_reading_prefix_cache is False
    assert SamplingParams(skip_reading_prefix_cache=True).skip_reading_prefix_cache is True

"""The offline interface: any batch gives each prompt what it gets alone, and nobody can wedge the engine."""

from __future__ import annotations

import common

import dataclasses
import itertools
import json
import random
import shutil
import subprocess
import sys

import pytest

from engine.llm import LLM
from engine.model import folders
from engine.request import SamplingParams
from lab import naive
from support import scripts
from support.engines import free, ids, mixed


@pytest.mark.parametrize("speculation", [None, {"method": "ngram", "num_speculative_tokens": 2}])
def test_who_asks_again_after_ctrl_c_is_answered_right(tiny_model, real_model, monkeypatch, speculation):
    """In a notebook the engine lives on. Blocks are indexed before the model has computed what is in them."""

    options = {"tokenizer": real_model[1], "max_model_len": 96, "num_gpu_blocks_override": 20,
               "speculative_config": speculation}  # fmt: skip
    prompts, params = [list(range(5, 75))] * 2, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    want = [x.outputs[0].token_ids for x in LLM(tiny_model, **options).generate(prompts, params)]
    llm = LLM(tiny_model, **options)
    core, runs = llm.llm_engine.core, itertools.count()
    execute_model = core.runner.execute_model

    def interrupted(output):
        if next(runs) in (0, 3):
            raise KeyboardInterrupt
        return execute_model(output)

    monkeypatch.setattr(core.runner, "execute_model", interrupted)
    for _ in range(2):  # before the first step of the prompts, and later in the middle of an answer
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts, params)
        assert core.scheduler.kv_cache_manager.block_pool.num_free_blocks == 19
    for cached in (0, 64):
        found = llm.generate(prompts, params)
        assert [x.outputs[0].token_ids for x in found] == want and found[0].num_cached_tokens == cached


# --- The engine -----------------------------------------------------------------------------------------------------


def test_outputs_have_vllms_shape(llm):
    (output,) = llm.generate(ids(5, 6, 7), SamplingParams(temperature=0, max_tokens=4, logprobs=2, ignore_eos=True))
    assert output.prompt is None and output.prompt_token_ids == [5, 6, 7] and output.finished
    (answer,) = output.outputs
    assert answer.index == 0 and len(answer.token_ids) == 4 and answer.finished()
    assert (answer.finish_reason, answer.stop_reason) == ("length", None)
    assert answer.token_ids == naive.generate(llm.llm_engine.model, [5, 6, 7], 4)
    assert [next(iter(found)) for found in answer.logprobs] == answer.token_ids
    assert all(len(found) == 2 for found in answer.logprobs)
    sampled = [found[token] for found, token in zip(answer.logprobs, answer.token_ids)]
    assert answer.cumulative_logprob == pytest.approx(sum(lp.logprob for lp in sampled))
    decode = llm.llm_engine.tokenizer.decode
    assert answer.text == decode(answer.token_ids) and sampled[0].decoded_token == decode(answer.token_ids[:1])
    assert free(llm)


def test_defaults_are_vllms():
    p = SamplingParams()
    assert (p.temperature, p.top_p, p.top_k, p.max_tokens, p.n, p.logprobs) == (1.0, 1.0, 0, 16, 1, None)


@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
def test_any_batch_gives_each_request_what_it_gets_alone(llm, seed):
    requests = mixed(random.Random(seed), 12)
    together = llm.generate([prompt for prompt, _ in requests], [params for _, params in requests])
    for output, (prompt, params) in zip(together, requests):
        (alone,) = llm.generate(prompt, params)
        got, want = output.outputs[0], alone.outputs[0]
        assert (got.token_ids, got.text, got.finish_reason, got.stop_reason) == (
            want.token_ids, want.text, want.finish_reason, want.stop_reason)  # fmt: skip
    assert free(llm)


def test_the_engines_seed_decides_for_those_who_bring_none(tiny_model, real_model):
    def run(seed):
        llm = LLM(tiny_model, tokenizer=real_model[1], max_model_len=64, seed=seed, kv_cache_memory_bytes=1 << 20)
        outputs = llm.generate([ids(1)] * 3, SamplingParams(max_tokens=6, ignore_eos=True))
        return [output.outputs[0].token_ids for output in outputs]

    assert run(0) == run(0) != run(1)
    assert len(set(map(tuple, run(0)))) == 3


def test_every_way_to_stop(llm):
    def finish(**params):
        return llm.generate(ids(28, 4), SamplingParams(temperature=0, **params))[0].outputs[0]

    tokens = finish(max_tokens=12, ignore_eos=True).token_ids
    third = tokens[2]
    at = tokens.index(third)
    a = finish(max_tokens=12, stop_token_ids=[third], ignore_eos=True)
    assert (a.token_ids, a.finish_reason, a.stop_reason) == (tokens[: at + 1], "stop", third)
    assert a.text == llm.llm_engine.tokenizer.decode(tokens[:at]) == "RZ", "the stop token is not in the text"
    a = finish(max_tokens=12, stop_token_ids=[third], ignore_eos=True, include_stop_str_in_output=True)
    assert a.text == llm.llm_engine.tokenizer.decode(tokens[: at + 1]) == "RZl"
    config = llm.llm_engine.model.config
    object.__setattr__(config, "eos_token_ids", (third,))
    try:
        a = finish(max_tokens=12)
        assert (a.token_ids, a.finish_reason, a.stop_reason) == (tokens[: at + 1], "stop", None)
        assert finish(max_tokens=12, ignore_eos=True).token_ids == tokens
        assert len(finish(max_tokens=12, min_tokens=at + 2).token_ids) >= at + 2
        unused = next(token for token in range(128) if token not in tokens)
        object.__setattr__(config, "eos_token_ids", (unused, third))  # a second one: to vLLM it is a stop token
        a = finish(max_tokens=12)
        assert (a.token_ids, a.finish_reason, a.stop_reason) == (tokens[: at + 1], "stop", third)
        assert finish(max_tokens=12, ignore_eos=True).token_ids == tokens
        assert len(finish(max_tokens=12, min_tokens=at + 2).token_ids) >= at + 2
        object.__setattr__(config, "eos_token_ids", (third,))
        object.__setattr__(config, "tokenizer_has_eos", False)  # only generation_config.json has one
        a = finish(max_tokens=12)
        assert (a.token_ids, a.finish_reason, a.stop_reason) == (tokens[: at + 1], "stop", third)
        assert finish(max_tokens=12, ignore_eos=True).token_ids == tokens
    finally:
        object.__setattr__(config, "eos_token_ids", ())
        object.__setattr__(config, "tokenizer_has_eos", True)
    a = finish(max_tokens=None)
    assert (len(a.token_ids), a.finish_reason) == (64 - 2, "length"), "the context is full"
    assert free(llm)


def test_a_stop_string_ends_a_request_on_the_real_model(real_model):
    model, tokenizer = real_model
    llm = LLM(model, tokenizer=tokenizer, max_model_len=128, max_num_seqs=4, num_gpu_blocks_override=33)
    greedy = SamplingParams(temperature=0, max_tokens=6)
    text = llm.generate("The capital of France is", greedy)[0].outputs[0].text
    stop = text[3:7]  # " Paris…": begins and ends inside tokens
    for include in (False, True):
        params = SamplingParams(temperature=0, max_tokens=6, stop=[stop], include_stop_str_in_output=include)
        (answer,) = llm.generate("The capital of France is", params)[0].outputs
        end = text.index(stop) + (len(stop) if include else 0)
        assert (answer.text, answer.finish_reason, answer.stop_reason) == (text[:end], "stop", stop)
        assert tokenizer.decode(answer.token_ids).find(stop) >= 0
        assert free(llm), "the core hears of an end that only text has"
        params = dataclasses.replace(params, max_tokens=len(answer.token_ids))  # the last token completes it
        assert llm.generate("The capital of France is", params)[0].outputs == [answer] and free(llm)
    (reply,) = llm.chat([{"role": "user", "content": "Say hi."}], SamplingParams(temperature=0, max_tokens=6))
    assert reply.prompt.endswith("assistant\n") and reply.outputs[0].text
    assert reply.outputs[0].finish_reason in ("stop", "length")
    several = llm.chat([[{"role": "user", "content": "Say hi."}]] * 2, SamplingParams(temperature=0, max_tokens=3))
    assert [o.outputs[0].token_ids for o in several] == [reply.outputs[0].token_ids[:3]] * 2
    assert free(llm)


def test_prompts_of_token_ids(llm):
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    found = [
        [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        for prompts in ([ids(5, 6), ids(7)], [[5, 6], [7]], [[5, 6], ids(7)], [5, 6], [7])
    ]
    assert found[0] == found[1] == found[2] == found[3] + found[4] and len(found[0]) == 2
    assert llm.generate([], params) == []


def test_priorities(tiny_model, real_model, monkeypatch):
    """One seat: by priority, then by arrival; outputs keep their places."""
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    for policy, order in (("priority", [1, 3, 0, 2]), ("fcfs", [0, 1, 2, 3])):
        llm = LLM(tiny_model, tokenizer=real_model[1], max_num_seqs=1, scheduling_policy=policy,
                         max_model_len=64, num_gpu_blocks_override=5)  # fmt: skip
        done, step = [], llm.llm_engine.step
        monkeypatch.setattr(llm.llm_engine, "step", lambda step=step, done=done: done.extend(found := step()) or found)
        outputs = llm.generate([[5], [6], [7], [8]], params, priority=[0, -2, 0, -1])
        assert [output.prompt_token_ids[0] for output in outputs] == [5, 6, 7, 8]
        assert [output.prompt_token_ids[0] - 5 for output in done] == order
        for wrong in ([0, 1], 0.5, [0, 1, 2, "high"]):
            with pytest.raises(common.InputError, match="priority"):
                llm.generate([[5], [6], [7], [8]], params, priority=wrong)
        assert free(llm)


def test_wrong_calls(llm, tiny_model, real_model):
    for params, word in (([SamplingParams()], "sampling_params"), ("greedy", "sampling_params"),
                         (SamplingParams(logit_bias={128: 1.0}), "logit_bias"),
                         (SamplingParams(stop_token_ids=[128]), "stop_token_ids"),
                         (SamplingParams(stop_token_ids=list(range(128)), min_tokens=1), "min_tokens")):  # fmt: skip
        with pytest.raises(common.InputError, match=word):
            llm.generate([ids(1), ids(2)], params)
    with pytest.raises(common.InputError, match="structured_outputs"):
        llm.generate(ids(1), SamplingParams(structured_outputs=3))
    for about, word in (({"cache_salt": 3}, "cache_salt 3"), ({"priority": "a"}, "priority 'a'"),
                        ({"priority": 2**63}, "priority"), ({"priority": True}, "priority")):  # fmt: skip
        with pytest.raises(common.InputError, match=word):
            llm.llm_engine.add_request("x", ids(1), **about)
    with pytest.raises(common.InputError, match="cache_salt 3"):
        llm.llm_engine.add_request("x", ids(1) | {"cache_salt": 3})
    with pytest.raises(TypeError, match=r"add_request\(\) got an unexpected keyword argument 'foo'"):
        llm.llm_engine.add_request("x", ids(1), foo=1)
    for nothing in (None, 5, 0.5, b"bytes"):
        with pytest.raises(common.InputError, match=f"prompt {nothing!r}: must be a string"):
            llm.generate(nothing)
        with pytest.raises(common.InputError, match="chat template"):
            llm.chat(nothing)
    assert free(llm)
    llm.llm_engine.add_request("x", ids(1))
    with pytest.raises(common.InputError, match="'x'"):
        llm.llm_engine.add_request("x", ids(1))
    llm.llm_engine.abort_request(["x"])
    for arguments, word in (
        ({"max_model_len": 0}, "max_model_len"), ({"max_model_len": 513}, "max_model_len"),
        ({"max_num_seqs": 0}, "max_num_seqs"), ({"max_num_seqs": "4"}, "max_num_seqs"),
        ({"block_size": 1.5}, "block_size"), ({"dtype": "int8"}, "dtype"),
        ({"num_gpu_blocks_override": 3}, "num_blocks"), ({"num_gpu_blocks_override": 1}, "num_gpu_blocks_override"),
        ({"kv_cache_memory_bytes": 0}, "kv_cache_memory_bytes"), ({"scheduling_policy": "lifo"}, "policy"),
        ({"max_num_batched_tokens": 10, "max_num_seqs": 11}, "max_num_batched_tokens"),
        ({"max_num_seq": 4}, "max_num_seq"), ({"max_num_seqs": 1 << 17}, "at most 65536"),
        ({"api_server_count": 1}, "is no argument of an LLM"),
    ):  # fmt: skip
        model = None if word == "dtype" else tiny_model
        with pytest.raises(common.InputError, match=word):
            LLM(model, tokenizer=real_model[1], **arguments)
    with pytest.raises(common.InputError, match="tokenizer"):
        LLM(tiny_model)
    with pytest.raises(common.InputError, match="--tokenizer x: not a folder"):
        LLM(tiny_model, tokenizer="x")
    with pytest.raises(common.InputError, match="no-such-folder"):
        LLM("no-such-folder")


@pytest.mark.parametrize("temperature", [1e-5, 1, 2])
def test_the_extremes_of_what_is_allowed_leave_a_distribution(llm, temperature):
    """What is no number in one row would be a token that does not exist, and the end of everybody's engine."""
    extremes = [{"repetition_penalty": 0.01}, {"repetition_penalty": 100}, {"logit_bias": {1: 100.0, 2: -100.0}},
                {"top_k": 10**30}, {"top_p": 1e-300}, {"min_p": 1}, {"presence_penalty": -2, "frequency_penalty": -2},
                {"stop_token_ids": list(range(1, 128)), "min_tokens": 3},
                {"repetition_penalty": 0.01, "logit_bias": {1: 100.0}, "frequency_penalty": 2}]  # fmt: skip
    params = [SamplingParams(temperature=temperature, max_tokens=4, seed=i, **one) for i, one in enumerate(extremes)]
    outputs = [output.outputs[0].token_ids for output in llm.generate([ids(1, 2, 3)] * len(params), params)]
    assert all(tokens and max(tokens) < 128 for tokens in outputs) and free(llm)


def test_the_pool_has_the_size_that_was_asked_for(tiny_model, real_model):
    def blocks(**arguments):
        llm = LLM(tiny_model, tokenizer=real_model[1], **arguments)
        return llm.llm_engine.core.runner.cache.layers[0].shape[1]

    one = 2 * 2 * 16 * 2 * 16 * 4  # keys and values, layers, slots, heads, size, bytes
    assert blocks(kv_cache_memory_bytes=100 * one, max_model_len=64) == 101
    assert blocks(kv_cache_memory_bytes=1, max_model_len=64) == 1 + 4, "at least one sequence of max_model_len"
    assert blocks(num_gpu_blocks_override=77) == 77


# --- The source's example -------------------------------------------------------------------------------------------


EXAMPLE = """
from vllm import LLM, SamplingParams
prompts = ["Hello, my name is", "The president of the United States is"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
def main():
    llm = LLM(model="TinyLlama/TinyLlama-1.1B-Chat-v1.0")
    outputs = llm.generate(prompts, sampling_params)
    for output in outputs:
        print(output.prompt, "|", output.outputs[0].text.encode(), "|", len(output.outputs[0].token_ids))
    print(type(llm.llm_engine.core.scheduler).__module__)
if __name__ == "__main__":
    main()
"""
LOCAL = f"""
import sys
sys.path.insert(0, {str(common.HERE)!r})
import common
from engine.model import folders
folder = folders.model_folder
folders.model_folder = lambda name: folder(None) if name == "TinyLlama/TinyLlama-1.1B-Chat-v1.0" else folder(name)
sys.path.remove({str(common.HERE)!r})
"""
EXAMPLE_JOB = (("the offline example",), [sys.executable, "-c", LOCAL + EXAMPLE])


@pytest.mark.slow
def test_the_offline_example_runs_as_printed(real_model):
    """From the repository root, with nothing but the model's name resolved to the local folder."""
    done = scripts.get(EXAMPLE_JOB)
    assert done.returncode == 0, done.stderr[-2000:]
    first, second, module = done.stdout.splitlines()
    assert first.startswith("Hello, my name is | ") and second.startswith("The president of the United States is | ")
    assert 1 <= int(first.split("|")[-1]) <= 16 and module == "engine.core.scheduler"


def test_the_package_hands_on_two_names():
    code = "import vllm; vllm.nonsense"
    done = subprocess.run([sys.executable, "-c", code], cwd=common.ROOT, capture_output=True, text=True)
    assert "AttributeError" in done.stderr and "nonsense" in done.stderr and "torch" not in done.stderr


# --- What a model wishes for ------------------------------------------------------------------------------------------


def test_who_says_nothing_gets_what_the_model_wishes(tiny_model, real_model):
    about = {"tokenizer": real_model[1], "max_model_len": 64, "max_num_seqs": 2, "num_gpu_blocks_override": 20}
    wished = {"temperature": 0, "max_new_tokens": 3}
    llm = LLM(tiny_model, override_generation_config=wished, **about)
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0, max_tokens=3)
    (silent,) = llm.generate(ids(28, 4))
    (greedy,) = llm.generate(ids(28, 4), SamplingParams(temperature=0, max_tokens=3))
    assert silent.outputs[0].token_ids == greedy.outputs[0].token_ids and len(greedy.outputs[0].token_ids) == 3
    assert len(llm.generate(ids(28, 4), SamplingParams(seed=1))[0].outputs[0].token_ids) == 16, "who says something"
    assert LLM(tiny_model, **about).get_default_sampling_params() == SamplingParams()


@pytest.mark.parametrize("wanted", [-1, 128, 500])
def test_all_log_probabilities_where_they_are_allowed(tiny_model, real_model, wanted):
    params = SamplingParams(max_tokens=2, logprobs=wanted, prompt_logprobs=wanted, ignore_eos=True)
    about = {"tokenizer": real_model[1], "max_model_len": 64, "num_gpu_blocks_override": 8}
    llm = LLM(tiny_model, max_logprobs=-1, **about)
    (answer,) = llm.generate([[5, 6, 7]], params)
    assert [len(entry) for entry in answer.outputs[0].logprobs] == [128, 128]
    assert [entry and len(entry) for entry in answer.prompt_logprobs] == [None, 128, 128]
    with pytest.raises(common.InputError, match=r"logprobs .*: must be a whole number from 0 to 20"):
        LLM(tiny_model, **about).generate([[5]], params)


def test_a_context_as_long_as_the_cache(tiny_model, real_model):
    for auto in (-1, "auto"):
        llm = LLM(tiny_model, tokenizer=real_model[1], max_model_len=auto, num_gpu_blocks_override=5)
        assert llm.llm_engine.core.scheduler.config.max_model_len == 64, "four blocks of 16"
    whole = LLM(tiny_model, tokenizer=real_model[1], max_model_len="auto", num_gpu_blocks_override=40)
    assert whole.llm_engine.core.scheduler.config.max_model_len == 512, "all of the model's"


def test_somebody_elses_tokenizer(real_model, tmp_path):
    folder = folders.model_folder(None)
    (model := tmp_path / "one layer").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, tmp_path / name)
        shutil.copy(folder / name, model / name)
    text = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"chat_template": "mine"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(text))
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 1}
    (model / "config.json").write_text(json.dumps(config))
    about = {"max_model_len": 64, "load_format": "dummy", "num_gpu_blocks_override": 8}
    llm = LLM(str(model), tokenizer=str(tmp_path), **about)
    assert llm.llm_engine.tokenizer.chat_template == "mine" and llm.llm_engine.tokenizer.vocab_size == 49152
    (answer,) = llm.generate("Hi", SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
    assert len(answer.outputs[0].token_ids) == 2, "of weights at random"

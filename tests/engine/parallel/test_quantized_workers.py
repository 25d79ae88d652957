"""Quantized weights on workers: codes are cut as weights are, and every layout writes what one process writes."""

from __future__ import annotations

import common

import dataclasses
import functools
import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from engine.engine_args import EngineArgs
from engine.llm import LLM, make_llm_engine
from engine.llm_engine import LLMEngine
from engine.lora import lora_model
from engine.model import llama
from engine.parallel import stages, workers
from engine.parallel.config import ParallelConfig
from engine.parallel.layers import RowParallelLinear
from engine.parallel.pipeline import PipelineEngineCore
from engine.parallel.shards import model_tensors
from engine.parallel.stages import shard_codes
from engine.parallel.worker import WorkerSpec
from engine.quantization import formats
from engine.quantization.algorithms import rtn
from engine.quantization.checkpoints import load_checkpoint, on_codes, packed_modules
from engine.quantization.methods import CALIBRATED, METHOD_OF, METHODS, quantize_layer, quantize_model
from engine.request import SamplingParams
from lab import naive
from support import small_cores
from support.checkpoints import write_checkpoint
from support.rank_threads import WorkerThreads
from support.small_cores import remote_runner, scheduler_of
from support.tiers import and_slowly
from support.tokenizing import Words, of_characters
from support.worker_engines import LIMITS, engine_on

# Inputs of every layer are whole groups of 64 on up to four ranks.
SIZES = dict(seed=3, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=4, head_dim=32, hidden_size=128,
             intermediate_size=256, vocab_size=131)  # fmt: skip
# Shards of a matrix with one scale have one each: only whole layers are rounded as one process rounds them.
PER_TENSOR = [name for name in METHODS if METHOD_OF[name].algorithm == "per_tensor"]
ROUNDED = [name for name in METHODS if name not in (*CALIBRATED, *PER_TENSOR, "gguf", "torchao")]


def serve(source, tp, pp, method=None):
    """(tokens, parameters that ranks hold as floats) of the layout, from a folder or from random weights."""
    parallel = ParallelConfig(tp, pp)
    executor = WorkerThreads(parallel)
    spec = WorkerSpec(source, parallel, quantization=method)
    floats = executor.collective_rpc("load_model", spec)
    scheduler = scheduler_of()
    runner = remote_runner(executor, parallel, scheduler)
    tokens = small_cores.serve(PipelineEngineCore(scheduler, runner, pp))
    executor.shutdown()
    return tokens, floats


def expected(model):
    return small_cores.serve(small_cores.plain_core(model))


# --- Codes that a folder has ------------------------------------------------------------------------------------------


SYMMETRIC = {"gptq": False, "awq": False, "compressed-tensors": True, "fp8": True}
STORED_FAST = [("gptq", 4, 1), ("awq", 2, 2), ("compressed-tensors", 4, 1), ("fp8", 2, 2)]
STORED_SLOW = [pytest.param(layout, *degrees, marks=pytest.mark.slow)
               for layout in SYMMETRIC for degrees in [(4, 1), (2, 2), (1, 1), (2, 1), (1, 2)]
               if (layout, *degrees) not in STORED_FAST]  # fmt: skip


@pytest.mark.parametrize(("layout", "tp", "pp"), [*STORED_FAST, *STORED_SLOW])
def test_a_quantized_folder_on_workers_writes_what_it_writes_in_one_process(layout, tp, pp, tmp_path):
    """Four ranks share two KV heads."""
    model, _ = write_checkpoint(tmp_path, layout, SYMMETRIC[layout])
    tokens, floats = serve(str(tmp_path), tp, pp)
    assert tokens == expected(load_checkpoint(tmp_path)) != expected(model)
    c = model.config
    norms, table = (2 * c.num_hidden_layers + pp) * c.hidden_size, c.vocab_size * c.hidden_size
    assert sum(floats) == tp * norms + min(pp, 2) * table, "no float weights but norms and embedding"


def cut(whole, n, name):
    config = llama.random_model(**SIZES).config
    ranks = [SimpleNamespace(world_size=n, rank_in_group=rank) for rank in range(n)]
    return [shard_codes({f"model.layers.5.{name}": whole}, config, rank, range(4, 6)) for rank in ranks]


@pytest.mark.parametrize("format", ["int8", "int4-g64", "mxfp4", "q4_1"])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_parts_make_the_whole(format, n):
    generator, f = torch.Generator().manual_seed(0), formats.FORMATS[format]
    for name, shape, dim in (("self_attn.q_proj", (256, 128), 0), ("self_attn.k_proj", (128, 128), 0),
                             ("self_attn.o_proj", (128, 256), 1), ("mlp.up_proj", (256, 128), 0),
                             ("mlp.down_proj", (128, 256), 1)):  # fmt: skip
        whole = rtn(torch.randn(shape, generator=generator), f)
        parts = [next(iter(part.values())) for part in cut(whole, n, name)]
        assert torch.equal(torch.cat([part.dequantize() for part in parts], dim), whole.dequantize())
        assert sum(part.codes.numel() for part in parts) == whole.codes.numel()
        assert all(list(part) == [f"model.layers.1.{name}"] for part in cut(whole, n, name)), "the stage's second layer"


def test_layers_of_other_stages_are_left_out():
    whole = rtn(torch.randn(256, 128), formats.FORMATS["int8"])
    codes = {f"model.layers.{i}.self_attn.q_proj": whole for i in range(12)}
    alone = SimpleNamespace(world_size=1, rank_in_group=0)
    found = shard_codes(codes, llama.random_model(**SIZES).config, alone, range(9, 12))
    assert list(found) == [f"model.layers.{i}.self_attn.q_proj" for i in range(3)]


def test_more_ranks_than_kv_heads_share_their_codes():
    whole = rtn(torch.randn(128, 128), formats.FORMATS["int4-g64"])  # four heads of 32
    first, second = (next(iter(part.values())) for part in cut(whole, 8, "self_attn.k_proj")[2:4])
    assert torch.equal(first.dequantize(), whole.dequantize()[32:64]) and torch.equal(second.codes, first.codes)


def test_a_group_of_inputs_is_never_cut():
    whole = rtn(torch.randn(128, 192), formats.FORMATS["int4-g64"])
    with pytest.raises(common.InputError, match=r"size 2: self_attn\.o_proj is quantized in 3 groups of inputs"):
        cut(whole, 2, "self_attn.o_proj")
    assert len(cut(whole, 2, "mlp.up_proj")) == 2, "outputs can be"


# --- Rounded by those who own the weights -----------------------------------------------------------------------------


class InParts:
    """A row-parallel layer in one process: each part of the inputs meets the codes of its rank, and the sums meet."""

    weight = bias = None

    def __init__(self, layer, method, n):
        self.n = n
        parts = [RowParallelLinear.shard(layer.weight, rank, n).contiguous() for rank in range(n)]
        self.parts = [quantize_layer(part, None, METHOD_OF[method], None)[0] for part in parts]

    def __call__(self, x):
        return sum(part(piece.contiguous()) for part, piece in zip(self.parts, x.chunk(self.n, -1)))


@functools.cache
def rounded(method, tp, pp):
    return serve(SIZES, tp, pp, method)


LAYOUTS = [(2, 1), (1, 3), (4, 2)]
FAST = [
    *((method, 2, 1) for method in ROUNDED if method not in ("mxfp8", "fp8_per_channel")),
    ("int8", 1, 3),
    ("int4", 4, 2),
    ("fp8_per_tensor", 1, 3),
]
SLOW = [pytest.param(method, *layout, marks=pytest.mark.slow)
        for method in ROUNDED for layout in LAYOUTS if (method, *layout) not in FAST]  # fmt: skip


@pytest.mark.parametrize(("method", "tp", "pp"), [*FAST, *SLOW])
def test_every_rank_rounds_what_it_owns(method, tp, pp):
    model = llama.random_model(**SIZES)
    reference = quantize_model(model, method)
    for name, layer in model.linear.items():
        if tp > 1 and name.endswith(("o_proj", "down_proj")):
            reference.linear[name] = InParts(layer, method, tp)
    tokens, floats = rounded(method, tp, pp)
    assert tokens == expected(reference)
    assert max(floats) < model.num_parameters / 4, "the floats are gone"


def test_the_methods_do_round():
    exact = expected(llama.random_model(**SIZES))
    assert all(rounded(method, 2, 1)[0] != exact for method in ("int4", "mxfp4"))


def write_folder(folder, model):
    """A folder of float weights, and the tokenizer that tests share."""
    fields = dataclasses.asdict(model.config) | {"architectures": ["LlamaForCausalLM"], "eos_token_id": None}
    (folder / "config.json").write_text(json.dumps(fields))
    get = model_tensors(model)
    names = [name for name in llama.tensor_shapes(model.config) if get(name) is not None]
    save_file({name: get(name).cpu().contiguous().clone() for name in names}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("tp", "pp"), [*(pytest.param(*each, marks=pytest.mark.slow) for each in [(2, 1), (1, 2)]), (2, 2)]
)
def test_the_default_models_own_codes_on_workers(tp, pp, tmp_path, monkeypatch):
    model = llama.random_model(**SIZES)
    write_folder(tmp_path, model)
    codes = {}
    for name, layer in model.linear.items():
        parts = packed_modules(name)
        rows = [256, 128, 128] if len(parts) == 3 else [len(layer.weight) // max(1, len(parts))] * len(parts)
        for part, W in zip(parts, layer.weight.split(rows) if parts else ()):
            codes[f"model.{part}"] = rtn(W, formats.FORMATS["q4_1"])
    monkeypatch.setattr(stages, "gguf_codes", lambda config: codes)
    assert serve(str(tmp_path), tp, pp, "gguf")[0] == expected(on_codes(model, codes))


# --- As it is served --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", CALIBRATED)
def test_what_looks_at_a_whole_models_activations_is_refused(method, monkeypatch):
    monkeypatch.setattr(workers, "make_executor", lambda parallel: pytest.fail("nobody is started for it"))
    with pytest.raises(common.InputError, match=f"quantization '{method}': not on workers"):
        make_llm_engine(pipeline_parallel_size=2, quantization=method)


def test_what_the_folder_says_is_asked_before_anybody_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "make_executor", lambda parallel: pytest.fail("nobody is started for it"))
    write_checkpoint(tmp_path, "awq")
    with pytest.raises(common.InputError, match="awq weights already"):
        make_llm_engine(str(tmp_path), tensor_parallel_size=2, quantization="int8")


@pytest.mark.parametrize(("tp", "pp"), [pytest.param(2, 1, marks=pytest.mark.slow), (2, 3)])
def test_adapters_on_codes_on_workers(tp, pp, monkeypatch):
    """Lesson 12's products join those of the codes, on every rank."""
    of_characters(monkeypatch)
    model, parallel = llama.random_model(**SIZES), ParallelConfig(tp, pp)
    lora = lora_model.random_adapter(model.config, 8, seed=1)
    args = EngineArgs(enable_lora=True, max_loras=1, max_lora_rank=8)
    executor = WorkerThreads(parallel)
    engines = [
        engine_on(executor, parallel, args, sizes=SIZES, quantization="int4"),
        LLMEngine(quantize_model(model, "int4"), Words(), config=args.vllm_config(), **LIMITS),
    ]
    answers = []
    for engine in engines:
        engine.lora.add_adapter("a", lora)
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        for name in (None, "a"):
            engine.add_request(str(name), {"prompt_token_ids": [5, 9, 2]}, params, lora_name=name)
        found = {}
        while engine.has_unfinished_requests():
            found |= {output.request_id: list(output.outputs[0].token_ids) for output in engine.step()}
        answers.append(found)
    executor.shutdown()
    assert answers[0] == answers[1] and answers[0]["a"] != answers[0]["None"]


@pytest.mark.parametrize(
    ("tp", "pp", "drafter"),
    [pytest.param(2, 1, "ngram", marks=pytest.mark.slow), (2, 1, "early_exit"), (2, 3, "ngram")],
)
def test_drafts_on_codes_on_workers(tp, pp, drafter, monkeypatch):
    """What is written is what the codes say, whoever guesses (lesson 07)."""
    of_characters(monkeypatch)
    executor, parallel = WorkerThreads(ParallelConfig(tp, pp)), ParallelConfig(tp, pp)
    config = {"method": drafter, "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    args = EngineArgs(speculative_config=config | ({"model": "2"} if drafter == "early_exit" else {}))
    engine = engine_on(executor, parallel, args, sizes=SIZES, quantization="int4")
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    engine.add_request("a", {"prompt_token_ids": [5, 9, 2, 5, 9, 2]}, params)
    while engine.has_unfinished_requests():
        heard = engine.step()
    executor.shutdown()
    wanted = naive.generate(quantize_model(llama.random_model(**SIZES), "int4"), [5, 9, 2, 5, 9, 2], 16)
    assert heard[0].outputs[0].token_ids == wanted
    assert engine.core.scheduler.spec_decoding_stats.num_draft_tokens > 0


@pytest.mark.parametrize(("options", "method"), and_slowly(
    [], [({"tensor_parallel_size": 3}, "gguf")],
    [({"pipeline_parallel_size": 2}, "int8"), ({"tensor_parallel_size": 3}, "int4")],
), ids=str)  # fmt: skip
def test_the_real_model_on_workers(options, method):
    """Groups of 32 and of 64 inputs lie whole on each of three ranks, so the weights are those of one process."""

    params, answers = SamplingParams(temperature=0, max_tokens=8), []
    prompts = ["The capital of France is", "1 2 3 4 5"]
    for layout in (options, {}):
        llm = LLM(max_model_len=256, kv_cache_gib=0.1, quantization=method, **layout)
        answers.append([x.outputs[0].token_ids for x in llm.generate(prompts, params)])
        if layout:
            llm.llm_engine.core.runner.executor.shutdown()
    assert answers[0] == answers[1]

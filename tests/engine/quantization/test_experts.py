"""Experts of few bits: what they decode to, on a CPU and in the kernel, made here or read from a folder."""

from __future__ import annotations

import common

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.experts.grouped_matmul import align_block_size
from engine.experts.stacked import StackedExperts
from engine.llm import LLM
from engine.model import folders, llama
from engine.model.tokenizer import Tokenizer
from engine.quantization import grouped_dequant
from engine.quantization.algorithms import rtn
from engine.quantization.checkpoints import load_checkpoint
from engine.quantization.experts import QuantizedExperts, quantize_experts
from engine.quantization.formats import FORMATS, Format
from engine.quantization.loader import load_model
from engine.quantization.methods import CALIBRATED, METHOD_OF, METHODS, quantize_model
from engine.request import SamplingParams
from lab import naive
from lab.make_model import make_model
from support import mixtures
from support.checkpoints import QUANTIZATION, checkpoint_layer, eight_bit_layer
from support.close import assert_close
from support.latents import COMPRESSED, EXPERTS, latent_model

NAMES = ["int4-g64", "int4-g32", "int8", "fp8", "mxfp4", "mxfp8", "q4_1", "q8_0"]
SIZES = dict(seed=3, num_attention_heads=4, num_key_value_heads=2, head_dim=32, hidden_size=128, intermediate_size=128,
             moe=dataclasses.replace(mixtures.MIXTURE, intermediate_size=64, shared_intermediate_size=64,
                                     shared_gate=True))  # fmt: skip
ROUNDED = [name for name, method in METHOD_OF.items() if method.algorithm == "rtn"]


def decoded(floats, name):
    """Stacks of floats that are what the codes stand for."""
    parts = [
        torch.stack([rtn(W.float().cpu(), FORMATS[name]).dequantize() for W in stack]) for stack in floats.matrices
    ]
    return StackedExperts(floats.held, *(part.to(floats.down.device, floats.down.dtype) for part in parts))


@pytest.mark.parametrize("name", NAMES)
def test_on_a_cpu_they_are_what_they_decode_to(name):
    floats, x = mixtures.experts(5, 128, 64), torch.randn(9, 128)
    weights, ids = mixtures.choice(9, 5, 2)
    assert_close(quantize_experts(floats, FORMATS[name])(x, weights, ids), decoded(floats, name)(x, weights, ids))


FAST = ("int4-g64", "int4-g32", "int8", "mxfp4", "q4_1")


@pytest.mark.parametrize(("name", "T", "k"), [
    *(pytest.param(name, 5, 2, marks=() if name in FAST else pytest.mark.slow) for name in NAMES),
    pytest.param("int4-g64", 40, 3, marks=pytest.mark.slow), pytest.param("int8", 1, 1, marks=pytest.mark.slow),
])  # fmt: skip
def test_the_kernel_is_the_loop(name, T, k, dtype, device, kernels):
    """Tails in rows and outputs; some experts are elsewhere."""
    floats = mixtures.experts(3, 64, 64, dtype=dtype, device=device, held=range(1, 3))
    x, (weights, ids) = torch.randn(T, 64).to(device, dtype), mixtures.choice(T, 3, k, device=device)
    codes, before = quantize_experts(floats, FORMATS[name]), grouped_dequant.grouped_dequant_kernel.launches
    out = codes(x, weights, ids)
    assert grouped_dequant.grouped_dequant_kernel.launches - before == 2
    wide = decoded(dataclasses.replace(floats, gate_up=floats.gate_up.float(), down=floats.down.float()), name)
    assert_close(out, mixtures.naive(x, weights, ids, wide))


@pytest.mark.parametrize(
    ("N", "K", "group", "kind"),
    [(40, 96, 32, torch.float32), (33, 160, 32, torch.bfloat16), (70, 300, None, torch.float32)],
)
def test_tails_of_every_dimension(N, K, group, kind, device, kernels, guarded):
    """Matrices that end inside a tile, and memory that ends with them."""
    f = dataclasses.replace(FORMATS["int4-g32" if group else "int8"], group=group)
    parts = [rtn(torch.randn(N, K), f).to(device) for _ in range(3)]
    weight = QuantizedExperts(range(3), parts, parts).gate_up
    weight.codes, weight.scale = guarded(weight.codes), guarded(weight.scale)
    weight.zero = None if weight.zero is None else guarded(weight.zero)
    x, (route, ids) = guarded(torch.randn(20, K, device=device).to(kind)), mixtures.choice(20, 3, 2, device=device)
    tiles = align_block_size(ids, range(3), 16)
    tiles = tiles._replace(order=guarded(tiles.order), table=guarded(tiles.table))
    out = grouped_dequant.grouped_dequant_matmul(x, weight, tiles, 2)
    pairs = enumerate(ids.flatten().tolist())
    want = torch.stack([parts[e].dequantize() @ x[p // 2].float() for p, e in pairs])
    assert_close(out, want[tiles.order].to(kind))
    back = grouped_dequant.grouped_dequant_matmul(guarded(x[tiles.order // 2]), weight, tiles, 0, guarded(route))
    assert_close(back, (want * route.flatten()[:, None]).to(kind))


def test_an_expert_that_nobody_asks_is_not_decoded():
    codes = quantize_experts(mixtures.experts(4, 128, 64), FORMATS["int8"])
    codes(torch.randn(2, 128), torch.rand(2, 1), torch.tensor([[2], [2]]))
    assert [weight.unpacked is not None for weight in codes.gate_up.each] == [False, False, True, False]


# --- Whole models ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ROUNDED)
def test_every_method_rounds_experts_and_no_router(method):
    model = llama.random_model(device=mixtures.CPU, **SIZES)
    quantized = quantize_model(model, method)
    for i, layer in model.moe.items():
        mine = quantized.moe[i]
        assert mine.gate is layer.gate and isinstance(mine.experts, QuantizedExperts)
        want = decoded(layer.experts, METHOD_OF[method].format)
        for ours, theirs in ((mine.experts.gate_up, want.gate_up), (mine.experts.down, want.down)):
            assert all(weight.dequantize().equal(theirs[e]) for e, weight in enumerate(ours.each))
        assert quantized.linear[f"layers.{i}.shared_down_proj"].weight is None
    assert isinstance(model.moe[0].experts, StackedExperts), "the model itself is left alone"
    assert naive.generate(quantized, [5, 9, 2], 3)


@pytest.mark.parametrize("method", ["int4", "int8_per_channel_weight_only"])
def test_of_latent_attention_what_is_folded_stays_floats(method):
    """It is no product with hidden states, but between two of them."""
    mla = dataclasses.replace(COMPRESSED, q_lora_rank=64, v_head_dim=32)
    moe = dataclasses.replace(EXPERTS, intermediate_size=64, shared_intermediate_size=64)
    model = latent_model(mla, mixtures.CPU, hidden_size=128, intermediate_size=128, moe=moe)
    quantized = quantize_model(model, method)
    names = ("qkv_a_proj", "q_b_proj", "o_proj", "shared_down_proj")
    assert all(quantized.linear[f"layers.1.{name}"].weight is None for name in names)
    assert quantized.mla[1].kv_b is model.mla[1].kv_b and isinstance(quantized.moe[1].experts, QuantizedExperts)
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    llm = LLM(quantized, tokenizer=Tokenizer(folders.model_folder()), max_model_len=64, kv_cache_gib=0.05)
    found = llm.generate([{"prompt_token_ids": [5, 9, 2]}], params)[0].outputs[0].token_ids
    assert found == naive.generate(quantized, [5, 9, 2], 5)


@pytest.mark.parametrize("method", sorted(set(METHODS) - set(ROUNDED)))
def test_methods_that_look_at_each_layers_inputs_are_refused(method):
    model = llama.random_model(device=mixtures.CPU, **SIZES)
    assert method in (*CALIBRATED, "gguf", "torchao", "fp8", "fp8_per_tensor")  # or have one scale for a matrix
    with pytest.raises(
        common.InputError, match=f"--quantization {method}: not for a model with experts.*allowed: int8"
    ):
        quantize_model(model, method)


def test_groups_that_do_not_fit_are_refused():
    model = llama.random_model(device=mixtures.CPU, **SIZES | {"moe": mixtures.MIXTURE})
    with pytest.raises(common.InputError, match="groups of 64 do not divide 48 inputs"):
        quantize_model(model, "int4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "mixtral"
    make_model("mixtral", path, hidden_size=64, intermediate_size=64, num_hidden_layers=2, vocab_size=99)
    return path


def write_codes(folder, path, layout, left_out=()):
    """The folder as a quantizer of `layout` leaves it, experts and attention; and what its codes stand for."""
    tensors, expected = {}, {}
    f = Format("x", "int", 4, 32, "fp16", "int")
    for name, W in load_file(folder / "model.safetensors").items():
        kept = W.dim() == 1 or (".self_attn." not in name and ".experts." not in name)
        if kept or any(part in name for part in left_out):
            tensors[name] = W
            continue
        if layout == "fp8":
            stored, expected[name] = eight_bit_layer(layout, W)
        else:
            q = rtn(W, f)
            stored, expected[name] = checkpoint_layer(layout, q), q.dequantize()
        tensors |= {f"{name.removesuffix('.weight')}.{kind}": t.contiguous().clone() for kind, t in stored.items()}
    path.mkdir()
    config = json.loads((folder / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTIZATION[layout]}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((folder / name).read_bytes())
    save_file(tensors, path / "model.safetensors")
    return expected


@pytest.mark.parametrize("layout", ["gptq", "awq", "compressed-tensors"])
def test_a_folder_whose_experts_are_codes(folder, tmp_path, layout):
    """Under Mixtral's own names. What a step computes is what the codes stand for."""
    expected = write_codes(folder, tmp_path / "codes", layout)
    model = load_checkpoint(tmp_path / "codes")
    for i, layer in model.moe.items():
        assert isinstance(layer.experts, QuantizedExperts)
        for e in range(8):
            name = f"model.layers.{i}.block_sparse_moe.experts.{e}"
            gate_up = torch.cat([expected[f"{name}.{part}.weight"] for part in ("w1", "w3")])
            assert layer.experts.gate_up.each[e].dequantize().equal(gate_up)
            assert layer.experts.down.each[e].dequantize().equal(expected[f"{name}.w2.weight"])
    assert model.linear["layers.0.qkv_proj"].weight is None


@pytest.mark.parametrize("layout", ["fp8", pytest.param("gptq", marks=pytest.mark.slow)])
@pytest.mark.parametrize("q_lora_rank", [32, None])
def test_a_folder_with_latents(tmp_path, layout, q_lora_rank):
    """As DeepSeek publishes V3. What is folded into queries and outputs is decoded; everything else stays codes."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "vocab_size": 99,
             "q_lora_rank": q_lora_rank, "v_head_dim": 32}  # fmt: skip
    make_model("deepseek_v3", tmp_path / "floats", **sizes)
    expected = write_codes(tmp_path / "floats", tmp_path / "codes", layout)
    model = load_checkpoint(tmp_path / "codes")
    tensors = load_file(tmp_path / "floats" / "model.safetensors") | expected
    decoded = llama.Llama(model.config, renamed(tensors), device=model.device)
    assert all(model.linear[f"layers.1.{name}"].weight is None for name in ("qkv_a_proj", "o_proj"))
    assert ("layers.1.q_b_proj" in model.linear) == (q_lora_rank is not None)
    assert all(isinstance(layer.experts, QuantizedExperts) for layer in model.moe.values())
    ids, positions = torch.arange(20, device=model.device), torch.arange(20, device=model.device)
    found, want = (m.logits(m.forward(ids, positions, naive.recompute)) for m in (model, decoded))
    assert_close(found, want)


def renamed(tensors):
    """A lookup that finds DeepSeek's shared experts."""
    return lambda name: tensors.get(name, tensors.get(name.replace(".shared_expert.", ".shared_experts.")))


def test_experts_of_which_some_have_codes_are_refused(folder, tmp_path):
    write_codes(folder, tmp_path / "codes", "gptq", left_out=("experts.3.w2",))
    with pytest.raises(common.InputError, match=r"experts\.3\.down_proj has no codes, and other experts"):
        load_checkpoint(tmp_path / "codes")
    write_codes(folder, tmp_path / "attention alone", "gptq", left_out=("experts",))
    assert isinstance(load_checkpoint(tmp_path / "attention alone").moe[0].experts, StackedExperts)


@pytest.mark.parametrize(
    "method", ["int4", *(pytest.param(name, marks=pytest.mark.slow) for name in ("int8", "fp8_per_channel"))]
)
def test_an_engine_on_them(folder, method):
    model, _ = load_model(str(folder), torch.float32, method)
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    llm = LLM(str(folder), quantization=method, dtype="float32", max_model_len=64, num_gpu_blocks_override=10)
    prompts = [[5, 9, 2], [7] * 20]
    found = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    if METHOD_OF[method].activations is None or common.HAS_GPU is False:
        assert [x.outputs[0].token_ids for x in found] == [naive.generate(model, ids, 5) for ids in prompts]

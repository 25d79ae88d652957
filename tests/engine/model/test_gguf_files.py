"""A GGUF file that `--model` names: blocks of every K type become the weights that they stand for."""

from __future__ import annotations

import common

import os
import re

import gguf
import numpy as np
import pytest
import torch

from engine import registry
from engine.llm import make_llm_engine
from engine.model import folders, gguf_files, llama, loader
from engine.quantization import gguf_codes
from engine.quantization.calibration import window_attention
from engine.request import SamplingParams
from support.close import assert_close

SCALES = {"Q2_K": (80, 84), "Q3_K": (108, 110), "Q4_K": (0, 4), "Q5_K": (0, 4), "Q6_K": (208, 210)}  # their bytes
LARGEST = {"Q2_K": 3 * 15, "Q3_K": 4 * 32, "Q4_K": 15 * 63, "Q5_K": 31 * 63, "Q6_K": 32 * 127}  # code times its scale
TOKENS = ["<|end|>", "<|start|>", "!!", *(chr(0x21 + i) for i in range(94))]
SHAPES = {"attn_q": (256, 256), "attn_k": (128, 256), "attn_v": (128, 256), "attn_output": (256, 256),
          "ffn_gate": (256, 256), "ffn_up": (256, 256), "ffn_down": (256, 256)}  # fmt: skip
FIELDS = {"block_count": 2, "context_length": 128, "embedding_length": 256, "feed_forward_length": 256,
          "attention.head_count": 4, "attention.head_count_kv": 2, "rope.dimension_count": 64}  # fmt: skip


def k_blocks(kind, N, K, generator):
    """Blocks of random codes and small scales, uint8 [N, bytes of a row], weights of about 1/16."""
    size, (start, end) = gguf_codes.GGUF_BLOCKS[kind][1], SCALES[kind]
    raw = generator.integers(0, 256, (N, K // 256, size), dtype=np.uint8)
    scales = generator.uniform(0.1, 0.2, (N, K // 256, (end - start) // 2)) / LARGEST[kind]
    if end - start == 4:  # the second one is subtracted: weights of both signs
        scales[..., 1] *= {"Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}[kind]
    raw[..., start:end] = scales.astype(np.float16).view(np.uint8)
    return raw.reshape(N, -1)


def write_gguf(path, kind_of, pre="smollm", scaling=None, eos=True, tensors=()):
    """A Llama of two layers; kind_of(name of a matrix) is its type. Returns data and type of each tensor, by name."""
    generator, writer, made = np.random.default_rng(1), gguf.GGUFWriter(path, "llama"), {}
    for key, value in FIELDS.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.rope.freq_base", 10000.0)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    if scaling:
        writer.add_string("llama.rope.scaling.type", scaling)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
    writer.add_token_merges(["! !"])
    writer.add_bos_token_id(1)
    if eos:
        writer.add_eos_token_id(0)
    shapes = {"token_embd": (len(TOKENS), 256)}
    shapes |= {f"blk.{i}.{name}": shape for i in range(2) for name, shape in SHAPES.items()}
    for name, shape in shapes.items():
        kind = kind_of(name)
        made[f"{name}.weight"] = (k_blocks(kind, *shape, generator), gguf.GGMLQuantizationType[kind])
    for name in ["output_norm", *(f"blk.{i}.{norm}" for i in range(2) for norm in ("attn_norm", "ffn_norm"))]:
        norm = generator.uniform(0.5, 1.5, 256).astype(np.float32)
        made[f"{name}.weight"] = (norm, gguf.GGMLQuantizationType.F32)
    for name, (raw, kind) in (made | dict(tensors)).items():
        writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return made


def model_of(made, config):
    """The model of the weights that the gguf package decodes; rows of q and k by halves instead of neighbours."""
    weights = {}
    for name, (raw, kind) in made.items():
        W = torch.from_numpy(gguf.dequantize(raw, kind).copy())
        if "attn_q" in name or "attn_k" in name:
            heads = W.split(64)
            W = torch.cat([part for head in heads for part in (head[0::2], head[1::2])])
        weights[gguf_files._hugging_face_name(name)] = W
    return llama.Llama(config, weights.get, torch.float32)


def q4_k_m(name):
    """Its mixture: more bits for the embedding, and for some layers' v and down matrices."""
    return "Q6_K" if name == "token_embd" or name.startswith(("blk.0.attn_v", "blk.0.ffn_down")) else "Q4_K"


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache"


@pytest.mark.parametrize("kinds", ["Q4_K_M", *SCALES])
def test_a_file_answers_as_the_weights_that_its_blocks_stand_for(kinds, tmp_path):
    file = tmp_path / "small.gguf"
    made = write_gguf(file, q4_k_m if kinds == "Q4_K_M" else lambda name: kinds)
    model, tokenizer = loader.load(str(file))
    reference = model_of(made, model.config)
    ids, positions = torch.tensor([5, 2, 90, 7, 41]), torch.arange(5)
    ours, theirs = (m.logits(m.forward(ids.to(m.device), positions.to(m.device), window_attention(1)))
                    for m in (model, reference))  # fmt: skip
    assert theirs.std() > 0.01 and (theirs[1:] - theirs[:-1]).abs().amax(1).min() > 0.01, "they tell tokens apart"
    assert_close(ours, theirs)
    assert tokenizer.decode(tokenizer.encode("!!A")) == "!!A" and len(tokenizer.encode("!!A")) == 2


def test_the_engine_serves_a_file_and_converts_it_once(tmp_path, empty_cache):
    file = tmp_path / "small [Q4_K_M].gguf"
    made = write_gguf(file, q4_k_m)
    engine = make_llm_engine(str(file), max_model_len=64, num_gpu_blocks_override=10)
    engine.add_request("a", {"prompt_token_ids": [5, 2, 90]}, SamplingParams(temperature=0, max_tokens=4))
    while not (heard := engine.step()):
        pass
    reference = model_of(made, engine.model.config)
    assert heard[0].outputs[0].token_ids == registry.lesson("04_continuous_batching").generate_alone(
        reference, [5, 2, 90], 4
    )
    (folder,) = empty_cache.iterdir()
    assert folders.model_folder(str(file)) == folder
    os.utime(file, (1, 1))
    assert folders.model_folder(str(file)) != folder, "another file by the same name"


@pytest.mark.parametrize(("wrong", "message"), [
    ({"pre": "llama-bpe"}, "tokenizer.ggml.pre is 'llama-bpe'; allowed: smollm"),
    ({"scaling": "yarn"}, "llama.rope.scaling.type is 'yarn'; allowed: None, none"),
    ({"eos": False}, "field tokenizer.ggml.eos_token_id is missing"),
    ({"tensors": {"rope_freqs.weight": (np.ones(32, np.float32), gguf.GGMLQuantizationType.F32)}},
     "no Llama has a tensor 'rope_freqs.weight' here"),
    ({"tensors": {"blk.1.ffn_up.weight": (np.zeros((256, 292), np.uint8), gguf.GGMLQuantizationType.Q8_K)}},
     "blk.1.ffn_up.weight is Q8_K, which nothing here decodes"),
])  # fmt: skip
def test_what_is_not_read_is_named(wrong, message, tmp_path, empty_cache):
    file = tmp_path / "small.gguf"
    write_gguf(file, q4_k_m, **wrong)
    with pytest.raises(common.InputError, match=re.escape(f"{file}: {message}")):
        folders.model_folder(str(file))
    assert list(empty_cache.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"GG", b"{}" * 40, b"GGUF\3\0\0\0" + b"\xff" * 40])
def test_what_is_no_gguf_file_is_one_line(content, tmp_path):
    file = tmp_path / "small.gguf"
    file.write_bytes(content)
    with pytest.raises(common.InputError, match=r"small\.gguf: not readable as GGUF"):
        folders.model_folder(str(file))


def test_a_file_that_ends_early_is_one_line(tmp_path):
    file = tmp_path / "small.gguf"
    write_gguf(file, q4_k_m)
    for size in (100, 1500, file.stat().st_size - 5000):
        with open(file, "r+b") as half:
            half.truncate(size)
        with pytest.raises(common.InputError, match=r"small\.gguf: not readable as GGUF"):
            folders.model_folder(str(file))
        write_gguf(file, q4_k_m)

"""The model under every lesson: equal to Transformers, loaded from any Llama folder, prepared atomically."""

from __future__ import annotations

import common

import dataclasses
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from engine.model import folders, gguf_files, llama, loader
from engine.model.chat_template import read_chat_template
from engine.model.config import ABSENT, FAMILIES, NEUTRAL, NEUTRAL_IN, LlamaConfig, _eos_of_tokenizer
from engine.model.rope import rope_frequencies
from engine.model.tokenizer import Tokenizer
from support import scripts
from support.close import assert_close
from support.tiers import and_slowly

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea, 3 fishermen",
    "def quicksort(xs):\n    ",
    "Ünïcödé, 東京 and 🙂 are",
    "1, 1, 2, 3, 5, 8, 13,",
]


def attend(layer, q, k, v):
    """Causal attention of one sequence that starts at position 0, by PyTorch. q [T, Hq, D], k and v [T, Hkv, D]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


def logits_of(model: llama.Llama, token_ids: list[int]) -> torch.Tensor:
    """Logits after every token, [T, vocab]."""
    ids = torch.tensor(token_ids, device=model.device)
    return model.logits(model.forward(ids, torch.arange(len(token_ids), device=model.device), attend))


@pytest.fixture(scope="module")
def transformers_model():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = folders.model_folder()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().to(common.device())
    return model, AutoTokenizer.from_pretrained(folder)


# --- The real model against Transformers ----------------------------------------------------------------------------


@pytest.mark.parametrize("n", and_slowly([4], [(24,)], [(64,)]))
def test_greedy_tokens_equal_transformers(real_model, transformers_model, n):
    model, tokenizer = real_model
    theirs, their_tokenizer = transformers_model
    theirs.generation_config.eos_token_id = None  # go on to n tokens whatever the model says
    batch = their_tokenizer(PROMPTS, padding=True, padding_side="left", return_tensors="pt").to(theirs.device)
    out = theirs.generate(**batch, do_sample=False, max_new_tokens=n, pad_token_id=0)
    for prompt, mask, row in zip(PROMPTS, batch.attention_mask, out.tolist()):
        ids = tokenizer.encode(prompt)
        sequence = row[len(mask) - int(mask.sum()) :]
        assert sequence[: len(ids)] == ids and len(sequence) == len(ids) + n
        # If every next token of their sequence is our argmax given the tokens before it, ours generates the same.
        assert logits_of(model, sequence[:-1])[len(ids) - 1 :].argmax(-1).tolist() == sequence[len(ids) :]


def test_logits_equal_transformers(real_model, transformers_model):
    model, tokenizer = real_model
    theirs, _ = transformers_model
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt)
        with torch.inference_mode():
            reference = theirs(torch.tensor([ids], device=theirs.device)).logits[0]
        assert_close(logits_of(model, ids), reference)


def test_tokenizer_equals_transformers(real_model, transformers_model):
    _, ours = real_model
    _, theirs = transformers_model
    texts = [
        *PROMPTS,
        "",
        " ",
        "\n\n\t x  y",
        "a<|im_end|>b",
        "12345 67",
        "don't we've I'M",
        "\u200b\ufeff e\u0301",
        "\x00",
    ]
    for text in texts:
        assert ours.encode(text) == theirs(text).input_ids
        assert ours.decode(ours.encode(text), skip_special_tokens=False) == text
    for messages in (
        [{"role": "user", "content": "Hi"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a\nb"}],
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}, {"role": "user", "content": "Bye"}],
    ):
        for prompt in (True, False):
            text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
            assert ours.render_chat(messages, prompt) == text
            assert ours.chat(messages, prompt) == theirs(text, add_special_tokens=False).input_ids
    assert LlamaConfig.from_folder(folders.model_folder()).eos_token_ids == (theirs.eos_token_id,)


def test_digits_are_tokens_of_their_own(real_model):
    """SmolLM2's pre-tokenizer; Transformers would agree with whatever we wrote into the folder."""
    _, tokenizer = real_model
    pieces = [tokenizer.decode([i]) for i in tokenizer.encode("in 2026, 007")]
    assert pieces == ["in", " ", "2", "0", "2", "6", ",", " ", "0", "0", "7"]


def test_it_answers(real_model):
    """Rows of q and k in the wrong order (llama.cpp rotates neighbours, we halves) give tokens, but not this one."""
    model, tokenizer = real_model
    ids = tokenizer.encode("The capital of France is")
    assert tokenizer.decode([logits_of(model, ids)[-1].argmax().item()]) == " Paris"


@pytest.mark.parametrize("every", [20, pytest.param(1, marks=pytest.mark.slow)])
def test_weights_equal_the_packaged_file(every):
    """The folder holds exactly the values that the GGUF file encodes, rows of q and k reordered and nothing else."""
    import gguf

    weights = load_file(folders.model_folder() / "model.safetensors")
    reader = gguf_files.gguf_reader(folders._packaged_gguf())
    assert len(weights) == len(reader.tensors)
    some = [tensor for i, tensor in enumerate(reader.tensors) if i % every == 0 or not tensor.name.startswith("blk.")]
    kinds = [{tensor.name.split(".")[-2] for tensor in which} for which in (some, reader.tensors)]
    assert kinds[0] == kinds[1]
    for tensor in some:
        original = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        ours = weights[gguf_files._hugging_face_name(tensor.name)]
        if tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
            original, ours = original.view(-1, 64, original.shape[1]), ours.view(-1, 64, ours.shape[1])
            assert torch.equal(ours[:, :32], original[:, 0::2]) and torch.equal(ours[:, 32:], original[:, 1::2])
        else:
            assert torch.equal(ours, original)


# --- Any other Llama folder -----------------------------------------------------------------------------------------

VARIANTS = {
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "wide heads": {"head_dim": 32},
    "multi-head": {"num_key_value_heads": 4},
    "multi-query": {"num_key_value_heads": 1},
    "linear RoPE": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    "Llama 3.1 RoPE": {
        "rope_parameters": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64, "rope_theta": 5000.0,
        },
        "max_position_embeddings": 512,
    },
    "YaRN": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5000.0,
                                 "original_max_position_embeddings": 64}},
    "YaRN with all its fields": {
        "rope_parameters": {
            "rope_type": "yarn", "factor": 8.0, "rope_theta": 5000.0, "original_max_position_embeddings": 128,
            "beta_fast": 8.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 2.5, "truncate": False,
        },
        "head_dim": 32,
    },
    "YaRN with a factor for scores": {
        "rope_parameters": {
            "rope_type": "yarn", "factor": 2.0, "rope_theta": 5000.0, "attention_factor": 1.7, "truncate": False,
            "original_max_position_embeddings": 2048,
        },
        "head_dim": 32,
    },
}  # fmt: skip


@functools.cache
def small_tokenizer() -> str:
    """The default tokenizer without its merges, which take long to read: every byte is a token."""
    content = json.loads((folders.model_folder() / "tokenizer.json").read_text())
    added = len(content["added_tokens"])
    content["model"] |= {"merges": [], "vocab": {
        token: i for token, i in content["model"]["vocab"].items() if i < added or len(token) == 1
    }}  # fmt: skip
    return json.dumps(content)


def make_folder(path, seed=0, shard="1GB", kind="llama", **overrides):
    """A random model saved by Transformers, with a small tokenizer beside it; returns Transformers' model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **{
        "vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    } | overrides)  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():  # the default initialisation is too small to show a wrong bias or norm
        parameter.data += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(path, max_shard_size=shard)
    shutil.copy(folders.model_folder() / "tokenizer_config.json", path)
    (path / "tokenizer.json").write_text(small_tokenizer())
    return model


def compare_with_transformers(folder, theirs, length=120):
    model, _ = loader.load(str(folder), device=torch.device("cpu"))
    ids = torch.randint(model.config.vocab_size, (length,)).tolist()
    with torch.inference_mode():
        reference = theirs(torch.tensor([ids])).logits[0]
    assert_close(logits_of(model, ids), reference)
    return model


@pytest.mark.parametrize("name", VARIANTS)
def test_other_llamas_equal_transformers(tmp_path, name):
    compare_with_transformers(tmp_path, make_folder(tmp_path, **VARIANTS[name]))


@pytest.mark.parametrize("kind", ["mistral", "qwen2", "qwen3"])
def test_llamas_by_another_name(tmp_path, kind):
    theirs = make_folder(tmp_path, kind=kind, sliding_window=None, tie_word_embeddings=True)
    model = compare_with_transformers(tmp_path, theirs)
    assert model.num_parameters == sum(p.numel() for p in theirs.parameters())


WINDOWS = {  # kind of model, what its config says: the windows of its layers that hide something
    "mistral, shorter than the context": ("mistral", {"sliding_window": 16}, (16, 16, 16)),
    "mistral, as long as the context": ("mistral", {"sliding_window": 256}, ()),
    "mistral, by default, in a long context": ("mistral", {"max_position_embeddings": 8192}, (4096,) * 3),
    "mistral, by default, in a short one": ("mistral", {}, ()),
    "mistral, 0": ("mistral", {"sliding_window": 0}, ()),  # vLLM; Transformers would hide everything
    "qwen2, not used": ("qwen2", {"sliding_window": 16}, ()),
    "qwen2, in the last layer": (
        "qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 2}, (None, None, 16)),
    "qwen3, behind the last layer": (
        "qwen3", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 3}, ()),
    "qwen3, by type": (
        "qwen3", {"sliding_window": 16, "use_sliding_window": True,
                  "layer_types": ["full_attention", "sliding_attention", "full_attention"]}, (None, 16, None)),
    "llama, by type": ("llama", {"sliding_window": 16, "layer_types": ["sliding_attention"] * 3}, None),  # vLLM
    "llama, no layer": ("llama", {"sliding_window": 16}, ()),
}  # fmt: skip


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_that_hide_something_are_known(tmp_path, name):
    """`test_windows.py` has models with some; a Llama has none, whatever vLLM makes of such a config."""
    from transformers import AutoModelForCausalLM

    kind, said, windows = WINDOWS[name]
    make_folder(tmp_path, kind=kind, sliding_window=None)
    config = json.loads((tmp_path / "config.json").read_text())
    for field in ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"):
        config.pop(field, None)
    (tmp_path / "config.json").write_text(json.dumps(config | said))
    if windows == ():
        edit_config(tmp_path, **({"sliding_window": None} if said.get("sliding_window") == 0 else {}))
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
        (tmp_path / "config.json").write_text(json.dumps(config | said))
        compare_with_transformers(tmp_path, theirs, length=200)
    elif windows is None:
        with pytest.raises(common.InputError, match="sliding_window 16: Transformers gives a llama none, and vLLM may"):
            loader.load(str(tmp_path))
    else:
        assert loader.load(str(tmp_path))[0].config.sliding_windows == windows


def test_sharded_folder(tmp_path):
    theirs = make_folder(tmp_path, shard="50KB", tie_word_embeddings=False)
    assert (tmp_path / "model.safetensors.index.json").is_file() and len(list(tmp_path.glob("*.safetensors"))) > 2
    compare_with_transformers(tmp_path, theirs)


def test_older_config_fields(tmp_path):
    """Before Transformers 5, RoPE's base and scaling were two fields of their own."""
    theirs = make_folder(tmp_path, **VARIANTS["Llama 3.1 RoPE"])
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config.update(rope_theta=rope.pop("rope_theta"), rope_scaling=rope)
    (tmp_path / "config.json").write_text(json.dumps(config))
    compare_with_transformers(tmp_path, theirs)


def test_a_file_beside_an_index_is_what_counts(tmp_path):
    """Saved in pieces, then again in one: Transformers leaves the index behind."""
    make_folder(tmp_path, shard="50KB", tie_word_embeddings=False)
    theirs = make_folder(tmp_path, seed=1, tie_word_embeddings=False)
    assert (tmp_path / "model.safetensors.index.json").is_file() and (tmp_path / "model.safetensors").is_file()
    compare_with_transformers(tmp_path, theirs)


@pytest.mark.parametrize("changes", [
    {"attention_bias": False}, {"mlp_bias": False}, {"rope_theta": 77.0},
    {"rope_theta": 77.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0}},
    {"rope_theta": 77.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
], ids=str)  # fmt: skip
def test_what_a_config_says_twice(tmp_path, changes):
    """Where fields or tensors contradict each other, those count that count for Transformers."""
    from transformers import LlamaForCausalLM

    make_folder(tmp_path, attention_bias=True, mlp_bias=True)
    edit_config(tmp_path, **changes)
    compare_with_transformers(tmp_path, LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval())


def test_last_tokens_outside_the_vocabulary_are_none(tmp_path):
    make_folder(tmp_path)
    edit_both(tmp_path, eos_token_id=[2, 96, -1])
    assert LlamaConfig.from_folder(tmp_path).eos_token_ids == (2,)


def test_a_text_is_neither_cut_nor_filled_up(tmp_path):
    """Some `tokenizer.json` still say how they were used in training."""
    make_folder(tmp_path)
    plain, tokenizer = Tokenizer(tmp_path), json.loads((tmp_path / "tokenizer.json").read_text())
    tokenizer["truncation"] = {"max_length": 8, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
    tokenizer["padding"] = {"strategy": {"Fixed": 32}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 2,
                            "pad_type_id": 0, "pad_token": "<|im_end|>"}  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    for text in ("Hi", "The capital of France is Paris, and the capital of Italy is"):
        assert Tokenizer(tmp_path).encode(text) == plain.encode(text)


TEMPLATES = {
    "a token that is none": ("{{ bos_token }}|{{ messages[0].content }}|{{ eos_token }}", {"bos_token": None}),
    "a token as an object": ("{{ bos_token }}{{ messages[0].content }}",
                             {"bos_token": {"__type": "AddedToken", "content": "<|im_start|>", "special": True}}),
    "what is not given": ("{% if documents is not none %}D{% endif %}{% if tools is not none %}{{ tools|tojson }}"
                          "{% endif %}{{ messages[0].content }}", {}),
    "tags": ("{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}{% generation %}{{ m.content }}"
             "{% endgeneration %}{% break %}{% endfor %}", {}),
    "a date": ("{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% endif %}{{ messages[0].content }}", {}),
    "JSON in any form": ("{{ messages|tojson(ensure_ascii=False) }}{{ messages|tojson(true, 2) }}"
                         "{{ messages|tojson(separators=(',', ':'), sort_keys=true) }}", {}),
    "what is set while the model speaks": ("{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}"
                                           "{{ x }}", {}),
    "a microsecond, a zone": ("{{ strftime_now('%f')|length }}{{ strftime_now('%z') }}", {}),
    "an object of templates": ({"default": "A{{ messages[0].content }}", "rag": "B"}, {}),
    "what a message leaves out": ("{% for m in messages %}{{ 'name' in m }}{{ m.name }}{% endfor %}", {}),
    "several": ([{"name": "default", "template": "A{{ messages[0].content }}"},
                 {"name": "rag", "template": "B"}], {}),
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_say_what_they_say_in_transformers(tmp_path, name):
    from transformers import AutoTokenizer

    make_folder(tmp_path)
    template, changes = TEMPLATES[name]
    edited = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**edited, **changes, "chat_template": template}))
    messages = [{"role": "user", "content": "Zoë"}, {"role": "assistant", "content": "yes", "name": None}]
    theirs = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(messages, tokenize=False)
    assert Tokenizer(tmp_path).render_chat(messages, add_generation_prompt=False) == theirs


def transformers_of(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def edit_weights(folder, change):
    from safetensors.torch import save_file

    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors", metadata={"format": "pt"})


HEADS = {  # what a file of a tied model holds besides: whether it is tied
    "no head": (lambda w: w, True),
    "the same": (lambda w: w | {"lm_head.weight": w["model.embed_tokens.weight"].clone()}, True),
    "another": (lambda w: w | {"lm_head.weight": w["model.embed_tokens.weight"].flip(0).contiguous()}, False),
    "under the head's name": (
        lambda w: {k: v for k, v in w.items() if "embed" not in k} | {"lm_head.weight": w["model.embed_tokens.weight"]},
        True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADS)
def test_the_head_that_is_in_the_file_is_the_head(tmp_path, name):
    """Some fine-tuned models are said to be tied and are not."""
    make_folder(tmp_path, tie_word_embeddings=True)
    change, tied = HEADS[name]
    edit_weights(tmp_path, change)
    model = compare_with_transformers(tmp_path, transformers_of(tmp_path))
    assert model.config.tie_word_embeddings is tied
    assert (model.linear["lm_head"].weight is model.embed_tokens) is tied


def test_codes_without_a_word_about_them(tmp_path):
    make_folder(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    for dtype in (torch.int8, torch.float8_e4m3fn):
        edit_weights(tmp_path, lambda w, dtype=dtype: w | {name: w[name].float().to(dtype)})
        with pytest.raises(common.InputError, match=f"weights: {name} is {dtype}, expected floats"):
            loader.load(str(tmp_path))


ROPE = {  # of config.json, as Transformers and vLLM read them
    "trained context at the top, yarn": {
        "rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 64},
    "trained context at the top, llama3": {
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 64},
    "trained context twice": {
        "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        "original_max_position_embeddings": 64},
    "trained context that means nothing": {"original_max_position_embeddings": 64},
    "yarn, mscale_all_dim 0": {
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 0.7,
                         "mscale_all_dim": 0}},
    "yarn, zeros": {
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 0,
                         "mscale_all_dim": 0.5, "beta_fast": 0, "beta_slow": 0}},
    "yarn, factor null": {
        "rope_scaling": {"type": "yarn", "factor": None, "original_max_position_embeddings": 64}},
    "yarn, what only its inventors read": {
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "finetuned": True}},
    "both names": {
        "rope_scaling": {"type": "linear", "factor": 4.0}, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    "an empty one": {"rope_scaling": {}, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    "both names of the type": {"rope_scaling": {"type": "default", "rope_type": "linear", "factor": 2.0}},
    "all of a head": {"rope_scaling": {"type": "linear", "factor": 2.0}, "partial_rotary_factor": 1.0},
}  # fmt: skip


@pytest.mark.parametrize("name", ROPE)
def test_rope_is_what_a_config_says_in_any_place(tmp_path, name):
    make_folder(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_theta": 5000.0} | ROPE[name]))
    compare_with_transformers(tmp_path, transformers_of(tmp_path), length=200)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_a_factor_of_more_bits_than_an_integer_of_torch(tiny_model, kind):
    """Transformers does not take it as it is in a file, without a point."""

    def theta(factor):
        scaling = {"type": kind, "factor": factor}
        return rope_frequencies(dataclasses.replace(tiny_model.config, rope_scaling=scaling))[0]

    assert torch.equal(theta(2**70), theta(2.0**70)) and not torch.equal(theta(2**70), theta(2**60))
    with pytest.raises(common.InputError, match="a positive number in the field 'factor'"):
        theta(10**400)


@pytest.mark.parametrize(("rope", "context"), [
    ({"type": "linear", "factor": 4.0}, 1024), ({"type": "linear", "factor": 1.5}, 384),
    ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256), ({"rope_type": "default"}, 256),
], ids=str)  # fmt: skip
def test_linear_scaling_lengthens_the_context(tmp_path, rope, context):
    """vLLM: `_get_and_verify_max_len`. Of the other kinds, max_position_embeddings is the longer one already."""
    make_folder(tmp_path)
    edit_config(tmp_path, rope_scaling=rope, rope_parameters=None, rope_theta=10000.0)
    model = compare_with_transformers(tmp_path, transformers_of(tmp_path), length=context)
    assert model.config.max_position_embeddings == context == len(model.cos)


BIASES = {  # kind, what config.json says: and no bias is in the file, but for Qwen2's of queries, keys and values
    "qwen2": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"attention_bias": True, "mlp_bias": True},
    "qwen3": {"mlp_bias": True},
}


@pytest.mark.parametrize("kind", BIASES)
def test_biases_that_a_family_does_not_have(tmp_path, kind):
    make_folder(tmp_path, kind=kind, sliding_window=None)
    edit_config(tmp_path, **BIASES[kind])
    compare_with_transformers(tmp_path, transformers_of(tmp_path))


def test_biases_of_a_mistral_are_those_in_its_file(tmp_path):
    """vLLM adds them, Transformers does not. The same weights as a Llama's show what they do."""
    theirs = make_folder(tmp_path, attention_bias=True, mlp_bias=True)
    edit_config(tmp_path, architectures=["MistralForCausalLM"], model_type="mistral")
    compare_with_transformers(tmp_path, theirs)


def test_what_a_family_leaves_out_of_its_config(tmp_path):
    """Transformers saves every field; who wrote a config by hand left out what Transformers assumes."""
    from transformers import AutoConfig

    for family, absent in ABSENT.items():
        config = {"architectures": [family], "model_type": family, "vocab_size": 300, "hidden_size": 4096,
                  "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 32,
                  "num_experts_per_tok": 2}  # fmt: skip
        config["architectures"] = [name for name, kind in FAMILIES.items() if kind == family]
        (tmp_path / "config.json").write_text(json.dumps(config | {"sliding_window": 1 << 20}))
        theirs, ours = AutoConfig.from_pretrained(tmp_path), LlamaConfig.from_folder(tmp_path)
        heads = ("num_key_value_heads", "head_dim") if ours.mla is None else ()  # of latents: test_mla.py
        for field in ("max_position_embeddings", "rms_norm_eps", *heads):
            want = getattr(theirs, field, None) or 4096 // 32
            assert getattr(ours, field) == want, (family, field)
        assert theirs.eos_token_id == absent.get("eos_token_id") and ours.tie_word_embeddings is False


REFUSED = {
    "partial_rotary_factor": 0.5, "rotary_pct": 0.25, "rotary_emb_base": 1e6, "is_causal": False, "logit_scale": 0.5,
    "bias": True, "qkv_bias": True, "compression_config": {"bits": 4}, "hidden_act": "gelu_pytorch_tanh",
    "layer_types": ["chunked_attention"], "dual_chunk_attention_config": {"chunk_size": 8},
    "rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5},
    "rope_parameters": {"full_attention": {"rope_type": "default"}},
}  # fmt: skip


@pytest.mark.parametrize("field", REFUSED)
def test_what_would_change_logits_is_refused_by_name(tmp_path, good_folder, field):
    folder = tmp_path / "model"
    shutil.copytree(good_folder, folder)
    edit_config(folder, **{field: REFUSED[field]})
    with pytest.raises(common.InputError) as error:
        loader.load(str(folder))
    word = next((key for key in REFUSED[field] if key != "rope_type"), field) if "rope" in field else field
    assert word in str(error.value) and "\n" not in str(error.value)
    config = json.loads((folder / "config.json").read_text())
    if field in NEUTRAL | NEUTRAL_IN["llama"] and field != "hidden_act":
        (folder / "config.json").write_text(json.dumps(config | {field: None}))
        loader.load(str(folder))


def test_a_mark_in_front_of_json(tmp_path):
    """Some editors put U+FEFF there; without it the file is the same. A file that is broken is not passed over."""
    make_folder(tmp_path)
    (tmp_path / "special_tokens_map.json").write_text("{}")
    files = ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json")
    plain, tokenizer = LlamaConfig.from_folder(tmp_path), Tokenizer(tmp_path)
    for name in files:
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + (tmp_path / name).read_bytes())
    assert LlamaConfig.from_folder(tmp_path) == plain
    assert Tokenizer(tmp_path).chat_template == tokenizer.chat_template
    for name in files:
        kept = (tmp_path / name).read_bytes()
        (tmp_path / name).write_text('{"temperature": ')
        with pytest.raises(common.InputError, match=f"{name}: not readable as JSON"):
            loader.load(str(tmp_path))
        (tmp_path / name).write_bytes(kept)


def test_low_precision_weights(tmp_path):
    theirs = make_folder(tmp_path)
    theirs.to(torch.bfloat16).save_pretrained(tmp_path)
    compare_with_transformers(tmp_path, type(theirs).from_pretrained(tmp_path, dtype=torch.float32).eval())


@pytest.mark.parametrize(
    "low", [pytest.param(torch.float16, id="fp16", marks=pytest.mark.slow), pytest.param(torch.bfloat16, id="bf16")]
)
def test_low_precision_model(real_model, transformers_model, low):
    """Thirty layers of rounding move the logits: by no more than they move Transformers'."""
    from transformers import AutoModelForCausalLM

    model, tokenizer = real_model
    ids = tokenizer.encode(PROMPTS[1])
    reference = logits_of(model, ids)
    ours = logits_of(loader.load(dtype=low)[0], ids)
    rounded = AutoModelForCausalLM.from_pretrained(folders.model_folder(), dtype=low).eval().to(common.device())
    with torch.inference_mode():
        theirs = rounded(torch.tensor([ids], device=common.device())).logits[0]
    assert ours.dtype == low
    assert common.relative_error(ours, reference) < 1.25 * common.relative_error(theirs, reference)


def test_pipeline_stages_add_up(tiny_model):
    ids, positions = (x.to(tiny_model.device) for x in (torch.randint(128, (9,)), torch.arange(9)))
    whole = tiny_model.forward(ids, positions, attend)
    first = tiny_model.forward(ids, positions, attend, layers=range(1))
    assert torch.equal(tiny_model.forward(None, positions, attend, hidden=first, layers=range(1, 2)), whole)


def test_linear_layers_are_replaceable_by_name():
    model = llama.random_model()
    before = logits_of(model, [1, 2, 3])
    for name, layer in model.linear.items():
        model.linear[name] = lambda x, layer=layer: layer(x) * 1.5
        assert not torch.equal(logits_of(model, [1, 2, 3]), before), name
        model.linear[name] = layer
    assert torch.equal(logits_of(model, [1, 2, 3]), before)


# --- Wrong input: one clear line ------------------------------------------------------------------------------------


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    config.update(changes)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def edit_both(folder, **changes):
    edit_config(folder, **changes)
    (folder / "generation_config.json").write_text(json.dumps(changes))


def only_index(folder, text):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(text)


BROKEN = {
    "another architecture": (lambda f: edit_config(f, architectures=["Qwen3ForCausalLM"]), "Qwen3ForCausalLM"),
    "another activation": (lambda f: edit_config(f, hidden_act="gelu"), "hidden_act"),
    "RoPE of another kind": (
        lambda f: edit_config(f, rope_parameters={"rope_type": "dynamic", "factor": 2}), "dynamic"),
    "RoPE without factor": (lambda f: edit_config(f, rope_parameters={"rope_type": "llama3"}), "factor"),
    "quantized": (lambda f: edit_config(f, quantization_config={"bits": 4}), "quantization_config"),
    "no heads": (lambda f: edit_config(f, num_attention_heads=0), "config.json"),
    "a context without end": (
        lambda f: edit_config(f, rope_scaling={"type": "linear", "factor": 1e308}), "config.json"),
    "a field missing": (lambda f: edit_config(f, hidden_size=None), "hidden_size"),
    "a field of the wrong type": (lambda f: edit_config(f, num_hidden_layers="three"), "num_hidden_layers"),
    "heads that do not divide": (lambda f: edit_config(f, num_key_value_heads=3), "num_key_value_heads"),
    "sizes that disagree": (lambda f: edit_config(f, intermediate_size=64), "gate_proj"),
    "too many layers": (lambda f: edit_config(f, num_hidden_layers=4), "model.layers.3"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json"),
    "config that is no JSON": (lambda f: (f / "config.json").write_text("{"), "config.json"),
    "config of brackets": (lambda f: (f / "config.json").write_text("[" * 100_000), "config.json"),
    "config that is a list": (lambda f: (f / "config.json").write_text("[]"), "config.json"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "model.safetensors"),
    "truncated weights": (lambda f: os.truncate(f / "model.safetensors", 5000), "model.safetensors"),
    "index that names no file": (lambda f: only_index(f, '{"weight_map": {"a": "gone.safetensors"}}'),
                                 "gone.safetensors"),
    "index of the wrong shape": (lambda f: only_index(f, '{"weight_map": ["a"]}'), "weight_map"),
    "another model of its kind": (lambda f: edit_config(f, model_type="mistral"), "mistral"),
    "an architecture of the wrong type": (lambda f: edit_config(f, architectures=5), "5"),
    "RoPE in a word": (lambda f: edit_config(f, rope_scaling="linear"), "linear"),
    "RoPE in a list": (lambda f: edit_config(f, rope_parameters={"rope_type": ["x"]}), "rope_scaling"),
    "RoPE that divides by zero": (lambda f: edit_config(f, rope_scaling={"type": "linear", "factor": 0}), "factor"),
    "YaRN with a ramp in quotes": (
        lambda f: edit_config(f, rope_scaling={"type": "yarn", "factor": 2, "beta_fast": "32"}), "beta_fast"),
    "an epsilon in quotes": (lambda f: edit_config(f, rms_norm_eps="1e-5"), "rms_norm_eps"),
    "no epsilon": (lambda f: edit_config(f, rms_norm_eps=float("nan")), "rms_norm_eps"),
    "more positions than memory": (lambda f: edit_config(f, max_position_embeddings=10**12), "max_position_embeddings"),
    "RoPE with a base of one": (lambda f: edit_config(f, rope_parameters={"rope_theta": 1.0}), "rope_theta"),
    "a truth in quotes": (lambda f: edit_config(f, tie_word_embeddings="false"), "tie_word_embeddings"),
    "a last token in quotes": (lambda f: edit_both(f, eos_token_id="2"), "eos_token_id"),
    "no token among last tokens": (lambda f: edit_both(f, eos_token_id=[2, None]), "eos_token_id"),
    "a bias that is not there": (lambda f: edit_config(f, attention_bias=True), "q_proj.bias"),
    "a template that is no text": (lambda f: (f / "chat_template.jinja").write_bytes(b"\xff"), "chat_template.jinja"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json"),
    "broken tokenizer": (lambda f: (f / "tokenizer.json").write_text("{}"), "tokenizer.json"),
}  # fmt: skip


@pytest.fixture(scope="module")
def good_folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    make_folder(path)
    loader.load(str(path))  # until it is damaged
    return path


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_gets_one_line(good_folder, tmp_path, name):
    folder = tmp_path / "model"
    shutil.copytree(good_folder, folder)
    damage, word = BROKEN[name]
    damage(folder)
    with pytest.raises(common.InputError) as error:
        loader.load(str(folder))
    assert word in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("path", ["does/not/exist", "/no/such/folder", "owner/nobody-has-this-model", "", "README.md",
                                  "~nobody-has-this-name/model", "~nobody-has-this-name", "x" * 5000])  # fmt: skip
def test_a_model_that_is_not_there(path):
    with pytest.raises(common.InputError, match="--model"):
        loader.load(path)


def test_a_tokenizer_with_more_tokens_than_the_model(tmp_path):
    make_folder(tmp_path, vocab_size=20)
    tokenizer = loader.load(str(tmp_path))[1]
    backend = Tokenizer(tmp_path).backend
    first = {c: backend.encode(c).ids[0] for c in "abcdefghijklmnopqrstuvwxyz0123456789 !"}
    known, unknown = min(first, key=first.get), max(first, key=first.get)
    assert tokenizer.encode(known) == [first[known]] and first[unknown] >= 20
    with pytest.raises(common.InputError, match=r"token id \d+ of the tokenizer: the model has 20 tokens"):
        tokenizer.encode(known + unknown)


def test_chat_without_template(tmp_path):
    make_folder(tmp_path)
    edited = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del edited["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(edited))
    with pytest.raises(common.InputError, match="chat template"):
        Tokenizer(tmp_path).chat([{"role": "user", "content": "Hi"}])


def test_a_conversation_with_any_template(tmp_path):
    """Where the template refuses a system's message, it begins the question; where there is none, lines are lines."""
    make_folder(tmp_path)
    edited = json.loads((tmp_path / "tokenizer_config.json").read_text())
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "Bye"}]  # fmt: skip
    plain = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + plain
    for template, text in (
        (plain, "s:Be brief.;u:Hi;a:Yes?;u:Bye;"),
        (refusing, "u:Be brief.\n\nHi;a:Yes?;u:Bye;"),
        (None, "Be brief.\nHi\nYes?\nBye"),
    ):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(edited | {"chat_template": template}))
        tokenizer = Tokenizer(tmp_path)
        assert tokenizer.converse(messages) == tokenizer.encode(text)
        assert messages[1]["content"] == "Hi", "the caller's messages stay as they are"
    with pytest.raises(common.InputError, match="never"):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(edited | {
            "chat_template": "{{ raise_exception('never') }}"}))  # fmt: skip
        Tokenizer(tmp_path).converse(messages)


def test_a_context_that_a_story_takes(tmp_path):
    make_folder(tmp_path)
    assert loader.check_context(str(tmp_path), 256).max_position_embeddings == 256
    with pytest.raises(common.InputError) as error:
        loader.check_context(str(tmp_path), 257)
    assert str(error.value) == "--model: a context of 256 tokens is too short; this story takes 257"


def test_chat_template_is_sandboxed(tmp_path):
    make_folder(tmp_path)
    edited = json.loads((tmp_path / "tokenizer_config.json").read_text())
    edited["chat_template"] = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(edited))
    with pytest.raises(common.InputError, match="chat template"):
        Tokenizer(tmp_path).chat([{"role": "user", "content": "Hi"}])


def test_a_template_is_a_file_or_a_text(tmp_path):
    file, text = tmp_path / "t.jinja", "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    file.write_text(text)
    assert read_chat_template(str(file)) == text == read_chat_template(text)
    for wrong, words in ((str(tmp_path / "x"), "No such file"), (str(tmp_path), "directory"), ("a\n{% x", "line 2")):
        with pytest.raises(common.InputError, match=words) as error:
            read_chat_template(wrong)
        assert "\n" not in str(error.value)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(common.InputError, match=r"t\.jinja"):
        read_chat_template(str(file))


# --- Preparing the default model ------------------------------------------------------------------------------------


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "cache_folder", lambda: tmp_path)
    return tmp_path


def fake_convert(source, folder, seconds=0.0):
    (folder / "config.json").write_text("{}")
    time.sleep(seconds)
    (folder / "model.safetensors").write_text("weights")


def test_interrupted_preparation_leaves_nothing(empty_cache, monkeypatch):
    def dies(source, folder):
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf_files, "convert_gguf", dies)
    with pytest.raises(KeyboardInterrupt):
        folders.model_folder()
    assert list(empty_cache.iterdir()) == []
    monkeypatch.setattr(gguf_files, "convert_gguf", fake_convert)
    assert sorted(p.name for p in folders.model_folder().iterdir()) == ["config.json", "model.safetensors"]


def test_killed_preparation_is_not_mistaken_for_a_model(tmp_path):
    """SIGKILL in the middle: the final folder does not exist, and what was left is removed by the next run."""
    code = f"""
import sys, time; sys.path.insert(0, {str(common.HERE)!r})
from engine.model import folders, gguf_files
from pathlib import Path
def slow(source, folder):
    (folder / "config.json").write_text("{{}}"); print("half", flush=True); time.sleep(600)
folders.cache_folder, gguf_files.convert_gguf = lambda: Path({str(tmp_path)!r}), slow
folders.model_folder()
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "half\n"
    assert not (tmp_path / folders.DEFAULT_MODEL).exists()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / folders.DEFAULT_MODEL).exists()
    (left,) = tmp_path.iterdir()
    os.utime(left, (0, 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folders, "cache_folder", lambda: tmp_path)
        patch.setattr(gguf_files, "convert_gguf", fake_convert)
        assert (folders.model_folder() / "model.safetensors").read_text() == "weights"
    assert [p.name for p in tmp_path.iterdir()] == [folders.DEFAULT_MODEL]


def test_concurrent_first_runs(empty_cache, monkeypatch):
    monkeypatch.setattr(gguf_files, "convert_gguf", lambda source, folder: fake_convert(source, folder, 0.2))
    found = []
    threads = [threading.Thread(target=lambda: found.append(folders.model_folder())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) == {empty_cache / folders.DEFAULT_MODEL} and len(found) == 4
    assert [p.name for p in empty_cache.iterdir()] == [folders.DEFAULT_MODEL]


def test_unwritable_cache(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(folders, "cache_folder", lambda: tmp_path / "file")
    with pytest.raises(common.InputError, match="cannot prepare"):
        folders.model_folder()


@pytest.mark.long
def test_real_preparation_twice_at_once(tmp_path):
    """Two processes convert the packaged file into the same empty cache; both then load the same, whole folder."""
    code = f"""
import sys; sys.path.insert(0, {str(common.HERE)!r})
from engine.model import folders
print(folders.model_folder())
"""
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "HOME": str(tmp_path), "LOCALAPPDATA": str(tmp_path)}
    runs = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment, text=True)
        for _ in range(2)
    ]
    made = {run.communicate()[0].strip() for run in runs}
    assert [run.returncode for run in runs] == [0, 0] and len(made) == 1
    (folder,) = made
    weights, reference = (load_file(f"{f}/model.safetensors") for f in (folder, folders.model_folder()))
    assert weights.keys() == reference.keys() and all(torch.equal(weights[k], reference[k]) for k in weights)
    assert [p.name for p in common.Path(folder).parent.iterdir()] == [folders.DEFAULT_MODEL]


@pytest.mark.slow
def test_start_to_first_token(real_model):
    """A prepared model answers within 3 s of the process's start (the best of three: other work may disturb)."""
    code = f"""
import sys; sys.path.insert(0, {str(common.HERE)!r}); sys.path.insert(0, {str(common.ROOT / "tests")!r})
import common, torch, torch.nn.functional as F
from engine.model import loader
def attend(layer, q, k, v):
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
model, tokenizer = loader.load()
ids = torch.tensor(tokenizer.encode("The capital of France is"), device=model.device)
print(model.logits(model.forward(ids, torch.arange(len(ids), device=model.device), attend)[-1:]).argmax().item())
"""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        seconds.append(time.perf_counter() - start)
        assert real_model[1].decode([int(done.stdout)]) == " Paris"
        if scripts.within(seconds[-1], 3):
            return
    pytest.fail(f"start to first token took {seconds}")


@pytest.mark.parametrize(
    ("kind", "field"),
    [("qwen3", "head_dim"), ("llama", "rms_norm_eps"), ("qwen2", "rms_norm_eps"), ("llama", "tie_word_embeddings"),
     ("llama", "num_key_value_heads")],
)  # fmt: skip
def test_what_a_config_leaves_out_is_what_transformers_takes(tmp_path, kind, field):
    from transformers import AutoConfig, AutoModelForCausalLM

    given = {"head_dim": 128, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "num_key_value_heads": 4}
    make_folder(tmp_path, kind=kind, **{field: given[field]})
    edit_config(tmp_path, **{field: None})
    assert field not in json.loads((tmp_path / "config.json").read_text())
    assert getattr(AutoConfig.from_pretrained(tmp_path), field) is not None
    compare_with_transformers(tmp_path, AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval())
    config = LlamaConfig.from_folder(tmp_path)
    assert getattr(config, field) == given[field]


LAST_TOKENS = {  # tokenizer_config.json, config.json, generation_config.json (None: no such file): what ends an answer
    "the tokenizer's is another one": ("<|im_end|>", 0, {"eos_token_id": 0}, (2, 0), True),
    "the tokenizer's is among them, and not the first": ("<|im_end|>", 0, {"eos_token_id": [0, 2]}, (2, 0), True),
    "only the tokenizer knows": ("<|im_end|>", None, None, (2,), True),
    "config.json counts where there is no other": ("<|im_end|>", [0, 1], None, (2, 0, 1), True),
    "and only there": ("<|im_end|>", [0, 1], {}, (2,), True),
    "a null": ("<|im_end|>", 0, {"eos_token_id": None}, (2,), True),
    "the tokenizer has none": (None, 0, {"eos_token_id": [0, 1]}, (0, 1), False),
    "the tokenizer's is not in its vocabulary": ("<never>", 0, {"eos_token_id": 1}, (1,), False),
    "only config.json has one": (None, 0, None, (0,), False),
    "only config.json has one, and a null stands before it": (None, 0, {"eos_token_id": None}, (0,), False),
    "nobody": (None, None, {}, (), True),
}


@pytest.mark.parametrize("name", LAST_TOKENS)
def test_which_tokens_end_an_answer(tmp_path, name):
    """As in vLLM: the tokenizer's, which has no stop_reason, and those of generation_config.json, which have."""
    tokenizers, config, generation, known, first_is_its_own = LAST_TOKENS[name]
    make_folder(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"eos_token_id": config}))
    about = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about | {"eos_token": tokenizers}))
    (tmp_path / "generation_config.json").unlink()
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    found = LlamaConfig.from_folder(tmp_path)
    assert (found.eos_token_ids, found.tokenizer_has_eos) == (known, first_is_its_own)
    assert loader.load(str(tmp_path))[0].config == found


def test_last_tokens_that_a_config_leaves_out_are_what_transformers_takes(tmp_path):
    from transformers import AutoConfig, GenerationConfig

    make_folder(tmp_path)
    edit_config(tmp_path, eos_token_id=None)
    (tmp_path / "generation_config.json").unlink()
    theirs = GenerationConfig.from_model_config(AutoConfig.from_pretrained(tmp_path))
    about = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"eos_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
    assert LlamaConfig.from_folder(tmp_path).eos_token_ids == (theirs.eos_token_id,) == (2,)


def test_last_tokens_of_another_folder(tmp_path):
    """--generation-config FOLDER; "vllm" means sampling alone."""
    make_folder(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 3}')
    (other / "generation_config.json").write_text('{"eos_token_id": 4}')
    for source, last in (("auto", 3), ("vllm", 3), (str(other), 4)):
        assert LlamaConfig.from_folder(tmp_path, generation_config=source).eos_token_ids == (2, last)
    with pytest.raises(common.InputError, match=r"nowhere/generation_config\.json: no such file"):
        LlamaConfig.from_folder(tmp_path, generation_config=str(tmp_path / "nowhere"))


SPECIAL = {  # tokenizer_config.json, special_tokens_map.json
    "the older file comes first": (
        {"eos_token": "</s>"}, {"eos_token": "<|im_end|>", "pad_token": {"content": "</s>"}}),
    "until the newer lists what was added": ({"eos_token": "</s>", "added_tokens_decoder": {}}, {"eos_token": "<unk>"}),
    "a class has some": ({"tokenizer_class": "LlamaTokenizer"}, {}),
    "a class has some, and a file others": ({"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>"}, {}),
    "none": ({}, {}),
    "more of them": ({"additional_special_tokens": ["<|tool|>"], "image_token": "<|image|>"}, {}),
    "more of them, by name": ({"extra_special_tokens": {"tool_token": "<|tool|>"}}, {}),
    "more tokens": ({"added_tokens_decoder": {"9": {"content": "<|new|>", "special": True},
                                              "8": {"content": "<|word|>", "special": False}}}, {}),
    "a token that became special": ({"added_tokens_decoder": {"5": {"content": "<|word|>", "special": True}}}, {}),
    "special tokens as text": ({"split_special_tokens": True}, {}),
    "what tokenizer.json decides": ({"add_bos_token": True, "add_eos_token": True}, {}),
    "what tokenizer.json decides, for a class": ({"add_bos_token": False, "tokenizer_class": "LlamaTokenizer"}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", SPECIAL)
def test_special_tokens_are_those_of_transformers(tmp_path, name):
    import tokenizers
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
    from transformers import AutoTokenizer

    make_folder(tmp_path)
    words = ["<unk>", "<s>", "</s>", "<|im_end|>", *(f"<0x{i:02X}>" for i in range(256))]
    vocab = {word: i for i, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(prepend_scheme="never"), decoders.ByteFallback()
    backend.add_special_tokens([AddedToken(word, normalized=False) for word in words[:3]])
    backend.add_tokens(["<|word|>"])
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    backend.save(str(tmp_path / "tokenizer.json"))
    config, older = SPECIAL[name]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "TokenizersBackend"} | config))
    if older:
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(older))
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), Tokenizer(tmp_path)
    for name, known in theirs.special_tokens_map.items():
        assert name in ("image_token", "tool_token") or ours.special_tokens[name] == known
    assert ours.special_tokens.keys() <= theirs.special_tokens_map.keys() | {"image_token"}
    if "tokenizer_class" in config:  # Transformers splits a text as the class does, whatever the file says
        return
    text = "a<|im_end|>b<|tool|><|image|><|new|><|word|></s>"
    assert ours.encode(text) == (ids := theirs(text).input_ids)
    for skip in (True, False):
        assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert _eos_of_tokenizer(tmp_path) == (theirs.eos_token_id if theirs.eos_token in words else None)


@pytest.mark.parametrize("fields", [
    {"rope_theta": 3.0, "original_max_position_embeddings": 64},  # the ramp would end behind the last dimension
    {"rope_theta": 5000.0, "original_max_position_embeddings": 64, "factor": 0.5},  # nothing to stretch
    {"rope_theta": 5000.0, "original_max_position_embeddings": 64, "mscale": 0.7},  # one of two that go together
], ids=str)  # fmt: skip
def test_yarn_at_its_edges(tmp_path, fields):
    rope = {"rope_parameters": {"rope_type": "yarn", "factor": 4.0} | fields}
    compare_with_transformers(tmp_path, make_folder(tmp_path, **rope))


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_an_epsilon_that_shows(tmp_path, kind):
    """1e-5 could be anything, or missing from a norm: next to it, nothing is small."""
    compare_with_transformers(tmp_path, make_folder(tmp_path, kind=kind, rms_norm_eps=0.5))


NAMED = {  # in tokenizer_config.json, as files: what a chat without and with tools says; None: an error
    "in a list": (("default", "tool_use"), (), "default", "tool_use"),
    "one for both": (("default", "rag"), (), "default", "default"),
    "none for a chat without tools": (("tool_use",), (), None, "tool_use"),
    "none at all": (("rag",), (), None, None),
    "files": ((), ("default", "tool_use"), "default", "tool_use"),
    "files before the list": (("default", "tool_use"), ("default",), "default", "default"),
    "only a file besides": (("default",), ("tool_use",), None, "tool_use"),
}


@pytest.mark.parametrize("name", NAMED)
def test_of_several_templates_the_one_for_tools(tmp_path, name):
    from transformers import AutoTokenizer

    make_folder(tmp_path)
    listed, files, *wanted = NAMED[name]
    text = "{{ messages[0].content }}{{ tools|tojson if tools }}"
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": each, "template": f"{each} {text}"} for each in listed] or f"lost {text}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "additional_chat_templates").mkdir()
    for each in files:
        path = "chat_template.jinja" if each == "default" else f"additional_chat_templates/{each}.jinja"
        (tmp_path / path).write_text(f"{each} {text}")
    ours, theirs = Tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "Hi"}]
    for tools, want in zip((None, [{"type": "function"}]), wanted):
        if want is None:
            with pytest.raises(common.InputError, match="and no default"):
                ours.render_chat(messages, tools=tools)
            continue
        found = ours.render_chat(messages, tools=tools)
        assert found == theirs.apply_chat_template(messages, tools=tools, tokenize=False) and found.startswith(want)


@pytest.mark.parametrize("template", [5, [5], [{"name": "default"}], [{"template": "x"}], {"default": 5}], ids=str)
def test_templates_of_the_wrong_shape(tmp_path, template):
    make_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(common.InputError, match=r"tokenizer_config\.json: chat_template must be a text, or a list"):
        Tokenizer(tmp_path)


def test_a_text_that_is_cut_keeps_what_stands_around_it(tmp_path):
    """Of more than fits, the first tokens of the text go; of less than stands around it, the last ones stay."""
    from tokenizers.processors import TemplateProcessing

    make_folder(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    around = [("<|im_start|>", 1), ("<|im_end|>", 2)]
    tokenizer.backend.post_processor = TemplateProcessing("<|im_start|> $A <|im_end|>", special_tokens=around)
    first, *text, last = tokenizer.encode("abcd")
    assert (first, last, len(text)) == (1, 2, 4)
    cut = {n: tokenizer.encode("abcd", max_length=n) for n in (7, 6, 4, 2, 1)}
    whole = [1, *text, 2]
    assert cut == {7: whole, 6: whole, 4: [1, *text[2:], 2], 2: [1, 2], 1: [2]}

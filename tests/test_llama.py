"""The model under every lesson: equal to Transformers, loaded from any Llama folder, prepared atomically."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import common
import pytest
import scripts
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import llama

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

    folder = llama.model_folder()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().to(common.device())
    return model, AutoTokenizer.from_pretrained(folder)


# --- The real model against Transformers ----------------------------------------------------------------------------


@pytest.mark.parametrize("n", [8, pytest.param(64, marks=pytest.mark.slow)])
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
        common.assert_close(logits_of(model, ids), reference)


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
    assert llama.LlamaConfig.from_folder(llama.model_folder()).eos_token_ids == (theirs.eos_token_id,)


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

    weights = load_file(llama.model_folder() / "model.safetensors")
    reader = llama.gguf_reader(llama._packaged_gguf())
    assert len(weights) == len(reader.tensors)
    some = [tensor for i, tensor in enumerate(reader.tensors) if i % every == 0 or not tensor.name.startswith("blk.")]
    kinds = [{tensor.name.split(".")[-2] for tensor in which} for which in (some, reader.tensors)]
    assert kinds[0] == kinds[1]
    for tensor in some:
        original = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        ours = weights[llama._hugging_face_name(tensor.name)]
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
    content = json.loads((llama.model_folder() / "tokenizer.json").read_text())
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
    shutil.copy(llama.model_folder() / "tokenizer_config.json", path)
    (path / "tokenizer.json").write_text(small_tokenizer())
    return model


def compare_with_transformers(folder, theirs, length=120):
    model, _ = llama.load(str(folder), device=torch.device("cpu"))
    ids = torch.randint(model.config.vocab_size, (length,)).tolist()
    with torch.inference_mode():
        reference = theirs(torch.tensor([ids])).logits[0]
    common.assert_close(logits_of(model, ids), reference)
    return model


@pytest.mark.parametrize("name", VARIANTS)
def test_other_llamas_equal_transformers(tmp_path, name):
    compare_with_transformers(tmp_path, make_folder(tmp_path, **VARIANTS[name]))


@pytest.mark.parametrize("kind", ["mistral", "qwen2", "qwen3"])
def test_llamas_by_another_name(tmp_path, kind):
    theirs = make_folder(tmp_path, kind=kind, sliding_window=None, tie_word_embeddings=True)
    model = compare_with_transformers(tmp_path, theirs)
    assert model.num_parameters == sum(p.numel() for p in theirs.parameters())
    window = {"sliding_window": 16} if kind == "mistral" else {"sliding_window": 16, "use_sliding_window": True}
    edit_config(tmp_path, **window)
    with pytest.raises(common.InputError, match="sliding_window 16 is not supported here; allowed: null"):
        llama.load(str(tmp_path))
    window.pop("sliding_window")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["sliding_window"]  # it says nothing: then Transformers assumes one
    (tmp_path / "config.json").write_text(json.dumps(config | window))
    with pytest.raises(common.InputError, match="sliding_window 4096 is not supported here; allowed: null"):
        llama.load(str(tmp_path))


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
    assert llama.LlamaConfig.from_folder(tmp_path).eos_token_ids == (2,)


def test_a_text_is_neither_cut_nor_filled_up(tmp_path):
    """Some `tokenizer.json` still say how they were used in training."""
    make_folder(tmp_path)
    plain, tokenizer = llama.Tokenizer(tmp_path), json.loads((tmp_path / "tokenizer.json").read_text())
    tokenizer["truncation"] = {"max_length": 8, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
    tokenizer["padding"] = {"strategy": {"Fixed": 32}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 2,
                            "pad_type_id": 0, "pad_token": "<|im_end|>"}  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    for text in ("Hi", "The capital of France is Paris, and the capital of Italy is"):
        assert llama.Tokenizer(tmp_path).encode(text) == plain.encode(text)


TEMPLATES = {
    "a token that is none": ("{{ bos_token }}|{{ messages[0].content }}|{{ eos_token }}", {"bos_token": None}),
    "a token as an object": ("{{ bos_token }}{{ messages[0].content }}",
                             {"bos_token": {"__type": "AddedToken", "content": "<|im_start|>", "special": True}}),
    "what is not given": ("{% if documents is not none %}D{% endif %}{% if tools is not none %}{{ tools|tojson }}"
                          "{% endif %}{{ messages[0].content }}", {}),
    "tags": ("{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}{% generation %}{{ m.content }}"
             "{% endgeneration %}{% break %}{% endfor %}", {}),
    "a date": ("{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% endif %}{{ messages[0].content }}", {}),
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
    messages = [{"role": "user", "content": "Zoë"}, {"role": "assistant", "content": "yes"}]
    theirs = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(messages, tokenize=False)
    assert llama.Tokenizer(tmp_path).render_chat(messages, add_generation_prompt=False) == theirs


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
    ours = logits_of(llama.load(dtype=low)[0], ids)
    rounded = AutoModelForCausalLM.from_pretrained(llama.model_folder(), dtype=low).eval().to(common.device())
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
    llama.load(str(path))  # until it is damaged
    return path


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_gets_one_line(good_folder, tmp_path, name):
    folder = tmp_path / "model"
    shutil.copytree(good_folder, folder)
    damage, word = BROKEN[name]
    damage(folder)
    with pytest.raises(common.InputError) as error:
        llama.load(str(folder))
    assert word in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("path", ["does/not/exist", "/no/such/folder", "owner/nobody-has-this-model", "", "README.md",
                                  "~nobody-has-this-name/model", "~nobody-has-this-name", "x" * 5000])  # fmt: skip
def test_a_model_that_is_not_there(path):
    with pytest.raises(common.InputError, match="--model"):
        llama.load(path)


def test_a_tokenizer_with_more_tokens_than_the_model(tmp_path):
    make_folder(tmp_path, vocab_size=20)
    tokenizer = llama.load(str(tmp_path))[1]
    backend = llama.Tokenizer(tmp_path).backend
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
        llama.Tokenizer(tmp_path).chat([{"role": "user", "content": "Hi"}])


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
        tokenizer = llama.Tokenizer(tmp_path)
        assert tokenizer.converse(messages) == tokenizer.encode(text)
        assert messages[1]["content"] == "Hi", "the caller's messages stay as they are"
    with pytest.raises(common.InputError, match="never"):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(edited | {
            "chat_template": "{{ raise_exception('never') }}"}))  # fmt: skip
        llama.Tokenizer(tmp_path).converse(messages)


def test_a_context_that_a_story_takes(tmp_path):
    make_folder(tmp_path)
    assert llama.check_context(str(tmp_path), 256).max_position_embeddings == 256
    with pytest.raises(common.InputError) as error:
        llama.check_context(str(tmp_path), 257)
    assert str(error.value) == "--model: a context of 256 tokens is too short; this story takes 257"


def test_chat_template_is_sandboxed(tmp_path):
    make_folder(tmp_path)
    edited = json.loads((tmp_path / "tokenizer_config.json").read_text())
    edited["chat_template"] = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(edited))
    with pytest.raises(common.InputError, match="chat template"):
        llama.Tokenizer(tmp_path).chat([{"role": "user", "content": "Hi"}])


def test_a_template_is_a_file_or_a_text(tmp_path):
    file, text = tmp_path / "t.jinja", "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    file.write_text(text)
    assert llama.read_chat_template(str(file)) == text == llama.read_chat_template(text)
    for wrong, words in ((str(tmp_path / "x"), "No such file"), (str(tmp_path), "directory"), ("a\n{% x", "line 2")):
        with pytest.raises(common.InputError, match=words) as error:
            llama.read_chat_template(wrong)
        assert "\n" not in str(error.value)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(common.InputError, match=r"t\.jinja"):
        llama.read_chat_template(str(file))


# --- Preparing the default model ------------------------------------------------------------------------------------


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(llama, "cache_folder", lambda: tmp_path)
    return tmp_path


def fake_convert(source, folder, seconds=0.0):
    (folder / "config.json").write_text("{}")
    time.sleep(seconds)
    (folder / "model.safetensors").write_text("weights")


def test_interrupted_preparation_leaves_nothing(empty_cache, monkeypatch):
    def dies(source, folder):
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(llama, "convert_gguf", dies)
    with pytest.raises(KeyboardInterrupt):
        llama.model_folder()
    assert list(empty_cache.iterdir()) == []
    monkeypatch.setattr(llama, "convert_gguf", fake_convert)
    assert sorted(p.name for p in llama.model_folder().iterdir()) == ["config.json", "model.safetensors"]


def test_killed_preparation_is_not_mistaken_for_a_model(tmp_path):
    """SIGKILL in the middle: the final folder does not exist, and what was left is removed by the next run."""
    code = f"""
import sys, time; sys.path.insert(0, {str(common.HERE)!r})
import llama
from pathlib import Path
def slow(source, folder):
    (folder / "config.json").write_text("{{}}"); print("half", flush=True); time.sleep(600)
llama.cache_folder, llama.convert_gguf = lambda: Path({str(tmp_path)!r}), slow
llama.model_folder()
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "half\n"
    assert not (tmp_path / llama.DEFAULT_MODEL).exists()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / llama.DEFAULT_MODEL).exists()
    (left,) = tmp_path.iterdir()
    os.utime(left, (0, 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llama, "cache_folder", lambda: tmp_path)
        patch.setattr(llama, "convert_gguf", fake_convert)
        assert (llama.model_folder() / "model.safetensors").read_text() == "weights"
    assert [p.name for p in tmp_path.iterdir()] == [llama.DEFAULT_MODEL]


def test_concurrent_first_runs(empty_cache, monkeypatch):
    monkeypatch.setattr(llama, "convert_gguf", lambda source, folder: fake_convert(source, folder, 0.2))
    found = []
    threads = [threading.Thread(target=lambda: found.append(llama.model_folder())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) == {empty_cache / llama.DEFAULT_MODEL} and len(found) == 4
    assert [p.name for p in empty_cache.iterdir()] == [llama.DEFAULT_MODEL]


def test_unwritable_cache(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(llama, "cache_folder", lambda: tmp_path / "file")
    with pytest.raises(common.InputError, match="cannot prepare"):
        llama.model_folder()


@pytest.mark.slow
def test_real_preparation_twice_at_once(tmp_path):
    """Two processes convert the packaged file into the same empty cache; both then load the same, whole folder."""
    code = f"import sys; sys.path.insert(0, {str(common.HERE)!r}); import llama; print(llama.model_folder())"
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "HOME": str(tmp_path), "LOCALAPPDATA": str(tmp_path)}
    runs = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment, text=True)
        for _ in range(2)
    ]
    folders = {run.communicate()[0].strip() for run in runs}
    assert [run.returncode for run in runs] == [0, 0] and len(folders) == 1
    (folder,) = folders
    weights, reference = (load_file(f"{f}/model.safetensors") for f in (folder, llama.model_folder()))
    assert weights.keys() == reference.keys() and all(torch.equal(weights[k], reference[k]) for k in weights)
    assert [p.name for p in common.Path(folder).parent.iterdir()] == [llama.DEFAULT_MODEL]


@pytest.mark.slow
def test_start_to_first_token(real_model):
    """A prepared model answers within 3 s of the process's start (the best of three: other work may disturb)."""
    code = f"""
import sys; sys.path.insert(0, {str(common.HERE)!r}); sys.path.insert(0, {str(common.ROOT / "tests")!r})
import common, llama, torch, torch.nn.functional as F
def attend(layer, q, k, v):
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
model, tokenizer = llama.load()
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
    config = llama.LlamaConfig.from_folder(tmp_path)
    assert getattr(config, field) == given[field]


@pytest.mark.parametrize(("said", "more", "known"), [(2, [2, 3], (2, 3)), (2, 5, (5,)), ([2, 4], None, (2, 4))])
def test_generation_config_may_name_more_last_tokens(tmp_path, said, more, known):
    """As in the first Llama 3: config.json has the end of a text, and this one the end of a turn besides."""
    make_folder(tmp_path)
    edit_config(tmp_path, eos_token_id=said)
    (tmp_path / "generation_config.json").write_text(json.dumps({} if more is None else {"eos_token_id": more}))
    assert llama.LlamaConfig.from_folder(tmp_path).eos_token_ids == known


def test_a_folder_that_says_its_special_tokens_twice(tmp_path):
    """Before Transformers 5 there was a file for them beside the tokenizer's own, which counts and has the template."""
    make_folder(tmp_path)
    said = {"bos_token": "<old>", "unk_token": {"content": "<unk>"}}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(said))
    config = {"bos_token": "<new>", "chat_template": "{{ bos_token }}{{ unk_token }}{{ messages[0].content }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert llama.Tokenizer(tmp_path).render_chat([{"role": "user", "content": "Hi"}]) == "<new><unk>Hi"


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


def test_of_several_templates_the_default(tmp_path):
    make_folder(tmp_path)
    templates = [{"name": name, "template": name + " {{ messages[0].content }}"} for name in ("tool_use", "default")]
    config = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"chat_template": templates}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert llama.Tokenizer(tmp_path).render_chat([{"role": "user", "content": "Hi"}]) == "default Hi"


def test_a_text_that_is_cut_keeps_what_stands_around_it(tmp_path):
    """Of more than fits, the first tokens of the text go; of less than stands around it, the last ones stay."""
    from tokenizers.processors import TemplateProcessing

    make_folder(tmp_path)
    tokenizer = llama.Tokenizer(tmp_path)
    around = [("<|im_start|>", 1), ("<|im_end|>", 2)]
    tokenizer.backend.post_processor = TemplateProcessing("<|im_start|> $A <|im_end|>", special_tokens=around)
    first, *text, last = tokenizer.encode("abcd")
    assert (first, last, len(text)) == (1, 2, 4)
    cut = {n: tokenizer.encode("abcd", max_length=n) for n in (7, 6, 4, 2, 1)}
    whole = [1, *text, 2]
    assert cut == {7: whole, 6: whole, 4: [1, *text[2:], 2], 2: [1, 2], 1: [2]}

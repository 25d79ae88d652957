"""A small random model of any family that the engine serves, as a folder: `python -m vllm make-model FAMILY FOLDER`.

What it says is nonsense, and always the same nonsense: Transformers, `LLM` and `serve` take the folder, and a test can
ask all three for the same tokens. The tokenizer is the default model's.
"""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from engine import arguments
from engine.model import folders
from engine.model.config import FAMILIES

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048, "sliding_window": None,
}  # fmt: skip
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
LATENTS = EXPERTS | {
    "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 24, "v_head_dim": 20, "head_dim": 16,
    "num_key_value_heads": 4, "n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}  # fmt: skip
OF_FAMILY: dict[str, dict[str, Any]] = {
    "mixtral": EXPERTS,
    "gpt_oss": EXPERTS
    | {
        "intermediate_size": 48,
        "sliding_window": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 512,
        },
    },
    "qwen2_moe": EXPERTS | {"num_experts": 8, "shared_expert_intermediate_size": 96, "decoder_sparse_step": 1},
    "qwen3_moe": EXPERTS | {"norm_topk_prob": True, "mlp_only_layers": [1]},  # a layer without, as some models have
    "deepseek_v2": LATENTS | {"q_lora_rank": None},  # as V2-Lite
    "deepseek_v3": LATENTS | {"q_lora_rank": 24, "n_group": 4, "topk_group": 2, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512,
        "mscale": 0.7, "mscale_all_dim": 1.0}},
}  # fmt: skip
# What a family with some windowed layers makes of this number: those from it on, or of those before it every other one.
LAYERS = {"mistral": None, "mixtral": None, "qwen2": 1, "qwen3": 1, "qwen2_moe": 3, "qwen3_moe": None, "gpt_oss": None}


def make_model(family: str, folder: Path, seed: int = 0, window: int | None = None, **sizes: Any) -> Any:
    """Write a seeded model of a family, with `sizes` in the place of SIZES; returns Transformers' model.

    With a `window`, layers see so many tokens: all of them, or those that the family gives one. The folder appears
    whole, or not at all. Raises InputError for another family or one without windows, and for a folder that is there.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    allowed = sorted(FAMILIES.values())
    if family not in allowed:
        raise common.InputError(f"family {family!r}: must be one of {', '.join(allowed)}")
    if window and family not in LAYERS:
        raise common.InputError(f"window: not for family {family!r}, whose layers see everything")
    if window:
        sizes = {"sliding_window": window, "use_sliding_window": True, "max_window_layers": LAYERS[family]} | sizes
    if folder.exists():
        raise common.InputError(f"{folder}: is there already; name a folder that is not")
    default = folders.model_folder()
    tokens = folders.read_json(default / "config.json")
    known = {name: tokens[name] for name in ("vocab_size", "bos_token_id", "eos_token_id")}
    # With the usual 0.02, all logits of a small model are about the same, and a wrong weight changes no token.
    config = AutoConfig.for_model(family, **known | SIZES | OF_FAMILY.get(family, {}) | sizes, initializer_range=0.2)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith(("bias", "norm.weight")):  # which begin as zeros and ones
            tensor.data += 0.2 * torch.randn_like(tensor)
        if name.endswith("sinks"):  # as heavy as a few keys
            tensor.data += 1 + torch.randn_like(tensor)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f"{folder.name}.part-", dir=folder.parent))
    except OSError as error:
        raise common.InputError(f"{folder}: {error.strerror}") from None
    try:
        model.save_pretrained(scratch)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            if (default / name).is_file():
                shutil.copy(default / name, scratch)
        scratch.chmod(0o755)
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return model


def build_parser() -> arguments.Parser:
    p = arguments.Parser(prog="python -m vllm make-model", description=__doc__)
    p.add_argument("family", metavar="FAMILY", help=f"one of {', '.join(sorted(FAMILIES.values()))}")
    p.add_argument("folder", metavar="FOLDER", type=Path, help="where to write it; must not be there")
    p.add_argument("--seed", type=arguments.number(int, 0, 2**31 - 1), default=0, help="of its weights (default 0)")
    help = "tokens that its windowed layers see (default: every layer sees all)"
    p.add_argument("--window", type=arguments.number(int, 1, 2**20), help=help)
    return p


def main(argv: Sequence[str]) -> None:
    """Write the folder, and say what is in it."""
    args = build_parser().parse_args(argv)
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = make_model(args.family, args.folder, args.seed, args.window)
    common.say(f"{args.folder}: a {args.family} of {sum(p.numel() for p in model.parameters()):,} random parameters")

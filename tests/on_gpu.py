"""Everything there is to do on a machine with a GPU, in one command: the tests, then every lesson's benchmark.

    python tests/on_gpu.py OUT                   # then: cp OUT/h200.json lessons/results
    python tests/on_gpu.py OUT tests             # or in parts, where a command may not take long: the tests,
    python tests/on_gpu.py OUT 02 03 05b 12 09   # and some lessons: these first, where time is short; then 01 10 05 05d

Writes two files, OUT/h200.json (what lessons/results has, and what was measured now) and OUT/log.txt, and prints a
short table last. Needs no network and no package beyond torch, triton, transformers, matplotlib, rich, pytest and
hypothesis: where the default model is not installed, random weights of its shapes take its place (times are the same,
texts mean nothing). What hangs is stopped. Test files run side by side: their time is mostly the compiler's.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TESTS = Path(__file__).resolve().parent
sys.path.insert(0, str(TESTS.parent / "vllm"))

import common

import torch

from engine.model import folders, llama
from engine.model.config import LlamaConfig
from lab import recorded
from support.documents import LESSONS

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152, "hidden_size": 576,
    "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "head_dim": 64, "hidden_act": "silu", "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 1e5,
    "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def random_folder(folder: Path, **changes: object) -> Path:
    """A Hugging Face folder with random weights of SmolLM2's shapes, but for `changes`; its tokens are single bytes."""
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SMOLLM2 | changes))
    torch.manual_seed(0)
    shapes = llama.tensor_shapes(LlamaConfig.from_folder(folder))
    weights = {n: torch.ones(s) if len(s) == 1 else torch.randn(s) / s[1] ** 0.5 for n, s in shapes.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet]
    words += [f"<{i}>" for i in range(len(words), SMOLLM2["vocab_size"])]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(words[:3])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


def run(name: str, command: list[str], log: Path, seconds: float) -> tuple[str, str, str]:
    """One row of the table: what ran, how it ended, its last line. The whole output goes to the end of `log`."""
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as file:
        try:
            process = subprocess.run(
                [sys.executable, *command], cwd=common.ROOT, stdout=file, stderr=subprocess.STDOUT, timeout=seconds
            )
            ended = f"exit {process.returncode}" if process.returncode else "ok"
        except subprocess.TimeoutExpired:
            ended = "stopped"
        file.seek(0)
        text = file.read().strip()
    row = (name, f"{ended} {time.perf_counter() - start:.0f} s", (text.splitlines() or [""])[-1])
    with one_at_a_time, log.open("a") as file:
        file.write(f"{'=' * 20} {name}: {row[1]}\n{text}\n\n")
        print(*row, sep="  ", flush=True)
    return row


one_at_a_time = threading.Lock()
TOGETHER = 540  # seconds for all tests: where a command may take ten minutes, their log must come back


def number(script: Path) -> str:
    """05b of 05b_quantization.py."""
    return script.stem.split("_")[0]


def main() -> None:
    out, scratch = Path(sys.argv[1]), Path(tempfile.mkdtemp())
    out.mkdir(parents=True, exist_ok=True)
    results, log = out / "h200.json", out / "log.txt"
    if (recorded.RESULTS / results.name).is_file() and not results.exists():
        shutil.copy(recorded.RESULTS / results.name, results)
    try:
        model, real = folders.model_folder(), True
    except common.InputError:
        model, real = random_folder(scratch / "model"), False
    # Such machines often have no network and nothing but torch: lesson 06's server has little to learn from them.
    serves = importlib.util.find_spec("fastapi") is not None and importlib.util.find_spec("llguidance") is not None
    able = [script for script in LESSONS if serves or not script.stem.startswith("06")]
    known, rows = ["tests", *map(number, able)], []
    asked = sys.argv[2:] or known
    if unknown := set(asked) - set(known):
        sys.exit(f"{', '.join(sorted(unknown))}: cannot be run here; what can: {' '.join(known)}")
    if "tests" in asked:  # those of lessons and kernels; pages, site and widgets are the same everywhere
        needless = {"serving": not serves, "guided": not serves, "model": not real}
        tests = [TESTS / "test_common.py", *(TESTS / "lessons" / f"test_{script.stem}.py" for script in able)]
        for folder in ("kernels", "lab", "tours", "engine"):
            tests += sorted((TESTS / folder).rglob("test_*.py"))
        chosen = [test for test in tests if test.is_file() and not any(needless.get(part) for part in test.parts)]
        flags, end = ["-q", "-p", "no:cacheprovider", "--tb=short"], time.perf_counter() + TOGETHER

        def run_tests(test: Path) -> tuple[str, str, str]:
            return run(test.stem, ["-m", "pytest", *flags, str(test)], log, max(1.0, end - time.perf_counter()))

        with ThreadPoolExecutor(8) as pool:
            rows += pool.map(run_tests, chosen)
    for script in able:
        if number(script) in asked:
            flags = ["--json", str(results), "--figure", str(scratch), "--model", str(model)]
            rows.append(run(script.stem, [str(script), "--bench", *flags], log, 420))
    shutil.rmtree(scratch)
    common.table(["what", "how it ended", "last line"], rows)
    sys.exit(any(not ended.startswith("ok ") for _, ended, _ in rows))


if __name__ == "__main__":
    main()

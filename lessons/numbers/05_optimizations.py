"""What the page of lesson 05 simulates, quotes, draws and measures: `lessons/05_optimizations.md`.

The widget's twin, two prompts through the lesson's index; launches and bytes by roofline; and, timed, the engine with
and without each entry of the catalog.
"""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used

import argparse
import copy
import dataclasses
import functools
import gc
import itertools
import math
import re
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from engine import registry
from engine.attention.metadata import AttentionMetadata
from engine.config import SchedulerConfig, VllmConfig
from engine.core.engine_core import EngineCore
from engine.core.scheduler import make_scheduler
from engine.model import llama, loader
from engine.model.config import LlamaConfig
from engine.model.tokenizer import Tokenizer
from engine.parallel.config import ParallelConfig
from engine.parallel.executors import ThreadExecutor
from engine.parallel.pipeline import PipelineEngineCore
from engine.parallel.remote_runner import RemoteRunner
from engine.parallel.stages import make_groups
from engine.parallel.worker import Worker, WorkerSpec
from engine.parallel.workers import Workers
from engine.request import Request, SamplingParams
from engine.worker.assemble import make_runner
from engine.worker.cuda_graphs import CapturedModel, Tape, capture_sizes
from lab import chats, figures, peers, roofline, timing
from lab.hardware import GPU, HARDWARE
from lab.matrix_products import matmul_seconds
from lab.parameters import checked

KEY = "05_optimizations"
BLOCK = 16  # tokens

lesson = registry.lesson(KEY)


# --- The simulation behind the widget: a hash chain you type into ---------------------------------------------------

PREFIX = "You are a helpful assistant. Use the tools; never guess a price."  # 64 characters, each of them a token here
EDITS = {"none": PREFIX, "change character 60": f"{PREFIX[:60]}#{PREFIX[61:]}", "change character 0": f"#{PREFIX[1:]}",
         "insert one in front": f"#{PREFIX}"}  # fmt: skip
CHOICES = {"edit": list(EDITS), "block_size": [4, 8, 16, 32], "hash_bits": [8, 16, 64, 256], "salt": ["", "b"],
           "pool_blocks": [8, 12, 16, 64]}  # fmt: skip
LONGEST_SUFFIX = 48
WIDGET_DEFAULT = {"suffix_a": " What is 2+2?", "suffix_b": " What is the capital of France?", "edit": "none",
                  "block_size": 16, "hash_bits": 256, "salt": "", "pool_blocks": 64}  # fmt: skip
BREAK_IT = {"suffix_a": " My PIN is 1234. What is it?", "suffix_b": " My PIN is 1400. What is it?", "hash_bits": 8}


def simulate(params: dict) -> dict:
    """Two prompts and the first one again, one by one, through the lesson's index. Characters are tokens.

    params: two suffixes of printable ASCII, at most 48 characters each; the others one of CHOICES. "edit" and "salt"
    concern the second prompt. Raises InputError naming the field.
    """
    texts = ("suffix_a", "suffix_b")
    checked({name: value for name, value in params.items() if name not in texts}, CHOICES)
    for name in texts:
        value = params.get(name)
        if not (isinstance(value, str) and len(value) <= LONGEST_SUFFIX and all(" " <= c <= "~" for c in value)):
            raise common.InputError(f"{name} {value!r}: must be up to {LONGEST_SUFFIX} printable ASCII characters")
    size = params["block_size"]
    cache = lesson.PrefixCache(params["pool_blocks"] + 1, size, params["hash_bits"])
    contents: dict[int, tuple[str, str]] = {}  # of each physical block: salt, and text up to its end
    first, second = PREFIX + params["suffix_a"], EDITS[params["edit"]] + params["suffix_b"]
    prompts = (("A", first, ""), ("B", second, params["salt"]), ("A again", first, ""))
    sends = [send(cache, contents, *prompt) for prompt in prompts]
    wrong = sum(block["wrong"] for sent in sends for block in sent["blocks"])
    return {
        "block_size": size, "hash_bits": params["hash_bits"], "pool_blocks": params["pool_blocks"], "sends": sends,
        "wrong": wrong,
    }  # fmt: skip


def send(cache: Any, contents: dict, name: str, text: str, salt: str) -> dict:
    """One prompt through the index: lookup, allocation, end. `contents` says what really lies in each block."""
    size = cache.block_size
    request = Request(name, [ord(c) for c in text], SamplingParams(max_tokens=1), cache_salt=salt or None)
    trace = {"name": name, "text": text, "salt": salt, "cached": 0, "computed": 0, "refused": False, "blocks": []}
    before = list(cache.block_hash)
    hits = cache.get_computed_blocks(request)
    request.num_computed_tokens = len(hits) * size
    if cache.allocate_slots(request, len(text) - request.num_computed_tokens, hits) is None:
        trace["refused"] = True
    else:
        table, hashes = cache.tables[name], request.block_hashes
        trace |= {"cached": request.num_computed_tokens, "computed": len(text) - request.num_computed_tokens}
        for i, block in enumerate(table):
            part = text[i * size : (i + 1) * size]
            if i >= len(hits):
                contents[block] = (salt, text[: i * size + len(part)])
            trace["blocks"].append({
                "text": part, "block": block, "owners": cache.ref_count[block],
                "state": "hit" if i < len(hits) else "computed" if len(part) == size else "partial",
                "parent": (hashes[i - 1] if i else lesson.ROOT_HASH).hex()[:16] if len(part) == size else "",
                "hash": hashes[i].hex()[:16] if len(part) == size else "",
                "holds": contents[block][1][-len(part) :],  # what attention will read there
                "wrong": contents[block] != (salt, text[: i * size + len(part)]),
            })  # fmt: skip
        cache.free(request)
    now = cache.block_hash
    trace["evicted"] = [block for block, key in enumerate(before) if key is not None and now[block] != key]
    trace["free_queue"] = [[block, int(now[block] is not None)] for block in cache.free_queue]
    return trace


def describe(trace: dict) -> str:
    """The state under the widget, as text."""
    signs, lines = {"hit": "=", "computed": "+", "partial": "·"}, []
    lines.append(
        f"blocks of {trace['block_size']} tokens, hashes of {trace['hash_bits']} bits, {trace['pool_blocks']} "
        "blocks; = found, + computed and indexed, · not full"
    )
    for sent in trace["sends"]:
        total = sent["cached"] + sent["computed"]
        what = "refused: the pool is too small" if sent["refused"] else f"{sent['cached']} of {total} tokens cached"
        lines.append(f"{sent['name']}{' (salted)' if sent['salt'] else ''}: {what}")
        if sent["blocks"]:
            lines.append("  " + " ".join(f"{signs[b['state']]}{b['block']}{'!' * b['wrong']}" for b in sent["blocks"]))
        lines += [f"  WRONG: {b['text']!r} is served from {b['holds']!r}" for b in sent["blocks"] if b["wrong"]][:1]
    chain = [block for block in trace["sends"][1]["blocks"] if block["hash"]][:3]
    for block in chain:
        lines.append(f"  {block['parent'][:8]} + {block['text']!r} -> {block['hash'][:8]}")
    queue = [f"{block}{'*' * cached}" for block, cached in trace["sends"][-1]["free_queue"]]
    shown = queue if len(queue) <= 18 else [*queue[:8], "…", *queue[-9:]]
    return "\n".join([*lines, f"free queue (* still cached): {' '.join(shown)}"])


# --- Numbers that the text quotes -----------------------------------------------------------------------------------

POOLS = (192, 256, 384, 512, 768, 1024, 2048, 4096)  # the longest chat needs 166
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
KERNEL_US = (1, 3)  # that a kernel takes beside its bytes; 3: NVIDIA's aiconfigurator, on an H100 and on an H200
# Qin et al. 2025 (Mooncake), conversation trace: the same, computed from the published trace; blocks of 512 tokens.
MOONCAKE = {1_000: 0.044, 3_000: 0.065, 10_000: 0.211, 30_000: 0.326, 50_000: 0.355}  # a pool without end: 0.366
WIDTH = 16  # `decode_step` runs models a sixteenth as wide: the same operations, activations a sixteenth as large


def prefill_factor(prefix: int, message: int, requests: int, block_size: int = BLOCK) -> float:
    """Prompt tokens without a cache over those with one: R·(P + m) / (P + m + (R − 1)·(P + m − hit)).

    hit = ⌊P / block⌋ · block if the message is not empty. As R grows, it approaches (P + m) / (P + m − hit).
    """
    total = prefix + message
    hit = min(prefix, total - 1) // block_size * block_size
    return requests * total / (total + (requests - 1) * (total - hit))


@functools.cache
def decode_step(name: str) -> Tape:
    """One decode step of 8 sequences of a model of lesson 01's table, recorded as a GPU would run it."""
    c = dataclasses.asdict(roofline.llama_config(roofline.MODELS[name])) | {"vocab_size": 16}
    narrow = {key: c[key] // WIDTH for key in ("hidden_size", "intermediate_size", "head_dim")}
    config = LlamaConfig(**c | narrow)
    weights = {key: torch.zeros(shape) for key, shape in llama.tensor_shapes(config).items()}
    return lesson.record_step(llama.Llama(config, weights.get, torch.bfloat16, torch.device("cpu")))


def launches(name: str) -> dict[str, int]:
    """Kernels of one decode step, by kind."""
    kinds = [lesson.kind_of(func) for func, *_ in decode_step(name).tape]
    counts = {"product": kinds.count("product"), "triton": kinds.count("triton"), "other": kinds.count("small")}
    return {"total": len(kinds)} | counts


def step_seconds(
    name: str, num_seqs: int, context: int, gpu: GPU, launch: float, kernel: float = 0.0
) -> tuple[float, float]:
    """(eager, as one graph). The CPU launches ahead of the GPU, so the slower of the two decides: max(n · launch, GPU).

    The GPU's time is lesson 01's roofline, what the step must compute and move, and `kernel` seconds for each kernel:
    to start it, to fill and drain the GPU. No graph saves those. With 0 the gain of a graph is a bound.
    """
    n = launches(name)["total"]
    on_gpu = gpu.seconds(*roofline.step_cost(roofline.MODELS[name], num_seqs, 1, context)) + n * kernel
    return max(n * launch, on_gpu), max(launch, on_gpu)


def activation_bytes(name: str, num_tokens: int) -> tuple[float, float]:
    """(bytes that a layer's small operations read and write one by one, bytes of its weights), in bf16.

    Merging can save no more than the first; the second has to be read in any case.
    """
    layers = roofline.MODELS[name]["num_hidden_layers"]
    small = sum(moved for _, moved in lesson.small_operations(decode_step(name)))
    return WIDTH * small * num_tokens / 8 / layers, 2 * roofline.weights_read(roofline.MODELS[name])[0] / layers


@functools.cache
def facts() -> dict[str, Any]:
    """The lesson's deterministic numbers. No weights, about a second."""

    def found(**changes: Any) -> Any:
        return simulate(WIDGET_DEFAULT | changes)["sends"][1]["cached"]

    bare, workload, graphs = {"suffix_a": "", "suffix_b": ""}, chats.chat_workload(), {}
    tokens = sum(len(prompt) for prompt, _ in workload)
    for name in ("SmolLM2-135M", "Llama-3.1-8B"):
        step = functools.partial(step_seconds, name, context=1024, gpu=HARDWARE["H100 80GB"], launch=lesson.LAUNCH)
        times = {str(n): step(n) for n in BATCHES}
        slower = {str(us): step(1, kernel=1e-6 * us) for us in KERNEL_US}
        graphs[re.sub(r"\W", "_", name).lower()] = launches(name) | {
            "eager_ms": {n: 1e3 * eager for n, (eager, _) in times.items()},
            "graph_ms": {n: 1e3 * graph for n, (_, graph) in times.items()},
            "factor": {n: eager / graph for n, (eager, graph) in times.items()},
            "factor_if_kernel_us": {us: eager / graph for us, (eager, graph) in slower.items()},  # one sequence
        }
    h100, loops = HARDWARE["H100 80GB"], {kind: lesson.on_a_clock(kind, lesson.STOPS) for kind in lesson.LOOPS}
    padding = [capture_sizes(n)[-1] - n for n in range(1, 513)]
    config = roofline.MODELS["Llama-3.1-8B"]
    reduces, (linear, head) = 2 * config["num_hidden_layers"] + 1, roofline.weights_read(config)  # 1: the embedding's
    return {
        "source": {
            "skipped": 2000 / 2105, "three": 3 * 400 / (400 + 2 * 20), "limit": 400 / 20,
            "tokens_three": prefill_factor(2000, 105, 3), "tokens_hundred": prefill_factor(2000, 105, 100),
            "small_three": prefill_factor(304, 16, 3), "with_answers": 3 * (400 + 1000) / (440 + 3 * 1000),
            "found_of_three": 2 / 3 * 2000 / 2105,
        },
        "widget": {
            "default": found(), "change_60": found(**bare, edit="change character 60"),
            "change_0": found(edit="change character 0"), "insert": found(edit="insert one in front"),
            "salted": found(salt="b"), "identical": found(**bare), "identical_32": found(**bare, block_size=32),
        },
        "hash": {f"expected_{bits}": math.sqrt(math.pi / 2 * 2**bits) for bits in (8, 16, 64)},  # birthdays
        "hits": chats.CHATS | {
            "requests": len(workload), "tokens": tokens, "mean_prompt": tokens / len(workload),
            "rate": {str(n): lesson.hit_rate(workload, n) for n in POOLS},
            "best": sum(lesson.naive_hits(workload, BLOCK)) / tokens,
        },
        "graphs": graphs | {
            "sizes": len(capture_sizes(512)), "most_padding": max(padding), "mean_padding": statistics.mean(padding),
        },
        "compile": {
            str(n): {"small": small, "weights": weights, "share": small / (small + weights),
                     "small_ms": 1e3 * small / h100.bandwidth, "products_ms": 1e3 * h100.seconds(weights * n, weights)}
            for n in (1, 256, 2048) for small, weights in [activation_bytes("Llama-3.1-8B", n)]
        },
        "loops": {kind: {"plans": loop["plans"], "wasted": loop["wasted"]} for kind, loop in loops.items()}
        | {"tokens": sum(lesson.STOPS), "requests": len(lesson.STOPS)},
        "catalog": {
            "weights": roofline.weight_bytes(config), "all_reduces": reduces, "read": 2 * (linear + head),
            "all_reduce_kib": reduces * config["hidden_size"] * 2 / 1024,
            "read_int4": linear / 8 * (4 + 20 / 128) + 2 * head,  # fp16 scale, zero point; the output matrix stays bf16
            "kv_bytes": roofline.KVCacheSpec.from_config(config).bytes_per_token(),
        },
    }  # fmt: skip


# --- Figures --------------------------------------------------------------------------------------------------------


def draw(folder: str | Path) -> list[Path]:
    """The hash chain of the widget's default, hit rates by pool size, and the launch-cost model."""
    from matplotlib.patches import Patch, Rectangle

    numbers, C = facts(), figures.COLORS
    colors = {"computed": C["blue"], "hit": C["green"], "partial": C["grey"]}
    figure, ax = figures.new_figure(8.0, 3.3)
    for y, sent in zip((1.7, 0), simulate(WIDGET_DEFAULT)["sends"]):
        ax.text(
            0, y + 0.8, f"request {sent['name']}: {sent['cached']} of {len(sent['text'])} tokens found", weight="bold"
        )
        for i, block in enumerate(sent["blocks"]):
            x, middle = 1.3 * i, {"ha": "center", "va": "center"}
            ax.add_patch(Rectangle((x, y), 1.2, 0.62, color=colors[block["state"]]))
            ax.text(
                x + 0.6,
                y + 0.42,
                block["text"].replace(" ", "␣"),
                fontsize=7.8,
                color="white",
                family="DejaVu Sans Mono",
                **middle,
            )
            ax.text(x + 0.6, y + 0.17, f"block {block['block']}", fontsize=8, color="white", **middle)
            ax.text(x + 0.6, y - 0.2, block["hash"][:8] or "not full: no key", fontsize=8, color=C["ink"], **middle)
            if i and block["hash"]:
                ax.annotate(
                    "", (x + 0.2, y - 0.2), (x - 0.3, y - 0.2), arrowprops={"arrowstyle": "->", "color": C["grey"]}
                )
    labels = {"computed": "computed, then indexed", "hit": "found: the same physical block", "partial": "not full"}
    ax.legend(
        handles=[Patch(color=colors[state], label=label) for state, label in labels.items()],
        ncols=3,
        loc="lower center",
        bbox_to_anchor=(0.5, -0.12),
    )
    ax.set(xlim=(-0.05, 7.75), ylim=(-0.75, 2.7))
    ax.axis("off")
    paths = [figures.save_figure(figure, folder, "05_hash_chain")]

    figure, axes = figures.new_figure(8.0, 3.4, ncols=2, sharey=True)
    ours = {int(n): rate for n, rate in numbers["hits"]["rate"].items()}
    mine, known = f"ours: {chats.CHATS['conversations']} conversations, blocks of 16", numbers["hits"]["best"]
    for ax, title, rates, best, color in (
        (axes[0], mine, ours, known, "blue"),
        (axes[1], "literature: Mooncake's trace, blocks of 512", MOONCAKE, 0.366, "orange"),
    ):
        ax.plot(list(rates), [100 * rate for rate in rates.values()], "o-", color=C[color])
        ax.axhline(100 * best, ls=":", color=C["grey"])
        ax.text(min(rates), 100 * best + 2, f"a cache that forgets nothing: {100 * best:.0f} %", fontsize=8.5)
        ax.set(xscale="log", ylim=(0, 100), xlabel="blocks in the pool")
        ax.set_title(title, fontsize=9.5)
    for ax, ticks in zip(axes, ((256, 512, 1024, 2048, 4096), (1000, 3000, 10_000, 30_000))):
        ax.set_xticks(ticks, [f"{n:,}" for n in ticks])
        ax.minorticks_off()
    axes[0].set_ylabel("prompt tokens found, %")
    paths.append(figures.save_figure(figure, folder, "05_hit_rates"))

    figure, axes = figures.new_figure(8.0, 3.4, ncols=2, sharey=True)
    for ax, (key, name) in zip(axes, (("smollm2_135m", "SmolLM2-135M"), ("llama_3_1_8b", "Llama-3.1-8B"))):
        known = numbers["graphs"][key]
        for kind, color, label in (
            ("eager_ms", "orange", f"{known['total']} launches"),
            ("graph_ms", "blue", "one graph"),
        ):
            ax.plot(BATCHES, [known[kind][str(n)] for n in BATCHES], "o-", color=C[color], label=label)
        ax.set(xscale="log", yscale="log", xlabel="sequences in the step", xticks=[1, 4, 16, 64, 256],
               xticklabels=[1, 4, 16, 64, 256], yticks=[0.1, 1, 10], yticklabels=["0.1", "1", "10"])  # fmt: skip
        ax.set_title(f"{name}: H100, 10 µs a launch", fontsize=9.5)
        ax.minorticks_off()
        ax.legend()
    axes[0].set_ylabel("decode step, ms (model)")
    return [*paths, figures.save_figure(figure, folder, "05_launches")]


# --- Measured -------------------------------------------------------------------------------------------------------


def runner_with(graphs: Callable[..., Any] | None, model: llama.Llama, limits: Any, num_blocks: int) -> Any:
    """Lesson 02's attention, and in the slot for graphs what `graphs` makes of the model and its cache."""
    config = VllmConfig(attention_backend="paged", enforce_eager=True)
    runner = make_runner(model, limits, num_blocks, BLOCK, config)
    if graphs:
        runner.graphs = graphs(runner.model, runner.cache, runner.attend, limits)
    return runner


def make_core(
    model: llama.Llama,
    caching: bool = True,
    num_blocks: int = 160,
    max_model_len: int = 1024,
    hash_bits: int = 256,
    graphs: Callable[..., Any] | None = None,
) -> EngineCore:
    """The engine, with lesson 02's attention. `graphs(model, cache, plan, limits)` makes a `CapturedModel`."""
    config = SchedulerConfig(max_model_len, max_num_seqs=32, max_num_batched_tokens=max_model_len)
    scheduler = make_scheduler(config, num_blocks, BLOCK, enable_prefix_caching=caching)
    scheduler.kv_cache_manager.hash_bits = hash_bits
    return EngineCore(scheduler, runner_with(graphs, model, config, num_blocks))


def ask(core: EngineCore, prompt: Sequence[int], max_tokens: int = 1) -> tuple[Request, float]:
    """Serve one prompt, greedily, to its end. Returns the request, and the seconds until its first token."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    request = Request("ask", list(prompt), params, eos_token_id=(core.runner.model.config.eos_token_ids or (None,))[0])
    core.add_request(request)
    start = time.perf_counter()
    core.step()
    ttft = time.perf_counter() - start
    while core.scheduler.has_unfinished_requests():
        core.step()
    return request, ttft


TOOLS = """You are the assistant of a library and can call functions.
{"name": "find_book", "parameters": {"title": "string", "author": "string"}}
{"name": "reserve", "parameters": {"book_id": "integer", "card": "string"}}
{"name": "opening_hours", "parameters": {"day": "string"}}
{"name": "renew", "parameters": {"book_id": "integer"}}"""


def conversation(core: EngineCore, tokenizer: Tokenizer, max_tokens: int) -> list[tuple[Request, float]]:
    """A chat of three turns; each prompt repeats everything said so far, the model's own words included."""
    messages, answers = [{"role": "system", "content": TOOLS}], []
    for turn in lesson.TURNS:
        messages.append({"role": "user", "content": turn})
        answers.append(ask(core, tokenizer.converse(messages), max_tokens))
        messages.append({"role": "assistant", "content": tokenizer.decode(answers[-1][0].output_token_ids)})
    return answers


def three_requests(core: EngineCore, tokenizer: Tokenizer, prefix: int, message: int) -> list[tuple[Request, float]]:
    """The source's table: an instruction of `prefix` tokens for all three, `message` tokens of their own, no answer."""
    shared = tokenizer.encode(lesson.SYSTEM * (1 + prefix // 60))[:prefix]
    return [ask(core, shared + tokenizer.encode(f"{turn} " * message)[:message]) for turn in lesson.TURNS]


def measure_prefix_caching(model: llama.Llama, tokenizer: Tokenizer) -> dict[str, Any]:
    """ms to the first tokens of prompts that share a beginning, by the engine with and without its cache."""
    found, rows, longest = {}, [], min(2112, model.config.max_position_embeddings)
    workloads = {
        "instruction of 304, own 16": functools.partial(three_requests, prefix=304, message=16),
        "chat of 3 turns, with tools": functools.partial(conversation, max_tokens=6),
        "instruction of 2000, own 105": functools.partial(three_requests, prefix=2000, message=105),
    }
    for name, serve in workloads.items():
        rounds = [
            [serve(make_core(model, cached, max_model_len=longest), tokenizer) for cached in (False, True)]
            for _ in range(3)
        ]
        off, on = rounds[0]
        if [r.output_token_ids for r, _ in on] != [r.output_token_ids for r, _ in off]:
            raise common.CheckFailed(f"{name}: the cache changed the tokens")
        prompt, cached = sum(r.num_prompt_tokens for r, _ in on), sum(r.num_cached_tokens for r, _ in on)
        slow, fast = (statistics.median(sum(ttft for _, ttft in each[i]) for each in rounds) for i in (0, 1))
        found[re.sub(r"\W+", "_", name)] = {"factor": slow / fast, "without_ms": 1e3 * slow, "with_ms": 1e3 * fast}
        rows.append([name, prompt, cached, f"{prompt / (prompt - cached):.2f}x", f"{slow / fast:.2f}x"])
    common.table(["3 prompts each", "tokens", "found", "less to compute", "TTFT, sum"], rows)
    return found


def measure_graphs(model: llama.Llama, twin: Any = None) -> dict[str, Any]:
    """On a GPU: ms of a decode step in bf16, and the launches that the profiler sees in one; beside it the matrix
    products alone and, given its `twin`, Transformers. Before it, what a server's start pays: every bucket captured."""
    found: dict[str, Any] = {}
    for n in (1, 8, 32):
        found[f"products_{n}"] = {"ms": 1e3 * matmul_seconds(model, n, n)}
        if twin is not None:
            found[f"transformers_{n}"] = {"ms": peers.transformers_ms(twin, n)}
    pieces, full = (functools.partial(CapturedModel, full=full, largest=512) for full in (False, True))
    runners = {"eager": None, "piecewise": pieces, "full": full}
    graphs = make_core(model, caching=False, graphs=full).runner.graphs
    (free, _), start = torch.cuda.mem_get_info(), time.perf_counter()
    graphs.capture_all()
    found["capture"] = {
        "s": time.perf_counter() - start,
        "gib": (free - torch.cuda.mem_get_info()[0]) / 2**30,
        "graphs": sum(len(step.graphs) for step in graphs.captured.values()),
    }
    common.say("captured before any request: {graphs:,} graphs in {s:.1f} s, {gib:.2f} GiB".format(**found["capture"]))
    del graphs
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    for n, (name, graphs) in itertools.product((1, 8, 32), runners.items()):
        gc.collect()  # engines hold themselves in cycles, and each has gigabytes of keys and values
        core = make_core(model, caching=False, num_blocks=2048, graphs=graphs)
        for i in range(n):
            core.add_request(Request(str(i), [i + 5] * 64, params))
        for _ in range(8):
            core.step()
        start = time.perf_counter()
        for _ in range(50):
            core.step()  # ends with its tokens on the host, so the GPU is done
        seconds = (time.perf_counter() - start) / 50
        with torch.profiler.profile() as profile:
            core.step()
        launched = sum(event.count for event in profile.key_averages() if "Launch" in event.key)
        found[f"{name}_{n}"] = {"ms": 1e3 * seconds, "launches": launched}
        common.say(f"{n:>2} sequences, {name:<9}: {1e3 * seconds:.2f} ms, {launched} launches")
    return found


# What the compiler is given. Attention stays outside: it is one hand-written kernel already, and it needs this step's
# lengths and block tables, which are not constants. vLLM hides it behind a custom operator that the compiler cannot
# look into; so do we.

CONTEXT: dict[str, Any] = {}  # what the opaque operator reads: vLLM's `forward_context`


@functools.cache
def opaque_attention() -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """The current step's attention as an operator of which a compiler knows the shapes and nothing else."""

    @torch.library.custom_op("lessons::attention", mutates_args=())
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return CONTEXT["attend"](CONTEXT["layer"], q, k, v)

    attention.register_fake(lambda q, k, v: torch.empty_like(q, memory_format=torch.contiguous_format))
    return attention


def compiled_forward(model: llama.Llama) -> Callable[[torch.Tensor, torch.Tensor, llama.Attend], torch.Tensor]:
    """`model.forward` with its layers compiled at the first call with a new T. Each layer becomes a model of one layer,
    all with the same code: it is compiled once and not L times."""
    attention, views = opaque_attention(), []
    for i in range(model.config.num_hidden_layers):
        view, prefix = copy.copy(model), f"layers.{i}."
        view.config = dataclasses.replace(model.config, num_hidden_layers=1)
        view.linear = {
            name.replace(prefix, "layers.0."): layer for name, layer in model.linear.items() if name.startswith(prefix)
        }
        for norms in ("input_norm", "post_attention_norm", "q_norm", "k_norm"):
            setattr(view, norms, getattr(model, norms)[i : i + 1])
        views.append(view)
    run = llama.Llama.forward.__wrapped__  # without its switch to inference mode

    @functools.partial(torch.compile, dynamic=False)
    def one_layer(view: llama.Llama, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return run(view, None, positions, lambda layer, q, k, v: attention(q, k, v), hidden=hidden)

    @torch.no_grad()
    def forward(token_ids: torch.Tensor, positions: torch.Tensor, attend: llama.Attend) -> torch.Tensor:
        hidden = torch.nn.functional.embedding(token_ids, model.embed_tokens)
        for i, view in enumerate(views):
            CONTEXT.update(attend=attend, layer=i)
            hidden = one_layer(view, hidden, positions)
        return hidden

    return forward


def measure_compile(model: llama.Llama, num_seqs: int = 8) -> dict[str, Any]:
    """The same decode step eager and compiled: seconds, kernels in a layer, error. Raises what the compiler raises."""
    from torch._inductor.utils import run_and_get_code

    token_ids = torch.arange(100, 100 + num_seqs, device=model.device)
    cache = lesson.PagedKVCache(model, 4 * num_seqs + 1, BLOCK)
    tables = [[1 + 4 * b + i for i in range(4)] for b in range(num_seqs)]
    meta = AttentionMetadata.build(tables, [50] * num_seqs, [1] * num_seqs, BLOCK, model.device)
    forward = compiled_forward(model)

    def eager() -> Any:
        return model.forward(token_ids, meta.positions, cache.attend(meta))

    def fast() -> Any:
        return forward(token_ids, meta.positions, cache.attend(meta))

    reference, start = eager(), time.perf_counter()
    out, code = run_and_get_code(fast)
    cold, tape = time.perf_counter() - start, Tape()
    tape.capture_begin()
    model.forward(None, meta.positions, lambda layer, q, k, v: q, hidden=reference, layers=[0])
    tape.capture_end()
    called = re.findall(r"(?<!def )\b(?:(?:cpp_fused|triton)_\w+(?=\(|\.run\()|extern_kernels\.\w+(?=\())", code[0])
    times = [(timing.measure(eager, 0.5).median, timing.measure(fast, 0.5).median) for _ in range(3)]  # taking turns
    before, after = (statistics.median(column) for column in zip(*times))
    return {
        "cold_s": cold, "eager_ms": 1e3 * before, "compiled_ms": 1e3 * after, "factor": before / after,
        "operations": len(tape.tape), "kernels": len(called), "compilations": len(code),
        "error": common.relative_error(out, reference),
    }  # fmt: skip


# The lesson's three loops on a machine: the worker is a thread of this process, and its step's end is waited for.


def make_loop(kind: str, model: llama.Llama) -> tuple[PipelineEngineCore, Worker]:
    """The served engine's loop with eight seats and as many steps in flight as `kind` plans ahead, and its worker."""
    parallel = ParallelConfig(async_scheduling=True)
    executor = ThreadExecutor()
    worker = executor.worker  # its model is loaded already
    config = VllmConfig(attention_backend="paged", async_scheduling=True)
    worker.spec, worker.model = WorkerSpec(None, parallel, model.dtype, config), model
    worker.set_groups(*make_groups(None, parallel))
    limits, num_blocks = SchedulerConfig(max_model_len=256, max_num_seqs=8), 8 * 16 + 1
    scheduler = make_scheduler(limits, num_blocks, BLOCK, enable_prefix_caching=False, async_scheduling=True)
    runner = RemoteRunner(Workers(executor, parallel, model), limits, num_blocks, BLOCK)
    return PipelineEngineCore(scheduler, runner, lesson.LOOPS[kind][0]), worker


def run_loop(kind: str, core: PipelineEngineCore, requests: Sequence[Request], overhead: float = 0.0) -> dict[str, Any]:
    """Serve requests that are all there at the start: their tokens, and the seconds of each planning.

    `overhead`: seconds that every planning takes longer, in place of a server's further work on the host.
    """
    host: list[float] = []
    for request in requests:
        core.add_request(request)
    while core.scheduler.has_unfinished_requests() or core.batch_queue:
        if lesson.LOOPS[kind][1] or not core.batch_queue:
            start = time.perf_counter()
            time.sleep(overhead)
            while core.put_in_flight():
                pass
            host.append(time.perf_counter() - start)
        if not core.batch_queue and core.scheduler.requests:
            raise RuntimeError("nothing can run, but requests wait: a sample was lost")
        core.update_from_output(*core.next_result())
    return {"token_ids": [request.output_token_ids for request in requests], "host_s": host}


def measure_loops(model: llama.Llama, tokenizer: Tokenizer, host_ms: float) -> dict[str, Any]:
    """The same 16 requests through the three loops: how long the model waits for a plan."""
    found, tokens = {}, []
    prompts = [tokenizer.encode(turn) for turn in (*lesson.TURNS, "Which films are new?")] * 4
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in [9, 5, 12, 7] * 4]
    for kind in lesson.LOOPS:
        (core, worker), start = make_loop(kind, model), time.perf_counter()
        requests = [Request(str(i), list(p), s) for i, (p, s) in enumerate(zip(prompts, params))]
        try:
            run = run_loop(kind, core, requests, host_ms / 1e3)
        finally:
            core.remote.executor.shutdown()
        seconds, spans = time.perf_counter() - start, worker.take_spans()
        busy, whole = sum(end - first for first, end in spans), spans[-1][1] - spans[0][0]
        host, idle = 1e3 * statistics.median(run["host_s"]), 1 - busy / whole
        tokens.append(run["token_ids"])
        found[kind] = {"runs": len(spans), "host_ms": host, "idle": idle, "seconds": seconds}
    rows = [
        [kind, loop["runs"], f"{loop['host_ms']:.1f} ms", f"{loop['idle']:.0%}", f"{loop['seconds']:.2f} s"]
        for kind, loop in found.items()
    ]
    common.table([f"{host_ms:g} ms of other work per plan", "model runs", "a plan", "model idle", "total"], rows)
    common.check_equal("all three loops write the same tokens", tokens, [tokens[0]] * 3)
    return found


def measure_lookup(model: llama.Llama, tokenizer: Tokenizer) -> dict[str, Any]:
    """Tokens per pass and the time saved, by number of guesses."""
    n, rows, found = 64, [], {}
    for name, prompt in lesson.TASKS.items():
        plain = [], 0.0
        for k in (0, 2, 4, 8):
            start = time.perf_counter()
            tokens, passes = lesson.generate_with_lookup(model, tokenizer.encode(prompt), n, k)
            seconds = time.perf_counter() - start
            plain = plain if k else (tokens, seconds)
            if tokens != plain[0]:
                raise common.CheckFailed(f"{name}: guesses changed the tokens")
            found[f"{name}_{k}"] = {"tokens_per_pass": n / passes, "factor": plain[1] / seconds}
            rows.append([name, k, n, passes, f"{n / passes:.2f}", f"{plain[1] / seconds:.2f}x"])
    common.table(["greedy, one sequence", "guesses", "tokens", "passes", "tokens per pass", "faster"], rows)
    return found


def compile_or_say_why(model: llama.Llama) -> dict[str, Any] | None:
    """`measure_compile`, or None and a line that says why not. Raises CheckFailed if what was compiled is wrong."""
    from torch._dynamo.exc import TorchDynamoException

    try:
        found = measure_compile(model)
    except (TorchDynamoException, RuntimeError) as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        common.skipped("compiling", f"{reason[:80]} (on a CPU, a C++ compiler is needed)")
        return None
    if not found["error"] <= common.TOLERANCE[torch.float32]:
        raise common.CheckFailed(f"the compiled step is off by {found['error']:.1e}")
    common.say(f"✓ the compiled step of 8 sequences: relative error {found['error']:.1e}")
    common.say(
        f"{found['operations']} operations of a layer became {found['kernels']} kernels; "
        f"step {found['eager_ms']:.1f} -> {found['compiled_ms']:.1f} ms, compiled in {found['cold_s']:.0f} s"
    )
    return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """`--bench`: every entry of the catalog on this machine; graphs on a GPU only, there an 8B's, too."""
    model, tokenizer = loader.load(args.model)
    common.heading("Measured here: prefix caching")
    found = {"prefix-caching": measure_prefix_caching(model, tokenizer)}
    if common.HAS_GPU:
        common.heading("Measured here: CUDA graphs")
        graphs = measure_graphs(loader.load(args.model, torch.bfloat16)[0])
        found["cuda-graphs"] = graphs | {"llama_3_1_8b": measure_graphs(*peers.random_twins("Llama-3.1-8B"))}
    common.heading("Measured here: torch.compile")
    if compiled := compile_or_say_why(model):
        found["torch-compile"] = compiled
    common.heading("Measured here: three loops")
    found["async-scheduling"] = measure_loops(model, tokenizer, args.host_ms)
    common.heading("Measured here: prompt lookup")
    return found | {"prompt-lookup": measure_lookup(model, tokenizer)}

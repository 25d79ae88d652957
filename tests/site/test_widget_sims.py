"""Widgets tell the truth: each simulation in JavaScript agrees with its lesson's Python in every reachable state.

`-m slow` compares all states but those of the largest products, of which it has a dense sample; `-m long` has these.
"""

from __future__ import annotations

import common

import functools
import importlib.util
import itertools
import json
import math
import operator
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from lab import cli
from support import documents

TESTS = Path(__file__).resolve().parent
WIDGETS = common.ROOT / "lessons" / "widgets"
LESSONS = sorted(path.stem for path in (WIDGETS / "controls").glob("*.json"))
needs_node = pytest.mark.skipif(
    shutil.which("node") is None, reason="Node is not installed: JavaScript's side of the comparison cannot run"
)

MOST_STATES = 20_000
SEEDED_TEXTS = 500
SAMPLE = {"06_serving": 5, "08_disagg": 15, "11_preemption": 3, "11b_prediction": 2, "12_multi_lora": 20,
          "06d_load_generator": 20, "06f_openai_api": 50, "04c_speed": 15}  # fmt: skip
OTHERS = 60  # states of each other lesson in the fast tier, beside its default, presets, bet and neighbours
DENSE = {"04b_offline_engine": 800, "05_optimizations": 800, "06_serving": 80, "06d_load_generator": 120,
         "08_disagg": 200, "12_multi_lora": 150}  # of the large products, in the slow tier  # fmt: skip

Params = dict[str, Any]


# --- The states that a reader can reach -----------------------------------------------------------------------------


@functools.cache
def controls(name: str) -> dict[str, Any]:
    return json.loads((WIDGETS / "controls" / f"{name}.json").read_text())


def default(name: str) -> Params:
    return {**controls(name)["fixed"], **controls(name)["default"]}


def every_state(name: str) -> list[Params]:
    """The product of all values, as the page counts it."""
    knobs = controls(name)["controls"]
    names = [knob["name"] for knob in knobs]
    return [default(name) | dict(zip(names, values)) for values in itertools.product(*(k["values"] for k in knobs))]


def typed_states(name: str, count: int = SEEDED_TEXTS) -> list[Params]:
    """What readers may type: seeded strings, among them beginnings of each other and of the suggestions."""
    rng, knobs = random.Random(name), controls(name)["controls"]
    texts = [knob for knob in knobs if knob["kind"] == "text"]
    states = []
    for _ in range(count if texts else 0):
        state = default(name) | {knob["name"]: rng.choice(knob["values"]) for knob in knobs}
        known = [value for knob in texts for value in knob["values"]]
        for knob in texts:
            typed = "".join(rng.choices([chr(c) for c in range(32, 127)], k=rng.randrange(knob["max_length"] + 1)))
            kept = rng.choice(known)[: rng.randrange(20)]
            state[knob["name"]] = (kept + typed)[: knob["max_length"]]
            known.append(state[knob["name"]])
        states.append(state)
    return states


def chosen_states(name: str, count: int | None = None, typed: int = 20) -> list[Params]:
    """The default and each control moved by itself, the presets, the bet, and a seeded sample of everything."""
    count = count or SAMPLE.get(name, OTHERS)
    base, c = default(name), controls(name)
    moved = [base | {knob["name"]: value} for knob in c["controls"] for value in knob["values"]]
    named = [base | preset["params"] for preset in [*c["presets"], c["bet"]]]
    every = every_state(name)
    return [*named, *moved, *random.Random(name).sample(every, min(len(every), count)), *typed_states(name, typed)]


# --- Python on one side, Node on the other --------------------------------------------------------------------------


def write_states(path: Path, name: str, states: Iterable[Params]) -> Path:
    lesson = cli.numbers(name)
    with path.open("w") as file:
        for params in states:
            trace = lesson.simulate(params)
            file.write(json.dumps({"params": params, "trace": trace, "text": lesson.describe(trace)}) + "\n")
    return path


def compare(pairs: Iterable[tuple[Path, Path]], how_far: str = "all") -> list[dict[str, Any]]:
    """One Node process over all (simulation, states) pairs."""
    command = ["node", TESTS / "widget_sims.mjs", how_far, *itertools.chain(*pairs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def sim(name: str, folder: Path = WIDGETS / "sims") -> Path:
    return folder / f"{name}.mjs"


def later_sum(values: Iterable[Any], start: Any = 0) -> Any:
    """As since 3.12 `sum` corrects how floats round: it may say 1 where a browser says 0.9999999999999999."""
    values = list(values)
    return math.fsum([start, *values]) if any(isinstance(x, float) for x in values) else sum(values, start)


def use_sum(patch: pytest.MonkeyPatch, function: Callable) -> None:
    for path in documents.SCRIPTS:
        patch.setattr(cli.numbers(path.stem), "sum", function, raising=False)


@pytest.fixture(scope="module")
def chosen_and_rounded(tmp_path_factory) -> tuple[dict[str, Path], dict[str, list[Params]]]:
    """The chosen states of each simulation, and what Python says of them; and those in which a sum rounds."""
    folder, differs, rounded = tmp_path_factory.mktemp("states"), [], {name: [] for name in LESSONS}

    def noted(values: Iterable[Any], start: Any = 0) -> Any:
        values = list(values)
        found = sum(values, start)
        if found != later_sum(values, start):
            differs.append(True)
        return found

    def states(name: str) -> Iterable[Params]:
        for params in chosen_states(name):
            differs.clear()
            yield params
            if differs:
                rounded[name].append(params)

    with pytest.MonkeyPatch.context() as patch:
        use_sum(patch, noted)
        return {name: write_states(folder / name, name, states(name)) for name in LESSONS}, rounded


@pytest.fixture(scope="module")
def chosen(chosen_and_rounded) -> dict[str, Path]:
    return chosen_and_rounded[0]


@pytest.fixture(scope="module")
def compared(chosen) -> dict[str, dict[str, Any]]:
    return dict(zip(LESSONS, compare((sim(name), path) for name, path in chosen.items())))


@needs_node
@pytest.mark.parametrize("name", LESSONS)
def test_javascript_agrees_with_python(name, compared):
    """Whole traces, whole numbers exactly, and the text under the picture, on a sample. (All of them: slow.)"""
    assert compared[name]["states"] == len(chosen_states(name))
    assert compared[name]["first"] is None


def agrees(name: str, states: list[Params], folder: Path) -> None:
    (result,) = compare([(sim(name), write_states(folder / name, name, states))])
    print(f"{name}: {result['states']} states, {result['seconds']:.1f} s in Node")
    assert result["states"] == len(states)
    assert result["first"] is None


@needs_node
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in DENSE else pytest.mark.slow) for name in LESSONS]
)
def test_javascript_agrees_with_python_in_every_state(name, tmp_path):
    """Of the large products the slow tier has the dense sample below, and `long` all states."""
    agrees(name, every_state(name) + typed_states(name), tmp_path)


@needs_node
@pytest.mark.slow
@pytest.mark.parametrize("name", DENSE)
def test_javascript_agrees_with_python_in_a_dense_sample(name, tmp_path):
    """The presets, the bet, each control's values, and hundreds of a large product; all of it in `long`."""
    agrees(name, chosen_states(name, DENSE[name], SEEDED_TEXTS), tmp_path)


@needs_node
def test_sums_of_later_pythons_agree_too(chosen_and_rounded, monkeypatch, tmp_path):
    """In the states in which such a sum is another one: in all others, Python says the same."""
    rounded = {name: states for name, states in chosen_and_rounded[1].items() if states}
    assert rounded or sys.version_info >= (3, 12)
    use_sum(monkeypatch, later_sum)
    results = compare((sim(name), write_states(tmp_path / name, name, states)) for name, states in rounded.items())
    assert [(name, r["first"]) for name, r in zip(rounded, results, strict=True) if r["first"]] == []


# --- Would it notice? -----------------------------------------------------------------------------------------------

BATCHING, CHUNKED, CACHING = "lib/continuous_batching.mjs", "lib/chunked_prefill.mjs", "lib/prefix_caching.mjs"
PREEMPTION, POOL, TEXT, SHA256 = "lib/preemption.mjs", "lib/block_pool.mjs", "lib/text.mjs", "lib/sha256.mjs"
FLOATS = "lib/floats.mjs"
MUTANTS: dict[str, list[tuple[str, str, str]]] = {  # lesson: (file, what stands there, what stands there instead)
    "01_kv_cache": [
        ("01_kv_cache.mjs", "stop > room", "stop >= room"),
        ("01_kv_cache.mjs", "cached && i > 0", "cached && i > 1"),
        ("01_kv_cache.mjs", "(T * (T - 1)) / 2", "(T * (T + 1)) / 2"),
        ("01_kv_cache.mjs", "Math.max(flops / rate, moved / bandwidth)", "flops / rate"),
        ("01_kv_cache.mjs", "end + us[done] <= now", "end + us[done] < now"),
        ("01_kv_cache.mjs", "const usable_bytes = Math.floor(", "const usable_bytes = Math.ceil("),
        ("01_kv_cache.mjs", "oom_step === null ? Math.max(...took) :", "false ? 0 :"),
        ("01_kv_cache.mjs", "(2 * took[1] + took[0])", "(2 * took[1])"),
        (TEXT, 'return String(n).replace(', 'return String(n + 1).replace('),
    ],
    "02_paged_attention": [
        ("02_paged_attention.mjs", "hole >= size", "hole > size"),
        ("02_paged_attention.mjs", "const missing = ceil_div(", "const missing = 1 + ceil_div("),
        ("02_paged_attention.mjs", "last[0] + last[1] === first) last[1]", "last[0] === first) last[1]"),
        ("02_paged_attention.mjs", "ref_count[last] > 1", "ref_count[last] > 0"),
        ("02_paged_attention.mjs", "      this.pool.free([last]);", ""),
        ("02_paged_attention.mjs", "this.pool.touch(this.blocks);", ""),
        ("02_paged_attention.mjs", "waiting.unshift(what)", "waiting.push(what)"),
        ("02_paged_attention.mjs", "i * unit + j < tokens", "i * unit + j <= tokens"),
        (POOL, "n > this.num_free_blocks", "n >= this.num_free_blocks"),
        (POOL, "of [...blocks].reverse()) this.free_queue.push_front", "of blocks) this.free_queue.push_front"),
        (TEXT, "(a + b - 1) / b", "(a + b) / b"),
    ],
    "03_flash_attention": [
        ("03_flash_attention.mjs", "l = r(alpha * l);", "l = r(l);"),
        ("03_flash_attention.mjs", "r(o + r(weight * v[i]))", "r(o + weight * v[i])"),
        (FLOATS, "below % 2 !== 0", "true"),
        (FLOATS, "exponent - 10)", "exponent - 9)"),
        ("03_flash_attention.mjs", "> tile.before.m", ">= tile.before.m"),
        ("03_flash_attention.mjs", "share * alpha", "share"),
        ("03_flash_attention.mjs", "rescale && subtract_max", "rescale"),
    ],
    "04_continuous_batching": [
        ("04_continuous_batching.mjs", "arrivals[arrived] <= step", "arrivals[arrived] < step"),
        ("04_continuous_batching.mjs", "arrivals[i] >= t", "arrivals[i] > t"),
        ("04_continuous_batching.mjs", "    free.sort((a, b) => a - b);\n", ""),
        ("04_continuous_batching.mjs", "this.running.length === 0", "this.running.length <= 1"),
        (BATCHING, "this.running.length < this.config", "this.running.length + 1 < this.config"),
        (BATCHING, "request.num_output_tokens >= request.max_tokens", "request.num_output_tokens > request.max_tokens"),
    ],
    "04b_offline_engine": [
        ("04b_offline_engine.mjs", "count > 0 || PROMPT.includes(token)", "count > 0"),
        ("04b_offline_engine.mjs", "presence * (count > 0 ? 1 : 0)", "presence * count"),
        ("04b_offline_engine.mjs", "Math.log(min_p)", "Math.log10(min_p)"),
        ("04b_offline_engine.mjs", "[top_k - 1]", "[Math.max(0, top_k - 2)]"),
        ("04b_offline_engine.mjs", "before >= top_p", "before + p / 2 >= top_p"),
        ("04b_offline_engine.mjs", "of softmax(best)", "of softmax(descending(LOGITS))"),
        ("04b_offline_engine.mjs", "logits.indexOf(Math.max(...logits))", "LOGITS.indexOf(Math.max(...LOGITS))"),
        ("04b_offline_engine.mjs", "c > target", "c > 1 - target"),
        ("04b_offline_engine.mjs", "fixed(probs[token], 4)", "fixed(probs[token], 3)"),
        ("lib/uniforms.mjs", "x >> 31n", "x >> 30n"),
    ],
    "04c_speed": [
        ("04c_speed.mjs", "per_sequence * batch", "per_sequence * (batch - 1)"),
        ("04c_speed.mjs", "Math.max(multiply_us, read)", "multiply_us + read"),
        ("04c_speed.mjs", "packed ? packed_rate : unpacked_rate", "packed_rate"),
        ("04c_speed.mjs", "(copies * kv_bytes)", "(3 * kv_bytes)"),
        ("04c_speed.mjs", "per_layer * LAYERS + outside", "per_layer * LAYERS"),
        ("04c_speed.mjs", "Math.max(multiply(packed_rate), read)", "multiply(packed_rate)"),
        ("04c_speed.mjs", "weight_bytes * WEIGHTS", "4 * WEIGHTS"),
        ("04c_speed.mjs", "multiply_us > read", "multiply_us > 2 * read"),
        ("04c_speed.mjs", "stages[i - 1].total_us / total_us", "stages[i - 1].total_us - total_us"),
        (TEXT, "(tie_to_even(exact) ? exact", "(true ? exact"),
    ],
    "05_optimizations": [
        (CACHING, "(request.num_tokens - 1) / this", "request.num_tokens / this"),
        (CACHING, "[...parent_hash, ...tokens", "[...tokens"),
        (CACHING, "this.block_pool.ref_count[block] === 0).length", "this.block_pool.ref_count[block] === 1).length"),
        (CACHING, "?.[0] ?? null", "?.at(-1) ?? null"),
        (CACHING, "this.free_queue.push_back(block)", "this.free_queue.push_front(block)"),
        (CACHING, "request.cache_salt && hashes.length === 0", "request.cache_salt"),
        (CACHING, "if (this.block_hash[block] !== null) this.evict(block);", ";"),
        (SHA256, "rotate(e, 25)", "rotate(e, 26)"),
        ("05_optimizations.mjs", "held !== past", "false"),
        (TEXT, """const quote = text.includes("'") && !text.includes('"') ? '"' : "'";""", """const quote = "'";"""),
    ],
    "05b_quantization": [
        ("05b_quantization.mjs", "if (size < middle ||", "if (size < values[code + 1] ||"),
        ("05b_quantization.mjs", "clamp(half_even(f(-low / scale))", "clamp(Math.floor(f(-low / scale))"),
        ("05b_quantization.mjs", "f(f(high - low) / (2 ** format.bits - 1))", "f(f(high - low) / 2 ** format.bits)"),
        ("05b_quantization.mjs", "round_to_fp16(Math.max(span, 2 ** -24))", "span"),
        ("05b_quantization.mjs", "=> 2 ** (binary", "=> 4 ** (binary"),
        ("05b_quantization.mjs", "MINIFLOATS.e4m3.largest); //", "MINIFLOATS.e2m1.largest); //"),
        ("05b_quantization.mjs", "Math.max(exponent, 1) - bias", "exponent - bias"),
        ("05b_quantization.mjs", "? round_to_fp16(low) :", "? low :"),
        ("05b_quantization.mjs", "return clamp(q, 0,", "return clamp(q, 1,"),
        ("05b_quantization.mjs", "format.bits - 1) < finite", "format.bits - 1) <= finite"),
        ("05b_quantization.mjs", "=== OUTLIER ? outlier", "=== 31 ? outlier"),
        (FLOATS, "x - below > 0.5", "x - below >= 0.5"),
    ],
    "05c_tensor_parallel": [
        ("05c_tensor_parallel.mjs", "Math.max(0, v)", "v"),
        ("05c_tensor_parallel.mjs", "(2 * (n - 1) * size) / n", "(2 * n * size) / n"),
        ("05c_tensor_parallel.mjs", '"skipped" && n > 1', '"skipped"'),
        ("05c_tensor_parallel.mjs", "step.sent > 0", "step.sent >= 0"),
        ("05c_tensor_parallel.mjs", "same(y, state[0])", "same(y, reference)"),
    ],
    "05d_kv_cache_quantization": [
        ("05d_kv_cache_quantization.mjs", "f(low + high) * 0.5", "f(low + high) * 0.25"),
        ("05d_kv_cache_quantization.mjs", "round_to_fp16(f(f(Math.max(", "f(f(f(Math.max("),
        ("05d_kv_cache_quantization.mjs", "(-1) ** ones(i & j)", "(-1) ** ones(i | j)"),
        ("05d_kv_cache_quantization.mjs", "? times(read, R)", "? times(read, transposed(R))"),
        ("05d_kv_cache_quantization.mjs", "(per_channel ? transposed(rows)", "(!per_channel ? transposed(rows)"),
        ("05d_kv_cache_quantization.mjs", "if (two) queries[t][12] = 0;", ""),
        ("05d_kv_cache_quantization.mjs", "scores.indexOf(", "scores.lastIndexOf("),
        ("05d_kv_cache_quantization.mjs", "half_even(Math.min(Math.max(place", "Math.floor(Math.min(Math.max(place"),
        ("05d_kv_cache_quantization.mjs", "4 * groups.length, //", "4 * TOKENS, //"),
        (FLOATS, "x - below > 0.5", "x - below > 0.6"),
    ],
    "05e_experts": [
        ("05e_experts.mjs", "720720 / (r + 1)", "720720 / (r + 2)"),
        ("05e_experts.mjs", "step >= SHIFT", "step > SHIFT"),
        ("05e_experts.mjs", "left[expert] = 0;", ""),
        ("05e_experts.mjs", "upto <= at", "upto < at + 1"),
        ("05e_experts.mjs", "each(b) > each(a)", "each(b) >= each(a)"),
        ("05e_experts.mjs", "held[a].includes(expert) - held[b].includes(expert) || ", ""),
        ("05e_experts.mjs", "Math.floor(i / GPUS) % places", "i % places"),
        ("05e_experts.mjs", "Math.max(read, ROW * n)", "read + ROW * n"),
        ("05e_experts.mjs", "Math.max(...leaving, ...arriving)", "Math.max(...leaving)"),
        ("05e_experts.mjs", "filter((other) => other !== gpu)", "filter(() => true)"),
        ("05e_experts.mjs", "[load, placement] = [plain.map(() => 0), better];", "placement = better;"),
        ("05e_experts.mjs", "(200 * (all - sum(busy)) + all)", "(200 * (all - sum(busy)))"),
        ("05e_experts.mjs", "placement.filter((_, slot) => rows[slot] > 0)", "rows.filter((n) => n > 0)"),
    ],
    "06_serving": [
        ("06_serving.mjs", "num_inside + 1 > this", "num_inside > this"),
        ("06_serving.mjs", "now = Math.max(now, arrivals[arrived])", "now += step_us"),
        ("06_serving.mjs", "if (first[i] < 0) ", ""),
        ("06_serving.mjs", "arrivals[request_id] > PATIENCE", "arrivals[request_id] > 2 * PATIENCE"),
        ("06_serving.mjs", "gap * USUAL_STEP * TOKENS", "gap * step_us * TOKENS"),
        ("06_serving.mjs", "turns ? 0 : Math.min(cpu, gpu)", "0"),
        ("06_serving.mjs", "ceil_div(99 * waits.length, 100) - 1", "ceil_div(99 * waits.length, 100)"),
    ],
    "06b_guided_decoding": [
        ("06b_guided_decoding.mjs", "repeat(inner, 1, null)", "repeat(inner, 0, null)"),
        ("06b_guided_decoding.mjs", "one_of(tree.mask & alphabet)", "tree"),
        ("06b_guided_decoding.mjs", "first === low[0] ? low.slice(1) : least", "least"),
        ("06b_guided_decoding.mjs", "if (!this.known.has(key))", "if (true)"),
        ("06b_guided_decoding.mjs", "[this.add(tree.inner, start), then]);", "[this.add(tree.inner, start)]);"),
        ("06b_guided_decoding.mjs", "states.includes(0)", "states.at(0) === 0 && states.length === 1"),
        ("06b_guided_decoding.mjs", 'masks === "text" ? encode(decode(token)) : token', "token"),
        ("06b_guided_decoding.mjs", "logits[b] > logits[a] ? b : a", "logits[b] < logits[a] ? b : a"),
        ("06b_guided_decoding.mjs", "token.slice(0, length + 1)", "token"),
        ("06b_guided_decoding.mjs", "at === 0 || this.masks[at] !== 0n", "this.masks[at] !== 0n || state === 0"),
    ],
    "06c_scaling_out": [
        ("06c_scaling_out.mjs", "Math.max(at, this.free[stage])", "at"),
        ("06c_scaling_out.mjs", "start + length + SEND", "start + length"),
        ("06c_scaling_out.mjs", "TOKEN * tokens, this", "TOKEN * tokens - 1, this"),
        ("06c_scaling_out.mjs", "batch.spans.at(-1)[1] > this.now", "batch.spans.at(-1)[1] >= this.now"),
        ("06c_scaling_out.mjs", "while (this.put_in_flight());", "this.put_in_flight();"),
        ("06c_scaling_out.mjs", "this.batch_queue.shift()", "this.batch_queue.pop()"),
        ("06c_scaling_out.mjs", "if (first[i] < 0) ", ""),
        ("06c_scaling_out.mjs", "pipeline(1, 1, budget", "pipeline(stages, 1, budget"),
        ("06c_scaling_out.mjs", "(100 * idle) / (stages * makespan)", "(100 * idle) / makespan"),
        (CHUNKED, "this.cap, this.token_budget", "this.cap"),
    ],
    "06d_load_generator": [
        ("06d_load_generator.mjs", "Math.max(arrivals[next], seats.shift())", "arrivals[next]"),
        ("06d_load_generator.mjs", "seats.shift()", "seats.pop()"),
        ("06d_load_generator.mjs", "arrivals[next] <= core.now", "arrivals[next] < core.now"),
        ("06d_load_generator.mjs", "arrivals[wanted] <= start", "arrivals[wanted] < start"),
        ("06d_load_generator.mjs", "run.first[i] ??=", "run.first[i] ="),
        ("06d_load_generator.mjs", "CONTEXT_NS * context", "CONTEXT_NS * tokens"),
        ("06d_load_generator.mjs", "a[0] - b[0] || a[1] - b[1]", "a[0] - b[0] || b[1] - a[1]"),
        ("06d_load_generator.mjs", "start < at)", "start <= at)"),
        ("06d_load_generator.mjs", "* (values.length - 1)", "* values.length"),
        ("06d_load_generator.mjs", "place(stop - 1)", "place(stop)"),
        ("06d_load_generator.mjs", "0.9 * limit", "limit"),
        (BATCHING, "this.running.length < this.config", "this.running.length + 1 < this.config"),
    ],
    "06e_async_engine": [
        ("06e_async_engine.mjs", "next_step <= reader_free", "next_step < reader_free"),
        ("06e_async_engine.mjs", "waiting === BOUND", "waiting > BOUND"),
        ("06e_async_engine.mjs", "reader_free = now + read_ms", "reader_free += read_ms"),
        ("06e_async_engine.mjs", "merges ? 1 : waiting", "waiting"),
        ("06e_async_engine.mjs", "merges ? waiting : 1;", "merges ? Math.min(waiting, 8) : 1;"),
        ("06e_async_engine.mjs", "left: waiting", "left: waiting + got"),
        ("06e_async_engine.mjs", "now = Math.max(now, reader_free)", "now = reader_free"),
        ("06e_async_engine.mjs", "step_ms * tokens", "step_ms * (tokens - 1)"),
        ("06e_async_engine.mjs", "read_of_each[i] - at", "reads.at(-1).at - at"),
    ],
    "06f_openai_api": [
        ("06f_openai_api.mjs", "sent.length > MAX_BODY_BYTES", "whole.length > MAX_BODY_BYTES"),
        ("06f_openai_api.mjs", "quotes.length % 2 === 1", "true"),
        ("06f_openai_api.mjs", "Number.isInteger(value) : typeof", "true : typeof"),
        ("06f_openai_api.mjs", "n < 1 ||", "n < 0 ||"),
        ("06f_openai_api.mjs", "length >= MAX_MODEL_LEN", "length > MAX_MODEL_LEN"),
        ("06f_openai_api.mjs", "max_tokens <= MAX_MODEL_LEN", "max_tokens <= MAX_MODEL_LEN + 1"),
        ("06f_openai_api.mjs", "inside + 1 > MAX_INSIDE", "inside > MAX_INSIDE"),
        ("06f_openai_api.mjs", 'param === "prompt" ? "prompt" : "field"', '"field"'),
        ("06f_openai_api.mjs", "if (refused) break;", ""),
    ],
    "07_spec_decode": [
        ("07_spec_decode.mjs", "accept_u[j] * q[d] < p[d]", "accept_u[j] < p[d]"),
        ("07_spec_decode.mjs", "c > target", "c >= target * 1.01"),
        ("07_spec_decode.mjs", "min(accepted + 1, K)", "min(accepted, K)"),
        ("07_spec_decode.mjs", "[p, alpha + redrawn]", "[p, alpha]"),
        ("07_spec_decode.mjs", "1 + alpha * tau", "1 + tau"),
        ("07_spec_decode.mjs", "((i + 1) * cost)", "(i * cost + 1)"),
        ("07_spec_decode.mjs", "uniforms(3 * seed + i", "uniforms(3 * seed + i + 1"),
        ("lib/uniforms.mjs", "x >> 27n", "x >> 28n"),
    ],
    "07b_trained_drafters": [
        ("07b_trained_drafters.mjs", "a.length - b.length ||", ""),
        ("07b_trained_drafters.mjs", "chance: chance * p", "chance: p"),
        ("07b_trained_drafters.mjs", "masks[parent] | (1 << i)", "masks[parent] | 1"),
        ("07b_trained_drafters.mjs", "(2 << i) - 1", "(1 << i) - 1"),
        ("07b_trained_drafters.mjs", "tokens[child] === favourite[here]", "tokens[child] === favourite[0]"),
        ("07b_trained_drafters.mjs", "context + tree.depths[j], cache", "context + j, cache"),
        ("07b_trained_drafters.mjs", "this.put(context + 1 + s, word)", "this.put(context + s, word)"),
        ("07b_trained_drafters.mjs", "pass + 2 * k + seed", "pass + k + seed"),
        ("07b_trained_drafters.mjs", "Math.floor((100 * trace.tokens)", "Math.ceil((100 * trace.tokens)"),
    ],
    "08_disagg": [
        ("08_disagg.mjs", "ceil_div(wire, LAYERS)", "Math.floor(wire / LAYERS)"),
        ("08_disagg.mjs", "(n * (n - 1)) / 2", "(n * (n + 1)) / 2"),
        ("08_disagg.mjs", "wire = ceil_div(size", "wire = 1 + ceil_div(size"),
        ("08_disagg.mjs", "a[2] - b[2];", "b[2] - a[2];"),
        ("08_disagg.mjs", "a[0] - b[0] || a[1]", "a[1]"),
        ("08_disagg.mjs", "Math.max(source.link_free, target.link_free)", "source.link_free"),
        ("08_disagg.mjs", "job.prompt - 1;", "job.prompt - 2;"),
        ("08_disagg.mjs", "else job.gap", "job.gap"),
    ],
    "09_gqa": [
        ("09_gqa.mjs", "Math.max(1, Math.floor(Hkv / tp))", "Math.ceil(Hkv / tp) + 1"),
        ("09_gqa.mjs", "h % Hkv", "h % (Hkv + 1)"),
        ("09_gqa.mjs", "Math.floor((gpu * Hkv) / tp)", "Math.ceil((gpu * Hkv) / tp)"),
        ("09_gqa.mjs", "if (Hq % Hkv !== 0) return", "if (Hq < Hkv / 2) return"),
        ("09_gqa.mjs", "(head, h) => head !== right[h]", "(head, h) => head < right[h]"),
        ("09_gqa.mjs", "Math.floor(WEIGHTS / tp)", "WEIGHTS"),
    ],
    "10_chunked_prefill": [
        (CHUNKED, "num_requests <= 1", "num_requests <= 17"),
        (CHUNKED, "max_num_batched_tokens / num_requests", "max_num_batched_tokens"),
        (CHUNKED, "this.cap, this.token_budget", "this.token_budget"),
        (CHUNKED, "config.max_num_scheduled_tokens ??", "undefined ??"),
        ("10_chunked_prefill.mjs", "times.slice(1).map(", "times.slice(2).map("),
        ("10_chunked_prefill.mjs", "i < 3; i++) step", "i < 2; i++) step"),
        ("10_chunked_prefill.mjs", "if (!trace.starved) for", "for"),
        (TEXT, "(tie_to_even(exact) ? exact", "(false ? exact"),
    ],
    "11_preemption": [
        (PREEMPTION, "this.running.at(-1)", "this.running.at(0)"),
        (PREEMPTION, "this.waiting.unshift(victim)", "this.waiting.push(victim)"),
        (PREEMPTION, "needed + watermark <= this", "needed + watermark < this"),
        (PREEMPTION, "needed + watermark <=", "needed <="),
        (PREEMPTION, "request.num_tokens, computed_blocks)", "num_new_tokens, computed_blocks)"),
        (PREEMPTION, "Math.min(end, known) - (end - n)", "Math.min(end, known) - n"),
        ("11_preemption.mjs", "ceil_div(length - 1, block_size); //", "ceil_div(length + 1, block_size); //"),
        (PREEMPTION, "this.copied += cpu_blocks", "this.copied += cpu_blocks - 1"),
        (PREEMPTION, "num_blocks = ceil_div(computed, this", "num_blocks = ceil_div(computed + 1, this"),
    ],
    "11b_prediction": [
        ("11b_prediction.mjs", "1e6 * Math.log(1 - gap)", "1e6 * Math.log(gap)"),
        ("11b_prediction.mjs", "Math.max(1000 * WEIGHTS_US, TOKEN_NS * tokens", "Math.max(0, TOKEN_NS * tokens"),
        ("11b_prediction.mjs", "(q * (q - 1)) / 2", "(q * (q + 1)) / 2"),
        ("11b_prediction.mjs", "q === 1 ? 0 : q", "q"),
        ("11b_prediction.mjs", "this.waiting.unshift(victim)", "this.waiting.push(victim)"),
        ("11b_prediction.mjs", "this.preemptions += 1", "this.preemptions += 2"),
        ("11b_prediction.mjs", "ceil_div(request.tokens, BLOCK) > this", "ceil_div(request.tokens, BLOCK) >= this"),
        ("11b_prediction.mjs", "jobs[coming].arrival <= now", "jobs[coming].arrival < now"),
        ("11b_prediction.mjs", "request.first ??= now", "request.first = now"),
        ("11b_prediction.mjs", "step.running === max_num_seqs ? 1 : 2", "2"),
        ("11b_prediction.mjs", "step.tokens === BUDGET", "step.tokens > BUDGET"),
        ("11b_prediction.mjs", "scheduled <= at", "scheduled < at - 5000"),
        ("11b_prediction.mjs", "* (values.length - 1)", "* values.length"),
    ],
    "12_multi_lora": [
        ("12_multi_lora.mjs", "this.slots.delete(adapter); //", "//"),
        ("12_multi_lora.mjs", "&& active.size === this", "&& active.size + 1 === this"),
        ("12_multi_lora.mjs", "this.waiting.unshift(", "this.waiting.push("),
        ("12_multi_lora.mjs", "edge > drawn", "edge >= drawn + 100_000"),
        ("12_multi_lora.mjs", "segments.at(-1)?.[0] === slot", "false"),
        ("12_multi_lora.mjs", "sort ? [...slots]", "!sort ? [...slots]"),
        ("12_multi_lora.mjs", "range(0, max_loras).reverse()", "range(0, max_loras)"),
    ],
}  # fmt: skip


def plant(folder: Path, file: str, old: str, new: str) -> Path:
    """A copy of all simulations with one line changed."""
    shutil.copytree(WIDGETS / "sims", folder)
    source = (folder / file).read_text()
    assert source.count(old) == 1, f"{file} has {source.count(old)} × {old!r}"
    (folder / file).write_text(source.replace(old, new))
    return folder


def survivors(mutants: list[tuple[str, tuple[str, str, str]]], states: dict[str, Path], folder: Path) -> list:
    """Those of (lesson, mutant) that agree with Python in all these states."""
    folders = [plant(folder / str(i), *mutant) for i, (_, mutant) in enumerate(mutants)]
    results = compare(((sim(name, there), states[name]) for (name, _), there in zip(mutants, folders)), "first")
    return [mutant for mutant, result in zip(mutants, results) if not result["differences"]]


@needs_node
def test_a_mutant_of_each_simulation_is_caught(chosen, tmp_path):
    assert not survivors([(name, MUTANTS[name][0]) for name in LESSONS], chosen, tmp_path)


@needs_node
@pytest.mark.slow
@pytest.mark.parametrize("name", LESSONS)
def test_all_mutants_are_caught(name, chosen, tmp_path):
    """An off-by-one, a ceil for a floor, a missing reset: each changes some state of the sample."""
    assert len(MUTANTS[name]) >= 5
    assert not survivors([(name, mutant) for mutant in MUTANTS[name]], chosen, tmp_path)


@needs_node
def test_the_driver_sees_every_kind_of_difference(tmp_path):
    """What the comparison stands on: types, missing keys, lengths, small errors, and exceptions all count."""
    right = {"a": [1, 2.5, None, True, "x"], "b": {"c": 0.1 + 0.2}}
    (tmp_path / "sim.mjs").write_text(
        "export function simulate(params) { if (params.throws) throw new Error('no'); return params.trace; }\n"
        "export function describe(trace) { return String(trace.b.c); }\n"
    )
    wrong = [
        right, right | {"a": [1, 2.5, None, 1, "x"]}, right | {"a": [1, 2.5, None, True]}, {"a": right["a"]},
        right | {"more": None}, right | {"b": {"c": 0.3 + 1e-11}}, right | {"a": [1, 2.5, 0, True, "x"]},
    ]  # fmt: skip
    states = [{"params": {"trace": trace}, "trace": right, "text": str(0.1 + 0.2)} for trace in wrong]
    states.append({"params": {"throws": True}, "trace": right, "text": str(0.1 + 0.2)})
    (tmp_path / "states").write_text("".join(json.dumps(state) + "\n" for state in states))
    (result,) = compare([(tmp_path / "sim.mjs", tmp_path / "states")])
    assert (result["states"], result["differences"]) == (8, 7)
    assert result["first"]["where"] == "trace.a.3"
    assert (result["first"]["python"], result["first"]["javascript"]) == (True, 1)


# --- The controls ---------------------------------------------------------------------------------------------------


def follow(trace: Any, path: str) -> Any:
    for key in path.split("."):
        trace = trace[int(key)] if isinstance(trace, list) else trace[key]
    return trace


@pytest.mark.parametrize("name", LESSONS)
def test_controls_are_complete(name):
    """The form that `lessons/widgets/README.md` describes, and the lesson's own default."""
    c = controls(name)
    knobs = {knob["name"]: knob for knob in c["controls"]}
    assert default(name) == cli.numbers(name).WIDGET_DEFAULT
    assert set(c) - {"at"} == {"title", "task", "solved", "controls", "fixed", "default", "presets", "bet"}
    assert set(c["default"]) == set(knobs) and not set(c["fixed"]) & set(knobs)
    for knob in c["controls"]:
        values, kind = knob["values"], knob["kind"]
        assert len(set(map(repr, values))) == len(values) > 1 and c["default"][knob["name"]] in values
        assert len(knob.get("labels", values)) == len(values) and kind in ("range", "choice", "switch", "text")
        assert kind != "range" or values == sorted(values)
        assert kind != "switch" or values == [False, True]
        assert kind != "text" or all(len(value) <= knob["max_length"] for value in values)
        for other, allowed in knob.get("if", {}).items():
            assert set(map(repr, allowed)) < set(map(repr, knobs[other]["values"]))
    for preset in c["presets"]:
        assert preset["params"] and all(value in knobs[key]["values"] for key, value in preset["params"].items())
        assert default(name) | preset["params"] != default(name)
    assert [preset["name"] for preset in c["presets"]].index("Break it") == len(c["presets"]) - 1
    assert math.prod(len(knob["values"]) for knob in c["controls"]) <= MOST_STATES


@pytest.mark.parametrize("name", LESSONS)
def test_exactly_one_choice_wins_the_bet(name):
    bet, lesson = controls(name)["bet"], cli.numbers(name)
    answer = follow(lesson.simulate(default(name) | bet["params"]), bet["answer"])
    assert [choice for choice in bet["choices"] if choice == answer and type(choice) is type(answer)] == [answer]
    assert all(key in controls(name)["default"] for key in bet["params"])


SIGNS = {"<": operator.lt, "≤": operator.le, "=": operator.eq, "≠": operator.ne, "≥": operator.ge, ">": operator.gt}


def is_solved(trace: Any, solved: list[tuple[str, str, Any]]) -> bool:
    """As `kit.mjs` decides it."""
    found = [follow(trace, what) if isinstance(what, str) and "." in what else what for _, _, what in solved]
    return all(SIGNS[sign](follow(trace, where), value) for (where, sign, _), value in zip(solved, found))


@pytest.mark.parametrize("name", LESSONS)
def test_a_task_can_be_solved_and_is_not_solved_yet(name, chosen):
    solved = controls(name)["solved"]
    assert not is_solved(cli.numbers(name).simulate(default(name)), solved)
    assert any(is_solved(json.loads(line)["trace"], solved) for line in chosen[name].open())


def test_the_page_counts_the_states_that_were_compared():
    spec = importlib.util.spec_from_file_location("build", WIDGETS.parent / "build.py")
    build = sys.modules["build"] = importlib.util.module_from_spec(spec)  # test_site.py has it under this name, too
    spec.loader.exec_module(build)
    for name in LESSONS:
        assert build.states(controls(name)) == len(every_state(name))


# --- The form of the simulations ------------------------------------------------------------------------------------

SOURCES = sorted((WIDGETS / "sims").rglob("*.mjs"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_simulations_are_pure(path):
    """No chance, no clock, no page, and nothing but what the bundler understands."""
    source = path.read_text()
    code = re.sub(r"//[^\n]*|/\*.*?\*/", "", re.sub(r'"[^"\n]*"', '""', source), flags=re.S)
    forbidden = "Math.random Date document window globalThis performance setTimeout setInterval fetch console await"
    assert not [word for word in forbidden.split() if re.search(rf"\b{re.escape(word)}\b", code)]
    assert not re.search(r"^(let|var)\b", code, re.M), "state that lives from one call to the next"
    for line in source.splitlines():
        assert len(line) <= 120, line
        if line.startswith("import"):
            assert re.fullmatch(r'import \{ [\w, ]+ \} from "\./[\w./]+\.mjs";', line)
        if line.startswith("export"):
            assert re.match(r"export (function|const|class) \w+", line)


def test_every_simulation_has_controls_and_a_lesson():
    assert {path.stem for path in (WIDGETS / "sims").glob("*.mjs")} == set(LESSONS)
    assert set(LESSONS) <= {path.stem for path in documents.LESSONS}

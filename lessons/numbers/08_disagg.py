"""What `lessons/08_disagg.md` simulates, quotes, draws and measures."""

from __future__ import annotations

import common  # first: it settles the device before torch is used

import argparse
import contextlib
import functools
import statistics
from pathlib import Path
from typing import Any

import torch

from engine import registry
from engine.kv_transfer.connectors import CONNECTORS
from engine.kv_transfer.heads import num_consumers, tp_sources
from engine.kv_transfer.kernels import gather_kv, scatter_kv
from engine.model import llama, loader
from lab import figures, goodput, roofline, timing, transfers
from lab.workers import Worker, settled

KEY = "08_disagg"
lesson = registry.lesson(KEY)


# --- The simulation behind the widget ---------------------------------------------------------------------------------

simulate, describe = goodput.simulate, goodput.describe
WIDGET_DEFAULT, WIDGET_CHOICES = goodput.WIDGET_DEFAULT, goodput.WIDGET_CHOICES


# --- Numbers that the text quotes -------------------------------------------------------------------------------------

PROMPT = 8192


@functools.cache
def facts() -> dict[str, Any]:
    """The lesson's deterministic numbers; those of the simulation are under `simulation`."""
    small = roofline.KVCacheSpec.from_config(roofline.MODELS["SmolLM2-135M"])
    sharing = {}
    for key, (Hkv, producer, consumer) in {
        "8_to_2": (8, 8, 2),
        "2_to_8": (8, 2, 8),
        "16_to_2": (8, 16, 2),
        "1_to_3": (3, 1, 3),
    }.items():
        sources = [tp_sources(Hkv, producer, consumer, rank) for rank in range(consumer)]
        readers = [num_consumers(Hkv, producer, consumer, rank) for rank in range(producer)]
        sharing[key] = {
            "sources": len(sources[0]),
            "heads": sources[0][0].heads,
            "readers": max(readers),
            "unread": readers.count(0),
        }
    kinds = [kind for kind in transfers.Faults.KINDS if kind != "decode-dies"]
    rehearsals = {kind.replace("-", "_"): transfers.rehearse(kind) for kind in kinds}
    return {
        "kv_bytes": {"smollm2_fp32": small.bytes_per_token("float32"), "llama_31_8b": goodput.KV_BYTES},
        "prompt": PROMPT, "prompt_bytes": PROMPT * goodput.KV_BYTES,
        "sharing": sharing, "faults": rehearsals,
        "story": {"positions": sum(lesson.LENGTHS), "blocks": lesson.LENGTHS[0] // 16},
        "simulation": goodput.facts(),
    }  # fmt: skip


# --- Figures ----------------------------------------------------------------------------------------------------------


def draw(folder: str | Path) -> list[Path]:
    """This lesson's figure, and those of the simulation."""
    return [_draw_handover(folder), *goodput.draw(folder)]


def _draw_handover(folder: str | Path) -> Path:
    """Who does what when: one request, six layers of it."""
    figure, ax = figures.new_figure(8.0, 4.1)
    C, layers, width = figures.COLORS, 6, 1.0
    lanes = {"router": 5.0, "prefill worker": 4.0, "wire": 2.55, "decode worker": 1.1}

    def box(x: float, y: float, w: float, text: str, color: str, height: float = 0.56) -> None:
        ax.broken_barh([(x, w)], (y - height / 2, height), facecolor=color, edgecolor="white", linewidth=1.2)
        ax.text(x + w / 2, y, text, ha="center", va="center", color="white", fontsize=8.5)

    def arrow(x: float, y: float, to_x: float, to_y: float, color: str) -> None:
        ax.annotate("", (to_x, to_y), (x, y), arrowprops={"arrowstyle": "-|>", "color": color, "lw": 1.2})

    def note(x: float, y: float, text: str, **style: Any) -> None:
        ax.text(x, y, text, fontsize=8.5, color=style.pop("color", C["ink"]), va="center", **style)

    P, W, D = lanes["prefill worker"], lanes["wire"], lanes["decode worker"]
    start = 1.5
    arrow(0.2, lanes["router"] - 0.1, start - 0.1, P + 0.2, C["grey"])
    arrow(0.2, lanes["router"] - 0.1, 0.75, D + 0.35, C["grey"])
    note(0.45, lanes["router"] + 0.05, "the same request to both: do_remote_decode, do_remote_prefill")
    for i in range(layers):
        x = start + i * width
        box(x, P, width, f"layer {i}", C["blue"])
        box(x + width, W, width * 0.72, f"KV {i}", C["orange"], 0.42)
        arrow(x + width, P - 0.3, x + width + 0.05, W + 0.24, C["blue"])
        arrow(x + width * 1.72, W - 0.24, x + width * 1.75, D + 0.34, C["orange"])
    end = start + layers * width
    box(end, P, 0.55, "logits", C["blue"])
    box(end + 0.55, P, 1.75, "blocks kept", C["grey"])
    arrow(1.0, D + 0.3, 1.35, P - 0.32, C["green"])
    note(1.28, (P + D) / 2, "GET", color=C["green"])
    box(0.75, D, end + 0.1, "WAITING_FOR_REMOTE_KVS: has blocks, costs no step anything; others decode", C["grey"])
    for i in range(3):
        box(end + 0.85 + 0.75 * i, D, 0.75, "token", C["green"])
    arrow(end + 0.95, D + 0.3, end + 2.25, P - 0.3, C["green"])
    note(end + 1.72, W, "DONE", color=C["green"])
    note(end + 2.4, P, "freed")
    note(start + 0.1, P + 0.5, "save_kv_layer after each layer's attention", color=C["blue"])
    note(0.75, D - 0.52, "get_num_new_matched_tokens → update_state_after_alloc → start_load_kv", color=C["grey"])
    note(end + 0.85, D - 0.52, "get_finished", color=C["green"])
    ax.set(
        yticks=list(lanes.values()),
        yticklabels=list(lanes),
        xticks=[],
        xlim=(0, end + 3.2),
        ylim=(0.3, 5.5),
        xlabel="time",
    )
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)
    return figures.save_figure(figure, folder, "08_handover")


# --- Measurements -----------------------------------------------------------------------------------------------------

WIRES = {"shared memory": "SharedMemoryConnector", "TCP": "TCPConnector",
         "torch.distributed": "TorchDistributedConnector"}  # fmt: skip


def bench_wires(model: llama.Llama, name: str | None, prompts: dict[int, list[int]]) -> dict[str, Any]:
    """Each of the engine's wires with prompts of some lengths: asked for when the prefill is over, and before it."""
    bench, rows = {}, []
    for wire, connector in WIRES.items():
        with contextlib.ExitStack() as stack:
            prefill, decode = lesson.start_workers(model, name, stack, make=CONNECTORS[connector])
            bench[connector] = {n: bench_wire(prefill, decode, str(n), prompt) for n, prompt in prompts.items()}
        for n, found in bench[connector].items():
            rows.append(
                [
                    wire,
                    n,
                    f"{found['bytes'] / 1e6:.1f}",
                    f"{found['after_ms']:.1f}",
                    f"{found['mb_s']:.0f}",
                    f"{found['exposed_ms']:.1f}",
                ]
            )
    head = ["wire", "tokens", "MB", "ms, asked for afterwards", "MB/s", "ms from prefill to token, streamed"]
    common.table(head, rows)
    return {name: {str(n): found for n, found in wires.items()} for name, wires in bench.items()}


def bench_wire(prefill: Worker, decode: Worker, n: str, prompt: list[int]) -> dict[str, float]:
    """Medians of five of six runs with this prompt; the first one makes the connection."""
    late, exposed, moved = [], [], 0
    for i in range(6):
        key, before = f"{n}.{i}", settled(decode)
        job = {"do_remote_decode": True, "transfer_id": key}
        prefill.send("add", key, prompt, 1, job)
        hear(prefill, key)
        decode.send("add", key, prompt, 1, {"do_remote_prefill": True, "transfer_id": key, **prefill.address})
        hear(decode, key)
        after = settled(decode)
        moved = after["bytes_in"] - before.get("bytes_in", 0)
        late.append((after["consumer_microseconds"] - before.get("consumer_microseconds", 0)) / 1e3)
        (done,), _ = lesson.disaggregated(prefill, decode, [prompt], 1, name=f"{key}-")
        # A decode worker can be heard first: then nothing was left to wait for.
        exposed.append((done.first - (done.prefilled or done.first)) * 1e3)
    after_ms = statistics.median(late[1:])
    return {
        "bytes": moved,
        "after_ms": after_ms,
        "exposed_ms": statistics.median(exposed[1:]),
        "mb_s": moved / after_ms / 1e3,
    }


def hear(worker: Worker, name: str) -> tuple[list[int], str | None, str | None]:
    """The next tokens of request `name`, finish reason and error; what nobody waits for any more is passed over."""
    while (heard := worker.pipe.recv())[:2] != ("output", name):
        pass
    return heard[2:]


def bench_kernel(dtype: torch.dtype) -> dict[str, Any]:
    """The copy between blocks and wire at an 8B model's shapes, beside a plain copy of as many bytes."""
    kv_cache_layer = torch.randn(2, 1024, 16, 8, 128, device=common.device()).to(dtype)
    blocks = torch.randperm(1023, device=common.device())[:512] + 1
    buffer = gather_kv(kv_cache_layer, blocks, 0, PROMPT, 0, 8)
    plain = torch.empty_like(buffer)
    seconds = {
        "gather": timing.measure_graph(lambda: gather_kv(kv_cache_layer, blocks, 0, PROMPT, 0, 8)).median,
        "scatter": timing.measure_graph(lambda: scatter_kv(buffer, kv_cache_layer, blocks, 0, 0)).median,
        "copy": timing.measure_graph(lambda: plain.copy_(buffer)).median,
    }
    found = {name: 2 * buffer.nbytes / t / 1e9 for name, t in seconds.items()}
    common.table(["one layer, 8,192 tokens", "GB/s read and written"], [[n, f"{x:.1f}"] for n, x in found.items()])
    return found


def show_simulation() -> None:
    """The widget's sixteen requests, run now; and what the searches found, who is best at which limit."""
    rows = []
    for layout in WIDGET_CHOICES["layout"]:
        trace = simulate(WIDGET_DEFAULT | {"layout": layout})
        for r in trace["requests"]:
            if sum(r["parts"]) != r["first"] - r["arrival"]:
                raise common.CheckFailed(f"{layout}: the parts of a TTFT do not add up")
        gap, ttft = (max(f(r) for r in trace["requests"]) for f in (lambda r: r["gap"], lambda r: sum(r["parts"])))
        rows.append([layout, f"{trace['met']} of {len(trace['requests'])}", f"{gap / 1e3:.0f} ms",
                     f"{ttft / 1e3:.0f} ms", f"{trace['bytes_moved'] / 2**20:,.0f} MiB"])  # fmt: skip
    common.say(describe(simulate(WIDGET_DEFAULT)))
    common.table(["4 GPUs, 16 requests", "within the limits", "longest silence", "worst TTFT", "moved"], rows)
    common.say("✓ queue + prefill + transfer + first step = TTFT, for every request")
    found = facts()["simulation"]["goodput"]["azure_code"]
    rows = []
    for limit in ("8", "10", "12", "20", "50"):
        row = found[f"tpot_{limit}"]
        rows.append([f"{limit} ms", f"{row['whole']:.0f}", f"{row['chunked']:.0f} ({row['budget']})",
                     f"{row['split']:.0f} ({row['layout']})", f"{row['split_over_chunked']:.2f}x"])  # fmt: skip
    common.table(
        ["8 GPUs, code; TPOT", "whole prompts", "chunks (budget)", "split", "split / chunks"],
        rows,
        title="requests/s of which 9 in 10 meet TTFT 300 ms and the TPOT",
    )


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """What `--bench` measures: the engine's wires, the kernel, and the steps behind the cost model."""
    model, tokenizer = loader.load(args.model, torch.float32)
    text = tokenizer.encode(lesson.TEXT)
    common.heading("The widget's sixteen requests, and eight GPUs")
    show_simulation()
    common.heading("Measured: wires, kernel, steps")
    wires = bench_wires(model, args.model, {n: (text * 8)[:n] for n in (64, 256, 480)})
    kernel = bench_kernel(torch.bfloat16 if common.HAS_GPU else torch.float32)
    return {"wires": wires, "kernel": kernel, "cost_model": goodput.calibrate(model)}

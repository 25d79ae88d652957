"""What the page of lesson 03, `lessons/03_flash_attention.md`, simulates, quotes, draws and measures."""

from __future__ import annotations

import common

import argparse
import heapq
import importlib.util
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine import registry
from engine.attention.block_sparse import BSR, cascade, from_rows, kv_bytes, makespan, split
from lab import figures, recorded, timing
from lab.parameters import checked

KEY = "03_flash_attention"
lesson = registry.lesson(KEY)
PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16}


# --- Every float that crosses between the chip and its memory -------------------------------------------------------


class HBM:
    """Counts the floats that an algorithm reads from device memory and writes to it. What stays on chip is free."""

    def __init__(self) -> None:
        self.read = self.written = 0

    @property
    def floats(self) -> int:
        return self.read + self.written

    def load(self, x: Any) -> Any:
        self.read += x.numel() if isinstance(x, Tensor) else len(x)
        return x

    def store(self, x: Any) -> Any:
        self.written += x.numel() if isinstance(x, Tensor) else len(x)
        return x


def counted_naive(q: Tensor, k: Tensor, v: Tensor, causal: bool, hbm: HBM) -> Tensor:
    """`naive_attention`, as many heads in k and v as in q: what each of its kernels reads and writes is counted."""
    T, S = len(q), len(k)
    seen = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T if causal else S)
    scores = hbm.store(torch.einsum("thd,shd->hts", hbm.load(q), hbm.load(k)) * q.shape[2] ** -0.5)
    weights = hbm.store(hbm.load(scores).masked_fill(~seen, -math.inf).softmax(dim=-1))
    return hbm.store(torch.einsum("hts,shd->thd", hbm.load(weights), hbm.load(v)))


def tiled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    block_m: int = 128,
    block_n: int = 64,
    hbm: HBM | None = None,
) -> tuple[Tensor, Tensor]:
    """FlashAttention-2 in torch: for every tile of queries one walk over the keys. The contract of `naive_attention`.

    All heads advance together, and each reads its own copy of the keys, as the programs of the kernel do.
    """
    hbm = hbm or HBM()
    (T, Hq, D), (S, Hkv, _) = q.shape, k.shape
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k, v = (x.to(dtype).transpose(0, 1) for x in (q, k, v))  # [H, T, D]
    k, v = (x[:, None].expand(-1, Hq // Hkv, -1, -1).reshape(Hq, S, D) for x in (k, v))
    scale = D**-0.5 if scale is None else scale
    out, lse = q.new_empty(T, Hq, D), q.new_empty(Hq, T)
    for m0 in range(0, T, block_m):
        q_tile = hbm.load(q[:, m0 : m0 + block_m])  # [Hq, M, D]
        first = m0 + S - T  # position of the tile's first query
        last = first + q_tile.shape[1] - 1
        m = q.new_full(q_tile.shape[:2], -math.inf)  # [Hq, M]
        l, o = torch.zeros_like(m), torch.zeros_like(q_tile)
        start = max(0, first - window + 1) // block_n * block_n if window else 0
        for n in range(start, last + 1 if causal else S, block_n):
            k_tile, v_tile = hbm.load(k[:, n : n + block_n]), hbm.load(v[:, n : n + block_n])  # [Hq, N, D]
            s = q_tile @ k_tile.transpose(1, 2) * scale  # [Hq, M, N]
            if (causal and n + block_n > first + 1) or (window and n <= last - window):  # the mask's edge crosses it
                position, key = torch.arange(first, last + 1)[:, None], torch.arange(n, n + k_tile.shape[1])
                hidden = key <= position - (window or S + T)
                if causal:
                    hidden |= key > position
                s = s.masked_fill(hidden.to(s.device), -math.inf)
            m, l, o = lesson.fold(m, l, o, s, v_tile)
        o = o / torch.where(l == 0, 1, l)[..., None]
        out[m0 : m0 + block_m] = hbm.store(o).transpose(0, 1)
        lse[:, m0 : m0 + block_m] = hbm.store(m + l.log())
    return out, lse


# --- One row, one float at a time: what the widget shows ------------------------------------------------------------


def exp(x: float) -> float:
    """math.exp that overflows to infinity instead of raising."""
    return math.exp(x) if x < 709 else math.inf if x == x else x


def online_softmax(
    q: float,
    keys: Sequence[float],
    values: Sequence[float],
    tile: int,
    rescale: bool = True,
    subtract_max: bool = True,
    precision: str = "fp32",
    hbm: HBM | None = None,
) -> tuple[float, list[dict[str, Any]]]:
    """One query row with D = 1: Σ_j softmax(q·k)_j v_j in one pass over tiles of `tile` keys, every result rounded.

    Per tile, with s = q·k:  m' = max(m, max s)   α = exp(m − m')   p = exp(s − m')
                             ℓ' = α·ℓ + Σ p       O' = α·O + Σ p·v
    Returns O / ℓ and, per tile, (m, ℓ, O) before and after. `rescale=False` forgets α; `subtract_max=False` forgets m.
    """
    dtype, hbm = PRECISIONS[precision], hbm or HBM()

    def r(x: float) -> float:
        """Rounded as it is stored; too large becomes infinity, as on a GPU."""
        return torch.tensor(x, dtype=dtype).item()

    (q,) = hbm.load([r(q)])
    m, l, o = -math.inf, 0.0, 0.0
    trace = []
    for start in range(0, len(keys), tile):
        k, v = hbm.load(keys[start : start + tile]), hbm.load(values[start : start + tile])
        s = [r(q * x) for x in k]
        m_new = max(m, *s) if subtract_max else 0.0
        origin = 0.0 if m_new == -math.inf else m_new  # nothing seen yet: exp(−inf − −inf) would be NaN
        alpha = r(exp(m - origin)) if rescale and subtract_max else 1.0
        p = [r(exp(r(x - origin))) for x in s]
        before = {"m": m, "l": l, "o": o}
        l, o, m = r(alpha * l), r(alpha * o), m_new
        for weight, value in zip(p, v):
            l, o = r(l + weight), r(o + r(weight * value))
        trace.append(
            {
                "start": start,
                "stop": start + len(s),
                "scores": s,
                "before": before,
                "alpha": alpha,
                "weights": p,
                "after": {"m": m, "l": l, "o": o},
                "hbm_floats": hbm.floats,
            }
        )
    (result,) = hbm.store([r(o / l) if l else math.nan])
    return result, trace


WIDGET_CHOICES: dict[str, tuple] = {
    "tile": (1, 2, 3, 4, 8),
    "order": tuple(lesson.ORDERS),
    "scale": (0.25, 1, 4, 16),
    "rescale": (True, False),
    "subtract_max": (True, False),
    "precision": tuple(PRECISIONS),
}
WIDGET_DEFAULT: dict[str, Any] = {
    "tile": 2,
    "order": "increasing",
    "scale": 1,
    "rescale": True,
    "subtract_max": True,
    "precision": "fp32",
}


def simulate(params: dict[str, Any]) -> dict[str, Any]:
    """One row of eight scores (scale × 0…7 in some order) with values 1…8 through `online_softmax`, tile by tile.

    params: tile, order, scale, rescale, subtract_max, precision; allowed values in WIDGET_CHOICES. Raises InputError.
    """
    p = checked(params, WIDGET_CHOICES)
    keys, values = lesson.ORDERS[p["order"]], list(range(1, 9))
    result, tiles, hbm = _online(p, keys, values)
    expected, naive_hbm = _expected(p, keys, values)
    for tile in tiles:
        seen = [s for other in tiles for s in other["scores"]][: tile["stop"]]
        due = [math.exp(s - max(seen)) for s in seen]
        tile["due"], tile["now"] = due, _shares(tiles, tile["stop"])  # what keys should weigh by now, and what they do
        exact = sum(w * v for w, v in zip(due, values)) / sum(due)
        tile["mean"] = [tile["after"]["o"] / tile["after"]["l"], round(exact, 9)]
    growths = sum(tile["after"]["m"] > tile["before"]["m"] for tile in tiles[1:])
    largest = max(abs(s) for tile in tiles for s in tile["scores"])
    verdicts = {order: _verdict(p, row, values) for order, row in lesson.ORDERS.items()}
    return {
        "params": p,
        "keys": list(keys),
        "values": values,
        "tiles": _finite(tiles),
        "result": _finite(result),
        "expected": round(expected, 9),
        "verdict": verdicts[p["order"]],
        "verdicts": verdicts,
        "passing": sum(verdict == "right" for verdict in verdicts.values()),
        "growths": growths,
        "largest": largest,
        "hbm_floats": {"online": hbm.floats, "naive": naive_hbm.floats},
    }


def _online(p: dict[str, Any], keys: Sequence[float], values: Sequence[float]) -> tuple[float, list[dict], HBM]:
    hbm = HBM()
    lines = (p["rescale"], p["subtract_max"], p["precision"])
    return *online_softmax(p["scale"], keys, values, p["tile"], *lines, hbm), hbm


def _expected(p: dict[str, Any], keys: Sequence[float], values: Sequence[float]) -> tuple[float, HBM]:
    hbm = HBM()
    rows = (torch.tensor(x, dtype=torch.float64).view(-1, 1, 1) for x in ([p["scale"]], keys, values))
    return counted_naive(*rows, False, hbm).item(), hbm


def _verdict(p: dict[str, Any], keys: Sequence[float], values: Sequence[float]) -> str:
    result, expected = _online(p, keys, values)[0], _expected(p, keys, values)[0]
    allowed = 4 * len(keys) * torch.finfo(PRECISIONS[p["precision"]]).eps / 2 * expected  # four roundings a key
    return "not a number" if result != result else "right" if abs(result - expected) <= allowed else "wrong"


def _shares(tiles: list[dict[str, Any]], stop: int) -> list[float]:
    """What each key that has been read weighs by now: its weight, times every α since."""
    shares: list[float] = []
    for tile in tiles:
        if tile["start"] < stop:
            shares = [share * tile["alpha"] for share in shares] + tile["weights"]
    return shares


def _finite(value: Any) -> Any:
    """JSON has no infinities: they become the words inf, -inf and nan."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _number(x: float | str) -> str:
    return x if isinstance(x, str) else f"{x:.4g}" if x == 0 or 0.001 <= abs(x) < 1e5 else f"{x:.2e}"


def describe(trace: dict[str, Any]) -> str:
    """The state of the simulation as text, as the widget's slot shows it."""
    p = trace["params"]
    deleted = [what for what, kept in (("rescale", p["rescale"]), ("max", p["subtract_max"])) if not kept]
    lines = [
        f"scores {p['scale']:g} × {p['order']}, tiles of {p['tile']}, {p['precision']}"
        + (f", without {' and '.join(deleted)}" if deleted else "")
    ]
    for tile in trace["tiles"]:
        a, b = tile["before"], tile["after"]
        lines.append(
            f"  keys {tile['start']}–{tile['stop'] - 1}: m {_number(a['m']):>5} → {_number(b['m']):<5}"
            f" α {_number(tile['alpha']):<8} ℓ {_number(b['l']):<8} O {_number(b['o'])}"
        )
    shown = trace["result"] if isinstance(trace["result"], str) else f"{trace['result']:.3f}"
    excuse = ""  # why a deleted line did no harm
    if deleted and trace["verdict"] == "right":
        excuse = (
            " (the maximum never grew after the first tile)"
            if p["subtract_max"]
            else (f" (the largest score, {trace['largest']:g}, is within exp's range)")
        )
    lines.append(f"O / ℓ = {shown}, softmax says {trace['expected']:.3f}: {trace['verdict']}{excuse}")
    lines.append("the four orders: " + ", ".join(f"{order} {verdict}" for order, verdict in trace["verdicts"].items()))
    lines.append(f"floats through HBM: {trace['hbm_floats']['online']}, unfused {trace['hbm_floats']['naive']}")
    return "\n".join(lines)


# --- What FlashInfer's plan and its cascade save --------------------------------------------------------------------

# A decode step of an 8B Llama in bf16 on an H200 of 132 multiprocessors: 32 sequences, blocks of 16.
WORKERS, PAGE, HEADS = 132, 16, {"Hq": 32, "Hkv": 8, "D": 128}
SKEWED = [32_768] + [1_024] * 31
PREFIX, OWN, SEQUENCES = 2_048, 128, 32


def decode_rows(seq_lens: Sequence[int], shared: int = 0) -> BSR:
    """One query per sequence; all begin with the same `shared` tokens."""
    new = itertools.count(1 + shared // PAGE)
    prefix = list(range(1, 1 + shared // PAGE))
    return from_rows([(1, prefix + [next(new) for _ in range(-(-(S - shared) // PAGE))], S) for S in seq_lens], PAGE)


def block_sparse_facts() -> dict[str, dict[str, float]]:
    """What its plan and its cascade save: costs in keys, bytes of one layer."""
    skewed = decode_rows(SKEWED)
    whole, chunks = split(skewed, 1), split(skewed, WORKERS)  # one worker's even share is everything: a chunk per row
    shared = decode_rows([PREFIX + OWN] * SEQUENCES, PREFIX)
    # A tile of 128 rows holds the 32 · 4 query heads that share a KV head: saved = (sequences − tiles) · prefix.
    flat, cascaded = kv_bytes([shared], 128, **HEADS), kv_bytes(cascade(shared), 128, **HEADS)
    return {
        "plan": {
            "per_request": makespan(whole, WORKERS),
            "balanced": makespan(chunks, WORKERS),
            "even": sum(chunk.cost for chunk in chunks) / WORKERS,
            "chunks": len(chunks),
        },
        "cascade": {"flat": flat, "cascaded": cascaded, "ratio": flat / cascaded},
    }


# --- Counting, and the numbers that the text quotes ------------------------------------------------------------------


def attention_flops(T: int, S: int, Hq: int, D: int, causal: bool) -> int:
    """Two products of 2 · D FLOPs per visible (query, key) pair and head. The queries are the last T of S."""
    pairs = T * S - (T * (T - 1) // 2 if causal else 0)
    return 4 * pairs * D * Hq


def makespans(tiles: int, heads: int, processors: int) -> dict[str, float]:
    """Time until the last causal program ends, against a perfect split; a free processor takes the next program."""

    def makespan(costs: Sequence[int]) -> float:
        busy = [0] * processors
        for cost in costs:
            heapq.heapreplace(busy, busy[0] + cost)
        return max(busy) * processors / sum(costs)

    return {
        "in_order": makespan([i + 1 for _ in range(heads) for i in range(tiles)]),
        "heaviest_first": makespan([tiles - i for i in range(tiles) for _ in range(heads)]),
    }


def facts() -> dict[str, Any]:
    """Every deterministic number of the lesson's text and figures. No model, under a second."""

    def widget(**change: Any) -> dict[str, Any]:
        return simulate(WIDGET_DEFAULT | change)

    states = list(itertools.product(WIDGET_CHOICES["tile"], lesson.ORDERS, WIDGET_CHOICES["scale"]))

    def survivors(**change: Any) -> dict[str, int]:
        """In how many of the widget's states a deleted line goes unnoticed, per order."""
        found = [o for t, o, s in states if widget(tile=t, order=o, scale=s, **change)["verdict"] == "right"]
        return {"total": len(found), **{order: found.count(order) for order in lesson.ORDERS}}

    def moved(T: int, D: int, causal: bool = False) -> dict[str, float]:
        n = lesson.hbm_floats(T, D, causal=causal)
        return n | {"tiled_ratio": n["naive"] / n["tiled"], "once_ratio": n["naive"] / n["once"]}

    M, N, num_warps, *_ = lesson.choose_tiles(torch.bfloat16, 128, capability=(9, 0))
    D = 128
    return {
        "matrix": {"bytes_fp32": 8192**2 * 4, "all_heads": 32 * 8192**2 * 4, "output_bytes_bf16": 8192 * 128 * 2},
        "widget": {
            "right": widget()["result"],
            "no_rescale": widget(rescale=False)["result"],
            "decreasing": widget(order="decreasing", rescale=False)["result"],
            "states": len(states),
            "online_floats": widget()["hbm_floats"]["online"],
            "naive_floats": widget()["hbm_floats"]["naive"],
        },
        "survive": {
            "no_rescale": survivors(rescale=False),
            "no_max": survivors(subtract_max=False),
            "no_max_fp16": survivors(subtract_max=False, precision="fp16"),
            "in_tiles_of_two": widget(rescale=False)["passing"],
        },
        "exp_limit": {name: math.log(torch.finfo(dtype).max) for name, dtype in PRECISIONS.items()},
        "hbm": {f"d{D}": {str(T): moved(T, D) for T in (1024, 2048, 4096, 8192, 16384)} for D in (64, 128)},
        "hbm_causal_8k": moved(8192, 128, causal=True),
        "t_for_75": {
            f"d{D}": next(T for T in range(74 * D, 75 * D) if moved(T, D)["once_ratio"] >= 75) for D in (64, 128)
        },
        "hopper": {
            "block_m": M,
            "block_n": N,
            "threads": (threads := 32 * num_warps),
            "o_registers": M * D // threads,
            "score_registers": M * N // threads,
            # Cycles of one SM for a tile of keys: it does 2,048 multiply-adds, or 16 exponentials, a cycle.
            "mma_cycles": 2 * M * N * D // 2048,
            "exp_cycles": M * N // 16,
        },
        "causal_tiles": {"total": 16384**2 // M // N, "walked": (n := 16384 // N) * (16384 // M + 1) // 2, "masked": n},
        "makespan": {f"{T // 1024}k": makespans(T // M, 16, 2 * 132) for T in (4096, 16384)},
        "block_sparse": block_sparse_facts(),
    }


# --- Figures -----------------------------------------------------------------------------------------------------


def draw(folder: str | Path) -> list[Path]:
    """The lesson's figures, from `facts()` and the committed measurements alone."""
    drawn = [_draw_tiles(folder), _draw_traffic(folder, facts())]
    if rows := recorded.results(KEY).get("bench", {}).get("cpu"):
        drawn.append(_draw_cpu(folder, rows))
    if rows := recorded.results(KEY, "h200").get("bench", {}).get("gpu"):
        drawn.append(_draw_gpu(folder, rows))
    return drawn


def _draw_tiles(folder: str | Path) -> Path:
    """Left: the score matrix as the causal kernel walks it. Right: m and ℓ of one row as the tiles arrive."""
    from matplotlib.patches import Rectangle

    figure, (left, right) = figures.new_figure(8.0, 3.7, ncols=2, width_ratios=(1, 1.15))
    n, colors = 6, figures.COLORS
    for i, j in itertools.product(range(n), range(n)):
        color = colors["light"] if j > i else colors["orange"] if j == i else colors["blue"]
        left.add_patch(Rectangle((j + 0.04, i + 0.04), 0.92, 0.92, facecolor=color, edgecolor="none"))
    for i in range(n):
        arrow = {"arrowstyle": "->", "color": "white", "linewidth": 1.5}
        left.annotate("", (i + 0.85, i + 0.5), (0.15, i + 0.5), arrowprops=arrow)
    left.text(3.5, 1.5, "never\ncomputed", ha="center", va="center", fontsize=8, color=colors["grey"])
    for i, word in ((0, "starts last"), (n - 1, "starts first")):
        left.text(n + 0.15, i + 0.5, word, va="center", fontsize=9)
    left.set(
        xlim=(-0.1, n + 1.6),
        ylim=(n + 0.1, -0.1),
        aspect="equal",
        xticks=[],
        yticks=[],
        xlabel="tiles of keys",
        ylabel="tiles of queries",
    )
    left.set_title("One program per row of tiles")
    for x, color, word in ((0, "blue", "no mask in the loop"), (3.5, "orange", "masked")):
        left.text(x, n + 1.35, "■", color=colors[color], fontsize=11)
        left.text(x + 0.45, n + 1.33, word, fontsize=9)
    for side in ("left", "bottom"):
        left.spines[side].set_visible(False)

    trace = simulate(WIDGET_DEFAULT | {"order": "shuffled"})
    scores = [s for tile in trace["tiles"] for s in tile["scores"]]
    right.bar([i + 0.5 for i in range(8)], scores, width=0.8, color=colors["light"])
    for tile in trace["tiles"]:
        x = [tile["start"], tile["stop"]]
        after = tile["after"]
        right.plot(x, [after["m"]] * 2, color=colors["red"], linewidth=2.5)
        grew = tile["before"]["m"] not in ("-inf", after["m"])
        right.text(sum(x) / 2, 8.75, f"ℓ = {after['l']:.2f}", ha="center", fontsize=9, color=colors["ink"])
        right.text(
            sum(x) / 2,
            8.05,
            f"past × {tile['alpha']:.2f}" if tile["start"] else "",
            ha="center",
            fontsize=9,
            color=colors["red"] if grew else colors["grey"],
        )
        if tile["start"]:
            right.axvline(tile["start"], color=colors["grey"], linewidth=0.8, linestyle=":")
    right.text(0.1, trace["tiles"][0]["after"]["m"] + 0.2, "m", color=colors["red"], fontsize=11)
    right.set(
        xlim=(0, 8),
        ylim=(0, 9.6),
        xlabel="keys, in tiles of two",
        ylabel="score",
        yticks=(0, 2, 4, 6),
        xticks=[i + 0.5 for i in range(8)],
        xticklabels=range(8),
    )
    right.set_title("When m grows, the past shrinks")
    right.tick_params(length=0)
    return figures.save_figure(figure, folder, "03_tiles")


def _draw_traffic(folder: str | Path, known: dict[str, Any]) -> Path:
    """Floats moved per head against T: unfused, and fused between its two bounds."""
    figure, axes = figures.new_figure(8.0, 3.4, ncols=2, sharey=True)
    for axis, D in zip(axes, (64, 128)):
        rows = known["hbm"][f"d{D}"]
        T = [int(t) for t in rows]
        curve = {kind: [rows[str(t)][kind] for t in T] for kind in ("naive", "tiled", "once")}
        axis.fill_between(T, curve["once"], curve["tiled"], color=figures.COLORS["blue"], alpha=0.12, linewidth=0)
        for kind, color, label, at, offset in (
            ("naive", "red", "unfused", 2, (-22, 6)),
            ("tiled", "blue", "fused, no L2", 0, (6, -9)),
            ("once", "green", "fused, K and V in L2", 1, (0, -14)),
        ):
            axis.plot(T, curve[kind], color=figures.COLORS[color], linewidth=2, marker="o", markersize=3)
            axis.annotate(
                label,
                (T[at], curve[kind][at]),
                xytext=offset,
                textcoords="offset points",
                fontsize=9,
                color=figures.COLORS[color],
                ha="right" if kind == "naive" else "left",
            )
        t75 = known["t_for_75"][f"d{D}"]
        n = lesson.hbm_floats(t75, D)
        axis.annotate("", (t75, n["once"]), (t75, n["naive"]), arrowprops={"arrowstyle": "<->", "linewidth": 1.2})
        axis.text(t75 * 1.06, n["once"] * 2.2, f"75 × at\nT = {t75:,}", fontsize=9)
        axis.set(xscale="log", yscale="log", xlabel="T (prompt tokens)", title=f"D = {D}, full attention, M = 128")
        axis.set_xticks(T, [f"{t // 1024}k" for t in T])
        axis.minorticks_off()
    axes[0].set_ylabel("floats moved, per head")
    axes[0].set_yticks([1e6, 1e7, 1e8, 1e9], ["1 M", "10 M", "100 M", "1 G"])
    return figures.save_figure(figure, folder, "03_traffic")


def _draw_cpu(folder: str | Path, rows: list[dict[str, Any]]) -> Path:
    """Time and memory of three ways on the CPU that was measured."""
    figure, (time, memory) = figures.new_figure(8.0, 3.4, ncols=2, width_ratios=(1, 1.25))
    ways = (("naive", "red", "unfused"), ("tiled", "blue", "tiled, in torch"), ("fused", "green", "PyTorch's fused"))
    for i, (kind, color, word) in enumerate(ways):
        style = {"color": figures.COLORS[color], "label": word}
        timed = [row for row in rows if row[f"{kind}_ms"] is not None]
        time.plot([row["T"] for row in timed], [row[f"{kind}_ms"] for row in timed], "o-", lw=2, ms=4, **style)
        weighed = [
            (x + 0.28 * (i - 1), row[f"{kind}_mib"]) for x, row in enumerate(rows) if row[f"{kind}_mib"] is not None
        ]
        bars = memory.bar(*zip(*weighed), 0.26, **style)
        memory.bar_label(bars, [f"{mib:,.0f}" for _, mib in weighed], padding=2, fontsize=9, color=style["color"])
    time.set(xscale="log", yscale="log", ylabel="milliseconds", title="Time")
    _length_ticks(time, rows)
    time.minorticks_off()
    time.yaxis.set_major_formatter(lambda y, _: f"{y:,.0f}")
    lengths = [tick.get_text() for tick in time.get_xticklabels()]
    memory.set(
        xticks=range(len(rows)), xticklabels=lengths, ylabel="MiB", title="Peak memory", xlabel=time.get_xlabel()
    )
    memory.yaxis.set_major_formatter(lambda y, _: f"{y:,.0f}")
    memory.legend(fontsize=9, loc="upper left")
    return figures.save_figure(figure, folder, "03_cpu")


def _draw_gpu(folder: str | Path, rows: list[dict[str, Any]]) -> Path:
    """TFLOP/s over T on the GPU that was measured, beside PyTorch's two fused backends."""
    figure, axes = figures.new_figure(8.0, 5.4, nrows=2, ncols=2, sharex=True, sharey=True)
    ways = (
        ("ours", "blue", "ours, warps take turns"),
        ("plain", "orange", "ours, all warps alike"),
        ("flash", "grey", "FlashAttention-2"),
        ("cudnn", "green", "cuDNN"),
    )
    for axis, (D, causal) in zip(axes.flat, itertools.product((128, 64), (True, False))):
        for kind, color, word in ways:
            points = [(r["T"], r[kind]) for r in rows if (r["D"], r["causal"]) == (D, causal) and r.get(kind)]
            if points:
                axis.plot(*zip(*points), "o-", color=figures.COLORS[color], linewidth=2, markersize=3, label=word)
        axis.set(xscale="log", title=f"{'causal' if causal else 'full'}, D = {D}")
        _length_ticks(axis, rows)
        axis.label_outer()
        if causal:
            axis.set_ylabel("TFLOP/s")
    axes[0, 0].set_ylim(0)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), fontsize=9, ncols=4, loc="outside upper center")
    return figures.save_figure(figure, folder, "03_gpu")


def _length_ticks(axis: Any, rows: list[dict[str, Any]]) -> None:
    lengths = sorted({row["T"] for row in rows})
    axis.set_xticks(lengths, [f"{T:,}" if T < 1024 else f"{T // 1024}k" for T in lengths])
    axis.set_xlabel("T (prompt tokens)")
    axis.minorticks_off()


# --- Measured -------------------------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """Where the packed sequences begin (vLLM: `CommonAttentionMetadata`)."""

    query_start_loc: Tensor  # int32 [B + 1]
    seq_start_loc: Tensor  # int32 [B + 1]
    max_query_len: int
    max_seq_len: int

    @classmethod
    def of(cls, query_lens: Sequence[int], seq_lens: Sequence[int] | None = None) -> Batch:
        """From the lengths; without `seq_lens`, every sequence is a prefill."""
        return cls(*lesson.packed(query_lens, seq_lens or query_lens))


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: Batch,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`naive_attention` in fp64, sequence by sequence of a packed batch."""
    lens = batch.query_start_loc.diff().tolist(), batch.seq_start_loc.diff().tolist()
    options = {"causal": causal, "window": window, "scale": scale}
    return lesson.packed_reference(q.double(), k.double(), v.double(), *lens, **options)


def random_qkv(batch: Batch, Hq: int, Hkv: int, D: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q [T, Hq, D], k and v [S_total, Hkv, D] for a batch, from the current seed."""
    T, S = int(batch.query_start_loc[-1]), int(batch.seq_start_loc[-1])
    return tuple(torch.randn(*shape, D, device=common.device()).to(dtype) for shape in ((T, Hq), (S, Hkv), (S, Hkv)))


def run_flash_attn(q: Tensor, k: Tensor, v: Tensor, b: Batch, causal: bool = True, window: int | None = None) -> Tensor:
    """The package flash-attn. vLLM carries its own build, with FA3 and FA4 in it."""
    from flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func(q, k, v, *b, causal=causal, window_size=(window - 1 if window else -1, -1))


def peak_memory(fn: Callable[[], Any]) -> float | None:
    """MiB that `fn` needs beyond what is allocated already; None where the system does not tell."""

    def status() -> dict[str, str]:
        return dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())

    try:  # Linux: reset the high-water mark of resident memory, and look at it afterwards
        Path("/proc/self/clear_refs").write_text("5")
        before = int(status()["VmRSS"].split()[0])
        fn()
        return max(0, int(status()["VmHWM"].split()[0]) - before) / 1024
    except OSError:
        return None


def torch_fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's fused kernel (tiled and online too) on one causal prompt, q [T, Hq, D], k and v [T, Hkv, D].

    A KV head is an entry of the batch, and its query heads read the same keys (stride 0).
    """
    (T, Hq, D), Hkv = q.shape, k.shape[1]
    q = q.view(T, Hkv, Hq // Hkv, D).permute(1, 2, 0, 3)  # [Hkv, Hq / Hkv, T, D]
    k, v = (x.transpose(0, 1)[:, None].expand(-1, Hq // Hkv, -1, -1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).reshape(T, Hq, D)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """What `--bench` measures on this machine. It needs no model."""
    return measure_gpu() if common.HAS_GPU else measure_cpu()


def measure_cpu() -> dict[str, Any]:
    """Naive, tiled and fused attention of SmolLM2's shape, causal, fp32: milliseconds and peak MiB over T."""
    common.heading("7. Measured on this CPU: SmolLM2's 9 heads, causal, fp32, one layer")
    rows = []
    for T in (512, 1024, 2048, 4096):
        q, k, v = random_qkv(Batch.of([T]), 9, 3, 64, torch.float32)
        ways = {
            "naive": lambda q=q, k=k, v=v: lesson.naive_attention(q, k, v),
            "tiled": lambda q=q, k=k, v=v: tiled_attention(q, k, v, block_m=256, block_n=256),
            "fused": lambda q=q, k=k, v=v: torch_fused(q, k, v),
        }
        rows.append(
            {"T": T}
            | {f"{name}_mib": peak_memory(fn) for name, fn in ways.items()}
            | {f"{name}_ms": timing.measure(fn, 2.0).median * 1e3 for name, fn in ways.items()}
        )
    common.table(
        ("T", "unfused", "memory", "tiled, in torch", "memory", "torch's fused", "memory"),
        [
            (
                f"{r['T']:,}",
                *(
                    cell
                    for name in ("naive", "tiled", "fused")
                    for cell in (
                        f"{r[name + '_ms']:.1f} ms",
                        "–" if r[name + "_mib"] is None else f"{r[name + '_mib']:,.0f} MiB",
                    )
                ),
            )
            for r in rows
        ],
    )
    common.skipped("TFLOP/s of the kernel", "no GPU here, and the interpreter's time means nothing")
    return {"cpu": rows}


# What `--bench` tries on a GPU beside the default, so that a new GPU shows what it likes.
SWEEP = [
    (128, 128, 8, 2, 0),
    (128, 64, 8, 2, 0),
    (128, 64, 8, 3, 0),
    (128, 64, 4, 2, 0),
    (128, 32, 8, 3, 0),
    (64, 128, 4, 2, 0),
    (64, 64, 4, 2, 0),
    (64, 64, 4, 3, 0),
]


def measure_gpu() -> dict[str, Any]:
    """bf16 TFLOP/s at 16k tokens in sequences of T, Hq · D = 2048, as the FlashAttention papers measure."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    common.heading("7. Measured on this GPU: bf16, 16k tokens in sequences of T, Hq · D = 2048")
    ceiling = timing.matmul_rate(torch.bfloat16) / 1e12
    common.say(f"ceilings of this run: matmul {ceiling:.0f} TFLOP/s, copy {timing.copy_bandwidth() / 1e12:.2f} TB/s")
    peers = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    rows, sweep = [], []
    lengths = (512, 1024, 2048, 4096, 8192, 16384)
    for D, T, causal in ((D, T, causal) for D in (128, 64) for T in lengths for causal in (True, False)):
        B, H = 16384 // T, 2048 // D
        batch = Batch.of([T] * B)
        q, k, v = random_qkv(batch, H, H, D, torch.bfloat16)
        dense = [x.view(B, T, H, D).transpose(1, 2) for x in (q, k, v)]
        flops = B * attention_flops(T, T, H, D, False) // (2 if causal else 1)  # causal is half of full, as published

        def rate(fn: Callable[[], Any], flops: int = flops) -> float | None:
            try:
                return flops / timing.measure(fn).median / 1e12
            except Exception:  # a peer or a tile that this GPU cannot run is a gap in the table, not the end
                return None

        def ours(tiles: tuple[int, ...] | None, q=q, k=k, v=v, batch=batch, causal=causal) -> Any:
            return lesson.flash_attention(q, k, v, *batch, causal=causal, tiles=tiles)

        shape = {"T": T, "D": D, "causal": causal}
        plain = lesson.choose_tiles(torch.bfloat16, D, None, lesson.nvidia_capability())
        before, out = lesson.flash_attention_kernel.launches, ours(None)[0]
        alike = lesson.flash_attention_kernel.launches > before  # Hopper's kernel did not take it
        if not common.relative_error(out, ours(plain)[0]) <= common.TOLERANCE[out.dtype]:
            raise common.CheckFailed("a tile gives other numbers")
        row = shape | {"plain": rate(lambda f=ours, t=plain: f(t))}
        row["ours"] = row["plain"] if alike else rate(lambda f=ours: f(None))
        for name, backend in peers.items():
            with sdpa_kernel(backend):
                row[name] = rate(lambda d=dense, c=causal: F.scaled_dot_product_attention(*d, is_causal=c))
        if importlib.util.find_spec("flash_attn"):
            row["flash_attn"] = rate(lambda q=q, k=k, v=v, b=batch, c=causal: run_flash_attn(q, k, v, b, c))
        rows.append(row)
        if T in (2048, 16384):
            sweep += [
                shape | {"tiles": [*tiles[:4], tiles[4] or None], "ours": rate(lambda f=ours, t=tiles: f(t))}
                for tiles in SWEEP
            ]
    names = [name for name in ("ours", "plain", "flash", "cudnn", "flash_attn") if any(row.get(name) for row in rows)]

    def show(rate: float | None) -> str:
        return f"{rate:.0f}" if rate else "–"

    def where(row: dict[str, Any]) -> tuple:
        return f"{row['T']:,}", row["D"], "causal" if row["causal"] else "full"

    common.table(
        ("T", "D", "mask", *(f"{name} TFLOP/s" for name in names), "of matmul"),
        [(*where(r), *(show(r.get(name)) for name in names), f"{(r['ours'] or 0) / ceiling:.0%}") for r in rows],
    )
    if sweep:
        common.table(
            ("T", "D", "mask", "M, N, warps, stages", "TFLOP/s"),
            [(*where(r), ", ".join(map(str, r["tiles"])), show(r["ours"])) for r in sweep],
        )
    return {"gpu": rows, "sweep": sweep, "matmul_tflops": ceiling}

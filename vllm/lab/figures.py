"""Figures in the pages' style: the same drawing gives the same bytes."""

from __future__ import annotations

import common  # first: it settles the device before torch and Triton are used

import io
import logging
import os
import re
from pathlib import Path
from typing import Any

FIGURES = common.ROOT / "lessons" / "figures"
COLORS = {"blue": "#2f6fb0", "orange": "#d9822b", "green": "#3a8f5c", "red": "#c0453f", "grey": "#7a8189",
          "purple": "#7b5ea7", "light": "#e4e8ec", "ink": "#22272e"}  # fmt: skip


def new_figure(width: float = 8.0, height: float = 3.6, **kwargs: Any) -> tuple[Any, Any]:
    """A matplotlib figure and its axes in the lessons' style; size in inches."""
    os.environ.setdefault("MPLBACKEND", "svg")
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # else it reports a HOME that cannot be written
    import matplotlib.pyplot as plt
    from cycler import cycler

    plt.rcParams.update({
        "svg.hashsalt": "vllm-from-first-principles", "svg.fonttype": "path", "font.family": "DejaVu Sans",
        "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": COLORS["grey"],
        "axes.labelcolor": COLORS["ink"], "text.color": COLORS["ink"], "xtick.color": COLORS["ink"],
        "ytick.color": COLORS["ink"], "axes.titlesize": 11, "axes.titlelocation": "left", "legend.frameon": False,
        "axes.prop_cycle": cycler(color=[COLORS[c] for c in ("blue", "orange", "green", "red", "purple")]),
        "figure.facecolor": "white", "axes.axisbelow": True,
    })  # fmt: skip
    return plt.subplots(figsize=(width, height), layout="constrained", **kwargs)


def save_figure(figure: Any, folder: str | Path, name: str) -> Path:
    """Write `folder/name.svg`, byte for byte the same for the same drawing. Raises InputError."""
    import matplotlib.pyplot as plt

    path, drawn = Path(folder) / f"{name}.svg", io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    # Names of clip paths and markers are hashes of coordinates, whose last bit differs from run to run: count instead.
    text = drawn.getvalue()
    for n, old in enumerate(re.findall(r'id="([a-z][0-9a-f]{10})"', text)):
        text = text.replace(old, f"id-{n}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise common.InputError(f"--figure {folder}: {path.name} cannot be written there ({error.strerror})") from None
    return path

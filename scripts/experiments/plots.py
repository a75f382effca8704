"""Draws what the other experiments have measured.

    pip install 'shoal[plots]'
    python scripts/experiments/plots.py

Reads docs/results/methods.csv, those of other texts, and heterogeneous.csv, and writes beside them, as SVG and of one
seed: methods-bytes (the loss that each method ends with against the bytes that a peer sends), methods-steps (the loss
on the way), and heterogeneous-time (the loss against time where one peer is four times slower).
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
STEPS = 400
CURVES = ("sync", "single", "fedavg-50", "diloco-50", "streaming-48", "eager-50", "delayed-50", "noloco-25", "demo")
STYLE = {
    "figure.figsize": (9, 5.5),
    "figure.constrained_layout.use": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "font.size": 9,
    "svg.fonttype": "none",
    "svg.hashsalt": "shoal",
}
Lines = Sequence[Mapping[str, str]]


def read(path: Path, seed: int) -> Lines:
    """A table's lines of one seed."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [line for line in csv.DictReader(file) if line["seed"] == str(seed)]


def bytes_against_loss(axes: Axes, lines: Lines) -> None:
    """A point for each method. Those that have diverged are named, and left out."""
    shown = sorted((line for line in lines if int(line["bytes"])), key=lambda line: int(line["bytes"]))
    if not shown:
        return
    losses = {line["row"]: float(line["loss"]) for line in lines}
    single = losses.get("single", max(losses.values()))
    most = single + 2 * (single - min(losses.values()))
    points = [(int(line["bytes"]) / 1e6, losses[line["row"]], line["row"]) for line in shown]
    points = [point for point in points if point[1] <= most]
    front = [point for point in points if not any(sent <= point[0] and loss < point[1] for sent, loss, _ in points)]
    axes.set(xscale="log", xlim=(points[0][0] / 1.5, points[-1][0] * 4))
    for sent, loss, _ in points:
        axes.plot(sent, loss, "o", color="C0", markersize=3.5)
    for sent, loss, _ in front:
        axes.plot(sent, loss, "o", color="C3", markersize=5)
    _name(axes, [*front, *(point for point in points if point not in front)], bold=len(front))
    axes.axhline(single, color="0.5", linestyle="--", linewidth=1)
    axes.text(1, single, "one replica, no exchange", transform=axes.get_yaxis_transform(), ha="right", va="bottom")
    beyond = [f"{line['row']} {losses[line['row']]:.2f}" for line in shown if losses[line["row"]] > most]
    if beyond:
        axes.set_title("beyond the upper edge: " + ", ".join(beyond), fontsize=8, color="0.4")
    axes.set(xlabel="MB that a peer sends", ylabel="loss at the end, nats per byte")


def _name(axes: Axes, points: Sequence[tuple[float, float, str]], *, bold: int) -> None:
    """Names points, the first ones in bold; those that would be written over others are left out."""
    axes.figure.canvas.draw()  # from here on, data has its place on the page
    taken: list[tuple[float, float, float]] = []
    for index, (sent, loss, name) in enumerate(points):
        left, height = axes.transData.transform((sent, loss))
        right = left + 5.5 * len(name)
        if all(left > end or right < begin or abs(height - at) > 10 for begin, end, at in taken):
            taken.append((left, right, height))
            weight = "bold" if index < bold else "normal"
            axes.annotate(name, (sent, loss), (4, 2), textcoords="offset points", fontsize=7, weight=weight)


def steps_against_loss(axes: Axes, lines: Lines) -> None:
    """A curve for each of some methods."""
    for line in lines:
        curve = [float(loss) for loss in (line.get("curve") or "").split()]
        if line["row"] in CURVES and curve:
            steps = [STEPS * (index + 1) / len(curve) for index in range(len(curve))]
            axes.plot(steps, curve, ".-", label=line["row"])
    axes.set(xlabel="steps of each replica", ylabel="loss of one replica's parameters, nats per byte")
    if axes.has_data():
        axes.legend()


def time_against_loss(axes: Axes, lines: Lines) -> None:
    """A curve for each method that does not diverge."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for line in lines:
        curves.setdefault(line["row"], []).append((float(line["time"]), float(line["loss"])))
    for name, curve in curves.items():
        if curve[-1][1] <= 1.5 * min(loss for _, loss in curve) and "plain" not in name:
            axes.plot(*zip(*curve, strict=True), ".-", label=name)
    axes.set(xlabel="time, in steps of the fast peers", ylabel="loss of the outer parameters, nats per byte")
    if axes.has_data():
        axes.legend()


DRAWINGS: Mapping[str, Mapping[str, Callable[[Axes, Lines], None]]] = {
    "methods": {"bytes": bytes_against_loss, "steps": steps_against_loss},
    "heterogeneous": {"time": time_against_loss},
}
"""What is drawn of each table, and of those with other texts."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the tables are, and the drawings go")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        import matplotlib as mpl
    except ImportError:
        print("drawing needs matplotlib: pip install 'shoal[plots]'", file=sys.stderr)
        return 2
    mpl.use("svg")
    from matplotlib import pyplot as plt

    drawn = 0
    for path in sorted(options.results.glob("*.csv")):
        lines = read(path, options.seed)
        for kind, draw in DRAWINGS.get(path.stem.partition("-")[0], {}).items():
            with plt.rc_context(STYLE):
                figure, axes = plt.subplots()
                draw(axes, lines)
                if axes.has_data():
                    figure.savefig(path.with_name(f"{path.stem}-{kind}.svg"), metadata={"Date": None})
                    print(path.with_name(f"{path.stem}-{kind}.svg"))
                    drawn += 1
                plt.close(figure)
    if not drawn:
        print(f"there is nothing of seed {options.seed} to draw in {options.results}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

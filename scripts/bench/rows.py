"""What benchmarks have in common: rows of our figure beside a rival's, with a goal for the ratio."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable

Row = dict[str, object]


def row(case: str, ours: float, rival: float, unit: str, goal: str, name: str = "plain trio socket") -> Row:
    """One line of the result. The goal is "<= X" or ">= X" for the ratio, or nothing."""
    return {
        "case": case,
        "ours": round(ours, 3),
        "rival": round(rival, 3),
        "rival_name": name,
        "unit": unit,
        "ratio": round(ours / rival, 3),
        "goal": goal,
    }


def met(line: Row) -> bool:
    """Whether a line's goal was reached; true if it has none."""
    better, _, goal = str(line["goal"]).partition(" ")
    ratio = float(str(line["ratio"]))
    return not goal or (ratio <= float(goal) if better == "<=" else ratio >= float(goal))


def conclude(bench: str, rows: Iterable[Row], *, as_json: bool) -> int:
    """Prints rows as they come, and returns the exit code: 0 if all goals were reached.

    Args:
        bench: The name of what was measured.
        rows: May be measured one by one meanwhile.
        as_json: Whether the last line is one JSON object with all of them.
    """
    load, told = os.getloadavg()[0], list[Row]()
    print(f"load before: {load:.1f} on {os.cpu_count()} cores")
    for line in rows:
        told.append(line)
        verdict = "" if met(line) else "  MISSED"
        print(
            f"{line['case']}: {line['ours']} {line['unit']}, {line['rival_name']} {line['rival']}, "
            f"ratio {line['ratio']}, goal {line['goal'] or 'none'}{verdict}",
            flush=True,
        )
    if as_json:
        print(json.dumps({"bench": bench, "load": load, "rows": told}))
    return 0 if all(map(met, told)) else 1

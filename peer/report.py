"""A demo drawn as one HTML file that needs nothing else: inline SVG, no scripts, no fonts, no addresses.

Colours are CSS variables, so that the page follows the reader's light or dark preference. Every piece of text that came
from a daemon is escaped.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs

from peer.console import size
from peer.recording import Event, Recording
from peer.verdict import Scenario, Verdict

WIDTH, HEIGHT = 560, 260  # of a chart, in SVG units
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 12, 34  # margins of its plot area
MAX_POINTS = 120  # of one line: a longer one is drawn as the means of at most as many stretches
COLOURS = 8

Point = tuple[float, float]

STYLE = """
:root { color-scheme: light dark;
  --page: #f7f7f5; --card: #fff; --ink: #1d1d1b; --soft: #6a6a66; --line: #e3e3df; --good: #18794e; --bad: #c62a2f;
  --c0: #2a6fdb; --c1: #d9730d; --c2: #1a936f; --c3: #b5179e; --c4: #8a6d00;
  --c5: #5b4bc4; --c6: #00838f; --c7: #9c4221; }
@media (prefers-color-scheme: dark) { :root {
  --page: #141413; --card: #1e1e1c; --ink: #ececea; --soft: #a0a09a; --line: #34342f; --good: #4cc38a; --bad: #ff7b7b;
  --c0: #6ea8fe; --c1: #ffa94d; --c2: #4fd1a5; --c3: #f17ad8; --c4: #e0c04a;
  --c5: #a89bff; --c6: #4dd0e1; --c7: #e8956a; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1200px; margin: 0 auto; padding: 32px 20px 48px; }
h1 { font-size: 26px; margin: 0; display: flex; gap: 12px; align-items: center; }
h2 { font-size: 15px; margin: 0 0 2px; }
p { margin: 0 0 10px; color: var(--soft); font-size: 13px; }
.badge { font-size: 13px; padding: 2px 12px; border-radius: 99px; color: var(--card); background: var(--good); }
.badge.failed { background: var(--bad); }
.card, .tile { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 16px 18px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(160px, 1fr)); gap: 12px; margin: 20px 0 12px; }
.tile b { display: block; font-size: 22px; font-weight: 600; line-height: 1.3; }
.tile span { color: var(--soft); font-size: 13px; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(460px, 100%), 1fr)); gap: 12px; }
.wide { grid-column: 1 / -1; }
ul.problems { color: var(--bad); margin: 12px 0 0; padding-left: 20px; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { fill: var(--soft); font-size: 11px; font-family: system-ui, sans-serif; }
svg .name { fill: var(--ink); font-size: 12px; }
svg .dot { stroke: var(--card); stroke-width: 2; }
svg .mark { fill: var(--ink); font-size: 11px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: 13px; margin-top: 6px; }
.legend i { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 6px; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 8px 0 0; font: 13px/1.5 ui-monospace, monospace; }
.scroll { overflow-x: auto; }
.scroll svg { min-width: 720px; }
table { border-collapse: collapse; width: 100%; font-size: 13px; margin-top: 6px; }
th, td { text-align: left; padding: 6px 16px 6px 0; border-top: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 500; border-top: 0; }
td.code { font-family: ui-monospace, monospace; }
"""


@attrs.frozen(kw_only=True)
class Line:
    """One line of a chart. `colour` counts through the palette; `dots` marks every point."""

    name: str
    points: Sequence[Point]
    colour: int
    dots: bool = False


@attrs.frozen(kw_only=True)
class Mark:
    """A moment marked in a chart over time, such as the death of a peer."""

    x: float
    text: str
    css_colour: str


@attrs.frozen(kw_only=True)
class Axes:
    """From data to SVG units, for one chart."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    height: float = HEIGHT
    left: float = LEFT
    width: float = WIDTH

    def x(self, value: float) -> float:
        """Horizontal position of a value."""
        return self.left + (value - self.x_low) / (self.x_high - self.x_low) * (self.width - self.left - RIGHT)

    def y(self, value: float) -> float:
        """Vertical position of a value."""
        return TOP + (self.y_high - value) / (self.y_high - self.y_low) * (self.height - TOP - BOTTOM)


def write_report(
    path: Path, verdict: Verdict, recordings: Sequence[Recording], scenario: Scenario, sample: str = ""
) -> None:
    """Writes the report of a demo to a file; raises EventError if an event lacks a field."""
    path.write_text(render(verdict, recordings, scenario, sample), encoding="utf-8")


def render(verdict: Verdict, recordings: Sequence[Recording], scenario: Scenario, sample: str = "") -> str:
    """The report as one HTML document."""
    start = min((event.t for recording in recordings for event in recording.events[:1]), default=0.0)
    marks = _marks(scenario, start)
    colour = {recording.name: index % COLOURS for index, recording in enumerate(recordings)}

    def lines(points: Callable[[Recording, float], list[Point]]) -> list[Line]:
        drawn = [Line(name=r.name, points=_thin(points(r, start)), colour=colour[r.name]) for r in recordings]
        return [line for line in drawn if line.points]

    validation = Line(name="", points=list(verdict.losses.items()), colour=0, dots=True)
    cards = [
        _card("What happened", "Inner steps are pale, reduces are solid.", timeline(recordings, scenario), wide=True),
        _card("Validation loss", "Nats per byte, by revision.", chart([validation], x_name="revision", whole_x=True)),
        _card("Bytes sent", "Per peer, against one all-reduce per step.", comparison(verdict)),
        _card("Training loss", "Nats per byte, each peer on its own data.", chart(lines(_losses), marks=marks)),
        _card("Speed", "Tokens per second of each peer.", chart(lines(_speeds), marks=marks, y_from_zero=True)),
        _card(
            "Traffic",
            "Megabytes that each peer has sent in reduces.",
            chart(lines(_sent), marks=marks, y_from_zero=True),
        ),
        _card("The model writes", "Text sampled after the last round.", f"<pre>{_text(sample or 'no sample')}</pre>"),
        _card("Peers", "", _peer_table(recordings, scenario), wide=True),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>Shoal demo</title>'
        f"<style>{STYLE}</style></head><body><main>{_header(verdict)}"
        f'<div class="grid">{"".join(cards)}</div></main></body></html>\n'
    )


def chart(
    lines: Sequence[Line],
    *,
    marks: Sequence[Mark] = (),
    x_name: str = "seconds",
    whole_x: bool = False,
    y_from_zero: bool = False,
) -> str:
    """A line chart with axes, marks and, for several lines, a legend, as HTML."""
    points = [point for line in lines for point in line.points]
    if not points:
        return "<p>Nothing was recorded.</p>"
    xs, ys = [x for x, _ in points], [y for _, y in points]
    y_low, y_high = _span(0.0 if y_from_zero else min(ys), max(ys))
    y_ticks = _ticks(y_low, y_high)
    x_low, x_high = _span(0.0, max(xs, default=0.0) if not marks else max(*xs, *(mark.x for mark in marks)))
    axes = Axes(x_low=x_low, x_high=x_high, y_low=min(y_low, y_ticks[0]), y_high=max(y_high, y_ticks[-1]))
    body = [_grid(axes, y_ticks), _x_axis(axes, _ticks(x_low, x_high, whole=whole_x), x_name), _mark_lines(axes, marks)]
    body += [_polyline(axes, line) for line in lines]
    legend = _legend([(line.name, f"var(--c{line.colour})") for line in lines]) if len(lines) > 1 else ""
    return _svg(WIDTH, HEIGHT, "".join(body)) + legend


def comparison(verdict: Verdict) -> str:
    """Two bars: what was sent, and what data-parallel training would have sent."""
    bars = [("this run", verdict.bytes_sent, 0), ("data-parallel", verdict.bytes_data_parallel, 1)]
    most = max(count for _, count, _ in bars) or 1.0
    parts = []
    for row, (name, count, colour) in enumerate(bars):
        y, length = 26 + row * 76, max(count / most * (WIDTH - 20), 2.0)
        parts.append(f'<text class="name" x="0" y="{y}">{_text(name)}: {_text(size(count))}</text>')
        parts.append(f'<rect x="0" y="{y + 10}" width="{length:.1f}" height="28" rx="4" fill="var(--c{colour})"/>')
    if verdict.bytes_sent:
        ratio = verdict.bytes_data_parallel / verdict.bytes_sent
        parts.append(f'<text x="0" y="192">{ratio:.1f} times as much for the same number of inner steps</text>')
    return _svg(WIDTH, 210, "".join(parts))


def timeline(recordings: Sequence[Recording], scenario: Scenario) -> str:
    """One lane per daemon over time: inner steps, reduces, failures, the death and the join."""
    times = [event.t for recording in recordings for event in recording.events]
    if not times:
        return "<p>Nothing was recorded.</p>"
    lane, width, left = 34, 2 * WIDTH, 96
    height = TOP + lane * len(recordings) + BOTTOM
    x_low, x_high = _span(0.0, max(times) - min(times))
    axes = Axes(x_low=x_low, x_high=x_high, y_low=0, y_high=1, height=height, left=left, width=width)
    body = [_x_axis(axes, _ticks(x_low, x_high, count=12), "seconds")]
    for row, recording in enumerate(recordings):
        y = TOP + row * lane
        body.append(f'<text class="name" x="0" y="{y + 19}">{_text(recording.name)}</text>')
        body.append(_lane(recording, axes, y, row % COLOURS, min(times)))
    for mark in _marks(scenario, min(times)):
        name = scenario.killed if mark.text == "killed" else scenario.joined
        row = [recording.name for recording in recordings].index(name or "")
        x, y = axes.x(mark.x), TOP + row * lane + 14
        anchor, shift = ("start", 9) if mark.text == "killed" else ("end", -9)
        place = f'x="{x + shift:.1f}" y="{y + 4}" text-anchor="{anchor}"'
        body.append(f'<circle class="dot" cx="{x:.1f}" cy="{y}" r="6" fill="{mark.css_colour}"/>')
        body.append(f'<text class="mark" {place}>{_text(mark.text)}</text>')
    return f'<div class="scroll">{_svg(width, height, "".join(body))}</div>'


def _lane(recording: Recording, axes: Axes, y: float, colour: int, start: float) -> str:
    """The rectangles of one daemon's lane. Time before its state or first step, and after a commit, stays empty."""
    parts = []
    inner: Event | None = None  # the first event of the inner steps that are going on
    reduce: Event | None = None

    def bar(begin: float, end: float, opacity: float, title: str) -> str:
        x, width = axes.x(begin - start), max(axes.x(end - start) - axes.x(begin - start), 1.0)
        return (
            f'<rect x="{x:.1f}" y="{y + 4}" width="{width:.1f}" height="20" rx="2" fill="var(--c{colour})" '
            f'fill-opacity="{opacity}"><title>{_text(title)}</title></rect>'
        )

    for event in recording.events:
        if event.kind == "inner" and reduce is None:
            inner = inner or event
        elif event.kind == "round_started" and reduce is None:
            if inner is not None:
                parts.append(bar(inner.t, event.t, 0.3, f"inner steps, {event.t - inner.t:.1f} s"))
            inner, reduce = None, event
        elif event.kind == "round_committed":
            began, number = reduce or event, event.integer("round")
            attempt = f"round {number}, attempt {event.integer('attempt')}, {event.t - began.t:.1f} s"
            parts.append(bar(began.t, event.t, 1.0, attempt))
            inner = reduce = None
    last = recording.events[-1] if recording.events else None
    if last is not None and (open_ := reduce or inner) is not None:
        parts.append(bar(open_.t, last.t, 1.0 if reduce else 0.3, "unfinished"))
    return "".join(parts)


def _marks(scenario: Scenario, start: float) -> list[Mark]:
    marks = []
    if scenario.killed_at is not None:
        marks.append(Mark(x=scenario.killed_at - start, text="killed", css_colour="var(--bad)"))
    if scenario.joined_at is not None:
        marks.append(Mark(x=scenario.joined_at - start, text="joined", css_colour="var(--good)"))
    return marks


def _losses(recording: Recording, start: float) -> list[Point]:
    points = [(event.t - start, event.number("loss")) for event in recording.of("inner")]
    return [point for point in points if math.isfinite(point[1])]


def _speeds(recording: Recording, start: float) -> list[Point]:
    points = [(event.t - start, event.number("tokens_per_second")) for event in recording.of("inner")]
    return [point for point in points if math.isfinite(point[1])]


def _sent(recording: Recording, start: float) -> list[Point]:
    total, points = 0.0, []
    for event in recording.of("round_committed"):
        total += event.number("bytes_sent") / 1e6
        points.append((event.t - start, total))
    return points


def _header(verdict: Verdict) -> str:
    badge = '<span class="badge">passed</span>' if verdict.passed else '<span class="badge failed">failed</span>'
    equal = len(set(verdict.digests.values())) == 1
    first, last, death = verdict.loss_first, verdict.loss_last, verdict.death
    lost = None if death is None else death.recovery
    ratio = verdict.bytes_data_parallel / verdict.bytes_sent if verdict.bytes_sent else 0.0
    tiles = {
        "rounds committed": str(verdict.rounds),
        f"digests of {len(verdict.digests)} peers at the end": "equal" if equal else "NOT equal",
        "validation loss, nats per byte": "?" if first is None or last is None else f"{first:.2f} → {last:.2f}",
        "less sent than data-parallel": f"{ratio:.1f}×",
        "lost to the death of a peer": "?" if lost is None else f"{max(lost, 0.0):.1f} s",
        "in all": f"{verdict.seconds:.0f} s",
    }
    shown = "".join(f'<div class="tile"><b>{_text(v)}</b><span>{_text(k)}</span></div>' for k, v in tiles.items())
    problems = "".join(f"<li>{_text(problem)}</li>" for problem in verdict.problems)
    problems = f'<ul class="problems">{problems}</ul>' if problems else ""
    return f'<h1>Shoal demo {badge}</h1>{problems}<div class="tiles">{shown}</div>'


def _peer_table(recordings: Sequence[Recording], scenario: Scenario) -> str:
    rows = []
    for recording in recordings:
        fate = {scenario.killed: "killed", scenario.joined: "joined later"}.get(recording.name, "")
        cells = [recording.name, fate, str(len(recording.committed)), size(recording.bytes_sent)]
        codes = [recording.peer or "", str(recording.revision), recording.digest or ""]
        row = "".join(f"<td>{_text(cell)}</td>" for cell in cells)
        row += "".join(f'<td class="code">{_text(code)}</td>' for code in (codes[0][:16], codes[1], codes[2][:32]))
        rows.append(f"<tr>{row}</tr>")
    names = ("daemon", "", "rounds", "sent", "peer id", "revision", "digest")
    head = "".join(f"<th>{name}</th>" for name in names)
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div>'


def _card(title: str, note: str, content: str, *, wide: bool = False) -> str:
    subtitle = f"<p>{_text(note)}</p>" if note else ""
    return f'<section class="card{" wide" if wide else ""}"><h2>{_text(title)}</h2>{subtitle}{content}</section>'


def _svg(width: float, height: float, body: str) -> str:
    return f'<svg viewBox="0 0 {width} {height}" role="img">{body}</svg>'


def _grid(axes: Axes, ticks: Sequence[float]) -> str:
    parts = []
    for tick in ticks:
        y, right = axes.y(tick), axes.width - RIGHT
        parts.append(f'<line x1="{axes.left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--line)"/>')
        parts.append(f'<text x="{axes.left - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:,.6g}</text>')
    return "".join(parts)


def _x_axis(axes: Axes, ticks: Sequence[float], name: str) -> str:
    y = axes.height - BOTTOM
    parts = [f'<line x1="{axes.left}" x2="{axes.width - RIGHT}" y1="{y}" y2="{y}" stroke="var(--soft)"/>']
    for tick in ticks:
        if tick <= axes.x_high:
            parts.append(f'<text x="{axes.x(tick):.1f}" y="{y + 15}" text-anchor="middle">{tick:,.6g}</text>')
    middle = (axes.left + axes.width - RIGHT) / 2
    parts.append(f'<text x="{middle:.1f}" y="{axes.height - 4}" text-anchor="middle">{_text(name)}</text>')
    return "".join(parts)


def _mark_lines(axes: Axes, marks: Sequence[Mark]) -> str:
    parts = []
    for row, mark in enumerate(marks):
        x, bottom = axes.x(mark.x), axes.height - BOTTOM
        line = f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}" stroke-dasharray="4 3"'
        parts.append(f'{line} stroke="{mark.css_colour}"/>')
        anchor, shift = ("start", 4) if row else ("end", -4)
        place = f'x="{x + shift:.1f}" y="{TOP + 10}" text-anchor="{anchor}"'
        parts.append(f'<text class="mark" {place}>{_text(mark.text)}</text>')
    return "".join(parts)


def _polyline(axes: Axes, line: Line) -> str:
    path = " ".join(f"{axes.x(x):.1f},{axes.y(y):.1f}" for x, y in line.points)
    colour = f"var(--c{line.colour})"
    shape = f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8" stroke-linejoin="round"/>'
    if line.dots or len(line.points) == 1:
        for x, y in line.points:
            place = f'cx="{axes.x(x):.1f}" cy="{axes.y(y):.1f}" r="4" fill="{colour}"'
            shape += f"<circle {place}><title>{x:g}: {y:.4g}</title></circle>"
    return shape


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    items = "".join(f'<span><i style="background:{colour}"></i>{_text(name)}</span>' for name, colour in entries)
    return f'<div class="legend">{items}</div>'


def _span(low: float, high: float) -> tuple[float, float]:
    """A range that is not empty."""
    return (low, high) if high > low else (low, low + 1.0)


def _ticks(low: float, high: float, *, count: int = 6, whole: bool = False) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) that span a range."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    step = max(step, 1.0) if whole else step
    return [round(index * step, 10) for index in range(math.floor(low / step), math.ceil(high / step) + 1)]


def _thin(points: Sequence[Point]) -> list[Point]:
    """At most MAX_POINTS points: each the mean of a stretch of the originals."""
    stride = math.ceil(len(points) / MAX_POINTS) or 1
    stretches = [points[index : index + stride] for index in range(0, len(points), stride)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in stretches]


def _text(value: str) -> str:
    return html.escape(value)

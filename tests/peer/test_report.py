"""The report of a demo: one page, self-contained, escaped, complete."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import attrs
import pytest

from peer.recording import Recording
from peer.report import MAX_POINTS, Line, Mark, chart, render, write_report
from peer.verdict import Scenario, judge

VOID = {"meta", "br"}


class Page(HTMLParser):
    """Checks nesting, and collects tags, attributes and text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.texts = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def report_of(swarm, sample="def f():\n    return 1"):
    return render(judge(swarm.recordings, swarm.scenario), swarm.recordings, swarm.scenario, sample)


def test_the_page_is_well_formed_and_says_what_happened(swarm):
    page = Page(report_of(swarm))
    text = " ".join(page.texts)
    for part in ("passed", "5.50 → 2.50", "2.0 s", "killed", "joined", "peer-3", "newcomer", "def f():", "digest-6"):
        assert part in text
    assert page.tags.count("svg") == 6


def test_the_page_needs_nothing_from_outside(swarm):
    text = report_of(swarm)
    assert not {"script", "link", "img", "iframe", "image", "use"} & set(Page(text).tags)
    assert "http" not in text and "url(" not in text and "@import" not in text
    assert not any(name.startswith("on") or name in ("src", "href") for name, _ in Page(text).attributes)


def test_everything_from_daemons_is_escaped(swarm, change):
    evil = "<script>alert('&')</script>"
    swarm.replace("peer-1", lambda e: change(e, digest=evil) if "digest" in e.fields else e)
    swarm.replace_all(lambda event: attrs.evolve(event, peer=evil + event.peer))
    swarm.scenario = attrs.evolve(swarm.scenario, failure=evil)
    text = report_of(swarm, sample=evil)
    assert "<script" not in text and "&lt;script&gt;" in text
    assert "script" not in Page(text).tags


def test_a_failure_shows_its_problems(swarm):
    swarm.scenario = attrs.evolve(swarm.scenario, failure="peer-1 failed with exit code 3")
    text = " ".join(Page(report_of(swarm)).texts)
    assert "failed" in text and "peer-1 failed with exit code 3" in text


@pytest.mark.parametrize("recordings", [[], [Recording("founder")]])
def test_a_demo_that_recorded_nothing_has_a_report(recordings):
    scenario = Scenario(rounds=6, inner_steps=50, failure="founder failed")
    page = Page(render(judge(recordings, scenario), recordings, scenario))
    assert "Nothing was recorded." in page.texts


def test_a_death_before_anything_else_has_a_report(swarm):
    swarm.recordings = swarm.recordings[:4]
    swarm.replace_all(lambda event: event if event.kind == "started" else None)
    swarm.scenario = attrs.evolve(swarm.scenario, joined=None, joined_at=None)
    Page(report_of(swarm))


def test_numbers_in_the_drawing_are_finite(swarm, change):
    swarm.replace("peer-1", lambda e: change(e, loss=None) if e.kind == "inner" else e)
    assert not re.search(r'="(nan|inf|-inf)', report_of(swarm))
    assert "nan" not in re.sub(r"<style>.*?</style>", "", report_of(swarm))


def test_long_lines_are_thinned(swarm):
    inner = swarm["founder"].of("inner")[0]
    for index in range(3 * MAX_POINTS):
        swarm["founder"].add(attrs.evolve(inner, t=inner.t + index))
    longest = max(re.findall(r'points="([^"]*)"', report_of(swarm)), key=len)
    assert MAX_POINTS / 2 < len(longest.split()) <= MAX_POINTS


def test_a_chart_of_one_point_or_equal_values_is_drawn():
    for points in ([(0.0, 3.0)], [(0.0, 3.0), (1.0, 3.0)], [(5.0, 0.0)]):
        Page(chart([Line(name="a", points=points, colour=0)], marks=[Mark(x=2.0, text="m", css_colour="red")]))


def test_the_report_is_written(swarm, tmp_path):
    write_report(tmp_path / "report.html", judge(swarm.recordings, swarm.scenario), swarm.recordings, swarm.scenario)
    assert (tmp_path / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")

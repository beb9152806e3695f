"""The report needs no network, escapes what comes from outside, and has a table for every plot."""

import dataclasses
import re
from html.parser import HTMLParser

import pytest

from cglab.commands.report import report_page

HOSTILE = "</script><script>alert('x')</script><img src=x onerror=alert(1)>&"
FETCHING = {"src", "href", "data", "action", "poster", "background", "srcset"}


class Page(HTMLParser):
    """What the report is made of."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.fetched, self.headings, self.rows = [], [], [], 0
        self.plots, self.tables, self.meta = 0, 0, {}
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.append(tag)
        self.fetched += [(tag, name) for name in FETCHING & attributes.keys()]
        self.tables += tag == "table"
        self.rows += tag == "tr"
        self.plots += "plotly-graph-div" in attributes.get("class", "")
        if tag == "meta" and "http-equiv" in attributes:
            self.meta[attributes["http-equiv"]] = attributes["content"]

    def handle_data(self, data):
        if self.tags and self.tags[-1] in ("h1", "h2") and data.strip():
            self.headings.append(data.strip())


@pytest.fixture(scope="module")
def text(tour):
    return report_page(tour)


@pytest.fixture(scope="module")
def page(text):
    return Page(text)


def test_every_part_is_there_with_its_plot_and_its_table(page):
    assert page.headings[1:] == [
        "Buckets", "Parity", "Coverage", "Times", "What a bucket costs", "Timeline", "Machine and versions",
    ]  # fmt: skip
    assert (page.plots, page.tables) == (6, 7)


def test_nothing_is_fetched_and_the_browser_is_told_so(page):
    assert page.fetched == []
    assert page.meta["Content-Security-Policy"].startswith("default-src 'none';")
    assert "link" not in page.tags and "iframe" not in page.tags


def test_plotly_itself_is_inside(text):
    assert len(text) > 1_000_000
    assert "Plotly.newPlot(" in text


def test_tables_hold_the_rows_of_the_tour(page, text, tour):
    assert page.rows > len(tour.rows()) + len(tour.checks)
    assert f"<td>{tour.rows()[1]['95 %']}</td>" in text
    assert tour.records[0].tree in text


def test_tape_times_are_said_to_be_no_graph_speed_ups(text):
    assert re.search(r'class="note">[^<]*no graph speed-ups', text)


def test_what_comes_from_outside_is_escaped(text, tour):
    comparisons = tuple(dataclasses.replace(each, model=HOSTILE) for each in tour.comparisons)
    profile = dataclasses.replace(tour.profile, model=HOSTILE)
    hostile = dataclasses.replace(
        tour, model=HOSTILE, weights=HOSTILE, comparisons=comparisons, profile=profile
    )
    made = report_page(hostile)
    assert Page(made).tags == Page(text).tags
    assert HOSTILE not in made
    assert "&lt;/script&gt;" in made

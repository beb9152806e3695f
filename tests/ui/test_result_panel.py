"""What a result says is text, wherever it comes from: an error's words and a model's name are no markup."""

from types import SimpleNamespace

import pandas as pd
import pytest

from cglab.ui.controls import alert, heading, said
from cglab.ui.result_panel import ResultPanel
from cglab.ui.sections import Results, Section

MARKUP = "<img src=x onerror=alert(1)>"
PLAIN = Results(
    "a run", {"full": "bitwise"}, {"step": Section("a step", table=pd.DataFrame({"arm": ["full"]}))}
)


@pytest.mark.parametrize(
    "results",
    [
        pytest.param(Results(MARKUP, {}, {}), id="title"),
        pytest.param(Results("a run", {MARKUP: "bitwise"}, {}), id="arm"),
        pytest.param(Results("a run", {"full": MARKUP}, {}), id="verdict"),
        pytest.param(Results("a run", {}, {"step": Section(MARKUP)}), id="section"),
        pytest.param(
            Results("a run", {}, {"step": Section(table=pd.DataFrame({"arm": [MARKUP]}))}), id="cell"
        ),
        pytest.param(Results("a run", {}, {"step": Section(table=pd.DataFrame({MARKUP: [1]}))}), id="column"),
    ],
)
def test_what_a_result_says_is_no_markup(results):
    panel = ResultPanel(SimpleNamespace(observe=lambda *_: None))
    panel.show(PLAIN)
    panel.show(results)
    shown = [panel.headline, panel.export, *panel.texts.values(), *panel.tables.values()]
    said = "".join(each.value for each in shown)
    assert "<img" not in said and "&lt;img" in said
    panel.close()


@pytest.mark.parametrize("piece", [alert, heading, said])
def test_no_line_of_the_workspace_is_markup(piece):
    assert "<img" not in piece(MARKUP) and "&lt;img" in piece(MARKUP)

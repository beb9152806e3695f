"""How many tokens verify passes committed: a group of bars for each number, a bar for each run."""

from __future__ import annotations

import plotly.graph_objects as go

from cglab.lab.accepted import Accepted
from cglab.ui.bars import Bar, grouped_bars


def accepted(result: Accepted) -> go.Figure:
    """Shares of passes in percent; means stand in the note, as a mean of shares is no length."""
    bars, means = [], []
    for name, run in result.runs.items():
        told = run.accepted
        if told is None or told.tokens_per_pass is None:
            continue
        means.append(f"{name} {told.tokens_per_pass:.2f}")
        bars += [Bar("", str(length), name, 100 * share) for length, share in told.distribution.items()]
    return grouped_bars(
        "What a verify pass committed", "Mean tokens per pass: " + ", ".join(means), bars,
        groups="tokens committed, the target's own included", heights="share of verify passes (%)", unit="%",
    )  # fmt: skip

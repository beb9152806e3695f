"""What users of a server feel, and how busy it was: time to first token by size and concurrency, forward occupancy."""

from __future__ import annotations

import plotly.graph_objects as go

from cglab.lab.load_run import LoadRun
from cglab.lab.load_sweep import LoadSweep
from cglab.ui.bars import Bar, grouped_bars, prompt_panel
from cglab.ui.style import colour, figure


def ttft(result: LoadSweep) -> go.Figure:
    """Median time to first token, one panel a size of the prompts: by concurrency and arm."""
    bars = [
        Bar(
            prompt_panel(row["prompt_tokens"], row["cached"]),
            str(row["concurrency"]), row["arm"], row["ttft_ms"], (row["low_ms"], row["high_ms"]), row["tokens"],
        )
        for row in result.as_frame().to_dict("records")
    ]  # fmt: skip
    return grouped_bars(
        result.title, result.note, bars, groups="in flight (requests)", heights="time to first token (ms)"
    )


def occupancy(result: LoadRun, *, windows: int = 40) -> go.Figure:
    """Forward occupancy of each window of a run, by phase in the colour of its arm; nothing is drawn while idle.

    Args:
        result: the run.
        windows: into how many it is cut.
    """
    frame = result.occupancy_frame(windows)
    whole = "no timed forward" if result.occupancy is None else f"{result.occupancy:.1f} % of the run"
    arms = ", ".join(f"{phase} {arm}" for phase, arm in result.arms.items())
    made = figure(
        f"Forward occupancy, {result.title}", f"{whole}; {arms}. {result.note}".strip(), barmode="stack"
    )
    width = float(frame["end_s"].iloc[0])
    for phase, arm in result.arms.items():
        if phase in frame:
            shape = "/" if phase == "prefill" else ""
            made.add_bar(
                x=(frame["start_s"] + width / 2).round(6).tolist(), y=frame[phase].tolist(), width=width, name=phase,
                marker={"color": colour(arm), "pattern": {"shape": shape, "fgcolor": "#FFFFFF"}},
                hovertemplate=f"{phase}: %{{y:.3g}} % around %{{x:.3g}} s<extra></extra>",
            )  # fmt: skip
    made.update_xaxes(title_text="time since the first request (s)")
    return made.update_yaxes(title_text="forward occupancy (%)", range=[0, 100])

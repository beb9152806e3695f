"""Figures: a title, units, bars from zero, one colour an arm, and the same bytes every time."""

import math
import subprocess
import sys
from dataclasses import replace
from itertools import combinations

import pytest

from cglab.graphs.coverage import Coverage, Miss, Reason
from cglab.graphs.recorded_graph import RecordedGraph
from cglab.lab.recorded import newest
from cglab.lab.sweep import Sweep
from cglab.ui import plots, style
from cglab.ui.bars import Bar, grouped_bars


def heading(figure):
    return figure.layout.title.text, figure.layout.title.subtitle.text


@pytest.fixture
def views(make, records):
    """Every view, drawn anew at each call."""
    result = make.compared()
    traced = make.profiled(eager=make.eager_trace(), full=make.full_trace())
    return {
        "accepted": make.drafted().plot,
        "comparison": result.plot,
        "coverage": result.plot_coverage,
        "bucket_cost": result.plot_buckets,
        "bucket_plan": make.planned().plot,
        "capture_limit": Sweep((make.compared(1), make.compared(64))).limit("full").plot,
        "size_sweep": Sweep(tuple(make.compared(batch) for batch in (1, 3))).plot,
        "step_parts": make.parts().plot,
        "occupancy": make.loaded().plot_occupancy,
        "timeline": traced.timeline,
        "ttft": make.load_swept().plot,
        "workload_coverage": make.workload_covered().plot,
        "recorded_capture": newest("capture", make.capture_records()).plot,
        "recorded_decode": newest("decode", records).plot,
        "recorded_dflash": newest("dflash", make.dflash_records()).plot,
        "recorded_graph": make.recorded_graph().plot,
        "recorded_growth": newest("growth", make.growth_records()).plot,
        "recorded_host": lambda: plots.recorded_host(newest("growth", make.growth_records())),
        "recorded_mtp": newest("mtp", make.mtp_records()).plot,
        "recorded_pipeline": newest("pipeline", make.pipeline_records()).plot,
        "pipeline_sweep": lambda: plots.pipeline_sweep([("eager", 8, 1.0), ("breakable", 8, 3.0)], "By cap"),
        "recorded_planner": newest("planner", make.planner_records()).plot,
        "recorded_prefill": newest("prefill", make.prefill_records()).plot,
        "recorded_scheduler": newest("scheduler", make.scheduler_records()).plot,
        "recorded_token": newest("token", make.token_records()).plot,
        "recorded_ttft": newest("ttft", make.ttft_records()).plot,
        "recorded_ttft_crossover": newest("ttft_crossover", make.crossover_records()).plot,
    }


def test_every_view_has_a_title_units_and_the_template(views):
    assert set(views) == set(plots.__all__) - {"register_template", "summary"}
    for name, draw in views.items():
        figure = draw()
        assert figure.layout.title.text, name
        assert figure.layout.template.layout.font.family.startswith("Open Sans"), name
        axes = plots.summary(figure).splitlines()[-1]
        assert any(
            unit in axes for unit in ("(ms)", "(s)", "(µs)", "(ratio)", "(%)", "(tok/s)", "(nodes)", "steps")
        ), f"{name}: {axes}"


def test_every_view_draws_the_same_bytes_twice(views):
    for name, draw in views.items():
        first = draw().to_json()
        assert first == draw().to_json(), name
        assert '"uid"' not in first, name


def test_bars_start_at_zero(views):
    for name, draw in views.items():
        figure = draw()
        if name == "timeline" or not any(trace.type == "bar" for trace in figure.data):
            continue
        axis = figure.layout.xaxis if figure.data[0].orientation == "h" else figure.layout.yaxis
        assert axis.rangemode == "tozero" or axis.range[0] == 0, name


def test_an_arm_has_one_colour_in_every_view(views):
    for arm in ("full", "breakable"):
        rgb = style.faded(style.colour(arm), 1.0)
        for name in ("comparison", "bucket_cost", "recorded_decode", "recorded_prefill"):
            colours = [trace.marker.color for trace in views[name]().data if trace.name == arm]
            assert colours and set(colours) <= {style.colour(arm), rgb}, name
    assert style.colour("sglang-0.5.16") == style.colour("sglang-0.5.16") != style.colour("eager")


def test_arms_are_told_apart_without_red_or_green():
    """Viénot's projection for red- and green-blind eyes, in linear light."""
    seen = ((0.11238, 0.88762, 0), (0.11238, 0.88762, 0), (0.00401, -0.00401, 1))
    points = {}
    for arm in ("eager", "full", "breakable", "graph", "fused", "breaks"):
        code = style.colour(arm)
        light = [(int(code[i : i + 2], 16) / 255) ** 2.2 for i in (1, 3, 5)]
        projected = [max(sum(w * c for w, c in zip(row, light, strict=True)), 0) for row in seen]
        points[arm] = [value ** (1 / 2.2) * 255 for value in projected]
    for one, other in combinations(points, 2):
        apart = sum((a - b) ** 2 for a, b in zip(points[one], points[other], strict=True)) ** 0.5
        assert apart > 35, (one, other, apart)


def test_importing_the_views_changes_no_default_and_registering_does(environment):
    code = (
        "import plotly.io as pio; before = pio.templates.default; import cglab.ui.plots as plots;"
        "assert pio.templates.default == before and 'cglab' not in pio.templates;"
        "plots.register_template(); assert pio.templates.default == 'cglab'"
    )
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)


def test_comparison_says_parity_coverage_and_the_rule(make):
    result = make.compared()
    figure = result.plot()
    assert heading(figure) == (
        "One decode step of pico-gqa, batch 3, context 128",
        "Median and 95 % interval; arms measured in turns",
    )
    full = figure.data[1]
    assert full.x[0] == pytest.approx(4.2) and full.y[0] == "<b>full</b><br>bitwise, 20 of 20 captured"
    assert [note.text for note in figure.layout.annotations][1] == "4.2 ms, x0.40: faster"
    frame = result.as_frame().set_index("arm")
    assert frame.loc["full", "median_ms"] == pytest.approx(full.x[0])


def test_times_of_a_tape_are_called_no_speed_ups(make):
    tape = make.compared(recorder="tape")
    for figure in (tape.plot(), Sweep((tape,)).plot()):
        assert "no graph speed-ups" in figure.layout.title.subtitle.text
    assert "speed-ups" not in str(heading(make.compared(recorder="cuda").plot()))


def test_an_arm_that_failed_is_left_out_of_the_bars_and_kept_in_the_table(make):
    result = make.compared(arms=("eager", "full"))
    failed = result.times.arms[1].__class__("full", (), "OSError: gone", None, None)
    broken = result.__class__(**{**vars(result), "times": result.times.__class__(
        (result.times.arms[0], failed), (), 0.03, 3, 0.09)})  # fmt: skip
    assert [trace.name for trace in broken.plot().data] == ["eager"]
    assert broken.as_frame()["error"].tolist()[1] == "OSError: gone"


def test_coverage_shows_every_reason_and_zero_as_zero(make):
    mixed = Coverage()
    for live in (6, 7):
        mixed.miss(Miss(Reason.ABOVE_LARGEST, f"size {live}, largest bucket 4"), live)
    mixed.hit("4", 4, 3)
    figure = plots.coverage(
        {"eager": make.compared().coverage["eager"], "full": mixed, "breakable": Coverage()}
    )
    bars = {trace.name: dict(zip(trace.y, trace.x, strict=True)) for trace in figure.data}
    assert bars["captured: full"] == {"full": 1} and bars["captured: breakable"] == {"breakable": 0}
    assert bars["eager: above largest"] == {"eager": 0, "full": 2, "breakable": 0}
    assert bars["eager: backend eager"]["eager"] == 20
    assert figure.data[-1].customdata[1] == "size 7, largest bucket 4"


def test_coverage_table_equals_its_figure(make):
    frame = make.compared(captured=False).coverage_frame().set_index("arm")
    assert frame.loc["full"].to_dict() == {
        "steps": 20, "captured": 0, "eager": 20, "backend_eager": 0, "above_largest": 20,
    }  # fmt: skip


def test_bucket_plan_shows_both_sets_over_the_trace_and_equals_its_table(make):
    result = make.planned()
    figure, frame = result.plot(), result.as_frame().set_index("set")
    steps, *lanes = figure.data
    assert list(steps.x) == [3, 5, 16] and list(steps.y) == pytest.approx([50, 75, 100])
    for lane in lanes:
        row = frame.loc[lane.name]
        assert ", ".join(map(str, lane.x)) == row["sizes"]
        assert f"{row['time_ms']:.4g} ms" in lane.y[0] and f"waste {row['waste']:.1%}" in lane.y[0]
    assert [lane.name for lane in lanes] == ["plan", "SGLang's list"]
    assert heading(figure)[0] == "Buckets for the decode steps of trace evening"
    assert "interpolated" in heading(figure)[1]
    assert "size (requests)" in plots.summary(figure)


def test_bucket_cost_shows_the_ledger_smallest_first(make):
    result = make.compared()
    bars = {trace.name: trace for trace in result.plot_buckets().data}
    assert list(bars["full"].x) == ["1", "2", "4"] and list(bars["full"].y) == [10.0, 20.0, 40.0]
    assert list(bars["full: pool"].y) == [0.0, 0.0, 8.0]
    assert list(bars["full: outside the pool"].y) == [0.5, 0.5, 0.5]
    assert not any(name.startswith("eager") for name in bars)
    frame = result.bucket_frame()
    assert frame[frame["arm"] == "full"]["pool_bytes"].tolist() == [8_000_000, 0, 0]


def test_bucket_cost_of_nothing_says_so():
    assert "Nothing was captured" in plots.bucket_cost({"eager": []}).layout.title.subtitle.text


def test_parts_follow_one_another_breaks_in_the_grey_of_eager_and_equal_their_table(make):
    result = make.parts()
    figure, frame = result.plot(), result.as_frame()
    segments, breaks, whole = figure.data
    assert [segments.name, breaks.name, whole.name] == [
        "breakable: segments",
        "breakable: breaks",
        "full: segments",
    ]
    assert list(segments.base) == [0.0, 50.0, 122.0] and list(breaks.base) == [40.0, 110.0]
    assert (segments.marker.color, breaks.marker.color) == (style.colour("breakable"), style.colour("eager"))
    assert list(segments.hovertext) == ["18 operations", "29 operations", "? operations"]
    drawn = sorted(zip(segments.base, segments.x, strict=True)) + sorted(
        zip(breaks.base, breaks.x, strict=True)
    )
    assert [width for _, width in sorted(drawn)] == frame[frame["arm"] == "breakable"]["time_us"].tolist()


def test_sweep_marks_where_a_captured_arm_ran_eager(make):
    sweep = Sweep((make.compared(3), make.compared(6, captured=False)))
    full = next(trace for trace in sweep.plot().data if trace.name == "full")
    assert list(full.x) == [3, 6] and list(full.y) == pytest.approx([4.2, 4.2])
    assert list(full.marker.color) == [style.colour("full"), "#FFFFFF"]
    frame = sweep.as_frame()
    assert frame["bucket"].isna().tolist() == [False] * 3 + [True] * 3
    assert frame["reasons"].iloc[4] == "above_largest"


def test_a_wide_sweep_has_a_logarithmic_axis(make):
    assert Sweep((make.compared(1), make.compared(64))).plot().layout.xaxis.type == "log"
    assert Sweep((make.compared(1), make.compared(8))).plot().layout.xaxis.type == "linear"


def test_recorded_results_are_drawn_from_records_alone(records):
    figure = newest("decode", records).plot()
    assert heading(figure)[0] == "Decode step on NVIDIA H200"
    assert "2026-11-30" in heading(figure)[1] and "older state of the code" in heading(figure)[1]
    assert [note.text for note in figure.layout.annotations] == ["qwen3-0.6b", "qwen3-8b"]
    floors = [trace for trace in figure.data if trace.name == "floor"]
    assert len(floors) == 2 and list(floors[0].y) == [3.6, 3.6]
    full = next(trace for trace in figure.data if trace.name == "full")
    assert list(full.x) == ["1", "16"] and list(full.y) == [6.2, 6.2]
    assert [trace.name for trace in figure.data if trace.showlegend] == [
        "eager",
        "full",
        "breakable",
        "floor",
    ]


def test_s4_occupancy_over_time_stacks_the_phases_and_leaves_idle_windows_empty(make):
    figure = make.loaded().plot_occupancy(windows=10)
    prefill, decode = figure.data
    assert heading(figure) == (
        "Forward occupancy, 2 requests to qwen3-8b, 2 in flight",
        "30.0 % of the run; prefill breakable, decode full.",
    )
    assert list(prefill.y)[:2] == pytest.approx([100, 100]) and decode.y[7] == pytest.approx(100)
    assert all(math.isnan(value) for value in prefill.y[2:7]), "nothing is drawn while idle"
    assert (prefill.marker.color, decode.marker.color) == (style.colour("breakable"), style.colour("full"))


def test_ttft_says_size_concurrency_arm_and_interval(make):
    figure = make.load_swept().plot()
    assert [(trace.name, list(trace.x), list(trace.y)) for trace in figure.data] == [
        ("eager", ["2"], pytest.approx([40.0])), ("breakable", ["2"], pytest.approx([20.0])),
    ]  # fmt: skip
    row = make.load_swept().as_frame().iloc[1]
    assert (row["verdict"], row["tokens"]) == ("faster", "bitwise") and row["ratio"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    "bench", ["capture", "decode", "growth", "planner", "prefill", "ttft", "ttft_crossover"]
)
def test_nothing_recorded_is_said_and_drawn(bench):
    nothing = newest(bench, [])
    assert not nothing and nothing.where is None and nothing.as_frame().empty
    title, note = heading(nothing.plot())
    assert "not recorded yet" in title and f"no {bench} result of a GPU is recorded yet" in note


def test_recorded_prefill_has_a_bar_for_each_time_and_none_for_an_arm_that_failed(make):
    figure = newest("prefill", make.prefill_records()).plot()
    bars = {trace.name: dict(zip(trace.x, trace.y, strict=True)) for trace in figure.data}
    assert bars == {
        "eager": {"512": 20.0, "1024 after 8192 cached": 20.0},
        "breakable": {"512": 12.0, "1024 after 8192 cached": 12.0},
        "full": {"512": 10.0},
    }
    assert figure.data[2].customdata == ("bitwise",)


def test_recorded_loads_with_drafts_are_bars_by_load_with_intervals_where_there_are_any(make):
    figure = newest("mtp", make.mtp_records()).plot()
    assert {trace.name: (list(trace.x), list(trace.y)) for trace in figure.data} == {
        "eager": (["chat, 16 in flight"], [9.0]), "graph": (["chat, 16 in flight"], [8.0]),
    }  # fmt: skip
    assert list(figure.data[0].error_y.array) == [0.25] and list(figure.data[0].error_y.arrayminus) == [0.5]
    occupied = newest("dflash", make.dflash_records()).plot()
    assert {trace.name: list(trace.y) for trace in occupied.data} == {
        "eager-untimed": [90.0, 90.0], "eager-timed": [93.5, 93.5], "graph": [96.0, 96.0],
    }  # fmt: skip
    assert len({trace.marker.color for trace in occupied.data}) == 3


def test_recorded_plans_stand_beside_sglangs_list_by_phase_and_load(make):
    figure = newest("planner", make.planner_records()).plot()
    assert [note.text for note in figure.layout.annotations] == ["prefill", "decode"]
    assert [(trace.name, list(trace.x), list(trace.y)) for trace in figure.data] == [
        ("plan", ["chat"], [90.0]), ("sglang", ["chat"], [100.0]),
        ("plan", ["chat"], [40.0]), ("sglang", ["chat"], [50.0]),
    ]  # fmt: skip
    assert figure.data[1].marker.color == style.GREY


def test_recorded_ttft_has_a_panel_for_each_size_and_intervals(make):
    figure = newest("ttft", make.ttft_records()).plot()
    assert heading(figure)[0] == "Median time to first token of qwen3-8b on NVIDIA H200"
    assert [note.text for note in figure.layout.annotations] == [
        "128 tokens",
        "1024 tokens<br>after 8192 cached",
    ]
    first = figure.data[0]
    assert list(first.x) == ["1", "4"] and list(first.y) == [25.0, 100.0]
    assert (list(first.error_y.arrayminus), list(first.error_y.array)) == ([1.0, 1.0], [2.0, 2.0])
    assert [trace.name for trace in figure.data if trace.showlegend] == ["eager", "breakable"]


def test_growth_has_a_line_for_each_arm_and_held_size_with_its_floor_and_the_fit_in_the_table(make):
    recorded = newest("growth", make.growth_records())
    figure = recorded.plot()
    lines = {trace.name: dict(zip(trace.x, trace.y, strict=True)) for trace in figure.data}
    assert lines["full"] == {1: 4.0625, 2: 4.125, 4: 4.25} and lines["floor"] == {1: 3.5, 2: 3.5, 4: 3.5}
    assert lines["full, batch 1"] == {512: 4.0625, 8192: 5.0, 65536: 12.0}
    assert lines["full, batch 16"] == {512: 5.0, 2048: 8.0, 8192: 20.0}
    assert set(lines) == {
        f"{arm}{held}" for arm in ("eager", "full", "floor") for held in ("", ", batch 1", ", batch 16")
    }
    dashes = {trace.name: trace.line.dash for trace in figure.data}
    assert dashes["full, batch 1"] != dashes["full, batch 16"] == dashes["floor, batch 16"]
    assert figure.layout.xaxis2.ticktext == ("512", "2k", "8k", "64k")
    frame = recorded.as_frame()
    assert len(frame) == len(recorded.records) and {"step_ms", "floor_ms", "kv_over_least"} <= set(frame)


def test_capture_cost_grows_bucket_by_bucket_of_captures_on_first_use(make):
    recorded = newest("capture", make.capture_records())
    seconds, memory = {}, {}
    for trace in recorded.plot().data:
        (seconds if trace.xaxis == "x" else memory)[trace.name] = dict(zip(trace.x, trace.y, strict=True))
    names = ("qwen3-8b, decode full", "qwen3-8b, prefill breakable")
    assert seconds == dict.fromkeys(names, {1: 10.0, 2: 15.0})
    assert memory == dict.fromkeys(names, {1: 3.0, 2: 3.0})


@pytest.mark.parametrize(("count", "shape"), [(1, (1, 1)), (3, (1, 3)), (4, (2, 2)), (9, (3, 3))])
def test_many_panels_are_laid_out_in_rows_of_at_most_three(count, shape):
    bars = [Bar(f"panel {index}", "1", "eager", 1.0) for index in range(count)]
    figure = grouped_bars("title", "note", bars, groups="size (tokens)", heights="time (ms)")
    rows, columns = figure._get_subplot_rows_columns()
    assert (len(rows), len(columns)) == shape
    assert [note.text for note in figure.layout.annotations] == [f"panel {index}" for index in range(count)]
    assert len({trace.xaxis for trace in figure.data}) == count


def test_recorded_crossover_has_the_ratios_and_a_line_only_where_a_limit_was_found(make):
    figure = newest("ttft_crossover", make.crossover_records()).plot()
    lines = {trace.name: dict(zip(trace.x, trace.y, strict=True)) for trace in figure.data}
    assert lines == {
        "qwen3-8b, breakable: wins up to 128": {128: 0.5, 8192: 1.01},
        "qwen3-8b, full: wins nowhere": {128: 1.2, 8192: 1.3},
    }
    assert sorted(line.x0 for line in figure.layout.shapes) == [0, 128]


def test_tape_records_are_never_shown_as_graph_times(make):
    assert not newest("decode", [make.record("full", 1, 5.0, kind="cpu")])


def test_summary_is_words_only(make):
    assert plots.summary(make.compared().plot()) == (
        "bar eager: 1 point\nbar full: 1 point\nbar breakable: 1 point\naxes: step time (ms)"
    )


def test_the_peers_view_shows_who_could_not_run_and_the_floor_is_no_bar(make):
    drawn = newest("token", make.token_records()).plot()
    bars = [trace for trace in drawn.data if trace.type == "bar"]
    assert [list(bar.y) for bar in bars] == [["torch-compile (not run)", "sglang-0.5.16", "full"]] * 2
    assert bars[0].text[1] == "6.3 (x1.29)" and "no compiler" in bars[0].customdata[0]
    assert [trace.x[-1] for trace in drawn.data if trace.name == "replay alone"] == [4.7, 4.7]
    assert len([shape for shape in drawn.layout.shapes if shape.x0 == 3.6]) == 2


def test_peers_of_two_runs_stand_in_one_table_and_a_newer_run_of_one_replaces_it(make):
    records = make.token_records()
    later = [
        replace(each, run="later", created="2026-12-09T10:00:00", metrics={**each.metrics, "token_ms": 5.0})
        for each in records
        if each.arm in ("full", "torch-compile")
    ]
    kept = newest("token", [*records, *later]).records
    assert len(kept) == len(records)
    assert {(each.arm, each.run) for each in kept} == {
        ("full", "later"), ("torch-compile", "later"), ("sglang-0.5.16", "token-run"), ("floor", "token-run"),
    }  # fmt: skip


def test_the_schedulers_view_has_the_parts_by_both_axes_in_order(make):
    drawn = newest("scheduler", make.scheduler_records()).plot()
    assert [list(trace.x) for trace in drawn.data] == [[1, 8]] * 4 + [[0, 8]] * 4
    assert [trace.name for trace in drawn.data][:4] == ["plan", "inputs", "commit", "step"]
    assert "14 µs and 7 µs a request" in drawn.layout.title.subtitle.text


def test_host_cost_is_drawn_against_the_batch_alone_and_of_captured_steps_alone(make):
    (line,) = plots.recorded_host(newest("growth", make.growth_records())).data
    assert (line.name, list(line.x), list(line.y)) == ("qwen3-8b, full", [1, 2, 4], [101.0, 102.0, 104.0])
    title, note = heading(plots.recorded_host(newest("growth", [])))
    assert "not recorded yet" in title and "no growth result of a GPU" in note


def test_the_picture_of_a_graph_has_every_node_and_edge_of_its_table(make):
    graph = make.recorded_graph()
    frame, figure = graph.as_frame(), graph.plot()
    waits, *kinds = figure.data
    assert {trace.name: len(trace.x) for trace in kinds} == frame["kind"].value_counts().to_dict()
    assert sorted(place for trace in kinds for place in trace.x) == sorted(frame["depth"])
    assert len(waits.x) == 3 * frame["after"].map(len).sum()
    assert len({trace.marker.symbol for trace in kinds}) == len(kinds), "no kind is told by its colour alone"
    first = kinds[0].text[0]
    assert "scaled&lt;float, 4>" in first and "grid (7, 1, 1)" in first and len(first.split("<br>")[0]) < 100


def test_a_graph_of_nothing_says_so():
    assert "call it once" in heading(RecordedGraph("step", (), ()).plot())[1]


def test_coverage_of_a_workload_equals_its_tables_and_says_what_is_next(make):
    found = make.workload_covered()
    steps, times, eager = found.plot().data
    frame, reasons = found.as_frame(), found.reasons_frame()
    assert list(steps.y) == frame["technique"].tolist() and list(steps.x) == (100 * frame["share"]).tolist()
    assert [share for share in times.x if share is not None] == (100 * frame["time_share"].dropna()).tolist()
    assert list(eager.x) == (1e3 * reasons["seconds"].dropna()).tolist(), "what was not timed has no bar"
    assert "predicted gain: 30 ms of 2 steps" in heading(found.plot())[1]
    assert "900 &lt;tokens&gt;" in eager.text[0] and "&lt;tokens&gt;" in eager.customdata[0]
    assert "no graph speed-ups" in heading(make.workload_covered("tape").plot())[1]

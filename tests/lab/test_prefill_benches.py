"""The benches of prefill: what each record holds, that arms did the same work, and that no tape time passes for more."""

import json
from dataclasses import asdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cglab.engine.load import Load
from cglab.errors import InputError
from cglab.graphs.buckets import sglang_prefill
from cglab.lab import load_bench, planner_bench, prefill_bench, ttft_bench
from cglab.lab.benches import BENCHES
from cglab.lab.comparison import TAPE_NOTE
from cglab.lab.planner_bench import split
from cglab.lab.prefill_bench import calls_within
from cglab.lab.prefill_limit import PREFILL_LIMIT, prefill_sizes
from cglab.lab.recorded import recorded
from cglab.lab.size_trace import load_size_trace
from cglab.lab.step_metrics import CALLS, won_metrics
from cglab.lab.tables import format_table
from cglab.lab.ttft_grid import ARMS, FULL_GRID, MOST_TOKENS, Point, grid
from cglab.measure.trace import DeviceEvent, Trace

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def patch():
    with pytest.MonkeyPatch.context() as patched:
        yield patched


@pytest.fixture(scope="module")
def ttft(patch):
    """Two requests that share a cached prefix, then one without: by every arm."""
    patch.setattr(ttft_bench, "QUICK_GRID", grid(((16, 0), (20, 32)), (1, 3)))
    return list(ttft_bench.ttft(CPU, quick=True))


@pytest.fixture(scope="module")
def prefill(patch):
    patch.setattr(prefill_bench, "QUICK_POINTS", ((40, 0), (9, 16)))
    return list(prefill_bench.prefill(CPU, quick=True))


def points(records):
    """Records of TTFT by point, then arm."""
    found = {}
    for each in records:
        if each.bench == "ttft":
            size = each.workload["tokens"], each.workload["cached"], each.workload["concurrency"]
            found.setdefault(size, {})[each.arm] = each
    return found


def test_ttft_has_a_record_for_each_point_and_arm_that_json_can_hold(ttft):
    assert {size: tuple(arms) for size, arms in points(ttft).items()} == dict.fromkeys(
        [(20, 32, 3), (16, 0, 3), (20, 32, 1), (16, 0, 1)], ARMS
    )
    assert all(json.loads(each.as_line())["run"] == ttft[0].run for each in ttft)


def test_p40_ttft_arms_did_the_same_work_bit_for_bit(ttft):
    for arms in points(ttft).values():
        assert len({each.workload["payload"] for each in arms.values()}) == 1
        for arm, each in arms.items():
            assert arm == "eager" or (each.parity["verdict"], each.metrics["tokens_equal"]) == (
                "bitwise",
                True,
            )


def test_ttft_is_queueing_and_prefill_of_every_request(ttft):
    for (_, _, concurrency), arms in points(ttft).items():
        for each in arms.values():
            samples, turns = each.samples, 7 if each.metrics["flagged"] else 3  # slower: measured again
            assert each.metrics["instances"] == turns and each.workload["requests"] == max(4, 2 * concurrency)
            assert len(samples["ttft_ms"]) == turns * each.workload["requests"]
            assert set(samples["instance"]) == set(range(turns))
            assert all(q <= t for q, t in zip(samples["queueing_ms"], samples["ttft_ms"], strict=True))
            assert 0 < each.metrics["prefill_ms"] <= max(samples["ttft_ms"])
            assert 0 < each.metrics["occupancy_percent"] <= 100


def test_a_point_that_full_cannot_serve_says_why_it_ran_eager(ttft):
    arms = points(ttft)[20, 32, 3]
    assert arms["breakable"].coverage["reasons"] == {}
    assert "96 cached tokens, there is room for 64" in arms["full"].coverage["facts"]["MORE_KEYS"]
    assert arms["full"].coverage["captured"] < arms["full"].coverage["steps"]
    assert arms["full"].workload["max_cached"] == 64
    served = points(ttft)[16, 0, 3]["full"]
    assert served.coverage["eager"] == 0


def test_no_gap_and_no_gain_is_told_without_device_records(ttft):
    assert not {"gap_share", "predicted_gain_ms", "outcome"} & ttft[0].metrics.keys()


def test_the_crossover_is_of_single_requests_and_names_the_default(ttft):
    breakable, full = (each for each in ttft if each.bench == "ttft_crossover")
    assert (breakable.arm, full.arm) == ("breakable", "full")
    assert breakable.workload["sizes"] == [16]
    assert breakable.metrics["default_limit"] == PREFILL_LIMIT == prefill_sizes(20000)[-1]
    assert breakable.metrics["crossover"] in ("no win", "crossover", "win everywhere")


def test_the_default_limit_is_the_crossover_that_was_recorded():
    limits = {r.metrics["limit"] for r in recorded("ttft_crossover").records if r.arm == "breakable"}
    assert limits <= {float(PREFILL_LIMIT)}  # none before the first record


def test_a_default_that_comes_out_slower_is_measured_again_with_seven(monkeypatch):
    judged = ttft_bench.difference

    def slower_once(*arms, **options):
        monkeypatch.setattr(ttft_bench, "difference", judged)
        found = judged(*arms, **options)
        return type(found)(1.25, found.interval, True, "slower")

    monkeypatch.setattr(ttft_bench, "QUICK_GRID", [Point(8, 0, 1)])
    monkeypatch.setattr(ttft_bench, "difference", slower_once)
    eager, breakable, *_ = ttft_bench.ttft(CPU, quick=True)
    assert eager.metrics["flagged"] and breakable.metrics["ratio_before_flag"] == 1.25
    assert breakable.metrics["instances"] == 7.0 and len(breakable.samples["ttft_ms"]) == 7 * 4


@given(st.integers(1, 8192), st.integers(1, 64))
def test_a_point_has_two_rounds_of_requests_unless_they_are_too_many_tokens(tokens, concurrency):
    count = Point(tokens, 0, concurrency).load.count
    assert max(4, concurrency) <= count <= max(4, 2 * concurrency)
    assert count == max(4, 2 * concurrency) or (count + 1) * tokens > MOST_TOKENS


def test_buckets_are_captured_on_first_use_so_the_largest_step_comes_first():
    sizes = [min(point.tokens * point.requests_a_step(8192), 8192) for point in FULL_GRID]
    assert sizes == sorted(sizes, reverse=True)
    assert set(sizes) < set(sglang_prefill(8192))  # no step of the grid is padded


def test_prefill_counts_breaks_padding_and_what_its_buckets_cost(prefill):
    assert [(each.workload["tokens"], each.arm) for each in prefill] == [
        (tokens, arm) for tokens in (40, 9) for arm in ("eager", "full", "breakable")
    ]
    for each in prefill:
        assert (each.parity is None) == (each.arm == "eager") or each.parity["verdict"] == "bitwise"
        assert each.metrics["wall_over_busy"] is None  # no device records on a CPU
        assert ("break_host_us" in each.metrics) == (each.arm == "breakable")
    breakable = prefill[-1]
    assert breakable.metrics["breaks"] == 6.0  # one a layer
    assert breakable.metrics["padding_waste"] == pytest.approx(12 / 9 - 1)
    assert breakable.metrics["replay_ms"] > 0 and breakable.metrics["break_body_us"] > 0
    host_us = breakable.metrics["break_host_us"] + breakable.metrics["segment_host_us"]
    assert breakable.metrics["host_ms"] == pytest.approx(6 * host_us / 1e3)
    assert breakable.samples["bucket"] == [
        40.0,
        16.0,
        12.0,
    ]  # 16: the cached tokens were computed by this arm


def test_p07_a_step_that_no_bucket_serves_has_no_break_and_no_padding(monkeypatch):
    monkeypatch.setattr(prefill_bench, "QUICK_POINTS", ((8, 0), (1, 0)))
    breakable = list(prefill_bench.prefill(CPU, quick=True))[5]
    assert breakable.workload["tokens"] == 1 and breakable.arm == "breakable"
    assert breakable.coverage["captured"] == 0 and set(breakable.coverage["reasons"]) == {"WASTE_CEILING"}
    assert breakable.metrics["padding_waste"] == 0.0 and "breaks" not in breakable.metrics


def test_a_wall_below_the_busy_time_predicts_nothing_and_says_so():
    events = (DeviceEvent("kernel", 0.0, 100.0, "kernel", 7, None, None),)
    told = won_metrics(Trace(events, ()), 50.0, 40.0)
    assert told["outcome"] == "no prediction" and "cannot hold" in told["outcome_text"]


@given(st.floats(1e-6, 10))
def test_a_sample_is_long_enough_and_never_too_long(seconds):
    calls = calls_within(seconds)
    assert 1 <= calls <= CALLS
    assert calls == 1 or calls * seconds <= prefill_bench.SAMPLE_SECONDS * (1 + 1e-9)


@pytest.fixture
def one_load(monkeypatch):
    loads = {"agentic": Load(4, 2, (4, 12), (2, 4), shared_prefix=32)}
    for module in (planner_bench, load_bench):
        monkeypatch.setattr(module, "QUICK_LOADS", loads)
    return loads["agentic"]


def test_the_plan_is_never_slower_than_sglangs_list_at_its_memory(one_load, tmp_path):
    records = list(planner_bench.planner(CPU, quick=True, traces=str(tmp_path)))
    assert [(each.workload["phase"], each.arm) for each in records] == [
        (phase, arm) for phase in ("prefill", "decode") for arm in ("plan", "sglang")
    ]
    for chosen, listed in zip(records[::2], records[1::2], strict=True):
        assert chosen.metrics["time_ms"] <= listed.metrics["time_ms"]
        assert chosen.metrics["memory_mb"] <= listed.metrics["memory_mb"]
        assert chosen.metrics["ok"] is True
    trace = load_size_trace("agentic", tmp_path)
    assert trace.phases == {
        p: {int(n): c for n, c in sizes.items()}
        for p, sizes in records[0].workload["trace"]["phases"].items()
    }
    assert trace.source["load"] == {**asdict(one_load), "prompt_tokens": [4, 12], "new_tokens": [2, 4]}
    assert trace.steps("prefill")[32] == 1  # the prefix, computed once


def test_quick_traces_are_kept_nowhere(one_load, tmp_path, monkeypatch, root):
    monkeypatch.setenv("CGLAB_DATA", str(tmp_path))
    monkeypatch.setattr(planner_bench, "decode_costs", lambda lab: None)
    monkeypatch.setattr(planner_bench, "prefill_costs", lambda lab, buckets: None)
    monkeypatch.setattr(planner_bench, "plan", lambda trace, phase, costs: None)
    monkeypatch.setattr(planner_bench, "_records", lambda lab, found, run: [found])
    assert (
        list(planner_bench.planner(CPU, quick=True, models=[str(root / "data/models/pico-gqa")]))
        == [None] * 2
    )
    assert not (tmp_path / "traces").exists()


def test_quick_traces_replace_none_of_the_full_loads(tmp_path, monkeypatch):
    monkeypatch.setenv("CGLAB_DATA", str(tmp_path))
    (tmp_path / "elsewhere").symlink_to(tmp_path / "traces")
    for folder in ("traces", "elsewhere"):
        with pytest.raises(InputError, match="give traces another folder"):
            next(planner_bench.planner(CPU, traces=str(tmp_path / folder)))


def test_steps_above_the_capture_limit_have_costs_too(one_load, monkeypatch):
    """A lab captures up to its limit; a trace has longer steps, and the plan may serve them or leave them eager."""
    monkeypatch.setattr("cglab.lab.prefill_limit.PREFILL_LIMIT", 8)
    records = list(planner_bench.planner(CPU, quick=True))
    assert all(each.metrics["ok"] for each in records)
    assert max(int(size) for size in records[0].workload["trace"]["phases"]["prefill"]) > 8


@given(st.integers(1, 4096), st.integers(1, 16), st.integers(1, 600))
def test_tokens_are_split_evenly_over_the_fewest_requests(tokens, most, longest):
    fits = [n for n in range(1, most + 1) if tokens % n == 0 and tokens // n <= longest]
    if fits:
        assert split(tokens, most, longest) == fits[0]
    else:
        with pytest.raises(InputError, match="open the lab with"):
            split(tokens, most, longest)


def test_sglangs_buckets_can_all_be_timed_in_the_labs_of_the_loads():
    for load in load_bench.LOADS.values():
        for size in prefill_sizes(8192):
            assert size % split(size, load.concurrency, load.longest - 1) == 0


def test_a_load_tells_latency_tokens_and_occupancy_by_arm(one_load):
    eager, breakable = load_bench.load(CPU, quick=True)
    assert (eager.arm, breakable.arm) == ("eager", "breakable")
    assert eager.workload["payload"] == breakable.workload["payload"]
    assert breakable.metrics["tokens_equal"] is True and "tokens_equal" not in eager.metrics
    assert breakable.coverage["prefill"]["captured"] > 0 == eager.coverage["prefill"]["captured"]
    for each in (eager, breakable):
        assert len(each.samples["e2e_ms"]) == 3 * one_load.count
        # Medians of three runs, each for itself, so that the parts need not add up; none is more than the whole.
        whole, *parts = (each.metrics[f"{p}occupancy_percent"] for p in ("", "prefill_", "decode_"))
        assert 0 < min(parts) <= max(parts) <= whole <= 100


def test_tables_of_the_new_benches_say_that_tape_times_are_no_graph_times(ttft, prefill):
    for records in (ttft, prefill):
        assert format_table(records).endswith(TAPE_NOTE)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["prefill", "capture", "replay", "ttft", "load", "planner"])
def test_the_quick_benches_run_on_a_gpu(name):
    records = list(BENCHES[name].run(torch.device("cuda"), quick=True))
    assert records and all(each.shows_graph_times for each in records)
    assert all(each.parity is None or each.parity["verdict"] == "bitwise" for each in records)

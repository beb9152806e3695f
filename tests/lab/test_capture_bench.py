"""The capture bench and the experiment with shared executables: every record's parts, and that sums are sums."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cglab
from cglab.errors import CaptureError, InputError
from cglab.graphs.buckets import bucket_list, sglang_decode, sglang_prefill
from cglab.lab import capture_bench, shared_bench
from cglab.lab.apart import runner_apart
from cglab.lab.capture_bench import COUNTS, PARTS, SIZES, line_through
from cglab.lab.tables import format_table
from cglab.measure.kernel_cache import KernelCacheWatch
from cglab.measure.record import new_run

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def records():
    """Two buckets of either phase."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capture_bench, "QUICK_SIZES", {"max_batch": 2, "max_context": 48, "token_budget": 8})
        patch.setattr(capture_bench, "REPEATS", 1)
        return list(capture_bench.capture(CPU, quick=True))


@pytest.fixture(scope="module")
def lab():
    with cglab.open("pico-gqa", device="cpu", max_batch=2, max_context=48, buckets=[1, 2]) as opened:
        yield opened


def test_the_targets_of_a_gpu_are_12_decode_and_58_prefill_buckets():
    assert len(bucket_list(SIZES["max_batch"], sglang_decode)) == 12 == max(COUNTS)
    assert len(bucket_list(SIZES["token_budget"], sglang_prefill)) == 58


def test_every_phase_and_mode_is_captured_on_first_use_and_again(records):
    whole = [each for each in records if "kernels" in each.workload]
    assert [(r.workload["phase"], r.arm, r.workload["kernels"]) for r in whole] == [
        (phase, arm, kernels)
        for phase, arm in (("decode", "full"), ("prefill", "breakable"), ("decode", "breakable"))
        for kernels in ("first use", "used before")
    ]
    assert all(json.loads(each.as_line())["run"] == records[0].run for each in records)


def test_seconds_and_bytes_of_all_buckets_are_split_without_rest(records):
    for each in records[:6]:
        m, s = each.metrics, each.samples
        assert m["begin_s"] + m["record_s"] + m["end_s"] + m["instantiate_s"] == pytest.approx(m["capture_s"])
        assert m["warmup_s"] + m["capture_s"] + m["rest_s"] == pytest.approx(m["total_s"])
        assert m["rest_s"] > 0 and m["outputs_shared"] is True
        assert m["held_gb"] == pytest.approx(
            m["pool_gb"] + m["executables_gb"] + m["loaded_gb"] + m["outputs_gb"]
        )
        assert sum(s["bucket_warmup_ms"]) == pytest.approx(m["warmup_s"] * 1e3)
        assert s["bucket"] == sorted(s["bucket"], reverse=True) and m["buckets"] == len(s["bucket"])
        assert s["bucket_pool_bytes"][0] > 0 == sum(s["bucket_pool_bytes"][1:])
        assert each.notes.startswith(f"{s['bucket'][0]:.0f}: 1.0 MB of pool, which all later ones share")


def test_compile_seconds_and_the_state_of_the_kernel_cache_are_stated(records):
    assert {(r.metrics["compile_s"], r.metrics["kernel_cache"]) for r in records[:6]} == {
        (0.0, "nothing compiled")
    }


def test_compiling_within_a_capture_is_told_apart_from_that_of_opening(lab, monkeypatch):
    told = iter([3.0, 4.5, 4.5])
    monkeypatch.setattr(type(lab), "compile_seconds", property(lambda self: next(told)))
    with runner_apart(lab, "decode", "full", [1]) as runner:
        metrics = capture_bench._captured(lab, runner, new_run(), "first use", KernelCacheWatch()).metrics
    assert (metrics["compile_s"], metrics["compile_in_capture_s"]) == (4.5, 1.5)


def test_cost_by_number_of_buckets_is_a_line_of_seconds_and_bytes(records):
    growth = records[-1]
    assert growth.workload["growth"] == [1, 2] == sorted(set(growth.samples["count"]))
    assert growth.metrics["seconds_per_bucket"] + growth.metrics["seconds_fixed"] == pytest.approx(
        growth.samples["seconds"][0]
    )
    assert growth.metrics["gb_per_bucket"] == 0.0, "the second bucket fits into the pool of the first"
    assert growth.metrics["gb_fixed"] * 1e9 == growth.samples["bytes_by_count"][0]


@given(st.integers(0, 2000), st.integers(0, 5000), st.sets(st.integers(1, 64), min_size=2))
def test_the_line_of_costs_on_a_line_is_that_line(slope_ms, fixed_ms, counts):
    slope, fixed = slope_ms / 1e3, fixed_ms / 1e3
    found = line_through(sorted(counts), [fixed + slope * n for n in sorted(counts)])
    assert found["per_bucket"] == pytest.approx(slope, abs=1e-6)
    assert found["fixed"] == pytest.approx(fixed, abs=1e-5) and found["off"] < 1e-6


def test_costs_off_the_line_are_told():
    assert line_through([1, 2, 3], [0.0, 0.0, 6.0])["off"] == pytest.approx(1 / 3)


def test_only_the_parts_that_are_asked_for_run():
    with pytest.raises(InputError, match=f"'all' is no part of this bench; good names: {', '.join(PARTS)}"):
        next(iter(capture_bench.capture(CPU, quick=True, parts=["all"])))
    (only,) = capture_bench.capture(CPU, quick=True, parts=["shared"])
    assert only.arm == "shared"


def test_without_a_driver_the_record_says_why_nothing_is_shared(records, lab):
    shared = records[-2]
    assert (shared.arm, shared.metrics) == ("shared", {})
    assert "the tape has no executables" in shared.notes
    assert shared_bench.shared(lab, new_run(), "no bindings").notes == "not run: no bindings"


def test_tables_say_that_tape_times_are_no_graph_times(records):
    assert "no graph speed-ups" in format_table(records)


class Tape:
    """A driver whose graphs are the buckets' own tapes; those of more than ``apart`` rows have another topology."""

    def __init__(self, apart=99, wrong=0):
        self.apart, self.wrong, self.held, self.steps = apart, wrong, {}, {}

    def instantiate(self, graph):
        executable = len(self.held)
        self.held[executable] = graph
        return executable

    def update(self, executable, graph):
        if (self.held[executable] > self.apart) != (graph > self.apart):
            return "TopologyChanged"
        self.held[executable] = graph
        return None

    def launch(self, executable):
        if self.held[executable] != self.wrong:
            self.steps[self.held[executable]].replay()

    def destroy(self, executable):
        del self.held[executable]


@pytest.fixture
def addresses(monkeypatch):
    """Graphs are named by their place; the driver finds the tape behind it."""

    def use(driver):
        def address(steps):
            driver.steps[sizes[len(driver.steps)]] = steps[0]
            return sizes[len(driver.steps) - 1]

        sizes = [2, 1]
        monkeypatch.setattr(shared_bench, "address", address)
        return driver

    return use


def test_buckets_on_a_shared_executable_are_bitwise_after_every_switch(lab, addresses):
    driver = addresses(Tape())
    found = shared_bench.shared(lab, new_run(), driver)
    assert (found.metrics["buckets"], found.metrics["executables"]) == (2, 1)
    assert found.parity["verdict"] == "bitwise" and driver.held == {}
    assert found.samples["bucket_group"] == [0, 0] and found.notes == "1 executables for 2 buckets; 2, 1"
    switches = 2 * shared_bench.ROUNDS - 1
    assert [len(found.samples[n]) for n in ("update_us", "switched_us", "plain_us")] == [switches] * 3


def test_buckets_of_another_topology_have_no_switch_to_time(lab, addresses):
    found = shared_bench.shared(lab, new_run(), addresses(Tape(apart=1)))
    assert found.metrics["executables"] == 2 and "switch_us" not in found.metrics
    assert found.samples["bucket_group"] == [0, 1] and "TopologyChanged" in found.notes


def test_a_shared_executable_that_did_not_run_is_corrupted(lab, addresses):
    assert shared_bench.shared(lab, new_run(), addresses(Tape(wrong=1))).parity["verdict"] == "corrupted"


def test_only_a_single_cuda_graph_has_an_address(lab):
    with pytest.raises(CaptureError, match="1 steps are no single graph"):
        shared_bench.address(lab.runner("full").captured.recordings.steps_of(2))

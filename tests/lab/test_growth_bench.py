"""The growth bench: what its records hold, that its series fit a device and tell the terms apart."""

import pytest
import torch

from cglab.lab import growth_bench
from cglab.lab.growth_bench import SERIES, Series, growth, growth_points
from cglab.lab.opening import PAGE_SIZE
from cglab.measure.growth import GrowthPoint, GrowthTerms, fit_growth
from cglab.models.presets import PRESETS

CPU = torch.device("cpu")
QUICK = (Series((1, 2), (16,)), Series((1,), (48,)), Series((2,), (48,)))
QWEN = [name for name in PRESETS if name.startswith("qwen3")]


def token_bytes(name):
    config = PRESETS[name]
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * 2


@pytest.fixture(scope="module")
def records():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(growth_bench, "QUICK_SERIES", QUICK)
        return list(growth(CPU, quick=True))


def test_each_point_has_both_arms_in_one_run_with_floor_and_kv(records):
    steps = records[:-1]
    sizes = [(each.workload["batch"], each.workload["context"], each.arm) for each in steps]
    wanted = [(*point, arm) for series in QUICK for point in series.points for arm in ("eager", "full")]
    assert sizes == wanted
    assert len({record.run for record in records}) == 1
    for record in steps:
        tokens = record.workload["batch"] * record.workload["context"]
        assert record.metrics["kv_bytes"] == tokens * steps[0].metrics["kv_bytes"] / 16
        assert record.metrics["step_ms"] > 0 and record.metrics["floor_ms"] > 0
        assert record.parity is None if record.arm == "eager" else record.parity["verdict"] == "bitwise"
        assert record.coverage["captured"] == (0 if record.arm == "eager" else record.coverage["steps"])


def test_a_series_has_no_more_cache_than_its_longest_context(records):
    assert [record.workload["cache"] for record in records[:-1:2]] == [16, 16, 48, 48]


def test_the_last_record_is_the_fit_of_the_captured_steps(records):
    fit = records[-1]
    assert fit.arm == "full" and fit.workload["fitted"] == "batch and context"
    again = fit_growth(growth_points(records), GrowthTerms(1.0, 1.0, 1.0)).found
    for name in ("base_ms", "row_us", "kv_ms_gb"):
        assert fit.metrics[name] == getattr(again, name)
        ratio = fit.metrics[f"{name.partition('_')[0]}_over_least"]
        assert ratio == pytest.approx(fit.metrics[name] / fit.metrics[f"least_{name}"])
    assert "weights take" in fit.notes
    assert not fit.shows_graph_times  # a tape: nobody takes it for a result


def test_series_reach_batch_256_and_a_context_of_64k_and_tell_the_terms_apart():
    points = [point for series in SERIES for point in series.points]
    assert {batch for batch, context in points if context == 512} >= {2**n for n in range(9)}
    assert {context for batch, context in points if batch == 1} >= {2**n for n in range(9, 17)}
    planted = GrowthTerms(4.0, 20.0, 0.3)
    kv = [(batch, batch * context * token_bytes("qwen3-8b") / 1e9) for batch, context in points]
    fit = fit_growth([GrowthPoint(batch, gb, planted.step_ms(batch, gb)) for batch, gb in kv], planted)
    assert fit.ratios == pytest.approx({"base_ms": 1.0, "row_us": 1.0, "kv_ms_gb": 1.0})


@pytest.mark.parametrize("name", QWEN)
@pytest.mark.parametrize("series", SERIES)
def test_a_series_fits_120_gb_and_the_positions_of_its_model(name, series):
    config = PRESETS[name]
    assert max(series.contexts) <= config.max_position
    weights = 2 * 8.2e9 if name == "qwen3-8b" else 2 * 0.6e9
    assert weights + series.cache_tokens * token_bytes(name) < 120e9
    for batch, context in series.points:
        assert series.cache_tokens // PAGE_SIZE >= batch * (-(-context // PAGE_SIZE) + 1)

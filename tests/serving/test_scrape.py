"""What a server tells, by version; the texts have the form that 0.5.16 and 0.5.23 print."""

import math

import pytest

from cglab.errors import ServerError
from cglab.serving.scrape import GraphCapture, graph_share, scrape
from tests.serving.stand_in import StandIn

STAMP = "[2026-11-30 12:00:00] "
LOG_16 = f"""{STAMP}server_args={{'disable_cuda_graph': False, 'disable_prefill_cuda_graph': False}}
{STAMP}Capture target prefill CUDA graph begin. backend=breakable, num_tokens=[4, 8, 128], avail mem=90.00 GB
{STAMP}Capture target prefill CUDA graph end. elapsed=13.20 s, mem usage=1.33 GB, avail mem=88.67 GB.
{STAMP}Capture target decode CUDA graph begin. backend=full, num_tokens_per_req=1, bs=[1, 2, 4], avail mem=88.67 GB
{STAMP}Capture target decode CUDA graph end. elapsed=3.40 s, mem usage=0.10 GB, avail mem=88.57 GB.
{STAMP}Prefill batch, #new-seq: 1, #new-token: 128, #cached-token: 0, cuda graph: True, input throughput: 1.00
"""
LOG_23 = f"""{STAMP}Capture target verify cuda graph begin. backend=full, num_tokens_per_req=4, avail mem=80.00 GB
{STAMP}Capture target verify cuda graph end. bs=[4, 2, 1], elapsed=2.00 s, mem usage=0.20 GB, avail mem=79.80 GB.
{STAMP}Capture Frozen-KV MTP draft cuda graph begin.
{STAMP}Capture Frozen-KV MTP draft cuda graph end.
{STAMP}Disable prefill CUDA graph because cuda_graph_config resolved prefill.backend='disabled'.
{STAMP}Capture draft extend CUDA graph begin. backend=full, bs=[1], avail mem=79.00 GB
"""


def gauge(name, value, **labels):
    told = ",".join(f'{key}="{text}"' for key, text in {"model_name": "m", "tp_rank": "0", **labels}.items())
    return f"sglang:{name}{{{told}}} {value}\n"


PASSES = "".join(
    gauge("cuda_graph_passes_total", f"{count}.0", mode=mode)
    for mode, count in {"prefill_cuda_graph": 6, "prefill_none": 2, "decode_none": 5}.items()
)
NOW = gauge("num_running_reqs", 2.0) + gauge("num_queue_reqs", 1.0)


@pytest.fixture
def server(tmp_path):
    def make(log="", metrics="", version="0.5.16", **info):
        file = tmp_path / "server.log"
        file.write_text(log)
        state = {"avg_spec_accept_length": info.pop("accepted", None)}
        answers = {"/server_info": {"version": version, "internal_states": [state], **info}}
        return StandIn({**answers, "/metrics": metrics}, log=file)

    return make


def test_0_5_16_tells_of_its_captures_in_the_log_alone(server):
    found = scrape(server(LOG_16, PASSES + NOW))
    assert found.captures == (
        GraphCapture("prefill", "breakable", (4, 8, 128), 13.2, 1.33),
        GraphCapture("decode", "full", (1, 2, 4), 3.4, 0.1),
    )
    flat = found.metrics()
    assert flat["graph_memory_gb"] == pytest.approx(1.43) and flat["capture_seconds"] == pytest.approx(16.6)
    assert flat["capture_seconds_prefill"] == 13.2
    assert found.disabled == () and found.in_flight == 3


def test_0_5_23_has_finer_figures_in_its_metrics_and_zero_there_is_no_figure(server):
    metrics = (
        gauge("graph_memory_usage_gb", 0.2034, phase="target_verify")
        + gauge("startup_cuda_graph_time_seconds", 0.0, phase="target_verify")
        + gauge("graph_memory_usage_gb", 0.0, phase="prefill")
    )
    found = scrape(server(LOG_23, metrics, "0.5.23"))
    verify = found.capture("target_verify")
    assert verify == GraphCapture("target_verify", "full", (1, 2, 4), 2.0, 0.2034)
    assert found.capture("prefill") is None
    # What it says nothing of is None, and so is the sum; a capture that never ended is none.
    assert found.capture("frozen_kv_mtp_draft") == GraphCapture("frozen_kv_mtp_draft")
    assert found.metrics()["graph_memory_gb"] is None and found.capture("draft_extend") is None
    assert found.disabled == (
        "Disable prefill CUDA graph because cuda_graph_config resolved prefill.backend='disabled'.",
    )


def test_passes_by_mode_and_the_share_of_graphs(server):
    before, after = (
        scrape(server(metrics=text)) for text in (PASSES, PASSES.replace("} 6.0", "} 16.0") + NOW)
    )
    since = after.passes_since(before)
    assert since == {"prefill_cuda_graph": 10, "prefill_none": 0, "decode_none": 0}
    assert graph_share(after.passes, "prefill") == 16 / 18 and graph_share(since, "prefill") == 1.0
    assert graph_share(after.passes, "decode") == 0.0 and graph_share(since, "decode") is None


def test_ranks_of_one_group_count_once_and_stages_each(server):
    ranks = "".join(
        gauge("cuda_graph_passes_total", 4.0, mode="decode_none", tp_rank=tp, pp_rank=pp)
        for tp in "01"
        for pp in "01"
    )
    assert scrape(server(metrics=ranks)).passes == {"decode_none": 8}


def test_p83_an_idle_gauge_is_not_a_number_and_not_zero(server):
    found = scrape(server(metrics=gauge("fwd_occupancy", math.nan)))
    assert found.occupancy is None and "SGLANG_ENABLE_METRICS_DEVICE_TIMER=1" in found.missing["occupancy"]
    assert scrape(server(metrics=gauge("fwd_occupancy", 81.5))).occupancy == 81.5


def test_accept_length_is_none_without_drafts_and_before_the_first_pass(server):
    at_start = gauge("spec_accept_length", 0.0)
    plain = scrape(server(metrics=at_start))
    assert plain.accept_length is None and "without speculative" in plain.missing["accept_length"]
    young = scrape(server(metrics=at_start, speculative_algorithm="EAGLE"))
    assert young.accept_length is None and "no verify pass" in young.missing["accept_length"]
    assert scrape(server(metrics=at_start, speculative_algorithm="EAGLE", accepted=3.1)).accept_length == 3.1


def test_a_server_without_metrics_says_how_to_get_them(server):
    found = scrape(server(LOG_16))
    assert found.passes is found.running is found.in_flight is found.passes_since(found) is None
    assert set(found.missing) == {"passes", "accept_length", "occupancy", "running", "queued"}
    assert "--enable-metrics" in found.missing["passes"] and len(found.captures) == 2
    assert found.metrics()["graph_memory_gb"] is not None and scrape(server()).metrics() == {
        "graph_memory_gb": None,
        "capture_seconds": None,
    }


def test_an_answer_that_is_none_is_an_error():
    with pytest.raises(ServerError, match="status 503"):
        scrape(StandIn({"/server_info": 503}))
    for other in ("<html>", []):
        with pytest.raises(ServerError, match="something else than a JSON object"):
            scrape(StandIn({"/server_info": other}))


def test_shares_and_ratios_of_several_stages_or_replicas_are_no_sums(server):
    page = "".join(
        gauge(name, value, dp_rank=replica)
        for replica, (share, length) in enumerate([(80.0, 3.0), (90.0, 2.0)])
        for name, value in (("fwd_occupancy", share), ("spec_accept_length", length))
    )
    found = scrape(server(metrics=page, speculative_algorithm="EAGLE"))
    assert found.occupancy == 85.0 and found.accept_length == 2.5


def test_stages_capture_side_by_side_each_into_its_own_memory(server):
    page = "".join(
        gauge(name, value, phase="target_verify", pp_rank=stage)
        for stage, pair in enumerate([(2.5, 0.5), (3.0, 0.25)])
        for name, value in zip(
            ("startup_cuda_graph_time_seconds", "graph_memory_usage_gb"), pair, strict=True
        )
    )
    found = scrape(server(LOG_23, page, "0.5.23")).capture("target_verify")
    assert (found.seconds, found.memory_gb) == (3.0, 0.75)


def test_a_page_that_is_no_metrics_is_an_error_and_no_traceback(server):
    with pytest.raises(ServerError, match="/metrics is no page of metrics"):
        scrape(server(metrics="<html>no metrics</html>"))

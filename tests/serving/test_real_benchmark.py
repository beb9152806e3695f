"""Two equal arms of a real SGLang on the CPU: equal tokens and counts; and a server that is killed while it is driven."""

import json
import os
import signal
import threading
from contextlib import nullcontext

import pytest

from cglab.engine.load import Load
from cglab.errors import ServerError
from cglab.serving.arm import ServerArm
from cglab.serving.benchmark import run_benchmark
from cglab.serving.compare import compare_servers
from cglab.serving.evaluate import evaluate
from cglab.serving.profile import profile
from cglab.serving.server import launch
from cglab.serving.workload import Workload, point
from tests.serving.processes import descendants, gone, wait_for

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

SMALL = [
    Workload("two lanes", Load(6, 2, 48, 12), 4096, lane_offset=0.05, warmups=1),
    point(32, 8, 1, cached=64, vocabulary=4096, count=3),
]


def arm(name):
    return ServerArm(name, "pico-gqa", arguments=("--dtype", "float32"), device="cpu")


@pytest.fixture(scope="module")
def equal_arms(tmp_path_factory):
    """One instance of each; whether times differ is tested on synthetic samples."""
    kept = []
    found = compare_servers(
        [arm("a"), arm("b")], SMALL, folder=tmp_path_factory.mktemp("arms"), instances=1, keep=kept.append
    )
    return found, kept


def test_two_equal_arms_compute_the_same_bits(equal_arms):
    found, kept = equal_arms
    assert found.failed == {} and found.order == "AB"
    assert found.parity["b"].bitwise and found.parity["b"].outputs == 13
    assert found.parity["b"].logprobs_compared == 13 * 127
    assert [record.arm for record in kept] == ["a", "a", "b", "b"]
    assert kept[0].versions["sglang"] == found.turns[0].before.version


def test_two_equal_arms_do_the_same_work(equal_arms):
    found, _ = equal_arms
    for workload, requests, prompts, new in ((SMALL[0], 6, 48, 12), (SMALL[1], 3, 96, 8)):
        for turn in found.turns:
            (result,) = [each for each in turn.points if each.workload == workload]
            assert result.payload == workload.payload
            assert result.latency.completed == result.benchmark["completed"] == requests
            assert (
                result.benchmark["total_input_tokens"] == result.latency.prompt_tokens == requests * prompts
            )
            assert result.benchmark["total_output_tokens"] == result.latency.new_tokens == requests * new
            assert result.latency.ttft_ms.p50 == pytest.approx(result.benchmark["median_ttft_ms"])
            assert result.latency.e2e_ms.p90 == pytest.approx(result.benchmark["p90_e2e_latency_ms"])
            assert result.latency.errors == 0 and turn.in_flight == 0
            assert result.latency.ttft_ms.p50 > 0
    # A server on a CPU has no graphs, and says so.
    assert all(turn.passes["prefill_none"] > 0 for turn in found.turns)
    assert found.shares() == dict.fromkeys("ab", {"prefill": 0.0, "decode": 0.0})
    assert all("prefill" in " ".join(turn.before.disabled) for turn in found.turns)


def test_a_server_killed_while_it_is_driven_is_a_clear_error_and_leaves_nothing(tmp_path):
    long, results = point(64, 200, 1, vocabulary=4096, count=50), []
    with launch(arm("victim"), log_folder=tmp_path, deadline_s=400) as server:
        family = [server.pid, *descendants(server.pid)]

        def kill_in_the_second_point():
            wait_for((tmp_path / "point-0.json").exists, seconds=400)
            os.kill(server.pid, signal.SIGKILL)

        threading.Thread(target=kill_in_the_second_point, daemon=True).start()
        with pytest.raises(ServerError, match=f"the server died while {long.name} was measured"):
            results += run_benchmark(server, [SMALL[0], long], tmp_path, deadline=300)
    assert [each.workload for each in results] == SMALL[:1] and results[0].latency.completed == 6
    wait_for(lambda: all(map(gone, family)))


def test_a_profile_of_the_server_is_read_by_the_labs_reader(real_server, tmp_path):
    bodies = point(16, 4, 1, vocabulary=4096, count=2).bodies()
    traces = profile(real_server, bodies, tmp_path, activities=("CPU",))
    assert set(traces) == {"TP-0"} and not traces["TP-0"].device_events
    assert "aten::mul" in {operation.name for operation in traces["TP-0"].operations}


def test_a_score_comes_from_the_installed_harness(real_server, tmp_path):
    lines = [{"question": f"What is {number} + 1?", "answer": f"#### {number + 1}"} for number in range(6)]
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = evaluate(
        arm("real"), "gsm8k", 6, 2, data=data, folder=tmp_path / "out", new_tokens=8, parallel=2,
        start=lambda *_, **__: nullcontext(real_server),
    )  # fmt: skip
    assert len(found.runs) == 4 and 0 <= found.score <= 1 and 0 <= found.invalid <= 1
    assert found.accept_length is None

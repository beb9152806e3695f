"""SGLang's serving benchmark is driven as it is; the real one runs in the tests that are marked sglang."""

import os
import signal
import threading
import time
from itertools import pairwise

import pytest

from cglab.engine.load import Load
from cglab.errors import InputError, ResultsError, ServerError
from cglab.serving.benchmark import read_point, run_benchmark
from cglab.serving.workload import Workload, point
from tests.serving.stand_in import StandIn, http_server


@pytest.fixture
def drive(fake_python, tmp_path):
    """Runs workloads against a server of this process; the results, and what it received."""

    def run(workloads, *, generate=None, server=None, **settings):
        with http_server(generate) as (url, received):
            server = server or StandIn(python=fake_python)
            server.url = url
            return list(
                run_benchmark(server, workloads, tmp_path / "bench", deadline=60, **settings)
            ), received

    return run


def small(name="small", *, lanes=2, fresh=5, out=4, cached=0, count=6, offset=0.0, vocabulary=90):
    load = Load(count, lanes, fresh, out, shared_prefix=cached)
    return Workload(name, load, vocabulary, lane_offset=offset, warmups=1)


def test_what_was_asked_is_what_was_sent_and_every_request_is_told(drive):
    asked = small(cached=3)
    (result,), received = drive([asked])
    assert result.payload == asked.payload
    assert result.latency.completed == 6 and result.latency.errors == 0 and result.latency.in_flight == 0
    assert result.latency.prompt_tokens == 6 * 8 and result.latency.new_tokens == 6 * 4
    assert [each.index for each in result.result.requests] == list(range(6))
    assert len(result.samples()["ttft_ms"]) == len(result.samples()["e2e_ms"]) == 6
    assert result.latency.ttft_ms.p50 < result.latency.e2e_ms.p50
    # Warm-up, then an empty cache, then the prefix, then the load: the other order would measure cache hits.
    paths = [path for path, _ in received]
    assert paths[:3] == ["/generate", "/flush_cache", "/generate"] and len(paths) == 3 + 6
    assert received[2][1] == asked.prefix_body()
    assert received[0][1] == asked.warm_bodies()[0]


def test_both_medians_are_the_same_figure(drive):
    (result,), _ = drive([small(count=5)])
    assert result.latency.ttft_ms.p50 == pytest.approx(result.benchmark["median_ttft_ms"])


def test_several_points_in_one_process(drive):
    results, received = drive([small("one"), small("two", out=2, lanes=1)])
    assert [each.workload.name for each in results] == ["one", "two"]
    assert [each.latency.new_tokens for each in results] == [24, 12]
    assert sum(path == "/flush_cache" for path, _ in received) == 2


def test_lanes_start_a_fixed_time_apart(drive):
    (result,), _ = drive([small(lanes=3, offset=0.15, count=6)])
    starts = [each.arrived_at for each in result.result.requests][:3]
    apart = [later - earlier for earlier, later in pairwise(starts)]
    assert all(0.12 < each < 0.3 for each in apart), apart


def test_first_tokens_without_text_are_seen(drive):
    """B: SGLang's client passes over them, and reports the third token's time as TTFT."""
    candidates = (Workload("wordless", Load(4, 1, 4, 12, seed=seed), 8, warmups=0) for seed in range(100))
    asked = next(each for each in candidates if any(body["input_ids"][0] == 7 for body in each.bodies()))
    (result,), _ = drive([asked])
    assert result.unseen_first_tokens == 0
    assert all(len(each.token_times) == 12 for each in result.result.requests)


def test_a_request_that_failed_counts_as_an_error_and_has_no_times(drive):
    (result,), _ = drive([small(out=(12, 13), count=12)])
    assert 0 < result.latency.errors < 12 and result.latency.errors + result.latency.completed == 12
    failed = next(each for each in result.result.requests if each.finish == "error")
    assert failed.error == "refused" and failed.ttft is None and failed.e2e is None


def test_a_server_that_dies_in_the_middle_ends_it_and_earlier_results_stay(fake_python, tmp_path):
    server, results, hold = StandIn(python=fake_python), [], threading.Event()

    def dies_at_the_second_point(body):
        if len(body.get("input_ids", [])) == 50:
            server.living = False
            hold.wait(20)

    with http_server(dies_at_the_second_point) as (url, _):
        server.url = url
        workloads = [small("first"), small("second", fresh=50)]
        with pytest.raises(ServerError, match=r"died while second(.|\n)*the last line"):
            results += run_benchmark(
                server, workloads, tmp_path, deadline=60
            )  # keeps what came before the error
        hold.set()
    assert [each.workload.name for each in results] == ["first"]


def test_a_benchmark_that_fails_and_one_that_takes_too_long_say_so(drive, fake_python, tmp_path):
    with pytest.raises(ServerError, match=r"status 1 while small(.|\n)*does not like this"):
        drive([small()], arguments=["--fail"])
    with http_server(lambda _: time.sleep(30)) as (url, _):
        server = StandIn(python=fake_python)
        server.url = url
        with pytest.raises(ServerError, match="the deadline passed while small"):
            list(run_benchmark(server, [small()], tmp_path / "slow", deadline=1.0))


def test_leaving_in_the_middle_leaves_no_process(drive, fake_python, tmp_path):
    with http_server() as (url, _):
        server = StandIn(python=fake_python)
        server.url = url
        running = run_benchmark(server, [small("a"), small("b", count=400)], tmp_path / "left", deadline=60)
        next(running)
        process = running.gi_frame.f_locals["process"]
        running.close()
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, signal.SIG_DFL)


def test_what_was_sent_must_be_what_was_asked(drive):
    with pytest.raises(ResultsError, match="changes the payload"):
        drive([small()], arguments=["--disable-ignore-eos"])


def test_points_are_told_apart_by_name_and_a_broken_result_is_none(drive, tmp_path):
    with pytest.raises(InputError, match="one name"):
        drive([small(), small()])
    broken = tmp_path / "broken.json"
    broken.write_text('{"requests": []}')
    with pytest.raises(ResultsError, match="no result of the serving benchmark"):
        read_point(broken, point(1, 1, 1, vocabulary=2))


def test_a_proxy_of_the_machine_is_not_for_loopback(drive, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody listens there
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    (result,), _ = drive([small()])
    assert result.latency.errors == 0 and result.latency.completed == 6

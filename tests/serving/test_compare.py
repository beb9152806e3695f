"""Servers in turns: S3's order, every result kept at once, refusals before anything starts, honest verdicts."""

import json
import re
import time
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from cglab.engine.load import Load
from cglab.errors import InputError, ToggleError
from cglab.measure.statistics import false_positive_rate
from cglab.serving.arm import ServerArm
from cglab.serving.benchmark import read_point
from cglab.serving.compare import compare_servers
from cglab.serving.comparison import ServerComparison, Turn
from cglab.serving.recorded import newest
from cglab.serving.workload import Workload
from tests.serving.stand_in import StandIn, generate, http_server

POINT = Workload("two lanes", Load(4, 2, 6, 3), 90, lane_offset=0.0, warmups=0)
METRICS = 'sglang:cuda_graph_passes_total{{mode="decode_none",tp_rank="0"}} {count}.0\n'


@pytest.fixture
def compare(fake_python, tmp_path):
    """Compares stand-ins; ``serve`` says how an arm answers, ``started`` lists the turns."""

    def run(
        names=("off", "on"), *, serve=None, started=None, arms=None, resolved=None, model_of=None, **settings
    ):
        @contextmanager
        def start(arm, *, log_folder, deadline_s):
            started.append(arm.name)
            server = StandIn(python=fake_python)
            counts = iter(range(0, 10_000, 10))
            with http_server(None if serve is None else lambda _: serve(arm.name, server)) as (url, _):
                info = {"version": "0.5.23", "dtype": "float32", **(resolved or {}).get(arm.name, {})}
                server.answers = {
                    "/server_info": {**info, "internal_states": [{}]}, "/flush_cache": "ok",
                    "/metrics": lambda _: METRICS.format(count=next(counts)), "/generate": generate((model_of or {}).get(arm.name, 0)),
                }  # fmt: skip
                server.url, server.started_s = url, 1.5
                yield server

        started = [] if started is None else started
        arms = arms or [ServerArm(name, "pico-gqa", python=fake_python, device="cpu") for name in names]
        return compare_servers(arms, [POINT], folder=tmp_path, start=start, deadline=60, **settings)

    return run


def test_turns_go_abbaab_and_equal_arms_have_equal_tokens_and_counts(compare):
    kept, started = [], []
    found = compare(keep=kept.append, started=started, facts={"model": "pico-gqa", "weights": "trained"})
    assert started == ["off", "on", "on", "off", "off", "on"] and found.order == "ABBAAB"
    assert found.instances == 3 and found.failed == {}
    assert found.parity["on"].bitwise and found.parity["on"].logprobs_compared == 13 * 127
    # Nothing was lost, doubled or sent to one arm alone.
    for turn in found.turns:
        assert turn.points[0].latency.completed == 4 and turn.points[0].latency.new_tokens == 12
        assert turn.passes["decode_none"] > 0
    assert {record.arm: record.workload["payload"] for record in kept} == dict.fromkeys(
        ("off", "on"), POINT.payload
    )
    assert [record.workload["instance"] for record in kept] == [0, 0, 1, 1, 2, 2]
    assert len({record.run for record in kept}) == 1 and kept[-1].parity["verdict"] == "bitwise"
    assert {record.metrics["graph_share_decode"] for record in kept} == {0.0}
    assert {record.metrics["graph_share_prefill"] for record in kept} == {None}  # no such pass was counted
    assert kept[0].versions["sglang"] == "0.5.23" and kept[0].bench == "servers"
    assert all(len(record.samples["ttft_ms"]) == 4 for record in kept)
    json.dumps(found.as_dict())


def test_the_rate_of_the_rule_is_printed(compare):
    text = str(compare())
    assert f"errs in {false_positive_rate(3):.1%} of equal pairs" in text
    assert false_positive_rate(3) == pytest.approx(0.09, abs=0.01)
    single = compare(instances=1)
    assert "no verdict, which takes 3" in str(single) and single.as_dict()["false_positive_rate"] is None


def test_a_slower_arm_is_found(compare):
    found = compare(serve=lambda name, _: time.sleep(0.06 if name == "on" else 0.0))
    row = next(row for row in found.rows() if (row["measure"], row["arm"]) == ("E2E", "on"))
    assert row["verdict"] == "slower" and row["change_percent"] > 50
    assert next(row for row in found.rows() if row["arm"] == "off")["verdict"] is None


def test_a_server_that_dies_ends_its_arm_only_and_earlier_records_stay(compare):
    kept, seen = [], []

    def dies_the_second_time(name, server):
        seen.append(name)
        if name == "on" and seen.count("on") > 4:
            server.living = False
            time.sleep(0.5)

    found = compare(serve=dies_the_second_time, keep=kept.append)
    assert found.order == "ABBAA"  # no third turn of an arm that failed
    assert list(found.failed) == ["on"] and "the server died while two lanes" in found.failed["on"]
    assert [record.arm for record in kept if record.bench == "servers"] == ["off", "on", "off", "off"]
    (told,) = (record for record in kept if record.bench == "server_failures")
    assert told.arm == "on" and "the server died" in told.notes and not re.search(r"/\w+/|\n", told.notes)
    assert told.run == kept[0].run and told.workload["toggles"] == kept[1].workload["toggles"]
    shown = newest(kept)
    assert len(shown.runs) == 1 and shown.failures == (told,) and told.notes in str(shown)
    assert {row["verdict"] for row in found.rows() if row["arm"] == "on"} == {"undecided"}
    assert "on failed: the server died" in str(found)


def test_what_a_launch_would_refuse_is_refused_before_anything_starts(compare, fake_python):
    started = []

    def arms(*words, **fields):
        return [ServerArm(name, "pico-gqa", arguments=words, python=fake_python, **fields) for name in "ab"]

    with pytest.raises(InputError, match="no argument --dtyp"):
        compare(arms=arms("--dtyp", "bfloat16"), started=started)
    with pytest.raises(ToggleError, match="seed_step"):
        compare(arms=arms(toggles={"seed_step": "eager"}), started=started)
    with pytest.raises(InputError, match="differ in more"):
        compare(arms=[*arms()[:1], *arms("--dtype", "bfloat16")[1:]], started=started)
    with pytest.raises(InputError, match="ABBAAB does"):
        compare(order="ABAB", started=started)
    with pytest.raises(InputError, match="1 or more"):
        compare(instances=0, started=started)
    assert started == []


def test_servers_that_resolved_their_arguments_differently_are_not_compared(compare):
    with pytest.raises(InputError, match="max_total_tokens: 100 and 90"):
        compare(resolved={"off": {"max_total_tokens": 100}, "on": {"max_total_tokens": 90}})


def test_a_flagged_point_is_measured_again_with_more_instances(compare):
    found = compare(serve=lambda name, _: time.sleep(0.06 if name == "on" else 0.0), confirm=4)
    assert found.instances == 4 and found.order == "ABBAABBA"
    assert compare(instances=1, confirm=2).order == "AB"  # one instance flags nothing


def synthetic(tmp_path, medians):
    """A comparison of instances whose requests all took the given seconds."""
    turns = []
    for instance, pair in enumerate(medians):
        for arm, seconds in zip("AB", pair, strict=True):
            facts = [
                {
                    "index": index,
                    "prompt_tokens": 6,
                    "success": True,
                    "error": "",
                    "start": 10.0,
                    "ttft": seconds,
                    "latency": 3 * seconds,
                    "gaps": [seconds] * 2,
                    "new_tokens": 3,
                }
                for index in range(4)
            ]
            file = tmp_path / "point.json"
            file.write_text(json.dumps({"payload": POINT.payload, "requests": facts, "benchmark": {}}))
            turns.append(Turn(arm, instance, (read_point(file, POINT),)))
    return ServerComparison(("A", "B"), (POINT,), tuple(turns))


@pytest.mark.parametrize(("instances", "low", "high"), [(3, 0.04, 0.14), (5, 0.0, 0.03)])
def test_equal_arms_are_flagged_as_often_as_the_printed_rate_says(tmp_path, instances, low, high):
    generator = np.random.default_rng(5)
    trials, flagged = 80, 0  # each with its intervals, which take the time
    for _ in range(trials):
        medians = generator.normal(0.1, 0.005, (instances, 2)).tolist()
        verdict = synthetic(tmp_path, medians).result("two lanes", "ttft_ms")["B"].verdict
        flagged += verdict in ("faster", "slower")
    assert low <= flagged / trials < high
    assert low <= false_positive_rate(instances) < high


def test_published_figures_stand_beside_ours(tmp_path):
    found = synthetic(tmp_path, [(0.2, 0.1)] * 3)
    theirs = {"two lanes": {"ttft_ms": {"base": 71, "other": 49, "change": -30}}}
    rows = ServerComparison(found.arms, found.workloads, found.turns, {}, theirs).rows()
    base, other = rows[:2]
    assert (base["ms"], base["published_ms"], base["published_percent"]) == (pytest.approx(200), 71, None)
    assert (other["change_percent"], other["published_ms"], other["published_percent"]) == (
        pytest.approx(-50), 49, -30,
    )  # fmt: skip
    assert other["verdict"] == "faster" and rows[2]["published_ms"] is None
    assert (
        other["user_tok_s_p50"] == pytest.approx(10) and other["errors"] == 0 and other["in_flight"] is None
    )


@pytest.mark.parametrize("order", ["BAABBA", "BA"])
def test_parity_does_not_depend_on_who_takes_the_first_turn(compare, order):
    found = compare(order=order, instances=len(order) // 2, model_of={"on": 1})
    assert found.order == order and list(found.parity) == ["on"]
    assert not found.parity["on"].tokens.ok


def with_failures(tmp_path, failed, **facts):
    """Three instances, the second arm twice as fast; of each of its points some requests are as ``facts`` say."""
    whole = synthetic(tmp_path, [(0.2, 0.1)] * 3)  # whose last point is the file's
    told = json.loads((tmp_path / "point.json").read_text())
    told["requests"] = [each | (facts if each["index"] < failed else {}) for each in told["requests"]]
    (tmp_path / "point.json").write_text(json.dumps(told))
    odd = read_point(tmp_path / "point.json", POINT)
    return replace(
        whole, turns=tuple(replace(turn, points=(odd,)) if turn.arm == "B" else turn for turn in whole.turns)
    )


@pytest.mark.parametrize("facts", [{"success": False, "error": "refused"}, {"new_tokens": 1, "gaps": []}])
def test_an_arm_of_which_requests_failed_or_ended_early_is_not_called_faster(tmp_path, facts):
    assert with_failures(tmp_path, 0).result("two lanes", "e2e_ms")["B"].verdict == "faster"
    found = with_failures(tmp_path, 1, **facts)
    assert found.result("two lanes", "e2e_ms")["B"].verdict == "undecided"
    assert found.incomplete == {"two lanes": {"B": "3 of 4 requests completed"}}
    assert "B at two lanes: 3 of 4 requests completed" in str(found)
    assert {row["errors"] for row in found.rows() if row["arm"] == "B"} == {3}


def test_a_comparison_of_which_no_server_started_says_so():
    turns = tuple(Turn(arm, 0, error=f"{arm} died") for arm in "AB")
    found = ServerComparison(("A", "B"), (POINT,), turns)
    assert {row["ms"] for row in found.rows()} == {None} and "A failed: A died" in str(found)
    json.dumps(found.as_dict())


def test_arms_whose_servers_took_a_toggle_back_are_not_what_they_say(compare, fake_python):
    arms = [ServerArm(name, "pico-gqa", {"decode": "eager"}, (), {}, fake_python, "cpu") for name in "ab"]
    resolved = {"cuda_graph_config": {"decode": {"backend": "full"}, "prefill": {"backend": "breakable"}}}
    kept = []
    found = compare(arms=arms, instances=1, keep=kept.append, resolved={"a": resolved, "b": resolved})
    assert found.overruled == dict.fromkeys("ab", {"--cuda-graph-backend-decode": "full"})
    assert "a is not what its toggles say: SGLang made --cuda-graph-backend-decode full" in str(found)
    assert found.as_dict()["overruled"] == found.overruled
    assert {record.metrics["overruled_cuda-graph-backend-decode"] for record in kept} == {"full"}

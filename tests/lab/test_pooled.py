"""Records of several processes as one: medians, a verdict between processes, and what is missing named."""

import pytest

from cglab.errors import InputError
from cglab.lab.pooled import pooled, require_processes
from cglab.measure.record import make_record

ENDED = "its process ended with exit status 0 before it was measured"


def record(arm, *token_ms, verdict="bitwise", size=8, **metrics):
    return make_record(
        bench="first-token", arm=arm, device="cpu", run="one", model="pico-gqa", weights="trained", dtype="float32",
        workload={"tokens": size}, samples={"token_ms": token_ms} if token_ms else {},
        metrics={"floor_ms": 2.0, **({"token_ms": token_ms[0]} if token_ms else {}), **metrics},
        parity={"verdict": verdict} if token_ms else None,
    )  # fmt: skip


def merged(*processes, endings=None):
    found = list(pooled(processes, endings or [ENDED] * len(processes), "full"))
    return {each.arm: each for each in found}


def test_a_difference_holds_between_processes_or_is_none():
    apart = merged(*([record("eager", 9.0, 9.2), record("full", ms, ms)] for ms in (4.0, 4.2, 4.4)))
    eager = apart["eager"].metrics
    assert eager["verdict"] == "slower" and eager["ours_ms"] == pytest.approx(4.2)
    assert eager["processes"] == 3 and eager["over_floor"] == pytest.approx(9.1 / 2)
    assert apart["full"].samples == {
        "token_ms": pytest.approx([4.0, 4.0, 4.2, 4.2, 4.4, 4.4]),
        "process_ms": pytest.approx([4.0, 4.2, 4.4]),
    }
    assert apart["full"].metrics["between_processes"] == pytest.approx(0.1)
    # Each process by itself would have said "slower"; the next one finds the opposite.
    mixed = merged(*([record("full", 4.0, 4.0), record("eager", ms, ms)] for ms in (5.0, 3.0, 5.0)))
    assert mixed["eager"].metrics["verdict"] == "no difference"


def test_an_arm_that_a_process_lacks_is_undecided_with_the_reason():
    whole = [record("full", 4.0), record("eager", 9.0)]
    found = merged(whole, whole, whole[:1], endings=[ENDED, ENDED, "its process ended by SIGKILL"])
    eager = found["eager"].metrics
    assert (
        eager["verdict"] == "undecided"
        and eager["error"] == "its process ended by SIGKILL (in 1 of 3 processes)"
    )
    assert eager["processes"] == 2 and found["full"].metrics["processes"] == 3


def test_an_arm_that_never_ran_and_the_floor_stay_records():
    process = [record("full", 4.0), record("sglang", error="not here"), record("floor", token_ms=2.0)]
    found = merged(process, process, process)
    assert found["sglang"].metrics["error"] == "not here (in 3 of 3 processes)"
    assert "verdict" not in found["sglang"].metrics and found["sglang"].parity is None
    assert found["floor"].metrics["token_ms"] == 2.0 and found["floor"].samples == {}


def test_the_worst_parity_of_all_processes_is_told_and_sizes_stay_apart():
    processes = [
        [record("full", 4.0), record("eager", 9.0, verdict=verdict), record("full", 5.0, size=16)]
        for verdict in ("bitwise", "corrupted", "drift")
    ]
    found = list(pooled(processes, [ENDED] * 3, "full"))
    assert [(each.arm, each.workload["tokens"]) for each in found] == [
        ("full", 8),
        ("eager", 8),
        ("full", 16),
    ]
    assert found[1].parity["verdict"] == "corrupted" and found[0].parity["verdict"] == "bitwise"


def test_as_many_processes_as_the_rule_needs_or_one():
    assert [require_processes(count) for count in (1, 3, 5)] == [1, 3, 5]
    with pytest.raises(InputError, match="processes=2"):
        require_processes(2)

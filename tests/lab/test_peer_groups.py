"""Peers in processes of their own: one that takes its process along takes no other, and is told with the reason."""

import os
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from cglab.lab import peer_groups, peers_bench
from cglab.lab.peer_groups import ALONE, PeerJob, groups
from cglab.lab.peers_bench import ARMS, LOCAL, measured, peers
from cglab.lab.recorded import _key
from cglab.measure.record import first_line

pytestmark = pytest.mark.end_to_end

CPU = torch.device("cpu")
HOSTILE = ("full", "eager", "torch-compile", "breakable-cuda-graphs")


@pytest.fixture(scope="module")
def hostile(environment):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", environment["PYTHONPATH"])
        patch.setattr(peer_groups, "PROCESS", (str(Path(__file__).parent / "hostile_peers.py"),))
        found = list(peers(CPU, quick=True, arms=HOSTILE, batches=(1, 2)))
    return {(record.arm, record.workload["batch"]): record for record in found}, found


@pytest.mark.slow
def test_every_arm_of_a_run_with_dead_processes_has_one_record(hostile):
    by_place, found = hostile
    assert set(by_place) == {(arm, batch) for arm in (*HOSTILE, "floor") for batch in (1, 2)}
    assert len(by_place) == len(found) and len({record.run for record in found}) == 1
    assert {tuple(record.command) for record in found} == {tuple(found[0].command)}
    assert found[0].command[1:] == [
        Path(word).name if word.startswith("/") else word for word in sys.argv[1:]
    ]
    for batch in (1, 2):  # a dead arm replaces what an older run had of it
        keys = [(r.model, r.weights, r.dtype, r.workload) for r in found if r.workload["batch"] == batch]
        assert all(key == keys[0] for key in keys)


@pytest.mark.slow
def test_a_peer_that_kills_its_process_keeps_what_it_had_and_leaves_the_others(hostile):
    records, _ = hostile
    assert all(records[arm, batch].metrics["token_ms"] > 0 for arm in ("full", "eager") for batch in (1, 2))
    assert records["torch-compile", 1].metrics["token_ms"] > 0
    assert "SIGABRT" in records["torch-compile", 2].metrics["error"]
    assert "token_ms" not in records["torch-compile", 2].metrics


@pytest.mark.slow
def test_a_peer_that_loses_its_device_is_told_in_a_line_without_folders(hostile):
    records, _ = hostile
    first, second = (records["breakable-cuda-graphs", batch].metrics["error"] for batch in (1, 2))
    assert first == "RuntimeError: CUDA error: unspecified launch failure in kernel.cu"
    assert second.startswith("its process ended with exit status 1") and second.endswith(first)


@pytest.mark.slow
def test_a_ratio_is_against_the_full_of_its_own_process(hostile):
    records, _ = hostile
    for place in (("eager", 1), ("torch-compile", 1)):
        metrics = records[place].metrics
        assert metrics["ratio_to_ours"] == pytest.approx(metrics["token_ms"] / metrics["ours_ms"])
    assert records["eager", 1].metrics["ours_ms"] == records["full", 1].metrics["token_ms"]
    assert records["torch-compile", 1].metrics["ours_ms"] != records["full", 1].metrics["token_ms"]


def test_each_arm_is_in_one_group_and_ours_in_all_with_sglang_beside_it():
    made = groups(ARMS)
    assert all(group[0] == "full" for group in made)
    assert sorted(arm for group in made for arm in group[1:]) == sorted(ARMS[1:])
    assert "sglang" in made[0] and set(made[0]).isdisjoint(ALONE) and set(ALONE) < set(ARMS)
    assert groups(("full", "torch-compile")) == [("full",), ("full", "torch-compile")]


def test_groups_that_all_die_before_anything_leave_a_record_for_each_arm(environment, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", environment["PYTHONPATH"])
    monkeypatch.setattr(peer_groups, "PROCESS", ("-c", "raise OSError('no room on /some/disk')"))
    found = list(peers(CPU, quick=True, arms=("torch-compile",), batches=(1, 4)))
    assert [(record.arm, record.workload["batch"]) for record in found] == [
        (arm, batch) for batch in (1, 4) for arm in ("full", "torch-compile")
    ]
    assert all(record.metrics["error"].endswith("OSError: no room on disk") for record in found)
    assert all({"batch", "context"} <= set(record.workload) and _key(record) for record in found)


def test_a_group_that_does_not_end_is_ended(environment, monkeypatch):
    monkeypatch.setattr(peer_groups, "PROCESS", ("-c", "import time; time.sleep(300)"))
    monkeypatch.setattr(peers_bench, "PeerJob", lambda *given, **named: PeerJob(*given, **named, limit=0.5))
    (found,) = peers(CPU, quick=True, arms=("full",), batches=(1,))
    assert found.metrics["error"] == "its process did not end within 0.5 s"


@pytest.mark.parametrize("ours", [True, False])
def test_nothing_is_compared_with_another_than_ours_where_that_is_lost(monkeypatch, ours):
    @contextmanager
    def broken(point):
        raise RuntimeError("lost its way")
        yield

    monkeypatch.setitem(LOCAL, "full", broken)
    if not ours:
        monkeypatch.setitem(LOCAL, "eager", broken)
        monkeypatch.setitem(LOCAL, "plain-eager", broken)
    job = PeerJob("pico-gqa", "cpu", "run", ("full", "eager", "plain-eager"), (1,), 32, 64, 1, 3, 0)
    found = {record.arm: record.metrics for record in measured(job)}
    assert found["full"]["error"] == "RuntimeError: lost its way"
    for arm in ("eager", "plain-eager"):
        assert (found[arm].get("token_ms") is not None) == ours
        assert found[arm].get("ratio_to_ours") is None and found[arm].get("verdict") is None
    assert found["floor"]["token_ms"] > 0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("cannot read '/srv/models/a.json'\nmore", "cannot read 'a.json'"),
        ("no answer of http://127.0.0.1:30000/generate in 3 tokens/s", None),
        (f"OSError: {os.sep}tmp/x/y (as ~/z/w)", "OSError: y (as w)"),
    ],
)
def test_an_errors_first_line_loses_folders_and_no_address(text, told):
    assert first_line(text) == (text if told is None else told)

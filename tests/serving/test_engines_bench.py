"""The lab's own engine and a server on the same requests, in turns; the server is a stand-in here."""

import re
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from cglab.engine.load import Load
from cglab.errors import ServerError
from cglab.lab import engines_bench
from cglab.lab.tables import format_table
from cglab.measure.record import Record
from cglab.serving.workload import Workload
from tests.serving.stand_in import StandIn, http_server


@pytest.fixture
def failing():
    """What goes wrong: ``start`` is the number of the launch that fails."""
    return {}


@pytest.fixture
def turns(monkeypatch, fake_python, failing):
    monkeypatch.setenv("CGLAB_SGLANG_PYTHON", str(fake_python))
    started = []

    @contextmanager
    def start(arm, *, log_folder):
        started.append(arm)
        if failing.get("start") == len(started):
            Path(log_folder, "sglang-1.log").write_text("the last words")
            raise ServerError(f"it died. The log is {log_folder}/sglang-1.log", fault="died")
        with http_server() as (url, _):
            server = StandIn(python=fake_python)
            server.url = url
            yield server

    monkeypatch.setattr(engines_bench, "launch", start)
    return started


@pytest.mark.slow
def test_both_engines_get_the_same_requests_and_stand_in_one_table(turns):
    said = []
    records = list(engines_bench.engines(torch.device("cpu"), quick=True, progress=said.append))
    assert [record.arm for record in records] == ["lab", "sglang"] * 2
    assert said == ["pico-gqa: lab, instance 1", "pico-gqa: sglang, instance 1"]
    for lab, server in zip(records[::2], records[1::2], strict=True):
        assert lab.workload == server.workload and lab.workload["payload"]
        for record in (lab, server):
            asked = record.workload
            assert record.metrics["completed"] == asked["count"]
            assert record.metrics["new_tokens"] == asked["count"] * asked["new_tokens"]
            assert len(record.samples["ttft_ms"]) == asked["count"]
        assert server.metrics["ttft_verdict"] == "undecided" and "ttft_ratio" not in lab.metrics
    assert records[0].dtype == "float32" and turns[0].arguments[-2:] == ("--dtype", "float32")
    assert records[0].versions["sglang"] == "0.5.23"
    table = format_table(records)
    assert "tpot_ratio" in table and "lab" in table


@pytest.mark.slow
def test_a_server_that_fails_leaves_its_log_and_what_was_measured_before(turns, failing, monkeypatch):
    monkeypatch.setattr(engines_bench, "schedule", lambda *_: [(0, "lab"), (0, "sglang"), (1, "sglang")])
    failing["start"], records = 2, list[Record]()
    with pytest.raises(ServerError) as caught:
        records.extend(engines_bench.engines(torch.device("cpu"), quick=True))
    log = Path(re.search(r"The log is (\S+)", str(caught.value))[1])
    assert log.read_text() == "the last words"
    log.unlink()
    log.parent.rmdir()
    assert [record.arm for record in records] == ["lab", "sglang"] * 2


@pytest.mark.slow
def test_a_server_that_refuses_requests_is_no_winner(turns, monkeypatch):
    # The stand-in's client refuses thirteen tokens.
    mixed = Workload("some refused", Load(12, 2, 5, (12, 13)), 90, lane_offset=0.0)
    monkeypatch.setattr(engines_bench, "_workloads", lambda *_, **__: (mixed,))
    lab, server = engines_bench.engines(torch.device("cpu"), quick=True)
    assert lab.metrics["completed"] == 12 and 0 < server.metrics["errors"] < 12
    assert server.metrics["e2e_verdict"] == "undecided" and "e2e_ratio" not in server.metrics

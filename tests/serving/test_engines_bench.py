"""The lab's own engine and a server on the same requests, in turns; the server is a stand-in here."""

from contextlib import contextmanager

import pytest
import torch

from cglab.lab import engines_bench
from cglab.lab.tables import format_table
from tests.serving.stand_in import StandIn, http_server


@pytest.fixture
def turns(monkeypatch, fake_python):
    monkeypatch.setenv("CGLAB_SGLANG_PYTHON", str(fake_python))
    started = []

    @contextmanager
    def start(arm, *, log_folder):
        started.append(arm)
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

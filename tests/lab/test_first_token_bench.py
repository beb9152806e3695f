"""The first-token bench: one prompt for all, its first token compared, and nobody silently missing."""

from types import SimpleNamespace

import pytest
import torch

from cglab.engine.workload import steady_prefill
from cglab.errors import CglabError, InputError, NotInstalledError
from cglab.lab import peers_bench
from cglab.lab.first_token_bench import ARMS, PromptPoint, SglangPrompt, first_token
from cglab.lab.opening import open_lab

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def records():
    def nowhere(*_):
        raise NotInstalledError("no SGLang on this machine")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers_bench, "find_python", nowhere)
        return list(first_token(CPU, quick=True, tokens=(8, 24)))


def test_every_arm_and_the_floor_have_a_record_at_every_length(records):
    assert [(r.workload["tokens"], r.arm) for r in records] == [
        (length, arm) for length in (24, 8) for arm in (*ARMS, "floor")
    ]
    assert len({record.run for record in records}) == 1 and records[0].metrics["ratio_to_ours"] is None


def test_all_that_ran_choose_the_same_token_and_sglang_says_why_it_did_not(records):
    for record in records:
        if record.arm == "sglang":
            assert "no SGLang" in record.metrics["error"] and "token_ms" not in record.metrics
        elif record.arm != "floor":
            assert record.parity["verdict"] == "bitwise" and record.parity["compared"] == 1
            assert record.metrics["token_ms"] > 0 and record.metrics["replay_ms"] > 0


def test_an_unknown_arm_is_refused_with_the_good_ones():
    with pytest.raises(InputError, match="breakable, full, eager, transformers, sglang"):
        list(first_token(CPU, quick=True, arms=("piecewise",)))


@pytest.mark.parametrize("count", [0, 2, -1])
def test_a_number_of_processes_that_no_rule_judges_is_refused(count):
    with pytest.raises(InputError, match="needs 3 or more"):
        list(first_token(CPU, quick=True, processes=count))


@pytest.mark.slow
def test_several_processes_are_one_record_an_arm_with_each_process_an_instance(environment, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", environment["PYTHONPATH"])
    made = list(first_token(CPU, quick=True, arms=("eager",), tokens=(8,), processes=3))
    assert [record.arm for record in made] == ["breakable", "eager", "floor"]
    assert len({record.run for record in made}) == 1
    for record in made[:2]:
        assert record.metrics["processes"] == 3 and len(record.samples["process_ms"]) == 3
        assert record.parity["verdict"] == "bitwise" and "error" not in record.metrics
    assert made[1].metrics["verdict"] in ("faster", "slower", "no difference")


@pytest.mark.slow
def test_processes_that_end_before_they_measure_are_an_error_with_what_they_said(environment, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", environment["PYTHONPATH"])
    with pytest.raises(CglabError, match="no process measured anything; .*no model 'nobody'"):
        list(first_token(CPU, quick=True, models=("nobody",), arms=("eager",), processes=3))


def test_sglang_is_asked_for_the_labs_prompt_alone():
    asked = []

    def ask(do, **what):
        asked.append((do, what["prompts"]))
        return {"seconds": 0.25, "tokens": [9]}

    facts = {"attention": "TritonAttnBackend"}
    worker = SimpleNamespace(
        installed=SimpleNamespace(version="0.5.16"), facts=facts, captured=(), ready_s=1.0, ask=ask
    )
    with (
        open_lab("pico-gqa", device=CPU, max_batch=1, max_context=32) as lab,
        steady_prefill(lab.engine, 8) as step,
    ):
        point = PromptPoint(lab, step, lab.engine.scheduler.in_flight)
        peer = SglangPrompt(worker, point)
        assert (peer.seconds(), peer.tokens()) == (0.25, [9])
        assert asked == [("begin", [point.prompt])] * 2 and len(point.prompt) == 8
        assert peer.replay_seconds(3) is None and peer.same_weights

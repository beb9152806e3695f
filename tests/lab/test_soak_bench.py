"""The soak bench: equal rounds are told equal, and a bit that differs or memory that grows is not missed."""

from dataclasses import replace

import pytest
import torch

import cglab
from cglab.engine.workload import steady_decode
from cglab.errors import InputError
from cglab.lab.soak_bench import FixedSequence, soak
from cglab.measure.records import append

CPU = torch.device("cpu")


def test_g9_rounds_are_equal_to_each_other_and_to_an_eager_one_and_go_on_where_they_ended(tmp_path):
    (first,) = soak(CPU, quick=True, rounds=2)
    assert first.metrics["hashes_equal"] and first.metrics["ok"] and first.metrics["memory_growth_bytes"] == 0
    assert (
        first.metrics["rounds"] == 2 and first.metrics["total_steps"] == 80 and first.metrics["batches"] > 2
    )
    assert first.coverage["decode"]["captured"] == 80
    append(tmp_path / "soak.jsonl", [first])
    (second,) = soak(CPU, quick=True, rounds=2, after=str(tmp_path))
    assert second.metrics["rounds"] == 4 and second.metrics["hash"] == first.metrics["hash"]
    other = replace(
        first, id="other", metrics={**first.metrics, "hash": first.metrics["hash"] + 1}, created="2999"
    )
    append(tmp_path / "soak.jsonl", [other])
    (third,) = soak(CPU, quick=True, rounds=2, after=str(tmp_path))
    assert not third.metrics["hashes_equal"] and not third.metrics["ok"]


def test_g9_one_bit_of_one_logit_changes_the_hash(monkeypatch):
    with (
        cglab.open("pico-gqa", device="cpu", max_batch=2, max_context=32) as lab,
        steady_decode(lab.engine, 2, 32, compute=False) as held,
    ):
        sequence, runner = FixedSequence(lab, held.inputs["request_rows"], 6), lab.runner("eager")
        hashes = {sequence.run(runner), sequence.run(runner)}
        assert len(hashes) == 1
        run, calls = runner.run, []

        def flipped(live, **inputs):
            tokens, logits = run(live, **inputs)
            calls.append(live)
            if len(calls) == 4:
                bits = logits.view(torch.int16 if logits.dtype.itemsize == 2 else torch.int32)
                bits[0, 7] ^= 1
            return tokens, logits

        monkeypatch.setattr(runner, "run", flipped)
        assert sequence.run(runner) not in hashes


@pytest.mark.parametrize(
    ("options", "match"),
    [({"models": ("qwen3-9b",)}, "good models: pico-gqa, qwen3-8b"), ({"rounds": 1}, "rounds=2")],
)
def test_what_cannot_be_soaked_is_refused(options, match):
    with pytest.raises(InputError, match=match):
        list(soak(CPU, quick=True, **options))

"""The soak bench: equal rounds are told equal, and a bit that differs or memory that grows is not missed."""

from dataclasses import replace

import pytest
import torch

import cglab
from cglab.engine.workload import steady_decode
from cglab.errors import InputError
from cglab.graphs.buffers import LoadPlan
from cglab.lab.soak_bench import FixedSequence, soak
from cglab.measure.records import append

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def first():
    (record,) = soak(CPU, quick=True, rounds=2)
    return record


def test_g9_rounds_are_equal_to_each_other_and_to_an_eager_one_and_go_on_where_they_ended(first, tmp_path):
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


@pytest.mark.parametrize(
    ("earlier", "told"),
    [({"hashes_equal": False}, {"hashes_equal": False}), ({"reserved_growth_bytes": 4096.0}, {"memory_growth_bytes": 4096.0})],
)  # fmt: skip
def test_g9_what_was_wrong_in_earlier_rounds_is_wrong_in_those_that_go_on_from_them(
    first, tmp_path, earlier, told
):
    append(tmp_path / "soak.jsonl", [replace(first, metrics=first.metrics | earlier | {"ok": False})])
    (second,) = soak(CPU, quick=True, rounds=2, after=str(tmp_path))
    assert second.metrics.items() >= (told | {"rounds": 4, "ok": False}).items()


def test_g9_rounds_of_other_versions_are_not_gone_on_with(first, tmp_path):
    append(tmp_path / "soak.jsonl", [replace(first, versions=first.versions | {"torch": "2.0.0"})])
    (second,) = soak(CPU, quick=True, rounds=2, after=str(tmp_path))
    assert second.metrics["rounds"] == 2 and second.metrics["ok"]


def test_g9_a_round_that_keeps_a_block_of_the_pool_is_growth(monkeypatch):
    run, kept = FixedSequence.run, []

    def keeping(self, runner, **options):
        kept.append(self.lab.group.pool.empty((1000,), torch.float32))
        return run(self, runner, **options)

    monkeypatch.setattr(FixedSequence, "run", keeping)
    (record,) = soak(CPU, quick=True, rounds=3)
    assert record.metrics["allocated_growth_bytes"] >= 2 * 4000 and not record.metrics["ok"]
    assert record.metrics["hashes_equal"]


def test_g9_a_static_buffer_that_is_no_longer_filled_is_noticed(monkeypatch):
    load, loads = LoadPlan.load, []

    def skipping(self, values):
        loads.append(self)
        if len(loads) != 30:
            load(self, values)

    monkeypatch.setattr(LoadPlan, "load", skipping)
    (record,) = soak(CPU, quick=True, rounds=2)
    assert len(loads) >= 30 and not record.metrics["hashes_equal"] and not record.metrics["ok"]


def test_g9_a_slot_that_no_step_of_the_round_has_written_is_no_other_s():
    """Read in place of another such slot it changes the hash, which in a cache of zeros it would not."""
    with (
        cglab.open("pico-gqa", device="cpu", max_batch=2, max_context=64) as lab,
        steady_decode(lab.engine, 2, 64, compute=False) as held,
    ):
        rows = held.inputs["request_rows"]
        sequence, runner = FixedSequence(lab, rows, 6), lab.runner("full")
        assert sequence.positions.min() >= lab.engine.kv.page_size, (
            "the first pages are read and never written"
        )
        table, wanted = lab.engine.kv.full.page_table, sequence.run(runner)
        table[rows, 0] = table[rows, 0].flip(0)
        assert sequence.run(runner) != wanted
        table[rows, 0] = table[rows, 0].flip(0)
        assert sequence.run(runner) == wanted


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
    [
        ({"models": ("qwen3-9b",)}, "'qwen3-9b' is no model of a soak here; good names: pico-gqa"),
        ({"models": ("pico-gqa", "qwen3-8b")}, "good names: pico-gqa; larger ones need a GPU and no quick"),
        ({"rounds": 1}, "rounds=2"),
    ],
)
def test_what_cannot_be_soaked_is_refused(options, match):
    with pytest.raises(InputError, match=match):
        list(soak(CPU, quick=True, **options))

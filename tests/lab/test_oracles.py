"""The three oracles over random sequences, and the four planted faults that they must notice."""

from dataclasses import replace

import pytest
import torch

from cglab.errors import ToggleError
from cglab.lab.checking import CASES, LATENT_ALONE, OF_LATENT, check_technique
from cglab.lab.plants import PLANTS, planted
from cglab.lab.techniques import TECHNIQUES
from cglab.runners.decode import DecodeRunner

CPU = torch.device("cpu")
CHECKED = set(CASES)
SEQUENCES = dict.fromkeys(sorted(CASES), (16, 1)) | {"decode": (50, 6), "prefill": (40, 1)}
"""Of every technique: how many in a test, and from how many seeds; each seed records everything anew."""
AT_LENGTH = 200


def test_every_technique_is_checked():
    assert set(TECHNIQUES) == CHECKED


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "seed"), [(name, seed) for name, (_, seeds) in SEQUENCES.items() for seed in range(seeds)]
)
def test_p11_p12_p13_p14_p15_b26_b28_b32_random_sequences_hold_against_three_oracles(name, seed):
    hold(name, SEQUENCES[name][0], seed)


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted(CASES))
def test_many_random_sequences_hold_against_three_oracles(name):
    hold(name, AT_LENGTH, 100)


def hold(name, cases, seed):
    found = check_technique(name, cases, device=CPU, seed=seed)
    assert found.ok, str(found)
    assert found.cases == cases and found.steps > 2 * cases and 0.4 < found.captured / found.steps < 0.9


@pytest.mark.parametrize("name", sorted(CHECKED - set(LATENT_ALONE)))
def test_p11_p27_b26_sequences_over_windows_hold_against_three_oracles(name):
    found = check_technique(name, 8, device=CPU, windowed=True)
    assert found.ok and found.captured, str(found)
    assert f"{name} on pico-gqa with windows (tape, float32): ok" in str(found)


@pytest.mark.parametrize("name", OF_LATENT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sequences_of_latent_attention_hold_against_three_oracles(name, dtype):
    found = check_technique(name, 2 if name == "decode" else 4, device=CPU, latent=True, dtype=dtype)
    assert found.ok and found.captured, str(found)
    assert f"{name} on dsa-tiny (tape, {str(dtype)[6:]}): ok" in str(found)


def test_a_fault_in_the_window_pool_alone_is_caught(monkeypatch):
    """Padding that writes to the first page that is given out, as the plant of that name does in the full pool."""
    plain = DecodeRunner.slots

    def slots(self):
        found = plain(self)
        return {**found, "window_out_slots": replace(found["window_out_slots"], pad=self.kv.page_size)}

    monkeypatch.setattr(DecodeRunner, "slots", slots)
    found = check_technique("decode", 4, device=CPU, windowed=True)
    assert not found.ok and any("kv.sliding" in each["detail"] for each in found.mismatches), str(found)


@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=str)
def test_bitwise_in_low_precision_too(dtype):
    found = check_technique("decode", 8, device=CPU, dtype=dtype)
    assert found.ok and found.captured, str(found)


@pytest.mark.parametrize("plant", sorted(PLANTS))
def test_a_planted_fault_is_caught(plant):
    found = check_technique("decode", 8, device=CPU, plant=plant)
    assert not found.ok and found.mismatches
    caught_by = {"stale-tail": 3, "live-slot-in-padding": 2, "missed-copy-in": 2} | dict.fromkeys(
        ("untrimmed-output", "rounding"), 1
    )
    assert caught_by[plant] in {each["oracle"] for each in found.mismatches}, found.mismatches


def test_a_plant_is_taken_out_again():
    with pytest.raises(RuntimeError, match="out"), planted("stale-tail"):
        raise RuntimeError("out")
    assert check_technique("decode", 4, device=CPU).ok


def test_latent_attention_where_it_is_not_checked_is_refused():
    for options in ({"name": "verify", "latent": True}, {"name": "dsa_attention", "windowed": True}):
        with pytest.raises(
            ToggleError, match="without these are decode, pp_prefill, dsa_attention, dsa_indexer_prep"
        ):
            check_technique(cases=1, device=CPU, **options)


@pytest.mark.parametrize(
    ("name", "cases", "plant", "told"),
    [
        ("verfy", 1, None, "good names: decode"),
        ("decode", 0, None, "at least 1"),
        ("decode", 1, "stale", "good names: stale-tail"),
    ],
)
def test_bad_input_is_told_with_the_good_values(name, cases, plant, told):
    with pytest.raises(ToggleError, match=told):
        check_technique(name, cases, device=CPU, plant=plant)

"""The decode bench: what its records hold, and that the arm of transformers is the step that it claims to be."""

from dataclasses import replace

import pytest
import torch

from cglab.lab import decode_bench, transformers_arm
from cglab.lab.transformers_arm import ARM, CACHES, MISSING, CachedStep, random_transformers
from cglab.models.config import Llama3Scaling, ModelConfig
from cglab.models.decoder import Decoder
from cglab.models.presets import PRESETS

CPU = torch.device("cpu")
SMALL = ModelConfig(
    "Qwen3ForCausalLM", vocab_size=97, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=8, max_position=64, qk_norm=True,
)  # fmt: skip


@pytest.fixture(scope="module")
def records():
    return list(decode_bench.decode(CPU, quick=True))


def test_eager_and_transformers_take_turns_and_the_ratio_is_of_their_medians(records):
    arms = {record.arm: record for record in records}
    assert list(arms) == ["eager", "full", "breakable", ARM]
    times = {arm: record.metrics["step_ms"] for arm, record in arms.items()}
    assert arms["eager"].metrics["ratio_to_transformers"] == pytest.approx(times["eager"] / times[ARM])
    assert all("ratio_to_transformers" not in arms[arm].metrics for arm in ("full", "breakable", ARM))
    assert len({record.run for record in records}) == 1
    assert all(record.workload == arms["eager"].workload for record in records)


def test_transformers_computes_something_else_and_its_record_says_so(records):
    theirs, eager = records[-1], records[0]
    assert theirs.parity is None and theirs.coverage is None
    assert theirs.notes == eager.notes
    assert "another computation" in theirs.notes and "no parity" in theirs.notes
    chosen = theirs.notes.split("On ")[1].split(",")[0]
    assert chosen in CACHES and all(f"{cache} " in theirs.notes for cache in CACHES)


def test_kv_bytes_are_part_of_the_floor(records):
    for record in records:
        # pico-gqa in float32: keys and values of every layer, of one request of 64 tokens
        assert 0 < record.metrics["kv_bytes"] < record.metrics["floor_bytes"]


def test_without_transformers_the_eager_record_says_so(monkeypatch):
    monkeypatch.setattr(decode_bench, "installed", lambda: False)
    told = []
    records = list(decode_bench.decode(CPU, quick=True, progress=told.append))
    assert [record.arm for record in records] == ["eager", "full", "breakable"]
    assert MISSING in told and [record.notes for record in records] == [MISSING, "", ""]
    assert "ratio_to_transformers" not in records[0].metrics


def test_installed_is_asked_of_the_environment(monkeypatch):
    assert transformers_arm.installed()
    monkeypatch.setattr(transformers_arm, "find_spec", lambda name: None)
    assert not transformers_arm.installed()


WINDOWED = {"sliding_window": 8, "window_layers": (1,)}
LLAMA = {
    "architecture": "LlamaForCausalLM",
    "qk_norm": False,
    "rope_scaling": Llama3Scaling(8.0, 1.0, 4.0, 32),
}


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_published_shape_has_matrices_of_one_size_in_transformers(name):
    meta = torch.device("meta")  # norms aside: ours repeats those of the heads
    ours, theirs = (
        sum(parameter.numel() for name, parameter in model.named_parameters() if "norm" not in name)
        for model in (
            Decoder(PRESETS[name], device=meta, dtype=torch.bfloat16),
            random_transformers(PRESETS[name], device=meta, dtype=torch.bfloat16),
        )
    )
    assert ours == theirs


@pytest.mark.parametrize("fields", [{}, WINDOWED, LLAMA], ids=["qwen3", "windows", "llama3"])
def test_every_field_of_the_shape_arrives(tmp_path, fields):
    config = replace(SMALL, **fields)
    random_transformers(config, device=CPU, dtype=torch.float32).save_pretrained(tmp_path)
    read = ModelConfig.from_folder(tmp_path)
    # Tokens that open and end a text do not matter to a step's time.
    assert replace(read, bos_token_id=None, eos_token_ids=()) == config


@pytest.mark.parametrize("cache", CACHES)
def test_a_cached_step_is_the_models_own_greedy_token_and_starts_anew(cache):
    torch.manual_seed(1)
    model = random_transformers(SMALL, device=CPU, dtype=torch.float32)
    step = CachedStep(model, cache, 3, 12)
    first = step.tokens
    steps = [step().tolist() for _ in range(4)]
    ids = torch.randint(0, 97, (3, 11), generator=torch.Generator().manual_seed(0))
    for want in (first.tolist(), *steps):
        token = model(input_ids=ids).logits[:, -1].argmax(-1, keepdim=True)
        assert token.tolist() == want
        ids = torch.cat([ids, token], 1)
    step.restart()
    assert [step().tolist() for _ in range(4)] == steps

"""The scripts that make pico-dsa: windows attend as inference does, every part learns, and what is written is read."""

import json
import shutil
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from cglab.models.loading import load_model, random_model
from tests.models.latent import TINY, LatentRequests
from tests.models.test_dsa import CLOSE


@pytest.fixture
def model():
    return random_model(TINY, device="cpu", dtype=torch.float32, seed=1)


@torch.no_grad()
def test_windows_attend_as_the_paged_step_does(script, model):
    windows = torch.randint(0, 97, (3, 20))
    attend = script("latent_windows").LatentWindows(20, TINY.index_topk)
    found = model(windows.flatten(), torch.arange(20).repeat(3), attend)
    expected = LatentRequests(model, 3, 24).step(dict(enumerate(windows)))
    torch.testing.assert_close(found, expected, **CLOSE)
    assert not attend.loads and not attend.distances


def test_continuing_texts_over_a_cache_is_continuing_without_one(script, model):
    prompts = torch.randint(0, 97, (2, 7))
    continued = script("pico_continuations").continue_texts(model, prompts, 9)
    windows, train = script("latent_windows").LatentWindows, script("train_pico")
    for prompt, tokens in zip(prompts.tolist(), continued.tolist(), strict=True):
        greedy = train.continue_greedily(
            model, prompt, 9, attention=lambda window: windows(window, TINY.index_topk)
        )
        assert greedy == tokens


def test_every_weight_learns_and_an_indexer_only_where_its_layer_attends(script):
    train = script("train_pico_dsa")
    model = random_model(TINY, device="cpu", dtype=torch.float32, seed=1).requires_grad_()
    for router in train.routers_of(model):
        router.bias.requires_grad_(requires_grad=False)
    windows = torch.randint(0, 97, (4, 21))
    loss, loads = train.taught_loss(model, windows, TINY.index_topk)
    loss.backward()
    still = [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is None or not parameter.grad.any()
    ]
    assert still == [f"blocks.{layer}.feed_forward.router.bias" for layer in (1, 2, 3)]
    assert loads.shape == (3, TINY.num_experts) and (loads.sum(-1) == 4 * 20 * TINY.experts_per_token).all()
    indexer = dict(model.blocks[1].attention.indexer.named_parameters())
    taught = {name: parameter.grad.clone() for name, parameter in indexer.items()}
    model.zero_grad()
    attend = script("latent_windows").LatentWindows(20, TINY.index_topk)
    script("train_pico").window_loss(model, windows, lambda _: attend).backward()
    assert all(parameter.grad is None for parameter in indexer.values())
    assert all(grad.any() for grad in taught.values())


def test_a_distance_is_none_where_the_scores_say_where_the_layer_attends(script):
    attend = script("latent_windows").LatentWindows(8, None, taught=True)
    attend.seen = torch.ones(8, 8, dtype=torch.bool).tril()
    attend.scores = torch.randn(2, 8, 8)
    attended = attend.scores.masked_fill(~attend.seen, -torch.inf).softmax(-1)
    attend._teach(attended)
    attend._teach(attended.roll(1, 0))
    assert abs(attend.distances[0]) < 1e-6 and attend.distances[1] > 0.05


def test_balancing_moves_biases_towards_experts_with_few_tokens(script, model):
    train = script("train_pico_dsa")
    routers = train.routers_of(model)
    assert len(routers) == 3
    loads = torch.tensor([[9.0, 1.0, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0]] * 3)
    train.balance(routers, loads, 0.01)
    assert routers[2].bias.tolist() == pytest.approx([-0.01, 0.01, 0, 0, 0, 0, 0, 0])


def test_a_few_steps_lower_the_loss_and_what_is_written_is_read_back(script, root, tmp_path):
    train, pico, card = script("train_pico_dsa"), script("train_pico"), script("pico_card")
    shape = replace(train.SHAPE, num_layers=2, shared_layers=(1,), hidden_size=32)
    model = random_model(shape, device="cpu", dtype=torch.float32)
    pico.initialise(model, seed=0)
    routers = train.routers_of(model)
    model.requires_grad_()
    routers[0].bias.requires_grad_(requires_grad=False)
    optimiser = pico.optimiser_of(model, 3e-3)
    windows, losses = torch.randint(0, 50, (2, 97)), []
    for kept in [None] * 6 + [shape.index_topk] * 6:
        loss, loads = train.taught_loss(model, windows, kept)
        losses.append(loss.item())
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        train.balance(routers, loads, 1e-3)
    assert losses[-1] < losses[0] - 0.2 and routers[0].bias.any()

    data, shipped = tmp_path / "data", root / "data/models/pico-gqa"
    data.mkdir()
    for name in ("tokenizer.json", "prompts.json"):
        shutil.copy(shipped / name, data / name)
    corpus = json.loads((shipped / "card.json").read_text())["corpus"]
    (data / "manifest.json").write_text(json.dumps(corpus))
    facts = {"held_out_loss": 1.0, "train_loss": 0.5, "steps": 8, "planned_steps": 8, "batch_tokens": 128}
    facts |= {"epochs": 0.1, "seed": 0, "peak_learning_rate": 3e-3, "device": "CPU", "seconds": 1.0}
    out = tmp_path / "pico-test"
    card.write_model(model, data, out, facts, lambda ids, count: ids[:count])
    loaded = load_model(out, device="cpu", dtype=torch.float32)
    assert loaded.config == replace(shape, bos_token_id=None) and loaded.weights == "trained"
    for name, parameter in model.named_parameters():
        kept = parameter if "router" in name else parameter.bfloat16().float()
        assert loaded.model.get_parameter(name).equal(kept), name
    assert "train_pico_dsa.py" in (out / "README.md").read_text()


def test_the_script_trains_in_two_stages_and_keeps_the_best_folder(script, root, tmp_path, monkeypatch):
    train, pico = script("train_pico_dsa"), script("train_pico")
    data, out, kept = tmp_path / "data", tmp_path / "pico-test", []
    data.mkdir()
    shipped = root / "data/models/pico-gqa"
    for name in ("tokenizer.json", "prompts.json"):
        shutil.copy(shipped / name, data / name)
    corpus = json.loads((shipped / "card.json").read_text())["corpus"]
    (data / "manifest.json").write_text(json.dumps(corpus))
    for name, count in (("train", 600), ("held_out", 200)):
        np.save(data / f"{name}.npy", np.arange(count, dtype=np.uint16) % 7)
    shape = replace(train.SHAPE, num_layers=2, shared_layers=(1,), hidden_size=32, index_topk=8)
    learn = train.taught_loss
    monkeypatch.setattr(train, "SHAPE", shape)
    monkeypatch.setattr(train, "taught_loss", lambda *given: (kept.append(given[2]), learn(*given))[1])
    monkeypatch.setattr(pico, "CONTEXT", 24)
    monkeypatch.setattr(script("pico_card"), "SAMPLE_TOKENS", 2)
    options = ["--steps", "8", "--evaluate-every", "4", "--batch", "4", "--device", "cpu", "--no-compile"]
    monkeypatch.setattr(sys, "argv", ["train", "--data", str(data), "--out", str(out), *options])
    train.main()
    assert kept == [None] * 4 + [8] * 4
    card = json.loads((out / "card.json").read_text())
    assert (card["steps"], card["planned_steps"]) == (8, 8) and card["held_out_loss"] < 8.3  # of 4096 tokens
    routers = train.routers_of(load_model(out, device="cpu", dtype=torch.float32).model)
    assert len(routers) == 1 and 0 < routers[0].bias.abs().max() <= 0.0081


def test_the_written_folder_is_one_of_transformers(script, tmp_path):
    """Not its weights alone: a sparse selection, a shared layer and the routers are where transformers looks for them."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    train, card = script("train_pico_dsa"), script("pico_card")
    shape = replace(TINY, index_heads=16)
    model = random_model(shape, device="cpu", dtype=torch.bfloat16, seed=4)
    save_file(card.checkpoint_tensors(model), tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(card.hugging_face_config(shape)))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    ours = load_model(tmp_path, device="cpu", dtype=torch.float32).model
    ids = torch.randint(0, 97, (20,))
    with torch.no_grad():
        expected = theirs(ids.unsqueeze(0)).logits[0]
        found = ours.logits(LatentRequests(ours, 1, 24).step({0: ids}))
    torch.testing.assert_close(found, expected, **CLOSE)
    assert train.SHAPE.index_topk < 128

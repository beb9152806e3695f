"""The scripts that make pico-gqa: what is kept out of training, and that what was trained is written."""

import json
import math
import shutil
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from cglab.models.loading import load_model


@pytest.fixture
def scripts(root, monkeypatch):
    monkeypatch.syspath_prepend(root / "scripts")
    import pico_card
    import pico_corpus
    import train_pico

    return pico_corpus, train_pico, pico_card


def test_held_out_files_are_whole_files_chosen_by_name_alone(scripts, root):
    corpus, _, _ = scripts
    share = sum(corpus.is_held_out(f"package/module_{i}.py") for i in range(5000)) / 5000
    assert 0.015 < share < 0.025
    card = json.loads((root / "data/models/pico-gqa/card.json").read_text())["corpus"]
    assert card["held_out_files"] and all(map(corpus.is_held_out, card["held_out_files"]))
    assert card["train_files"] + len(card["held_out_files"]) == card["files"]


def test_the_corpus_is_the_library_sorted_without_packages_and_local_paths(scripts, tmp_path):
    corpus, _, _ = scripts
    files = [
        "b.py",
        "a/c.py",
        "site-packages/x.py",
        "_sysconfigdata_linux.py",
        "config-3.11/y.py",
        "data.txt",
    ]
    for name in files:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"# {name}\n")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    found, skipped = corpus.read_corpus(tmp_path)
    assert found == {"a/c.py": "# a/c.py\n", "b.py": "# b.py\n"} and skipped == 1
    assert corpus.corpus_hash(found) != corpus.corpus_hash(found | {"b.py": "# c.py\n"})


def test_the_learning_rate_rises_falls_and_ends_small(scripts):
    _, train, _ = scripts
    rates = [train.learning_rate(step, 1000, 1.0) for step in range(1, 1001)]
    assert max(rates) == rates[99] == 1.0 and rates[0] == 0.01 and math.isclose(rates[-1], 0.02)
    assert all(later < earlier for earlier, later in pairwise(rates[99:]))


def test_windows_of_an_epoch_cover_the_text_without_overlap(scripts):
    _, train, _ = scripts
    tokens = torch.arange(9 * train.CONTEXT)
    batch = next(train.batches(tokens, 8, seed=0))
    assert batch.shape == (8, train.CONTEXT + 1) and torch.equal(batch[:, 1:], batch[:, :-1] + 1)
    assert batch[:, :-1].unique().numel() == 8 * train.CONTEXT
    assert torch.equal(batch, next(train.batches(tokens, 8, seed=0)))


def test_a_trained_model_is_written_whole_and_read_back_to_the_bit(scripts, root, tmp_path, tiny):
    """Trains a few steps: the loss falls, and the heads' norms stay one for queries and one for keys."""
    _, train, card = scripts
    model = tiny(vocab_size=4096, qk_norm=True, num_layers=1).requires_grad_()
    train.initialise(model, seed=0)
    train.tie_head_norms(model)
    optimiser = train.optimiser_of(model, 3e-3)
    windows = torch.randint(0, 50, (2, 65))
    losses = []
    for _ in range(8):
        loss = train.window_loss(model, windows)
        losses.append(loss.item())
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    assert losses[-1] < losses[0] - 0.2
    queries, keys = model.blocks[0].attention.head_norm.split((6, 2))
    assert queries.unique(dim=0).shape[0] == keys.unique(dim=0).shape[0] == 1
    assert not torch.equal(queries[0], torch.ones(16)) and not torch.equal(queries[0], keys[0])

    data = tmp_path / "data"
    data.mkdir()
    shipped = root / "data/models/pico-gqa"
    for name in ("tokenizer.json", "prompts.json"):
        shutil.copy(shipped / name, data / name)
    corpus = json.loads((shipped / "card.json").read_text())["corpus"]
    (data / "manifest.json").write_text(json.dumps(corpus))
    facts = {"held_out_loss": 1.0, "train_loss": 0.5, "steps": 8, "planned_steps": 8, "batch_tokens": 128}
    facts |= {"epochs": 0.1, "seed": 0, "peak_learning_rate": 3e-3, "device": "CPU", "seconds": 1.0}
    out = tmp_path / "pico-test"
    card.write_model(model, data, out, facts, lambda ids, count: ids[:count])

    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in shipped.iterdir())
    assert not list(tmp_path.glob(".pico-test*"))
    loaded = load_model(out, device="cpu", dtype=torch.bfloat16)
    assert loaded.config == replace(model.config, bos_token_id=None)
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded.model.get_parameter(name), parameter.to(torch.bfloat16)), name
    written = json.loads((out / "card.json").read_text())
    bits = 1 / math.log(2) * corpus["held_out_tokens"] / corpus["held_out_bytes"]
    assert math.isclose(written["held_out_bits_per_byte"], bits)

"""The shipped specimen: complete, small, and computed as transformers computes it."""

import json

import pytest
import torch

from cglab.models.loading import load_model

REQUESTS, NEW = 20, 64


@pytest.fixture(scope="module")
def folder(root):
    return root / "data/models/pico-gqa"


@pytest.fixture(scope="module")
def prompts(folder):
    return json.loads((folder / "prompts.json").read_text())


@pytest.fixture(scope="module")
def loaded():
    return load_model("pico-gqa", device="cpu", dtype=torch.float32)


@pytest.mark.slow
@torch.no_grad()
def test_greedy_tokens_and_logits_equal_those_of_transformers_on_held_out_prompts(
    folder, prompts, loaded, paged
):
    from transformers import AutoModelForCausalLM

    prompts = [prompt["ids"] for prompt in prompts[:REQUESTS]]
    runner = paged(loaded.model, REQUESTS, 256 + NEW, page_size=16)
    hidden = runner.prefill(dict(enumerate(prompts)))
    lasts = torch.tensor([len(prompt) for prompt in prompts]).cumsum(0) - 1
    logits = [loaded.model.logits(hidden[lasts])]
    for _ in range(NEW - 1):
        step = runner.decode(dict(enumerate(logits[-1].argmax(-1, keepdim=True))))
        logits.append(loaded.model.logits(step))
    ours = torch.stack(logits, dim=1)
    tokens = ours.argmax(-1)

    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    theirs.generation_config.eos_token_id = None  # all of them run to the full length
    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    generated = theirs.generate(padded, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(tokens, generated[:, longest:])

    for prompt, own, row in zip(prompts, ours, tokens, strict=True):
        sequence = torch.tensor([[*prompt, *row[:-1].tolist()]])
        expected = theirs(sequence).logits[0, len(prompt) - 1 :]
        torch.testing.assert_close(own, expected, rtol=0, atol=1e-4)


def test_the_prompts_are_held_out_mixed_in_length_and_say_the_same_as_their_tokens(folder, prompts, loaded):
    card = json.loads((folder / "card.json").read_text())
    assert len(prompts) >= 64 and {prompt["file"] for prompt in prompts} <= set(
        card["corpus"]["held_out_files"]
    )
    lengths = [len(prompt["ids"]) for prompt in prompts]
    assert (min(lengths), max(lengths)) == (16, 256) and len(set(lengths)) >= 8
    for prompt in prompts:
        assert loaded.tokenizer.encode(prompt["text"]) == prompt["ids"]
        assert loaded.tokenizer.decode(prompt["ids"]) == prompt["text"]


def test_the_folder_is_small_and_its_card_tells_where_it_came_from(folder, loaded):
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 12e6
    card = json.loads((folder / "card.json").read_text())
    assert len(card["corpus"]["corpus_sha256"]) == 64 and card["corpus"]["python"].startswith("3.")
    readme = (folder / "README.md").read_text()
    for fact in (
        card["corpus"]["corpus_sha256"],
        f"{card['held_out_loss']:.4f}",
        "specimen",
        "PSF License",
    ):
        assert fact in readme
    assert (
        loaded.weights == "trained" and loaded.config.eos_token_ids == (0,) and loaded.config.tie_embeddings
    )
    assert loaded.tokenizer.vocab_size == loaded.config.vocab_size


@torch.no_grad()
def test_the_weights_predict_held_out_text_about_as_well_as_the_card_says(folder, prompts, loaded, whole):
    """Short prompts lack context, so they may cost more than the card's loss: 1.5 nats at most."""
    card = json.loads((folder / "card.json").read_text())
    losses = []
    for prompt in prompts[:12]:
        ids = torch.tensor(prompt["ids"])
        logits = loaded.model.logits(whole(loaded.model, ids))
        losses.append(torch.nn.functional.cross_entropy(logits[:-1], ids[1:]))
    assert torch.stack(losses).mean() < card["held_out_loss"] + 1.5

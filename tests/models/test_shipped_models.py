"""The shipped specimens: complete, small, and computed as transformers computes them."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from cglab.models.dsa_config import DsaConfig
from cglab.models.loading import LoadedModel, load_model
from tests.models.latent import LatentRequests

NEW = 64
REQUESTS = {"pico-gqa": 20, "pico-dsa": 8}


@dataclass
class Specimen:
    """A shipped folder, what it says of itself, and the model in float32."""

    name: str
    folder: Path
    prompts: list
    card: dict
    loaded: LoadedModel


@pytest.fixture(scope="module", params=REQUESTS)
def specimen(root, request):
    folder = root / "data/models" / request.param
    prompts, card = (json.loads((folder / name).read_text()) for name in ("prompts.json", "card.json"))
    loaded = load_model(request.param, device="cpu", dtype=torch.float32)
    return Specimen(request.param, folder, prompts, card, loaded)


@pytest.fixture
def steps(paged):
    """A function that opens a cache for so many requests: chunks in, hidden states of their tokens out."""

    def start(model, requests, max_context):
        if isinstance(model.config, DsaConfig):
            return LatentRequests(model, requests, max_context, page_size=16).step
        return paged(model, requests, max_context, page_size=16).prefill

    return start


@pytest.mark.slow
@torch.no_grad()
def test_greedy_tokens_and_logits_equal_those_of_transformers_on_held_out_prompts(specimen, steps):
    from transformers import AutoModelForCausalLM

    model, count = specimen.loaded.model, REQUESTS[specimen.name]
    prompts = sorted((prompt["ids"] for prompt in specimen.prompts), key=len)[-count:]
    step = steps(model, count, 256 + NEW)
    hidden = step(dict(enumerate(prompts)))
    lasts = torch.tensor([len(prompt) for prompt in prompts]).cumsum(0) - 1
    logits = [model.logits(hidden[lasts])]
    for _ in range(NEW - 1):
        logits.append(model.logits(step(dict(enumerate(logits[-1].argmax(-1, keepdim=True))))))
    ours = torch.stack(logits, dim=1)

    theirs = AutoModelForCausalLM.from_pretrained(specimen.folder, dtype=torch.float32).eval()
    for prompt, own in zip(prompts, ours, strict=True):
        # The best token after each of ours is ours: by induction both say the same, greedily.
        tokens = own.argmax(-1)
        sequence = torch.tensor([[*prompt, *tokens[:-1].tolist()]])
        expected = theirs(sequence).logits[0, len(prompt) - 1 :]
        assert torch.equal(expected.argmax(-1), tokens)
        torch.testing.assert_close(own, expected, rtol=0, atol=1e-4)


def test_the_prompts_are_held_out_mixed_in_length_and_say_the_same_as_their_tokens(specimen):
    prompts, tokenizer = specimen.prompts, specimen.loaded.tokenizer
    held_out = set(specimen.card["corpus"]["held_out_files"])
    assert len(prompts) >= 64 and {prompt["file"] for prompt in prompts} <= held_out
    lengths = [len(prompt["ids"]) for prompt in prompts]
    assert (min(lengths), max(lengths)) == (16, 256) and len(set(lengths)) >= 8
    for prompt in prompts:
        assert tokenizer.encode(prompt["text"]) == prompt["ids"]
        assert tokenizer.decode(prompt["ids"]) == prompt["text"]


def test_the_folder_is_small_and_its_card_tells_where_it_came_from(specimen):
    card, loaded = specimen.card, specimen.loaded
    assert sum(file.stat().st_size for file in specimen.folder.iterdir()) <= 12e6
    assert sum(each.numel() for each in loaded.model.parameters()) == card["parameters"]
    assert len(card["corpus"]["corpus_sha256"]) == 64 and card["corpus"]["python"].startswith("3.")
    readme = (specimen.folder / "README.md").read_text()
    for fact in (card["corpus"]["corpus_sha256"], f"{card['held_out_loss']:.4f}", "specimen", "PSF License"):
        assert fact in readme
    assert (
        loaded.weights == "trained" and loaded.config.eos_token_ids == (0,) and loaded.config.tie_embeddings
    )
    assert loaded.tokenizer.vocab_size == loaded.config.vocab_size


@pytest.mark.parametrize("specimen", ["pico-dsa"], indirect=True)
def test_the_one_with_latent_attention_has_every_kind_of_layer_and_prompts_that_are_sparse(specimen):
    config = specimen.loaded.config
    assert config.shared_layers and config.dense_layers < config.num_layers and config.num_experts > 1
    lengths = [len(prompt["ids"]) for prompt in specimen.prompts]
    assert min(lengths) < config.index_topk < max(lengths) // 2


@torch.no_grad()
def test_the_weights_predict_held_out_text_about_as_well_as_the_card_says(specimen, steps):
    """Short prompts lack context, so they may cost more than the card's loss: 1.5 nats at most."""
    model, losses = specimen.loaded.model, []
    for prompt in specimen.prompts[:12]:
        ids = torch.tensor(prompt["ids"])
        logits = model.logits(steps(model, 1, len(ids))({0: ids}))
        losses.append(torch.nn.functional.cross_entropy(logits[:-1], ids[1:]))
    assert torch.stack(losses).mean() < specimen.card["held_out_loss"] + 1.5

"""Continues training text with a pico model: what its drafts learn from, as speculation follows the target's own text.

    PYTHONPATH=. python scripts/pico_continuations.py [--model data/models/pico-gqa] [--data .work/pico]
    PYTHONPATH=. python scripts/pico_continuations.py --batch 2048 --temperatures 0 --stray 1  # for pico-gqa-dflash

Reads ``train.npy`` of ``pico_corpus.py`` and writes ``continuations.npz``: for each prompt length an array
[texts, length + 96] uint16, prompts from training files with the target's greedy and sampled continuations, and
``continuations.json`` (seed, counts, hash). No held-out text is read. The same machine and seed give the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from latent_windows import LatentCache
from torch import Tensor

from cglab.models.config import ModelConfig
from cglab.models.decoder import Decoder
from cglab.models.dsa_config import DsaConfig
from cglab.models.loading import load_model

CONTINUED = 96
PROMPT_LENGTHS = (16, 32, 64, 128, 192, 256)
TEMPERATURES = (0.0, 0.5, 0.0, 0.8)  # of the batches of one prompt length in turn; 0 is greedy


class WindowCache:
    """Attention over equally long texts, and the keys and values that they have so far.

    Attributes:
        stored: positions of each text that every layer holds.
        keys: [layers, texts, kv_heads, length, head_dim].
        values: likewise.
    """

    def __init__(self, config: ModelConfig, texts: int, length: int, like: Tensor) -> None:
        """Allocates for ``texts`` of up to ``length`` positions, in the dtype and on the device of ``like``."""
        shape = (config.num_layers, texts, config.num_kv_heads, length, config.head_dim)
        self.texts, self.stored = texts, 0
        self.keys, self.values = like.new_zeros(shape), like.new_zeros(shape)

    def __call__(self, layer_index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See ``decoder.Attend``: many positions of each text at first, one of each from then on."""
        width = query.shape[0] // self.texts
        end = self.stored + width
        keys, values = (cache[layer_index, :, :, :end] for cache in (self.keys, self.values))
        for cache, new in ((keys, key), (values, value)):
            cache[:, :, self.stored :] = new.unflatten(0, (self.texts, width)).transpose(1, 2)
        if width == 1:  # the query heads of a group side by side: keys and values are read once
            grouped = query.view(self.texts, keys.shape[1], -1, keys.shape[3])
            return F.scaled_dot_product_attention(grouped, keys, values).flatten(1)
        heads = query.unflatten(0, (self.texts, width)).transpose(1, 2)
        attended = F.scaled_dot_product_attention(heads, keys, values, is_causal=True, enable_gqa=True)
        return attended.transpose(1, 2).flatten(0, 1).flatten(1)


def cache_of(model: Decoder, texts: int, length: int) -> WindowCache | LatentCache:
    """What a model's layers ask for equally long texts of up to ``length`` positions."""
    if isinstance(model.config, DsaConfig):
        return LatentCache(model.config, texts, length, model.norm.weight)
    return WindowCache(model.config, texts, length, model.norm.weight)


@torch.no_grad()
def continue_texts(
    model: Decoder, prompts: Tensor, count: int, *, temperature: float = 0.0, seed: int = 0
) -> Tensor:
    """Continues equally long prompts.

    Args:
        model: the target.
        prompts: [texts, length] int64.
        count: tokens to add.
        temperature: of sampling; 0 takes the most likely token.
        seed: of sampling.

    Returns:
        [texts, count] int64. Nothing ends at an end of text.
    """
    texts, length = prompts.shape
    cache = cache_of(model, texts, length + count)
    generator = torch.Generator(prompts.device).manual_seed(seed)
    positions = torch.arange(length, device=prompts.device).repeat(texts)
    inputs, chosen = prompts.flatten(), []
    for _ in range(count):
        hidden = model(inputs, positions, cache).unflatten(0, (texts, -1))[:, -1]
        cache.stored += len(positions) // texts
        logits = model.logits(hidden).float()
        if temperature:
            noise = torch.empty_like(logits).exponential_(generator=generator)
            logits = logits / temperature - noise.log()  # the maximum of these is a sample
        inputs = logits.argmax(-1)
        positions = torch.full_like(inputs, cache.stored)
        chosen.append(inputs)
    return torch.stack(chosen, dim=1)


def choose_prompts(tokens: np.ndarray, length: int, count: int, seed: int) -> Tensor:
    """Prompts [count, length] int64 from random places of the training text; none holds the end of a document."""
    generator = np.random.default_rng((seed, length))
    chosen: list[np.ndarray] = []
    while len(chosen) < count:
        start = int(generator.integers(len(tokens) - length))
        prompt = tokens[start : start + length]
        if prompt.all():  # token 0 ends a document
            chosen.append(prompt)
    return torch.from_numpy(np.stack(chosen).astype(np.int64))


def stray(model: Decoder, prompts: Tensor, temperature: float, seed: int) -> Tensor:
    """Prompts [texts, length] int64 whose second half is sampled from the target instead.

    A target knows its training files by heart, and is easier to draft for there than on text that it never saw.

    Args:
        model: the target.
        prompts: from training files.
        temperature: of sampling.
        seed: likewise.
    """
    kept, replaced = prompts.tensor_split((prompts.shape[1] // 2,), dim=1)
    sampled = continue_texts(model, kept, replaced.shape[1], temperature=temperature, seed=seed)
    return torch.cat((kept, sampled), dim=1)


def main() -> None:
    """Reads the command line and writes the continuations."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("data/models/pico-gqa"))
    parser.add_argument("--data", type=Path, default=Path(".work/pico"))
    parser.add_argument("--batches", type=int, default=16, help="for each prompt length")
    parser.add_argument("--batch", type=int, default=128, help="texts at a time")
    parser.add_argument(
        "--temperatures", type=float, nargs="+", default=TEMPERATURES, help="of batches in turn"
    )
    parser.add_argument("--stray", type=float, help="temperature of half of every second batch's prompts")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    model = load_model(options.model, device=options.device, dtype=torch.bfloat16).model
    tokens = np.load(options.data / "train.npy")
    began, arrays = time.perf_counter(), {}
    for length in PROMPT_LENGTHS:
        rows = []
        prompts = choose_prompts(tokens, length, options.batches * options.batch, options.seed)
        for batch, prompt in enumerate(prompts.to(options.device).split(options.batch)):
            temperature = options.temperatures[batch % len(options.temperatures)]
            seed = hash((options.seed, length, batch)) % 2**31
            part = stray(model, prompt, options.stray, seed) if options.stray and batch % 2 else prompt
            continued = continue_texts(model, part, CONTINUED, temperature=temperature, seed=seed)
            rows.append(torch.cat((part, continued), dim=1).cpu().numpy().astype(np.uint16))
        arrays[f"{length:03d}"] = np.concatenate(rows)
        print(f"{length} tokens: {len(prompts)} texts, {time.perf_counter() - began:.0f} s", flush=True)
    np.savez(options.data / "continuations.npz", allow_pickle=False, **arrays)
    facts = {
        "continuations_sha256": hashlib.sha256(
            b"".join(array.tobytes() for array in arrays.values())
        ).hexdigest(),
        "continuations": sum(map(len, arrays.values())),
        "continued_tokens": CONTINUED * sum(map(len, arrays.values())),
        "temperatures": options.temperatures,
        "stray": options.stray,
        "continuations_seed": options.seed,
    }
    (options.data / "continuations.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()

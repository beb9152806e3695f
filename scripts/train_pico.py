"""Trains pico-gqa, the shipped Qwen3-architecture specimen, on what ``pico_corpus.py`` prepared.

    PYTHONPATH=. python scripts/train_pico.py [--data .work/pico] [--out data/models/pico-gqa] [--minutes 5 | --steps N]

Trains ``cglab.models.Decoder`` itself. The folder at ``--out`` is a complete model from the first evaluation on and is replaced at every
evaluation that has a lower held-out loss, so an interrupted run loses nothing. ``--minutes`` fixes the number of steps once, from the
measured speed; the card records it, and ``--steps`` with that number repeats the run.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from pico_card import write_model
from torch import Tensor, nn

from cglab.models.config import ModelConfig
from cglab.models.decoder import Decoder

CONTEXT = 1024
SHAPE = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=704,
    num_layers=6,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    max_position=2048,
    rope_theta=10000.0,
    tie_embeddings=True,
    qk_norm=True,
    eos_token_ids=(0,),
)
CALIBRATION = slice(20, 60)  # the steps whose speed fixes the number of steps
WARM_UP = 200


def causal_attention(window: int):
    """An ``attend`` callable over whole windows laid end to end, without a cache."""

    def attend(layer_index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        del layer_index
        groups = query.shape[1] // key.shape[1]

        def heads_first(tensor: Tensor, repeats: int) -> Tensor:
            return tensor.unflatten(0, (-1, window)).repeat_interleave(repeats, dim=2).transpose(1, 2)

        query, key, value = heads_first(query, 1), heads_first(key, groups), heads_first(value, groups)
        attended = F.scaled_dot_product_attention(query, key.to(query.dtype), value.to(query.dtype), is_causal=True)
        return attended.transpose(1, 2).flatten(0, 1).flatten(1)

    return attend


def window_loss(model: Decoder, windows: Tensor) -> Tensor:
    """Mean cross-entropy in nats of the next token over windows [batch, length + 1] of token ids."""
    inputs, labels = windows[:, :-1], windows[:, 1:]
    length = inputs.shape[1]
    positions = torch.arange(length, device=windows.device).repeat(inputs.shape[0])
    hidden = model(inputs.flatten(), positions, causal_attention(length))
    return F.cross_entropy(model.logits(hidden).float(), labels.flatten())


def initialise(model: Decoder, seed: int) -> None:
    """Normal weights of deviation 0.02, projections into the residual stream scaled down by depth, norms at one."""
    generator = torch.Generator("cpu").manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.ones_(parameter)
            continue
        into_stream = name.endswith(("output.weight", "down.weight"))
        deviation = 0.02 / math.sqrt(2 * model.config.num_layers) if into_stream else 0.02
        with torch.no_grad():
            parameter.copy_(torch.normal(0.0, deviation, parameter.shape, generator=generator))


def tie_head_norms(model: Decoder) -> None:
    """Gives all query heads, and all key heads, the summed gradient of their norm, as the checkpoint holds one for each."""
    heads = (model.config.num_heads, model.config.num_kv_heads)

    def summed(gradient: Tensor) -> Tensor:
        return torch.cat([part.sum(0, keepdim=True).expand_as(part) for part in gradient.split(heads)])

    for block in model.blocks:
        block.attention.head_norm.register_hook(summed)


def batches(tokens: Tensor, batch: int, seed: int) -> Iterator[Tensor]:
    """Endless batches [batch, CONTEXT + 1]: every epoch cuts the text at another offset and shuffles the windows."""
    generator = torch.Generator("cpu").manual_seed(seed)
    offsets = torch.arange(CONTEXT + 1, device=tokens.device)
    while True:
        first = int(torch.randint(CONTEXT, (1,), generator=generator))
        count = (len(tokens) - first - 1) // CONTEXT
        starts = first + CONTEXT * torch.randperm(count, generator=generator)
        for chosen in starts.split(batch):
            if len(chosen) == batch:
                yield tokens[chosen.to(tokens.device).unsqueeze(1) + offsets].long()


@torch.no_grad()
def held_out_loss(model: Decoder, tokens: Tensor, autocast: torch.autocast) -> float:
    """Mean loss in nats a token over all whole windows of the held-out text, 16 at a time."""
    windows = tokens.unfold(0, CONTEXT + 1, CONTEXT).long()
    total = 0.0
    with autocast:
        for part in windows.split(16):
            total += float(window_loss(model, part)) * len(part)
    return total / len(windows)


@torch.no_grad()
def continue_greedily(model: Decoder, ids: list[int], count: int) -> list[int]:
    """Continues token ids by ``count`` greedy tokens, without a cache."""
    device = model.norm.weight.device
    for _ in range(count):
        inputs = torch.tensor(ids, device=device)
        hidden = model(inputs, torch.arange(len(ids), device=device), causal_attention(len(ids)))
        ids = [*ids, int(model.logits(hidden[-1:]).argmax())]
    return ids[-count:]


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up, then a cosine down to a fiftieth of the peak."""
    warm_up = min(WARM_UP, steps // 10)
    if step < warm_up:
        return peak * (step + 1) / warm_up
    progress = (step - warm_up) / (steps - warm_up)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def train(options: argparse.Namespace) -> None:
    """Runs the training and writes the model folder."""
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    train_tokens, held_out = (
        torch.from_numpy(np.load(options.data / f"{name}.npy").astype(np.int32)).to(device) for name in ("train", "held_out")
    )
    held_out = held_out[: options.held_out_tokens]
    model = Decoder(SHAPE, device=device, dtype=torch.float32)
    initialise(model, options.seed)
    tie_head_norms(model)
    matrices = [parameter for name, parameter in model.named_parameters() if "norm" not in name]
    norms = [parameter for name, parameter in model.named_parameters() if "norm" in name]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=options.peak, betas=(0.9, 0.95), fused=device.type == "cuda")
    autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")
    loss_of = torch.compile(window_loss) if options.compile else window_loss

    steps, best, began, tokens_per_step = options.steps, math.inf, time.perf_counter(), options.batch * CONTEXT
    progress: dict[str, object] = {"seed": options.seed, "batch_tokens": tokens_per_step, "peak_learning_rate": options.peak}
    calibration = began
    for step, windows in enumerate(batches(train_tokens, options.batch, options.seed)):
        if options.minutes and step in (CALIBRATION.start, CALIBRATION.stop):
            float(model.norm.weight.sum())  # waits for the device
            if step == CALIBRATION.stop:
                pace = (time.perf_counter() - calibration) / (CALIBRATION.stop - CALIBRATION.start)
                steps = min(options.steps, step + int(options.minutes * 60 / pace))
                print(f"{tokens_per_step / pace:,.0f} tokens/s: {steps} steps", flush=True)
            calibration = time.perf_counter()
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(step, steps, options.peak)
        with autocast:
            loss = loss_of(model, windows)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        last = step + 1 >= steps
        if last or (step + 1) % options.evaluate_every == 0:
            evaluated = held_out_loss(model, held_out, autocast)
            elapsed = time.perf_counter() - began
            speed = (step + 1) * tokens_per_step / elapsed
            line = f"step {step + 1}/{steps} loss {float(loss.detach()):.4f} held-out {evaluated:.4f} {speed:,.0f} tokens/s {elapsed:.0f} s"
            print(line, flush=True)
            if evaluated < best:
                best = evaluated
                epochs = round((step + 1) * tokens_per_step / len(train_tokens), 2)
                progress |= {"steps": step + 1, "planned_steps": steps, "epochs": epochs, "held_out_loss": evaluated}
                progress |= {"train_loss": float(loss.detach()), "seconds": round(elapsed, 1), "device": device_name(device)}
                write_model(model, options.data, options.out, progress, partial(continue_greedily, model))
        if last:
            return


def device_name(device: torch.device) -> str:
    """What the model was trained on, in words."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path(".work/pico"))
    parser.add_argument("--out", type=Path, default=Path("data/models/pico-gqa"))
    parser.add_argument("--device", default=None)
    parser.add_argument("--minutes", type=float, default=None, help="time to train, compilation apart")
    parser.add_argument("--steps", type=int, default=16_000, help="upper limit of the steps")
    parser.add_argument("--batch", type=int, default=32, help=f"windows of {CONTEXT} tokens a step")
    parser.add_argument("--peak", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--evaluate-every", type=int, default=500, help="steps between evaluations")
    parser.add_argument("--held-out-tokens", type=int, default=None, help="evaluate on so many only")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    train(parser.parse_args())


if __name__ == "__main__":
    main()

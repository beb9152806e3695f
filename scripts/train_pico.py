"""Trains pico-gqa, the shipped Qwen3-architecture specimen, on what ``pico_corpus.py`` prepared.

    PYTHONPATH=. python scripts/train_pico.py [--minutes 5 | --steps N] [--out data/models/pico-gqa]

Trains ``cglab.models.Decoder`` itself; ``train_pico_dsa.py`` trains the other specimen in the same way. The folder at
``--out`` is a complete model from the first evaluation on and is replaced at every evaluation that has a lower held-out
loss, so an interrupted run loses nothing. ``--minutes`` fixes the number of steps once, from the measured speed; the
card records it, and ``--steps`` with that number repeats the schedule.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pico_card import write_model
from torch import Tensor, nn

from cglab.models.config import ModelConfig
from cglab.models.decoder import Attend, Decoder
from cglab.models.loading import INTO_STREAM, decoder_of

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
CALIBRATION = (20, 60)  # the speed between these steps fixes how many there will be
WARM_UP = 200


def causal_attention(window: int) -> Attend:
    """An ``attend`` callable over whole windows laid end to end, without a cache."""

    def attend(layer_index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        del layer_index
        groups = query.shape[1] // key.shape[1]

        def heads_first(tensor: Tensor, repeats: int) -> Tensor:
            return tensor.unflatten(0, (-1, window)).repeat_interleave(repeats, dim=2).transpose(1, 2)

        query, key, value = heads_first(query, 1), heads_first(key, groups), heads_first(value, groups)
        attended = F.scaled_dot_product_attention(
            query, key.to(query.dtype), value.to(query.dtype), is_causal=True
        )
        return attended.transpose(1, 2).flatten(0, 1).flatten(1)

    return attend


def window_loss(
    model: Decoder, windows: Tensor, attention: Callable[[int], Any] = causal_attention
) -> Tensor:
    """Mean cross-entropy in nats of the next token over windows [batch, length + 1] of token ids.

    Args:
        model: whose.
        windows: token ids.
        attention: makes what its layers ask, for windows of a length.
    """
    inputs, labels = windows[:, :-1], windows[:, 1:]
    length = inputs.shape[1]
    positions = torch.arange(length, device=windows.device).repeat(inputs.shape[0])
    hidden = model(inputs.flatten(), positions, attention(length))
    return F.cross_entropy(model.logits(hidden).float(), labels.flatten())


def initialise(model: Decoder, seed: int) -> None:
    """Normal weights of deviation 0.02, less by depth where they add to the residual stream; norms at one."""
    generator = torch.Generator("cpu").manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
            continue
        if "norm" in name:
            nn.init.ones_(parameter)
            continue
        into_stream = name.endswith(INTO_STREAM)
        deviation = 0.02 / math.sqrt(2 * model.config.num_layers) if into_stream else 0.02
        with torch.no_grad():
            parameter.copy_(torch.normal(0.0, deviation, parameter.shape, generator=generator))


def tie_head_norms(model: Decoder) -> None:
    """Gives all query heads, and all key heads, one gradient: a checkpoint holds one norm for each kind."""
    heads = (model.config.num_heads, model.config.num_kv_heads)

    def summed(gradient: Tensor) -> Tensor:
        return torch.cat([part.sum(0, keepdim=True).expand_as(part) for part in gradient.split(heads)])

    for name, parameter in model.named_parameters():
        if name.endswith("head_norm"):
            parameter.register_hook(summed)


def batches(tokens: Tensor, batch: int, seed: int) -> Iterator[Tensor]:
    """Endless batches [batch, CONTEXT + 1]: every epoch cuts the text elsewhere and shuffles the windows."""
    generator = torch.Generator("cpu").manual_seed(seed)
    offsets = torch.arange(CONTEXT + 1, device=tokens.device)
    while True:
        first = int(torch.randint(CONTEXT, (1,), generator=generator))
        count = (len(tokens) - first - 1) // CONTEXT
        starts = first + CONTEXT * torch.randperm(count, generator=generator)
        for chosen in starts.split(batch):
            if len(chosen) == batch:
                yield tokens[chosen.to(tokens.device).unsqueeze(1) + offsets].long()


def load_tokens(path: Path, device: torch.device) -> Tensor:
    """Token ids [n] int32 of a whole part of the corpus."""
    return torch.from_numpy(np.load(path).astype(np.int32)).to(device)


Loss = Callable[[Decoder, Tensor], Tensor]
"""The mean loss of a model over windows [batch, length + 1] of token ids."""
Lesson = Callable[[Decoder, Tensor, float], Tensor]
"""The loss that is learnt from, which may change with the share of the training that is done."""


@torch.no_grad()
def held_out_loss(model: Decoder, tokens: Tensor, autocast: torch.autocast, loss_of: Loss) -> float:
    """Mean loss in nats a token over all whole windows of the held-out text, 16 at a time."""
    windows = tokens.unfold(0, CONTEXT + 1, CONTEXT).long()
    total = 0.0
    with autocast:
        for part in windows.split(16):
            total += float(loss_of(model, part)) * len(part)
    return total / len(windows)


@torch.no_grad()
def continue_greedily(
    model: Decoder, ids: list[int], count: int, attention: Callable[[int], Any] = causal_attention
) -> list[int]:
    """Continues token ids by ``count`` greedy tokens, without a cache."""
    device = model.norm.weight.device
    for _ in range(count):
        inputs = torch.tensor(ids, device=device)
        hidden = model(inputs, torch.arange(len(ids), device=device), attention(len(ids)))
        ids = [*ids, int(model.logits(hidden[-1:]).argmax())]
    return ids[-count:]


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Rate at a step, from 1: linear warm-up, then a cosine down to a fiftieth of the peak."""
    warm_up = min(WARM_UP, max(1, steps // 10))
    if step <= warm_up:
        return peak * step / warm_up
    progress = (step - warm_up) / (steps - warm_up)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def optimiser_of(model: Decoder, peak: float) -> torch.optim.Optimizer:
    """AdamW with weight decay on the matrices only."""
    matrices = [parameter for name, parameter in model.named_parameters() if "norm" not in name]
    norms = [parameter for name, parameter in model.named_parameters() if "norm" in name]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=model.norm.weight.is_cuda)


def train(
    model: Decoder,
    options: argparse.Namespace,
    lesson: Lesson,
    attention: Callable[[int], Any],
    after_step: Callable[[], None] = lambda: None,
) -> None:
    """Runs the training and writes the model folder.

    Args:
        model: float32, with its first weights, on the device that it learns on.
        options: as ``parser_of`` reads them.
        lesson: what is learnt.
        attention: of windows, as inference attends: for the held-out loss and the card's samples.
        after_step: what is adjusted after the weights.
    """
    device = model.norm.weight.device
    tokens, held_out = (load_tokens(options.data / f"{name}.npy", device) for name in ("train", "held_out"))
    optimiser = optimiser_of(model, options.peak)
    autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")

    steps, step_tokens, best = options.steps, options.batch * CONTEXT, math.inf
    began = calibrated = time.perf_counter()
    for step, windows in enumerate(batches(tokens, options.batch, options.seed), start=1):
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(step, steps, options.peak)
        with autocast:
            loss = lesson(model, windows, step / steps)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        after_step()
        if options.minutes and step in CALIBRATION:
            float(model.norm.weight.detach().sum())  # waits for the device
            pace = (time.perf_counter() - calibrated) / (CALIBRATION[1] - CALIBRATION[0])
            calibrated = time.perf_counter()
            if step == CALIBRATION[1]:
                steps = min(options.steps, step + int(options.minutes * 60 / pace))
                print(f"{step_tokens / pace:,.0f} tokens/s: {steps} steps", flush=True)
        if step < steps and step % options.evaluate_every:
            continue
        train_loss = float(loss.detach())
        windows_loss = partial(window_loss, attention=attention)
        evaluated = held_out_loss(model, held_out[: options.held_out_tokens], autocast, windows_loss)
        seconds = time.perf_counter() - began
        speed = f"{step * step_tokens / seconds:,.0f} tokens/s {seconds:.0f} s"
        print(f"step {step}/{steps} loss {train_loss:.4f} held-out {evaluated:.4f} {speed}", flush=True)
        if evaluated < best:
            best = evaluated
            facts = {
                "seed": options.seed,
                "batch_tokens": step_tokens,
                "peak_learning_rate": options.peak,
                "steps": step,
                "planned_steps": steps,
                "epochs": round(step * step_tokens / len(tokens), 2),
                "train_loss": train_loss,
                "held_out_loss": evaluated,
                "seconds": round(seconds, 1),
                "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
            }
            write_model(
                model,
                options.data,
                options.out,
                facts,
                partial(continue_greedily, model, attention=attention),
            )
        if step >= steps:
            return


def parser_of(text: str, out: str) -> argparse.ArgumentParser:
    """The command line of both specimens' scripts.

    Args:
        text: what the script does.
        out: the folder that it writes.
    """
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--data", type=Path, default=Path(".work/pico"))
    parser.add_argument("--out", type=Path, default=Path(out))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=None, help="time to train, compilation apart")
    parser.add_argument("--steps", type=int, default=16_000, help="upper limit of the steps")
    parser.add_argument("--batch", type=int, default=32, help=f"windows of {CONTEXT} tokens a step")
    parser.add_argument("--peak", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--evaluate-every", type=int, default=1000, help="steps between evaluations")
    parser.add_argument("--held-out-tokens", type=int, default=None, help="evaluate on so many only")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    return parser


def first_weights(config: ModelConfig, options: argparse.Namespace) -> Decoder:
    """A decoder of this shape to train, float32, with its first weights; everything drawn later is seeded too."""
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    model = decoder_of(config, device=options.device, dtype=torch.float32)
    initialise(model, options.seed)
    return model


def main() -> None:
    """Reads the command line and trains."""
    options = parser_of(__doc__.splitlines()[0], "data/models/pico-gqa").parse_args()
    model = first_weights(SHAPE, options)
    tie_head_norms(model)
    loss_of: Loss = torch.compile(window_loss) if options.compile else window_loss

    def lesson(model: Decoder, windows: Tensor, done: float) -> Tensor:
        del done
        return loss_of(model, windows)

    train(model, options, lesson, causal_attention)


if __name__ == "__main__":
    main()

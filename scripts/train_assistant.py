"""Trains pico-gqa-assistant, the shipped frozen-KV draft, on what ``pico_continuations.py`` wrote.

    PYTHONPATH=. python scripts/train_assistant.py [--minutes 30 | --steps N] [--out data/drafts/pico-gqa-assistant]

Trains ``cglab.models.Assistant`` itself, as it drafts: at every position t of a text it takes token t + 1 and the
target's hidden state t, asks the target's keys and values of positions up to t, and goes on from its own hidden
state for three steps in which neither the position nor what it sees moves (S0). The folder at ``--out`` is replaced
at every evaluation, so an interrupted run loses nothing; none is preferred for its held-out accept length, which
therefore chose no weights. ``--minutes`` fixes the number of steps once, and ``--steps`` with it repeats the schedule.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from assistant_card import write_assistant
from frozen_windows import STEPS, Texts, observe, unroll
from pico_accept import HeldOut, assistant_passes, held_out_texts, lookup_passes, summary
from pico_continuations import CONTINUED
from torch import Tensor, nn
from train_pico import CALIBRATION, learning_rate

from cglab.measure.acceptance_rule import counted_length
from cglab.models.assistant import Assistant, AssistantConfig
from cglab.models.decoder import Decoder
from cglab.models.loading import load_model

STEP_WEIGHTS = (1.0, 0.8, 0.64)
POOL = 8  # batches of which the texts are sorted by length
CORPUS_TOKENS = 16  # of each prompt, learnt from beside its continuation
SHAPE = AssistantConfig(
    vocab_size=4096,
    backbone_size=256,
    hidden_size=256,
    intermediate_size=512,
    layer_kinds=("full", "full"),
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
)


def draft_loss(assistant: Assistant, texts: Texts, sharpness: float, hidden_weight: float) -> Tensor:
    """The loss of all steps over the continued part of texts, a step further counting less.

    Args:
        assistant: bound to the target.
        texts: what the target made of prompts and continuations.
        sharpness: the target's scores are multiplied by it, as greedy acceptance asks for its first choice alone.
        hidden_weight: of the smooth L1 distance to the hidden state that a step stands in for.

    Returns:
        Cross-entropy to the target's distribution in nats plus the weighted distance, a scalar.
    """
    length = texts.tokens.shape[1]
    first = length - CONTINUED - CORPUS_TOKENS
    last = min(int(texts.counted.max()), length - 1) - STEPS
    wanted = texts.hidden[:, first + 1 : last + 1 + STEPS]
    with torch.no_grad():
        likely = (assistant.target.logits(wanted).float() * sharpness).softmax(-1)
    position = torch.arange(first, last + 1, device=texts.tokens.device)
    total = wanted.new_zeros((), dtype=torch.float32)
    for step, (logits, hidden) in enumerate(unroll(assistant, texts, first, last, taught=True)):
        part = slice(step, step + last + 1 - first)
        learnt = (position + 1 + step < texts.counted.unsqueeze(1)).flatten().float()
        entropy = F.cross_entropy(logits.float(), likely[:, part].flatten(0, 1), reduction="none")
        distance = F.smooth_l1_loss(
            hidden.float(), wanted[:, part].flatten(0, 1).float(), reduction="none"
        ).mean(-1)
        losses = (entropy + hidden_weight * distance) * learnt
        total = total + STEP_WEIGHTS[step] * losses.sum() / learnt.sum()
    return total


def initialise(assistant: Assistant, seed: int) -> None:
    """Starts as a plain mixture of token and hidden state: what adds to the stream is zero, norms are one."""
    generator = torch.Generator("cpu").manual_seed(seed)
    with torch.no_grad():
        for name, parameter in assistant.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            elif name.endswith(("output.weight", "down.weight")):
                parameter.zero_()
            else:
                deviation = parameter.shape[1] ** -0.5
                parameter.copy_(torch.normal(0.0, deviation, parameter.shape, generator=generator))


def lessons(target: Decoder, data: Path, layer: int, batch: int) -> list[Texts]:
    """All continuations as the target sees them, equally long ones together, ``batch`` at a time through it."""
    device, ends = target.norm.weight.device, target.config.eos_token_ids
    kinds = []
    for name, array in np.load(data / "continuations.npz").items():
        prompt = int(name)
        counted = [prompt + counted_length(row[prompt:].tolist(), ends) for row in array]
        tokens = torch.from_numpy(array.astype(np.int64)).to(device)
        lengths = torch.tensor(counted, device=device)
        parts = [
            observe(target, *pair, layer=layer)
            for pair in zip(tokens.split(batch), lengths.split(batch), strict=True)
        ]
        kinds.append(Texts(*(torch.cat(part) for part in zip(*parts, strict=True))))
    return kinds


def batches(kinds: list[Texts], batch: int, seed: int) -> Iterator[Texts]:
    """Endless batches of equally long texts; every epoch has each text once, but for an incomplete last batch.

    Texts of which about equally much is learnt from come together, and are cut after that.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    while True:
        drawn: list[tuple[Texts, Tensor]] = []
        for kind in kinds:
            for pool in torch.randperm(len(kind.tokens), generator=generator).split(POOL * batch):
                alike = pool[kind.counted.cpu()[pool].argsort(stable=True)]
                drawn.extend((kind, rows) for rows in alike.split(batch) if len(rows) == batch)
        for index in torch.randperm(len(drawn), generator=generator).tolist():
            kind, rows = drawn[index]
            yield kind.chosen(rows.to(kind.tokens.device))


def optimisers_of(assistant: Assistant, peak: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for the norms, at one rate."""
    matrices = [parameter for parameter in assistant.parameters() if parameter.dim() == 2]
    norms = [parameter for parameter in assistant.parameters() if parameter.dim() == 1]
    return [
        torch.optim.Muon(matrices, lr=peak, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(norms, lr=peak, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def accept_length(assistant: Assistant, target: Decoder, held_out: list[HeldOut]) -> dict[str, Any]:
    """The held-out measure, of the weights as they are written: in bfloat16, computed in float32."""
    written = deepcopy(assistant).bfloat16().float()
    written.bind(target)
    return summary([assistant_passes(written, text) for text in held_out], held_out)


def train(options: argparse.Namespace) -> None:
    """Runs the training and writes the draft's folder."""
    device = torch.device(options.device)
    torch.manual_seed(options.seed)
    target = load_model(options.model, device=device, dtype=torch.bfloat16).model
    exact = load_model(options.model, device=device, dtype=torch.float32).model
    assistant = Assistant(SHAPE, device=device, dtype=torch.float32)
    assistant.bind(target)
    initialise(assistant, options.seed)
    layer = assistant.layers[-1]
    prompts = [prompt["ids"] for prompt in json.loads((options.model / "prompts.json").read_text())]
    held_out = held_out_texts(exact, prompts, layer, options.held_out_tokens)
    lookup = summary([lookup_passes(text) for text in held_out], held_out)
    print(f"look-up {lookup}", flush=True)
    kinds = lessons(target, options.data, layer, 128)
    print(f"{sum(len(kind.tokens) for kind in kinds)} texts", flush=True)

    optimisers = optimisers_of(assistant, options.peak)
    autocast = torch.autocast(device.type, dtype=torch.bfloat16)
    steps = options.steps
    began = calibrated = time.perf_counter()
    for step, texts in enumerate(batches(kinds, options.batch, options.seed), start=1):
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = learning_rate(step, steps, options.peak)
        with autocast:
            loss = draft_loss(assistant, texts, options.sharpness, options.hidden_weight)
        loss.backward()
        nn.utils.clip_grad_norm_(assistant.parameters(), 1.0)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        if options.minutes and step in CALIBRATION:
            pace = (time.perf_counter() - calibrated) / (CALIBRATION[1] - CALIBRATION[0])
            calibrated = time.perf_counter()
            if step == CALIBRATION[1]:
                steps = min(options.steps, step + int(options.minutes * 60 / pace))
                print(f"{pace:.2f} s a step: {steps} steps", flush=True)
        if step < steps and step % options.evaluate_every:
            continue
        measured = accept_length(assistant, exact, held_out)
        seconds = time.perf_counter() - began
        told = f"loss {float(loss.detach()):.4f} accept {measured['accept_length']:.3f} {measured['distribution']}"
        print(f"step {step}/{steps} {told} {seconds:.0f} s", flush=True)
        facts = {
            "target": options.model.name,
            "seed": options.seed,
            "batch": options.batch,
            "peak_learning_rate": options.peak,
            "sharpness": options.sharpness,
            "hidden_weight": options.hidden_weight,
            "steps": step,
            "planned_steps": steps,
            "epochs": round(step * options.batch / sum(len(kind.tokens) for kind in kinds), 2),
            "train_loss": float(loss.detach()),
            "seconds": round(seconds, 1),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
            "held_out": measured,
            "look_up": lookup,
        }
        write_assistant(assistant, options.data, options.out, facts)
        if step >= steps:
            return


def main() -> None:
    """Reads the command line and trains."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("data/models/pico-gqa"))
    parser.add_argument("--data", type=Path, default=Path(".work/pico"))
    parser.add_argument("--out", type=Path, default=Path("data/drafts/pico-gqa-assistant"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=None, help="time to train, preparation apart")
    parser.add_argument("--steps", type=int, default=8000, help="upper limit of the steps")
    parser.add_argument("--batch", type=int, default=24, help="texts of a step")
    parser.add_argument("--peak", type=float, default=1e-2, help="highest learning rate")
    parser.add_argument("--sharpness", type=float, default=1.0, help="of the target's scores in the loss")
    parser.add_argument("--hidden-weight", type=float, default=1.0, help="of the distance to hidden states")
    parser.add_argument("--evaluate-every", type=int, default=200, help="steps between evaluations")
    parser.add_argument("--held-out-tokens", type=int, default=200, help="greedy tokens after each prompt")
    parser.add_argument("--seed", type=int, default=0)
    train(parser.parse_args())


if __name__ == "__main__":
    main()

"""How a draft learns, whatever its kind: first weights, optimisers, schedule, evaluation, and what is written.

The folder at ``--out`` is replaced at every evaluation, so an interrupted run loses nothing; none is preferred for its
held-out accept length, which therefore chose no weights. ``--minutes`` fixes the number of steps once, and ``--steps``
with it repeats the schedule.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar

import torch
from draft_card import write_draft
from draft_texts import T, batches, lessons
from pico_accept import HeldOut, held_out_texts, lookup_passes, measure_of, summary
from torch import Tensor, nn
from train_pico import CALIBRATION, learning_rate

from cglab.models.decoder import Decoder
from cglab.models.drafts import DraftModel, load_draft
from cglab.models.loading import INTO_STREAM, load_model

D = TypeVar("D", bound=DraftModel)

CORPUS_TOKENS = 16  # of each prompt, learnt from beside its continuation


def initialise(draft: DraftModel, seed: int) -> None:
    """Starts as a plain mixture of what it is given: what adds to the stream is zero, norms are one."""
    generator = torch.Generator("cpu").manual_seed(seed)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if name.endswith(("bias", *INTO_STREAM)):
                parameter.zero_()
            elif "norm" in name:
                parameter.fill_(1.0)
            else:
                deviation = parameter.shape[1] ** -0.5
                parameter.copy_(torch.normal(0.0, deviation, parameter.shape, generator=generator))


def optimisers_of(draft: DraftModel, peak: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for the norms, at one rate."""
    matrices = [parameter for parameter in draft.parameters() if parameter.dim() == 2]
    norms = [parameter for parameter in draft.parameters() if parameter.dim() == 1]
    return [
        torch.optim.Muon(matrices, lr=peak, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(norms, lr=peak, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def accept_length(draft: DraftModel, target: Decoder, held_out: list[HeldOut[Any]]) -> dict[str, Any]:
    """The held-out measure, of the weights as they are written: in bfloat16, computed in float32."""
    written, kind = deepcopy(draft).bfloat16().float(), measure_of(draft)
    written.bind(target)
    return summary([kind.passes(written, text) for text in held_out], held_out, kind.steps)


def train(
    draft: D,
    loss_of: Callable[[T], Tensor],
    options: argparse.Namespace,
    facts: dict[str, Any],
    begin: Callable[[D], None] = lambda _: None,
) -> None:
    """Runs the training and writes the draft's folder.

    Args:
        draft: float32, unfilled, on the device that it learns on.
        loss_of: a batch of texts, by the draft bound to its target; a scalar.
        options: as ``options_of`` gives them.
        facts: what the card says of the loss.
        begin: what a kind changes of the first weights, the draft being bound to its target.
    """
    device = torch.device(options.device)
    torch.manual_seed(options.seed)
    target = load_model(options.model, device=device, dtype=torch.bfloat16).model
    exact = load_model(options.model, device=device, dtype=torch.float32).model
    draft.bind(target)
    initialise(draft, options.seed)
    begin(draft)
    if options.resume:
        draft.load_state_dict(load_draft(options.resume, exact).model.state_dict())
    kind = measure_of(draft)
    prompts = [prompt["ids"] for prompt in json.loads((options.model / "prompts.json").read_text())]
    held_out = held_out_texts(exact, prompts, kind.observe, options.held_out_tokens)
    lookup = summary([lookup_passes(text, kind.steps) for text in held_out], held_out, kind.steps)
    print(f"look-up {lookup}", flush=True)
    texts_by_length = lessons(options.data, target.config.eos_token_ids, kind.steps)
    count = sum(len(each.tokens) for each in texts_by_length)
    print(f"{count} texts", flush=True)

    optimisers = optimisers_of(draft, options.peak)
    autocast = torch.autocast(device.type, dtype=torch.bfloat16)
    steps = options.steps
    began = calibrated = time.perf_counter()
    for step, drawn in enumerate(batches(texts_by_length, options.batch, options.seed), start=1):
        texts = kind.observe(target, drawn.tokens.to(device), drawn.counted.to(device))
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = learning_rate(step, steps, options.peak)
        with autocast:
            loss = loss_of(texts)
        loss.backward()
        nn.utils.clip_grad_norm_(draft.parameters(), 1.0, error_if_nonfinite=True)
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
        measured = accept_length(draft, exact, held_out)
        seconds = time.perf_counter() - began
        told = f"loss {float(loss.detach()):.4f} accept {measured['accept_length']:.3f} {measured['distribution']}"
        print(f"step {step}/{steps} {told} {seconds:.0f} s", flush=True)
        card = {
            "target": options.model.name,
            "seed": options.seed,
            "resumed_from": options.resume and options.resume.name,
            "batch": options.batch,
            "peak_learning_rate": options.peak,
            **facts,
            "steps": step,
            "planned_steps": steps,
            "epochs": round(step * options.batch / count, 2),
            "train_loss": float(loss.detach()),
            "seconds": round(seconds, 1),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
            "held_out": measured,
            "look_up": lookup,
        }
        write_draft(draft, options.data, options.out, card)
        if step >= steps:
            return


def parser_of(text: str, out: str) -> argparse.ArgumentParser:
    """The command line of a kind's script: what all of them know.

    Args:
        text: what it does.
        out: the folder that it writes.
    """
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--model", type=Path, default=Path("data/models/pico-gqa"))
    parser.add_argument("--data", type=Path, default=Path(".work/pico"))
    parser.add_argument("--out", type=Path, default=Path(out))
    parser.add_argument("--resume", type=Path, help="a draft's folder, whose weights are the first ones")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=None, help="time to train, preparation apart")
    parser.add_argument("--steps", type=int, default=8000, help="upper limit of the steps")
    parser.add_argument("--batch", type=int, default=24, help="texts of a step")
    parser.add_argument("--peak", type=float, default=1e-2, help="highest learning rate")
    parser.add_argument("--evaluate-every", type=int, default=200, help="steps between evaluations")
    parser.add_argument("--held-out-tokens", type=int, default=200, help="greedy tokens after each prompt")
    parser.add_argument("--seed", type=int, default=0)
    return parser

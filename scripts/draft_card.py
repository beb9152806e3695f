"""Writes a trained draft as its folder: configuration, bfloat16 weights and card."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from pico_card import hugging_face_config
from safetensors.torch import save_file

from cglab.models.assistant import ARCHITECTURE
from cglab.models.block_draft import ARCHITECTURE as BLOCK_DRAFT
from cglab.models.drafts import DraftModel, architecture_of
from cglab.models.dsa_config import DsaConfig
from cglab.models.nextn import ARCHITECTURE as NEXTN
from cglab.models.shard_file import compress

KINDS = {
    ARCHITECTURE: (
        "a frozen-KV draft (two layers that ask the keys and values of its target's last layer and\nwrite none)",
        "train_assistant.py",
    ),
    BLOCK_DRAFT: (
        "a block draft (all tokens of a block at once, over keys and values projected\nfrom its target's layers)",
        "train_block_draft.py",
    ),
    NEXTN: (
        "a NextN layer (one layer of its target's kind over the target's hidden states,\nwith keys of its own)",
        "train_nextn.py",
    ),
}


def draft_config(draft: DraftModel) -> dict[str, Any]:
    """The contents of ``config.json``, as ``from_folder`` of its kind reads it."""
    if isinstance(draft.config, DsaConfig):
        return hugging_face_config(draft.config)
    return {"architectures": [architecture_of(draft.config)], **asdict(draft.config), "dtype": "bfloat16"}


def write_draft(draft: DraftModel, data: Path, out: Path, facts: dict[str, Any]) -> None:
    """Writes the folder beside its place, then moves it file by file: a reader never sees half a file.

    Args:
        draft: the trained one.
        data: what ``pico_corpus.py`` and ``pico_continuations.py`` wrote.
        out: the draft's folder.
        facts: of the training and of the held-out measure, for the card.
    """
    out.mkdir(parents=True, exist_ok=True)
    corpus = json.loads((data / "manifest.json").read_text())
    card = {
        "name": out.name,
        "architecture": draft_config(draft)["architectures"][0],
        "parameters": sum(parameter.numel() for parameter in draft.parameters()),
        "torch": torch.__version__,
        **facts,
        **json.loads((data / "continuations.json").read_text()),
        "python": corpus["python"],
        "corpus_sha256": corpus["corpus_sha256"],
    }
    tensors = {
        name: parameter.detach().to("cpu", torch.bfloat16).contiguous()
        for name, parameter in draft.named_parameters()
    }
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        folder = Path(scratch)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        compress(folder / "model.safetensors")
        for name, content in (("config.json", draft_config(draft)), ("card.json", card)):
            (folder / name).write_text(json.dumps(content, indent=2) + "\n")
        (folder / "README.md").write_text(draft_card(card))
        for file in folder.iterdir():
            file.chmod(0o644)
            file.replace(out / file.name)
    (out / "model.safetensors").unlink(
        missing_ok=True
    )  # an earlier one, which would be read before the compressed


def draft_card(card: dict[str, Any]) -> str:
    """The draft's card as Markdown."""

    def spread(measured: dict[str, Any]) -> str:
        shares = ", ".join(f"{length}: {share:.1%}" for length, share in measured["distribution"].items())
        return f"**{measured['accept_length']:.3f}** ({shares})"

    held_out, (what, script) = card["held_out"], KINDS[card["architecture"]]
    strayed = f"; of every second batch, prompts half sampled at {card['stray']}" if card.get("stray") else ""
    resumed = f", from the weights of {card['resumed_from']}" if card.get("resumed_from") else ""
    most = max(map(int, held_out["distribution"]))
    rows = {
        "target": f"`{card['target']}`",
        "parameters": f"{card['parameters']:,}",
        f"held-out accept length, {most - 1} drafted tokens (maximum {most})": spread(held_out),
        "n-gram look-up draft on the same prompts": spread(card["look_up"]),
        "counted on": f"{held_out['prompts']} prompts, {held_out['passes']:,} verify passes, "
        f"{held_out['tokens_counted']:,} greedy tokens",
        "distinct 4-grams in these": f"{held_out['distinct_4grams']:.3f}",
        "training loss of that step": f"{card['train_loss']:.4f}",
        "steps": f"{card['steps']:,} of {card['planned_steps']:,} planned, {card['batch']} texts each "
        f"({card['epochs']} epochs){resumed}",
        "seed, peak learning rate": f"{card['seed']}, {card['peak_learning_rate']}",
        "trained on": f"{card['device']}, {card['seconds']:.0f} s, torch {card['torch']}",
        "learnt from": f"{card['continuations']:,} prompts of training files, {card['continued_tokens']:,} tokens of "
        f"the target's own at temperatures {', '.join(map(str, card['temperatures']))}{strayed}",
        "continuations SHA-256": f"`{card['continuations_sha256']}`",
        "corpus": f"standard library of Python {card['python']}",
        "corpus SHA-256": f"`{card['corpus_sha256']}`",
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    return f"""---
license: psf-2.0
---
# {card["name"]}

A specimen, not a useful model: {what} for `{card["target"]}`, trained so that accept
length in the lab is that of a trained pair.

| | |
| --- | --- |
{table}

Accept length is the mean of tokens committed by a verify pass, the bonus token included, along the target's greedy
continuation of held-out prompts in float32, counted up to where that continuation ends or turns periodic.

The corpus is the source of Python's standard library (PSF License 2.0). Nothing else was used and nothing downloaded.
`scripts/pico_corpus.py`, `scripts/pico_continuations.py` and `scripts/{script}` make this folder again, and
`scripts/pico_accept.py` measures it.
"""

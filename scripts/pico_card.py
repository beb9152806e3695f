"""Writes a trained pico model as a Hugging Face folder with its tokenizer, held-out prompts and card."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from cglab.models.config import ModelConfig
from cglab.models.decoder import Decoder
from cglab.models.dsa_config import ARCHITECTURE as DSA
from cglab.models.dsa_config import DsaConfig
from cglab.models.loading import layout_of

END_OF_TEXT = "<|endoftext|>"
SAMPLES = 3
SAMPLE_TOKENS = 64

KINDS = {
    "Qwen3ForCausalLM": ("a small decoder of the Qwen3 architecture", "train_pico.py"),
    DSA: (
        "a small decoder of the GLM-MoE-DSA architecture (latent attention,\nlightning indexer, routed experts)",
        "train_pico_dsa.py",
    ),
}

Continue = Callable[[list[int], int], list[int]]


def hugging_face_config(config: ModelConfig) -> dict[str, object]:
    """The contents of ``config.json``; the rotary base is there for old readers and for new ones."""
    return {
        "architectures": [config.architecture],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": config.tie_embeddings,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": config.eos_token_ids[0],
        "pad_token_id": config.eos_token_ids[0],
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        **(_latent_fields(config) if isinstance(config, DsaConfig) else _grouped_fields(config)),
    }


def _grouped_fields(config: ModelConfig) -> dict[str, object]:
    return {
        "model_type": "qwen3",
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": config.num_layers,
    }


def _latent_fields(config: DsaConfig) -> dict[str, object]:
    layers, dense = range(config.num_layers), config.dense_layers
    return {
        "model_type": "glm_moe_dsa",
        "num_key_value_heads": config.num_heads,
        "q_lora_rank": config.query_rank,
        "kv_lora_rank": config.latent_rank,
        "qk_rope_head_dim": config.head_dim,
        "qk_nope_head_dim": config.nope_dim,
        "v_head_dim": config.value_dim,
        "index_n_heads": config.index_heads,
        "index_head_dim": config.index_dim,
        "index_topk": config.index_topk,
        "indexer_types": ["shared" if layer in config.shared_layers else "full" for layer in layers],
        "first_k_dense_replace": dense,
        "mlp_layer_types": ["dense" if layer < dense else "sparse" for layer in layers],
        "n_routed_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.expert_size,
        "n_shared_experts": config.shared_experts,
        "routed_scaling_factor": config.routed_scale,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
    }


def checkpoint_tensors(model: Decoder) -> dict[str, Tensor]:
    """The model's weights under their checkpoint names, bfloat16 on the CPU; routers are float32."""
    parameters = dict(model.named_parameters())
    tensors: dict[str, Tensor] = {}
    for name, piece in layout_of(model.config).items():
        rows = piece.of(parameters[piece.parameter].detach())
        copied = rows.dim() > len(piece.shape)
        dtype = torch.float32 if "router" in piece.parameter else torch.bfloat16
        tensors[name] = (rows[0] if copied else rows).to("cpu", dtype).contiguous()
    return tensors


def write_model(
    model: Decoder, data: Path, out: Path, facts: dict[str, Any], continue_prompt: Continue
) -> None:
    """Writes the folder beside its place, then moves it file by file: a reader never sees half a file.

    Args:
        model: the trained decoder.
        data: what ``pico_corpus.py`` wrote.
        out: the model's folder.
        facts: of the training, for the card.
        continue_prompt: continues token ids greedily, for the card's samples.
    """
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(data / "tokenizer.json"))
    manifest = json.loads((data / "manifest.json").read_text())
    prompts = json.loads((data / "prompts.json").read_text())
    samples = []
    for prompt in prompts[3 : 3 + SAMPLES]:
        continuation = tokenizer.decode(continue_prompt(prompt["ids"], SAMPLE_TOKENS))
        samples.append({"file": prompt["file"], "prompt": prompt["text"], "continuation": continuation})
    bits = facts["held_out_loss"] / math.log(2)
    bits_per_byte = bits * manifest["held_out_tokens"] / manifest["held_out_bytes"]
    card = {
        "name": out.name,
        "architecture": model.config.architecture,
        "held_out_bits_per_byte": bits_per_byte,
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    card |= {"torch": torch.__version__, **facts, "corpus": manifest, "samples": samples}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.config.max_position,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {"0": {"content": END_OF_TEXT, "special": True, "normalized": False}},
    }
    generation = {"do_sample": False, "eos_token_id": 0, "pad_token_id": 0}
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        folder = Path(scratch)
        save_file(checkpoint_tensors(model), folder / "model.safetensors", metadata={"format": "pt"})
        for name, content in (
            ("config.json", hugging_face_config(model.config)),
            ("tokenizer_config.json", tokenizer_config),
            ("generation_config.json", generation),
            ("card.json", card),
        ):
            (folder / name).write_text(json.dumps(content, indent=2) + "\n")
        (folder / "README.md").write_text(model_card(card))
        for name in ("tokenizer.json", "prompts.json"):
            shutil.copy(data / name, folder / name)
        for file in folder.iterdir():
            file.chmod(0o644)
            file.replace(out / file.name)


def model_card(card: dict[str, Any]) -> str:
    """The model card as Markdown."""
    corpus, (what, script) = card["corpus"], KINDS[card["architecture"]]
    steps = f"{card['steps']:,} of {card['planned_steps']:,} planned"
    loss = f"{card['held_out_loss']:.4f} nats a token, {card['held_out_bits_per_byte']:.4f} bits a byte"
    held_out = f"{len(corpus['held_out_files'])} whole files, {corpus['held_out_tokens']:,} tokens"
    rows = {
        "parameters": f"{card['parameters']:,}",
        "held-out loss": loss,
        "training loss of that step": f"{card['train_loss']:.4f}",
        "steps": f"{steps}, {card['batch_tokens']:,} tokens each ({card['epochs']} epochs)",
        "seed, peak learning rate": f"{card['seed']}, {card['peak_learning_rate']}",
        "trained on": f"{card['device']}, {card['seconds']:.0f} s, torch {card['torch']}",
        "corpus": f"standard library of Python {corpus['python']}, {corpus['train_files']} files",
        "training tokens": f"{corpus['train_tokens']:,}",
        "held out": f"{held_out} (listed in `card.json`)",
        "corpus SHA-256": f"`{corpus['corpus_sha256']}`",
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    samples = "\n".join(
        f"From `{sample['file']}`:\n\n~~~text\n{sample['prompt']}⟦⟧{sample['continuation']}\n~~~\n"
        for sample in card["samples"]
    )
    return f"""---
license: psf-2.0
library_name: transformers
---
# {card["name"]}

A specimen, not a useful model: {what} that has learnt the look of Python's
standard library, so that tokens, key-value caches and accept lengths in the lab are those of a trained model.

| | |
| --- | --- |
{table}

The corpus is the source of Python's standard library (PSF License 2.0). Nothing else was
used and nothing downloaded. `scripts/pico_corpus.py` and `scripts/{script}` make this folder again.
`prompts.json` holds prompts from the held-out files.

## Samples

Held-out prompts, and after the marker ⟦⟧ the greedy continuation.

{samples}"""

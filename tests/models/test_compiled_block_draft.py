"""The compiled form of the block draft: the portable one's results, by the regions of a decoder, compiled once."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="no Triton here: it comes with torch for CUDA")

from cglab.models.block_draft import BlockDraftConfig
from cglab.models.body import Portable
from cglab.models.compiled import Compiled, nothing_compiled
from cglab.models.config import ModelConfig
from cglab.models.draft_cache import draft_cache
from cglab.models.drafts import DraftSource, load_draft
from cglab.models.kv import PagedKV
from cglab.models.loading import random_model
from cglab.models.ops import DECODE_ATTENTION, use_draft_ops
from cglab.models.regions import torch_kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TARGET = ModelConfig(
    "Qwen3ForCausalLM", vocab_size=50, hidden_size=32, intermediate_size=48, num_layers=4, num_heads=4, num_kv_heads=2,
    head_dim=16, max_position=64, qk_norm=True, tie_embeddings=True,
)  # fmt: skip
DRAFT = BlockDraftConfig(50, 32, 40, 2, 4, 2, 16, block_size=4, mask_token_id=49, context_layers=(1, 2))


@torch.no_grad()
def block(draft, kv, rows):
    """Hidden states of blocks of so many requests, from one state of the cache."""
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(0, 50, (rows * 4,), generator=generator).to(DEVICE)
    request_rows = torch.arange(1, rows + 1, device=DEVICE)
    last = torch.arange(4, device=DEVICE)
    slots = kv.full.page_table[request_rows, 3].unsqueeze(1) * 4 + last
    tree = torch.ones(rows, 4, 4, dtype=torch.bool, device=DEVICE)
    attention = DECODE_ATTENTION[draft.body.name](
        kv, request_rows=request_rows, seq_lens=torch.full_like(request_rows, 16), width=4, tree=tree,
        out_slots=slots.flatten(),
    )  # fmt: skip
    return draft(ids, (12 + last).repeat(rows), attention)


def test_both_bodies_agree_and_b57_b58_nothing_is_compiled_again():
    target = random_model(TARGET, device=DEVICE, dtype=torch.float32, seed=0)
    draft = load_draft(DraftSource(DRAFT, None), target).model
    kv = PagedKV(TARGET, pages=33, page_size=4, rows=9, max_context=16, device=DEVICE, dtype=torch.float32)
    kv.full.page_table[1:].copy_(1 + torch.arange(32, device=DEVICE).view(8, 4))
    own = draft_cache(DRAFT.stack, kv, dtype=torch.float32)
    if DEVICE.type == "cuda":
        use_draft_ops("compiled", draft, own)
        body = draft.body
    else:
        body = Compiled(DRAFT.stack, backend="aot_eager", kernels=torch_kernels())
        body.prepare(draft, own)
    for cache in own.caches().values():
        cache.normal_()
    for rows in (1, 2, 4, 5, 8, 1):
        draft.body = Portable()
        right = block(draft, own, rows)
        draft.body = body
        with nothing_compiled(draft):
            assert torch.allclose(block(draft, own, rows), right, rtol=1e-4, atol=1e-4)


def test_the_portable_form_is_set_for_either_kind_of_draft():
    target = random_model(TARGET, device="cpu", dtype=torch.float32, seed=0)
    draft = load_draft(DraftSource(replace(DRAFT, num_layers=1), None), target).model
    draft.body = None
    use_draft_ops("portable", draft, None)
    assert isinstance(draft.body, Portable)

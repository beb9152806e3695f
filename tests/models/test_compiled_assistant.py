"""The compiled form of the assistant: the portable one's results, compiled once, in one process with its target."""

import pytest
import torch

pytest.importorskip("triton", reason="no Triton here: it comes with torch for CUDA")

from cglab.models.assistant import AssistantConfig, FrozenAttention
from cglab.models.body import Portable
from cglab.models.compiled import nothing_compiled
from cglab.models.compiled_assistant import CompiledAssistant
from cglab.models.config import ModelConfig
from cglab.models.drafts import DraftSource, load_draft
from cglab.models.kv import PagedKV
from cglab.models.loading import random_model
from cglab.models.ops import DECODE_ATTENTION, use_draft_ops, use_ops
from cglab.models.paged import AttentionKind
from cglab.models.regions import torch_kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TARGET = ModelConfig(
    "Qwen3ForCausalLM", vocab_size=50, hidden_size=32, intermediate_size=48, num_layers=4, num_heads=4, num_kv_heads=2,
    head_dim=16, max_position=64, qk_norm=True, tie_embeddings=True, sliding_window=6, window_layers=(0, 2),
)  # fmt: skip
DRAFT = AssistantConfig(50, 32, 24, 40, ("sliding", "full"), num_heads=6, num_kv_heads=2, head_dim=16)
MOST = 20


@pytest.fixture
def pair():
    """A target with a filled cache, its assistant, and the assistant's compiled body."""
    target = random_model(TARGET, device=DEVICE, dtype=torch.float32, seed=0)
    draft = load_draft(DraftSource(DRAFT, None), target).model
    kv = PagedKV(TARGET, pages=13, page_size=4, rows=4, max_context=16, device=DEVICE, dtype=torch.float32,
                 window_pages=13)  # fmt: skip
    for pool in kv.pools:
        pool.page_table[1:].copy_(1 + torch.arange(12, device=DEVICE).view(3, 4))
    on_cpu = {"backend": "aot_eager", "kernels": torch_kernels()}
    body = CompiledAssistant(DRAFT.stack, **({} if DEVICE.type == "cuda" else on_cpu))
    body.prepare(draft, kv)
    for cache in kv.caches().values():
        cache.normal_()
    return draft, kv, body


@torch.no_grad()
def step(draft, kv, rows):
    generator = torch.Generator().manual_seed(rows)
    lens = torch.randint(1, 17, (rows,), generator=generator).to(DEVICE)
    tokens = torch.randint(0, 50, (rows,), generator=generator).to(DEVICE)
    hidden = torch.randn(rows, 32, generator=generator).to(DEVICE)
    request_rows = torch.randint(1, 4, (rows,), generator=generator).to(DEVICE)
    attention = DECODE_ATTENTION[draft.body.name](kv, request_rows=request_rows, seq_lens=lens)
    return draft(tokens, hidden, lens - 1, FrozenAttention(attention, draft.layers))


def test_both_bodies_agree_and_b57_b58_nothing_is_compiled_again(pair):
    draft, kv, body = pair
    assert (
        body.compilations == 8
    )  # each half of a layer for three kinds of step, what follows the last for two
    for rows in (1, 2, 3, 16, 17, MOST, 1):
        draft.body = Portable()
        right = step(draft, kv, rows)
        draft.body = body
        with nothing_compiled(draft):
            found = step(draft, kv, rows)
        for ours, theirs in zip(found, right, strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_step_of_no_rows_computes_nothing(pair):
    draft, _, body = pair
    empty = torch.zeros(0, 24, device=DEVICE)
    assert body(draft, empty, torch.zeros(0, 2, 16, device=DEVICE), None) is empty


@pytest.mark.gpu
def test_b57_ops_compile_a_pair_for_all_steps_of_a_draft_before_the_first(pair):
    """Decode, verify of a chain and of a tree, and the draft's own steps: no kernel is compiled afterwards."""
    from cglab.models.kernels.attention import _join, _part

    draft, kv, _ = pair
    use_ops("compiled", draft.target, kv, [AttentionKind(4, 4), AttentionKind(4, 5, tree=True)])
    use_draft_ops("compiled", draft, kv)

    def kernels():
        return [len(cache[0]) for kernel in (_part, _join) for cache in kernel.device_caches.values()]

    before = kernels()
    tree = torch.ones(2, 5, 5, device=DEVICE).tril().bool()
    with nothing_compiled(draft.target, draft), torch.no_grad():
        for width, links in ((1, None), (4, None), (5, tree)):
            sizes = torch.tensor([9, 14], device=DEVICE)
            slots = torch.zeros(2 * width, dtype=torch.int64, device=DEVICE)
            attention = DECODE_ATTENTION["compiled"](
                kv, request_rows=torch.tensor([1, 2], device=DEVICE), seq_lens=sizes, width=width, tree=links,
                out_slots=slots, window_out_slots=slots,
            )  # fmt: skip
            draft.target(slots, slots, attention)
        for rows in (1, 3, MOST):
            step(draft, kv, rows)
    assert kernels() == before

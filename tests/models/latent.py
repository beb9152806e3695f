"""A small model with latent attention and a cache that is filled by hand, for its tests."""

from dataclasses import replace

import torch

from cglab.models.dense import DenseAttention
from cglab.models.dsa_config import ARCHITECTURE, DsaConfig
from cglab.models.indexer import KeyRanges
from cglab.models.kv import PagedKV
from cglab.models.spans import Span
from cglab.models.sparse import Breaks, LiveKeys, SparseAttention

TINY = DsaConfig(
    architecture=ARCHITECTURE, vocab_size=97, hidden_size=32, intermediate_size=40, num_layers=4, num_heads=4,
    num_kv_heads=1, head_dim=8, max_position=128, query_rank=24, latent_rank=16, nope_dim=12, value_dim=10,
    index_heads=3, index_dim=16, index_topk=6, shared_layers=(2,), dense_layers=1, num_experts=8, experts_per_token=2,
    expert_size=24, routed_scale=2.5, eos_token_ids=(0,),
)  # fmt: skip
ARMS = {
    "all breaks": Breaks(select=True, prepare=True, attend=True, experts=True),
    "T8": Breaks(select=True, prepare=True),
    "T8 and T9": Breaks(),
    "T9b": Breaks(select=False),
}


class LatentRequests:
    """Requests on scattered pages, request i at row i + 1; each has as many pages as the context."""

    def __init__(self, model, requests, max_context, *, page_size=4):
        self.model, self.page_size = model, page_size
        each = -(-max_context // page_size)
        self.kv = PagedKV(
            model.config, pages=1 + requests * each, page_size=page_size, rows=requests + 1, max_context=max_context,
            device=model.norm.weight.device, dtype=model.norm.weight.dtype,
        )  # fmt: skip
        self.kv.full.page_table[1:] = 1 + torch.arange(requests * each).view(each, requests).t()
        self.lengths = [0] * requests

    def place(self, chunks):
        """Spans, ids, positions and slots of {request: token ids}, which are in the cache from then on."""
        device, spans, positions, rows = self.kv.device, [], [], []
        for request, tokens in chunks.items():
            spans.append(Span(request + 1, self.lengths[request], len(tokens)))
            positions.append(torch.arange(spans[-1].start, spans[-1].end, device=device))
            rows.append(torch.full((len(tokens),), request + 1, device=device))
            self.lengths[request] = spans[-1].end
        ids = torch.cat([torch.as_tensor(tokens) for tokens in chunks.values()]).to(device)
        position = torch.cat(positions)
        slots = self.kv.full.slots(torch.cat(rows), position.unsqueeze(1)).squeeze(1)
        return spans, ids, position, slots

    @torch.no_grad()
    def step(self, chunks, breaks=ARMS["T8 and T9"], padding=0, junk=0):
        """Hidden states of the live tokens, by the sparse form."""
        spans, ids, position, slots = self.place(chunks)
        tokens = len(ids)
        ids, position, slots = (
            torch.cat((part, part.new_full((padding,), fill)))
            for part, fill in ((ids, junk), (position, junk), (slots, 0))
        )
        keys = KeyRanges.of(spans, self.kv.full)
        keys = LiveKeys(keys) if breaks.select else padded(keys, padding)
        attend = SparseAttention(
            self.kv, out_slots=slots, keys=keys, breaks=breaks, index_topk=self.model.config.index_topk
        )
        return self.model(ids, position, attend)[:tokens]

    @torch.no_grad()
    def dense(self, chunks):
        """As ``step``, by the dense form."""
        spans, ids, position, slots = self.place(chunks)
        return self.model(ids, position, DenseAttention(self.kv, out_slots=slots, spans=spans))


def padded(keys, tokens, room=5):
    """Static ranges: room for more keys, padded tokens that see none, and requests that are not told apart."""
    idle = keys.starts.new_zeros(tokens)
    return replace(
        keys, slots=torch.cat((keys.slots, keys.slots.new_zeros(room))), starts=torch.cat((keys.starts, idle)),
        seq_lens=torch.cat((keys.seq_lens, idle)), spans=(),
    )  # fmt: skip

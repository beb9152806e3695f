"""Small models and a paged cache that is filled by hand, for the tests of the models layer."""

from dataclasses import replace

import pytest
import torch

from cglab.models.attention import DecodeAttention
from cglab.models.config import ModelConfig
from cglab.models.kv import PagedKV
from cglab.models.loading import random_model
from cglab.models.spans import LiveSpans, PrefillAttention, Span

TINY = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=300,
    hidden_size=48,
    intermediate_size=80,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    max_position=128,
    qk_norm=True,
    tie_embeddings=True,
    eos_token_ids=(0,),
)


class PagedRunner:
    """Requests on scattered pages: prefill and decode by the attention classes, without an engine.

    Request i has row i + 1. Pages are dealt out round robin, so that no request's pages are neighbours.
    """

    def __init__(self, model, requests, max_context, *, page_size=4, device="cpu"):
        self.model, self.device, self.page_size = model, device, page_size
        dtype = model.norm.weight.dtype
        each = -(-max_context // page_size)
        self.kv = PagedKV(
            model.config,
            pages=1 + requests * each,
            page_size=page_size,
            rows=requests + 1,
            max_context=max_context,
            device=device,
            dtype=dtype,
        )
        self.pages = 1 + torch.arange(requests * each).view(each, requests).t().contiguous()
        self.kv.page_table[1:] = self.pages.to(device)
        self.lengths = [0] * requests

    def slots(self, request, start, count):
        """Where positions start .. start + count of a request live."""
        position = torch.arange(start, start + count)
        return self.pages[request][position // self.page_size] * self.page_size + position % self.page_size

    @torch.no_grad()
    def prefill(self, chunks):
        """Runs {request: token ids} and gives the hidden states of all tokens."""
        spans, ids, positions, slots = [], [], [], []
        for request, tokens in chunks.items():
            start = self.lengths[request]
            spans.append(Span(request + 1, start, len(tokens)))
            ids.append(torch.as_tensor(tokens))
            positions.append(torch.arange(start, start + len(tokens)))
            slots.append(self.slots(request, start, len(tokens)))
            self.lengths[request] += len(tokens)
        attend = PrefillAttention(self.kv, out_slots=self._join(slots), live=LiveSpans(spans))
        return self.model(self._join(ids), self._join(positions), attend)

    def decode_inputs(self, tokens, padding=0, width=1):
        """Tensors of a decode step for {request: token ids}, with padded requests after the live ones."""
        ids, positions, slots = [], [], []
        for request, new in tokens.items():
            start = self.lengths[request]
            ids.append(torch.as_tensor(new))
            positions.append(torch.arange(start, start + width))
            slots.append(self.slots(request, start, width))
            self.lengths[request] += width
        idle = torch.zeros(padding * width, dtype=torch.int64)
        rows = torch.tensor([request + 1 for request in tokens] + [0] * padding)
        lens = torch.tensor([self.lengths[request] for request in tokens] + [width] * padding)
        return {
            "ids": self._join([*ids, idle]),
            "positions": self._join([*positions, idle]),
            "out_slots": self._join([*slots, idle]),
            "rows": rows.to(self.device),
            "lens": lens.to(self.device),
        }

    def step(self, inputs, width=1, live=None):
        """One decode step on given tensors: the hidden states of all rows."""
        attend = DecodeAttention(
            self.kv,
            out_slots=inputs["out_slots"],
            request_rows=inputs["rows"],
            seq_lens=inputs["lens"],
            width=width,
            live=live,
        )
        return self.model(inputs["ids"], inputs["positions"], attend)

    @torch.no_grad()
    def decode(self, tokens, *, padding=0, width=1, live=None):
        """Runs {request: new token ids}, ``width`` of them each."""
        return self.step(self.decode_inputs(tokens, padding, width), width, live)

    def _join(self, parts):
        return torch.cat(parts).to(self.device)


def causal(query, key, value):
    """Attention of one request over its own tokens, spelt out: the reference without a cache."""
    group = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(group, dim=1) for tensor in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / query.shape[2] ** 0.5
    scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1)


@pytest.fixture
def whole():
    """Hidden states of one request computed in one go, without a cache."""

    @torch.no_grad()
    def run(model, tokens):
        ids = torch.as_tensor(tokens)
        return model(ids, torch.arange(len(ids)), lambda _, query, key, value: causal(query, key, value))

    return run


@pytest.fixture
def tiny():
    """A function that makes a small random model, float32 on the CPU, with fields of its shape replaced."""

    def make(dtype=torch.float32, **fields):
        return random_model(replace(TINY, **fields), device="cpu", dtype=dtype, seed=1)

    return make


@pytest.fixture
def paged():
    """The class of the hand-filled paged cache."""
    return PagedRunner

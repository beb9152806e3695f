"""Small models and a paged cache that is filled by hand, for the tests of the models layer."""

import json
from dataclasses import replace
from importlib import import_module

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

    Request i has row i + 1. Pages are dealt out round robin, so that no request's pages are neighbours. In a pool for
    sliding windows a request has just as many pages as a step of ``widest`` new tokens can see, and what it does not
    see is NaN.
    """

    def __init__(self, model, requests, max_context, *, page_size=4, device="cpu", widest=1):
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
            window_pages=self.start_windows(requests, widest),
        )
        self.pages = 1 + torch.arange(requests * each).view(each, requests).t().contiguous()
        self.kv.full.page_table[1:] = self.pages.to(device)
        self.lengths = [0] * requests

    def start_windows(self, requests, widest):
        """How many pages the window pool needs, if there is one."""
        window, self.held = self.model.config.sliding_window, [set() for _ in range(requests)]
        if window is None:
            return None
        self.ring = -(-(window + widest - 2) // self.page_size) + 1
        return 1 + requests * self.ring

    def slide(self, request, width):
        """Maps the pages that the last ``width`` tokens of a request see and drops all others, to slots out."""
        pool, size, length = self.kv.sliding, self.page_size, self.lengths[request]
        first = max(length - width - pool.window + 1, 0)
        seen = set(range(first // size, (length - 1) // size + 1))
        place = {page: 1 + request * self.ring + page % self.ring for page in seen | self.held[request]}
        for page in seen ^ self.held[request]:  # dropped, or taken and not written yet
            for cache in (pool.keys, pool.values):
                cache[:, place[page] * size : (place[page] + 1) * size] = float("nan")
        self.held[request] = seen
        pool.page_table[request + 1] = 0
        for page in seen:
            pool.page_table[request + 1, page] = place[page]
        return torch.tensor([place[i // size] * size + i % size for i in range(length - width, length)])

    def slots(self, request, start, count):
        """Where positions start .. start + count of a request live."""
        position = torch.arange(start, start + count)
        return self.pages[request][position // self.page_size] * self.page_size + position % self.page_size

    @torch.no_grad()
    def prefill(self, chunks):
        """Runs {request: token ids} and gives the hidden states of all tokens."""
        spans, ids, positions, slots, window_slots = [], [], [], [], []
        for request, tokens in chunks.items():
            start = self.lengths[request]
            spans.append(Span(request + 1, start, len(tokens)))
            ids.append(torch.as_tensor(tokens))
            positions.append(torch.arange(start, start + len(tokens)))
            slots.append(self.slots(request, start, len(tokens)))
            self.lengths[request] += len(tokens)
            if self.kv.sliding is not None:
                window_slots.append(self.slide(request, len(tokens)))
        windows = {"window_out_slots": self._join(window_slots)} if window_slots else {}
        attend = PrefillAttention(self.kv, out_slots=self._join(slots), live=LiveSpans(spans), **windows)
        return self.model(self._join(ids), self._join(positions), attend)

    def decode_inputs(self, tokens, padding=0, width=1):
        """Tensors of a decode step for {request: token ids}, with padded requests after the live ones."""
        ids, positions, slots, window_slots = [], [], [], []
        for request, new in tokens.items():
            start = self.lengths[request]
            ids.append(torch.as_tensor(new))
            positions.append(torch.arange(start, start + width))
            slots.append(self.slots(request, start, width))
            self.lengths[request] += width
            if self.kv.sliding is not None:
                window_slots.append(self.slide(request, width))
        idle = torch.zeros(padding * width, dtype=torch.int64)
        rows = torch.tensor([request + 1 for request in tokens] + [0] * padding)
        lens = torch.tensor([self.lengths[request] for request in tokens] + [width] * padding)
        return {
            "ids": self._join([*ids, idle]),
            "positions": self._join([*positions, idle]),
            "out_slots": self._join([*slots, idle]),
            "rows": rows.to(self.device),
            "lens": lens.to(self.device),
            **({"window_out_slots": self._join([*window_slots, idle])} if window_slots else {}),
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
            window_out_slots=inputs.get("window_out_slots"),
        )
        return self.model(inputs["ids"], inputs["positions"], attend)

    @torch.no_grad()
    def decode(self, tokens, *, padding=0, width=1, live=None):
        """Runs {request: new token ids}, ``width`` of them each."""
        return self.step(self.decode_inputs(tokens, padding, width), width, live)

    def _join(self, parts):
        return torch.cat(parts).to(self.device)


def causal(query, key, value, window=None):
    """Attention of one request over its own tokens, spelt out: the reference without a cache."""
    group = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(group, dim=1) for tensor in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / query.shape[2] ** 0.5
    every = torch.ones_like(scores, dtype=torch.bool)
    unseen = every.triu(1) if window is None else every.triu(1) | every.tril(-window)
    scores = scores.masked_fill(unseen, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1)


@pytest.fixture
def whole():
    """Hidden states of one request computed in one go, without a cache."""

    @torch.no_grad()
    def run(model, tokens):
        ids, config = torch.as_tensor(tokens), model.config

        def attend(layer, query, key, value):
            return causal(query, key, value, config.sliding_window if layer in config.window_layers else None)

        return model(ids, torch.arange(len(ids)), attend)

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


@pytest.fixture(scope="module")
def script(root):
    """A function that imports one of the repository's scripts by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(root / "scripts")
        yield import_module


@pytest.fixture
def training_facts(tmp_path):
    """What a draft's card is written from: the corpus and the continuations in ``tmp_path``, and a run's own facts."""
    told = {
        "manifest": {"python": "3.11", "corpus_sha256": "0" * 64},
        "continuations": {
            "continuations": 8, "continued_tokens": 96, "temperatures": [0.0], "stray": 1.0,
            "continuations_sha256": "1" * 64,
        },
    }  # fmt: skip
    for name, facts in told.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(facts))

    def facts_of(accept_length, most):
        half = {
            "accept_length": accept_length, "distribution": {"1": 0.5, str(most): 0.5}, "passes": 2, "prompts": 1,
            "tokens_counted": 8,
        }  # fmt: skip
        return {
            "target": "tiny", "held_out": half | {"distinct_4grams": 1.0}, "look_up": half, "train_loss": 1.0,
            "steps": 8, "planned_steps": 8, "batch": 8, "epochs": 8, "seed": 0, "peak_learning_rate": 1e-2,
            "device": "CPU", "seconds": 1.0, "resumed_from": None,
        }  # fmt: skip

    return facts_of

"""Worlds with a block draft: its own step, with the sampler inside or outside, and the target's steps that feed it."""

from dataclasses import replace

import torch

from cglab.models.block_draft import BlockDraft, BlockDraftConfig
from cglab.models.draft_cache import Feeder, draft_cache
from cglab.models.loading import fill_randomly
from cglab.runners.block_draft import BlockDraftRunner
from cglab.runners.draft_sampler import DraftSampler
from cglab.runners.prefill import PrefillRunner
from cglab.runners.verify import VerifyRunner

from .conftest import CONFIG, PrefillWorld, Speculative, VerifyWorld, Windowed

UNTIED = replace(CONFIG, tie_embeddings=False)
"""Random targets that are tied repeat one token, which a wrong cache would not change."""
WINDOWED = replace(UNTIED, sliding_window=6, window_layers=(1,))
BLOCK = BlockDraftConfig(
    vocab_size=97, backbone_size=32, intermediate_size=40, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    block_size=4, mask_token_id=96, context_layers=(0, 1),
)  # fmt: skip


def block_draft(target, config=BLOCK, seed=2):
    """A random block draft of a target: its norms are no ones, and what it adds weighs more than the mask's embedding."""
    place = {"device": target.rotary.device, "dtype": target.rotary.dtype}
    draft = BlockDraft(config, **place).eval().requires_grad_(requires_grad=False)
    fill_randomly(draft, config.num_layers, seed)
    for name, parameter in draft.named_parameters():
        if "norm" in name:
            parameter.normal_(1.0, 0.1)
        elif name.endswith(("attention.output.weight", "feed_forward.down.weight")):
            parameter.mul_(8)
    draft.bind(target)
    return draft


class Drafting:
    """What these worlds share: a draft, and its cache beside the target's."""

    config = UNTIED

    def open_draft(self):
        self.draft = block_draft(self.model)
        self.draft_kv = draft_cache(BLOCK.stack, self.kv, dtype=self.kv.full.keys.dtype)
        generator = torch.Generator().manual_seed(7)
        for cache in self.draft_kv.caches().values():
            cache.copy_(torch.randn(cache.shape, generator=generator))
        self.feeder = Feeder(self.draft, self.draft_kv)

    def cache(self):
        """Keys and values of the target, then of the draft."""
        return [cache.clone() for kv in (self.kv, self.draft_kv) for cache in kv.caches().values()]

    def restore(self, cache):
        current = [cache for kv in (self.kv, self.draft_kv) for cache in kv.caches().values()]
        for tensor, saved in zip(current, cache, strict=True):
            tensor.copy_(saved)


class BlockWorld(Drafting, Speculative):
    """Steps of a draft; the setting ``in_graph`` says where the sampler is."""

    def make_runner(self, buckets, options, settings):
        self.open_draft()
        self.width = BLOCK.block_size
        sampler = DraftSampler(self.model, self.width, **settings)
        return BlockDraftRunner(self.draft, self.draft_kv, self.group, buckets, options, sampler=sampler)

    def inputs(self, committed, seed=0):
        """One block of rows 1, 2, ... with so many tokens in the cache."""
        generator = torch.Generator().manual_seed(seed)
        rows = range(1, len(committed) + 1)
        places = [
            self.slots_of(row)[c + i]
            for row, c in zip(rows, committed, strict=True)
            for i in range(self.width)
        ]
        newest = torch.randint(self.config.vocab_size, (len(committed),), generator=generator)
        return {
            "input_ids": newest.to(self.device), "out_slots": self.tensor(places),
            "request_rows": self.tensor(list(rows)), "seq_lens": self.tensor(committed) + self.width,
        }  # fmt: skip


class FedVerifyWorld(Drafting, VerifyWorld):
    """Verify steps that feed a draft."""

    def make_runner(self, buckets, options, settings):
        self.open_draft()
        self.topk, self.width = 1, BLOCK.block_size
        sizes = {"width": self.width, "steps": self.width - 1, "hidden": False}
        return VerifyRunner(
            self.model, self.kv, self.group, buckets, options, **sizes, feeder=self.feeder, **settings
        )


class FedPrefillWorld(Drafting, PrefillWorld):
    """Prefill steps that feed a draft."""

    def make_runner(self, buckets, options, settings):
        self.open_draft()
        return PrefillRunner(
            self.model, self.kv, self.group, buckets, options, feeder=self.feeder, **settings
        )


class WindowFedPrefillWorld(Windowed, FedPrefillWorld):
    """The same with a target that has sliding windows; the draft has none."""

    config, ring = WINDOWED, 4
    window_pages = 8 * 4 + 1
    cache, restore = Drafting.cache, Drafting.restore

    def inputs(self, spans):
        return {**super().inputs(spans), "window_out_slots": self.slide(spans)}

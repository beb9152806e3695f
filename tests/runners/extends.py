"""A world with a small sparse target and its NextN layer, whose extend is the step."""

from dataclasses import replace

import torch

from cglab.models.draft_cache import draft_cache
from cglab.models.loading import fill_randomly
from cglab.models.nextn import NextN, nextn_config
from cglab.models.spans import Span
from cglab.runners.draft_extend import DraftExtendRunner
from tests.models.latent import TINY

from .conftest import PrefillWorld


def nextn_layer(target, seed=2):
    """A random NextN layer of a target."""
    place = {"device": target.rotary.device, "dtype": target.rotary.dtype}
    layer = NextN(nextn_config(target.config), **place).eval().requires_grad_(requires_grad=False)
    fill_randomly(layer, 1, seed)
    layer.bind(target)
    return layer


class ExtendWorld(PrefillWorld):
    """Extends over rows that own 16 tokens each, of which a token attends to six; the target computes nothing here."""

    config = replace(TINY, num_layers=2, shared_layers=())

    def make_runner(self, buckets, options, settings):
        self.layer = nextn_layer(self.model)
        self.draft_kv = draft_cache(self.layer.config, self.kv, dtype=self.kv.full.keys.dtype)
        generator = torch.Generator().manual_seed(7)
        for cache in self.draft_kv.caches().values():
            cache[:, self.kv.page_size :].copy_(
                torch.randn(cache[:, self.kv.page_size :].shape, generator=generator)
            )
        return DraftExtendRunner(self.layer, self.draft_kv, self.group, buckets, options, **settings)

    def inputs(self, spans):
        """As of a prefill, with hidden states that are made up from row and position."""
        values = super().inputs(spans)
        places = [(row, start + i) for row, start, length in spans for i in range(length)]
        seeds = torch.tensor([[17.0 * row + position] for row, position in places])
        hidden = torch.sin(seeds * torch.arange(1, self.config.hidden_size + 1))
        return {**values, "hidden": hidden.to(self.device, self.layer.norm.weight.dtype)}

    def cache(self):
        """Latents and index keys of the layer."""
        return [cache.clone() for cache in self.draft_kv.caches().values()]

    def restore(self, cache):
        for tensor, saved in zip(self.draft_kv.caches().values(), cache, strict=True):
            tensor.copy_(saved)

    def spans(self, spans):
        """What the runner calls live."""
        return [Span(*span) for span in spans]

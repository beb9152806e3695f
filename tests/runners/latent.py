"""Worlds of a model with latent attention: its cache has keys and values of different shapes."""

from cglab.runners.dsa_policy import gates
from cglab.runners.dsa_prefill import DsaPrefillRunner
from tests.models.latent import TINY
from tests.runners.conftest import PrefillWorld, VerifyWorld, World

ARMS = {
    "experts too": gates(attention=False, preparation=False, experts=False),
    "breaks": gates(attention=False, preparation=False),
    "T8": gates(preparation=False),
    "T8 and T9": gates(),
    "T9b": gates(selection=True),
}
"""What is recorded of a layer."""


class Latent:
    """A cache whose tensors differ in shape, and a context that is longer than what is kept."""

    config = TINY

    def cache(self):
        return [cache.clone() for cache in self.kv.caches().values()]

    def restore(self, cache):
        for current, saved in zip(self.kv.caches().values(), cache, strict=True):
            current.copy_(saved)


class LatentDecodeWorld(Latent, World):
    """Decode steps."""


class LatentVerifyWorld(Latent, VerifyWorld):
    """Verify steps of chains."""


class LatentPrefillWorld(Latent, PrefillWorld):
    """Prefill steps of an arm; settings are those of the runner."""

    def make_runner(self, buckets, options, settings):
        return DsaPrefillRunner(self.model, self.kv, self.group, buckets, options, **settings)

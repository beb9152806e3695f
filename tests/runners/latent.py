"""Worlds of a model with latent attention: its cache has keys and values of different shapes."""

from tests.models.latent import TINY
from tests.runners.conftest import VerifyWorld, World


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

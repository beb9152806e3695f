"""The decode step of ``transformers``, eager, as an arm: what a user gets from ``model(...)`` and an argmax.

The model has the shape of ours and random weights of its own, so it computes something else: it is an arm for its
time only, and no parity is told. Its KV cache is whichever of ``DynamicCache`` and ``StaticCache`` makes the faster
step at that size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import Tensor

from cglab.engine.workload import DecodeStep
from cglab.errors import ModelError
from cglab.graphs.clocks import clock_for, sample_seconds
from cglab.measure.profiling import profile
from cglab.measure.trace import Trace
from cglab.models.config import ModelConfig

ARM: Final = "transformers"
CACHES: Final = ("DynamicCache", "StaticCache")
MISSING: Final = "transformers is not installed, so its eager step was not measured; pip install transformers"
ROOM: Final = 8
"""Tokens after the prompt that a static cache has room for: the steps of one sample, or of a trace."""


def installed() -> bool:
    """Whether ``transformers``, which only development needs, is there."""
    return find_spec("transformers") is not None


def random_transformers(config: ModelConfig, *, device: torch.device, dtype: torch.dtype) -> Any:
    """A causal model of ``transformers`` of our shape, its random weights created on the device.

    Args:
        config: the shape.
        device: where the weights are created.
        dtype: their dtype.

    Returns:
        The model with SDPA attention, in evaluation mode and without gradients.

    Raises:
        ModelError: if this version of ``transformers`` has no model of the architecture.
    """
    import transformers

    made = getattr(transformers, config.architecture.replace("ForCausalLM", "Config"), None)
    if made is None:
        raise ModelError(
            f"transformers {transformers.__version__} has no {config.architecture}; install >= 5.12.1"
        )
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            made(**_fields(config)), dtype=dtype, attn_implementation="sdpa"
        )
    return model.eval().requires_grad_(requires_grad=False)


def _fields(config: ModelConfig) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if (scaling := config.rope_scaling) is not None:
        rope |= {
            "rope_type": "llama3", "factor": scaling.factor, "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position,
        }  # fmt: skip
    fields = {
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size, "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size, "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
        "max_position_embeddings": config.max_position, "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_embeddings, "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias, "rope_parameters": rope,
    }  # fmt: skip
    if config.sliding_window is not None:
        windowed = ["full_attention", "sliding_attention"]
        fields |= {
            "use_sliding_window": True, "sliding_window": config.sliding_window,
            "layer_types": [windowed[layer in config.window_layers] for layer in range(config.num_layers)],
        }  # fmt: skip
    return fields


class CachedStep:
    """Decode steps of a batch, one after another, each with the token of the one before.

    Attributes:
        cache: name of the cache's class.
        tokens: [batch, 1] int64, what the next step takes.
        forward: computes it; the model's own, or a compiled one.
    """

    @torch.no_grad()
    def __init__(
        self, model: Any, cache: str, batch: int, context: int, *, seed: int = 0, length: int | None = None
    ) -> None:
        """Computes the prompts.

        Args:
            model: of :func:`random_transformers`.
            cache: name of the cache's class, one of ``CACHES``.
            batch: requests.
            context: tokens of each in the first step, the new one included.
            seed: of the prompts: those of ``steady_decode``.
            length: tokens that a static cache holds; None for those of one sample.
        """
        import transformers

        self.cache, self._context, self.forward = cache, context, model
        # The argument was renamed after 5.17, and its old name warns at every call.
        known = inspect.signature(type(model).forward).parameters
        self._name = "cache" if "cache" in known else "past_key_values"
        sizes = {"max_cache_len": length or context - 1 + ROOM} if cache == "StaticCache" else {}
        self._prompt = getattr(transformers, cache)(config=model.config, **sizes)
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, model.config.vocab_size, (batch, context - 1), generator=generator)
        self._held = self._prompt
        self._first = self._next(ids.to(model.device), logits_to_keep=1)
        self.restart()

    def restart(self) -> None:
        """Back to the end of the prompt, in a copy of its cache: no version rewinds both kinds."""
        self._held, self.tokens = deepcopy(self._prompt), self._first

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """One step; [batch, 1] int64 next tokens."""
        self.tokens = self._next(self.tokens)
        return self.tokens

    def _next(self, ids: Tensor, **options: Any) -> Tensor:
        made = self.forward(input_ids=ids, use_cache=True, **{self._name: self._held}, **options)
        return made.logits[:, -1].argmax(-1, keepdim=True)


@dataclass(frozen=True)
class TransformersArm:
    """The arm at one size.

    Attributes:
        step: on the faster cache.
        device: what it runs on.
        seconds: of a step on each cache, by a few samples that chose it.
    """

    step: CachedStep
    device: torch.device
    seconds: dict[str, float]

    @property
    def note(self) -> str:
        """What a reader of its record must know."""
        told = ", ".join(f"{name} {seconds * 1e3:.3g} ms" for name, seconds in self.seconds.items())
        return (
            "transformers' own model of this shape with other random weights: another computation, so there is no "
            f"parity with it. On {self.step.cache}, the faster one: {told}."
        )

    def trace(self) -> Trace:
        """Traces three steps from the end of the prompt."""
        self.step.restart()
        return profile(self.step, steps=3, device=self.device)

    def timed(self, calls: int) -> Callable[[], float]:
        """Seconds a step of ``calls`` steps in a row from the end of the prompt, the copy of its cache untimed."""
        return _timed(self.step, self.device, calls)


def transformers_arm(
    model: Any, step: DecodeStep, device: torch.device, *, calls: int, length: int | None = None
) -> TransformersArm:
    """The arm at the size of a step of ours, on the cache that is faster there.

    Args:
        model: of :func:`random_transformers`.
        step: its batch and context are taken.
        device: what the model is on.
        calls: steps in a row behind one sample, at most ``ROOM`` without a length.
        length: tokens that a static cache holds; None for those of one sample.
    """
    steps = {cache: CachedStep(model, cache, step.live, step.context, length=length) for cache in CACHES}
    seconds: dict[str, float] = {}
    for cache, made in steps.items():
        timed = _timed(made, device, calls)
        timed()  # loads kernels
        seconds[cache] = min(timed() for _ in range(3))
    return TransformersArm(steps[min(seconds, key=seconds.__getitem__)], device, seconds)


def _timed(step: CachedStep, device: torch.device, calls: int) -> Callable[[], float]:
    clock = clock_for(device, "wall")

    def sample() -> float:
        step.restart()
        return sample_seconds(step, clock, repeats=1, warmup=0, calls=calls)[0]

    return sample

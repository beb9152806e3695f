"""The decoder of the Qwen3 and Llama family, on one flattened token axis.

What is computed is that of the Hugging Face checkpoints; how is chosen for capture: every step is tensor in,
tensor out, with no host read, no shape that depends on data and no tensor made from Python values, so that a
recording of any kind holds it. Only ``attend`` knows where keys and values live. Projections that read the
same input are one matrix (query, key and value; gate and up), and the rotary turn and the per-head norm run
over query and key heads at once: a decode step is mostly launches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import skip_init

from cglab.errors import InputError
from cglab.models.body import Body, Portable, Taps
from cglab.models.config import ModelConfig
from cglab.models.rotary import rotary_table, rotate
from cglab.models.stages import Elsewhere, Proxy, Stage, bind, by_global_id, cut

Part = TypeVar("Part", bound=nn.Module)


class Attend(Protocol):
    """Attention over whatever cache it holds: stores this step's keys and values and reads those before."""

    def __call__(self, layer_index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Stores and attends in one layer.

        Args:
            layer_index: which decoder block asks.
            query: [T, heads, head_dim], already turned to its position.
            key: [T, kv_heads, head_dim], already turned to its position.
            value: [T, kv_heads, head_dim].

        Returns:
            [T, heads * head_dim], in the dtype of ``query``.
        """
        ...


class Attention(nn.Module):
    """Projections, per-head norm and rotary turn around an ``attend`` callable."""

    def __init__(self, config: ModelConfig, **place: Any) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.eps = config.rms_norm_eps
        turned = self.heads + self.kv_heads
        width = (turned + self.kv_heads) * self.head_dim
        self.qkv = skip_init(nn.Linear, config.hidden_size, width, bias=config.attention_bias, **place)
        output_in = self.heads * self.head_dim
        self.output = skip_init(nn.Linear, output_in, config.hidden_size, bias=config.attention_bias, **place)
        # One row per turned head: a checkpoint's query norm repeated, then its key norm repeated.
        self.head_norm = nn.Parameter(torch.empty(turned, self.head_dim, **place)) if config.qk_norm else None

    def forward(self, hidden: Tensor, turn: Tensor, layer_index: int, attend: Attend) -> Tensor:
        """Hidden states [T, hidden_size] from normed ones; ``turn`` holds the rows of the rotary table."""
        qkv = self.qkv(hidden).view(-1, self.heads + 2 * self.kv_heads, self.head_dim)
        turned = qkv[:, : self.heads + self.kv_heads]
        if self.head_norm is not None:
            # The values are normalised too and not used: that keeps the input contiguous, which saves a copy.
            normed = F.rms_norm(qkv, (self.head_dim,), eps=self.eps)
            turned = normed[:, : self.heads + self.kv_heads] * self.head_norm
        query, key = rotate(turned, turn).split((self.heads, self.kv_heads), dim=1)
        value = qkv[:, self.heads + self.kv_heads :]
        return self.output(attend(layer_index, query, key, value))

    def context(self, hidden: Tensor, turn: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [T, kv_heads, head_dim] alone, of tokens that ask nothing themselves."""
        asked = self.heads * self.head_dim
        bias = None if self.qkv.bias is None else self.qkv.bias[asked:]
        joint = F.linear(hidden, self.qkv.weight[asked:], bias).view(-1, 2 * self.kv_heads, self.head_dim)
        key, value = joint.split(self.kv_heads, dim=1)
        if self.head_norm is not None:
            key = F.rms_norm(key, (self.head_dim,), eps=self.eps) * self.head_norm[self.heads :]
        return rotate(key, turn), value


class FeedForward(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))`` with gate and up in one matrix."""

    def __init__(self, config: ModelConfig, **place: Any) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up = skip_init(nn.Linear, hidden, 2 * inner, bias=bias, **place)
        self.down = skip_init(nn.Linear, inner, hidden, bias=bias, **place)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states [T, hidden_size] from normed ones."""
        gate, up = self.gate_up(hidden).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """One decoder layer: attention and feed-forward, each behind a norm and added to the residual stream.

    Args:
        config: the shape.
        attention: in place of the decoder's own.
        feed_forward: likewise.
        **place: device and dtype of the parameters.
    """

    def __init__(
        self,
        config: ModelConfig,
        attention: nn.Module | None = None,
        feed_forward: nn.Module | None = None,
        **place: Any,
    ) -> None:
        super().__init__()
        self.attention_norm = skip_init(nn.RMSNorm, config.hidden_size, eps=config.rms_norm_eps, **place)
        self.attention = attention or Attention(config, **place)
        self.feed_forward_norm = skip_init(nn.RMSNorm, config.hidden_size, eps=config.rms_norm_eps, **place)
        self.feed_forward = feed_forward or FeedForward(config, **place)

    def forward(self, hidden: Tensor, turn: Tensor, layer_index: int, attend: Attend) -> Tensor:
        """The residual stream [T, hidden_size] after this block."""
        hidden = hidden + self.attention(self.attention_norm(hidden), turn, layer_index, attend)
        return hidden + self.feed_forward(self.feed_forward_norm(hidden))


class Decoder(nn.Module):
    """A decoder-only language model, or the part of it that a stage of a pipeline holds.

    The parameters are uninitialised memory: ``loading.load_model`` fills them from a checkpoint or a seed.

    Attributes:
        body: how the blocks are computed; ``ops.use`` changes it.
        stage: which part of the model this is.

    Args:
        config: the shape of the whole.
        stage: the part; None for the whole. What others hold is ``Elsewhere``, under the same names.
        device: where the parameters are allocated.
        dtype: their dtype, and that of the rotary tables.
    """

    rotary: Tensor

    def __init__(
        self,
        config: ModelConfig,
        *,
        stage: Stage | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        place: dict[str, Any] = {"device": device or "cpu", "dtype": dtype or torch.get_default_dtype()}
        self.config = config
        self.stage = stage or cut(config.num_layers, 1)[0]
        self.body: Body = Portable()
        first, last, tied = self.stage.first, self.stage.last, config.tie_embeddings
        size = (config.vocab_size, config.hidden_size)
        self.embedding = (
            skip_init(nn.Embedding, *size, **place) if first or (last and tied) else _elsewhere(nn.Embedding)
        )
        held = by_global_id(
            ((layer, self.block(layer, **place)) for layer in self.stage.layers), config.num_layers
        )
        self.blocks = nn.ModuleList(block or Elsewhere(f"layer {id_}") for id_, block in enumerate(held))
        eps = config.rms_norm_eps
        self.norm = skip_init(nn.RMSNorm, size[1], eps=eps, **place) if last else _elsewhere(nn.RMSNorm)
        head = skip_init(nn.Linear, *size[::-1], bias=False, **place) if last and not tied else None
        self.head = head if last else _elsewhere(nn.Linear)
        self.register_buffer("rotary", rotary_table(config).to(**place), persistent=False)

    @property
    def taken(self) -> tuple[Proxy, ...]:
        """What this stage takes from the one before, declared; nothing of the first."""
        return () if self.stage.first else self.carried_into(self.stage.layers.start)

    @property
    def handed(self) -> tuple[Proxy, ...]:
        """What this stage hands to the next, declared; nothing of the last."""
        return () if self.stage.last else self.carried_into(self.stage.layers.stop)

    def carried_into(self, layer_index: int) -> tuple[Proxy, ...]:
        """What a stage that begins with this layer takes, in this body."""
        return tuple(Proxy(name, (self.config.hidden_size,), self.rotary.dtype) for name in self.body.carries)

    def block(self, layer_index: int, **place: Any) -> Block:
        """A layer of the stack, unfilled."""
        return Block(self.config, **place)

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Any, taps: Taps | None = None) -> Tensor:
        """Runs every block of a whole model.

        Args:
            input_ids: [T] int64, tokens of all requests one after the other.
            positions: [T] int64, each token's position in its own request, below ``max_position``.
            attend: attention over the cache, as the layers ask for it; see ``Attend``.
            taps: told the residual stream after every block.

        Returns:
            [T, hidden_size]: the normed hidden states, in the parameters' dtype.
        """
        hidden = self.embedding(input_ids)
        return self.body(self, hidden, self.rotary.index_select(0, positions), attend, taps)

    def part(
        self,
        *,
        positions: Tensor,
        attend: Any,
        input_ids: Tensor | None = None,
        proxies: Mapping[str, Any] | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """Runs the blocks of this stage.

        Args:
            positions: see ``forward``.
            attend: see ``forward``.
            input_ids: see ``forward``; of the first stage.
            proxies: what the stage before returned, by name; of all others.

        Returns:
            What ``handed`` declares, in that order, each [T, *columns]; of the last stage what ``forward`` returns.

        Raises:
            InputError: if the first stage has no tokens, or another one lacks a proxy.
        """
        if not self.stage.first:
            bound = bind(self.taken, proxies or {})
            carried = tuple(bound[name] for name in self.body.carries)
        elif input_ids is not None:
            carried = (self.embedding(input_ids),)
        else:
            raise InputError(f"{self.stage} looks tokens up and was given none; give input_ids")
        carried = self.body.through(self, carried, self.rotary.index_select(0, positions), attend)
        return self.body.finish(self, carried) if self.stage.last else carried

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token.

        Args:
            hidden: [T, hidden_size], rows of what ``forward`` returned.

        Returns:
            [T, vocab_size], in the parameters' dtype.
        """
        return F.linear(hidden, self.embedding.weight if self.head is None else self.head.weight)


def _elsewhere(kind: type[Part]) -> Part:
    """A placeholder in the place of a part of this kind."""
    return cast("Part", Elsewhere(f"the {kind.__name__}"))


def part_of(whole: Decoder, stage: Stage) -> Decoder:
    """A stage of a model that is loaded, over the same weights and computed in the same body."""
    part = type(whole)(whole.config, stage=stage, device="meta", dtype=whole.rotary.dtype)
    held = {name for name, _ in part.named_parameters()}
    shared = {name: parameter for name, parameter in whole.named_parameters() if name in held}
    part.load_state_dict(shared, assign=True)
    part.rotary, part.body = whole.rotary, whole.body
    return part.eval().requires_grad_(requires_grad=False)

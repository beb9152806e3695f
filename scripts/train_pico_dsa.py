"""Trains pico-dsa, the shipped specimen with latent attention, on what ``pico_corpus.py`` prepared.

    PYTHONPATH=. python scripts/train_pico_dsa.py [--minutes 10 | --steps N] [--out data/models/pico-dsa]

As ``train_pico.py``, in two stages: tokens first attend to all keys before them, then to those that the indexer keeps,
as at inference. In both each indexer learns to score keys as its layer attends to them, and the routers' biases are
moved so that the experts of a layer get equally many tokens. The held-out loss is that of sparse attention throughout.
"""

from __future__ import annotations

from functools import partial

import torch
from latent_windows import LatentWindows
from torch import Tensor, nn
from train_pico import first_weights, parser_of, train, window_loss

from cglab.models.decoder import Decoder
from cglab.models.dsa_config import ARCHITECTURE, DsaConfig
from cglab.models.experts import Router

SHAPE = DsaConfig(
    architecture=ARCHITECTURE,
    vocab_size=4096,
    hidden_size=128,
    intermediate_size=384,
    num_layers=4,
    num_heads=4,
    num_kv_heads=1,
    head_dim=16,
    max_position=2048,
    rope_theta=10000.0,
    tie_embeddings=True,
    eos_token_ids=(0,),
    query_rank=96,
    latent_rank=64,
    nope_dim=32,
    value_dim=32,
    index_heads=4,
    index_dim=32,
    index_topk=64,
    shared_layers=(2,),
    dense_layers=1,
    num_experts=8,
    experts_per_token=2,
    expert_size=48,
)


def routers_of(model: nn.Module) -> list[Router]:
    """The routers, in the order of the layers."""
    return [module for module in model.modules() if isinstance(module, Router)]


def taught_loss(model: Decoder, windows: Tensor, kept: int | None) -> tuple[Tensor, Tensor]:
    """The text's loss and the indexers' distance, and what the routers did.

    Args:
        model: with latent attention.
        windows: [batch, length + 1] token ids.
        kept: keys that a token attends to; None for all before it.

    Returns:
        The sum of both in nats a token, a scalar, and [layers with experts, num_experts] float32: each one's tokens.
    """
    attend = LatentWindows(windows.shape[1] - 1, kept, taught=True)
    loss = window_loss(model, windows, lambda _: attend)
    return loss + torch.stack(attend.distances).mean(), torch.stack(attend.loads)


@torch.no_grad()
def balance(routers: list[Router], loads: Tensor, rate: float) -> None:
    """Moves each router's biases by ``rate`` towards the experts with fewer tokens than the mean of ``loads``."""
    for router, load in zip(routers, loads, strict=True):
        router.bias.add_(rate * (load.mean() - load).sign())


def main() -> None:
    """Reads the command line and trains."""
    parser = parser_of(__doc__.splitlines()[0], "data/models/pico-dsa")
    parser.add_argument("--dense", type=float, default=0.5, help="share of the steps without a selection")
    parser.add_argument("--balance", type=float, default=1e-3, help="how far a step moves a router's biases")
    options = parser.parse_args()
    model = first_weights(SHAPE, options)
    routers = routers_of(model)
    loss_of = torch.compile(taught_loss) if options.compile else taught_loss
    step_loads: list[Tensor] = []

    def lesson(model: Decoder, windows: Tensor, done: float) -> Tensor:
        loss, loads = loss_of(model, windows, None if done <= options.dense else SHAPE.index_topk)
        step_loads[:] = [loads.detach()]
        return loss

    def after_step() -> None:
        balance(routers, step_loads[0], options.balance)

    train(model, options, lesson, partial(LatentWindows, kept=SHAPE.index_topk), after_step)


if __name__ == "__main__":
    main()

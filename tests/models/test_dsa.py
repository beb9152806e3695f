"""The decoder with latent attention against transformers' own, and its forms against each other."""

import pytest
import torch

from cglab.models.dsa_config import DsaConfig
from cglab.models.loading import load_model
from tests.models.latent import LatentRequests

SMALL = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 64, "q_lora_rank": 24, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10, "index_n_heads": 16, "index_head_dim": 16,
    "index_topk": 6, "indexer_types": ["full", "full", "shared", "full"], "first_k_dense_replace": 1,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "eos_token_id": 0,
}  # fmt: skip
CLOSE = {"rtol": 2e-4, "atol": 2e-5}


def theirs(**fields):
    """A transformers model whose every parameter is random, norms and the routers' biases too."""
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    config = GlmMoeDsaConfig(**SMALL | fields, attn_implementation="eager")
    model = GlmMoeDsaForCausalLM(config).eval()
    for name, parameter in (*model.named_parameters(), *model.named_buffers()):
        if "inv_freq" not in name:
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.2)
    return model


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tie_word_embeddings": True, "n_shared_experts": 2},
        {"index_topk": 64, "first_k_dense_replace": 4},
    ],
    ids=["sparse", "tied", "dense"],
)
@torch.no_grad()
def test_logits_equal_those_of_transformers(fields, tmp_path):
    oracle = theirs(**fields)
    oracle.save_pretrained(tmp_path)
    ours = load_model(tmp_path, device="cpu", dtype=torch.float32)
    assert ours.weights == "trained" and isinstance(ours.config, DsaConfig)
    ids = torch.randint(0, 97, (40,))
    expected = oracle(ids.unsqueeze(0)).logits[0]
    requests = LatentRequests(ours.model, 1, 48)
    hidden = [requests.step({0: part}) for part in ids.split((17, 1, 22))]
    torch.testing.assert_close(ours.model.logits(torch.cat(hidden)), expected, **CLOSE)

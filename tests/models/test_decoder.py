"""The decoder against transformers' own, on small random models of every kind that it supports."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cglab.models.config import Llama3Scaling
from cglab.models.decoder import Decoder
from cglab.models.layout import checkpoint_layout
from cglab.models.loading import load_model, random_model
from cglab.models.presets import PRESETS
from cglab.models.rotary import inverse_frequencies, rotary_table

SMALL = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
KINDS = {
    "qwen3": ("Qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen3 tied": ("Qwen3", {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "qwen3 biased": ("Qwen3", {"attention_bias": True, "num_key_value_heads": 6}),
    "llama": ("Llama", {"rms_norm_eps": 1e-5}),
    "llama biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama stretched": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
}


def reference(kind):
    """A transformers model whose every parameter is random, norms and biases too."""
    import transformers

    family, fields = KINDS[kind]
    config = getattr(transformers, f"{family}Config")(**SMALL | fields)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.2)
    return model


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_logits_equal_those_of_transformers(kind, tmp_path, whole):
    theirs = reference(kind)
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path, device="cpu", dtype=torch.float32)
    assert ours.weights == "trained" and ours.tokenizer is None
    ids = torch.randint(0, 300, (100,))
    expected = theirs(ids.unsqueeze(0)).logits[0]
    assert expected.std() > 1
    logits = ours.model.logits(whole(ours.model, ids))
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


@torch.no_grad()
def test_bfloat16_weights_give_the_bfloat16_logits_of_transformers(tmp_path, whole):
    theirs = reference("qwen3").to(torch.bfloat16)
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path, device="cpu", dtype=torch.bfloat16).model
    ids = torch.randint(0, 300, (40,))
    logits = ours.logits(whole(ours, ids))
    assert logits.dtype == torch.bfloat16
    expected = theirs(ids.unsqueeze(0)).logits[0].float()
    assert (logits.float() - expected).abs().mean() < 0.02 * expected.std()


def test_llama3_frequencies_equal_those_of_transformers():
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    shape = PRESETS["llama-3.1-8b"]
    stretch = LLAMA3 | {"original_max_position_embeddings": 8192}
    config = LlamaConfig(head_dim=128, max_position_embeddings=131072, rope_parameters=stretch)
    expected, factor = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    assert factor == 1.0
    ours = inverse_frequencies(shape.head_dim, shape.rope_theta, shape.rope_scaling)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)
    plain = inverse_frequencies(128, 500000.0, None)
    assert ours[0] == plain[0] and torch.isclose(ours[-1], plain[-1] / 8)
    assert Llama3Scaling(8.0, 1.0, 4.0, 8192) == shape.rope_scaling


def test_position_0_is_not_turned_and_the_table_turns_by_halves(tiny):
    table = rotary_table(tiny().config)
    assert table.shape == (128, 2, 16)
    assert torch.equal(table[0], torch.tensor([[1.0], [0.0]]).expand(2, 16))
    assert torch.equal(table[:, 1, :8], -table[:, 1, 8:])


def test_the_layout_covers_every_parameter_exactly_once(tiny):
    for fields in ({}, {"tie_embeddings": False, "qk_norm": False, "attention_bias": True, "mlp_bias": True}):
        model = tiny(**fields)
        filled = {name: torch.zeros(parameter.shape[0]) for name, parameter in model.named_parameters()}
        for piece in checkpoint_layout(model.config).values():
            piece.of(filled[piece.parameter]).add_(1)
        assert all(bool((rows == 1).all()) for rows in filled.values())


class CountOperations(TorchDispatchMode):
    """Counts what is not a view: on a device, about one launch each."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        inputs, outputs = (
            {
                leaf.untyped_storage().data_ptr()
                for leaf in tree_leaves(values)
                if isinstance(leaf, torch.Tensor)
            }
            for values in (args, result)
        )
        if function._schema.is_mutable or not outputs <= inputs:
            self.counts[function.overloadpacket._qualified_op_name.removeprefix("aten::")] += 1
        return result


def test_a_decode_layer_is_four_products_and_few_other_operations(tiny, paged):
    """The fused projections are what keeps a captured step short: seven products a layer without them."""
    steps = []
    for layers in (1, 2):
        runner = paged(tiny(num_layers=layers), 2, 8)
        runner.prefill({0: [1, 2], 1: [3]})
        inputs = runner.decode_inputs({0: [4], 1: [5]})
        with torch.no_grad(), CountOperations() as operations:
            runner.step(inputs)
        steps.append(operations.counts)
    layer = steps[1] - steps[0]
    assert layer["mm"] == 4 and layer["index_select"] == 2 and layer["index_copy_"] == 2
    assert layer.total() <= 36  # each of the three norms counts five here and one on a CUDA device


def test_random_weights_repeat_by_seed_and_keep_activations_near_one(tiny, whole):
    config = tiny(num_layers=24, hidden_size=96, intermediate_size=256).config
    first, again, other = (
        random_model(config, device="cpu", dtype=torch.float32, seed=seed) for seed in (3, 3, 4)
    )
    state = first.state_dict()
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in state.items())
    assert not torch.equal(first.embedding.weight, other.embedding.weight)
    stream = []
    first.norm.register_forward_pre_hook(lambda _, inputs: stream.append(inputs[0]))
    logits = first.logits(whole(first, torch.randint(0, 300, (64,))))
    assert 0.5 < stream[0].std() < 1.5 and 0.5 < logits.std() < 1.5
    assert not any(parameter.requires_grad for parameter in first.parameters()) and not first.training


@pytest.mark.parametrize(
    ("name", "billions"), [("qwen3-0.6b", 0.596), ("qwen3-8b", 8.19), ("llama-3.1-8b", 8.03)]
)
def test_presets_have_the_published_number_of_parameters(name, billions):
    model = Decoder(PRESETS[name], device="meta", dtype=torch.bfloat16)
    repeated = sum(p.numel() - 2 * p.shape[1] for n, p in model.named_parameters() if n.endswith("head_norm"))
    total = sum(parameter.numel() for parameter in model.parameters()) - repeated
    assert total / 1e9 == pytest.approx(billions, rel=2e-3)

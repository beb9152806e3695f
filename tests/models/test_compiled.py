"""The compiled body: the same results as the portable one, compiled once for all blocks and sizes (B57, B58)."""

import warnings

import pytest
import torch

pytest.importorskip("triton", reason="no Triton here: it comes with torch for CUDA")

from cglab.errors import RecompiledError, ToggleError
from cglab.models import compiled
from cglab.models.body import Portable
from cglab.models.compiled import Compiled, nothing_compiled
from cglab.models.config import ModelConfig
from cglab.models.kv import PagedKV
from cglab.models.loading import random_model
from cglab.models.ops import DECODE_ATTENTION, check_ops
from cglab.models.regions import torch_kernels
from cglab.models.spans import LiveSpans, PrefillAttention, Span

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
COMPILED = 8  # each half of a block for three kinds of step, what follows the last for two

SHAPE = {
    "architecture": "Qwen3ForCausalLM", "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_layers": 3,
    "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "max_position": 256, "rope_theta": 1e4,
}  # fmt: skip


def ids(values):
    return torch.tensor(list(values), device=DEVICE, dtype=torch.int64)


@pytest.fixture(params=["plain", "bias", "no head norm", "windows"])
def config(request):
    changed = {
        "plain": {"qk_norm": True},
        "bias": {"qk_norm": True, "attention_bias": True, "mlp_bias": True},
        "no head norm": {"architecture": "LlamaForCausalLM"},
        "windows": {"qk_norm": True, "sliding_window": 5, "window_layers": (1,)},
    }[request.param]
    return ModelConfig(**{**SHAPE, **changed})


class Both:
    """One model and two caches: the same steps in the portable and in the compiled body."""

    def __init__(self, config):
        self.model = random_model(config, device=DEVICE, dtype=torch.float32, seed=0)
        for name, parameter in self.model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.normal_()
        window_pages = 12 if config.sliding_window else None
        self.kv = [
            PagedKV(config, pages=12, page_size=4, rows=4, max_context=12, device=DEVICE, dtype=torch.float32,
                    window_pages=window_pages) for _ in range(2)
        ]  # fmt: skip
        for kv in self.kv:
            for pool in kv.pools:
                pool.page_table[1:].copy_(1 + torch.arange(9, device=DEVICE).view(3, 3))
        on_cpu = {"backend": "aot_eager", "kernels": torch_kernels()}
        self.compiled = Compiled(config, **({} if DEVICE.type == "cuda" else on_cpu))
        self.compiled.prepare(self.model, self.kv[1])
        self.model.body = self.compiled
        for kv in self.kv:
            for cache in kv.caches().values():
                cache.zero_()

    @torch.no_grad()
    def step(self, attend, tokens, positions):
        out = []
        for body, kv in zip((Portable(), self.compiled), self.kv, strict=True):
            self.model.body = body  # the compiled one is left
            out.append(self.model(tokens, positions, attend(kv, body.name)))
        assert torch.allclose(*out, atol=1e-4, rtol=1e-4)
        for ours, theirs in zip(*(kv.caches().values() for kv in self.kv), strict=True):
            assert torch.allclose(ours, theirs, atol=1e-4, rtol=1e-4)

    def prefill(self, spans):
        slots = torch.cat([ids([])] + [
            self.kv[0].full.slots(ids([s.row]), ids(range(s.start, s.end)).unsqueeze(0))[0] for s in spans
        ])  # fmt: skip
        windows = {"window_out_slots": slots} if self.kv[0].sliding is not None else {}
        positions = ids([place for s in spans for place in range(s.start, s.end)])
        self.step(
            lambda kv, _: PrefillAttention(kv, out_slots=slots, live=LiveSpans(spans), **windows),
            torch.randint(0, 50, (len(slots),), device=DEVICE), positions,
        )  # fmt: skip

    def decode(self, rows, lens):
        rows, lens = ids(rows), ids(lens)
        slots = self.kv[0].full.slots(rows, lens.unsqueeze(1) - 1)[:, 0]
        windows = {"window_out_slots": slots} if self.kv[0].sliding is not None else {}
        self.step(
            lambda kv, form: DECODE_ATTENTION[form](
                kv, out_slots=slots, request_rows=rows, seq_lens=lens, **windows
            ),
            torch.randint(0, 50, (len(rows),), device=DEVICE),
            lens - 1,
        )


def test_both_bodies_agree_at_every_size_and_b57_b58_nothing_is_compiled_again(config):
    torch.manual_seed(0)
    both = Both(config)
    assert both.compiled.compilations == COMPILED
    with nothing_compiled(both.model):
        both.prefill([Span(1, 0, 5), Span(2, 0, 1), Span(3, 0, 7)])
        both.prefill([Span(1, 5, 1)])
        for size in (3, 2, 1):
            both.decode([1, 2, 3][:size], [7, 2, 8][:size])
        both.prefill([Span(1, 0, 12), Span(2, 0, 8)])
    assert both.compiled.compilations == COMPILED


def test_b57_a_step_of_no_rows_is_the_portable_one_and_compiles_nothing():
    both = Both(ModelConfig(**{**SHAPE, "qk_norm": True}))
    with nothing_compiled(both.model):
        both.decode([], [])
        both.prefill([])


def test_b57_a_step_in_parts_is_the_same_step_and_compiles_nothing(monkeypatch):
    torch.manual_seed(0)
    both = Both(ModelConfig(**{**SHAPE, "qk_norm": True}))
    with nothing_compiled(both.model):
        for most in (18, 20, 23):  # with a last part of many, of a few, and of one row
            monkeypatch.setattr(compiled, "MOST_ROWS", most)
            both.prefill([Span(1, 0, 12), Span(2, 0, 12)])


def test_b57_p30_another_dtype_is_told_and_not_compiled_in_silence():
    both = Both(ModelConfig(**{**SHAPE, "qk_norm": True}))
    both.model.to(torch.float64)
    with pytest.raises(RecompiledError, match="the compiler ran"), nothing_compiled(both.model):
        attended, residual = (torch.zeros(2, n, dtype=torch.float64, device=DEVICE) for n in (64, 32))
        with torch.no_grad():
            both.compiled._halves(both.model.blocks[0])[1](attended, residual)


def test_b57_models_of_other_shapes_in_one_process_are_compiled_for_their_own(monkeypatch):
    """Only rows and slots may be open in what is compiled: a kernel's heads and widths are fixed at compile time."""
    opened, compiled_by = [], Compiled._counted

    def watched(self, module, inputs):
        examples = [node.meta["example_value"] for node in module.graph.nodes if node.op == "placeholder"]
        tensors = [each for each in examples if isinstance(each, torch.Tensor)]
        opened.extend(size for each in tensors for size in each.shape[1:] if not isinstance(size, int))
        symbols = {str(each.shape[0]) for each in tensors}
        opened.extend(
            each for each in examples if not isinstance(each, torch.Tensor) and str(each) not in symbols
        )
        return compiled_by(self, module, inputs)

    monkeypatch.setattr(Compiled, "_counted", watched)
    other = {"hidden_size": 64, "num_kv_heads": 4, "num_heads": 8, "head_dim": 8, "intermediate_size": 80}
    for shape in ({}, other, {"num_heads": 2}, {}):
        both = Both(ModelConfig(**{**SHAPE, "qk_norm": True, **shape}))
        assert not opened
        with nothing_compiled(both.model):
            both.prefill([Span(1, 0, 5), Span(2, 0, 2)])
            both.decode([1, 2], [5, 2])
            both.decode([3], [1])


def test_the_compiler_s_advice_to_compute_less_exactly_is_not_passed_on(monkeypatch):
    advice = "TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled."
    compiled_by = Compiled._counted

    def advised(self, module, inputs):
        warnings.warn(advice, stacklevel=1)
        return compiled_by(self, module, inputs)

    monkeypatch.setattr(Compiled, "_counted", advised)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", module="torch")
        Both(ModelConfig(**{**SHAPE, "qk_norm": True}))
        with pytest.raises(UserWarning, match="TensorFloat32"):
            warnings.warn(advice, stacklevel=1)


def test_models_of_a_shape_do_not_share_the_compiler_s_limit():
    """Each body has code of its own, so any number of them can be made where the compiler keeps what one needs."""
    config = ModelConfig(**{**SHAPE, "qk_norm": True, "num_layers": 1})
    with torch._dynamo.config.patch(recompile_limit=3):  # a region is compiled for so many kinds of step
        for _ in range(2):
            assert Both(config).compiled.compilations == COMPILED


def test_forms_that_a_device_cannot_use_are_refused_with_the_reason():
    assert check_ops(None, CPU) == "portable"
    with pytest.raises(ToggleError, match="needs a CUDA device.*good: portable"):
        check_ops("compiled", CPU)
    with pytest.raises(ToggleError, match="'fast' is no form of ops on cpu; good names: portable"):
        check_ops("fast", CPU)

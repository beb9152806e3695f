"""A stand-in for SGLang's one-batch benchmark: what the lab's script calls of it, over sums in the place of a model."""

import os
import sys
from types import SimpleNamespace

import torch


def prepare_synthetic_inputs_for_latency_test(batch_size, input_len, custom_inputs):
    assert (batch_size, input_len) == (len(custom_inputs), len(custom_inputs[0]))
    return [list(prompt) for prompt in custom_inputs]


class Inner:
    """A ModelRunner whose next token is the sum of all before it."""

    max_total_num_tokens = 64
    attn_backend = SimpleNamespace()

    def forward(self, reqs):
        return torch.tensor([sum(req) % 97 for req in reqs])


class Runner:
    def __init__(self):
        self.torch_runner = Inner()

    def clear(self):
        print("cleared", flush=True)

    def synchronize(self):
        pass

    def extend(self, reqs):
        batch = SimpleNamespace(reqs=reqs, device="cpu")
        return self.torch_runner.forward(reqs), None, batch

    def decode(self, tokens, batch):
        if "--die" in sys.argv:
            os._exit(7)
        for req, token in zip(batch.reqs, tokens.tolist(), strict=True):
            req.append(int(token))
        return self.torch_runner.forward(batch.reqs), None


def latency_test_run_once(*_arguments, **_named):
    raise AssertionError("the lab takes its place")


def cli_main():
    print("Capture decode CUDA graph begin. backend=full, bs=[1, 2]")
    print("Capture decode CUDA graph end. Time elapsed: 1.50 s. mem usage=0.25 GB", flush=True)
    if "--never" in sys.argv:
        raise ValueError("CUDA out of memory: this one never starts")
    latency_test_run_once("name", Runner(), print, [], 1)

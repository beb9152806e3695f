"""Models: what a step computes. Decoder, paged KV tensors, attention, loading and tokenizers; nothing of requests or graphs."""

"""What a step computes: decoder, paged KV tensors, attention, loading, tokenizers. Knows no requests."""

"""A stand-in for SGLang: its own argument parser, its variables, and a server that misbehaves when told to."""

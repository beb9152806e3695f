"""The one name that SGLang binds on a CPU without AMX; its own operations compute what this would."""


def rotary_embedding(*_arguments: object, **_named: object) -> None:
    """Never called with the attention and sampling backends that a CPU server is given.

    Raises:
        NotImplementedError: always, so that it would be noticed.
    """
    raise NotImplementedError(
        "this is a stand-in for vllm's rotary_embedding, which needs vllm; keep --attention-backend torch_native"
    )

"""As far as the lab's script reaches into SGLang's data sets."""

from dataclasses import dataclass

DATASET_MAPPING = {"custom": None, "random": None}


@dataclass
class DatasetRow:
    prompt: object
    prompt_len: int
    output_len: int


def get_dataset(args):
    return DATASET_MAPPING[args.dataset_name].from_args(args).load(tokenizer=None, model_id=None)

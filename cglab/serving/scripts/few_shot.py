"""SGLang's own few-shot harness over a local file of questions, its score as the last line.

python few_shot.py MODULE URL DATA QUESTIONS SHOTS NEW_TOKENS PARALLEL
"""

import json
import sys
from argparse import Namespace
from importlib import import_module

module, url, data, *numbers = sys.argv[1:]
questions, shots, new_tokens, parallel = map(int, numbers)
host, _, port = url.rpartition(":")
found = import_module(module).run_eval(
    Namespace(
        host=host, port=int(port), data_path=data, num_questions=questions, num_shots=shots,
        max_new_tokens=new_tokens, parallel=parallel, temperature=0.0,
    )
)  # fmt: skip
sys.stdout.write(json.dumps({name: float(value) for name, value in found.items()}) + "\n")

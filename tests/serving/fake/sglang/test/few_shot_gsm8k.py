"""A harness of the same interface: an answer is right where its question is even, and the head is the examples."""

import json
from pathlib import Path


class RuntimeEndpoint:
    def __init__(self, base_url, api_key=None):
        self.base_url, self.api_key = base_url, api_key


def run_eval(args):
    print("Accuracy: told as the harness tells it")
    lines = [json.loads(line) for line in Path(args.data_path).read_text().splitlines()]
    asked = lines[: args.num_questions]
    Path("key").write_text(str(RuntimeEndpoint(f"http://{args.host}:{args.port}").api_key))
    with Path("asked.jsonl").open("a") as file:
        file.write(json.dumps([each["question"] for each in asked]) + "\n")
    if any(each["question"] == "boom" for each in asked):
        raise RuntimeError("the harness does not like this")
    right = sum(int(each["question"]) % 2 == 0 for each in asked)
    return {"accuracy": right / len(asked), "invalid": 0.25, "latency": 1.0, "output_throughput": 1.0}

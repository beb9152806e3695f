"""SGLang's serving benchmark over requests of token ids, several points in one process.

    python serving_benchmark.py PLAN.json

Its client, its lanes and its report are used as they are. Three things it cannot be told by a flag in both 0.5.16
and 0.5.23, so they are set here:

* *What is sent.* No kind of data set holds token ids in both versions, so one is put in the place of ``custom``.
* *When a lane starts.* All requests are queued at once, so lanes start as far apart as the server makes them.
* *What counts as a token.* Its client passes over chunks without text, and a token that ends within a character
  has none: first tokens go unseen, and medians of TTFT become 0.0.

Importing it takes 15 to 20 s, hence one process for many points. For each point the warm-up is sent, the cache is
emptied, the shared prefix is put into it, and the benchmark runs; the result is there whole or not at all.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

KIND = "custom"  # the names that --dataset-name takes are fixed
FLUSH_SECONDS = 30.0


class TokenIds:
    """A data set in the benchmark's own interface."""

    rows: list[Any]

    @classmethod
    def from_args(cls, _arguments: Any) -> TokenIds:
        """The data set; its rows were set before."""
        return cls()

    def load(self, tokenizer: Any = None, model_id: str | None = None) -> list[Any]:
        """Its rows, in order."""
        return list(self.rows)


class CountsEveryToken:
    """A JSON module whose chunks all have text, so that the client's clock sees each token."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def loads(self, text: Any) -> Any:
        """The value; a chunk that brought tokens and no text gets a space."""
        value = self.module.loads(text)
        if isinstance(value, dict) and not value.get("text"):
            meta = value.get("meta_info")
            if isinstance(meta, dict) and meta.get("completion_tokens"):
                value["text"] = " "
        return value


def lanes(concurrency: int, offset: float) -> Callable[..., AsyncIterator[Any]]:
    """Arrivals: the first request of each lane a fixed time after the last lane's, all others at once after them."""

    async def arrivals(rows: list[Any], *_arguments: Any, **_named: Any) -> AsyncIterator[Any]:
        started = time.perf_counter()
        for index, row in enumerate(rows):
            wait = started + min(index, concurrency - 1) * offset - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            yield row

    return arrivals


def canonical(prompt: list[int], limit: int, temperature: float, ignore_eos: bool) -> str:
    """A request as the data file spells it."""
    parameters = {"ignore_eos": ignore_eos, "max_new_tokens": limit, "temperature": temperature}
    body = {"input_ids": prompt, "sampling_params": parameters}
    return json.dumps(body, sort_keys=True, separators=(",", ":"))


def tell(url: str, path: str, body: Any = None) -> None:
    """Posts, and waits for the answer; with the key that SGLang's own client sends."""
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(  # noqa: S310 - the address is the server's on this machine
        url + path, data=json.dumps(body or {}).encode(), headers=headers
    )
    with urllib.request.urlopen(request, timeout=600) as answer:  # noqa: S310 - as above
        answer.read()


def flush(url: str) -> None:
    """Empties the prefix cache; a server that still ends a request is asked again."""
    deadline = time.monotonic() + FLUSH_SECONDS
    while True:
        try:
            return tell(url, "/flush_cache")
        except urllib.error.HTTPError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def run_point(point: dict[str, Any], plan: dict[str, Any], serving: Any, datasets: Any) -> None:
    """Runs one point and writes its result."""
    bodies = [json.loads(line) for line in Path(point["requests"]).read_text(encoding="utf-8").splitlines()]
    TokenIds.rows = [
        datasets.DatasetRow(
            body["input_ids"], len(body["input_ids"]), body["sampling_params"]["max_new_tokens"]
        )
        for body in bodies
    ]
    places = {id(row.prompt): index for index, row in enumerate(TokenIds.rows)}
    sent: dict[int, str] = {}
    facts: list[dict[str, Any]] = []
    client = serving.async_request_sglang_generate

    async def watched(request_func_input: Any, pbar: Any = None) -> Any:
        index, asked = places[id(request_func_input.prompt)], serving.args
        sent[index] = canonical(
            request_func_input.prompt,
            request_func_input.output_len,
            asked.temperature,
            not asked.disable_ignore_eos,
        )
        output = await client(request_func_input=request_func_input, pbar=pbar)
        facts.append(
            {
                "index": index, "prompt_tokens": request_func_input.prompt_len, "success": output.success,
                "error": output.error, "start": output.start_time, "ttft": output.ttft, "latency": output.latency,
                "gaps": output.itl, "new_tokens": output.output_len if output.success else 0,
            }
        )  # fmt: skip
        return output

    for body in point["warmups"]:
        tell(plan["url"], "/generate", body)
    flush(plan["url"])
    if point["prefix"]:
        tell(plan["url"], "/generate", point["prefix"])
    datasets.DATASET_MAPPING[KIND] = TokenIds
    serving.get_request = lanes(point["concurrency"], point["lane_offset"])
    serving.ASYNC_REQUEST_FUNCS["sglang"] = watched
    line = Path(f"{point['result']}.line")
    line.unlink(missing_ok=True)
    sys.argv = [
        "serving", "--backend", "sglang", "--base-url", plan["url"], "--dataset-name", KIND,
        "--num-prompts", str(len(bodies)), "--max-concurrency", str(point["concurrency"]),
        "--warmup-requests", "0", "--disable-tqdm", "--output-file", str(line), *plan["arguments"],
    ]  # fmt: skip
    serving.cli_main()
    lines = "".join(f"{sent[index]}\n" for index in sorted(sent))
    result = {
        "payload": sha256(lines.encode()).hexdigest(),
        "requests": sorted(facts, key=lambda fact: fact["index"]),
        "benchmark": json.loads(line.read_text(encoding="utf-8").splitlines()[-1]),
    }
    whole = Path(f"{point['result']}.part")
    whole.write_text(json.dumps(result), encoding="utf-8")
    whole.replace(point["result"])


def main(plan_file: str) -> None:
    """Runs every point of a plan, in order."""
    plan = json.loads(Path(plan_file).read_text(encoding="utf-8"))
    from sglang.benchmark import datasets, serving

    for name in ("json", "orjson"):  # 0.5.16 reads chunks with the first, 0.5.23 with the second
        if hasattr(serving, name):
            setattr(serving, name, CountsEveryToken(getattr(serving, name)))
    for point in plan["points"]:
        run_point(point, plan, serving, datasets)


if __name__ == "__main__":
    main(sys.argv[1])

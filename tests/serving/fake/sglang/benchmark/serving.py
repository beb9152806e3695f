"""The shape of SGLang's serving benchmark: what it calls, in which order, and its client's way with chunks.

A request is answered with one chunk a token. ``limit == 13`` is refused, and prompts that start with token 7 have
first tokens without text, as a token that ends within a character has.
"""

import argparse
import asyncio
import json
import os
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from sglang.benchmark.datasets import get_dataset

args = None


@dataclass
class RequestFuncInput:
    prompt: object
    prompt_len: int
    output_len: int


@dataclass
class RequestFuncOutput:
    success: bool = False
    error: str = ""
    start_time: float = 0.0
    ttft: float = 0.0
    latency: float = 0.0
    itl: list = field(default_factory=list)
    output_len: int = 0


def get_auth_headers():
    key = os.environ.get("OPENAI_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


async def async_request_sglang_generate(request_func_input, pbar=None):
    output, start = RequestFuncOutput(), time.perf_counter()
    output.start_time, limit = start, request_func_input.output_len
    body = json.dumps({"input_ids": request_func_input.prompt, "limit": limit, "at": start}).encode()
    post = urllib.request.Request(args.base_url + "/generate", data=body, headers=get_auth_headers())
    await asyncio.to_thread(lambda: urllib.request.urlopen(post, timeout=20).read())
    if limit == 13:
        output.error = "refused"
        return output
    last_time, last = start, 0
    for count in range(1, limit + 1):
        await asyncio.sleep(0.002)
        wordless = request_func_input.prompt[0] == 7 and count <= 2
        chunk = {"text": "" if wordless else "x" * count, "meta_info": {"completion_tokens": count}}
        data = json.loads(json.dumps(chunk))
        if not data["text"]:
            continue
        now = time.perf_counter()
        if output.ttft == 0.0:
            output.ttft = now - start
        else:
            output.itl.extend([(now - last_time) / (count - last)] * (count - last))
        last_time, last = now, count
    output.success, output.latency, output.output_len = True, time.perf_counter() - start, limit
    return output


ASYNC_REQUEST_FUNCS = {"sglang": async_request_sglang_generate}


async def get_request(rows, request_rate):
    for row in rows:
        yield row


async def benchmark(rows):
    lanes, tasks = asyncio.Semaphore(args.max_concurrency), []
    client = ASYNC_REQUEST_FUNCS[args.backend]

    async def one(row):
        async with lanes:
            asked = RequestFuncInput(row.prompt, row.prompt_len, row.output_len)
            return await client(request_func_input=asked, pbar=None)

    async for row in get_request(rows, float("inf")):
        tasks.append(asyncio.create_task(one(row)))  # noqa: PERF401 - each starts when its row arrives
    return await asyncio.gather(*tasks)


def cli_main():
    global args  # noqa: PLW0603 - as the benchmark's own
    parser = argparse.ArgumentParser()
    for name in ("--backend", "--base-url", "--dataset-name", "--output-file"):
        parser.add_argument(name)
    for name in ("--num-prompts", "--max-concurrency", "--warmup-requests"):
        parser.add_argument(name, type=int)
    parser.add_argument("--disable-tqdm", action="store_true")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--disable-ignore-eos", action="store_true")
    parser.add_argument("--fail", action="store_true")
    args = parser.parse_args()
    if args.fail:
        raise SystemExit("the benchmark does not like this")
    rows = get_dataset(args)
    assert len(rows) == args.num_prompts
    outputs = asyncio.run(benchmark(rows))
    done = sorted(1e3 * each.ttft for each in outputs if each.success)
    with Path(args.output_file).open("a", encoding="utf-8") as file:
        line = {"completed": len(done), "median_ttft_ms": done[len(done) // 2], "accept_length": None}
        file.write(json.dumps(line) + "\n")

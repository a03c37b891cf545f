"""``python -m engine complete``: let the server answer prompts, greedily, by token ids in and out.

The result is a dataset of token ids: the prompt unsupervised, the answer supervised. Text is never
tokenised again.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import httpx

from engine.dataset.rows import Row, RowFile
from engine.dataset.tokens import Tokens
from engine.run.report import say
from engine.sources.sglang_api import Api
from engine.store.files import write_atomic
from engine.wire.errors import ConnectionFailed, DatasetError, RemoteError

if TYPE_CHECKING:
    from pathlib import Path


async def complete(
    prompts: Path,
    model: str,
    url: str,
    out: Path,
    *,
    max_new_tokens: int,
    concurrency: int = 16,
    thinking: bool = False,
) -> int:
    """Answer every prompt and write ``out`` atomically; returns the number of rows."""
    rows = RowFile(prompts)
    tokens = await asyncio.to_thread(Tokens, model, thinking)
    api = Api(url, None, 900.0, concurrency)
    gate = asyncio.Semaphore(concurrency)

    async def one(index: int) -> dict[str, Any]:
        row = rows.read(index)
        ids = _prompt_ids(row, tokens)
        async with gate:
            answer = await _answer(api, index, ids, max_new_tokens)
        say(f"[{index}] {len(ids)} tokens answered with {len(answer)}")
        return {
            "id": row.id,
            "input_ids": ids + answer,
            "loss_mask": [0] * len(ids) + [1] * len(answer),
        }

    try:
        done = await asyncio.gather(*(one(i) for i in range(len(rows))))
    finally:
        await api.aclose()
    write_atomic(out, "".join(json.dumps(d) + "\n" for d in done).encode())
    return len(done)


def _prompt_ids(row: Row, tokens: Tokens) -> list[int]:
    if row.input_ids is not None:
        return list(row.input_ids)
    if row.messages[-1]["role"] == "assistant":
        raise DatasetError(
            f"row {row.row} is answered already", "its last message is the assistant's", "remove it"
        )
    return tokens.prompt(row.messages)


async def _answer(api: Api, index: int, ids: list[int], max_new_tokens: int) -> list[int]:
    body = {
        "rid": f"hsxc-{index:08d}_",
        "input_ids": ids,
        "stream": False,
        "sampling_params": {"max_new_tokens": max_new_tokens, "temperature": 0},
    }
    try:
        response = await api.generate(body)
    except httpx.HTTPError as error:
        raise ConnectionFailed(
            f"prompt {index} was not answered", str(error), "is the server up? see its log"
        ) from error
    if response.status_code != 200:
        raise RemoteError(f"the server refused prompt {index}", response.text[:200], "see its log")
    answer = response.json().get("output_ids")
    if not isinstance(answer, list) or not answer:
        raise RemoteError(f"the server gave no tokens for prompt {index}", "", "see its log")
    return [int(t) for t in answer]

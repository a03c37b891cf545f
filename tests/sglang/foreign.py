"""Somebody else's use of the server: prompts of many lengths with decode steps, and health checks."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING, Any

import httpx

from tests.sglang.tiny import VOCABULARY

if TYPE_CHECKING:
    from types import TracebackType

CLIENTS = 8


class Foreign:
    """Eight clients as long as the block lasts. ``errors``: what a foreign user must never see."""

    def __init__(self, url: str, longest: int = 300) -> None:
        self.url, self.longest = url, longest
        self.answers = self.checks = 0
        self.errors: list[str] = []
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(CLIENTS)]
        self._threads.append(threading.Thread(target=self._check))

    def __enter__(self) -> Foreign:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60.0)

    def _note(self, answered: bool, error: str = "") -> None:
        with self._lock:
            self.answers += answered
            if error:
                self.errors.append(error)

    def _ask(self, client: int) -> None:
        rng = random.Random(client)
        with httpx.Client(timeout=60.0, trust_env=False) as http:
            number = 0
            while not self._stop.is_set():
                number += 1
                ids = [rng.randrange(3, VOCABULARY) for _ in range(rng.randint(1, self.longest))]
                body: dict[str, Any] = {
                    "rid": f"user-{client}-{number}", "input_ids": ids,
                    "sampling_params": {"max_new_tokens": rng.randint(1, 12), "temperature": 0.7},
                }  # fmt: skip
                try:
                    reply = http.post(f"{self.url}/generate", json=body)
                except httpx.HTTPError as error:
                    self._note(False, f"a foreign request failed: {type(error).__name__}: {error}")
                    self._stop.wait(0.2)
                    continue
                if reply.status_code != 200:
                    self._note(False, f"a foreign request got HTTP {reply.status_code}: {reply.text[:200]}")
                    continue
                meta = reply.json()["meta_info"]
                self._note(True, f"a foreign reply has {sorted(meta)}" if "hsx" in meta else "")

    def _check(self) -> None:
        with httpx.Client(timeout=60.0, trust_env=False) as http:
            while not self._stop.wait(0.5):
                try:
                    self.checks += http.get(f"{self.url}/health").status_code == 200
                except httpx.HTTPError:
                    continue

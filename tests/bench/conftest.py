"""An engine of plain Python for the tests of what drives one: it answers at once and computes nothing."""

import dataclasses

import numpy as np
import pytest

from mambacache_jax.config import CacheConfig, EngineConfig
from mambacache_jax.engine import Completion, EngineStats, Timings


class Echo:
    """Byte ids; the fake model's tokenizer."""

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


@dataclasses.dataclass
class FakeModel:
    tokenizer: Echo = dataclasses.field(default_factory=Echo)


class FakeEngine:
    """Answers every prompt with its own last bytes, one request a step, newest first.

    With caching it says that all but the last token of a prompt came from the cache.
    """

    def __init__(self, model, cache: CacheConfig, config: EngineConfig) -> None:
        self.model = FakeModel() if isinstance(model, str) else model
        self.cache, self.config = cache, config
        self.warmed: list[str] = []
        self.queue: list[tuple[int, str, int]] = []
        self.most_in_flight = self.submitted = 0
        self.spoil_request = -1
        self.broken = ""

    def warm_up(self, prompts=()) -> None:
        self.warmed += prompts

    def submit(self, prompt, params) -> int:
        self.queue.append((self.submitted, prompt, params.max_tokens))
        self.submitted += 1
        self.most_in_flight = max(self.most_in_flight, len(self.queue))
        return self.queue[-1][0]

    def has_work(self) -> bool:
        return bool(self.queue)

    def step(self) -> list[Completion]:
        request_id, prompt, max_tokens = self.queue.pop()
        tokens = list((prompt * max_tokens).encode()[-max_tokens:])
        if self.cache.prefix_caching and request_id == self.spoil_request:
            tokens[-1] += 1
        cached = len(prompt) - 1 if self.cache.prefix_caching else 0
        return [
            Completion(
                request_id=request_id,
                token_ids=tokens,
                text="",
                finish_reason="length",
                prompt_len=len(prompt),
                cached_tokens=cached,
                computed_tokens=len(prompt) - cached,
                timings=Timings(0.0, 1.0, 1.0 + (len(prompt) - cached) / 1000, 2.0),
                logits=None,
            )
        ]

    def logits(self, token_ids) -> np.ndarray:
        logits = np.zeros((len(token_ids), 256), np.float32)
        logits[:, 65:67] = 2.0, 1.5
        return logits

    def stats(self) -> EngineStats:
        used = {
            "kv_used": 5,
            "kv_total": 10,
            "ssm_used": 2,
            "ssm_total": 4,
            "kv_evicted": 7,
            "ssm_evicted": 3,
        }
        zero = {field.name: 0 for field in dataclasses.fields(EngineStats)}
        return EngineStats(**{**zero, **used, "tombstones": 1})

    def check_invariants(self) -> None:
        if self.broken and self.cache.prefix_caching:
            raise AssertionError(self.broken)


@pytest.fixture
def fake_engine():
    """The fake engine's class."""
    return FakeEngine

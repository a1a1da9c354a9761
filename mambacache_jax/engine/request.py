"""What the engine keeps of a request beside its sequence: text, stop rules, times, logits."""

import time

import numpy as np

from mambacache_jax.engine.types import Completion, Delta, Timings
from mambacache_jax.host import Sequence
from mambacache_jax.models import Model


class Request:
    """One request, from submission until its completion is taken.

    Attributes:
      sequence: its state in the scheduler.
      timings: when things happened.
      logits: float32 rows, one a generated token, as far as they were asked for.
      all_logits: float32 `[prompt_len, vocab]` where every position was asked for, else None.
    """

    def __init__(self, sequence: Sequence, model: Model) -> None:
        """Starts the clock."""
        self.sequence = sequence
        self.timings = Timings(submitted=time.perf_counter())
        self.logits: list[np.ndarray] = []
        self.all_logits: np.ndarray | None = None
        params = sequence.params
        ends = () if params.ignore_eos else model.eos_token_ids
        self._stop_tokens = frozenset((*params.stop_token_ids, *ends))
        self._stop = params.stop
        self._stream = model.tokenizer.stream()
        self._text = ""
        self._sent_text = self._sent_tokens = 0

    def push(self, token: int) -> bool:
        """Takes the newest token; True if it ends the request."""
        if token in self._stop_tokens:
            self._text += self._stream.flush()
            return True
        start = max(0, len(self._text) - max((len(stop) for stop in self._stop), default=0))
        self._text += self._stream.push([token])
        found = [at for stop in self._stop if (at := self._text.find(stop, start)) >= 0]
        if found:
            self._text = self._text[: min(found)]
        return bool(found)

    def take_delta(self) -> Delta:
        """What came since the last one. Text that may turn out to be a stop string waits."""
        reason = self.sequence.finish_reason
        end = len(self._text) if reason else len(self._text) - self._held_back()
        end = max(end, self._sent_text)
        tokens = self._token_ids()
        delta = Delta(self._text[self._sent_text : end], tokens[self._sent_tokens :], reason)
        self._sent_text, self._sent_tokens = end, len(tokens)
        return delta

    def complete(self) -> Completion:
        """The finished request."""
        sequence = self.sequence
        assert sequence.finish_reason is not None
        return Completion(
            request_id=sequence.request_id,
            token_ids=self._token_ids(),
            text=self._text,
            finish_reason=sequence.finish_reason,
            prompt_len=sequence.prompt_len,
            cached_tokens=sequence.cached_tokens or 0,
            computed_tokens=sequence.computed_tokens,
            timings=self.timings,
            logits=np.stack(self.logits) if self.logits else None,
        )

    def finish(self) -> None:
        """Stops the clock and lets out an incomplete last character."""
        self.timings.finished = time.perf_counter()
        if self.sequence.finish_reason == "length":
            self._text += self._stream.flush()

    def _token_ids(self) -> list[int]:
        buffer, start = self.sequence.buffer, self.sequence.prompt_len
        return buffer.array(start, len(buffer)).tolist()

    def _held_back(self) -> int:
        """Characters at the end of the text that begin a stop string."""
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self._text)), longest, -1):
                if self._text.endswith(stop[:size]):
                    longest = size
                    break
        return longest

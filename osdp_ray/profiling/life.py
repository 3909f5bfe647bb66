"""Signs of life of measuring actors while they are at work, so that one that falls silent is known long before its time
is up."""

import time
from typing import Any

import ray

SILENCE_S = 20.0


class SignsOfLife:
    """When each actor was last heard of. An actor that has died is not silent: its calls tell of its death."""

    def __init__(self, actors: list[Any]) -> None:
        self._actors = actors
        self._heard_s = [time.monotonic()] * len(actors)
        self._asked: dict[Any, int] = {}

    def silent_ranks(self, *, wait_s: float = 0.0) -> list[int]:
        """The ranks not heard of for SILENCE_S; with `wait_s`, those that do not answer within that time now."""
        began_s = time.monotonic()
        asking = set(self._asked.values())
        for rank, actor in enumerate(self._actors):
            if rank not in asking:
                self._asked[actor.answer.remote()] = rank
        limit_s = wait_s or 0.01
        ready, _ = (
            ray.wait(list(self._asked), num_returns=len(self._asked), timeout=limit_s) if self._asked else ([], [])
        )
        for reference in ready:
            self._heard_s[self._asked.pop(reference)] = time.monotonic()
        since_s = began_s if wait_s else time.monotonic() - SILENCE_S
        return [rank for rank, heard_s in enumerate(self._heard_s) if heard_s < since_s]

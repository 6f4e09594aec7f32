"""Lets a model go on from a restored prefix, token after token."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aiokvoffload.clock import Clock
from aiokvoffload.errors import InvalidRequestError
from aiokvoffload.integrations.transformers.batch import Batch
from aiokvoffload.integrations.transformers.compute import ComputeThread
from aiokvoffload.integrations.transformers.layout import CausalModel
from aiokvoffload.integrations.transformers.prefix import RestoredPrefix, forward_inputs

Choose = Callable[[torch.Tensor], torch.Tensor]
OnTokens = Callable[[Sequence[int | None]], None]
Save = Callable[[Batch, Sequence[int]], Awaitable[object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What came of one call of `generate`; tuples have one entry for each row.

    Attributes:
        token_ids: The new tokens, with the one that ended the row.
        restored_tokens: Tokens of the prompt that were not computed.
        tier_tokens: How many of those were not in CPU memory when the call came.
        seconds_to_first_token: From the call to the first new token.
        seconds: From the call to its end.
    """

    token_ids: tuple[tuple[int, ...], ...]
    restored_tokens: tuple[int, ...]
    tier_tokens: tuple[int, ...]
    seconds_to_first_token: float
    seconds: float


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """Return the likeliest token of each row of logits, `(rows, vocabulary)`."""
    return logits.argmax(-1)


def ignore_tokens(token_ids: Sequence[int | None]) -> None:
    """Do nothing with the tokens of a step."""


class Generator:
    """Generates tokens with one model.

    Args:
        model: The model.
        compute: Where it runs.
        clock: Where time is read.
        piece_tokens: Prompts are computed in pieces of so many tokens, counted from their start, and answers are not
            saved; None computes what is left of a prompt at once.
    """

    def __init__(self, model: CausalModel, compute: ComputeThread, clock: Clock, piece_tokens: int | None) -> None:
        self._model = model
        self._compute = compute
        self._clock = clock
        self._piece_tokens = piece_tokens
        parameters = inspect.signature(model.forward).parameters
        self._options: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self.padding_id: int = getattr(model.config, "pad_token_id", None) or 0

    def end_tokens(self) -> frozenset[int]:
        """Return the tokens that end a row, as the model's generation configuration says."""
        configured = getattr(getattr(self._model, "generation_config", None), "eos_token_id", None)
        if configured is None:
            return frozenset()
        return frozenset([configured] if isinstance(configured, int) else configured)

    async def go_on(
        self,
        prefix: RestoredPrefix,
        save: Save,
        *,
        started: float,
        max_new_tokens: int,
        end_tokens: Collection[int],
        choose: Choose,
        on_tokens: OnTokens,
    ) -> Generation:
        """Generate from a restored prefix.

        Args:
            prefix: Where from.
            save: Saves a batch whose tokens the cache holds, so many of each row.
            started: When the caller was asked.
            max_new_tokens: At most so many for each row.
            end_tokens: Any of them ends a row.
            choose: Makes tokens of logits, in the thread of the model.
            on_tokens: Hears the new token of each row, None for a row that has ended; in the event loop.

        Raises:
            InvalidRequestError: No token is asked for, or several prompts are to be computed in pieces.
        """
        if max_new_tokens < 1:
            raise InvalidRequestError(f"max_new_tokens is {max_new_tokens}, it must be at least 1")
        if self._piece_tokens is not None and len(prefix.batch.rows) > 1:
            raise InvalidRequestError(
                f"{len(prefix.batch.rows)} prompts were given; to be reproducible, give one a call"
            )
        batch = prefix.batch
        new_tokens: list[list[int]] = [[] for _ in batch.rows]
        has_ended = [False] * len(batch.rows)
        inputs = await self._last_piece(prefix)
        first_token_at = started
        for step in range(max_new_tokens):
            if step:
                batch = batch.with_tokens(
                    [self.padding_id if ended else row[-1] for row, ended in zip(new_tokens, has_ended, strict=True)]
                )
                column = batch.column_count - 1
                inputs = forward_inputs(batch, prefix.cache, column, self._model.device, self.padding_id)
            chosen = await self._compute.run(self._forward, inputs, choose)
            heard = [None if ended else token for token, ended in zip(chosen, has_ended, strict=True)]
            for row, token in enumerate(heard):
                if token is not None:
                    new_tokens[row].append(token)
                    has_ended[row] = token in end_tokens
            if not step:
                first_token_at = self._clock.now()
            on_tokens(heard)
            if not step:
                await save(batch, [len(row) for row in batch.rows])
            if all(has_ended):
                break
        lengths = [len(row) + len(new) for row, new in zip(prefix.batch.rows, new_tokens, strict=True)]
        if self._piece_tokens is None:
            await save(batch, [min(length, len(row)) for length, row in zip(lengths, batch.rows, strict=True)])
        return Generation(
            token_ids=tuple(map(tuple, new_tokens)),
            restored_tokens=prefix.token_counts,
            tier_tokens=prefix.tier_token_counts,
            seconds_to_first_token=first_token_at - started,
            seconds=self._clock.now() - started,
        )

    async def _last_piece(self, prefix: RestoredPrefix) -> dict[str, Any]:
        """Compute all pieces of a prompt but the last, and return what a forward takes for that."""
        inputs = prefix.inputs
        while self._piece_tokens is not None and inputs["input_ids"].shape[1] > self._piece_tokens:
            rest = inputs["input_ids"]
            await self._compute.run(self._forward, inputs | {"input_ids": rest[:, : self._piece_tokens]}, greedy)
            inputs = inputs | {"input_ids": rest[:, self._piece_tokens :]}
        return inputs

    def _forward(self, inputs: dict[str, Any], choose: Choose) -> list[int]:
        logits = self._model(**inputs, **self._options).logits[:, -1]
        chosen: list[int] = choose(logits).tolist()
        return chosen

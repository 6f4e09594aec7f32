"""Where the tokens of several prompts lie: padded on the left, so that all end in the same column."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, cast

import torch

from aiokvoffload.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class Batch:
    """The token ids of each row, from its start.

    Attributes:
        rows: One tuple per prompt, of any lengths.
    """

    rows: tuple[tuple[int, ...], ...]

    @classmethod
    def of(
        cls,
        token_ids: torch.Tensor | Sequence[int] | Sequence[Sequence[int]],
        attention_mask: torch.Tensor | None = None,
    ) -> Self:
        """Return the batch that a caller means.

        Args:
            token_ids: One prompt, or several of any lengths, or a tensor of one row per prompt.
            attention_mask: For a tensor: 0 where a row is padded, which must be on its left.

        Raises:
            InvalidRequestError: They are no such thing, a prompt is empty, or padding is not on the left.
        """
        if isinstance(token_ids, torch.Tensor):
            rows = _rows_of_tensor(token_ids, attention_mask)
        elif attention_mask is not None:
            raise InvalidRequestError("an attention_mask belongs to a tensor; prompts as lists need none")
        else:
            given = list(token_ids)
            rows = cast("list[list[int]]", [given] if given and not isinstance(given[0], Sequence) else given)
        if not rows or not all(rows):
            raise InvalidRequestError("give at least one prompt, and at least one token in each")
        return cls(tuple(tuple(row) for row in rows))

    @property
    def column_count(self) -> int:
        """Tokens of the longest row."""
        return max(map(len, self.rows))

    def padding(self, row: int) -> int:
        """Return in which column a row starts."""
        return self.column_count - len(self.rows[row])

    @property
    def is_padded(self) -> bool:
        """Whether rows differ in length."""
        return len({len(row) for row in self.rows}) > 1

    def with_tokens(self, token_ids: Sequence[int]) -> Self:
        """Return the batch with one more token in each row."""
        return type(self)(tuple((*row, token) for row, token in zip(self.rows, token_ids, strict=True)))

    def input_ids(self, first_column: int, padding_id: int) -> torch.Tensor:
        """Return the token ids from a column on, `(rows, columns)`."""
        padded = [[padding_id] * self.padding(row) + list(tokens) for row, tokens in enumerate(self.rows)]
        return torch.tensor(padded)[:, first_column:]

    def attention_mask(self) -> torch.Tensor:
        """Return 1 for tokens and 0 for padding, `(rows, columns)`."""
        return (torch.arange(self.column_count) >= self._paddings()).long()

    def position_ids(self, first_column: int) -> torch.Tensor:
        """Return where in its row each token stands, `(rows, columns)`, from a column on."""
        return (torch.arange(first_column, self.column_count) - self._paddings()).clamp(min=0)

    def _paddings(self) -> torch.Tensor:
        return torch.tensor([self.padding(row) for row in range(len(self.rows))])[:, None]


def _rows_of_tensor(token_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> list[list[int]]:
    if token_ids.ndim not in (1, 2) or token_ids.is_floating_point():
        raise InvalidRequestError(
            f"token ids are whole numbers of shape (rows, tokens), not {token_ids.dtype} of {tuple(token_ids.shape)}"
        )
    token_ids = token_ids.reshape(-1, token_ids.shape[-1])
    rows: list[list[int]] = token_ids.tolist()
    if attention_mask is None:
        return rows
    if attention_mask.shape != token_ids.shape:
        raise InvalidRequestError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, the token ids have {tuple(token_ids.shape)}"
        )
    mask = attention_mask.bool()
    if not bool((mask[:, 1:] >= mask[:, :-1]).all()):
        raise InvalidRequestError("pad prompts on the left: tokenizer.padding_side = 'left'")
    return [row[len(row) - count :] if count else [] for row, count in zip(rows, mask.sum(1).tolist(), strict=True)]

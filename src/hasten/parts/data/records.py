"""A token record: one tokenised example, which samplers choose and collators lay out."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class TokenRecord(NamedTuple):
    """One record as token ids, with a mark on every token that carries loss.

    ``trained[0]`` has no effect: nothing predicts the first token.
    """

    input_ids: NDArray[np.int32]  # (tokens,)
    trained: NDArray[np.bool_]  # (tokens,)

    @property
    def length(self) -> int:
        return len(self.input_ids)

    @property
    def trained_tokens(self) -> int:
        """Tokens that carry loss once the first, which nothing predicts, is left out."""
        return int(np.count_nonzero(self.trained[1:]))


def token_record(input_ids: Any, trained: Any = None) -> TokenRecord:
    """A record from any sequences; without ``trained`` every token carries loss."""
    ids = np.asarray(input_ids, dtype=np.int32)
    mask = np.ones(len(ids), bool) if trained is None else np.asarray(trained, dtype=np.bool_)
    if ids.ndim != 1 or mask.shape != ids.shape:
        raise ValueError(f"a record needs two equal-length rows, got {ids.shape} and {mask.shape}")
    return TokenRecord(ids, mask)

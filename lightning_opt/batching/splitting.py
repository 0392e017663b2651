"""Moved to the core."""

from lightning_opt.core.splitting import (  # noqa: F401
    ADVICE,
    UnsplittableBatchError,
    batch_length,
    shape_of,
    split_batch,
    split_into,
    tensors_of,
    with_own_containers,
)

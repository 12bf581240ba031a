"""What torch.distributed.checkpoint asks of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class CheckpointTypes:
    """What torch.distributed.checkpoint asks of tensors that lie on several ranks.

    Their classes have not moved since torch 2.1; the methods that ask for them are `__create_write_items__`,
    `__create_chunk_list__` and `__get_tensor_shard__` (torch.distributed._checkpointable). Without these a checkpoint
    refuses such a tensor.
    """

    def chunk(self, offsets: Sequence[int], sizes: Sequence[int]) -> Any:
        """A block of a tensor."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))

    def write_items(
        self, name: str, shape: torch.Size, dtype: torch.dtype, chunks: Sequence[tuple[Any, Any]]
    ) -> list[Any]:
        """What is to be written of a tensor: one item for each block, given by its offsets and sizes."""
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        return [
            WriteItem(
                index=MetadataIndex(name, torch.Size(offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=self.chunk(offsets, sizes), properties=TensorProperties(dtype=dtype), size=shape
                ),
            )
            for offsets, sizes in chunks
        ]


def checkpoint_types() -> CheckpointTypes:
    """The classes that torch.distributed.checkpoint asks for; imported when they are needed, for they take a while."""
    return CheckpointTypes()

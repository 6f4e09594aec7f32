"""Jobs: transfers and fences as bytes that travel inside the engine's own step messages.

They are numbered, because their order against the steps is what keeps the bytes right: a batch that is lost, doubled
or out of its turn is found where it arrives.
"""

from __future__ import annotations

from typing import Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from aiokvoffload.cluster.messages import PROTOCOL_VERSION
from aiokvoffload.devices.base import Direction
from aiokvoffload.errors import InvalidRequestError
from aiokvoffload.specs import CPULoadStoreSpec, GPULoadStoreSpec
from aiokvoffload.transfers.base import Transfer

_NUMBER = np.dtype("<i8")


class Job(msgspec.Struct, frozen=True, array_like=True):
    """One transfer, to be made by every rank between its own GPU blocks and its own part of the slots.

    Attributes:
        transfer_id: Its number.
        is_load: CPU to GPU, or the other way.
        waits_for_compute: Whether it waits for what is on the compute stream when it is submitted.
        is_urgent: Sent at once, whatever the byte budget.
        gpu_blocks: As 8 bytes each, little-endian.
        group_sizes: See `GPULoadStoreSpec`.
        block_indices: See `GPULoadStoreSpec`.
        slots: As 8 bytes each, little-endian.
    """

    transfer_id: int
    is_load: bool
    waits_for_compute: bool
    is_urgent: bool
    gpu_blocks: bytes
    group_sizes: tuple[int, ...]
    block_indices: tuple[int, ...]
    slots: bytes

    @classmethod
    def of(cls, transfer: Transfer, *, is_urgent: bool) -> Self:
        """Return the job that makes a transfer."""
        gpu_spec = transfer.gpu_spec
        return cls(
            transfer.job_id,
            transfer.direction is Direction.LOAD,
            transfer.after is not None,
            is_urgent,
            gpu_spec.block_ids.astype(_NUMBER).tobytes(),
            gpu_spec.group_sizes,
            gpu_spec.block_indices,
            transfer.cpu_spec.block_ids.astype(_NUMBER).tobytes(),
        )

    @property
    def direction(self) -> Direction:
        """Which way."""
        return Direction.LOAD if self.is_load else Direction.STORE

    def gpu_spec(self) -> GPULoadStoreSpec:
        """Return its GPU blocks.

        Raises:
            InvalidRequestError: They are none.
        """
        return GPULoadStoreSpec(_numbers(self.gpu_blocks), self.group_sizes, self.block_indices)

    def cpu_spec(self) -> CPULoadStoreSpec:
        """Return its slots.

        Raises:
            InvalidRequestError: They are none.
        """
        return CPULoadStoreSpec(_numbers(self.slots))


class JobBatch(msgspec.Struct, frozen=True):
    """All decisions since the batch before.

    Attributes:
        version: Of the protocol.
        engine: See `Welcome`.
        number: From 1 on, without gaps.
        jobs: In the order in which they were asked for.
        fences: Transfers that what is launched from now on runs after; of this batch, or of earlier ones.
    """

    version: int
    engine: str
    number: int
    jobs: tuple[Job, ...]
    fences: tuple[int, ...]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(JobBatch)


def encode_batch(engine: str, number: int, jobs: tuple[Job, ...], fences: tuple[int, ...]) -> bytes:
    """Return a batch as bytes."""
    return _encoder.encode(JobBatch(PROTOCOL_VERSION, engine, number, jobs, fences))


def decode_batch(data: bytes) -> JobBatch:
    """Return the batch that some bytes are.

    Raises:
        InvalidRequestError: They are none of this version.
    """
    try:
        batch = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, TypeError) as exc:
        raise InvalidRequestError(f"these are no jobs from take_jobs(): {exc}") from exc
    if batch.version != PROTOCOL_VERSION:
        raise InvalidRequestError(
            f"these jobs are of version {batch.version} of the protocol, but this process speaks version "
            f"{PROTOCOL_VERSION}; use the same version of aiokvoffload in all processes"
        )
    return batch


def _numbers(data: bytes) -> NDArray[np.int64]:
    if len(data) % _NUMBER.itemsize:
        raise InvalidRequestError(f"{len(data)} bytes are no whole number of block numbers")
    return np.frombuffer(data, dtype=_NUMBER).astype(np.int64)

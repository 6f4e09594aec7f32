"""Specs for engines in tests: what they are to suffer stands beside the settings, as `fault`, for all processes."""

from __future__ import annotations

import ctypes
import dataclasses
import threading
from typing import Any, ClassVar

from vllm.v1.kv_offload.config import OffloadingConfig

from aiokvoffload.devices.base import CopyPlan, Event, Stream
from aiokvoffload.devices.host import HostDevice
from aiokvoffload.errors import DeviceError
from aiokvoffload.integrations.vllm import AioKVOffloadSpec
from aiokvoffload.keys import CacheIdentity
from aiokvoffload.managers.tier_plan import TierPlan
from aiokvoffload.offloader.parts import TierChoice
from aiokvoffload.testing.manual_tier import ManualTier


class FaultyDevice(HostDevice):
    """Fails, zeroes or holds copies back.

    Attributes:
        made: All of this process, the latest last.
        gate: Held-back copies run once it is set, or once somebody blocks for one.
        held_count: Copies that were held back.
    """

    made: ClassVar[list[FaultyDevice]] = []

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.gate = threading.Event()
        self.held_count = self.failed_count = 0
        self.made.append(self)

    def copy_batch(self, plan: CopyPlan, stream: Stream) -> None:
        name = plan.direction.name.lower()
        if self.fault == f"fail-{name}" or (self.fault == f"fail-{name}-once" and not self.failed_count):
            self.failed_count += 1
            raise DeviceError("injected")
        if self.fault == f"hold-{name}" and not self.gate.is_set():
            self.held_count += 1
            self.launch(stream, self._wait_for_gate)
        super().copy_batch(plan, stream)
        if self.fault == f"zero-{name}":
            self.launch(stream, lambda: zero(plan))

    def _wait_for_gate(self) -> None:
        self.gate.wait()

    def synchronize(self, event: Event, timeout_seconds: float) -> bool:
        self.gate.set()
        return super().synchronize(event, timeout_seconds)


def zero(plan: CopyPlan) -> None:
    """Write zeros where the copies have written."""
    for address, byte_count in zip(plan.destinations.tolist(), plan.byte_counts.tolist(), strict=True):
        ctypes.memset(address, 0, byte_count)


class FaultySpec(AioKVOffloadSpec):
    """Takes `fault` from the settings, such as `fail-load` or `hold-store`, and `fault_ranks`, by default all."""

    made: ClassVar[list[FaultySpec]] = []

    def __init__(self, config: OffloadingConfig) -> None:
        extra: dict[str, Any] = dict(config.extra_config)
        self.fault: str = extra.pop("fault", "")
        if config.parallel.rank not in extra.pop("fault_ranks", [config.parallel.rank]):
            self.fault = ""
        super().__init__(dataclasses.replace(config, extra_config=extra))
        self.made.append(self)

    def build_device(self) -> FaultyDevice:
        return FaultyDevice(self.fault)

    def build_tiers(self) -> list[TierChoice]:
        if self.fault != "dead-tier":
            return list(super().build_tiers())
        seconds = 0.2
        plan = TierPlan(lookup_seconds=seconds, read_seconds=seconds, write_seconds=seconds)
        return [(ManualTier(CacheIdentity(), block_bytes=1024), plan)]

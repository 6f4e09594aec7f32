"""What the kernel is asked to do with mapped pages.

Through the C library, because Python's `mmap.madvise` holds the GIL, and knows neither all advice nor NUMA nodes.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform

PAGE_BYTES = mmap.PAGESIZE

# From the kernel's uapi headers; the same on all machines, except for the number of the call.
_MADV_HUGEPAGE = 14
_MADV_WIPEONFORK = 18
_MADV_POPULATE_WRITE = 23
_MPOL_PREFERRED = 1
_MBIND_NUMBERS = {"x86_64": 237, "aarch64": 235}
_MASK_WORD_BITS = 64


def whole_pages(byte_count: int) -> int:
    """Return `byte_count`, rounded up to whole pages."""
    return -(-byte_count // PAGE_BYTES) * PAGE_BYTES


class PageCalls:
    """Calls on page-aligned ranges of mapped memory; all release the GIL."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None, use_errno=True)
        self._library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def populate(self, address: int, byte_count: int) -> bool:
        """Back a range with memory of its own; return False if the kernel cannot be asked to (before Linux 5.14).

        Raises:
            OSError: There is not enough memory, or the file behind the range has no room.
        """
        while (code := self._advise(address, byte_count, _MADV_POPULATE_WRITE)) == errno.EINTR:
            pass
        if code in (errno.EINVAL, errno.ENOSYS):
            return False
        if code:
            # Where a plain write would end in SIGBUS, the call says EFAULT.
            code = errno.ENOSPC if code == errno.EFAULT else code
            raise OSError(code, os.strerror(code))
        return True

    def prefer_huge_pages(self, address: int, byte_count: int) -> bool:
        """Ask for huge pages, which are populated and registered sooner; return whether the kernel will try."""
        return not self._advise(address, byte_count, _MADV_HUGEPAGE)

    def wipe_on_fork(self, address: int, byte_count: int) -> bool:
        """Let a forked process see zeros, instead of having pinned pages copied for it; return whether it will."""
        return not self._advise(address, byte_count, _MADV_WIPEONFORK)

    def prefer_node(self, address: int, byte_count: int, node: int) -> None:
        """Take the pages of a range from a NUMA node as long as it has any; from others then.

        Raises:
            OSError: EINVAL if there is no such node; anything else if this process may not choose.
        """
        number = _MBIND_NUMBERS.get(platform.machine())
        if number is None:
            raise OSError(errno.ENOSYS, f"choosing NUMA nodes is not supported on {platform.machine()}")
        words = [0] * (node // _MASK_WORD_BITS + 1)
        words[-1] = 1 << node % _MASK_WORD_BITS
        mask = (ctypes.c_uint64 * len(words))(*words)
        failed = self._library.syscall(
            ctypes.c_long(number),
            ctypes.c_void_p(address),
            ctypes.c_ulong(byte_count),
            ctypes.c_long(_MPOL_PREFERRED),
            mask,
            ctypes.c_ulong(len(words) * _MASK_WORD_BITS + 1),  # the kernel reads one bit fewer
            ctypes.c_ulong(0),
        )
        if failed:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def _advise(self, address: int, byte_count: int, advice: int) -> int:
        """Return 0, or the error's number."""
        return ctypes.get_errno() if self._library.madvise(address, byte_count, advice) else 0

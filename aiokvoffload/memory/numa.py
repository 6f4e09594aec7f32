"""Which NUMA node a GPU is near to."""

from __future__ import annotations

from pathlib import Path

from aiokvoffload.errors import ConfigurationError

PCI_DEVICES = Path("/sys/bus/pci/devices")


def numa_node_of_pci_device(pci_id: str, *, devices: Path = PCI_DEVICES) -> int | None:
    """Return the NUMA node of a PCI device, or None if the machine does not say.

    Args:
        pci_id: Such as "0000:17:00.0"; long domains ("00000000:17:00.0") and capitals are understood.
        devices: Where the kernel lists them.

    Raises:
        ConfigurationError: There is no such device.
    """
    domain, _, rest = pci_id.lower().partition(":")
    folder = devices / f"{domain[-4:]:0>4}:{rest}"
    try:
        node = int((folder / "numa_node").read_text())
    except FileNotFoundError as exc:
        if folder.is_dir():
            return None
        raise ConfigurationError(f"no PCI device {pci_id!r} in {devices}; give one such as 0000:17:00.0") from exc
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None

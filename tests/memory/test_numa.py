"""Choosing the NUMA node of memory, and finding a GPU's."""

from __future__ import annotations

import errno
import logging
import platform
import re
from pathlib import Path

import pytest

from aiokvoffload.errors import ConfigurationError
from aiokvoffload.memory.numa import numa_node_of_pci_device
from aiokvoffload.memory.page_calls import PageCalls
from aiokvoffload.memory.pinned import PinnedMemory
from aiokvoffload.memory.preparation import PreparationOptions
from aiokvoffload.testing.memory_contract import PinCountingDevice


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    for name, content in [("0000:17:00.0", "1\n"), ("0000:18:00.0", "-1\n"), ("0000:19:00.0", None)]:
        (tmp_path / name).mkdir()
        if content is not None:
            (tmp_path / name / "numa_node").write_text(content)
    return tmp_path


@pytest.mark.parametrize(
    ("pci_id", "node"),
    [
        ("0000:17:00.0", 1),
        ("00000000:17:00.0", 1),
        ("0:17:00.0", 1),
        ("0000:18:00.0", None),
        ("0000:19:00.0", None),
    ],
)
def test_the_node_of_a_gpu_is_what_the_kernel_says(devices: Path, pci_id: str, node: int | None) -> None:
    assert numa_node_of_pci_device(pci_id, devices=devices) == node
    assert numa_node_of_pci_device(pci_id.upper(), devices=devices) == node


@pytest.mark.parametrize("pci_id", ["0000:99:00.0", "GPU-0", ""])
def test_a_device_that_is_not_there(devices: Path, pci_id: str) -> None:
    with pytest.raises(ConfigurationError, match=r"give one such as 0000:17:00\.0"):
        numa_node_of_pci_device(pci_id, devices=devices)


class OtherMachine(PageCalls):
    """Answers a choice of node in its own way."""

    def __init__(self, code: int) -> None:
        super().__init__()
        self.code = code

    def prefer_node(self, address: int, byte_count: int, node: int) -> None:
        raise OSError(self.code, errno.errorcode[self.code])


def test_memory_is_taken_from_the_node_asked_for() -> None:
    numa_maps = Path("/proc/self/numa_maps")
    if platform.machine() not in ("x86_64", "aarch64") or not numa_maps.exists():
        pytest.skip("this kernel knows no NUMA nodes")
    memory = PinnedMemory(1, 1 << 20, PinCountingDevice(), options=PreparationOptions(numa_node=0))
    policies = dict(re.findall(r"^([0-9a-f]+) (\S+)", numa_maps.read_text(), re.MULTILINE))
    assert policies[f"{memory.address:x}"] == "prefer:0"
    memory.prepare()
    memory.close()


def test_a_node_that_is_not_there() -> None:
    with pytest.raises(ConfigurationError, match="no memory of NUMA node 1000; see /sys/devices/system/node"):
        PinnedMemory(1, 4096, PinCountingDevice(), options=PreparationOptions(numa_node=1000))


def test_a_process_that_may_not_choose_goes_on_without(caplog: pytest.LogCaptureFixture) -> None:
    options = PreparationOptions(numa_node=0, page_calls=OtherMachine(errno.EPERM))
    with caplog.at_level(logging.WARNING):
        memory = PinnedMemory(1, 4096, PinCountingDevice(), options=options)
    assert [record.message for record in caplog.records] == ["CPU memory is not bound to NUMA node 0: [Errno 1] EPERM"]
    memory.close()


def test_a_machine_whose_call_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(OSError, match="not supported on riscv64"):
        PageCalls().prefer_node(0, 4096, 0)

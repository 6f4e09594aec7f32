"""The race detector agrees, step by step, with a brute-force search of the happens-before graph."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from aiokvoffload.devices.base import Direction, Event, Stream
from aiokvoffload.testing.device import ManualDevice
from aiokvoffload.testing.device_memory import plan_of
from aiokvoffload.testing.order import OrderChecker


@dataclass
class Node:
    """One step of a program: what happened before it, and what it touched."""

    before: set[int]
    reads: set[tuple[str, int, int]] = field(default_factory=set)
    writes: set[tuple[str, int, int]] = field(default_factory=set)


class BruteForce:
    """The happens-before graph itself: each step knows all steps before it by number."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.last: dict[str, int] = {}

    def add(self, owner: str, *others: int) -> Node:
        """Add a step of `owner`, after its own last step, the host's submission, and `others`."""
        parents = [*others]
        if owner != "host":
            parents.append(self.nodes.index(self.add("host")))
        if owner in self.last:
            parents.append(self.last[owner])
        node = Node(set(parents).union(*(self.nodes[parent].before for parent in parents)))
        self.nodes.append(node)
        self.last[owner] = len(self.nodes) - 1
        return node

    def races_of(self, node: Node) -> set[tuple[str, str, int]]:
        found = set()
        for number, earlier in enumerate(self.nodes):
            if earlier is not node and number not in node.before:
                found |= {("read-too-early", region, row) for region, row, _ in node.reads & earlier.writes}
                clash = node.writes & (earlier.writes | earlier.reads)
                found |= {("overwrite-too-early", region, row) for region, row, _ in clash}
        return found


class Layout:
    """A region byte by byte, for the brute-force side."""

    def __init__(self, name: str, start: int, rows: int, row_bytes: int, cell_bytes: int, stride: int) -> None:
        self.name, self.start, self.rows = name, start, rows
        self.row_bytes, self.cell_bytes, self.stride = row_bytes, cell_bytes, stride

    def touched(self, start: int, byte_count: int) -> set[tuple[str, int, int]]:
        cells = set()
        for offset in range(start - self.start, start - self.start + byte_count):
            row, in_row = divmod(offset, self.stride)
            if 0 <= row < self.rows and in_row < self.row_bytes:
                cells.add((self.name, row, in_row // self.cell_bytes))
        return cells

    def of_rows(self, rows: Sequence[int]) -> set[tuple[str, int, int]]:
        return set().union(*(self.touched(self.start + row * self.stride, self.row_bytes) for row in rows))


class RandomProgram:
    """Random steps on a checker and on the brute-force graph at the same time."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.manual = ManualDevice(random_order=self.random)
        self.device = OrderChecker(self.manual, most_violations=1_000_000)
        self.memory = np.zeros(4096, np.uint8)
        base = self.memory.ctypes.data
        self.layouts = [
            Layout("a", base, 6, 8, 8, 20),
            Layout("b", base + 8, 6, 11, 4, 20),
            Layout("c", base + 300, 5, 24, 10, 24),
            Layout("d", base + 420, 4, 8, 8, 8),
        ]
        for layout in self.layouts:
            self.device.watch(
                layout.name,
                layout.start,
                layout.rows,
                layout.row_bytes,
                cell_bytes=layout.cell_bytes,
                row_stride_bytes=layout.stride,
            )
        self.graph = BruteForce()
        self.streams: dict[str, Stream] = {}
        self.events: list[tuple[Event, int]] = []
        self.add_stream()

    def add_stream(self) -> None:
        name = f"stream {len(self.streams)}"
        self.streams[name] = self.device.create_stream(name)

    def rows(self) -> dict[Layout, list[int]]:
        chosen = self.random.sample(self.layouts, self.random.randint(0, 2))
        return {layout: self.random.sample(range(layout.rows), self.random.randint(0, 2)) for layout in chosen}

    def step(self) -> None:
        """Do one random step and compare what both sides say about it."""
        found_before = len(self.device.violations)
        name, stream = self.random.choice(list(self.streams.items()))
        node: Node | None = None
        choice = self.random.choice(
            ["copy", "copy", "launch", "host", "record", "record", "wait", "wait", "ask", "land"]
        )
        if choice == "copy":
            node = self.copy(name, stream)
        elif choice in ("launch", "host"):
            reads, writes = self.rows(), self.rows()
            declared = [[(layout.name, rows) for layout, rows in side.items()] for side in (reads, writes)]
            node = self.graph.add(name if choice == "launch" else "host")
            node.reads = set().union(*(layout.of_rows(rows) for layout, rows in reads.items()))
            node.writes = set().union(*(layout.of_rows(rows) for layout, rows in writes.items()))
            if choice == "launch":
                self.device.launch(stream, lambda: None, *declared)
            else:
                self.device.host_access(*declared)
        elif choice == "record":
            self.graph.add(name)
            self.events.append((self.device.record(stream), len(self.graph.nodes) - 1))
        elif choice == "wait" and self.events:
            event, number = self.random.choice(self.events)
            self.device.wait_event(stream, event)
            self.graph.add(name, number)
        elif choice == "ask" and self.events:
            event, number = self.random.choice(self.events)
            if self.device.is_done(event) or (self.random.random() < 0.2 and self.device.synchronize(event, 1.0)):
                self.graph.add("host", number)
        elif choice == "land":
            self.manual.land_next()
        if len(self.streams) < 12 and self.random.random() < 0.1:
            self.add_stream()
        found = [(v.kind, v.region, v.row) for v in self.device.violations[found_before:]]
        assert len(found) == len(set(found))
        assert set(found) == (self.graph.races_of(node) if node is not None else set())

    def copy(self, name: str, stream: Stream) -> Node:
        half = 600
        copies = []
        node = self.graph.add(name)
        for _ in range(self.random.randint(1, 3)):
            byte_count = self.random.choice([1, 4, 8, 20, 60])
            source = self.memory.ctypes.data + self.random.randint(0, half - byte_count)
            destination = self.memory.ctypes.data + self.random.randint(0, half - byte_count)
            copies.append((source, destination, byte_count))
            for layout in self.layouts:
                node.reads |= layout.touched(source, byte_count)
                node.writes |= layout.touched(destination, byte_count)
        self.device.copy_batch(plan_of(self.random.choice(list(Direction)), copies, self.memory), stream)
        return node


@pytest.mark.parametrize("seed", range(30))
def test_it_agrees_with_a_brute_force_search(seed: int) -> None:
    program = RandomProgram(seed)
    for _ in range(120):
        program.step()
    assert program.device.violation_count == len(program.device.violations) > 0

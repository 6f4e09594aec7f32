"""Request traces: Mooncake's JSON lines, plain or gzip."""

from __future__ import annotations

import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from reprlib import repr as short_repr

from aiokvoffload.errors import InvalidRequestError, TraceError

TRACE_BLOCK_TOKENS = 512
"""Tokens behind one of a trace's `hash_ids`."""

GZIP_MAGIC = b"\x1f\x8b"
MAX_INTEGER = 2**64 - 1


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        timestamp_ms: When it arrives, in milliseconds since the start of the trace.
        input_length: Tokens of its prompt.
        output_length: Tokens that are generated.
        hash_ids: One id per block of `TRACE_BLOCK_TOKENS` prompt tokens. An id stands for the block and everything
            before it. Some traces also give an id to a partly filled last block.
        session: The conversation that it belongs to, where the trace says so.
    """

    timestamp_ms: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    session: str | None = None


def read_trace(path: str | os.PathLike[str], *, limit: int | None = None) -> list[TraceRequest]:
    """Return the requests of a trace file, in the file's order.

    Args:
        path: The file; whether it is gzip is seen from its content, not from its name.
        limit: Stop after so many requests; what follows them is not read.

    Raises:
        TraceError: The file cannot be read, has no request, or has a bad line; the message names file, line and reason.
        InvalidRequestError: `limit` is not positive.
    """
    requests = list(iterate_trace(path, limit=limit))
    if not requests:
        raise TraceError(f"{os.fspath(path)}: the file has no requests")
    return requests


def iterate_trace(path: str | os.PathLike[str], *, limit: int | None = None) -> Iterator[TraceRequest]:
    """Yield the requests of a trace file one by one; see `read_trace`, but a file without requests yields nothing."""
    if limit is not None and limit < 1:
        raise InvalidRequestError(f"limit is {limit}, it must be at least 1")
    name = os.fspath(path)
    count = 0
    previous_ms = 0
    for number, line in _numbered_lines(name):
        try:
            # utf-8-sig: some editors put a byte order mark before the first line.
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            if not text.strip():
                continue
            request = _parse_request(text)
            if request.timestamp_ms < previous_ms:
                raise TraceError(
                    f"timestamp {request.timestamp_ms} is before {previous_ms}, that of the request above; "
                    "sort the trace by timestamp"
                )
        except UnicodeDecodeError as exc:
            raise TraceError(f"{name}, line {number}: not UTF-8 text ({exc.reason} at byte {exc.start})") from exc
        except TraceError as exc:
            raise TraceError(f"{name}, line {number}: {exc}") from exc.__cause__
        previous_ms = request.timestamp_ms
        yield request
        count += 1
        if count == limit:
            return


def _numbered_lines(name: str) -> Iterator[tuple[int, bytes]]:
    number = 0
    try:
        with open(name, "rb") as file:
            is_gzip = file.peek(len(GZIP_MAGIC)).startswith(GZIP_MAGIC)
            lines = io.BufferedReader(gzip.GzipFile(fileobj=file)) if is_gzip else file
            for number, line in enumerate(lines, start=1):
                yield number, line
    except (EOFError, zlib.error, gzip.BadGzipFile) as exc:
        raise TraceError(f"{name}, line {number + 1}: the gzip data is damaged or cut off ({exc})") from exc
    except OSError as exc:
        raise TraceError(f"{name}: cannot be read ({exc.strerror or exc})") from exc
    except ValueError as exc:  # a path with a null byte
        raise TraceError(f"{name!r}: cannot be read ({exc})") from exc


def _parse_request(text: str) -> TraceRequest:
    try:
        record = json.loads(text)
    except json.JSONDecodeError as exc:
        raise TraceError(f"not JSON ({exc.msg} at column {exc.colno})") from exc
    except (ValueError, RecursionError) as exc:  # a number of thousands of digits, or very deep nesting
        raise TraceError(f"not usable JSON ({exc})") from exc
    if not isinstance(record, dict):
        raise TraceError(f"expected a JSON object with timestamp, hash_ids and so on, found {short_repr(record)}")
    input_length = _integer(record, "input_length")
    return TraceRequest(
        timestamp_ms=_integer(record, "timestamp"),
        input_length=input_length,
        output_length=_integer(record, "output_length"),
        hash_ids=_hash_ids(record, input_length),
        session=_session(record),
    )


def _field(record: dict[str, object], field: str) -> object:
    try:
        return record[field]
    except KeyError:
        raise TraceError(f"the field {field!r} is missing") from None


def _is_integer(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_INTEGER


def _integer(record: dict[str, object], field: str) -> int:
    value = _field(record, field)
    if not (isinstance(value, int) and _is_integer(value)):
        raise TraceError(f"{field} is {short_repr(value)}, it must be an integer from 0 to 2**64 - 1")
    return value


def _hash_ids(record: dict[str, object], input_length: int) -> tuple[int, ...]:
    values = _field(record, "hash_ids")
    if not isinstance(values, list):
        raise TraceError(f"hash_ids is {short_repr(values)}, it must be a list of integers")
    for index, value in enumerate(values):
        if not _is_integer(value):
            raise TraceError(f"hash_ids[{index}] is {short_repr(value)}, it must be an integer from 0 to 2**64 - 1")
    # Mooncake's own traces give the partly filled last block an id, traces made from token streams do not.
    full_blocks = input_length // TRACE_BLOCK_TOKENS
    all_blocks = -(-input_length // TRACE_BLOCK_TOKENS)
    if not full_blocks <= len(values) <= all_blocks:
        counts = str(all_blocks) if full_blocks == all_blocks else f"{full_blocks} or {all_blocks}"
        raise TraceError(
            f"input_length {input_length} is {counts} blocks of {TRACE_BLOCK_TOKENS} tokens, "
            f"but there are {len(values)} hash_ids"
        )
    return tuple(values)


def _session(record: dict[str, object]) -> str | None:
    value = record.get("session")
    if value is None or isinstance(value, str):
        return value
    raise TraceError(f"session is {short_repr(value)}, it must be a string")

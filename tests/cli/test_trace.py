import gzip
import json
from pathlib import Path

import pytest

from aiokvoffload.cli.trace import TRACE_BLOCK_TOKENS, TraceRequest, iterate_trace, read_trace
from aiokvoffload.errors import InvalidRequestError, TraceError

REAL_TRACES = Path(__file__).parents[3] / "shared" / "traces"
GOOD = '{"timestamp": 5, "input_length": 600, "output_length": 7, "hash_ids": [0, 1]}'


def record(**changes: object) -> str:
    fields = {"timestamp": 5, "input_length": 600, "output_length": 7, "hash_ids": [0, 1]} | changes
    return json.dumps({name: value for name, value in fields.items() if value is not ...})


def written(folder: Path, content: str | bytes, name: str = "trace.jsonl") -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_reads_every_field(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD + "\n" + record(session="a", timestamp=6, input_length=1023, hash_ids=[2**64 - 1]))
    assert read_trace(path) == [
        TraceRequest(5, 600, 7, (0, 1), None),
        TraceRequest(6, 1023, 7, (2**64 - 1,), "a"),
    ]


def test_blank_lines_and_a_byte_order_mark_are_skipped(tmp_path: Path) -> None:
    path = written(tmp_path, b"\xef\xbb\xbf" + f"{GOOD}\n\n  \r\n{GOOD}\n\n".encode())
    assert len(read_trace(path)) == 2
    assert len(read_trace(str(path))) == 2


@pytest.mark.parametrize("name", ["trace.jsonl.gz", "trace.jsonl"])
def test_gzip_is_recognised_by_its_content(tmp_path: Path, name: str) -> None:
    packed = gzip.compress(GOOD.encode()) + gzip.compress(b"\n" + GOOD.encode())
    assert len(read_trace(written(tmp_path, packed, name))) == 2
    assert len(read_trace(written(tmp_path, GOOD, name))) == 1


def test_limit_reads_nothing_of_what_follows(tmp_path: Path) -> None:
    path = written(tmp_path, f"{GOOD}\n{GOOD}\nrubbish\n")
    assert len(read_trace(path, limit=2)) == 2
    with pytest.raises(TraceError, match="line 3"):
        read_trace(path, limit=3)
    with pytest.raises(InvalidRequestError, match="at least 1"):
        read_trace(path, limit=0)


@pytest.mark.parametrize(
    ("input_length", "block_count", "is_right"),
    [
        (0, 0, True),
        (0, 1, False),
        (511, 0, True),
        (511, 1, True),
        (512, 0, False),
        (512, 1, True),
        (512, 2, False),
        (513, 1, True),
        (513, 2, True),
        (513, 3, False),
    ],
)
def test_ids_are_counted_with_or_without_a_partly_filled_last_block(
    tmp_path: Path, input_length: int, block_count: int, is_right: bool
) -> None:
    path = written(tmp_path, record(input_length=input_length, hash_ids=list(range(block_count))))
    if is_right:
        assert len(read_trace(path)[0].hash_ids) == block_count
    else:
        with pytest.raises(TraceError, match=f"input_length {input_length} is .* {block_count} hash_ids"):
            read_trace(path)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{not json", "not JSON"),
        (GOOD + GOOD, "not JSON"),
        ('{"timestamp": ' + "9" * 5000 + "}", "not usable JSON"),
        ("[" * 200_000, "not usable JSON"),
        ("[1, 2]", "expected a JSON object"),
        ("null", "expected a JSON object"),
        (record(timestamp=...), "'timestamp' is missing"),
        (record(input_length=...), "'input_length' is missing"),
        (record(output_length=...), "'output_length' is missing"),
        (record(hash_ids=...), "'hash_ids' is missing"),
        (record(timestamp="5"), "timestamp is '5', it must be an integer"),
        (record(timestamp=5.5), "timestamp is 5.5"),
        (record(input_length=True), "input_length is True"),
        (record(input_length=-1), "input_length is -1"),
        (record(output_length=None), "output_length is None"),
        (record(output_length=2**64), "output_length is 18446744073709551616"),
        (record(hash_ids="01"), "hash_ids is '01', it must be a list"),
        (record(hash_ids=[0, "1"]), r"hash_ids\[1\] is '1'"),
        (record(hash_ids=[False, 1]), r"hash_ids\[0\] is False"),
        (record(hash_ids=[0, -1]), r"hash_ids\[1\] is -1"),
        (record(hash_ids=[0, 1.0]), r"hash_ids\[1\] is 1.0"),
        (record(session=3), "session is 3, it must be a string"),
        (record(timestamp=4), "timestamp 4 is before 5.*sort the trace"),
    ],
)
def test_a_bad_line_is_named_with_file_number_and_reason(tmp_path: Path, line: str, reason: str) -> None:
    path = written(tmp_path, f"{GOOD}\n\n{line}\n{GOOD}\n")
    with pytest.raises(TraceError, match=reason) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}, line 3: ")
    assert len(str(caught.value)) < len(str(path)) + 250


def test_text_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD.encode() + b'\n{"session": "\xff"}')
    with pytest.raises(TraceError, match="line 2: not UTF-8 text"):
        read_trace(path)


@pytest.mark.parametrize("content", [b"", b"\n \n", gzip.compress(b"")])
def test_a_file_without_requests_is_refused(tmp_path: Path, content: bytes) -> None:
    path = written(tmp_path, content)
    with pytest.raises(TraceError, match="has no requests"):
        read_trace(path)
    assert list(iterate_trace(path)) == []


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path, tmp_path / "null\0byte"):
        with pytest.raises(TraceError, match="cannot be read") as caught:
            read_trace(path)
        assert tmp_path.name in str(caught.value)


def test_damaged_gzip_is_named_with_the_line_it_ends_at(tmp_path: Path) -> None:
    packed = gzip.compress(f"{GOOD}\n{GOOD}\n".encode())
    wrong_checksum = packed[:-8] + bytes(4) + packed[-4:]
    wrong_data = packed[:10] + b"\xff" + packed[11:]  # a kind of deflate block that does not exist
    for content in (packed[:-9], wrong_checksum, wrong_data, packed[:5], packed + b"trailing"):
        with pytest.raises(TraceError, match=r"line [1-3]: the gzip data is damaged or cut off"):
            read_trace(written(tmp_path, content))


@pytest.mark.skipif(not REAL_TRACES.is_dir(), reason="the real traces are not in this checkout")
@pytest.mark.parametrize(
    ("name", "request_count", "reference_count", "distinct_count", "counts_partial_blocks"),
    [
        ("mooncake_conversation.jsonl", 12_031, 288_500, 182_790, True),
        ("weka_agentic_512.jsonl.gz", 10_902, 2_408_967, 98_844, False),
    ],
)
def test_real_traces(
    name: str, request_count: int, reference_count: int, distinct_count: int, counts_partial_blocks: bool
) -> None:
    requests = read_trace(REAL_TRACES / name)
    assert len(requests) == request_count
    assert sum(len(request.hash_ids) for request in requests) == reference_count
    assert len({hash_id for request in requests for hash_id in request.hash_ids}) == distinct_count
    partial_tokens = TRACE_BLOCK_TOKENS - 1 if counts_partial_blocks else 0
    assert all(
        len(request.hash_ids) == (request.input_length + partial_tokens) // TRACE_BLOCK_TOKENS for request in requests
    )
    assert read_trace(REAL_TRACES / name, limit=3) == requests[:3]

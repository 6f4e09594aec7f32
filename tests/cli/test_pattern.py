import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from aiokvoffload.cli.pattern import CHUNK_BYTES, BlockPattern, seed_of, seeds_of
from aiokvoffload.errors import ConfigurationError, InvalidRequestError

LAYERS = 3


def blank(block_count: int, page_bytes: int) -> NDArray[np.uint8]:
    return np.zeros((block_count, page_bytes), dtype=np.uint8)


def filled(pattern: BlockPattern, seeds: NDArray[np.uint64], layer: int = 0) -> NDArray[np.uint8]:
    pages = blank(len(seeds), pattern.page_bytes)
    pattern.fill(seeds, layer, pages)
    return pages


def keys(block_count: int) -> list[bytes]:
    return [index.to_bytes(4, "big") for index in range(block_count)]


def test_bytes_are_the_same_on_every_machine() -> None:
    assert seed_of(b"key") == 17675689295421930702
    pages = filled(BlockPattern(16, LAYERS), seeds_of([b"key"]), layer=2)
    assert pages.tobytes().hex() == "44ff92e9e71bfab62a6e8d1b329ed0c5"


def test_no_word_comes_twice() -> None:
    pattern = BlockPattern(64, LAYERS)
    # Seeds that are close to each other must not be closer in what follows from them.
    seeds = np.concatenate([seeds_of(keys(100)), np.arange(100, dtype=np.uint64)])
    words = np.concatenate([filled(pattern, seeds, layer).view(np.uint64).ravel() for layer in range(LAYERS)])
    assert len(np.unique(words)) == 200 * LAYERS * 8
    assert words.all()


@given(st.integers(1, 40), st.sampled_from([8, 24, 1024]), st.data())
def test_any_changed_byte_is_found_in_its_block_alone(block_count: int, page_bytes: int, data: st.DataObject) -> None:
    pattern = BlockPattern(page_bytes, LAYERS)
    seeds = seeds_of(keys(block_count))
    pages = filled(pattern, seeds)
    assert not pattern.mismatches(seeds, 0, pages).any()
    block = data.draw(st.integers(0, block_count - 1))
    pages[block, data.draw(st.integers(0, page_bytes - 1))] ^= data.draw(st.integers(1, 255))
    assert np.flatnonzero(pattern.mismatches(seeds, 0, pages)).tolist() == [block]


def test_swapped_pages_layers_words_and_zeroed_pages_are_found() -> None:
    pattern = BlockPattern(64, LAYERS)
    seeds = seeds_of(keys(6))
    right = filled(pattern, seeds)
    assert np.flatnonzero(pattern.mismatches(seeds, 0, right[[0, 2, 1, 3, 4, 5]])).tolist() == [1, 2]
    assert pattern.mismatches(seeds, 0, filled(pattern, seeds, layer=1)).all()
    assert pattern.mismatches(seeds, 0, blank(6, 64)).all()
    assert pattern.mismatches(seeds, 0, np.roll(right, 8, axis=1)).all()
    assert pattern.mismatches(seeds, 0, np.roll(right, 1, axis=1)).all()
    words = right.view(np.uint64)
    words[2, [3, 4]] = words[2, [4, 3]]
    assert np.flatnonzero(pattern.mismatches(seeds, 0, right)).tolist() == [2]


@pytest.mark.parametrize("page_bytes", [8, 4096, CHUNK_BYTES, CHUNK_BYTES + 8])
def test_more_blocks_than_one_step_takes(page_bytes: int) -> None:
    pattern = BlockPattern(page_bytes, 1)
    block_count = 2 * max(1, CHUNK_BYTES // page_bytes) + 1
    seeds = seeds_of(keys(block_count))
    pages = filled(pattern, seeds)
    wrong = [0, block_count // 2, block_count - 1]
    pages[wrong, -1] ^= 1
    assert np.flatnonzero(pattern.mismatches(seeds, 0, pages)).tolist() == sorted(set(wrong))
    rows = np.random.default_rng(0).permutation(block_count)
    pattern.fill(seeds, 0, pages, rows)
    assert not pattern.mismatches(seeds, 0, pages, rows).any()
    assert not pattern.mismatches(seeds, 0, pages[rows]).any()


def test_rows_name_where_pages_lie_and_others_stay_as_they_are() -> None:
    pattern = BlockPattern(16, LAYERS)
    seeds = seeds_of(keys(3))
    pages = blank(8, 16)
    pattern.fill(seeds, 1, pages, [6, 0, 3])
    assert (pages[[6, 0, 3]] == filled(pattern, seeds, 1)).all()
    assert not pages[[1, 2, 4, 5, 7]].any()
    assert np.flatnonzero(pattern.mismatches(seeds, 1, pages, [6, 1, 3])).tolist() == [1]


def test_rows_may_be_apart_and_unaligned() -> None:
    pattern = BlockPattern(16, LAYERS)
    seeds = seeds_of(keys(4))
    memory = np.zeros((4, 61), dtype=np.int8)
    pages = memory[:, 3:19]
    pattern.fill(seeds, 0, pages)
    assert not pattern.mismatches(seeds, 0, pages).any()
    assert (pages.view(np.uint8) == filled(pattern, seeds)).all()
    assert not memory[:, :3].any()
    assert not memory[:, 19:].any()


def test_no_blocks_are_fine() -> None:
    pattern = BlockPattern(16, LAYERS)
    none = seeds_of([])
    pattern.fill(none, 0, blank(0, 16))
    pattern.fill(none, 0, blank(5, 16), [])
    assert pattern.mismatches(none, 0, blank(5, 16), []).tolist() == []


@pytest.mark.parametrize("page_bytes", [0, -8, 4, 12])
def test_a_page_that_is_no_multiple_of_a_word_is_refused(page_bytes: int) -> None:
    with pytest.raises(ConfigurationError, match=f"page_bytes is {page_bytes}"):
        BlockPattern(page_bytes, 1)


def test_no_layers_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="layer_count is 0"):
        BlockPattern(8, 0)


@pytest.mark.parametrize(
    ("seeds", "layer", "pages", "rows", "reason"),
    [
        (seeds_of(keys(2)), LAYERS, blank(2, 16), None, "layer 3 does not exist"),
        (seeds_of(keys(2)), -1, blank(2, 16), None, "layer -1 does not exist"),
        (seeds_of(keys(2)).astype(np.int64), 0, blank(2, 16), None, "they are int64"),
        (seeds_of(keys(2)), 0, blank(2, 24), None, "rows of 16 adjacent bytes"),
        (seeds_of(keys(2)), 0, blank(2, 32)[:, ::2], None, "rows of 16 adjacent bytes"),
        (seeds_of(keys(2)), 0, blank(2, 16).view(np.uint64), None, "rows of 16 adjacent bytes"),
        (seeds_of(keys(2)), 0, blank(3, 16), None, "2 seeds but 3 pages"),
        (seeds_of(keys(2)), 0, blank(3, 16), [1], "2 seeds but 1 pages"),
        (seeds_of(keys(2)), 0, blank(3, 16), [1, 3], "between 0 and 2"),
        (seeds_of(keys(2)), 0, blank(3, 16), [1, -1], "between 0 and 2"),
    ],
)
def test_what_does_not_fit_is_refused(
    seeds: NDArray[np.uint64], layer: int, pages: NDArray[np.uint8], rows: list[int] | None, reason: str
) -> None:
    pattern = BlockPattern(16, LAYERS)
    with pytest.raises(InvalidRequestError, match=reason):
        pattern.fill(seeds, layer, pages, rows)
    with pytest.raises(InvalidRequestError, match=reason):
        pattern.mismatches(seeds, layer, pages, rows)

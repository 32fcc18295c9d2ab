"""Keys of blocks, and how far a prefix hit reaches."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from di_jax.engine.prefix_cache import BlockKeys, Hit, choose_hit, hit_limit

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)


def keys_of(
    tokens: list[int], block_size: int = 4, salt: str | None = None, content: dict[int, str] | None = None
) -> list[bytes]:
    keys = BlockKeys(block_size, salt, content)
    keys.extend(tokens)
    return keys.keys


def common(one: list[bytes], other: list[bytes]) -> int:
    """Keys that agree from the first on; none may agree after one that differs."""
    agree = [a == b for a, b in zip(one, other)]
    count = sum(agree)
    assert agree == [True] * count + [False] * (len(agree) - count)
    return count


def test_a_key_is_blake2b_over_the_key_before_and_the_ids() -> None:
    def digest(data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=16).digest()

    first = digest(digest(b"") + np.array([7, 0], "<i4").tobytes())
    second = digest(first + np.array([1, 2**31 - 1], "<i4").tobytes())
    assert keys_of([7, 0, 1, 2**31 - 1, 9], block_size=2) == [first, second]


@given(TOKENS, st.lists(st.integers(0, 40), max_size=6), st.integers(1, 6), st.booleans())
def test_growing_tokens_give_the_keys_of_all_at_once(
    tokens: list[int], cuts: list[int], block_size: int, arrays: bool
) -> None:
    content = {2: "cat", 3: "dog", 17: "cow"}
    grown = BlockKeys(block_size, "s", content)
    ends = sorted([min(cut, len(tokens)) for cut in cuts] + [len(tokens)])
    for start, end in zip([0, *ends], ends):
        part = tokens[start:end]
        grown.extend(np.array(part, np.int64) if arrays else part)
        assert grown.num_tokens == end and len(grown.keys) == end // block_size
    assert grown.keys == keys_of(tokens, block_size, "s", content)
    assert len(set(grown.keys)) == len(grown.keys) and all(len(key) == 16 for key in grown.keys)


@given(TOKENS.filter(len), st.data(), st.integers(1, 6))
def test_a_changed_token_changes_the_keys_from_its_block_on(
    tokens: list[int], data: st.DataObject, block_size: int
) -> None:
    position = data.draw(st.integers(0, len(tokens) - 1))
    changed = list(tokens)
    changed[position] = data.draw(st.integers(0, 2**31 - 1).filter(lambda token: token != tokens[position]))
    complete = len(tokens) // block_size
    before = min(position // block_size, complete)
    assert common(keys_of(tokens, block_size), keys_of(changed, block_size)) == before
    assert common(keys_of(tokens, block_size), keys_of(tokens[:position], block_size)) == before


def test_other_salts_share_nothing() -> None:
    tokens = list(range(8))
    keys = [keys_of(tokens, salt=salt) for salt in (None, "", "a", "b", "None", "\ud800")]
    assert len({key for chain in keys for key in chain}) == 12
    assert keys_of(tokens, salt="a") == keys[2]


def test_an_image_changes_the_keys_from_the_block_where_it_begins() -> None:
    tokens = [9] * 16  # placeholders are the same tokens whatever the image
    plain, cat = keys_of(tokens), keys_of(tokens, content={6: "cat"})
    assert common(plain, cat) == 1
    assert keys_of(tokens, content={6: "cat"}) == cat
    assert common(keys_of(tokens, content={3: "cat"}), keys_of(tokens, content={4: "cat"})) == 0
    for other in ({6: "dog"}, {5: "cat"}, {6: "cat", 7: ""}, {6: "ca", 7: "t"}):
        assert common(cat, keys_of(tokens, content=other)) == 1, other
    assert common(cat, keys_of(tokens, content={6: "cat", 12: "dog"})) == 3
    assert common(cat, keys_of(tokens, content={6: "cat", 99: "dog"})) == 4  # its tokens are not there yet


def test_images_cannot_be_named_so_that_two_look_like_one() -> None:
    for length in range(3):
        one = "a" + np.array([1, length], "<i4").tobytes().decode() + "b"
        assert keys_of([9] * 4, content={0: "a", 1: "b"}) != keys_of([9] * 4, content={0: one})


def test_a_copy_grows_on_its_own() -> None:
    one = BlockKeys(4, "s", {5: "cat"})
    one.extend([1, 2, 3, 4, 5])
    other = one.copy()
    one.extend([6, 7, 8])
    other.extend([6, 7, 9])
    assert one.keys == keys_of([1, 2, 3, 4, 5, 6, 7, 8], 4, "s", {5: "cat"})
    assert other.keys == keys_of([1, 2, 3, 4, 5, 6, 7, 9], 4, "s", {5: "cat"})


@pytest.mark.parametrize("token", [-1, 2**31, 2**40])
def test_what_is_no_token_id_is_refused_and_changes_nothing(token: int) -> None:
    keys = BlockKeys(2)
    keys.extend([1])
    with pytest.raises(ValueError, match=r"token ids of a block key must be in 0 .. 2\^31 - 1"):
        keys.extend([5, token, 5, 5])
    with pytest.raises(TypeError):
        keys.extend(np.array([1.5, 2.5]))
    assert (keys.num_tokens, keys.keys) == (1, [])


def test_tokens_that_a_caller_overwrites_later_do_not_count() -> None:
    keys, tokens = BlockKeys(4), np.array([1, 2, 3, 4, 5, 6], np.int32)
    keys.extend(tokens)
    tokens[:] = 0
    keys.extend([7, 8])
    assert keys.keys == keys_of([1, 2, 3, 4, 5, 6, 7, 8])


# -- how far a hit reaches


@pytest.mark.parametrize(("look_back", "first"), [(22, 150), (134, 262)])
def test_the_first_length_that_can_be_hit(look_back: int, first: int) -> None:
    assert (hit_limit(first, look_back, 128), hit_limit(first - 1, look_back, 128)) == (128, 0)
    assert (hit_limit(first + 128, look_back, 128), hit_limit(first + 127, look_back, 128)) == (256, 128)


@given(st.integers(0, 5000), st.integers(0, 300), st.sampled_from([1, 16, 128]))
def test_the_limit_is_the_largest_multiple(num_tokens: int, look_back: int, block_size: int) -> None:
    limit = hit_limit(num_tokens, look_back, block_size)
    assert limit == max([0, *(h for h in range(0, num_tokens + 1, block_size) if h <= num_tokens - look_back)])


@pytest.mark.parametrize(
    ("num_tokens", "look_back", "length"),
    [
        (127, 22, 0),
        (128, 22, 0),
        (129, 22, 0),
        (149, 22, 0),
        (150, 22, 128),
        (255, 22, 128),
        (256, 22, 128),
        (4097, 22, 3968),
        (4097, 134, 3840),
        (256, 134, 0),
        (261, 134, 0),
        (262, 134, 128),
        (390, 134, 256),
    ],
)
def test_a_hit_of_a_prompt_that_is_cached_whole(num_tokens: int, look_back: int, length: int) -> None:
    chain = num_tokens // 128
    replayed = Hit(length, length - 128, length - 128) if length else Hit(0, 0, 0)
    assert choose_hit(chain, num_tokens, look_back, lambda _: False, True) == replayed
    assert choose_hit(chain, num_tokens, look_back, lambda _: False, False) == Hit(0, 0, 0)
    for replay in (False, True):
        assert choose_hit(chain, num_tokens, look_back, lambda _: True, replay) == Hit(length, length, 0)


def test_without_replay_a_hit_ends_at_the_farthest_snapshot() -> None:
    kept = {128, 384, 1024}
    assert choose_hit(7, 4096, 134, kept.__contains__, False) == Hit(384, 384, 0)
    assert choose_hit(2, 4096, 134, kept.__contains__, False) == Hit(128, 128, 0)
    assert choose_hit(8, 4096, 134, kept.__contains__, False) == Hit(1024, 1024, 0)
    assert choose_hit(8, 1024, 134, kept.__contains__, False) == Hit(384, 384, 0)  # the last 134 are computed
    assert choose_hit(7, 4096, 134, kept.__contains__, True) == Hit(896, 768, 768)
    assert choose_hit(3, 4096, 134, kept.__contains__, True) == Hit(384, 384, 0)


@given(st.integers(0, 40), st.integers(0, 5000), st.integers(0, 200), st.sets(st.integers(1, 40)), st.booleans())
def test_a_hit_is_backed_by_blocks_and_by_a_snapshot_or_a_replay(
    chain: int, num_tokens: int, look_back: int, kept: set[int], replay: bool
) -> None:
    asked = []

    def has_snapshot(boundary: int) -> bool:
        asked.append(boundary)
        return boundary // 128 in kept

    length, start, window_start = choose_hit(chain, num_tokens, look_back, has_snapshot, replay)
    limit = min(chain * 128, hit_limit(num_tokens, look_back, 128))
    assert 0 <= window_start <= start <= length <= limit and length % 128 == start % 128 == 0
    assert length == 0 or num_tokens - length >= look_back
    assert all(0 < boundary <= limit and boundary % 128 == 0 for boundary in asked)
    if replay:
        assert length == limit
    else:
        assert not any(length // 128 < boundary <= limit // 128 for boundary in kept)
    if length and length // 128 in kept:
        assert (start, window_start) == (length, 0)
    elif length:
        assert replay and start == window_start == length - 128

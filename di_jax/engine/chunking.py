"""How the token budget of a prefill step is shared between prompts, and where a chunk ends. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def share_tokens(remaining: Sequence[int], budget: int, block: int, turn: int = 0) -> list[int]:
    """Tokens of each prompt that run in a step.

    remaining: tokens to run of each prompt, the oldest first. The oldest gets half of the budget (rounded up to whole
    blocks, but one block stays for the others) or all that it needs, so that it ends in a bounded number of steps. The
    rest goes to the shortest first, the older on a tie, so that short prompts do not wait behind long ones; a share
    that does not end its prompt is of whole blocks. What is left over goes back to the oldest. Below two blocks
    nothing can be split: the oldest is served first on even turns, the others on odd ones. turn: number of the step.
    Sums to at most `budget`, and less only by a part of a block or where all prompts end.
    """
    shares = [0] * len(remaining)
    oldest = next((i for i, tokens in enumerate(remaining) if tokens > 0), None)
    if oldest is None or budget <= 0:
        return shares
    shares[oldest] = min(remaining[oldest], _first_share(budget, block, turn))
    left = budget - shares[oldest]
    others = sorted((i for i in range(oldest + 1, len(remaining)) if remaining[i] > 0), key=remaining.__getitem__)
    for i in others:
        if remaining[i] > left:  # and so are all that follow
            shares[i] = left // block * block
            left -= shares[i]
            break
        shares[i] = remaining[i]
        left -= shares[i]
    shares[oldest] += min(remaining[oldest] - shares[oldest], left)
    return shares


def gets_tokens(remaining: Sequence[int], tokens: int, budget: int, block: int, turn: int = 0) -> bool:
    """Whether one more prompt, the youngest, of `tokens` would get some in a step: the last of `share_tokens`, but
    O(prompts). Of a queue of n prompts each may be asked about, and sorting each time would be O(n^2 log n)."""
    if tokens <= 0 or budget <= 0:
        return False
    if sum(remaining) + tokens <= budget:  # as most do: the rest takes ten times as long
        return True
    oldest = next((one for one in remaining if one > 0), None)
    if oldest is None:
        return True
    left = budget - min(oldest, _first_share(budget, block, turn))
    before = sum(one for one in remaining if 0 < one <= tokens) - (oldest if oldest <= tokens else 0)
    return left - before >= min(tokens, block)


def _first_share(budget: int, block: int, turn: int) -> int:
    """What the oldest prompt gets before all others."""
    blocks = budget // block
    if blocks < 2:
        return 0 if turn % 2 else budget
    return min(-(-budget // (2 * block)), blocks - 1) * block


def cut(start: int, count: int, total: int, stops: Iterable[int], block: int) -> int:
    """The tokens of a chunk, at most `count`, that begins at position `start` of `total` to run.

    It does not run over the first of `stops` after `start` (positions where a snapshot must be taken). One that reaches
    neither it nor the end of the prompt ends on a block boundary if there is one inside. At least 1 where `count` is.
    """
    end = min(start + count, total)
    stop = min((s for s in stops if s > start), default=total)
    if end >= stop:
        return stop - start
    if end < total and end // block * block > start:
        end = end // block * block
    return max(0, end - start)

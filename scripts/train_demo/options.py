"""Types of the trainings' command-line options: what a value may be is told by argparse, with option and value."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def option[T](read: Callable[[str], T], fits: Callable[[T], bool], wanted: str) -> Callable[[str], T]:
    """A `type` of argparse: the value that `read` makes of the word, if it fits. wanted: for the message."""

    def parse(word: str) -> T:
        try:
            value = read(word)
        except ValueError:
            value = None
        if value is None or not fits(value):
            raise argparse.ArgumentTypeError(f"{word}: not {wanted}")
        return value

    return parse


# No comparison holds of nan: a total of so many minutes would never be over.
COUNT = option(int, lambda n: n >= 1, "a whole number from 1 on")
SEED = option(int, lambda n: n >= 0, "a whole number from 0 on")
POSITIVE = option(float, lambda x: 0 < x < math.inf, "a positive number")
WEIGHT = option(float, lambda x: 0 <= x < math.inf, "a number from 0 on")
SHARE = option(float, lambda x: 0 <= x <= 1, "a share, from 0 to 1")
ROW_LENGTH = option(int, lambda n: n >= 128 and n % 128 == 0, "a multiple of 128")

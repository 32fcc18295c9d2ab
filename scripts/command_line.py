"""How a script ends when it is given what it cannot take: one line on stderr and status 2, as `di_jax.run` does."""

from __future__ import annotations

import sys
from collections.abc import Callable

from di_jax.errors import UserError


def run(main: Callable[[], int]) -> int:
    """The status of main(); a mistake of the caller is told without a traceback."""
    try:
        return main()
    except (UserError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

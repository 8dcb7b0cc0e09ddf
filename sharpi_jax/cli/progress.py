"""The bar that is shown while a model is loaded."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

DELAY_S = 1.0  # what is done sooner needs no bar


@contextlib.contextmanager
def loading_bar() -> Iterator[Callable[[int, int], None]]:
    """A callback for `on_progress`: bytes loaded and bytes in all.

    The bar is on standard error, only where that is a terminal and once loading has taken DELAY_S; at the end it goes.
    """
    from tqdm import tqdm  # here, not above: --help must not wait for it

    # disable=None: where standard error is no terminal.
    with tqdm(
        desc="loading", unit="B", unit_scale=True, delay=DELAY_S, leave=False, disable=None, file=sys.stderr
    ) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show

"""Compiled programs by shape, with the time that compiling them took kept apart from running them."""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax


class Programs:
    """Compiles a function once per (static arguments, shapes) and reuses the executable.

    Attributes:
      compile_s: seconds spent tracing and compiling so far. count: programs compiled so far.
    """

    def __init__(self) -> None:
        self._compiled: dict[Any, Any] = {}
        self.compile_s = 0.0

    @property
    def count(self) -> int:
        return len(self._compiled)

    def run(self, function: Callable[..., Any], *args: Any, donate: tuple[int, ...] = (), **static: Any) -> Any:
        """function(*args, **static), compiled; `donate` names arguments whose buffers the program may take over."""
        leaves, tree = jax.tree.flatten(args)
        key = (function, tuple(sorted(static.items())), tree, tuple((x.shape, x.dtype) for x in leaves))
        if key not in self._compiled:
            began = time.perf_counter()
            jitted = jax.jit(functools.partial(function, **static), donate_argnums=donate)
            self._compiled[key] = jitted.lower(*args).compile()
            self.compile_s += time.perf_counter() - began
        return self._compiled[key](*args)

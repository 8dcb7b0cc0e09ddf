"""Compiled programs by shape, with the time that compiling them took kept apart from running them."""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from sharpi_jax.errors import OptionError


class Programs:
    """Compiles a function once per (static arguments, shapes) and reuses the executable.

    Attributes:
      compile_s: seconds spent tracing and compiling so far. count: programs compiled so far.
    """

    def __init__(self) -> None:
        self._compiled: dict[Any, jax.stages.Compiled] = {}
        self.compile_s = 0.0

    @property
    def count(self) -> int:
        return len(self._compiled)

    def items(self) -> Iterator[tuple[str, jax.stages.Compiled]]:
        """The name of each compiled function, and its executable."""
        return ((key[0].__name__, compiled) for key, compiled in self._compiled.items())

    def run(self, function: Callable[..., Any], *args: Any, donate: tuple[int, ...] = (), **static: Any) -> Any:
        """function(*args, **static), compiled; `donate` names arguments whose buffers the program may take over.

        Raises:
          OptionError: the device's memory is too small.
        """
        leaves, tree = jax.tree.flatten(args)
        key = (function, tuple(sorted(static.items())), tree, tuple((x.shape, x.dtype) for x in leaves))
        if key not in self._compiled:
            began = time.perf_counter()
            jitted = jax.jit(functools.partial(function, **static), donate_argnums=donate)
            self._compiled[key] = jitted.lower(*args).compile()
            self.compile_s += time.perf_counter() - began
        try:
            return self._compiled[key](*args)
        except jax.errors.JaxRuntimeError as fault:
            if "RESOURCE_EXHAUSTED" in str(fault):
                raise OptionError("the device has too little memory for this context; lower ctx_size.") from fault
            raise

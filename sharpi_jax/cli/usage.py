"""The fault of a command line that cannot be understood."""

from sharpi_jax.errors import OptionError


class UsageError(OptionError):
    """What was typed is not a command: exit status 2, where every other fault is 1."""

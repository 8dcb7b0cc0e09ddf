"""The faults that a user can mend. Each is one clear line; the command line prints it and exits non-zero."""


class SharpiError(Exception):
    """Base of every fault shown to a user: the message is a single sentence that names the fix where there is one."""


class CheckpointError(SharpiError):
    """The model file cannot be used: missing, damaged, or of a kind that is not supported."""


class OptionError(SharpiError):
    """An option, or a combination of options, that cannot be honoured."""

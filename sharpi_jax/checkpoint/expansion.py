"""What it costs that some tensors of a file could not stay packed (quant/expand.py), in one line for the user."""

from collections import Counter
from collections.abc import Sequence

from sharpi_jax.checkpoint.gguf_file import TensorInfo
from sharpi_jax.quant import FORMATS

_NAMED = 3
_BYTES = 2  # of a bfloat16 number


def expansion_notes(tensors: Sequence[TensorInfo]) -> tuple[str, ...]:
    """One remark if any of these tensors, all of which were loaded, has a type that is expanded; else none."""
    expanded = [tensor for tensor in tensors if tensor.type_name not in FORMATS]
    if not expanded:
        return ()
    counts = Counter(tensor.type_name for tensor in expanded)
    types = ", ".join(f"{count} of type {name}" for name, count in counts.most_common())
    named = ", ".join(tensor.name for tensor in expanded[:_NAMED]) + (", ..." if len(expanded) > _NAMED else "")
    extra = sum(_BYTES * tensor.n_elements - tensor.nbytes for tensor in expanded)
    return (
        f"tensors expanded to bfloat16, since their types have no packed form here: {types} ({named}); "
        f"this takes {extra:,} bytes more than packed",
    )

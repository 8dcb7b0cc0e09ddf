"""Prompts from held-out chapters."""

from sharpi_jax import Model

PROMPT_TOKENS = 24


def held_out_prompts(model: Model, chapters: list[str], count: int) -> list[list[int]]:
    """Prompts of PROMPT_TOKENS tokens from verse starts: each chapter's first, then one from its middle."""
    found = []
    for place in (0.0, 0.5, 0.25):
        for chapter in chapters:
            lines = chapter.split("\n")
            ids = model.tokenizer.encode("\n".join(lines[int(place * len(lines)) :]))
            if len(ids) > PROMPT_TOKENS:
                found.append(ids[:PROMPT_TOKENS])
    return found[:count]

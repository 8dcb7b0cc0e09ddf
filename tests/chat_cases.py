"""Templates and conversations whose prompts are compared with llama-server's, and where those are stored.

`tools/peers/templates.py` asks llama-server for the prompts; test_chat_peer.py holds the package to its answers.
"""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import vocabularies

from sharpi_jax.checkpoint.chat import ChatTemplate
from sharpi_jax.checkpoint.gguf_file import open_gguf

DATA = Path(__file__).parent / "data"
STORED = DATA / "chat_prompts.json"

# Written for these tests in the manner of the thinking models: indented blocks, whitespace control, a think switch.
THINKING = """{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- else %}
        {{- '<think>\\n' }}
    {%- endif %}
{%- endif %}
"""
# Another name for the switch, a default of its own, and the thoughts of earlier turns cut away.
THINKING_OFF = """{% if thinking is not defined %}{% set thinking = false %}{% endif %}
{%- for m in messages %}
  {%- set said = m.content.split('</think>')[-1].lstrip('\\n') if m.role == 'assistant' else m.content %}
  {{- '<' ~ m.role ~ '>' ~ said | trim ~ (eos_token if m.role == 'assistant' else '') }}
{%- endfor %}{% if add_generation_prompt %}<assistant>{{ '<think>' if thinking else '</think>' }}{% endif %}"""
# In the manner of the LLaMA 2 family: a BOS of its own, the system message inside the user's, strict roles.
INST = """{% if messages[0]['role'] == 'system' %}
{%- set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}{% set talk = messages[1:] %}
{%- else %}{% set system = '' %}{% set talk = messages %}{% endif %}
{%- for m in talk %}
{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
{%- if m['role'] == 'user' %}
{{- bos_token + '[INST] ' + (system if loop.first else '') + m['content'].strip() + ' [/INST]' }}
{%- else %}{{ ' ' + m['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


_SYSTEM = {"role": "system", "content": "Be brief.\n\nAnswer in German."}
CONVERSATIONS = {
    "one": [_user("Hi")],
    "system": [_SYSTEM, _user("  1 < 2 && \"a\" != 'b'?\n")],
    "turns": [_SYSTEM, _user("Größe? 日本 👩‍🚀 नमस्ते"), _assistant("Ja.\n\n- eins\n"), _user("\tUnd?  ")],
    "thoughts": [_user("2+2"), _assistant("<think>\nsum\n</think>\n\n4"), _user("3+3")],
    "odd": [_user("<|im_end|>{{ 1 + 1 }}{% x %}\r\n</s>"), _assistant("[/INST] \\n"), _user('{"k": [1, null]}')],
    "empty": [_user("")],
}


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a template comes from.

    Attributes:
      tokens: the kind of vocabulary that it is served with, or the name of a model file in tests/data.
      text: the template; None for that of the file.
      switch: the variable that turns thinking on and off, where there is one.
    """

    tokens: str
    text: str | None = None
    switch: str | None = None

    def template(self, text: str | None = None) -> ChatTemplate:
        """The package's reading of it; `text` stands for a template that only llama-server knows."""
        found = vocabularies.metadata(self.tokens) if self.tokens in vocabularies.KINDS else self._file()
        given = text or self.text
        template = ChatTemplate.from_metadata(found | ({"tokenizer.chat_template": given} if given else {}))
        assert template is not None
        return template

    def _file(self) -> dict[str, Any]:
        return dict(open_gguf(DATA / self.tokens).metadata)


CHATML = "chatml"  # llama.cpp's own: asked for by name, its text is stored with the prompts
SOURCES = {
    "fixture": Source("qwen35-tiny-f32.gguf"),
    "qwen2": Source("qwen2"),
    "smollm2": Source("smollm"),
    CHATML: Source("smollm"),
    "thinking": Source("smollm", THINKING, "enable_thinking"),
    "thinking off": Source("smollm", THINKING_OFF, "thinking"),
    "inst": Source("llama-spm", INST),
}


def cases() -> Iterator[dict[str, Any]]:
    """What is asked: each template with each conversation, thinking on and off where it has the switch."""
    for template, source in SOURCES.items():
        for conversation in CONVERSATIONS:
            for thinking in (True, False) if source.switch else (None,):
                yield {"template": template, "conversation": conversation, "thinking": thinking}


def stored() -> dict[str, Any]:
    """{"chatml": the text of llama.cpp's template, "prompts": the cases, each with its "prompt"}."""
    return json.loads(STORED.read_text())

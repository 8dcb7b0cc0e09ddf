"""Chat prompts byte for byte as llama-server's /apply-template gives them.

Thinking is compared on and off where a template has the switch. Left open it is not: the package leaves it to the
template, as the models' makers do, and llama-server follows a rule of its own.
"""

from typing import Any

import chat_cases
import pytest

STORED = chat_cases.stored()


@pytest.mark.parametrize(
    "case", STORED["prompts"], ids=lambda case: f"{case['template']}-{case['conversation']}-{case['thinking']}"
)
def test_prompts_equal_llama_servers(case: dict[str, Any]) -> None:
    own = STORED["chatml"] if case["template"] == chat_cases.CHATML else None
    source = chat_cases.SOURCES[case["template"]]
    template = source.template(own)
    prompt = template.render(chat_cases.CONVERSATIONS[case["conversation"]], thinking=case["thinking"])
    if source.tokens == "llama-spm":  # llama-server leaves away the BOS that tokenising adds
        assert prompt.startswith(template.bos_token + "[INST]")
        prompt = prompt.removeprefix(template.bos_token)
    assert prompt == case["prompt"]


def test_every_case_is_stored() -> None:
    assert [{k: v for k, v in case.items() if k != "prompt"} for case in STORED["prompts"]] == list(chat_cases.cases())
    switched = [case["prompt"] for case in STORED["prompts"] if case["thinking"] is not None]
    assert len({*switched}) == len(switched)  # each switch changes something

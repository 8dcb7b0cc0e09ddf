"""What ships with the package: the demo model (tools/demo_model says how it was made), a prompt in its domain, and the
prompts of batch evaluation."""

from pathlib import Path

DEMO_MODEL = Path(__file__).parent / "demo-q8_0.gguf"
DEMO_PROMPT = "The king said to his servants,"
BUILTIN_PROMPTS = Path(__file__).parent / "prompts.jsonl"

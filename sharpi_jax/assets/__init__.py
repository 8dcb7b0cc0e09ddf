"""The demo model that ships with the package (tools/demo_model says how it was made), and a prompt in its domain."""

from pathlib import Path

DEMO_MODEL = Path(__file__).parent / "demo-q8_0.gguf"
DEMO_PROMPT = "The king said to his servants,"

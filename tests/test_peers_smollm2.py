"""A real model that nobody here made, SmolLM2-135M-Instruct in Q4_1: `SHARPI_PEERS=FOLDER pytest -m peers` (peers.py).

llama.cpp quantises activations where weights are quantised, so on the file itself its tokens may part from exact
arithmetic's at near ties, whose size is measured. On its values in float32 it does not, and the tokens must be equal.
"""

import functools
import lzma

import jax
import numpy as np
import pytest
from fixtures import DATA
from peers import found, llama_server

import sharpi_jax
from sharpi_jax.decode.controls import make_controls
from tools.peers.float32 import write_float32
from tools.peers.server import DiedError

pytestmark = pytest.mark.peers

TOKENS = 64
EXACT = ("-np", "1", "-ctk", "f32", "-ctv", "f32", "-fa", "off", "-c", "1024")
PROMPTS = (
    "The capital of France is",
    "Once upon a time, there was a",
    "def fibonacci(n):\n",
    "Water boils at",
    "The three primary colours are",
    "In 1969, humans first",
    "A haiku about the sea:\n",
    "List of planets in our solar system:\n1.",
    "Dear Sir or Madam,",
    "The opposite of hot is",
    "import numpy as np\n",
    "My favourite recipe is",
    "The theory of evolution",
    "She opened the door and",
    "To install the package, run",
    "The best way to learn a language",
    "Rain fell on the",
    "The mitochondria is",
    "Two plus two equals",
    "It was the best of times,",
)


@functools.cache
def ours():
    """The model, and each prompt's greedy tokens, all prompts in one batch."""
    model = sharpi_jax.load(found().smollm2)
    prompts = [model.tokenizer.encode_prompt(text) for text in PROMPTS]
    controls = make_controls([1.0] * len(prompts), model.tokenizer.stop_ids, ignore_eos=True)
    state = model.decoder.prefill(prompts, [TOKENS] * len(prompts), 128, controls, K=0)
    state = jax.device_get(model.decoder.advance(state, controls, TOKENS))
    outputs = [t[p : p + TOKENS].tolist() for t, p in zip(state.tokens, state.prompt_length, strict=True)]
    return model, list(zip(prompts, outputs, strict=True))


def theirs(path):
    """Of each prompt llama-server's answer, with the log-probabilities of its two first choices."""
    body = {"n_predict": TOKENS, "temperature": 0, "return_tokens": True, "cache_prompt": False, "ignore_eos": True}
    with llama_server(path, *EXACT) as server:
        return [server.ask("completion", body | {"prompt": prompt, "n_probs": 2}) for prompt, _ in ours()[1]]


def compare(answers):
    """Prompts with equal tokens, our lead at each first parting, and by how much the two engines' leads differ."""
    model, equal, partings, noise = ours()[0], 0, [], []
    for (prompt, output), answer in zip(ours()[1], answers, strict=True):
        tokens = answer["tokens"]
        logits = model.score([*prompt, *tokens[:-1]]).logits[len(prompt) - 1 :]
        at = next((i for i, (a, b) in enumerate(zip(output, tokens, strict=True)) if a != b), None)
        equal += at is None
        if at is not None:
            partings.append(float(logits[at].max() - logits[at, tokens[at]]))
        for row, position in zip(logits, answer["completion_probabilities"], strict=True):
            (a, p), (b, q) = ((choice["id"], choice["logprob"]) for choice in position["top_logprobs"][:2])
            noise.append(float(p - q - (row[a] - row[b])))
    return equal, partings, np.abs(noise)


def test_greedy_tokens_on_the_files_values_in_float32(tmp_path):
    write_float32(found().smollm2, tmp_path / "float32.gguf")
    equal, partings, noise = compare(theirs(tmp_path / "float32.gguf"))
    print(f"float32 values: equal on {equal} of {len(PROMPTS)} prompts; leads differ by at most {noise.max():.1e}")
    assert equal == len(PROMPTS), partings
    assert noise.max() < 2e-4


def test_greedy_tokens_on_the_same_file():
    try:
        answers = theirs(found().smollm2)
    except (DiedError, ConnectionError) as error:  # its products use instructions that not every processor has
        pytest.skip(f"llama-server does not run quantised weights on this processor: {str(error)[-200:]}")
    equal, partings, noise = compare(answers)
    print(f"equal on {equal} of {len(PROMPTS)} prompts; our lead where they part: {np.round(partings, 3)}")
    print(f"leads differ by {np.sqrt(np.mean(noise**2)):.3f} on average (root mean square), {noise.max():.3f} at most")
    assert all(lead <= 3 * np.sqrt(np.mean(noise**2)) for lead in partings)


def test_perplexity_is_llama_cpps():
    """llama.cpp's own tool gives 16.5585 +- 0.3124, over 81 windows of 512 tokens. It quantises activations."""
    text = lzma.decompress((DATA / "text" / "alice29.txt.xz").read_bytes()).decode()
    measured = ours()[0].perplexity(text, ctx_size=512)
    print(f"perplexity {measured.perplexity:.4f} +- {measured.perplexity_error:.4f} over {measured.windows} windows")
    assert measured.windows == 81
    assert measured.perplexity == pytest.approx(16.5585, rel=0.005)
    assert measured.perplexity_error == pytest.approx(0.3124, rel=0.01)

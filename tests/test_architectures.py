"""The plain architectures against llama-server and NumPy float64, on small random models (tools/peers)."""

import functools

import gguf
import models
import numpy as np
import pytest
from reference import numpy_plain
from rewriting import ABSENT, rewrite

from sharpi_jax import CheckpointError, DecodeOptions, OptionError, load
from tools.peers.architectures import CASES, PROMPTS, TOKENS, checksum, write

ONES = np.ones(64, np.float32)
TOLERANCE = 4e-5  # logits reach 30 here, twice the fixtures', for which it is 2e-5


@functools.cache
def stored():
    with np.load(models.DATA / "architectures.npz") as arrays:
        return dict(arrays)


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """Its name, file and Model."""
    path = tmp_path_factory.mktemp("architectures") / f"{request.param}.gguf"
    write(path, request.param)
    assert checksum(path) == stored()[f"{request.param}.sha256"], "not the file that llama-server was asked about"
    return request.param, path, load(path)


@pytest.mark.parametrize("index", range(len(PROMPTS)))
def test_tokens_and_probabilities_are_llama_cpps(case, index):
    name, path, model = case
    tokens = stored()[f"{name}.{index}.tokens"].tolist()
    wanted = stored()[f"{name}.{index}.log_probabilities"]
    assert list(model.generate(PROMPTS[index], DecodeOptions(max_tokens=TOKENS, ignore_eos=True)).output_ids) == tokens
    logits = model.score([*PROMPTS[index], *tokens[:-1]]).logits
    exact = numpy_plain.load(path).logits([*PROMPTS[index], *tokens[:-1]])
    assert np.abs(logits - exact).max() <= TOLERANCE
    for found in (logits, exact):
        rows = found[-TOKENS:].astype(np.float64)
        rows -= rows.max(axis=-1, keepdims=True)
        rows -= np.log(np.exp(rows).sum(axis=-1, keepdims=True))
        assert np.abs(rows - wanted).max() <= TOLERANCE


def test_a_long_prompt_in_chunks_is_the_whole(case):
    """Of 150 tokens, which take one chunk of 256 and positions far apart."""
    _, path, model = case
    tokens = np.random.default_rng(3).integers(0, 288, 150).tolist()
    assert np.abs(model.score(tokens).logits - numpy_plain.load(path).logits(tokens)).max() <= TOLERANCE


def test_drafting_is_refused(case):
    with pytest.raises(OptionError, match="no MTP head"):
        case[2].generate([1, 2], DecodeOptions(max_tokens=2, spec_type="mtp"))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen2", {"drop": r"blk\.1\.attn_k\.bias"}, "blk.1.attn_k.bias is missing"),
        ("qwen3", {"drop": r"blk\.0\.attn_q_norm\.weight"}, "blk.0.attn_q_norm.weight is missing"),
        ("qwen2", {"meta": {"attention.head_count": 7}}, "must divide embedding_length"),
        ("llama", {"meta": {"expert_count": 8}}, "experts, which are not supported"),
        ("llama-linear", {"meta": {"rope.scaling.type": "yarn"}}, "'yarn' scaling, which is not supported"),
        ("llama-linear", {"meta": {"rope.scaling.factor": -1.0}}, "must be a positive number"),
        ("qwen3moe", {"meta": {"expert_used_count": 9}}, "more than the 8 experts"),
        ("qwen3moe", {"meta": {"expert_gating_func": 2}}, "must be 1 .softmax."),
        ("qwen3moe", {"drop": r"blk\.0\.ffn_up_exps\.weight"}, "blk.0.ffn_up_exps.weight is missing"),
        ("qwen3", {"add": {"blk.2.nextn.enorm.weight": ONES}}, "an MTP head in architecture qwen3 is not supported"),
        ("qwen3", {"add": {"blk.1.attn_q.bias": ONES}}, "blk.1.attn_q.bias is not known"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(tmp_path, name, changes, message):
    write(tmp_path / "whole.gguf", name)
    path = rewrite(tmp_path / "other.gguf", tmp_path / "whole.gguf", **changes)
    with pytest.raises(CheckpointError, match=message) as error:
        load(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("meta", "factors"),
    [
        ({"rope.scaling.type": "none"}, ()),
        ({"rope.scaling.factor": 0.0}, ()),
        ({"rope.scaling.factor": ABSENT}, ()),
        ({"rope.scaling.factor": ABSENT, "rope.scale_linear": 3.0}, (3.0,)),
    ],
)
def test_defaults_of_rope_scaling(tmp_path, meta, factors):
    """Those that no stored case covers."""
    write(tmp_path / "whole.gguf", "llama-linear")
    assert load(rewrite(tmp_path / "other.gguf", tmp_path / "whole.gguf", meta=meta)).config.rope_factors == factors


def test_a_matrix_may_have_a_last_dimension_of_one(tmp_path):
    """As some converters write."""
    write(tmp_path / "whole.gguf", "qwen3")
    name = "blk.0.attn_k.weight"
    weights = {t.name: t.data for t in gguf.GGUFReader(tmp_path / "whole.gguf").tensors}[name]
    path = rewrite(tmp_path / "other.gguf", tmp_path / "whole.gguf", add={name: np.array(weights[None])})
    found, whole = (load(p).score(PROMPTS[0]).logits for p in (path, tmp_path / "whole.gguf"))
    assert (found == whole).all()


def test_biases_are_optional_in_llama_and_used_where_they_are(tmp_path):
    write(tmp_path / "with.gguf", "llama-biases")
    without = rewrite(tmp_path / "without.gguf", tmp_path / "with.gguf", drop=r"blk\.\d\.attn_[qkv]\.bias")
    a, b = (load(path).score(PROMPTS[0]).logits for path in (tmp_path / "with.gguf", without))
    assert np.abs(a - b).max() > 0.1

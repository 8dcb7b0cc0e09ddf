"""The plain architectures against llama-server and NumPy float64, on small random models (tools/peers)."""

import functools

import gguf
import models
import numpy as np
import pytest
from reference import numpy_plain

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


def rewritten(path, out, *, drop=(), add=None, **changes):
    """The file with metadata keys changed (None removes one), and tensors dropped and added."""
    reader = gguf.GGUFReader(path)
    fields = {k: f for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    writer = gguf.GGUFWriter(out, fields.pop("general.architecture").contents())
    for key, field in fields.items():
        value = changes.pop(key.split(".", 1)[1], field.contents())
        if value is not None:
            writer.add_key_value(key, value, field.types[0], field.types[-1] if len(field.types) > 1 else None)
    for key, value in changes.items():
        writer.add_key_value(f"{writer.arch}.{key}", value, gguf.GGUFValueType.UINT32)
    for tensor in reader.tensors:
        if tensor.name not in drop:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    for name, values in (add or {}).items():
        writer.add_tensor(name, np.array(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


@pytest.mark.parametrize(
    ("name", "drop", "changes", "message"),
    [
        ("qwen2", ["blk.1.attn_k.bias"], {}, "blk.1.attn_k.bias is missing"),
        ("qwen3", ["blk.0.attn_q_norm.weight"], {}, "blk.0.attn_q_norm.weight is missing"),
        ("qwen2", [], {"attention.head_count": 7}, "must divide embedding_length"),
        ("llama", [], {"expert_count": 8}, "experts, which are not supported"),
        ("llama-linear", [], {"rope.scaling.type": "yarn"}, "'yarn' scaling, which is not supported"),
        ("llama-linear", [], {"rope.scaling.factor": -1.0}, "must be a positive number"),
        ("qwen3moe", [], {"expert_used_count": 9}, "more than the 8 experts"),
        ("qwen3moe", [], {"expert_gating_func": 2}, "must be 1 .softmax."),
        ("qwen3moe", ["blk.0.ffn_up_exps.weight"], {}, "blk.0.ffn_up_exps.weight is missing"),
        (
            "qwen3",
            [],
            {"add": {"blk.2.nextn.enorm.weight": ONES}},
            "an MTP head in architecture qwen3 is not supported",
        ),
        ("qwen3", [], {"add": {"blk.1.attn_q.bias": ONES}}, "blk.1.attn_q.bias is not known"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(tmp_path, name, drop, changes, message):
    write(tmp_path / "whole.gguf", name)
    path = rewritten(tmp_path / "whole.gguf", tmp_path / "other.gguf", drop=drop, **changes)
    with pytest.raises(CheckpointError, match=message) as error:
        load(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "factors"),
    [
        ({"rope.scaling.type": None}, (4.0,)),  # linear is llama.cpp's default
        ({"rope.scaling.type": "none"}, ()),
        ({"rope.scaling.factor": 0.0}, ()),
        ({"rope.scaling.factor": None}, ()),
    ],
)
def test_defaults_of_rope_scaling_are_llama_cpps(tmp_path, changes, factors):
    write(tmp_path / "whole.gguf", "llama-linear")
    path = rewritten(tmp_path / "whole.gguf", tmp_path / "other.gguf", **changes)
    assert load(path).config.rope_factors == factors


def test_a_matrix_may_have_a_last_dimension_of_one(tmp_path):
    """As some converters write, and as `add` writes it here."""
    write(tmp_path / "whole.gguf", "qwen3")
    whole = load(tmp_path / "whole.gguf")
    name = "blk.0.attn_k.weight"
    weights = {t.name: t.data for t in gguf.GGUFReader(tmp_path / "whole.gguf").tensors}[name]
    path = rewritten(tmp_path / "whole.gguf", tmp_path / "other.gguf", drop=[name], add={name: weights[None]})
    assert (load(path).score(PROMPTS[0]).logits == whole.score(PROMPTS[0]).logits).all()


def test_biases_are_optional_in_llama_and_used_where_they_are(tmp_path):
    write(tmp_path / "with.gguf", "llama-biases")
    names = [f"blk.{i}.attn_{n}.bias" for i in range(2) for n in "qkv"]
    without = rewritten(tmp_path / "with.gguf", tmp_path / "without.gguf", drop=names)
    a, b = (load(path).score(PROMPTS[0]).logits for path in (tmp_path / "with.gguf", without))
    assert np.abs(a - b).max() > 0.1

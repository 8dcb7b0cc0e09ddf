"""Config and weights of the fixtures, of rewritten ones, and every refusal, each naming what is wrong."""

import dataclasses
import re

import gguf
import jax
import models
import numpy as np
import pytest
from models import same_bits, same_params
from rewriting import ABSENT, rewrite, tensors

from sharpi_jax import checkpoint
from sharpi_jax.checkpoint.architectures import ARCHITECTURES
from sharpi_jax.checkpoint.config import read_config
from sharpi_jax.checkpoint.gguf_file import open_gguf
from sharpi_jax.errors import CheckpointError
from sharpi_jax.model.config import ModelConfig
from sharpi_jax.quant import Packed, Tiled, dequantise

TINY, TINY256, NO_MTP = "qwen35-tiny-f16", "qwen35-tiny256-q4_0", "qwen35-tiny-nomtp-f16"


@pytest.fixture
def rewritten(tmp_path):
    """(source, **changes) -> path of a fixture with the changes of `rewrite`."""
    return lambda source, **changes: rewrite(tmp_path / "changed.gguf", source, **changes)


def config_of(path):
    return read_config(open_gguf(path))


def refusal(read, path):
    """The message of the one-line CheckpointError that `read` must raise, less the path at its beginning."""
    with pytest.raises(CheckpointError) as caught:
        read(path)
    message = str(caught.value)
    assert message.endswith(".")
    assert "\n" not in message
    return message.removeprefix(str(path)).lstrip(": ")


# --- config -----------------------------------------------------------------------------------------------------------

TINY_CONFIG = ModelConfig(
    architecture="qwen35",
    layer_kinds=("delta", "delta", "delta", "attention"),
    has_mtp=True,
    width=64,
    vocab_size=512,
    context_length=4096,
    ffn_width=96,
    heads=4,
    key_heads=2,
    head_dim=32,
    rope_dims=8,
    rope_base=1e7,
    norm_eps=float(np.float32(1e-6)),
    delta_heads=4,
    delta_key_heads=2,
    delta_head_dim=16,
    conv_taps=4,
)


def test_config_of_the_fixtures():
    assert models.read("qwen35-tiny-q8_0").config == models.read(TINY).config == TINY_CONFIG
    assert TINY_CONFIG.conv_channels == 128
    assert hash(models.read(TINY).config) == hash(TINY_CONFIG)
    small = models.read(TINY256).config
    assert small.layer_kinds == ("delta", "attention")
    assert (small.width, small.ffn_width, small.vocab_size, small.has_mtp) == (256, 256, 512, True)
    assert (small.heads, small.key_heads, small.head_dim, small.rope_dims) == (4, 1, 64, 16)
    assert (small.delta_heads, small.delta_key_heads, small.delta_head_dim, small.conv_channels) == (4, 2, 64, 512)
    assert models.read(TINY).notes == models.read(TINY256).notes == ()


DELTA, ATTENTION = "delta", "attention"


@pytest.mark.parametrize(
    ("meta", "kinds"),
    [
        ({"attention.recurrent_layers": ABSENT}, (DELTA, DELTA, DELTA, ATTENTION)),
        ({"attention.recurrent_layers": ABSENT, "full_attention_interval": 2}, (DELTA, ATTENTION) * 2),
        ({"attention.recurrent_layers": ABSENT, "full_attention_interval": ABSENT}, (DELTA,) * 3 + (ATTENTION,)),
        ({"attention.recurrent_layers": ABSENT, "full_attention_interval": 1}, (ATTENTION,) * 4),
        ({"attention.recurrent_layers": True}, (DELTA,) * 4),
        ({"attention.recurrent_layers": False, "full_attention_interval": 2}, (ATTENTION,) * 4),
        ({"attention.recurrent_layers": [False, True, True, False, False]}, (ATTENTION, DELTA, DELTA, ATTENTION)),
        ({"attention.recurrent_layers": [True, False, True, False]}, (DELTA, ATTENTION) * 2),
    ],
)
def test_layer_kinds_come_from_the_metadata(rewritten, meta, kinds):
    config, notes = config_of(rewritten(TINY, meta=meta))
    assert config.layer_kinds == kinds
    assert notes == ()


def test_optional_keys_and_arrays_of_equal_values(rewritten):
    arrays = {"attention.head_count": [4] * 5, "attention.head_count_kv": [2] * 5, "feed_forward_length": [96] * 5}
    assert config_of(rewritten(TINY, meta=arrays))[0] == TINY_CONFIG
    left_out = ("attention.value_length", "rope.dimension_sections", "full_attention_interval")
    assert config_of(rewritten(TINY, meta=dict.fromkeys(left_out, ABSENT)))[0] == TINY_CONFIG
    whole = config_of(rewritten(TINY, meta={"rope.dimension_count": ABSENT, "rope.dimension_sections": ABSENT}))[0]
    assert whole.rope_dims == 32
    assert config_of(rewritten(TINY, meta={"rope.scaling.type": "none"}))[0] == TINY_CONFIG
    assert config_of(rewritten(TINY, meta={"tokenizer.ggml.tokens": ABSENT}))[0] == TINY_CONFIG


def test_an_interval_of_nothing_is_refused(rewritten):
    meta = {"attention.recurrent_layers": ABSENT, "full_attention_interval": 0}
    message = refusal(config_of, rewritten(TINY, meta=meta))
    assert message == "metadata key qwen35.full_attention_interval is 0, not a whole number from 1 to 2147483647."


REQUIRED = """
    block_count embedding_length context_length feed_forward_length attention.head_count attention.head_count_kv
    attention.key_length rope.freq_base attention.layer_norm_rms_epsilon ssm.conv_kernel ssm.state_size
    ssm.group_count ssm.time_step_rank ssm.inner_size
"""


@pytest.mark.parametrize("key", REQUIRED.split())
def test_a_missing_key_is_named(rewritten, key):
    message = refusal(config_of, rewritten(TINY, meta={key: ABSENT}))
    assert message == f"metadata key qwen35.{key} is missing."


NOT_ONE, NOT_WHOLE, NOT_FLAGS = (
    "must be one number",
    "not a whole number from 1 to 2147483647",
    "must hold a true or false",
)


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("attention.head_count", [4, 4, 4, 4, 2], NOT_ONE),
        ("attention.head_count", "4", NOT_ONE),
        ("attention.head_count", True, NOT_ONE),
        ("embedding_length", 0, NOT_WHOLE),
        ("embedding_length", -64, NOT_WHOLE),
        ("context_length", 4096.5, NOT_WHOLE),
        ("context_length", 3e9, NOT_WHOLE),
        ("block_count", float("nan"), NOT_WHOLE),
        ("nextn_predict_layers", 5, "leaves no trunk in 5 blocks"),
        ("nextn_predict_layers", -1, "not a whole number from 0"),
        ("nextn_predict_layers", 2, "puts the MTP head in block 3, not 4"),
        ("nextn_predict_layers", 0.5, "nextn_predict_layers"),
        ("nextn_predict_layers", float("nan"), "nextn_predict_layers"),
        ("attention.recurrent_layers", [True, True, True], NOT_FLAGS),
        ("attention.recurrent_layers", [1, 1, 1, 0, 0], NOT_FLAGS),
        ("attention.recurrent_layers", "all", NOT_FLAGS),
        ("attention.value_length", 16, "must equal attention.key_length"),
        ("attention.head_count_kv", 3, "must be a multiple of attention.head_count_kv"),
        ("ssm.group_count", 3, "must be a multiple of ssm.group_count"),
        ("ssm.inner_size", 128, "must equal ssm.time_step_rank * ssm.state_size"),
        ("ssm.conv_kernel", 1, "must be at least 2"),
        ("rope.dimension_count", 7, "must be even and at most attention.key_length"),
        ("rope.dimension_count", 34, "must be even and at most attention.key_length"),
        ("rope.dimension_sections", [1, 1, 1, 0], "must cover half of rope.dimension_count"),
        ("rope.dimension_sections", ["2", "1"], "rope.dimension_sections"),
        ("rope.scaling.type", "yarn", "asks for 'yarn' scaling, which is not supported"),
        ("rope.scaling.type", [1, 2], "rope.scaling.type"),
        ("rope.freq_base", 1.0, "rope.freq_base"),
        ("rope.freq_base", float("inf"), "rope.freq_base"),
        ("attention.layer_norm_rms_epsilon", 0.0, "attention.layer_norm_rms_epsilon"),
        ("attention.layer_norm_rms_epsilon", float("nan"), "attention.layer_norm_rms_epsilon"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_by_its_key(rewritten, key, value, problem):
    message = refusal(config_of, rewritten(TINY, meta={key: value}))
    assert message.startswith("metadata key qwen35.")
    assert problem in message


@pytest.mark.parametrize("architecture", ["gemma3", "Qwen35"])
def test_an_unknown_architecture_is_named(rewritten, architecture):
    message = refusal(config_of, rewritten(TINY, meta={"general.architecture": architecture}))
    assert message == f"architecture '{architecture}' is not supported; supported: {', '.join(ARCHITECTURES)}."


@pytest.mark.parametrize("architecture", [None, 35, np.array([3, 5])])
def test_an_architecture_that_is_no_name_is_refused(architecture):
    file = open_gguf(models.fixture(TINY))
    changed = dataclasses.replace(file, metadata={**file.metadata, "general.architecture": architecture})
    with pytest.raises(CheckpointError, match="is not supported; supported: qwen35"):
        read_config(changed)


def test_tokens_and_embedding_table_must_agree(rewritten):
    few = [f"token {i}" for i in range(511)]
    assert "511 tokens, but token_embd.weight has 512 rows" in refusal(
        config_of, rewritten(TINY, meta={"tokenizer.ggml.tokens": few})
    )
    assert "tokenizer.ggml.tokens" in refusal(checkpoint.read, rewritten(TINY, meta={"tokenizer.ggml.tokens": 512}))
    missing = "tensor token_embd.weight is missing or is not a table."
    assert refusal(config_of, rewritten(TINY, drop=r"token_embd\.weight")) == missing
    flat = {"token_embd.weight": np.zeros(64, np.float16)}
    assert refusal(config_of, rewritten(TINY, add=flat)) == missing


def test_more_blocks_than_the_file_can_hold_are_refused_before_they_are_counted_out(rewritten):
    """block_count comes from the file: two thousand million layer kinds would not fit into memory."""
    meta = {"block_count": 3_000_000, "attention.recurrent_layers": ABSENT}
    assert "block_count" in refusal(config_of, rewritten(NO_MTP, meta=meta))


# --- the MTP head, promised and found ---------------------------------------------------------------------------------


def test_a_file_without_a_head_that_promises_none():
    read = models.read(NO_MTP)
    assert "qwen35.nextn_predict_layers" not in read.file.metadata
    assert (read.config.has_mtp, read.config.layer_kinds) == (False, TINY_CONFIG.layer_kinds)
    assert read.params.mtp is None
    assert read.notes == ()


@pytest.mark.parametrize("pattern", [r"blk\.4\..*", r"blk\.4\.nextn\..*"])
def test_a_promised_head_that_is_absent_is_said_and_done_without(rewritten, pattern):
    read = checkpoint.read(rewritten(TINY, drop=pattern))
    assert (read.config.has_mtp, read.config.layer_kinds) == (False, TINY_CONFIG.layer_kinds)
    assert same_params(read.params, models.read(TINY).params.replace(mtp=None))
    assert read.notes == ("the metadata promises 1 MTP layer(s), but the tensors are absent",)


@pytest.mark.parametrize("blocks", [5, 4])
def test_a_head_that_the_metadata_does_not_mention_is_said_and_used(rewritten, blocks):
    read = checkpoint.read(rewritten(TINY, meta={"nextn_predict_layers": ABSENT, "block_count": blocks}))
    assert read.config == TINY_CONFIG
    assert same_params(read.params, models.read(TINY).params)
    assert read.notes == ("the metadata does not mention the MTP head found in block 4; it is used",)


UNSAID = "the metadata does not mention the MTP head found in block 4; it is used"


@pytest.mark.parametrize(
    ("blocks", "promised", "notes"),
    [(6, 2, ()), (5, 1, ()), (6, ABSENT, (UNSAID,)), (4, ABSENT, (UNSAID,))],
)
def test_of_two_mtp_layers_the_first_is_used_and_that_is_said(rewritten, blocks, promised, notes):
    """Whether the metadata count both, the first alone, or neither."""
    second = {name.replace("blk.4.", "blk.5."): data for name, data in tensors(TINY, r"blk\.4\..*").items()}
    read = checkpoint.read(rewritten(TINY, meta={"block_count": blocks, "nextn_predict_layers": promised}, add=second))
    assert read.config == TINY_CONFIG
    assert same_params(read.params, models.read(TINY).params)
    assert read.notes == (*notes, "the file has 2 MTP layers; only the first is used")


def test_an_mtp_only_file_is_refused(rewritten):
    message = refusal(checkpoint.read, rewritten(TINY, drop=r"blk\.[0-3]\..*"))
    assert message == "holds only an MTP head; give the file that holds the trunk, and this one as --mtp_model."


def test_a_head_in_the_wrong_place_is_refused(rewritten):
    stray = {"blk.2.nextn.enorm.weight": np.ones(64, np.float32)}
    assert "puts the MTP head in block 4, not 2" in refusal(config_of, rewritten(TINY, add=stray))
    message = refusal(config_of, rewritten(NO_MTP, add=stray))
    assert message == "block 2 holds an MTP head, but it is not the last of 4."


# --- weights ----------------------------------------------------------------------------------------------------------

NEEDED = """
    output_norm.weight blk.0.attn_norm.weight blk.2.post_attention_norm.weight blk.1.attn_qkv.weight
    blk.0.attn_gate.weight blk.0.ssm_alpha.weight blk.0.ssm_beta.weight blk.1.ssm_a blk.1.ssm_dt.bias
    blk.2.ssm_conv1d.weight blk.2.ssm_norm.weight blk.2.ssm_out.weight blk.3.attn_q.weight blk.3.attn_k.weight
    blk.3.attn_v.weight blk.3.attn_output.weight blk.3.attn_q_norm.weight blk.3.attn_k_norm.weight
    blk.3.ffn_gate.weight blk.3.ffn_up.weight blk.3.ffn_down.weight blk.4.nextn.eh_proj.weight
    blk.4.nextn.enorm.weight blk.4.nextn.hnorm.weight blk.4.attn_q.weight blk.4.ffn_down.weight blk.4.attn_norm.weight
"""


@pytest.mark.parametrize("name", NEEDED.split())
def test_a_missing_tensor_is_named_and_so_is_one_of_other_dimensions(rewritten, name):
    message = refusal(checkpoint.read, rewritten(TINY, drop=re.escape(name)))
    assert message == f"tensor {name} is missing."
    ((array, _),) = tensors(TINY, re.escape(name)).values()
    short = np.ascontiguousarray(array[:-1])
    message = refusal(checkpoint.read, rewritten(TINY, add={name: short}))
    assert message == (
        f"tensor {name} has dimensions {list(short.shape[::-1])}; the metadata ask for {list(array.shape[::-1])}."
    )


def test_what_the_table_does_not_know_is_named(rewritten):
    one = np.ones(64, np.float32)
    nextn = ("blk.4.nextn.extra.weight", "nextn.extra.weight", "blk.x.nextn.eh_proj.weight")
    for name in ("blk.0.attn_q.bias", *nextn, "rope_freqs.weight", "blk.3.attn_qkv.weight"):
        message = refusal(checkpoint.read, rewritten(TINY, add={name: one}))
        assert message == f"tensor {name} is not known for architecture qwen35."
    message = refusal(checkpoint.read, rewritten(TINY, add={f"blk.1.extra.{i}": one for i in range(3)}))
    assert message.startswith("tensor blk.1.extra.0 and 2 more is not known")
    message = refusal(checkpoint.read, rewritten(NO_MTP, add={"blk.9.attn_norm.weight": one}))
    assert "blk.9.attn_norm.weight" in message
    renamed = {"blk.1.ffn_up.weight": "blk.1.ffn_upper.weight"}
    assert "blk.1.ffn_up.weight is missing" in refusal(checkpoint.read, rewritten(TINY, rename=renamed))


@pytest.mark.parametrize(("kind", "array"), [("I32", np.int32), ("F64", np.float64), ("I8", np.int8)])
def test_a_type_that_is_not_supported_is_named(rewritten, kind, array):
    for name, shape in (("blk.0.attn_norm.weight", 256), ("blk.1.ffn_up.weight", (256, 256))):
        message = refusal(checkpoint.read, rewritten(TINY256, add={name: np.ones(shape, array)}))
        assert f"tensor {name} has type {kind}, which is not supported; convert the file to one of F32," in message


def test_types_without_a_packed_form_are_expanded_and_one_note_says_so(rewritten):
    kinds = {
        "blk.0.ffn_up.weight": ("IQ1_S", 50),
        "blk.1.ffn_up.weight": ("IQ1_S", 50),
        "blk.0.ffn_gate.weight": ("TQ2_0", 66),
        "blk.1.ffn_down.weight": ("IQ1_S", 50),
    }
    rng = np.random.default_rng(0)
    raw = {name: rng.integers(0, 60, (256, width), np.uint8) for name, (_, width) in kinds.items()}
    add = {name: (raw[name], gguf.GGMLQuantizationType[kind]) for name, (kind, _) in kinds.items()}
    read = checkpoint.read(rewritten(TINY256, add=add))
    (note,) = read.notes
    assert "3 of type IQ1_S, 1 of type TQ2_0" in note
    assert re.search(r"\(blk\.\d\.ffn_\w+\.weight, blk\.\d\.ffn_\w+\.weight, blk\.\d\.ffn_\w+\.weight, \.\.\.\)", note)
    assert f"takes {4 * 256 * 512 - 256 * (3 * 50 + 66):,} bytes more than packed" in note
    assert "\n" not in note
    weight = read.params.layers[0].ffn.up
    exact = gguf.quants.dequantize(raw["blk.0.ffn_up.weight"], gguf.GGMLQuantizationType.IQ1_S)
    assert weight.format == "BF16"
    assert np.abs(np.asarray(dequantise(weight)) - exact).max() <= 2.0**-8 * np.abs(exact).max()
    assert models.read(TINY256).notes == ()


def test_matrices_stay_packed_and_vectors_become_float32(rewritten):
    norm = np.linspace(0.5, 2, 64).astype(np.float16)
    read = checkpoint.read(rewritten(TINY, add={"blk.2.attn_norm.weight": norm}))
    assert same_bits(np.asarray(read.params.layers[2].mixer_norm), norm.astype(np.float32))
    found = {t.name: t for t in gguf.GGUFReader(models.fixture(TINY256)).tensors}
    params = models.read(TINY256).params
    for field, name in ((params.embed, "token_embd"), (params.layers[0].ffn.up, "blk.0.ffn_up")):
        tensor = found[f"{name}.weight"]
        assert field.format == tensor.tensor_type.name
        assert isinstance(field, Tiled)
        assert same_bits(np.asarray(dequantise(field)), gguf.dequantize(tensor.data, tensor.tensor_type))
        assert sum(x.nbytes for x in jax.tree.leaves(field)) < 1.1 * tensor.data.nbytes


def test_tied_tables_are_one_array(rewritten):
    tied, untied = models.read(TINY256).params, models.read(TINY).params
    assert tied.head is tied.embed
    assert tied.mtp.head is tied.mtp.embed is tied.embed
    assert untied.head is not untied.embed
    assert untied.mtp.head is untied.head
    assert untied.mtp.embed is untied.embed
    unnormed = checkpoint.read(rewritten(TINY, drop=r"blk\.4\.nextn\.shared_head_norm\.weight")).params
    assert unnormed.mtp.head_norm is unnormed.final_norm


def test_tables_of_the_heads_own_are_used(rewritten):
    rng = np.random.default_rng(0)
    names = {"embed": "blk.4.nextn.embed_tokens.weight", "head": "blk.4.nextn.shared_head_head.weight"}
    own = {name: rng.standard_normal((512, 64), np.float32) for name in names.values()}
    read = checkpoint.read(rewritten(TINY, add=own))
    for field, name in names.items():
        table = getattr(read.params.mtp, field)
        assert isinstance(table, Packed)
        assert same_bits(np.asarray(dequantise(table)), own[name])
    assert same_params(read.params.head, models.read(TINY).params.head)

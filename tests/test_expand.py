"""The types that are expanded to bfloat16 on the host, against gguf's dequantiser and its own rounding to bfloat16."""

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from models import same_bits

from sharpi_jax.quant import FORMATS, dequantise, pack
from sharpi_jax.quant import expand as expand_module
from sharpi_jax.quant.expand import can_expand, expand

EXPANDED = ("TQ1_0", "TQ2_0", "NVFP4", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
REFUSED = {"Q8_1", "Q8_K", "Q1_0", "I8", "I16", "I32", "I64", "F64"}


def random_blocks(name, rows, blocks):
    width = GGML_QUANT_SIZES[GGMLQuantizationType[name]][1]
    return np.random.default_rng(1).integers(0, 256, (rows, blocks * width), np.uint8)


def oracle(raw, name):
    """uint16: gguf's own conversion of its own float32 numbers."""
    values = gguf.dequantize(raw, GGMLQuantizationType[name])
    return gguf.quantize(values, GGMLQuantizationType.BF16).view(np.uint16), values


def test_each_type_is_packed_expanded_or_refused():
    assert {kind.name for kind in GGMLQuantizationType} == {*FORMATS, *EXPANDED, *REFUSED}
    assert all(can_expand(name) for name in EXPANDED)
    assert not any(can_expand(name) for name in REFUSED)


@pytest.mark.parametrize("name", EXPANDED)
def test_expanded_weights_are_ggufs_rounded_to_bfloat16(name):
    raw = random_blocks(name, 48, 4)
    with np.errstate(all="ignore"):  # infinite scales times zero, among random ones
        want, values = oracle(raw, name)
        got = np.asarray(expand(raw, name))
    assert got.shape == want.shape
    numbers = np.isfinite(values)
    assert numbers.mean() > 0.9
    assert same_bits(got.view(np.uint16)[numbers], want[numbers])


def test_a_large_tensor_is_expanded_in_parts(monkeypatch):
    raw = random_blocks("TQ2_0", 7, 2) % 60  # no exponent of an infinity
    whole = expand(raw, "TQ2_0")
    for at_once in (1, 512, 1024, 1500):
        monkeypatch.setattr(expand_module, "_AT_ONCE", at_once)
        assert same_bits(expand(raw, "TQ2_0"), whole)


def test_packing_such_a_type_gives_a_bfloat16_weight_with_its_leading_axes():
    raw = random_blocks("IQ2_XS", 12, 3) % 60
    weight = pack(raw.reshape(2, 6, -1), "IQ2_XS", "t")
    assert weight.format == "BF16"
    assert (weight.out_features, weight.in_features) == (6, 768)
    bits, _ = oracle(raw, "IQ2_XS")
    assert same_bits(np.asarray(weight.blocks), bits.reshape(2, 6, 768))
    want = (bits.astype(np.uint32) << 16).view(np.float32)
    assert same_bits(np.asarray(dequantise(weight)), want.reshape(2, 6, 768))

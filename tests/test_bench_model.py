"""Models of random weights (bench/make_model.py): llama.cpp's formats, sane weights, drafts as promised."""

import dataclasses
import json
import lzma
from pathlib import Path

import gguf
import numpy as np
import pytest

import sharpi_jax
from bench.blocks import NAMES, identity_rows, random_rows, row_bytes
from bench.make_model import MIN_VOCABULARY, SHAPES, tensors, write
from bench.mix import TYPES

TINY = dataclasses.replace(SHAPES["tiny"], layers=1, vocabulary=MIN_VOCABULARY)
OUTPUTS = ("attn_output", "ssm_out", "ffn_down")


def weights_of(name: str, rows: np.ndarray) -> np.ndarray:
    """Rows of bytes as numbers, by the gguf package."""
    plain = {"F32": np.float32, "F16": np.float16}
    return gguf.quants.dequantize(rows.view(plain.get(name, np.uint8)), gguf.GGMLQuantizationType[name])


@pytest.mark.parametrize("name", NAMES)
def test_random_blocks_have_mean_0_and_the_deviation_asked_for(name: str) -> None:
    rows, columns = 256, 1024
    found = weights_of(name, random_rows(np.random.default_rng(3), name, rows, columns, columns**-0.5))
    assert found.shape == (rows, columns)
    assert abs(found.mean()) < 0.01 * columns**-0.5  # five times what chance gives
    assert found.std() == pytest.approx(columns**-0.5, rel=0.02)
    assert np.abs(found).max() < 6 * columns**-0.5
    by_row = found.mean(axis=1) / (found.std() / np.sqrt(columns))
    assert np.abs(by_row).max() < 8  # no row leans to a side


def test_small_scales_have_both_signs_as_quantisers_give_them() -> None:
    scales = random_rows(np.random.default_rng(3), "Q6_K", 64, 256, 1.0)[:, 192:208].view(np.int8)
    assert np.abs(scales.astype(int)).min() >= 64
    assert 0.4 < (scales < 0).mean() < 0.6


@pytest.mark.parametrize("name", NAMES)
def test_a_deviation_of_0_leaves_nothing(name: str) -> None:
    rows = random_rows(np.random.default_rng(3), name, 8, 256, 0.0)
    assert not weights_of(name, rows).any()
    if name not in ("F32", "F16", "BF16"):
        assert len(np.unique(rows)) > 10  # the codes are still there


@pytest.mark.parametrize("name", NAMES)
def test_the_identity_is_exact(name: str) -> None:
    if name.startswith("IQ4"):
        with pytest.raises(ValueError, match="no 0"):
            identity_rows(name, 512, 1024)
        return
    assert (weights_of(name, identity_rows(name, 512, 1024)) == np.eye(512, 1024)).all()


def test_rows_are_whole_blocks() -> None:
    assert row_bytes("Q6_K", 512) == 420
    with pytest.raises(ValueError, match="not a multiple of Q6_K's blocks of 256"):
        row_bytes("Q6_K", 320)


@pytest.mark.parametrize("file_type", TYPES)
def test_formats_are_llama_cpps_choice(file_type: str, data_dir: Path) -> None:
    stored = json.loads(lzma.decompress((data_dir / "quantiser.json.xz").read_bytes()))
    shape = dataclasses.replace(SHAPES["tiny"], layers=stored["layers"])
    assert {t.name: t.format for t in tensors(shape, file_type, "random")} == stored["formats"][file_type]


def test_the_real_shapes_weigh_what_the_real_files_do() -> None:
    def size(shape: str, file_type: str) -> int:
        return round(sum(t.nbytes() for t in tensors(SHAPES[shape], file_type, "ceiling")) / 1e6)

    assert (size("qwen3.5-0.8b", "q4_k_m"), size("qwen3.5-0.8b", "q8_0")) == (531, 823)


@pytest.mark.parametrize("file_type", TYPES)
def test_a_file_of_every_type(file_type: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, TINY, file_type, "ceiling")
    found = {t.name: t for t in gguf.GGUFReader(path).tensors}
    for name, tensor in found.items():
        weights = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if name.split(".")[-2] in OUTPUTS:
            assert not weights.any(), name
        elif name.endswith("eh_proj.weight"):
            assert (weights == np.eye(256, 512)).all()
        elif "norm" not in name and name.endswith("weight") and "conv" not in name:
            assert weights.std() == pytest.approx(weights.shape[1] ** -0.5, rel=0.1), name
            assert abs(weights.mean()) < 0.15 * weights.std(), name
    model = sharpi_jax.load(path)
    assert model.config.has_mtp
    assert not model.notes
    assert model.tokenizer.decode(model.tokenizer.encode("as it was, or so")) == "as it was, or so"


@pytest.mark.parametrize(("kind", "rate"), [("ceiling", 1.0), ("floor", 0.0)])
def test_drafts_are_accepted_as_promised(kind: str, rate: float, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, TINY, "q4_k_m", kind)
    model = sharpi_jax.load(path)
    options = sharpi_jax.DecodeOptions(max_tokens=24, spec_draft_n_max=3)
    for last in (270, 300):
        run = model.generate([290, last], options)
        assert run.output_ids == (last,) * 24  # the trunk says its last token again
        assert run.stats.acceptance_rate == rate
        assert run.stats.drafted > 17


def test_random_weights_differ_by_seed_alone(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a", "b", "c")]
    for path, seed in zip(paths, (0, 0, 1), strict=True):
        write(path, TINY, "q8_0", "random", seed)
    a, b, c = (path.read_bytes() for path in paths)
    assert a == b
    assert a != c
    assert len(a) == len(c)
    silent = [t for t in gguf.GGUFReader(paths[0]).tensors if not gguf.quants.dequantize(t.data, t.tensor_type).any()]
    assert not silent


def test_a_vocabulary_that_is_too_small_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 320"):
        write(tmp_path / "x.gguf", dataclasses.replace(TINY, vocabulary=300), "q8_0", "random")

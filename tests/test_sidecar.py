"""An MTP head in a file of its own: the same bits as the whole file, and every sidecar that does not fit refused."""

import json
import re
from pathlib import Path

import models
import numpy as np
import pytest
from models import same_bits, same_params
from rewriting import ABSENT, rewrite, tensors

import sharpi_jax
from sharpi_jax import checkpoint
from sharpi_jax.cli.main import main
from sharpi_jax.errors import CheckpointError
from sharpi_jax.quant import dequantise

WHOLE, TRUNK, HEAD = "qwen35-tiny-f16", "qwen35-tiny-nomtp-f16", "qwen35-tiny-mtponly-f16"
TIED = "qwen35-tiny256-q4_0"
TRUNK_PATH, HEAD_PATH = models.fixture(TRUNK), models.fixture(HEAD)


def refusal(model: Path, mtp_model: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        checkpoint.read(model, mtp_model)
    message = str(caught.value)
    assert message.endswith(".")
    assert "\n" not in message
    return message


def random_tables(*names: str, shape: tuple[int, int] = (512, 64)) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape if "norm" not in name else shape[1:], np.float32) for name in names}


def test_trunk_and_sidecar_are_the_whole_file():
    read, whole = checkpoint.read(TRUNK_PATH, HEAD_PATH), models.read(WHOLE)
    assert (read.config, read.notes) == (whole.config, ())
    assert same_params(read.params, whole.params)
    # The sidecar's tables equal the trunk's, so there is one of each.
    assert read.params.mtp.embed is read.params.embed
    assert read.params.mtp.head is read.params.head


def test_scores_and_drafts_equal_the_whole_file_and_the_reference():
    model, whole = sharpi_jax.load(TRUNK_PATH, mtp_model=HEAD_PATH), models.model(WHOLE)
    model.decoder.programs = whole.decoder.programs  # what is compiled for one serves both: the shapes are the same
    want = models.reference(WHOLE)
    assert model.has_mtp
    ids = want["dequant_tokens"].tolist()
    ours, theirs = model.score(ids), whole.score(ids)
    for name in ("logits", "hidden", "mtp_logits"):
        assert same_bits(np.asarray(getattr(ours, name)), np.asarray(getattr(theirs, name)))
    np.testing.assert_allclose(ours.mtp_logits[:, ::2], want["dequant_mtp_logits_even"], atol=5e-5, rtol=0)
    options = sharpi_jax.DecodeOptions(max_tokens=63, spec_draft_n_max=3, ignore_eos=True)
    prompt = want["prompt"].tolist()
    a, b = model.generate(prompt, options, trace=True), whole.generate(prompt, options, trace=True)
    assert a.output_ids == b.output_ids == tuple(ids[len(prompt) :][:63])
    assert a.steps == b.steps  # every draft and every verdict
    assert a.stats.drafted > 0


# --- the sidecar's own tables -----------------------------------------------------------------------------------------


def test_tables_that_differ_are_the_heads_own(tmp_path):
    own = random_tables("token_embd.weight", "output.weight")
    read = checkpoint.read(TRUNK_PATH, rewrite(tmp_path / "s.gguf", HEAD, add=own))
    assert same_bits(np.asarray(dequantise(read.params.mtp.embed)), own["token_embd.weight"])
    assert same_bits(np.asarray(dequantise(read.params.mtp.head)), own["output.weight"])
    assert same_params(read.params.replace(mtp=None), models.read(TRUNK).params)


@pytest.mark.parametrize("dropped", [r"blk\.4\.nextn\.shared_head_norm\.weight", "none"])
def test_the_output_norm_serves_a_head_without_a_norm(tmp_path, dropped):
    own = random_tables("output_norm.weight")
    read = checkpoint.read(TRUNK_PATH, rewrite(tmp_path / "s.gguf", HEAD, add=own, drop=dropped))
    want = models.read(WHOLE).params.mtp.head_norm if dropped == "none" else own["output_norm.weight"]
    assert same_bits(np.asarray(read.params.mtp.head_norm), np.asarray(want))
    assert same_params(read.params.final_norm, models.read(TRUNK).params.final_norm)


@pytest.mark.parametrize("dropped", ["output.weight", "token_embd.weight", "(output|token_embd|output_norm).weight"])
def test_a_table_that_the_sidecar_lacks_is_the_trunks(tmp_path, dropped):
    """Without an output tensor of its own, the head of an untied model is the trunk's output, not an embedding."""
    own = random_tables("token_embd.weight") if dropped == "output.weight" else {}
    read = checkpoint.read(TRUNK_PATH, rewrite(tmp_path / "s.gguf", HEAD, add=own, drop=re.escape(dropped)))
    assert read.params.mtp.head is read.params.head
    assert (read.params.mtp.embed is read.params.embed) == (not own)


@pytest.mark.parametrize("own", [{}, random_tables("token_embd.weight", shape=(512, 256))])
def test_a_tied_model_stays_tied(tmp_path, own):
    absent = {"block_count": 2, "nextn_predict_layers": ABSENT}
    trunk = rewrite(tmp_path / "t.gguf", TIED, meta=absent, drop=r"blk\.2\..*")
    head = rewrite(tmp_path / "h.gguf", TIED, drop=r"blk\.[01]\..*", add=own)
    params = checkpoint.read(trunk, head).params
    assert params.mtp.head is params.mtp.embed
    assert params.head is params.embed
    assert (params.mtp.embed is params.embed) == (not own)
    if not own:
        assert same_params(params, models.read(TIED).params)


# --- trunks and sidecars of other kinds -------------------------------------------------------------------------------


def test_a_sidecar_wins_over_the_models_own_head_and_that_is_said(tmp_path):
    own = random_tables("blk.4.nextn.eh_proj.weight", shape=(64, 128))
    head = rewrite(tmp_path / "new.gguf", HEAD, add=own)
    tables = random_tables("blk.4.nextn.shared_head_head.weight", "blk.4.nextn.embed_tokens.weight")
    read = checkpoint.read(rewrite(tmp_path / "whole.gguf", WHOLE, add=tables), head)
    assert same_bits(np.asarray(read.params.mtp.proj.blocks), own["blk.4.nextn.eh_proj.weight"])
    assert read.params.mtp.embed is read.params.embed  # nothing of the old head is left
    assert read.params.mtp.head is read.params.head
    assert read.notes == ("the MTP head of new.gguf is used in place of the model file's own",)


def test_a_trunk_that_promises_a_head_takes_it_from_the_sidecar(tmp_path):
    trunk = rewrite(tmp_path / "t.gguf", WHOLE, drop=r"blk\.4\..*")
    assert checkpoint.read(trunk).notes == ("the metadata promises 1 MTP layer(s), but the tensors are absent",)
    read = checkpoint.read(trunk, HEAD_PATH)
    assert same_params(read.params, models.read(WHOLE).params)
    assert read.notes == ()


def test_of_a_sidecars_two_layers_the_first_is_used_and_that_is_said(tmp_path):
    second = {name.replace("blk.4.", "blk.5."): data for name, data in tensors(HEAD, r"blk\.4\..*").items()}
    head = rewrite(tmp_path / "h.gguf", HEAD, meta={"block_count": 6, "nextn_predict_layers": 2}, add=second)
    read = checkpoint.read(TRUNK_PATH, head)
    assert same_params(read.params, models.read(WHOLE).params)
    assert read.notes == ("the file has 2 MTP layers; only the first is used",)


WIDE = {"blk.4.ffn_up.weight": np.zeros((96, 32), np.float32)}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"meta": {"general.architecture": "llama"}}, "its general.architecture is 'llama', not 'qwen35'."),
        ({"meta": {"embedding_length": 128}}, "its qwen35.embedding_length is 128, not 64."),
        ({"meta": {"attention.head_count_kv": 4}}, "its qwen35.attention.head_count_kv is 4, not 2."),
        ({"meta": {"rope.freq_base": 1e6}}, "its qwen35.rope.freq_base is 1000000.0, not 10000000.0."),
        (
            {"meta": {"tokenizer.ggml.tokens": ["a", "b"]}},
            "its tokenizer.ggml.tokens is a list of 2, not a list of 512.",
        ),
        (
            {"meta": {"tokenizer.ggml.tokens": [f"t{i}" for i in range(512)]}},
            "its tokenizer.ggml.tokens is another.",
        ),
    ],
)
def test_a_sidecar_of_another_model_is_refused(tmp_path, changes, says):
    head = rewrite(tmp_path / "h.gguf", HEAD, **changes)
    assert refusal(TRUNK_PATH, head) == f"{head} does not belong to {TRUNK_PATH}: {says}"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"add": WIDE}, ": tensor blk.4.ffn_up.weight has dimensions [32, 96]; the metadata ask for [64, 96]."),
        ({"add": {"blk.4.nextn.x.weight": WIDE["blk.4.ffn_up.weight"]}}, ": tensor blk.4.nextn.x.weight is not known"),
        ({"add": {"rope_freqs.weight": np.ones(4, np.float32)}}, ": tensor rope_freqs.weight is not known for an MTP"),
        (
            {"rename": {n: n.replace("blk.4.", "blk.5.") for n in tensors(HEAD, "blk.*")}},
            f" holds an MTP head for a trunk of 5 layers, but {TRUNK_PATH} has 4.",
        ),
        ({"drop": r".*nextn.*"}, " holds no MTP head; give a file that holds an MTP head alone as --mtp_model"),
    ],
)
def test_a_sidecar_that_does_not_fit_is_named(tmp_path, changes, says):
    head = rewrite(tmp_path / "h.gguf", HEAD, **changes)
    assert refusal(TRUNK_PATH, head).startswith(f"{head}{says}")


def test_a_head_that_lacks_a_tensor_is_refused(tmp_path):
    head = rewrite(tmp_path / "h.gguf", HEAD, drop=r"blk\.4\.nextn\.hnorm\.weight")
    assert refusal(TRUNK_PATH, head) == f"{head}: tensor blk.4.nextn.hnorm.weight is missing."


@pytest.mark.parametrize("given", [TRUNK, WHOLE])
def test_a_file_with_a_trunk_is_no_sidecar(given):
    path = models.fixture(given)
    assert refusal(TRUNK_PATH, path).startswith(f"{path} holds a trunk; give a file that holds an MTP head alone")


@pytest.mark.parametrize("mtp_model", [TRUNK_PATH, HEAD_PATH])
def test_a_sidecar_is_no_model(mtp_model):
    assert refusal(HEAD_PATH, mtp_model) == (
        f"{HEAD_PATH} holds only an MTP head; give the file that holds the trunk, and this one as --mtp_model."
    )


# --- the command line -------------------------------------------------------------------------------------------------


def test_the_flag(tmp_path, capsys):
    argv = [f"--model={TRUNK_PATH}", f"--mtp_model={HEAD_PATH}", "--prompt=Why does", "--max_tokens=12"]
    assert main([*argv, "--spec-type=mtp", f"--output_json={tmp_path / 'run.json'}"]) == 0
    assert "MTP: drafting up to 3 tokens per step" in capsys.readouterr().err
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["options"]["mtp_model"] == str(HEAD_PATH)
    options = sharpi_jax.DecodeOptions(max_tokens=12)
    whole = models.model(WHOLE).generate("Why does", options)
    assert run["output_ids"] == list(whole.output_ids)
    assert (run["stats"]["drafted"], run["stats"]["accepted"]) == (whole.stats.drafted, whole.stats.accepted)


@pytest.mark.parametrize(
    ("argv", "status", "says"),
    [
        ([f"--mtp_model={HEAD_PATH}", "--prompt=x"], 2, "flag --mtp_model needs a path, and a --model beside it"),
        ([f"--model={TRUNK_PATH}", "--mtp_model=", "--prompt=x"], 2, "flag --mtp_model needs a path"),
        ([f"--model={TRUNK_PATH}", "--mtp-model=no.gguf", "--prompt=x"], 1, "no.gguf does not exist"),
        ([f"--model={TRUNK_PATH}", f"--mtp_model={__file__}", "--prompt=x"], 1, "is not a GGUF file"),
    ],
)
def test_faults_of_the_flag_are_one_line(capsys, argv, status, says):
    assert main(argv) == status
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1

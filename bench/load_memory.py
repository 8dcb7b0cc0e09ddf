"""Peak resident memory of loading a large file, and of decoding a few tokens of it, against the file's own size.

    python -m bench.load_memory [--model=FILE.gguf] [--layers=24]

Without a model it writes one of random Q8_0 weights into a temporary folder: the shape of Qwen3.5-0.8B with its MTP
head and as many tokens as it has (make_model.py), so that the tokenizer weighs what it does in practice. The load runs
in a process of its own. Memory is VmHWM (Linux), less what it is after `import jax`.
"""

import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from absl import app, flags

from bench.make_model import SHAPES, write

_MODEL = flags.DEFINE_string("model", None, "GGUF file")
_LAYERS = flags.DEFINE_integer("layers", 24, "trunk layers of the file that is written", lower_bound=1)

_MEASURE = """
import json, re, sys
def peak():
    return 1024 * int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1])
import jax
baseline = peak()
import sharpi_jax
from sharpi_jax.checkpoint import open_gguf
model = sharpi_jax.load(sys.argv[1])
loaded = peak()
tensors = sum(info.nbytes for info in open_gguf(sys.argv[1]).tensors.values())
arrays = sum(x.nbytes for x in {id(x): x for x in jax.tree.leaves(model.decoder.params)}.values())
model.generate([1, 2, 3], sharpi_jax.DecodeOptions(max_tokens=4, ctx_size=128, ignore_eos=True))
print(json.dumps({"baseline": baseline, "loaded": loaded, "decoded": peak(), "tensors": tensors, "arrays": arrays}))
"""


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(_MODEL.value or Path(folder) / "random.gguf")
        if not _MODEL.value:
            write(path, dataclasses.replace(SHAPES["qwen3.5-0.8b"], layers=_LAYERS.value), "q8_0", "random")
        done = subprocess.run([sys.executable, "-c", _MEASURE, str(path)], check=True, capture_output=True, text=True)
    found = json.loads(done.stdout)
    tensors, baseline = found["tensors"], found["baseline"]
    print(f"{'import jax':<24}{baseline / 1e6:>9.1f} MB")
    print(f"{'tensors in the file':<24}{tensors / 1e6:>9.1f} MB   ({found['arrays'] / 1e6:.1f} MB on the device)")
    for name, key in (("peak, loaded", "loaded"), ("peak, 4 tokens decoded", "decoded")):
        print(f"{name:<24}{found[key] / 1e6:>9.1f} MB   {(found[key] - baseline) / tensors:.3f} times the tensors")


if __name__ == "__main__":
    app.run(main)

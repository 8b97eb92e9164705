"""Perplexity of a language model of a run with nothing but transformers: a check from outside.

    python examples/plain_perplexity.py runs/wikitext2 downloaded [float32]

reads the same blocks and prints what `rebm results` calls the test perplexity of that row; in the
numeric type of the run unless another is given. For runs with an energy, of any row but a RALM,
which plain transformers does not know.
"""

import json
import math
import sys
from pathlib import Path

import pyarrow as pa
import torch
import yaml
from transformers import AutoModelForCausalLM


def rows(path: Path) -> dict[str, list]:
    with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as reader:
        return reader.read_all().to_pydict()


run, name = Path(sys.argv[1]), sys.argv[2]
results = json.loads((run / "results.json").read_text())
(reported,) = (row for row in results["language_models"] if row["name"] == name)
energy = results["joint_models"][0]["energy"]
evaluated = rows(run / "log_weights" / energy / "test" / "real.arrow")["block"]
blocks = rows(run / "blocks" / "test.arrow")
precision = yaml.safe_load((run / "recipe.yaml").read_text())["precision"]
model = AutoModelForCausalLM.from_pretrained(
    run / "language_models" / name, dtype=getattr(torch, sys.argv[3] if sys.argv[3:] else precision)
)

nats = tokens = 0
for number in evaluated:
    ids = torch.tensor([blocks["ids"][number][: blocks["length"][number]]])
    labels = ids.clone()
    labels[:, : results["prefix_length"]] = -100  # only the continuation counts
    with torch.inference_mode():
        loss = model(ids, labels=labels).loss.item()
    nats += loss * (ids.shape[1] - results["prefix_length"])
    tokens += ids.shape[1] - results["prefix_length"]
plain, ours = math.exp(nats / tokens), reported["test"]["value"]
print(f"transformers {plain:.4f}, rebm {ours:.4f}, {ours / plain - 1:+.4%} apart")

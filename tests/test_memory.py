"""Proposals of one prefix are streamed: memory does not grow with their number (trap 13)."""

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import json, resource, sys
from pathlib import Path
import numpy as np
from residual_ebm.config import BlockConfig, SamplingConfig
from residual_ebm.files.blocks import read_blocks
from residual_ebm.files.samples import open_samples
from residual_ebm.models.language_model import LanguageModel
from residual_ebm.progress import QUIET
from residual_ebm.stages.sampling import draw_samples

run, out = map(Path, sys.argv[1:])
folder = run / "language_models" / "base"
language_model = LanguageModel.from_pretrained(folder, precision="float32")
blocks = read_blocks(run / "blocks" / "test.arrow")
peaks, counts = [], []
for number in (2_000, 20_000):
    draw_samples(
        language_model,
        blocks,
        np.array([0]),
        number,
        block=BlockConfig(prefix_length=2, length=30),
        sampling=SamplingConfig(chunk_size=500, chunks_per_shard=1),
        folder=out / str(number),
        seed=0,
        progress=QUIET,
        label="proposals",
    )
    samples = open_samples(out / str(number), language_model.fingerprint)
    counts.append(sum(len(rows) for rows in samples.rows()))
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
print(json.dumps({"peaks": peaks, "counts": counts}))
"""


def test_ten_times_the_proposals_need_no_more_memory(tiny_run: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tiny_run), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    measured = json.loads(done.stdout)
    assert measured["counts"] == [2_000, 20_000]
    few, many = measured["peaks"]
    # Kept in memory, the larger set alone is 50 MB.
    assert many - few < 15, f"{few:.0f} MB with 2,000 proposals, {many:.0f} MB with 20,000"

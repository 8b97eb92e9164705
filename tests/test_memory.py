"""Proposals of one prefix are streamed: memory does not grow with their number."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, resource, sys
from pathlib import Path
import numpy as np
import torch
from residual_ebm.config import BlockConfig, SamplingConfig
from residual_ebm.files.blocks import Blocks
from residual_ebm.files.samples import open_samples
from residual_ebm.models.decoding import Decoded
from residual_ebm.models.language_model import LanguageModel
from residual_ebm.progress import QUIET
from residual_ebm.stages.sampling import draw_samples

class Monotone:
    '''Costs no time, so that rows can be long: 8 kB each, 160 MB for all if they were kept.'''

    fingerprint = "none"

    def sample_chunk(self, prefix_ids_GP, *, num_samples, num_tokens, **_):
        shape = (num_samples, num_tokens)
        log_prob_NC = torch.full(shape, -0.5)
        length_N = torch.full((num_samples,), num_tokens)
        ids_NC = torch.ones(shape, dtype=torch.int64)
        return Decoded(ids_NC, length_N, *[log_prob_NC] * 3, torch.zeros_like(ids_NC))

kind, run, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
if kind == "real":
    folder = run / "language_models" / "base"
    model, num_tokens = LanguageModel.from_pretrained(folder, precision="float32"), 28
else:
    model, num_tokens = Monotone(), 1000
block = BlockConfig(prefix_length=2, length=2 + num_tokens)
one = np.ones(1, dtype=np.int64)
blocks = Blocks(np.ones((1, block.length), dtype=np.int64), block.length * one, 0 * one, one / 2)
peaks, counts = [], []
for number in (2_000, 20_000):
    draw_samples(
        model,
        blocks,
        np.array([0]),
        number,
        block=block,
        sampling=SamplingConfig(chunk_size=500, chunks_per_shard=1),
        folder=out / str(number),
        seed=0,
        progress=QUIET,
        label="proposals",
    )
    samples = open_samples(out / str(number), model.fingerprint)
    counts.append(sum(len(rows) for rows in samples.rows()))
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
print(json.dumps({"peaks": peaks, "counts": counts}))
"""


# What would be kept of the larger set: 200 MB of log-probabilities over the vocabulary by a decoder
# that does not let go of them, 160 MB of token ids by a stage that writes them at the end.
@pytest.mark.parametrize("kind", ["real", "long rows"])
def test_ten_times_the_proposals_need_no_more_memory(
    tiny_run: Path, tmp_path: Path, kind: str
) -> None:
    command = [sys.executable, "-c", PROGRAM, kind, str(tiny_run), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    measured = json.loads(done.stdout)
    assert measured["counts"] == [2_000, 20_000]
    few, many = measured["peaks"]
    assert many - few < 40, f"{few:.0f} MB with 2,000 proposals, {many:.0f} MB with 20,000"

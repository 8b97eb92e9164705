"""An `energy` split is hidden from the language model and feeds the energies."""

from pathlib import Path

import numpy as np
import torch

from residual_ebm.files.blocks import read_blocks, read_documents_ids
from residual_ebm.files.open_run import open_run
from residual_ebm.files.samples import open_samples
from residual_ebm.models.language_model import LanguageModel
from residual_ebm.recipe_file import load_recipe
from residual_ebm.stages import negatives, prepare, train_lm

OVERRIDES = [
    "corpus.num_generated=200",
    "corpus.split={train: 0.4, energy: 0.3, validation: 0.1, test: 0.2}",
    "language_models.base.training.steps=2",
    "language_models.base.training.validate_every=2",
    "negatives.num_prefixes=30",
    "negatives.num_validation_prefixes=10",
]


def test_negatives_come_from_documents_the_language_model_never_saw(tmp_path: Path) -> None:
    recipe = load_recipe("tiny", OVERRIDES)
    with open_run(tmp_path / "run", recipe) as run_dir:
        for stage in (prepare, train_lm, negatives):
            stage.run(recipe, run_dir)
    documents = {
        split: read_documents_ids(run_dir.blocks / f"documents-{split}.arrow")
        for split in ("train", "energy", "validation", "test")
    }
    assert [len(found) for found in documents.values()] == [80, 60, 20, 40]
    seen = {ids.tobytes() for ids in documents["train"]}
    assert not any(ids.tobytes() in seen for ids in documents["energy"])

    windows = train_lm.training_windows(recipe, run_dir, "train")
    stream = np.concatenate([np.append(ids, 0) for ids in documents["train"]])
    assert np.array_equal(windows.reshape(-1), stream[: windows.size])

    language_model = LanguageModel.from_pretrained(
        run_dir.language_model("base"), precision="float32"
    )
    drawn = open_samples(run_dir.negatives("base", "train"), language_model.fingerprint)
    energy_blocks = read_blocks(run_dir.blocks / "energy.arrow")
    assert len(drawn.block_P) == 30
    assert drawn.block_P.max() < len(energy_blocks)
    # The stored log-probs are those of continuations of energy blocks, and of no others.
    rows = next(iter(drawn.rows()))
    prefix_NP = energy_blocks.ids_BT[drawn.block_P[rows.prefix_N], : recipe.block.prefix_length]
    ids_NT = torch.from_numpy(np.concatenate([prefix_NP, rows.ids_NC], axis=1))
    log_prob_N = language_model.log_prob(ids_NT, recipe.block.prefix_length).double().sum(-1)
    assert np.allclose(log_prob_N.numpy(), rows.lm_log_prob_N, atol=1e-3)

"""The null run: "data" drawn from P_LM itself leaves an energy nothing to learn.

The real stages run on blocks whose continuations were drawn from the language model with a seed of
their own. Whatever an energy makes of them, its accuracy stays at 50 %, log Z at 0 and the joint
model gains nothing: every gain that were shown here would be a fault of ours.

Shapes: B blocks, T tokens of a block, P of a prefix.
"""

import json
import math
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from scipy.stats import binomtest, chisquare
from transformers import ModernBertConfig, ModernBertModel, PreTrainedTokenizerFast

from residual_ebm.config import ContinuationMode, Recipe
from residual_ebm.files.blocks import Blocks, read_blocks, write_blocks
from residual_ebm.files.grammar import generate_documents
from residual_ebm.files.open_run import open_run
from residual_ebm.files.run_directory import RunDirectory
from residual_ebm.files.samples import join_rows, open_samples
from residual_ebm.files.storage import fingerprint, new_folder, read_json
from residual_ebm.files.tokenizers import train_tokenizer
from residual_ebm.models.decoding import UNTRUNCATED
from residual_ebm.models.energy_inputs import same_vocabulary
from residual_ebm.models.language_model import LanguageModel
from residual_ebm.models.loading import load_tokenizer
from residual_ebm.randomness import derive_seed, torch_seed
from residual_ebm.recipe_file import check_recipe
from residual_ebm.stages import evaluate, negatives, prepare, proposals, train_energy, train_lm

SPLITS = ("train", "validation", "test")
NUM_VALIDATION, NUM_TEST, NUM_SAMPLES = 2000, 220, 32
ENERGIES = ("unit", "bit", "bit-different", "heat")


def training(steps: int, learning_rate: float) -> dict[str, Any]:
    return {
        "steps": steps,
        "batch_size": 32,
        "learning_rate": learning_rate,
        "warmup_steps": 5,
        "precision": "float32",
        "validate_every": steps // 2,
        "checkpoint_every": steps,
    }


def null_recipe(mode: ContinuationMode, folder: Path) -> Recipe:
    nce = training(60, 1e-3)
    return check_recipe(
        {
            "name": "null",
            "description": "data drawn from P_LM",
            "seed": 1,
            "device": "cpu",
            "threads": 1,
            "precision": "float32",
            "corpus": {
                "path": str(folder / "sentences.jsonl"),
                "max_documents": 4800,
                "split": {"train": 0.42, "validation": 0.42, "test": 0.16},
            },
            "tokenizer": {"kind": "bpe", "vocab_size": 2000},
            "block": {"prefix_length": 5, "length": 13, "continuation": mode},
            "language_models": [
                {
                    "name": "base",
                    "architecture": {
                        "model_type": "llama",
                        "hidden_size": 32,
                        "intermediate_size": 64,
                        "num_hidden_layers": 1,
                        "num_attention_heads": 2,
                        "num_key_value_heads": 2,
                        "max_position_embeddings": 64,
                    },
                    "training": training(80, 1e-2),
                }
            ],
            "energies": [
                {"name": "unit", "kind": "unit", "source": "lm:base", "training": nce},
                {
                    "name": "bit",
                    "kind": "bit",
                    "source": str(folder / "same"),
                    "training": nce,
                },
                {
                    "name": "bit-different",
                    "kind": "bit",
                    "source": str(folder / "different"),
                    "training": nce,
                },
                {
                    "name": "heat",
                    "kind": "heat",
                    "head": {"hidden_size": 32, "num_layers": 1, "num_heads": 2},
                    "training": nce,
                },
            ],
            "negatives": {
                "num_prefixes": 2000,
                "num_validation_prefixes": NUM_VALIDATION,
                "samples_per_prefix": 1,
            },
            "proposals": {
                "num_validation_prefixes": 20,
                "num_test_prefixes": NUM_TEST,
                "num_samples": NUM_SAMPLES,
            },
            "evaluation": {"batch_size": 256, "bootstrap_resamples": 500, "num_examples": 0},
        }
    )


def write_sentences(path: Path) -> None:
    """Documents of one sentence: most continuations meet an end."""
    documents = generate_documents("small", 600, seed=0)
    sentences = [part for document in documents for part in document.split(" . ")]
    path.write_text("".join(json.dumps({"text": sentence}) + "\n" for sentence in sentences))


def save_encoder(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    end = tokenizer.eos_token_id
    with torch_seed(0, "encoder"):
        encoder = ModernBertModel(
            ModernBertConfig(
                vocab_size=len(tokenizer),
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                max_position_embeddings=64,
                pad_token_id=end,
                bos_token_id=end,
                eos_token_id=end,
                cls_token_id=end,
                sep_token_id=end,
            )
        )
    encoder.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def replace_data(recipe: Recipe, run_dir: RunDirectory) -> None:
    """Continuations drawn from P_LM in the place of the real ones."""
    language_model = LanguageModel.from_pretrained(
        run_dir.language_model("base"), precision=recipe.precision, device=recipe.device
    )
    with new_folder(run_dir.blocks) as temporary:
        shutil.copytree(run_dir.blocks, temporary, dirs_exist_ok=True)
        for split in SPLITS:
            path = temporary / f"{split}.arrow"
            write_blocks(path, drawn_blocks(recipe, language_model, read_blocks(path), split))


def drawn_blocks(
    recipe: Recipe, language_model: LanguageModel, blocks: Blocks, split: str
) -> Blocks:
    prefix_BP = blocks.ids_BT[:, : recipe.block.prefix_length]
    decoded = language_model.sample_chunk(
        torch.from_numpy(prefix_BP),
        prefix_numbers=list(range(len(blocks))),
        first_sample=0,
        num_samples=1,
        num_tokens=recipe.block.num_new_tokens,
        seed=derive_seed(recipe.seed, "null data", split),
        truncation=UNTRUNCATED,
        stop_at_end=recipe.block.continuation == "until_end",
    )
    return Blocks(
        np.concatenate([prefix_BP, decoded.ids_NC.numpy()], axis=1),
        recipe.block.prefix_length + decoded.length_N.numpy(),
        blocks.document_B,
        blocks.true_log_prob_B,
    )


class NullRun(NamedTuple):
    recipe: Recipe
    run_dir: RunDirectory
    results: dict[str, Any]

    def row(self, energy: str) -> dict[str, Any]:
        rows = self.results["joint_models"]
        found: dict[str, Any] = next(
            row for row in rows if row["energy"] == energy and not row["scaled"]
        )
        return found

    def best_validation(self, energy: str) -> dict[str, float]:
        training = self.row(energy)["training"]
        found: dict[str, float] = next(
            entry for entry in training["validations"] if entry["step"] == training["best_step"]
        )
        return found


@pytest.fixture(scope="module", params=["fixed", "until_end"])
def null_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> NullRun:
    folder = tmp_path_factory.mktemp(f"null-{request.param}")
    write_sentences(folder / "sentences.jsonl")
    recipe = null_recipe(request.param, folder)
    with open_run(folder / "run", recipe) as run_dir:
        prepare.run(recipe, run_dir)
        train_lm.run(recipe, run_dir)
        tokenizer = load_tokenizer(str(run_dir.blocks / "tokenizer"), "tokenizer")
        save_encoder(folder / "same", tokenizer)
        other = train_tokenizer(generate_documents("small", 50, seed=7), "bpe", 400)
        assert not same_vocabulary(tokenizer, other)
        save_encoder(folder / "different", other)
        replace_data(recipe, run_dir)
        negatives.run(recipe, run_dir)
        train_energy.run(recipe, run_dir)
        proposals.run(recipe, run_dir)
        evaluate.run(recipe, run_dir)
    return NullRun(recipe, run_dir, read_json(run_dir.results))


@pytest.mark.parametrize("energy", ENERGIES)
def test_accuracy_stays_at_chance(null_run: NullRun, energy: str) -> None:
    """Each validation prefix has one positive and one negative.

    They are exchangeable given the prefix, so the number of right answers has the mean of as many
    coins and at most their variance: the binomial test refuses no more often than it says.
    """
    num_answers = 2 * NUM_VALIDATION
    num_right = round(null_run.best_validation(energy)["accuracy"] * num_answers)
    assert binomtest(num_right, num_answers, 0.5).pvalue > 1e-3


def largest_log_partition(loss: float) -> float:
    """How far from 0 an energy with this validation loss can have put log Z, in nats.

    With both classes alike the loss is log 4 + m / 4 for a small energy of mean square m, plus half
    the difference of the classes' mean energies, whose standard deviation is sqrt(2 m / P) / 2.
    At 3.3 of those, x = sqrt(m) solves x^2 - 6.6 sqrt(2 / P) x = 4 (loss - log 4); and log Z of
    weights exp(-E) is at most x + x^2 / 2 from 0.
    """
    half = 3.3 * math.sqrt(2 / NUM_VALIDATION)
    x = half + math.sqrt(half**2 + 4 * max(0.0, loss - math.log(4)))
    return x + x**2 / 2


@pytest.mark.parametrize("energy", ENERGIES)
def test_log_partition_stays_at_zero(null_run: NullRun, energy: str) -> None:
    largest = largest_log_partition(null_run.best_validation(energy)["loss"])
    assert largest < 0.4, "the best checkpoint is near the energy 0"
    test = null_run.row(energy)["test"]
    assert abs(test["log_partition_mean"]) < largest
    assert test["log_partition_spread"] < largest


def test_no_energy_gains(null_run: NullRun) -> None:
    """Nor does one with a scale fitted on validation."""
    base = null_run.results["language_models"][0]["test"]["value"]
    rows = null_run.results["joint_models"]
    assert [row["energy"] for row in rows if not row["scaled"]] == list(ENERGIES)
    assert any(row["scaled"] for row in rows)
    for row in rows:
        low, high = row["test"]["difference_from_base"].values()
        negligible = max(abs(low), abs(high)) < 0.005 * base
        assert low <= 0 <= high or negligible, row["name"]
        # E_data[-E] - log Z is at most KL(data || P_LM), which is 0.
        assert row["test"]["gap_interval"]["low"] < 0.005, row["name"]


def assert_uniform(rank_P: np.ndarray) -> None:
    """Ranks 0 ... n, all equally likely."""
    num_bins = 11
    assert (NUM_SAMPLES + 1) % num_bins == 0
    counts = np.bincount(rank_P * num_bins // (NUM_SAMPLES + 1), minlength=num_bins)
    assert counts.sum() == NUM_TEST
    assert chisquare(counts).pvalue > 1e-3


def rank(value_P: np.ndarray, other_PN: np.ndarray) -> np.ndarray:
    """The place of each prefix's own value among those of its proposals; ties by lot."""
    below_P = (other_PN < value_P[:, None]).sum(axis=1)
    equal_P = (other_PN == value_P[:, None]).sum(axis=1)
    return np.asarray(below_P + np.random.default_rng(0).integers(0, equal_P + 1))


@pytest.mark.parametrize("energy", ENERGIES)
def test_real_continuations_weigh_what_proposals_weigh(null_run: NullRun, energy: str) -> None:
    """They are drawn from the same distribution, so the rank of the real one is uniform."""
    real, log_weights = evaluate.read_scored(null_run.run_dir, energy, "test")
    assert_uniform(rank(real.log_weight_P, np.stack(log_weights)))


def test_real_continuations_are_as_likely_as_proposals(null_run: NullRun) -> None:
    """lm_log_prob of the scorer and of the sampler are of one P_LM."""
    real, _ = evaluate.read_scored(null_run.run_dir, "heat", "test")
    language_model = fingerprint(null_run.run_dir.language_model("base"))
    samples = open_samples(null_run.run_dir.proposals("base", "test"), language_model)
    rows = join_rows(list(samples.rows()))
    sampled_PN = rows.lm_log_prob_N.reshape(NUM_TEST, NUM_SAMPLES)
    # The same ids may differ in the last bits between sampler and scorer: ties, not ranks.
    assert_uniform(rank(real.lm_log_prob_P.round(3), sampled_PN.round(3)))
    assert_uniform(rank(real.num_tokens_P, rows.length_N.reshape(NUM_TEST, NUM_SAMPLES)))


def test_modes_differ_in_where_they_stop(null_run: NullRun) -> None:
    """So that the laws above were tried on continuations that end early, too."""
    real, _ = evaluate.read_scored(null_run.run_dir, "heat", "test")
    full = null_run.recipe.block.num_new_tokens
    if null_run.recipe.block.continuation == "fixed":
        assert (real.num_tokens_P == full).all()
    else:
        assert 0.3 < (real.num_tokens_P < full).mean() < 0.9

"""Drawing negatives and proposals: untruncated samples of P_LM, in shards that survive a kill."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from residual_ebm.config import BlockConfig, Recipe, SamplingConfig
from residual_ebm.errors import UserError
from residual_ebm.estimation.importance import log_weight
from residual_ebm.files.blocks import Blocks
from residual_ebm.files.log_weights import claim_log_weights, write_log_weights
from residual_ebm.files.run_directory import RunDirectory
from residual_ebm.files.samples import (
    Chunk,
    SampleRows,
    join_rows,
    plan_shards,
    read_rows,
    sample_manifest,
    shard_path,
    write_rows,
)
from residual_ebm.files.states import REAL_SAMPLE, StateRows, WantedStates, write_states
from residual_ebm.files.storage import check_manifest, is_complete, write_manifest
from residual_ebm.models.decoding import UNTRUNCATED
from residual_ebm.models.device import use_recipe_threads
from residual_ebm.models.energy import EnergyModel
from residual_ebm.models.language_model import LanguageModel, continuation_mask
from residual_ebm.models.layer_states import select_layers, union_of
from residual_ebm.progress import Progress
from residual_ebm.randomness import derive_seed


@dataclass(frozen=True)
class Drawing:
    """What a stage wants drawn: of which prefixes, how many samples, and where they go."""

    purpose: str  # keys the randomness: negatives are not proposals
    sentence: str
    splits: Sequence[str]
    prefixes: Callable[[str], tuple[Blocks, np.ndarray]]  # blocks of a split, and those chosen
    num_samples: Callable[[str], int]  # of each prefix of a split
    sampling: SamplingConfig
    folder: Callable[[str, str], Path]  # of a language model and a split
    # Energies of a language model that read its states as it draws, and where their log-weights go.
    heads: Callable[[LanguageModel, str, str], dict[Path, EnergyModel]] = lambda *_: {}
    # States of so many prefixes that energies will learn from, if any do.
    states: Callable[[LanguageModel, str, str, int], WantedStates | None] = lambda *_: None
    # Whether such states of a language model and a split are needed and gone.
    lacks_states: Callable[[str, str], bool] = lambda *_: False


def draw_missing(
    recipe: Recipe, run_dir: RunDirectory, drawing: Drawing, progress: Progress
) -> None:
    """Draw what is not there yet, for every language model that an energy corrects."""
    use_recipe_threads(recipe)
    for name in recipe.sampled_language_models:
        wanted = [
            split
            for split in drawing.splits
            if not is_complete(drawing.folder(name, split)) or drawing.lacks_states(name, split)
        ]
        if not wanted:
            continue
        progress.stage(drawing.sentence.format(name=name))
        check_manifest(run_dir.blocks)
        language_model = LanguageModel.from_pretrained(
            run_dir.language_model(name), precision=recipe.precision, device=recipe.device
        )
        for split in wanted:
            blocks, block_P = drawing.prefixes(split)
            states = drawing.states(language_model, name, split, len(block_P))
            if states is None and is_complete(drawing.folder(name, split)):
                continue
            draw_samples(
                language_model,
                blocks,
                block_P,
                drawing.num_samples(split),
                block=recipe.block,
                sampling=drawing.sampling,
                folder=drawing.folder(name, split),
                seed=derive_seed(recipe.seed, drawing.purpose, name, split),
                progress=progress,
                label=f"{drawing.purpose}, {split}",
                heads=drawing.heads(language_model, name, split),
                states=states,
            )


def note_missing_prefixes(split: str, wanted: int, available: int, progress: Progress) -> None:
    if available < wanted:
        progress.note(f"{split}: {wanted} prefixes wanted, {available} there are")


def draw_samples(
    language_model: LanguageModel,
    blocks: Blocks,
    block_P: np.ndarray,
    num_samples: int,
    *,
    block: BlockConfig,
    sampling: SamplingConfig,
    folder: Path,
    seed: int,
    progress: Progress,
    label: str,
    heads: Mapping[Path, EnergyModel] = MappingProxyType({}),
    states: WantedStates | None = None,
) -> None:
    """`num_samples` continuations of the prefix of each block named by `block_P`.

    `heads` score them on the way, from the states they were drawn with; their log-weights lie
    under the name of the shard in the folder that each is listed under. As `states` the
    states themselves are kept, and those of the blocks' own continuations, read on the way as well.
    """
    shards = plan_shards(len(block_P), num_samples, sampling)

    def is_there(number: int) -> bool:
        path, chunks = shard_path(folder, number), range(len(shards[number]))
        return path.exists() and (
            states is None or all(states.path(path, chunk).exists() for chunk in chunks)
        )

    missing = [number for number in range(len(shards)) if not is_there(number)]
    for head_folder, energy in heads.items():
        claim_log_weights(head_folder, energy.fingerprint)
    with progress.bar(label, len(shards), len(shards) - len(missing)) as bar:
        for number in missing:
            path = shard_path(folder, number)
            parts = []
            for place, chunk in enumerate(shards[number]):
                part = _draw_chunk(
                    language_model, blocks, block_P, chunk, block, seed, heads, states
                )
                if states is not None and part.states is not None:
                    write_states(states.path(path, place), part.states)
                parts.append(part._replace(states=None))
            rows = join_rows([part.rows for part in parts])
            for head_folder in heads:
                log_weight_N = np.concatenate([part.log_weights[head_folder] for part in parts])
                write_log_weights(head_folder / path.name, rows.prefix_N, log_weight_N)
            if path.exists():
                _check_same(path, rows)
            else:  # last: a shard that is there has its log-weights and states
                write_rows(path, rows)
            bar.advance()
    if states is not None:
        info = {"language_model": language_model.fingerprint, "layers": states.layers}
        write_manifest(states.folder, info)
    info = sample_manifest(block_P, num_samples, language_model.fingerprint, UNTRUNCATED.describe())
    write_manifest(folder, info)


def _check_same(path: Path, rows: SampleRows) -> None:
    """Samples that energies have learnt from are drawn again for their states alone."""
    there = read_rows(path)
    if not np.array_equal(there.ids_NC, rows.ids_NC):
        raise UserError(
            "samples",
            str(path),
            "come out otherwise than when they were drawn (another processor or version); go on"
            " where they were drawn, or name another --out",
        )


class _Drawn(NamedTuple):
    rows: SampleRows
    log_weights: dict[Path, np.ndarray]
    states: StateRows | None


def _draw_chunk(
    language_model: LanguageModel,
    blocks: Blocks,
    block_P: np.ndarray,
    chunk: Chunk,
    block: BlockConfig,
    seed: int,
    heads: Mapping[Path, EnergyModel],
    wanted: WantedStates | None,
) -> _Drawn:
    numbers = np.arange(chunk.first_prefix, chunk.first_prefix + chunk.num_prefixes)
    samples = np.arange(chunk.first_sample, chunk.first_sample + chunk.num_samples)
    ids_GT = torch.from_numpy(blocks.ids_BT[block_P[numbers]])
    arguments: dict[str, Any] = {
        "prefix_ids_GP": ids_GT[:, : block.prefix_length],
        "prefix_numbers": [int(number) for number in numbers],
        "first_sample": chunk.first_sample,
        "num_samples": chunk.num_samples,
        "num_tokens": block.num_new_tokens,
        "seed": seed,
        # Untruncated: NCE needs the true noise density, and Z is a mean under P_LM itself.
        "truncation": UNTRUNCATED,
        "stop_at_end": block.continuation == "until_end",
    }
    if wanted is not None:
        assert chunk.first_sample == 0, "a prefix and all its samples in one batch"
        arguments["given_ids_GC"] = ids_GT[:, block.prefix_length :]
        samples = np.append(REAL_SAMPLE, samples)
    prefix_N, sample_N = np.repeat(numbers, len(samples)), np.tile(samples, chunk.num_prefixes)
    drawn_N = sample_N != REAL_SAMPLE
    log_weights, states = {}, None
    if heads or wanted is not None:
        layers = union_of([energy.state_layers for energy in heads.values()])
        if wanted is not None:
            layers = union_of([layers, wanted.layers])
        decoded, features = language_model.sample_chunk_with_features(layers=layers, **arguments)
        mask_NC = continuation_mask(decoded.ids_NC, 0, decoded.length_N).to(language_model.device)
        for folder, energy in heads.items():
            with torch.inference_mode():
                energy_N = energy.of_features(
                    features._replace(
                        hidden_BCH=select_layers(features.hidden_BCH, layers, energy.state_layers)
                    ),
                    mask_NC,
                )
            log_weights[folder] = log_weight(energy_N.float().cpu()).numpy()[drawn_N]
        if wanted is not None:
            states = StateRows(
                torch.from_numpy(prefix_N),
                torch.from_numpy(sample_N),
                select_layers(features.hidden_BCH, layers, wanted.layers).cpu(),
                features.log_prob_BC.cpu(),
                features.entropy_BC.cpu(),
            )
    else:
        decoded = language_model.sample_chunk(**arguments)
    rows = SampleRows(
        prefix_N[drawn_N],
        sample_N[drawn_N],
        decoded.ids_NC.cpu().numpy()[drawn_N],
        decoded.length_N.cpu().numpy()[drawn_N],
        decoded.log_prob_NC.double().sum(-1).cpu().numpy()[drawn_N],
    )
    return _Drawn(rows, log_weights, states)

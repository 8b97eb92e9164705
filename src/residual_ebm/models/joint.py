"""The joint model P(x | prefix) = P_LM(x | prefix) exp(-E(prefix, x)) / Z(prefix) (equation 2).

Shapes: B blocks, T tokens of a block, N proposals.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from residual_ebm.config import BlockConfig
from residual_ebm.errors import UserError
from residual_ebm.estimation.flags import flags
from residual_ebm.estimation.importance import log_weight
from residual_ebm.estimation.perplexity import (
    BasePerplexity,
    JointPerplexity,
    Prefixes,
    base_perplexity,
    joint_perplexity,
    summarise_prefix,
)
from residual_ebm.files.blocks import Blocks, cut_blocks
from residual_ebm.files.run_directory import RunDirectory
from residual_ebm.models.decoding import Decoded
from residual_ebm.models.device import use_recipe_threads
from residual_ebm.models.energy import EnergyModel
from residual_ebm.models.energy_sum import Energy, load_energy
from residual_ebm.models.language_model import (
    LanguageModel,
    TokenFeatures,
    Watch,
    continuation_mask,
)
from residual_ebm.models.samplers import ScoredSet
from residual_ebm.progress import QUIET, Progress
from residual_ebm.randomness import derive_seed

_BOOTSTRAP_RESAMPLES = 2000
_FEWEST_EFFECTIVE = 2.0  # below this, one proposal was all but certain to be drawn


@dataclass(frozen=True)
class JointSample:
    """One draw, with what a reader needs to trust it."""

    text: str
    ids_T: Tensor
    energy: float  # of the whole horizon, also when fewer tokens are shown
    lm_log_prob: float  # of the tokens in `text`
    effective_sample_size: float
    num_proposals: int
    target: str
    flags: list[str]
    scored: ScoredSet


@dataclass(frozen=True)
class PerplexityReport:
    """Perplexity of some texts under P_LM and under the joint model."""

    base: BasePerplexity
    joint: JointPerplexity
    num_prefixes: int
    num_samples: int
    flags: list[str]


class JointModel:
    """A language model and an energy trained against it."""

    def __init__(self, language_model: LanguageModel, energy_model: Energy) -> None:
        if energy_model.language_model is not language_model:
            raise UserError(
                "energy_model",
                energy_model.info.name,
                "reads another language model; make it with the one given here",
            )
        self.language_model = language_model
        self.energy_model = energy_model
        info = energy_model.info
        self.block = BlockConfig(
            prefix_length=info.prefix_length,
            length=info.block_length,
            continuation=info.continuation,
        )

    @classmethod
    def from_pretrained(
        cls, run: str | Path, energy: str | None = None, *, device: str | None = None
    ) -> "JointModel":
        """The joint model of a run: the named energy, or the best one on validation."""
        run_dir = RunDirectory(Path(run))
        recipe = run_dir.recipe()
        use_recipe_threads(recipe)
        names = [entry.name for entry in recipe.corrections]
        if not names:
            raise UserError("energies", str(run), "this run has none; add one to its recipe")
        if energy is None:
            best = run_dir.read_results()["best_energy"] if run_dir.results.exists() else None
            energy = best or names[0]
        if energy not in names:
            raise UserError("energy", energy, f"not in this run; it has {', '.join(names)}")
        language_model = LanguageModel.from_pretrained(
            _existing(run_dir.language_model(recipe.corrected_by(energy))),
            precision=recipe.precision,
            device=device or recipe.device,
        )
        energy_model = load_energy(
            _existing(run_dir.energy(energy)), language_model, precision=recipe.precision
        )
        return cls(language_model, energy_model)

    def energy(
        self, ids_BT: Tensor, length_B: Tensor | None = None, *, out_of: int | None = None
    ) -> Tensor:
        """E of blocks of the language model's ids, some at a time of `out_of` perhaps."""
        return self.energy_model.energy(torch.as_tensor(ids_BT), length_B, out_of=out_of)

    def propose(
        self,
        prefix_ids: Tensor,
        num_proposals: int,
        *,
        seed: int,
        num_tokens: int | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        out_of: int | None = None,
        progress: Progress = QUIET,
    ) -> ScoredSet:
        """Continuations of a prefix up to the energy's horizon, with their energies; `out_of` is
        how many there will be of all prefixes together."""
        prefix_ids = torch.as_tensor(prefix_ids).reshape(-1)
        num_tokens = num_tokens or self.block.num_new_tokens
        # In a chain of steps the given ids run past the prefix; the horizon stays where it is.
        num_given = self.block.num_new_tokens - num_tokens
        scores: list[Tensor] = []
        proposals = self.language_model.sample(
            prefix_ids,
            num_proposals,
            num_tokens,
            seed=derive_seed(seed, "proposals"),
            top_k=top_k,
            top_p=top_p,
            stop_at_end=self.block.continuation == "until_end",
            watch=self._head_watch(prefix_ids, num_given, scores),
            progress=progress,
        )
        if scores:
            return ScoredSet(proposals, torch.cat(scores))
        ids_NT = torch.cat(
            [prefix_ids.expand(num_proposals, -1).to(proposals.ids_NT), proposals.ids_NT], dim=1
        )
        length_N = len(prefix_ids) + proposals.length_N.cpu()
        energy_N = self.energy_model.energy(
            ids_NT.cpu(),
            length_N,
            prefix_length=len(prefix_ids) - num_given,
            out_of=out_of,
            progress=progress,
        )
        return ScoredSet(proposals, energy_N.cpu())

    def _head_watch(self, prefix_ids: Tensor, num_given: int, scores: list[Tensor]) -> Watch | None:
        """HeaT scores samples from the states they are drawn with; None for other energies.

        The tokens of the continuation that are given were not drawn: theirs are computed once.
        """
        energy = self.energy_model
        if not isinstance(energy, EnergyModel) or energy.info.kind != "heat":
            return None
        given: TokenFeatures | None = None
        if num_given:
            given = self.language_model.features(
                prefix_ids[None], len(prefix_ids) - num_given, energy.state_layers
            )

        @torch.inference_mode()
        def see(decoded: Decoded, features: TokenFeatures) -> None:
            num_rows = len(decoded.ids_NC)
            mask_NC = continuation_mask(decoded.ids_NC, 0, decoded.length_N)
            if given is not None:
                both = zip(given, features, strict=True)
                features = TokenFeatures(
                    *(
                        torch.cat([one.expand(num_rows, *one.shape[1:]), new], 1)
                        for one, new in both
                    )
                )
                mask_NC = torch.nn.functional.pad(mask_NC, (num_given, 0), value=True)
            energy_N = energy.of_features(features, mask_NC.to(self.language_model.device))
            scores.append(energy_N.float().cpu())

        return Watch(energy.state_layers, see)

    def sample(
        self,
        prompt: str,
        num_proposals: int = 512,
        *,
        num_tokens: int | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        progress: Progress = QUIET,
    ) -> JointSample:
        """Algorithm 1. For fewer tokens than the horizon: draw the whole horizon, resample, then
        cut, which is an exact marginal; more tokens than the energy knows are refused."""
        if num_proposals < 1:
            raise UserError("num_proposals", num_proposals, "draw at least 1")
        horizon = self.block.num_new_tokens
        if num_tokens is not None and not 1 <= num_tokens <= horizon:
            raise UserError(
                "num_tokens",
                num_tokens,
                f"this energy scores continuations of 1 to {horizon} tokens",
            )
        prefix_ids = self.encode_prompt(prompt)
        scored = self.propose(
            prefix_ids, num_proposals, seed=seed, top_k=top_k, top_p=top_p, progress=progress
        )
        chosen = int(scored.draw(seed)[0])
        length = min(int(scored.proposals.length_N[chosen]), num_tokens or horizon)
        ids_T = scored.proposals.ids_NT[chosen, :length].cpu()
        log_prob = scored.proposals.log_prob_N[chosen]
        if length < int(scored.proposals.length_N[chosen]):
            shown_1T = torch.cat([prefix_ids, ids_T])[None]
            log_prob = self.language_model.log_prob(shown_1T, len(prefix_ids)).double().sum()
        return JointSample(
            self.decode(ids_T),
            ids_T,
            float(scored.energy_N[chosen]),
            float(log_prob),
            scored.effective_sample_size,
            num_proposals,
            scored.target,
            [*self.prompt_flags(prefix_ids), *_scarcity_flags(scored.effective_sample_size)],
            scored,
        )

    def encode_prompt(self, prompt: str) -> Tensor:
        if not prompt.strip():
            raise UserError("prompt", repr(prompt), "is empty; give some text to continue")
        (ids,) = self._encode([prompt], "prompt")
        self.language_model.check_context(len(ids) + self.block.num_new_tokens)
        return torch.tensor(ids, dtype=torch.int64)

    def _encode(self, texts: list[str], field: str) -> list[list[int]]:
        for text in texts:
            try:
                text.encode()
            except UnicodeEncodeError:
                raise UserError(field, ascii(text), "is not UTF-8 text; give it as such") from None
        if not texts:
            return []
        ids: list[list[int]] = self.language_model.tokenizer(texts, add_special_tokens=False)[
            "input_ids"
        ]
        return ids

    def prompt_flags(self, prefix_ids: Tensor) -> list[str]:
        """Why a prompt may be outside of what the energy was trained on."""
        found = []
        if len(prefix_ids) != self.block.prefix_length:
            found.append(
                f"the prompt has {len(prefix_ids)} tokens, but this energy was trained on prefixes"
                f" of {self.block.prefix_length}: its energies may mean little here"
            )
        unknown = self.language_model.tokenizer.unk_token_id
        # Some tokenizers that know every byte call their end-of-text the unknown token.
        if unknown != self.language_model.end_of_text and unknown in prefix_ids.tolist():
            found.append("the prompt has words that the tokenizer does not know")
        return found

    def decode(self, ids_T: Tensor) -> str:
        text = self.language_model.tokenizer.decode(ids_T.tolist(), skip_special_tokens=True)
        return str(text)

    def blocks_of(self, texts: str | list[str]) -> Blocks:
        """Texts cut as the energy's training text was; each text is a document."""
        documents = self._encode([texts] if isinstance(texts, str) else texts, "text")
        blocks = cut_blocks(documents, self.block, self.language_model.end_of_text)
        if not len(blocks):
            total = sum(len(document) for document in documents)
            raise UserError(
                "text",
                f"{total} tokens",
                f"too short for one block of {self.block.prefix_length} + "
                f"{self.block.num_new_tokens} tokens; give longer text",
            )
        return blocks

    def score(
        self, blocks: Blocks, *, batch_size: int = 64, out_of: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """lm_log_prob and energy of each block's real continuation."""
        out_of = out_of or len(blocks)
        log_probs, energies = [], []
        for start in range(0, len(blocks), batch_size):
            part = blocks.select(np.arange(start, min(start + batch_size, len(blocks))))
            ids_BT, length_B = torch.from_numpy(part.ids_BT), torch.from_numpy(part.length_B)
            log_prob_BC = self.language_model.log_prob(ids_BT, self.block.prefix_length, length_B)
            log_probs.append(log_prob_BC.double().sum(-1).cpu())
            energies.append(self.energy(ids_BT, length_B, out_of=out_of).double().cpu())
        return torch.cat(log_probs).numpy(), torch.cat(energies).numpy()

    def perplexity(
        self,
        texts: str | list[str],
        num_samples: int = 1000,
        *,
        seed: int = 0,
        progress: Progress = QUIET,
    ) -> PerplexityReport:
        """Perplexity of texts, with bounds from `num_samples` proposals for each prefix."""
        if num_samples < 8:
            raise UserError(
                "num_samples", num_samples, "bounds at n/4 need 2 samples; ask for 8 or more"
            )
        blocks = self.blocks_of(texts)
        out_of = len(blocks) * num_samples  # also of what is real: both round alike
        lm_log_prob_P, energy_P = self.score(blocks, out_of=out_of)
        summaries = []
        with progress.bar("prefixes", len(blocks)) as bar:
            for number, ids_T in enumerate(blocks.ids_BT):
                scored = self.propose(
                    torch.from_numpy(ids_T[: self.block.prefix_length]),
                    num_samples,
                    seed=derive_seed(seed, "perplexity", number),
                    out_of=out_of,
                )
                real = float(log_weight(torch.tensor(energy_P[number])))
                summaries.append(summarise_prefix(scored.log_weight_N, real))
                bar.advance()
        prefixes = Prefixes(
            lm_log_prob_P, blocks.length_B - self.block.prefix_length, blocks.document_B
        )
        resampling: dict[str, Any] = {"num_resamples": _BOOTSTRAP_RESAMPLES, "seed": seed}
        base = base_perplexity(prefixes, **resampling)
        joint = joint_perplexity(prefixes, summaries, **resampling)
        return PerplexityReport(base, joint, len(blocks), num_samples, flags(joint, base.value))


def _scarcity_flags(effective_sample_size: float) -> list[str]:
    if effective_sample_size >= _FEWEST_EFFECTIVE:
        return []
    return [
        f"effective sample size {effective_sample_size:.1f}: hardly a choice among proposals; draw"
        " more of them"
    ]


def _existing(folder: Path) -> Path:
    if not folder.is_dir():
        raise UserError("run", str(folder), "is not trained yet; finish the run with `rebm run`")
    return folder

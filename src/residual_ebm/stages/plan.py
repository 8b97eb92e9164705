"""What a recipe would cost, without running it: parameters, tokens, FLOPs, memory, device-hours.

Networks are built without weights, on torch's meta device, so their parameters are counted, not
estimated. The rest is arithmetic: a product of a weight with a token is 2 FLOPs forward and 4
backward, attention adds 4 L T d a token forward, and Adam in mixed precision keeps 16 bytes for a
weight that learns. Activations follow Korthikanti et al. 2022: 34 + 5 a T / d bytes for each token,
layer and unit of width, twice that in float32. Hours are FLOPs at a share of a device's peak.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

from residual_ebm.assets.resolve import SCHEME, find_asset, in_cache
from residual_ebm.config import (
    SCRATCH,
    EncoderConfig,
    EnergyConfig,
    HeadConfig,
    LanguageModelConfig,
    Precision,
    Recipe,
    TokenizerConfig,
    TrainingConfig,
)
from residual_ebm.errors import UserError
from residual_ebm.files.corpus import check_exists
from residual_ebm.models.energy_networks import HeadEnergy
from residual_ebm.models.loading import load_config, load_tokenizer
from residual_ebm.stages.learning_rates import num_steps
from residual_ebm.stages.training_run import build_architecture, build_model

_BYTES_LEARNING, _BYTES_FROZEN = 16, 4
# An NVIDIA V100, the paper's: its peak in half precision (float16 there) and in single, and what
# training reaches of it.
DEVICE, UTILISATION = "V100", 0.3
PEAK_FLOPS: dict[Precision, float] = {"bfloat16": 125e12, "auto": 125e12, "float32": 15.7e12}


@dataclass(frozen=True)
class _Network:
    parameters: int
    layers: int
    width: int
    heads: int

    def forward_flops(self, tokens: float, length: int) -> float:
        return tokens * (2 * self.parameters + 4 * self.layers * length * self.width)

    def activation_bytes(self, batch_size: int, length: int, precision: Precision) -> float:
        by_unit = 34 + 5 * self.heads * length / self.width
        units = batch_size * length * self.layers * self.width
        return units * by_unit * (2 if precision == "float32" else 1)


def plan(recipe: Recipe) -> dict[str, Any]:
    """Every network of a recipe with its costs, what sampling and scoring take, and downloads."""
    check_exists(recipe.corpus.path)
    if recipe.corpus.path.startswith(SCHEME):
        find_asset(recipe.corpus.path, "corpus.path", "corpus")
    return _Planner(recipe).plan()


class _Planner:
    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._length = recipe.block.length
        self._vocabulary = self._vocabulary_size(recipe.tokenizer, "tokenizer.source")
        self._models: dict[str, _Network] = {}
        self._encoders: dict[str, _Network] = {}
        self._energies: dict[str, _Network] = {}

    def plan(self) -> dict[str, Any]:
        recipe = self._recipe
        rows = [self._language_model(config) for config in recipe.language_models]
        rows += [self._encoder(config) for config in recipe.encoders]
        rows += [self._energy(config) for config in recipe.energies]
        work = self._sampling() + self._scoring()
        flops = sum(entry["flops"] for entry in [*rows, *work])
        return {
            "recipe": recipe.name,
            "vocabulary": self._vocabulary,
            "networks": rows,
            "work": work,
            "flops": flops,
            "device": DEVICE,
            "peak_flops": PEAK_FLOPS,
            "utilisation": UTILISATION,
            "device_hours": sum(
                entry["flops"] / (PEAK_FLOPS[entry["precision"]] * UTILISATION) / 3600
                for entry in [*rows, *work]
            ),
            "downloads": self._downloads(),
        }

    @staticmethod
    def _vocabulary_size(config: TokenizerConfig, field: str) -> int:
        if config.source == SCRATCH:
            return config.vocab_size
        _refuse_unfetched(config.source, field)
        return len(load_tokenizer(config.source, field))

    def _language_model(self, config: LanguageModelConfig) -> dict[str, Any]:
        field = f"language_models.{config.name}"
        if config.source == SCRATCH:
            assert config.architecture is not None
            network = self._new(AutoModelForCausalLM, config.architecture, field)
        else:
            network = _pretrained(AutoModelForCausalLM, config.source, f"{field}.source")
        frozen = 0
        self._models[config.name] = network
        if config.residual_of is not None:
            base = self._models[config.residual_of]
            frozen = base.parameters
            self._models[config.name] = _Network(
                base.parameters + network.parameters,
                base.layers + network.layers,
                base.width,
                base.heads,
            )
        return self._row(config.name, "lm", config, network, frozen, self._length)

    def _encoder(self, config: EncoderConfig) -> dict[str, Any]:
        vocabulary = self._vocabulary
        if config.tokenizer is not None:
            field = f"encoders.{config.name}.tokenizer.source"
            vocabulary = self._vocabulary_size(config.tokenizer, field)
        if config.architecture is None:
            network = self._models[str(config.language_model)]
        else:
            field = f"encoders.{config.name}"
            network = self._new(AutoModelForMaskedLM, config.architecture, field, vocabulary)
        self._encoders[config.name] = network
        return self._row(config.name, "encoder", config, network, 0, self._length)

    def _energy(self, config: EnergyConfig) -> dict[str, Any]:
        frozen = 0
        if config.kind == "heat":
            base = self._models[self._recipe.language_model_of(config)]
            head = config.head or HeadConfig()
            if head.layers and head.layers[-1] > base.layers:
                raise UserError(
                    f"energies.{config.name}.head.layers",
                    head.layers[-1],
                    f"its language model has {base.layers} layers; lower it",
                )
            with torch.device("meta"):
                made = HeadEnergy(base.width, self._recipe.block.num_new_tokens, head)
            count = sum(parameter.numel() for parameter in made.parameters())
            network = _Network(count, head.num_layers, head.hidden_size, head.num_heads)
            frozen = base.parameters
        else:
            network = self._backbone(config)
        self._energies[config.name] = network
        blocks, block = 1 + config.negatives_per_positive, self._recipe.block
        read = {
            "unit": block.prefix_length + blocks * block.num_new_tokens,
            "bit": blocks * block.length,
            "heat": blocks * block.num_new_tokens,  # from states kept when negatives were drawn
        }[config.kind]
        row = self._row(config.name, config.kind, config, network, frozen, read)
        row["language_model"] = self._recipe.language_model_of(config)
        return row

    def _backbone(self, config: EnergyConfig) -> _Network:
        scheme, _, target = str(config.source).partition(":")
        if scheme == "lm":
            return self._models[target]
        if scheme == "encoder":
            return self._encoders[target]
        field = f"energies.{config.name}.source"
        if config.architecture is not None:
            return _count(AutoModel, AutoConfig.for_model(**config.architecture))
        return _pretrained(AutoModel, str(config.source), field)

    def _new(
        self, auto_class: Any, architecture: dict[str, Any], field: str, vocabulary: int = 0
    ) -> _Network:
        place = f"{field}.architecture"
        settings = build_architecture(
            architecture,
            place,
            self._length,
            vocab_size=vocabulary or self._vocabulary,
            pad_token_id=0,  # any token: a default may lie outside a small vocabulary
        )
        with torch.device("meta"):
            return _measure(build_model(auto_class, settings, place, architecture))

    def _row(
        self,
        name: str,
        kind: str,
        config: LanguageModelConfig | EncoderConfig | EnergyConfig,
        network: _Network,
        frozen: int,
        tokens_per_item: int,
    ) -> dict[str, Any]:
        training: TrainingConfig | None = config.training
        at_once = training.batch_size * tokens_per_item if training else 0
        tokens = num_steps(training) * at_once if training else 0
        learning = 3 * network.forward_flops(tokens, self._length)
        batch = math.ceil(at_once / self._length)
        # A RALM's base reads what it reads; HeaT's language model has read it before.
        reading = 2.0 * frozen * tokens if kind == "lm" else 0.0
        memory = _BYTES_LEARNING * network.parameters + _BYTES_FROZEN * frozen
        precision = training.precision if training else self._recipe.precision
        return {
            "name": name,
            "kind": kind,
            "parameters": network.parameters,
            "published_parameters": config.published_parameters,
            "frozen_parameters": frozen,
            "tokens": tokens,
            "flops": learning + reading,
            "precision": precision,
            "memory_bytes": memory + network.activation_bytes(batch, self._length, precision),
        }

    def _sampling(self) -> list[dict[str, Any]]:
        recipe = self._recipe
        negatives, proposals = recipe.negatives, recipe.proposals
        prefixes = {
            "negatives": (
                negatives.num_prefixes + negatives.num_validation_prefixes,
                negatives.samples_per_prefix,
            ),
            "proposals": (
                proposals.num_validation_prefixes + proposals.num_test_prefixes,
                proposals.num_samples,
            ),
        }
        if proposals.deep is not None:
            deep = proposals.deep
            prefixes["deep proposals"] = (deep.num_prefixes, deep.num_samples)
        read_by_heat = {
            recipe.language_model_of(config) for config in recipe.energies if config.kind == "heat"
        }
        work = []
        for name in recipe.sampled_language_models:
            for what, (count, samples) in prefixes.items():
                # Where HeaT will learn, real blocks are read beside their negatives.
                rows = samples + (what == "negatives" and name in read_by_heat)
                label = f"{what} of {name}"
                work.append(self._work(label, count * rows, self._models[name], shared=count))
        return work

    def _scoring(self) -> list[dict[str, Any]]:
        proposals = self._recipe.proposals
        prefixes = proposals.num_validation_prefixes + proposals.num_test_prefixes
        blocks = prefixes * proposals.num_samples
        if proposals.deep is not None:
            prefixes += proposals.deep.num_prefixes
            blocks += proposals.deep.num_prefixes * proposals.deep.num_samples
        return [
            self._work(
                f"energies of {config.name}",
                blocks,
                self._energies[config.name],
                shared=prefixes if config.kind != "bit" else blocks,
            )
            for config in self._recipe.energies
        ] + self._fitting()

    def _fitting(self) -> list[dict[str, Any]]:
        """Members of a sum score the validation negatives; proposals they have scored already."""
        negatives = self._recipe.negatives
        blocks = negatives.num_validation_prefixes * (1 + negatives.samples_per_prefix)
        return [
            self._work(f"{member} for {entry.name}", blocks, self._energies[member], shared=blocks)
            for entry in self._recipe.sums
            for member in entry.members
        ]

    def _work(self, what: str, blocks: int, network: _Network, *, shared: int) -> dict[str, Any]:
        """Prefixes are read once for all their continuations, but by a BiT."""
        block = self._recipe.block
        tokens = blocks * block.num_new_tokens + shared * block.prefix_length
        flops = network.forward_flops(tokens, self._length)
        return {
            "what": what,
            "blocks": blocks,
            "tokens": tokens,
            "flops": flops,
            "precision": self._recipe.precision,
        }

    def _downloads(self) -> list[str]:
        recipe = self._recipe
        sources = [recipe.corpus.path, recipe.tokenizer.source]
        sources += [model.source for model in recipe.language_models]
        sources += [str(energy.source) for energy in recipe.energies if energy.is_pretrained]
        return [source for source in dict.fromkeys(sources) if _must_be_fetched(source)]


def _must_be_fetched(source: str) -> bool:
    if source.startswith(SCHEME):
        return not in_cache(find_asset(source, "source"))
    here = source == SCRATCH or source.startswith("grammar:") or Path(source).exists()
    return not here


def _refuse_unfetched(source: str, field: str) -> None:
    """A plan downloads no weights; of a model on the hub it asks for the configuration alone."""
    if source.startswith(SCHEME) and not in_cache(find_asset(source, field)):
        name = source.removeprefix(SCHEME)
        raise UserError(field, source, f"is not in the cache yet; `rebm assets get {name}` first")


def _pretrained(auto_class: Any, source: str, field: str) -> _Network:
    _refuse_unfetched(source, field)
    return _count(auto_class, load_config(source, field))


def _count(auto_class: Any, settings: Any) -> _Network:
    with torch.device("meta"):
        return _measure(auto_class.from_config(settings))


def _measure(model: Any) -> _Network:
    # A pooling layer is not part of an energy: it takes the mean over all tokens.
    if getattr(model, "pooler", None) is not None:
        model.pooler = None
    config = model.config
    return _Network(
        sum(parameter.numel() for parameter in model.parameters()),
        int(config.num_hidden_layers),
        int(config.hidden_size),
        int(config.num_attention_heads),
    )

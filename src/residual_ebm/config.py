"""The recipe: one closed, typed file that says everything about a run.

Closed: a key that does not exist is an error naming it and the nearest right one. Typed: a value of
the wrong kind is an error naming the field and the value. Complete: the resolved recipe, with every
default written out, is saved in the run directory and is enough to run it again.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import Field, WrapValidator, model_validator

from residual_ebm.sections import Beta, Count, Fraction, Name, Section, refusal

Precision = Literal["auto", "float32", "bfloat16"]
ContinuationMode = Literal["fixed", "until_end"]
EnergyKind = Literal["unit", "bit", "heat"]

SCRATCH = "scratch"
GIVEN: Literal["given"] = "given"


class SplitConfig(Section):
    """Fractions of documents. `energy` documents train energies and are hidden from the LM."""

    train: Fraction
    energy: Fraction = 0.0
    validation: Fraction
    test: Fraction

    @model_validator(mode="after")
    def _add_up(self) -> Self:
        total = self.train + self.energy + self.validation + self.test
        if abs(total - 1) > 1e-6:
            raise refusal("the shares must add up to 1", value=f"{total:g} in all")
        for name in ("train", "validation", "test"):
            if getattr(self, name) == 0:
                raise refusal("give it a share above 0", at=name, value=0)
        return self


def _read_split(value: Any, _: object) -> Any:
    """Settled here, not by the union: its errors would name the branches that it tried."""
    if value == GIVEN:
        return GIVEN
    if not isinstance(value, dict | SplitConfig):
        raise refusal("write given, or shares such as {train: 0.8, validation: 0.1, test: 0.1}")
    return SplitConfig.model_validate(value)


class CorpusConfig(Section):
    path: str  # a folder, a table, asset:NAME, hf:NAME, grammar:NAME
    text_column: str = "text"
    num_generated: Annotated[int, Field(ge=0)] = 0  # documents drawn from grammar:NAME
    max_documents: Count | None = None
    # given: the corpus itself says which documents are in which split
    split: Annotated[SplitConfig | Literal["given"], WrapValidator(_read_split)]


class TokenizerConfig(Section):
    source: str = SCRATCH  # or asset:NAME, a hub name, a folder
    kind: Literal["word", "bpe"] = "bpe"
    vocab_size: Annotated[int, Field(ge=8)] = 8192


class BlockConfig(Section):
    prefix_length: Count
    length: Annotated[int, Field(ge=2)]
    continuation: ContinuationMode = "fixed"

    @property
    def num_new_tokens(self) -> int:
        return self.length - self.prefix_length

    @model_validator(mode="after")
    def _has_continuation(self) -> Self:
        if self.length <= self.prefix_length:
            raise refusal(
                f"leaves no continuation after a prefix of {self.prefix_length}; make it larger"
                " than block.prefix_length",
                at="length",
                value=self.length,
            )
        return self


class TrainingConfig(Section):
    """Adam with warm-up and cosine decay to zero, gradient clipping, best checkpoint kept."""

    steps: Count
    batch_size: Count
    learning_rate: Annotated[float, Field(gt=0)]
    # Tried beside it for a tenth of the steps each; the best on validation trains to the end.
    other_learning_rates: list[Annotated[float, Field(gt=0)]] = Field(default_factory=list)
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    adam_betas: tuple[Beta, Beta] = (0.9, 0.98)
    precision: Precision = "auto"  # autocast; the weights themselves stay in float32
    validate_every: Count
    checkpoint_every: Count
    patience: Count | None = None  # validations without improvement before stopping early
    tokens_at_once: Count | None = None  # of a batch, in parts that follow each other; else all

    @model_validator(mode="before")
    @classmethod
    def _betas_are_a_pair(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("adam_betas"), list):
            data = {**data, "adam_betas": tuple(data["adam_betas"])}
        return data


_VALIDATION_WINDOWS = 256


class LanguageModelConfig(Section):
    """`source: scratch` with an architecture, or a pretrained one, trained further or as it is.

    With `residual_of` it is a RALM: this model is P_phi, trained on top of another one of the
    recipe, which stays as it is.
    """

    name: Name
    source: str = SCRATCH
    architecture: dict[str, Any] | None = None  # transformers' model_type and its arguments
    residual_of: str | None = None
    published_parameters: Count | None = None  # what a publication counts; a dry run shows both
    training: TrainingConfig | None = None
    validation_windows: Count = _VALIDATION_WINDOWS  # each validation of the training reads so many

    @model_validator(mode="after")
    def _scratch_needs_both(self) -> Self:
        _check_scratch(self.source, self.architecture, self.training)
        if self.residual_of is not None and self.training is None:
            raise refusal("a residual must learn; add it", at="training", value="(missing)")
        if self.training is None and (windows := self.validation_windows) != _VALIDATION_WINDOWS:
            remedy = "no training validates this model as it is; remove it"
            raise refusal(remedy, at="validation_windows", value=windows)
        for key, value in (self.architecture or {}).items():
            if "drop" in key and value:
                remedy = "language models learn without dropout; remove it"
                raise refusal(remedy, at=f"architecture.{key}", value=value)
        return self


class EncoderConfig(Section):
    """A bidirectional encoder trained by masked-language modelling on the training split.

    `source`: scratch, or lm:NAME for that language model's weights with its causal mask taken away.
    """

    name: Name
    source: str = SCRATCH
    architecture: dict[str, Any] | None = None
    tokenizer: TokenizerConfig | None = None  # none: the language model's own
    mask_probability: Annotated[float, Field(gt=0, lt=1)] = 0.15
    published_parameters: Count | None = None
    training: TrainingConfig

    @property
    def language_model(self) -> str | None:
        """Whose weights it starts from."""
        scheme, _, name = self.source.partition(":")
        return name if scheme == "lm" else None

    @model_validator(mode="after")
    def _source_is_complete(self) -> Self:
        if self.source != SCRATCH and self.language_model is None:
            raise refusal(
                "an encoder starts from scratch or lm:NAME", at="source", value=self.source
            )
        _check_scratch(self.source, self.architecture, self.training)
        if self.language_model is not None and self.tokenizer is not None:
            raise refusal(f"comes with {self.source}; remove it", at="tokenizer", value="{...}")
        return self


def _check_scratch(source: str, architecture: object, training: object) -> None:
    for name, section in (("architecture", architecture), ("training", training)):
        if source == SCRATCH and section is None:
            raise refusal("source: scratch needs this section; add it", at=name, value="(missing)")
    if source != SCRATCH and architecture is not None:
        raise refusal(f"comes with {source}; remove it", at="architecture", value="{...}")


class HeadConfig(Section):
    """Size of HeaT's bidirectional network, and what it reads of P_LM."""

    # Layers, 1 the first, whose states are read beside those of the last.
    layers: list[Count] = Field(default_factory=list)
    hidden_size: Count = 128
    num_layers: Count = 2
    num_heads: Count = 4
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1

    @model_validator(mode="after")
    def _heads_share_the_size(self) -> Self:
        if self.hidden_size % self.num_heads:
            raise refusal(
                f"must divide hidden_size, which is {self.hidden_size}",
                at="num_heads",
                value=self.num_heads,
            )
        if self.layers != sorted(set(self.layers)):
            raise refusal("name each once, in rising order", at="layers", value=self.layers)
        return self


class EnergyConfig(Section):
    """`source`: lm:NAME for unit, encoder:NAME for bit; asset:NAME, a hub name or a folder for
    both; none for heat."""

    name: Name
    kind: EnergyKind
    language_model: str | None = None  # the P_LM it corrects; none: the recipe's first
    source: str | None = None
    # Of a pretrained source, where a dry run should count without it; checked when it is loaded.
    architecture: dict[str, Any] | None = None
    head: HeadConfig | None = None
    published_parameters: Count | None = None
    negatives_per_positive: Count = 1
    training: TrainingConfig

    @property
    def is_pretrained(self) -> bool:
        """Whether its network was trained elsewhere."""
        return (self.source or "lm:").partition(":")[0] not in ("lm", "encoder")

    @model_validator(mode="after")
    def _source_fits_kind(self) -> Self:
        if self.kind == "heat" and self.source is not None:
            raise refusal(
                "heat reads its language model; remove it", at="source", value=self.source
            )
        scheme = (self.source or "").partition(":")[0]
        needed = {"unit": "lm:NAME", "bit": "encoder:NAME", "heat": ""}[self.kind]
        if self.kind != "heat" and (
            self.source is None or scheme in {"lm", "encoder"} - {needed.partition(":")[0]}
        ):
            raise refusal(
                f"{self.kind} starts from {needed}, asset:NAME, a hub name or a folder",
                at="source",
                value=self.source,
            )
        if self.kind != "heat" and self.head is not None:
            raise refusal(f"{self.kind} has none; remove it", at="head", value="{...}")
        if self.architecture is not None and not self.is_pretrained:
            raise refusal(
                "only of a pretrained source; remove it", at="architecture", value="{...}"
            )
        return self


class SumConfig(Section):
    """Energies of one language model, added with weights that are fitted on validation."""

    name: Name
    members: Annotated[list[str], Field(min_length=2)]


class SamplingConfig(Section):
    """Chunk sizes belong to the recipe: batch shape changes the last bits of bfloat16."""

    # Rows decoded together; where HeaT learns from negatives, real blocks come on top.
    chunk_size: Count = 512
    chunks_per_shard: Count = 8


class NegativesConfig(SamplingConfig):
    num_prefixes: Count
    num_validation_prefixes: Count
    samples_per_prefix: Count


class DeepConfig(Section):
    """A few test prefixes, chosen by seed, with many more samples: to see where the bounds go."""

    num_prefixes: Count
    num_samples: Annotated[int, Field(ge=8)]


class ProposalsConfig(SamplingConfig):
    num_validation_prefixes: Count
    num_test_prefixes: Count
    num_samples: Annotated[int, Field(ge=8)]  # n/4 must leave two for the leave-one-out estimate
    deep: DeepConfig | None = None


class PerStepConfig(Section):
    """The joint model token by token, for the best energy; costs far more than the table."""

    num_prefixes: Count
    num_samples: Annotated[int, Field(ge=2)]  # completions for each position
    # Prefixes whose last position is also had exactly, a block for every token there is.
    num_enumerated: Annotated[int, Field(ge=0)] = 0
    num_repeats: Annotated[int, Field(ge=0)] = 0  # contexts in which a sample repeats itself


class CalibrationConfig(Section):
    """How often the published interval holds the truth; for languages that can be enumerated."""

    num_samples: Annotated[list[Annotated[int, Field(ge=8)]], Field(min_length=1)]
    scales: Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=1)]  # of the energy
    num_documents: Annotated[int, Field(ge=2)]  # of an estimate
    num_replicates: Annotated[int, Field(ge=2)]
    bootstrap_resamples: Count = 200


class EvaluationConfig(Section):
    batch_size: Count = 64
    bootstrap_resamples: Count = 2000
    fit_energy_scale: bool = True
    num_examples: Annotated[int, Field(ge=0)] = 3
    num_draws: Annotated[int, Field(ge=2)] = 10  # samples a prefix for repetition and densities
    per_step: PerStepConfig | None = None
    calibration: CalibrationConfig | None = None


class Recipe(Section):
    name: Name
    description: str
    reference: Name | None = None  # published results that the caption of the table quotes
    seed: Annotated[int, Field(ge=0)] = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Count = 2
    precision: Precision = "auto"  # the type that samples is the type that scores
    corpus: CorpusConfig
    tokenizer: TokenizerConfig
    block: BlockConfig
    language_models: Annotated[list[LanguageModelConfig], Field(min_length=1)]
    encoders: list[EncoderConfig] = Field(default_factory=list)
    energies: list[EnergyConfig] = Field(default_factory=list)
    sums: list[SumConfig] = Field(default_factory=list)
    negatives: NegativesConfig
    proposals: ProposalsConfig
    evaluation: EvaluationConfig = EvaluationConfig()

    @model_validator(mode="after")
    def _references_exist(self) -> Self:
        for kind in ("language_models", "encoders", "corrections"):
            names = [entry.name for entry in getattr(self, kind)]
            for name in names:
                if names.count(name) > 1:
                    at = kind.replace("corrections", "energies")
                    raise refusal("is there twice; rename one", at=at, value=name)
        models = [model.name for model in self.language_models]
        plain = [model.name for model in self.language_models if model.residual_of is None]
        for number, model in enumerate(self.language_models):
            before = [name for name in models[:number] if name in plain]
            _check_reference(f"language_models.{model.name}.residual_of", model.residual_of, before)
        encoders = [encoder.name for encoder in self.encoders]
        for encoder in self.encoders:
            _check_reference(f"encoders.{encoder.name}.source", encoder.language_model, plain)
        for energy in self.energies:
            place = f"energies.{energy.name}"
            _check_reference(f"{place}.language_model", energy.language_model, models)
            scheme, _, target = (energy.source or "").partition(":")
            if scheme == "lm":
                _check_reference(f"{place}.source", target, plain)
            if scheme == "encoder":
                _check_reference(f"{place}.source", target, encoders)
        for entry in self.sums:
            place = f"sums.{entry.name}.members"
            for number, member in enumerate(entry.members):
                _check_reference(place, member, [energy.name for energy in self.energies])
                if member in entry.members[:number]:
                    raise refusal("is there twice; remove one", at=place, value=member)
                if self.corrected_by(member) != self.corrected_by(entry.members[0]):
                    raise refusal("corrects another language model", at=place, value=member)
        return self

    def language_model_of(self, energy: EnergyConfig) -> str:
        return energy.language_model or self.language_models[0].name

    @property
    def corrections(self) -> list[EnergyConfig | SumConfig]:
        """Everything that makes a joint model."""
        return [*self.energies, *self.sums]

    def corrected_by(self, energy: str) -> str:
        """The name of the language model that an energy, or a sum of them, corrects."""
        members = {entry.name: entry.members[0] for entry in self.sums}
        named = members.get(energy, energy)
        return next(self.language_model_of(one) for one in self.energies if one.name == named)

    @property
    def sampled_language_models(self) -> list[str]:
        """The language models some energy corrects: those that draw negatives and proposals."""
        used = {self.language_model_of(energy) for energy in self.energies}
        return [model.name for model in self.language_models if model.name in used]

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _check_reference(field: str, target: str | None, known: Sequence[str]) -> None:
    if target is not None and target not in known:
        there = ", ".join(known) or "none"
        raise refusal(f"not in the recipe, which has {there}", at=field, value=target)

"""What the benchmarks measure: models, text and sizes."""

from dataclasses import dataclass
from typing import Any

from residual_ebm.config import Precision

# Names that stand in every table: ours begin with the first.
OURS = "residual-ebm"
PRODUCTS = "matrix products alone"
# transformers' names for attention: what it takes by itself, and products written out.
FUSED, PLAIN = "sdpa", "eager"


@dataclass(frozen=True)
class Setting:
    """The defaults are what `rebm bench` measures; tests take smaller ones."""

    model: str = "asset:smollm2-135m"
    encoder: str = "asset:minilm-l6"
    text: str = "asset:sotu"
    precision: Precision = "bfloat16"
    threads: int = 2
    repeats: int = 5
    timeout: float = 1200.0
    prefix_length: int = 120
    num_tokens: int = 40
    num_samples: int = 512
    batch_sizes: tuple[int, ...] = (16, 32, 64, 128, 256, 512)
    classifier_sizes: tuple[int, ...] = (2, 8, 32, 128)
    compiled_sizes: tuple[int, ...] = (64, 256, 512)  # at which generate is tried compiled as well
    compiled_prefixes: tuple[int, ...] = (16, 64)  # the same, with `samples_per_prefix` each
    compiled_trainer: bool = True
    num_prefixes: int = 64
    samples_per_prefix: int = 8
    num_blocks: int = 512
    num_pairs: int = 32
    steps_a_turn: int = 10  # of a language model's training
    nce_steps_a_turn: int = 5
    train_batch: int = 48
    few_samples: int = 1000
    many_samples: int = 10_000  # `few_samples` at a time
    agreeing_samples: int = 2000  # drawn and scored in `precision`; `num_samples` in float32
    plain_samples: int = 100  # of these, read by the plain model as well
    # The language model of the recipe `wiki`.
    layers: int = 4
    hidden_size: int = 256
    vocabulary: int = 8192

    @property
    def length(self) -> int:
        return self.prefix_length + self.num_tokens

    def take(self, *names: str) -> dict[str, Any]:
        """Some of it, as arguments of the same names."""
        return {name: getattr(self, name) for name in names}

    @property
    def architecture(self) -> dict[str, Any]:
        return {
            "model_type": "llama",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.hidden_size * 11 // 4,
            "num_hidden_layers": self.layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": 256,
            "tie_word_embeddings": True,
        }

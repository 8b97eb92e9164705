"""P_LM: a causal language model that scores and samples continuations of a prefix (section 3).

The numeric type that samples is the type that scores, so that both speak of one distribution.

Shapes: B blocks, T tokens of a block, P tokens of a prefix, C = T - P tokens of a continuation,
N samples, G prefixes, V vocabulary, H hidden size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from residual_ebm.assets.resolve import local_source
from residual_ebm.config import Precision
from residual_ebm.errors import UserError
from residual_ebm.files.storage import fingerprint
from residual_ebm.models.decoding import Decoded, Truncation, decode
from residual_ebm.models.device import DTYPES, resolve_device, resolve_precision
from residual_ebm.models.last_layer import relative_logits
from residual_ebm.models.layer_states import states_captured
from residual_ebm.models.loading import context_length, load_pretrained, load_tokenizer
from residual_ebm.models.packed_linear import packed_layers
from residual_ebm.models.prefix_steps import can_share_prefix, way_of
from residual_ebm.models.shared_prefix import forward_after_prefix
from residual_ebm.models.vocabulary import token_statistics
from residual_ebm.progress import QUIET, Progress
from residual_ebm.randomness import uniform


@dataclass(frozen=True)
class Samples:
    """Continuations of one prefix, with how they were truncated: only untruncated ones may be
    used for bounds."""

    ids_NT: Tensor  # new tokens, padded with end-of-text
    length_N: Tensor
    log_prob_N: Tensor  # log P_LM of the continuation, float64
    proposal_log_prob_N: Tensor  # under the distribution they were drawn from
    truncation: dict[str, Any] | None


class TokenFeatures(NamedTuple):
    """What P_LM computes anyway for each token of a continuation."""

    hidden_BCH: Tensor  # the state that predicted the token, and those of further layers beside it
    embedding_BCH: Tensor  # of the token itself
    log_prob_BC: Tensor
    entropy_BC: Tensor  # of the distribution the token was drawn from


class Watch(NamedTuple):
    """Who looks at samples as they are drawn, and which further layers' states it needs."""

    layers: Sequence[int]
    see: Callable[[Decoded, TokenFeatures], None]


class LanguageModel:
    """A Hugging Face causal LM with its tokenizer; dropout is always off."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, fingerprint: str = ""
    ) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.fingerprint = fingerprint
        self.end_of_text = end_of_text_id(tokenizer)

    @classmethod
    def from_pretrained(
        cls, source: str | Path, *, precision: Precision = "auto", device: str = "auto"
    ) -> "LanguageModel":
        """Load from a folder, by hub name or by asset:NAME."""
        name = local_source(str(source), "language_model", kind="model")
        model = load_pretrained(
            AutoModelForCausalLM,
            name,
            "language_model",
            dtype=DTYPES[resolve_precision(precision, device)],
        )
        tokenizer = load_tokenizer(name, "language_model")
        mark = fingerprint(Path(name)) if Path(name).is_dir() else name
        return cls(model.to(resolve_device(device)), tokenizer, mark)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def hidden_size(self) -> int:
        return int(self.model.get_output_embeddings().weight.shape[1])

    @property
    def vocabulary_size(self) -> int:
        return int(self.model.get_output_embeddings().weight.shape[0])

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def context_length(self) -> int | None:
        return context_length(self.model.config)

    def check_context(self, num_tokens: int, field: str = "prompt") -> None:
        """Refuse more tokens than the model was built for."""
        if self.context_length is not None and num_tokens > self.context_length:
            raise UserError(
                field,
                f"{num_tokens} tokens with the continuation",
                f"is longer than the model's context of {self.context_length}; shorten it",
            )

    @torch.inference_mode()
    def log_prob(
        self, ids_BT: Tensor, prefix_length: int, length_B: Tensor | None = None
    ) -> Tensor:
        """log P_LM(x_t | x_<t) of each token of the continuation, (B, T - p); 0 in the padding."""
        _, logits_BCV = self._forward(ids_BT, prefix_length)
        log_prob_BC, _ = token_statistics(logits_BCV, ids_BT[:, prefix_length:].to(self.device))
        return log_prob_BC * continuation_mask(ids_BT, prefix_length, length_B).to(self.device)

    @torch.inference_mode()
    def next_log_prob(self, context_L: Tensor) -> Tensor:
        """log P_LM of every token of the vocabulary after a context, float64."""
        any_token = context_L[-1:]  # what follows is not read
        _, logits_11V = self._forward(torch.cat([context_L, any_token])[None], len(context_L))
        return logits_11V[0, 0].float().log_softmax(-1).double().cpu()

    @torch.inference_mode()
    def features(
        self, ids_BT: Tensor, prefix_length: int, layers: Sequence[int] = ()
    ) -> TokenFeatures:
        """Hidden states, embeddings, log-probs and entropies of the continuation's tokens."""
        target_BC = ids_BT[:, prefix_length:].to(self.device)
        hidden_BCH, logits_BCV = self._forward(ids_BT, prefix_length, layers)
        log_prob_BC, entropy_BC = token_statistics(logits_BCV, target_BC)
        embedding_BCH = self.model.get_input_embeddings()(target_BC)
        return TokenFeatures(hidden_BCH, embedding_BCH, log_prob_BC, entropy_BC)

    def _forward(
        self, ids_BT: Tensor, prefix_length: int, layers: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor]:
        """The states that enter the vocabulary layer, and its logits, for the continuation.

        Rows that follow each other with the same prefix share it: it is computed once.
        """
        captured: list[Tensor] = []
        shares = can_share_prefix(self.model, ids_BT.shape[1])  # a trial's states are not wanted
        # The last token predicts nothing we score, so it is not read.
        ids_BL = ids_BT[:, :-1].to(self.device)
        # Autocast off: HeaT trains inside it, and P_LM must be the same there as everywhere else.
        capture = states_captured(self.model, captured, layers)
        rounding = relative_logits(self.model)  # before the capture, for it may try the model too
        with rounding, capture, torch.autocast(self.device.type, enabled=False):
            if shares:
                logits = forward_after_prefix(self.model, ids_BL, prefix_length)
            else:
                keep = ids_BT.shape[1] - prefix_length
                logits = [self.model(ids_BL, use_cache=False, logits_to_keep=keep).logits]
        return _one_row_each(captured, len(ids_BL)), _one_row_each(logits, len(ids_BL))

    def sample(
        self,
        prefix_ids: Tensor,
        num_samples: int,
        num_tokens: int,
        seed: int,
        *,
        top_k: int | None = None,
        top_p: float | None = None,
        stop_at_end: bool = False,
        chunk_size: int = 512,
        watch: Watch | None = None,
        progress: Progress = QUIET,
    ) -> Samples:
        """Continuations of one prefix; sample i depends on (seed, i), and on the chunk size only
        by rounding. `watch` sees every chunk with what the network computed for it."""
        counts = {"num_samples": num_samples, "num_tokens": num_tokens, "chunk_size": chunk_size}
        for field, count in counts.items():
            if count < 1:
                raise UserError(field, count, "must be at least 1")
        truncation = Truncation(top_k, top_p)
        if top_k is not None and top_k >= self.vocabulary_size:
            truncation = Truncation(None, top_p)  # cuts nothing off: draws of P_LM itself
        prefix_ids_GP = torch.as_tensor(prefix_ids).reshape(1, -1)
        if not prefix_ids_GP.numel():
            raise UserError("prefix_ids", "[]", "is empty; give at least one token")
        self.check_context(prefix_ids_GP.shape[1] + num_tokens)

        def draw(first: int) -> tuple[Tensor, ...]:
            """What is kept of a chunk: what each token had would take more than the samples."""
            chunk: dict[str, Any] = {
                "prefix_ids_GP": prefix_ids_GP,
                "prefix_numbers": [0],
                "first_sample": first,
                "num_samples": min(chunk_size, num_samples - first),
                "num_tokens": num_tokens,
                "seed": seed,
                "truncation": truncation,
                "stop_at_end": stop_at_end,
            }
            if watch is None:
                part = self.sample_chunk(**chunk)
            else:
                part, features = self.sample_chunk_with_features(layers=watch.layers, **chunk)
                watch.see(part, features)
            log_prob_N = part.log_prob_NC.double().sum(-1)
            proposal_N = part.proposal_log_prob_NC.double().sum(-1)
            return part.ids_NC, part.length_N, log_prob_N, proposal_N

        parts = []
        with progress.bar("sampling", num_samples) as bar:
            for first in range(0, num_samples, chunk_size):
                parts.append(draw(first))
                bar.advance(len(parts[-1][0]))
        ids_NC, length_N, log_prob_N, proposal_N = map(torch.cat, zip(*parts, strict=True))
        return Samples(ids_NC, length_N, log_prob_N, proposal_N, truncation.describe())

    @torch.inference_mode()
    def sample_chunk(
        self,
        prefix_ids_GP: Tensor,
        *,
        prefix_numbers: list[int],
        first_sample: int,
        num_samples: int,
        num_tokens: int,
        seed: int,
        truncation: Truncation,
        stop_at_end: bool,
        given_ids_GC: Tensor | None = None,
    ) -> Decoded:
        """The same samples of several equally long prefixes, decoded together.

        `given_ids_GC`, a continuation of each prefix, goes first among its samples: not drawn, but
        read by the network in the very same way.
        """
        num_given = 0 if given_ids_GC is None else 1

        def uniform_at(step: int) -> Tensor:
            rows_GS = [
                uniform(seed, number, step, first_sample, num_samples) for number in prefix_numbers
            ]
            return torch.from_numpy(np.pad(rows_GS, ((0, 0), (num_given, 0))).reshape(-1))

        given_NC = None
        if given_ids_GC is not None:
            given_GJC = torch.full((len(given_ids_GC), 1 + num_samples, num_tokens), -1)
            given_GJC[:, 0] = given_ids_GC
            given_NC = given_GJC.flatten(0, 1).to(self.device)
        way_of(self.model, prefix_ids_GP.shape[1] + num_tokens)  # tried with logits as they are
        num_drawn = len(prefix_ids_GP) * num_samples * num_tokens
        with relative_logits(self.model, num_drawn), packed_layers(self.model, num_drawn):
            return decode(
                self.model,
                prefix_ids_GP.to(self.device),
                samples_per_prefix=num_given + num_samples,
                num_tokens=num_tokens,
                uniform_at=uniform_at,
                truncation=truncation,
                end_of_text=self.end_of_text if stop_at_end else None,
                padding=self.end_of_text,
                given_NC=given_NC,
            )

    @torch.inference_mode()
    def sample_chunk_with_features(
        self, *, layers: Sequence[int] = (), **arguments: Any
    ) -> tuple[Decoded, TokenFeatures]:
        """`sample_chunk`, and what the network computed for each token while it was drawn."""
        hidden: list[Tensor] = []
        # Tried before, or the states of the trials would be among those wanted.
        prefix_GP, num_tokens = arguments["prefix_ids_GP"], arguments["num_tokens"]
        way_of(self.model, prefix_GP.shape[1] + num_tokens)
        num_drawn = len(prefix_GP) * arguments["num_samples"] * num_tokens
        with relative_logits(self.model, num_drawn), states_captured(self.model, hidden, layers):
            decoded = self.sample_chunk(**arguments)
        # Many prefixes are read in several passes, before the first step.
        rows_read = np.cumsum([len(states) for states in hidden])
        num_passes = 1 + int(np.searchsorted(rows_read, len(prefix_GP)))
        prefix_G1H = torch.cat([states[:, -1:] for states in hidden[:num_passes]])
        # Fewer passes than tokens where every row ended before.
        passes = zip([prefix_G1H, *hidden[num_passes:]], decoded.row_NC.T, strict=False)
        hidden_NLH = torch.cat([states.index_select(0, row_N) for states, row_N in passes], dim=1)
        # Once every row has ended, the rest of the continuation is padding, which nobody reads.
        missing = num_tokens - hidden_NLH.shape[1]
        return decoded, TokenFeatures(
            torch.nn.functional.pad(hidden_NLH, (0, 0, 0, missing)),
            self.model.get_input_embeddings()(decoded.ids_NC),
            decoded.log_prob_NC,
            decoded.entropy_NC,
        )


def end_of_text_id(tokenizer: PreTrainedTokenizerFast) -> int:
    if tokenizer.eos_token_id is None:
        raise UserError(
            "tokenizer", tokenizer.name_or_path, "has no end-of-text token; choose one that does"
        )
    return int(tokenizer.eos_token_id)


def continuation_mask(ids_BT: Tensor, prefix_length: int, length_B: Tensor | None) -> Tensor:
    """True at the continuation's own tokens, false in the padding after its end."""
    position_C = torch.arange(prefix_length, ids_BT.shape[1])
    if length_B is None:
        return torch.ones(len(ids_BT), len(position_C), dtype=torch.bool)
    return position_C[None, :] < length_B.cpu()[:, None]


def _one_row_each(parts: list[Tensor], num_rows: int) -> Tensor:
    """Pieces along the sequence, the first of them once a prefix, as rows of their own."""
    rows = [part.repeat_interleave(num_rows // len(part), dim=0) for part in parts]
    return torch.cat(rows, dim=1)

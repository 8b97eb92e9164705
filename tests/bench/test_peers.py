"""Peers do in every turn what their names say."""

import functools

import pytest
import torch
from transformers import TrainingArguments

from residual_ebm.bench import peers
from residual_ebm.bench.setting import Setting


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")  # torch's own
def test_a_compiled_trainer_is_compiled_in_every_turn(
    small_setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """accelerate compiles a model once, and not again for a second Trainer."""
    # The compiler's own part takes half a minute, and is not what is asked here.
    traced = functools.partial(TrainingArguments, torch_compile_backend="eager")
    monkeypatch.setattr(peers, "TrainingArguments", traced)
    compiled = type(torch.compile(torch.nn.Identity()))
    through_compiled = []
    call = compiled.__call__

    def counting(self: torch.nn.Module, *inputs: object, **named: object) -> object:
        through_compiled.append(1)
        return call(self, *inputs, **named)

    monkeypatch.setattr(compiled, "__call__", counting)
    work = peers.trainer_lm(
        architecture=small_setting.architecture,
        bf16=True,
        batch_size=2,
        length=8,
        steps=3,
        threads=1,
        compiled=True,
    )
    for turn in (1, 2, 3):
        work.run()
        assert len(through_compiled) == 3 * turn

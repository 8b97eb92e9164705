"""Every training gives the same gradients whether a batch goes through whole or in parts."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from residual_ebm.errors import UserError
from residual_ebm.files.run_directory import RECIPE, RunDirectory
from residual_ebm.recipe_file import load_recipe
from residual_ebm.stages import train_encoder, train_energy, train_lm, training_run

STAGES = {
    "language_models.base": train_lm,
    "encoders.encoder": train_encoder,
    "energies.unit": train_energy,
    "energies.bit": train_energy,
    "energies.heat": train_energy,
}


class Caught(Exception):  # noqa: N818
    """Training would begin here."""


@pytest.mark.parametrize("place", list(STAGES))
def test_gradients_of_parts_add_up(
    place: str, tiny_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section, name = place.split(".")
    folder = tiny_copy / section / name
    shutil.rmtree(folder)

    def gradients(*changes: str) -> tuple[int, float, dict[str, Tensor]]:
        found: dict[str, Any] = {}

        def catch(module: torch.nn.Module, *_: Any, **arguments: Any) -> None:
            found.update(arguments, module=module)
            raise Caught

        monkeypatch.setattr(training_run, "train", catch)
        settings = [f"{place}.training.{change}" for change in ("precision=float32", *changes)]
        recipe = load_recipe(str(tiny_copy / RECIPE), settings)
        with pytest.raises(Caught):
            STAGES[place].run(recipe, RunDirectory(tiny_copy))
        module = found["module"].eval()  # which part drops what is not the same
        last = [layer for layer in module.modules() if isinstance(layer, torch.nn.Linear)][-1]
        torch.nn.init.normal_(last.weight, generator=torch.Generator().manual_seed(0))
        losses = [found["loss_at"](3, part) for part in range(found["num_parts"])]
        total = torch.stack(losses).sum()
        total.backward()
        weights = module.named_parameters()
        return (
            len(losses),
            total.item(),
            {key: weight.grad for key, weight in weights if weight.grad is not None},
        )

    one, loss, whole = gradients()
    several, sum_of_losses, added = gradients("tokens_at_once=100")
    assert one == 1 < several
    assert sum_of_losses == pytest.approx(loss, rel=1e-4)
    assert whole.keys() == added.keys()
    for key, gradient in whole.items():
        torch.testing.assert_close(
            added[key], gradient, rtol=1e-3, atol=1e-3 * gradient.abs().max().item(), msg=key
        )


@pytest.mark.parametrize(("asked", "read"), [(1, 1), (7, 7), (10**6, None)])
def test_a_validation_reads_as_many_windows_as_it_is_told(
    asked: int, read: int | None, tiny_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(tiny_copy / "language_models" / "base")
    seen: list[int] = []

    def loss(_model: object, ids_BT: Any) -> Tensor:
        seen.append(len(ids_BT))
        return torch.zeros(())

    monkeypatch.setattr(train_lm, "_loss", loss)

    def validate_once(*_: Any, validate: Any, **_arguments: Any) -> None:
        validate()
        raise Caught

    monkeypatch.setattr(training_run, "train", validate_once)
    recipe = load_recipe(
        str(tiny_copy / RECIPE), [f"language_models.base.validation_windows={asked}"]
    )
    run_dir = RunDirectory(tiny_copy)
    with pytest.raises(Caught):
        train_lm.run(recipe, run_dir)
    there = len(train_lm.training_windows(recipe, run_dir, "validation"))
    assert sum(seen) == (read or there) <= there


def test_windows_for_a_model_that_does_not_learn_are_refused(tiny_copy: Path) -> None:
    model = "{name: there, source: 'asset:smollm2-135m', validation_windows: 9}"
    with pytest.raises(UserError, match="no training validates this model") as caught:
        load_recipe(str(tiny_copy / RECIPE), [f"language_models=[{model}]"])
    assert "validation_windows" in caught.value.field

"""Training: it is repeatable, it learns, and an application reads the files that it writes."""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random

import pytest
import torch

from holdfast.cells.applications import listops
from holdfast.cells.applications.weights import read_weights, write_weights
from scripts import cell_data
from scripts.train_cells import TRAININGS, Forest, ListOpsTraining, optimize, train


@pytest.mark.always("listops")
@pytest.mark.parametrize("name", TRAININGS)
def test_training_lowers_the_loss_and_repeats_exactly(name: str) -> None:
    def run() -> tuple[list[float], dict[str, torch.Tensor]]:
        torch.manual_seed(3)
        training = TRAININGS[name](3)
        training.batch = 16
        first = training.backward(0.0)
        optimize(training, 25)
        return [first, training.backward(0.99)], training.weights()

    losses, weights = run()
    again, weights_again = run()
    assert losses == again
    assert all(torch.equal(weights[key], weights_again[key]) for key in weights)
    assert losses[1] < 0.9 * losses[0]


@pytest.mark.parametrize("name", TRAININGS)
def test_trained_weights_are_saved_read_back_and_tested(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(name, argparse.Namespace(seed=0, steps=1, out=tmp_path))
    assert "right on held-out cases: " in capsys.readouterr().out
    shipped, words = read_weights(name)
    trained, own_words = read_weights(name, tmp_path)
    assert {key: tensor.shape for key, tensor in trained.items()} == {key: t.shape for key, t in shipped.items()}
    assert own_words == words


def test_weights_are_stored_as_float16_and_read_as_float32(tmp_path: Path) -> None:
    path = write_weights("some", {"w": torch.tensor([[1.0, 1 / 3]])}, ["a", "é"], tmp_path)
    tensors, words = read_weights("some", tmp_path)
    assert tensors["w"].tolist() == [[1.0, torch.tensor(1 / 3).half().item()]]
    assert tensors["w"].dtype is torch.float32
    assert words == ["a", "é"]
    assert path.stat().st_size < 200


def test_gradients_of_a_forest_equal_those_of_one_graph() -> None:
    training = ListOpsTraining(0)
    case = next(cell_data.expressions(Random(2), 4, test=False))
    forest = Forest([listops.parse(case.text)] * 2)
    tape = training._forward(forest)
    tape.h.requires_grad_()
    wanted = torch.randn(training.hidden)
    (tape.h[-1] @ wanted).backward()
    training._backward(forest, tape)
    internal = training.module["internal"]
    found = internal.weight.grad.clone(), training.module["embedding"].weight.grad.clone()
    training.module.zero_grad()

    tree = listops.parse(case.text)
    leaf = {"embedding": training.module["embedding"].weight, "w": training.module["leaf"].weight}
    leaf["b"] = training.module["leaf"].bias
    states = [training._leaf.run(leaf, token=torch.tensor([token])) for token in tree.tokens]
    for left, right in zip(tree.left, tree.right, strict=True):
        sides = {f"left_{name}": states[left][name] for name in "hc"}
        sides |= {f"right_{name}": states[right][name] for name in "hc"}
        states.append(training._internal.run({"w": internal.weight, "b": internal.bias}, **sides))
    (states[-1]["h"][0] @ wanted).backward()
    torch.testing.assert_close(found[0], internal.weight.grad, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(found[1], training.module["embedding"].weight.grad, atol=1e-6, rtol=1e-5)

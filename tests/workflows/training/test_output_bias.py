"""The first bias of the head, as a training is built from its config."""

import pytest
import torch

from unet3d.data.loading.class_fractions import compute_class_fractions
from unet3d.workflows.training.build import build_training, resolve_start
from unet3d.workflows.training.output_bias import compute_output_bias, initialize_output_bias


def shares_of(run):
    """Count the classes of the training patches another way: a batch at a time."""
    feed = run.train_loader
    labels = torch.stack([torch.from_numpy(feed.patches.label(p)) for p in feed.order])
    return [(labels == c).float().mean().item() for c in range(4)]


def test_every_head_begins_at_the_shares_of_the_training_patches(composed, tmp_path):
    words = ["model.depth=4", "model.deep_supervision=true", "data.patches_per_case=5"]
    run = build_training(composed(*words), tmp_path)
    assert len(run.task.model.heads) == 2
    for head in run.task.model.heads:
        assert head.bias.softmax(0).tolist() == pytest.approx(shares_of(run), rel=1e-3)


def test_overlapping_regions_begin_at_their_own_shares(composed, tmp_path):
    regions = "{all:[1,2,3],most:[2,3],box:[3]}"
    run = build_training(composed(f"data.regions={regions}", "data.patches_per_case=5"), tmp_path)
    expected = shares_of(run)
    bias = run.task.model.heads[0].bias
    shares = [sum(expected[1:]), sum(expected[2:]), expected[3]]
    assert bias.sigmoid().tolist() == pytest.approx(shares, rel=1e-3)


def test_a_run_may_keep_the_bias_that_torch_makes(composed, tmp_path):
    run = build_training(composed("model.prior_bias=false"), tmp_path)
    torch.manual_seed(0)
    assert run.task.model.heads[0].bias.abs().max() < 0.5
    assert "prior_bias" not in " ".join(run.foreseen)


def test_a_network_from_elsewhere_is_told_where_its_bias_was_set(composed, tmp_path):
    run = build_training(composed("model=dynunet"), tmp_path)
    bias = run.task.model.output_block.conv.conv.bias
    assert bias.softmax(0)[0] > 0.5
    assert "the bias of output_block.conv.conv begins at the class shares" in " ".join(run.foreseen)


def test_weights_that_are_taken_over_keep_their_bias_and_a_new_head_begins_at_the_shares(
    composed, tmp_path
):
    first = build_training(composed("model.prior_bias=false"), tmp_path / "first")
    path = tmp_path / "weights.pt"
    torch.save(first.task.model.state_dict(), path)
    same = build_training(composed(f"init_from={path}"), tmp_path / "same")
    resolve_start(same)
    assert same.task.model.heads[0].bias.equal(first.task.model.heads[0].bias)
    more = build_training(composed(f"init_from={path}", "data.num_classes=5"), tmp_path / "more")
    resolve_start(more)
    expected = compute_output_bias(
        compute_class_fractions(
            more.train_loader.patches,
            num_classes=5,
            samples=more.train_loader.order.samples,
            foreground_fraction=more.config["data"]["foreground_fraction"],
        ),
        None,
    )
    assert more.task.model.heads[0].bias.tolist() == pytest.approx(expected)


def test_the_bias_draws_no_random_number(composed, tmp_path):
    run = build_training(composed(), tmp_path)
    state = torch.random.get_rng_state()
    initialize_output_bias(run.task.model, run.request, run.train_loader)
    assert torch.random.get_rng_state().equal(state)

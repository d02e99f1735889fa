"""The outputs' first bias, as a run is built from its config."""

import pytest
import torch

from tests.config.helpers.configs import SHRUNK
from unet3d.commands.train import build_training
from unet3d.errors import UsageError
from unet3d.training.pretrained import describe_other_meaning
from unet3d.training.start import prepare_start


def count_class_fractions(run):
    """Count the classes of the training patches in another way: label by label."""
    loader = run.data.train_loader
    labels = torch.stack(
        [torch.from_numpy(loader.patches.read_label(p)) for p in loader.epoch_sampler]
    )
    return [(labels == c).float().mean().item() for c in range(len(run.data.dataset.classes))]


def test_every_head_starts_at_the_class_fractions_of_the_training_patches(composed, tmp_path):
    overrides = ["model.depth=4", "model.deep_supervision=true", "data.patches_per_case=5"]
    run = build_training(composed(*overrides), tmp_path)
    assert len(run.module.model.heads) == 2
    for head in run.module.model.heads:
        assert head.bias.softmax(0).tolist() == pytest.approx(count_class_fractions(run), rel=1e-3)


def test_each_region_starts_at_its_own_fraction(composed, tmp_path):
    regions = "{all:[1,2,3],most:[2,3],box:[3]}"
    run = build_training(composed(f"data.regions={regions}", "data.patches_per_case=5"), tmp_path)
    fractions = count_class_fractions(run)
    bias = run.module.model.heads[0].bias
    expected = [sum(fractions[1:]), sum(fractions[2:]), fractions[3]]
    assert bias.sigmoid().tolist() == pytest.approx(expected, rel=1e-3)


def test_the_bias_of_a_library_network_is_found_and_named_and_so_is_its_strategy(
    composed, tmp_path
):
    run = build_training(composed("model=dynunet", *SHRUNK["dynunet"]), tmp_path)
    bias = run.module.model.output_block.conv.conv.bias
    assert bias.softmax(0)[0] > 0.5
    strategy, found = run.notes
    assert strategy == "checkpointing=fused: this network has no fused blocks, using none"
    assert "the bias of output_block.conv.conv starts at the class fractions" in found


def test_pretrained_weights_keep_their_bias_but_a_new_head_starts_at_the_class_fractions(
    composed, tmp_path
):
    pretrained = build_training(composed("model.prior_bias=false"), tmp_path / "pretrained")
    path = tmp_path / "weights.pt"
    torch.save(pretrained.module.model.state_dict(), path)
    same = build_training(composed(f"init_from={path}"), tmp_path / "same")
    prepare_start(same)
    assert same.module.model.heads[0].bias.equal(pretrained.module.model.heads[0].bias)
    more = build_training(composed(f"init_from={path}", "data.num_classes=5"), tmp_path / "more")
    prepare_start(more)
    fractions = more.module.model.heads[0].bias.softmax(0).tolist()
    assert fractions == pytest.approx(count_class_fractions(more), rel=1e-2, abs=1e-3)


def test_a_package_that_a_network_lacks_is_not_taken_for_a_patch_it_cannot_take(
    composed, tmp_path, monkeypatch
):
    def fail(*arguments):
        raise ImportError("No module named 'einops'")

    monkeypatch.setattr("unet3d.training.head_bias.find_head_names", fail)
    message = "model=dynunet needs a package that is not installed: .*einops"
    with pytest.raises(UsageError, match=message):
        build_training(composed("model=dynunet"), tmp_path)


def test_a_start_whose_classes_or_channels_meant_something_else_is_named():
    before = {"classes": ["background", "liver", "tumor"], "channels": ["flair", "t1"]}
    assert describe_other_meaning(before, before) is None
    assert describe_other_meaning({}, before) is None  # of another project
    regions = {"regions": {"whole": [1, 2], "core": [2]}}
    assert describe_other_meaning(before | regions, before | {"classes": []} | regions) is None
    other = describe_other_meaning(before | regions, before | {"regions": {"core": [2], "a": [1]}})
    assert other.startswith("init_from: classes were whole, core and are core, a: ")
    now = before | {"classes": ["background", "tumor", "liver"]}
    assert describe_other_meaning(before, now) == (
        "init_from: classes were background, liver, tumor and are background, tumor, liver: "
        "weights are matched by position, not by name"
    )

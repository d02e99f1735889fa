"""What training does about cases that it cannot use."""

from unet3d.commands.train import build_training


def test_a_patch_that_is_mostly_padding_is_a_warning(composed, tmp_path):
    run = build_training(composed("data.patch_size=[32,32,32]"), tmp_path)
    expected = "data.patch_size=[32, 32, 32] has 8 times the voxels of the largest case (16x16x16)"
    assert any(note.startswith(expected) for note in run.notes)
    assert not any("padding" in note for note in build_training(composed(), tmp_path).notes)

"""What users see after a mistake: one line with the key, what was given, and what to do."""

import pytest

MISTAKES = {
    "unknown_key": (["model.depht=5"], ["model.depht", "model.depth"]),
    "key_without_its_group": (["lr=0.1"], ["lr", "optimizer.lr"]),
    "unknown_group": (["modle=unet_tiny"], ["modle", "model"]),
    "unknown_option": (["pool=medain"], ["medain", "median", "approx_median", "avg", "max"]),
    "out_of_range": (["data.batch_size=0"], ["data.batch_size", "0"]),
    "wrong_type": (["trainer.max_steps=many"], ["trainer.max_steps", "many"]),
    "not_one_of_the_choices": (["precision=17"], ["precision", "17", "bf16", "32"]),
    "fold_out_of_range": (["fold=7"], ["fold", "7", "0..4"]),
    "patch_too_small_for_the_network": (["model.depth=9"], ["data.patch_size", "model.depth"]),
    "option_without_effect": (["model=dynunet", "pool=median"], ["dynunet", "pool="]),
    "key_of_another_option": (["pool=max", "pool.tau=1"], ["pool.tau"]),
    "missing_dataset": (["data=decathlon", "data.root=nowhere"], ["nowhere", "dataset.json"]),
    "missing_checkpoint_to_resume": (["resume=gone.ckpt"], ["gone.ckpt"]),
    "broken_quotes": (["data.root='open"], ["data.root"]),
}
"""Overrides of `unet3d train`, and what the line about them has to contain."""


def assert_one_line(error: str, words: list[str]) -> None:
    (line,) = error.splitlines()
    assert line.startswith("unet3d: ")
    assert not [word for word in words if word not in line]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_training_is_one_line_with_exit_code_2(unet3d, small, mistake):
    overrides, words = MISTAKES[mistake]
    own_data = "data=decathlon" in overrides
    base = [word for word in small if not (own_data and word.startswith("data."))]
    ended = unet3d("train", *base, *overrides)
    assert ended.code == 2
    assert_one_line(ended.err, words)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("trian", ["trian", "did you mean train"]),
        ("predict", ["checkpoint=", "input=", "output="]),
        ("predict checkpoint=gone.ckpt input=. output=labels", ["gone.ckpt"]),
        ("compare gone", ["gone"]),
        ("view gone.nii.gz", ["gone.nii.gz"]),
        ("download task=Task99_Nothing", ["Task99_Nothing", "Task04_Hippocampus"]),
        ("memory format=pdf", ["format", "pdf", "json"]),
        ("search space={pool:[max,maxx]}", ["maxx", "max"]),
        ("memory data.patch_size=[8, 8, 8]", ["'data.patch_size=[8,'", "quote", "blanks"]),
        ("check wrokers=2", ["wrokers", "workers"]),
    ],
)
def test_a_mistake_in_another_command_is_one_line_with_exit_code_2(unet3d, words, expected):
    ended = unet3d(*words.split())
    assert ended.code == 2
    assert_one_line(ended.err, expected)


def test_debug_shows_where_the_error_was_raised(unet3d):
    ended = unet3d("train", "data.batch_size=0", "debug=true")
    assert ended.code == 2
    assert "Traceback" in ended.err
    assert "data.batch_size" in ended.err.splitlines()[-1]


@pytest.mark.slow
def test_a_run_that_fails_later_ends_with_exit_code_4_and_one_line(unet3d, small):
    ended = unet3d("train", *small, "optimizer.lr=1e30", "trainer.max_steps=20")
    assert ended.code == 4
    assert_one_line(ended.err, ["nan", "step", "lower optimizer.lr, or"])


@pytest.mark.slow
def test_a_step_that_cannot_fit_is_refused_before_it_starts_with_exit_code_3(unet3d, small):
    words = [word for word in small if not word.startswith("memory.")]
    size = "data.patch_size=[2048,2048,2048]"
    ended = unet3d("train", *words, size, "memory.if_too_large=error")
    assert ended.code == 3
    assert_one_line(ended.err, ["GiB", "data.patch_size", "data.batch_size"])

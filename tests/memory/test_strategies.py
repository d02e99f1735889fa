import pytest

from unet3d.commands.memory import list_faster_settings
from unet3d.errors import UsageError
from unet3d.machine import CUDA_CONTEXT_BYTES, Precision
from unet3d.memory import fit
from unet3d.memory.fit import (
    estimate_configured_step,
    list_leaner_strategies,
    resolve_strategy,
)

FULL_PRECISION = Precision("32", "32")
NAIVE = ["model=plain_small", "model.encoder=[4,8,8]", "model.decoder=[8,4]"]


def resolve(settings):
    return resolve_strategy(settings.step, FULL_PRECISION, cuda=False)


@pytest.mark.slow
def test_auto_selects_the_first_strategy_that_is_estimated_to_fit(composed, monkeypatch):
    overrides = ["data.patch_size=[64,64,64]", "model.width=16"]
    peaks = {
        name: estimate_configured_step(composed(*overrides, f"checkpointing={name}").step).allocated
        for name in ("fused", "lean", "leanest")
    }
    smallest = min(peaks, key=peaks.__getitem__)
    sizes = {"fused": 2**40, "lean": CUDA_CONTEXT_BYTES + peaks["lean"], smallest: 0}
    for strategy, available in sizes.items():
        monkeypatch.setattr(fit, "get_available_bytes", lambda device, n=available: n)
        settings = resolve(composed(*overrides, "checkpointing=auto"))
        assert settings.strategy == strategy
        assert "encoder_last" in settings.checkpointing.arguments


def test_auto_without_a_gpu_to_plan_for_names_the_choices(composed):
    settings = composed("checkpointing=auto", "trainer.accelerator=auto")
    with pytest.raises(UsageError, match=r"this machine has no GPU: .*fused, skips, lean, leanest"):
        estimate_configured_step(settings.step)


def test_a_network_without_fused_blocks_runs_as_plain_modules_and_others_as_configured(composed):
    assert resolve(composed("model=dynunet")).strategy == "none"
    assert resolve(composed(*NAIVE)).strategy == "none"
    assert resolve(composed()).strategy == "fused"
    settings = composed("checkpointing=lean")
    assert resolve(settings) is settings.step


@pytest.mark.parametrize(
    ("strategy", "leaner"),
    [
        ("none", ("fused", "skips", "lean", "leanest")),
        ("skips", ("lean", "leanest")),
        ("leanest", ()),
        ("blocks", ()),
        ("none compile=true", ()),
        ("none model=dynunet", ("blocks",)),
    ],
)
def test_leaner_strategies_follow_the_configured_one(composed, strategy, leaner):
    settings = composed(*f"checkpointing={strategy}".split())
    assert list_leaner_strategies(settings.step) == leaner


def test_a_run_on_a_gpu_with_room_changes_the_tiles_of_fused_blocks_and_records_graphs(composed):
    def list_changes(*words):
        return [*list_faster_settings(composed("trainer.accelerator=auto", *words))]

    assert list_changes() == ["checkpointing.tile_mib", "cuda_graph"]
    assert list_changes("trainer.cuda_graph=false") == ["checkpointing.tile_mib"]
    for words in (
        *(["trainer.accelerator=cpu"], ["checkpointing=leanest"], ["checkpointing=none"], NAIVE),
        *(["compile=true"], ["trainer.deterministic=true"], ["checkpointing.tile_mib=64"]),
    ):
        assert list_changes(*words) == []

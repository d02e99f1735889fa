import sys

from unet3d.triton_kernels import has_triton


def test_without_triton_each_kind_of_kernels_warns_once_and_says_what_to_do(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "triton", None)
    has_triton.cache_clear()
    try:
        assert [has_triton(kind) for kind in ("pooling", "loss", "pooling")] == [False] * 3
    finally:
        has_triton.cache_clear()
    first, second = caplog.messages
    assert first.startswith("Triton is not installed: the CUDA pooling kernels fall back to plain")
    assert "the CUDA loss kernels" in second
    assert second.endswith("install triton")

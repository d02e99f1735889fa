"""Compiled kernels lie in a folder of their user."""

import os
import stat

from unet3d.files import create_kernel_folder, set_compiler_caches


def test_a_cache_in_a_folder_of_another_user_has_the_name_of_ours(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert create_kernel_folder("cpp") == tmp_path / "cache" / "unet3d" / "cpp"
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    uid = os.geteuid()
    assert create_kernel_folder("cpp") == tmp_path / "cache" / f"unet3d-{uid}" / "cpp"


def test_compilers_keep_code_in_closed_folders_unless_a_variable_names_others(
    monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    environ = {"TRITON_CACHE_DIR": "/mine"}
    set_compiler_caches(environ)
    inductor = tmp_path / "unet3d" / "inductor"
    assert environ == {"TRITON_CACHE_DIR": "/mine", "TORCHINDUCTOR_CACHE_DIR": str(inductor)}
    assert stat.S_IMODE(inductor.stat().st_mode) == 0o700
    assert create_kernel_folder("inductor") == inductor

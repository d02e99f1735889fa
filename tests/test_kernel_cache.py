"""The folders of compiled kernels belong to one user."""

import os
import stat
from pathlib import Path

import pytest

from unet3d import kernel_cache
from unet3d.kernel_cache import create_private_folder, get_kernel_cache, set_compiler_caches


def test_a_cache_in_a_folder_of_another_user_has_the_name_of_ours(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert get_kernel_cache() == tmp_path / "cache" / "unet3d"
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    uid = os.geteuid()
    assert get_kernel_cache() == tmp_path / "cache" / f"unet3d-{uid}"


def test_a_new_folder_is_closed_to_others_and_one_of_others_is_refused(monkeypatch, tmp_path):
    folder = tmp_path / "a" / "kernels"
    create_private_folder(folder)
    create_private_folder(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for mode in (0o720, 0o702, 0o777):
        folder.chmod(mode)
        with pytest.raises(PermissionError, match="other users can write to"):
            create_private_folder(folder)
    folder.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(PermissionError, match="belongs to another user"):
        create_private_folder(folder)


def test_others_cannot_exchange_a_folder_that_was_checked(tmp_path):
    shared, folder = tmp_path / "shared", tmp_path / "shared" / "unet3d" / "cpp"
    folder.mkdir(mode=0o700, parents=True)
    shared.chmod(0o1777)  # as /tmp
    folder.parent.chmod(0o777)
    create_private_folder(folder)
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o755
    shared.chmod(0o777)
    with pytest.raises(PermissionError, match=r"other users can rename folders in .*shared:"):
        create_private_folder(folder)
    folder.rename(shared / "cpp")
    folder.parent.rename(tmp_path / "unet3d")
    link = tmp_path / "unet3d" / "linked"
    link.symlink_to(shared / "cpp")
    with pytest.raises(PermissionError, match=r"other users can rename folders in .*shared:"):
        create_private_folder(link)
    (tmp_path / "unet3d").rename(folder.parent)
    (shared / "cpp").rename(folder)
    shared.chmod(0o755)
    if os.geteuid() == 0:  # who alone can give folders away
        os.chown(folder.parent, 1, -1)
        with pytest.raises(PermissionError, match=r"unet3d belongs to another user"):
            create_private_folder(folder)


def test_compilers_keep_code_in_private_folders_unless_a_variable_names_others(
    monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    environ = {"TRITON_CACHE_DIR": "/mine"}
    set_compiler_caches(environ)
    inductor = tmp_path / "unet3d" / "inductor"
    assert environ == {
        "TRITON_CACHE_DIR": "/mine",
        "TORCHINDUCTOR_CACHE_DIR": str(inductor),
    }
    assert stat.S_IMODE(inductor.stat().st_mode) == 0o700
    environ = {"TRITON_HOME": "/mine", "TORCHINDUCTOR_CACHE_DIR": "/other"}
    set_compiler_caches(environ)
    assert "TRITON_CACHE_DIR" not in environ


def test_without_a_private_folder_compilers_get_a_temporary_one(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    open_to_others = tmp_path / "unet3d" / "triton"
    open_to_others.mkdir(parents=True)
    open_to_others.chmod(0o777)
    removed = []
    monkeypatch.setattr(kernel_cache.atexit, "register", lambda *args, **_: removed.append(args))
    environ = {"TORCHINDUCTOR_CACHE_DIR": "/other"}
    set_compiler_caches(environ)
    folder = Path(environ["TRITON_CACHE_DIR"])
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not folder.is_relative_to(tmp_path / "unet3d")
    assert f"other users can write to {open_to_others}" in caplog.text
    ((remove, created),) = removed
    remove(created)
    assert not folder.exists()

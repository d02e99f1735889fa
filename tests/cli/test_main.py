import subprocess
import sys

COMMAND = f"{sys.executable} -W ignore -m unet3d"


def test_python_m_unet3d_is_the_command():
    ended = subprocess.run([*COMMAND.split(), "trian"], capture_output=True, text=True)
    assert ended.returncode == 2
    assert "unknown command 'trian'; did you mean train?" in ended.stderr


def test_a_command_whose_output_nobody_reads_ends_quietly():
    shell = ["bash", "-c", f"{COMMAND} --help | true; {COMMAND} train --help | true"]
    ended = subprocess.run(shell, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")

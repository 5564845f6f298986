"""A process's directory is gone with it, or with the next one."""

import os
import subprocess
import sys

import psutil
import pytest

from infra.compute.scratch import scratch


def test_it_is_new_and_goes_also_when_the_block_fails(tmp_path):
    stale = tmp_path / "deep" / f"proxy-{os.getpid()}" / "file"  # of a process that had our id once
    stale.parent.mkdir(parents=True)
    stale.write_text("x")
    with pytest.raises(KeyError), scratch(tmp_path / "deep", "proxy") as own:
        assert own.name == f"proxy-{os.getpid()}" and not list(own.iterdir())
        (own / "file").write_text("x")
        raise KeyError
    assert not list((tmp_path / "deep").iterdir())


def test_only_directories_of_dead_processes_of_that_name_are_swept(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    assert not psutil.pid_exists(dead.pid)
    kept = {f"proxy-{os.getppid()}", "proxy-x", f"other-{dead.pid}"}
    for name in (*kept, f"proxy-{dead.pid}"):
        (tmp_path / name / "states").mkdir(parents=True)
    with scratch(tmp_path, "proxy") as own:
        assert {path.name for path in tmp_path.iterdir()} == kept | {own.name}
    assert {path.name for path in tmp_path.iterdir()} == kept

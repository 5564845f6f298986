"""`rollmill tenants ...` as a user types it, on a service that runs: what each command prints and does."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from infra.services.endpoints import S3Endpoint
from infra.store.objects import ObjectStore
from tests.command_line import Rollmill


@dataclass
class Commands:
    """Of one service."""

    rollmill: Rollmill
    service: str

    def good(self, command: str, *arguments: str) -> str:
        code, output = self.rollmill(*self._words(command, *arguments))
        assert code == 0, output
        return output

    def bad(self, command: str, *arguments: str) -> str:
        """The one line of an error."""
        code, output = self.rollmill(*self._words(command, *arguments))
        assert code == 2 and "Traceback" not in output, output
        (line,) = [line for line in output.splitlines() if line.startswith("error: ")]
        return line

    def watched(self, until: str, deadline_s: float = 120) -> tuple[int, str]:
        """`watch` on a terminal, interrupted as soon as it shows this; its exit code, and all that it wrote."""
        ours, theirs = pty.openpty()
        said = bytearray()

        def read() -> None:
            try:
                while some := os.read(ours, 65536):
                    said.extend(some)
            except OSError:  # so Linux says that nobody writes any more
                pass

        process = subprocess.Popen(
            self.rollmill.command(*self._words("watch")), env=self.rollmill.env | {"TERM": "xterm"}, stdin=theirs,
            stdout=theirs, stderr=theirs, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            end = time.monotonic() + deadline_s
            while until.encode() not in said:
                assert process.poll() is None and time.monotonic() < end, said.decode()
                time.sleep(0.1)
            process.send_signal(signal.SIGINT)
            code = process.wait(30)
            reader.join(10)
        finally:
            process.kill()
            os.close(ours)
        return code, said.decode()

    def _words(self, command: str, *arguments: str) -> tuple[str, ...]:
        return ("tenants", command, "lake", *arguments, "--set", f"name={self.service}")


def check_looking(commands: Commands, jobs: set[str]) -> None:
    """`list` and `watch`, while these jobs run."""
    listed = commands.good("list")
    assert all(re.search(rf"^ *{job} ", listed, re.MULTILINE) for job in jobs) and "cost share" in listed, listed
    rows = json.loads((told := commands.good("list", "--json"))[told.index("[") :])
    assert {row["job"] for row in rows} == jobs and all(row["steps"] == 2 for row in rows)
    code, shown = commands.watched(min(jobs))
    assert code == 0 and "Traceback" not in shown and "--resume" not in shown and max(jobs) in shown, shown


def check_orders(commands: Commands, job: dict[str, Any], file: Path) -> str:
    """From `submit` to `delete`; the id of the job, which the service deletes now."""
    file.write_text(json.dumps(job))
    id = f"{job['tenant']}/{job['name']}"
    assert f"{id} is waiting" in commands.good("submit", str(file))
    assert f"{id} is paused" in commands.good("pause", id)
    assert re.search(rf"^ *{id} +paused ", listed := commands.good("list"), re.MULTILINE), listed
    assert f"{id!r} is paused: pause is for" in commands.bad("pause", id)
    assert f"{id} is waiting" in commands.good("resume", id)
    assert re.search(rf"{id!r} is (waiting|running): delete is for", said := commands.bad("delete", id)), said
    assert f"{id} is cancelled" in commands.good("cancel", id)
    assert f"{id} is deleting" in commands.good("delete", id)
    assert "'nobody/lake'" in commands.bad("pause", "nobody/lake")
    return id


def check_report(commands: Commands, job: str, to: Path) -> None:
    said = commands.good("report", job, "--to", str(to))
    made = {path.name for path in to.iterdir()}
    assert made == {"reward.png", "timeline.png", "timeline.html", "report.json"} and all(n in said for n in made), said
    assert re.search(r"^ *2 ", said, re.MULTILINE), "the versions"


def check_credentials(commands: Commands, data_dir: Path, store: ObjectStore, tenant: str, other: str) -> None:
    """The keys that are printed read what is the tenant's, and not what is another one's."""
    here = commands.rollmill
    at_home = Commands(Rollmill(here.home, here.env | {"ROLLMILL_HOME": str(data_dir)}), commands.service)
    told = dict(re.findall(r"^export (\w+)=(\S+)$", at_home.good("credentials", tenant), re.MULTILINE))
    keys = ("AWS_ENDPOINT_URL_S3", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    client = S3Endpoint(*(told[key] for key in keys)).client(attempts=1)

    def get(key: str) -> bytes:
        return client.get_object(Bucket=store.bucket, Key=key)["Body"].read()

    own, end = f"{tenant}/lake/report/report.json", time.monotonic() + 20
    while True:
        try:
            assert get(own) == store.get(own)
            break
        except ClientError:  # the server reads its credentials a moment after it was told to
            assert time.monotonic() < end
            time.sleep(0.2)
    with pytest.raises(ClientError, match="AccessDenied"):
        get(f"{other}/lake/report/report.json")
    policy = json.loads(commands.good("credentials", tenant, "--policy"))
    assert f"arn:aws:s3:::{store.bucket}/{tenant}/*" in policy["Statement"][0]["Resource"]

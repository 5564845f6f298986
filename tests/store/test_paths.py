"""Paths that a user sees."""

from __future__ import annotations

import pandas as pd

from infra.store.buffer import SampleBuffer
from infra.store.objects import ObjectStore
from infra.store.paths import open_fs
from rl.config.infrastructure import StoreSection
from tests.store.samples import group


def test_pandas_reads_segments_by_path_and_sees_new_ones(
    section: StoreSection, store: ObjectStore, prefix: str
) -> None:
    files = open_fs(section)
    buffer = SampleBuffer(store, prefix)
    root = f"{section.bucket}/{prefix}"
    for seq in range(2):
        key = buffer.seal([group(seq)], "w1", seq).key
        assert files.ls(f"{root}groups/0000000000")[-1] == root + key, "no stale listing"
        frame = pd.read_parquet(root + key, filesystem=files)
        assert frame["ordinal"].tolist() == [seq, seq]

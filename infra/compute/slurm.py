"""A job of SLURM that can not hang the run. Needs the extra `slurm`.

Invariants: `sbatch` and `scancel` end within `start_s` or are ended; a submission that did not is failed by name; what
could not be cancelled is told, and does not hide how the run ended: its worker ends by itself without a scheduler.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from dask_jobqueue.slurm import SLURMJob
from distributed import Status

from infra.compute.punctual import Punctual

logger = logging.getLogger(__name__)


class EngineJob(Punctual, SLURMJob):
    """The library's own job, whose calls would wait for ever."""

    async def _late(self) -> str:
        return (
            f"pools: `{self.submit_command}` did not submit {self.name} within {self._start_s:g} s "
            f"(deadlines.start); `sinfo` tells whether SLURM answers, and `squeue --name {self.job_name}` whether "
            f"there is a job nevertheless: `scancel` it"
        )

    async def close(self) -> None:
        try:
            async with asyncio.timeout(self._start_s):
                await super().close()
        except TimeoutError:
            logger.error(  # Dask silences what is less
                "pools: `%s %s` did not end within %g s (deadlines.start); the job ends by itself, for its scheduler "
                "is gone, unless it still waits in SLURM's queue: then cancel it by hand",
                self.cancel_command,
                self.job_id,
                self._start_s,
            )
        self.status = Status.closed

    @staticmethod
    async def _call(cmd: list[str], *, shell: bool = False, **options: Any) -> str:
        """As the library's, but a cancelled one leaves no process behind."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*cmd, stdout=pipe, stderr=pipe, **options)
        try:
            out, err = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        if process.returncode != 0:
            raise RuntimeError(f"`{' '.join(cmd)}` exited with {process.returncode}: {err.decode() or out.decode()}")
        return out.decode()

"""An object store in memory, with the calls that the log and the directories make."""

from __future__ import annotations

from infra.store.errors import NotFound


class MemoryStore:
    """Create-if-absent is atomic because there is one interpreter lock."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.broken: Exception | None = None

    def get(self, key: str) -> bytes:
        if self.broken is not None:
            raise self.broken
        if key not in self.objects:
            raise NotFound("memory", key)
        return self.objects[key]

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self.get(key)[start : start + length]

    def exists(self, key: str) -> bool:
        return key in self.objects

    def put(self, key: str, body: bytes) -> None:
        self.objects[key] = body

    def create(self, key: str, body: bytes, nonce: str) -> bool:
        return self.objects.setdefault(key, body) is body

"""Tables as plain text."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[str] = ()) -> str:
    """Aligned columns under their names; those in `left` to the left, the others, as numbers are read, to the right."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(head))]
    placed = [
        "  ".join(
            cell.ljust(width) if name in left else cell.rjust(width)
            for name, cell, width in zip(head, line, widths, strict=True)
        ).rstrip()
        for line in lines
    ]
    return "\n".join([placed[0], "  ".join("-" * width for width in widths), *placed[1:]])

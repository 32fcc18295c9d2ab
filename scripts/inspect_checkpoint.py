"""Prints what a checkpoint holds, by part and by dtype.

python scripts/inspect_checkpoint.py FOLDER        checks every header first; exit 1 when something does not fit
python scripts/inspect_checkpoint.py config.json   the inventory that this config demands, no weights needed
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from di_jax.checkpoint.inventory import PARTS, STORED_DTYPES, TensorSpec, expected_inventory
from di_jax.checkpoint.reader import open_checkpoint
from di_jax.errors import UserError
from di_jax.model.config import ModelConfig, ModelConfigError


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="print a checkpoint's inventory by part and dtype")
    parser.add_argument("path", type=Path, help="checkpoint folder, or a config.json alone")
    path: Path = parser.parse_args(arguments).path
    try:
        if path.is_dir():
            with open_checkpoint(path) as reader:
                inventory = reader.inventory
                print(f"{path}: {len(reader.headers)} file(s); every name, dtype, shape and extent fits config.json")
                for family, present in (("mtp (draft stages)", reader.has_draft), ("vision", reader.has_vision)):
                    print(f"{family}: {'present' if present else 'absent'}")
        else:
            inventory = expected_inventory(ModelConfig.from_file(path))
            print(f"{path}: inventory that this config demands")
    except (UserError, ModelConfigError) as error:
        print(f"mismatch: {error}", file=sys.stderr)
        return 1
    print()
    print_table("part", PARTS, ((spec.part, spec) for spec in inventory.values()))
    print()
    print_table("dtype", STORED_DTYPES, ((spec.dtype, spec) for spec in inventory.values()))
    return 0


def print_table(title: str, groups: Iterable[str], specs: Iterable[tuple[str, TensorSpec]]) -> None:
    """Tensors and bytes per group, in the given order, empty groups left out, and the total."""
    rows = {group: [0, 0] for group in groups}
    for group, spec in specs:
        rows[group][0] += 1
        rows[group][1] += spec.nbytes
    total = [sum(row[column] for row in rows.values()) for column in (0, 1)]
    print(f"{title:<28} {'tensors':>9} {'bytes':>19} {'GiB':>9}")
    for name, (tensors, size) in [*rows.items(), ("total", total)]:
        if tensors:
            print(f"{name:<28} {tensors:>9,} {size:>19,} {size / 2**30:>9.2f}")


if __name__ == "__main__":
    sys.exit(main())

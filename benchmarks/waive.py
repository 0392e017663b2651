"""Sign that records still hold: ``python -m benchmarks.waive [REASON] [NAME ...]``.

`tests/test_records.py` fails for a record whose code has changed since it was measured, unless
`benchmarks/waivers.json` says why its numbers still hold. Without names, all records are signed of
which only the package's shared code changed; the rest is listed with the commands that measure it
again. A waiver is valid for one state of the code, and its reason covers all changes since the
measurement.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from datetime import datetime, timezone
from fnmatch import fnmatch

from benchmarks.records import (
    SHARED,
    WAIVERS,
    changed_parts,
    code_of,
    records,
    script_of,
    waivers,
)


def main() -> int:
    """Sign what the arguments name; return 1 if outdated records are left."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("reason", nargs="?", help="without it, outdated records are only listed")
    parser.add_argument("names", nargs="*", help="records, also as patterns: whatever has changed")
    arguments = parser.parse_args()
    signed = subprocess.check_output(["git", "config", "user.name"], text=True).strip()
    signatures, left = dict(waivers()), dict[str, set[str]]()
    for name, record in records().items():
        if record.get("code") == code_of(script_of(name)):
            signatures.pop(name, None)  # measured again
            continue
        changed = changed_parts(name)
        chosen = any(fnmatch(name, pattern) for pattern in arguments.names)
        chosen |= not arguments.names and changed <= set(SHARED)
        if not changed:
            continue
        if arguments.reason is None or not chosen:
            left[name] = changed
            continue
        signatures[name] = {
            "reason": arguments.reason,
            "signed": signed,
            "date": datetime.now(timezone.utc).date().isoformat(),
            "code": code_of(script_of(name)),
        }
    known = {name: signatures[name] for name in sorted(signatures) if name in records()}
    WAIVERS.write_text(json.dumps(known, indent=1) + "\n")
    for name, changed in left.items():
        module = ".".join(script_of(name).relative_to(WAIVERS.parents[1]).with_suffix("").parts)
        print(f"{name}: {', '.join(sorted(changed))}\n    python -m {module}")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())

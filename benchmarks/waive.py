"""Sign that records still hold after a change: ``python -m benchmarks.waive REASON NAME ...``.

``tests/test_records.py`` fails for a record whose code has another hash than when it was measured,
unless ``benchmarks/waivers.json`` has the reason why its numbers still hold. A waiver is
valid for one state of the code: the next change needs another measurement or another waiver.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from datetime import datetime, timezone
from typing import Any

from benchmarks.harness import RESULTS, ROOT, code_hash

WAIVERS = ROOT / "benchmarks" / "waivers.json"


def changed_code(record: dict[str, Any]) -> dict[str, str]:
    """Return the present hashes of the code that has changed since a record was measured.

    An empty hash marks what no longer exists.
    """
    now = {
        part: code_hash(ROOT / part) if (ROOT / part).exists() else ""
        for part in record.get("code", {"lightning_opt": ""})
    }
    return {part: value for part, value in now.items() if value != record.get("code", {}).get(part)}


def main() -> None:
    """Sign waivers for the named records, or for all whose code has changed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("reason")
    parser.add_argument("names", nargs="*", help="records without .json; default: all that changed")
    arguments = parser.parse_args()
    signed = subprocess.check_output(["git", "config", "user.name"], text=True).strip()
    waivers = json.loads(WAIVERS.read_text()) if WAIVERS.exists() else {}
    for file in sorted(RESULTS.glob("*.json")):
        changed = changed_code(json.loads(file.read_text()))
        if not changed:
            waivers.pop(file.stem, None)
        elif not arguments.names or file.stem in arguments.names:
            waivers[file.stem] = {
                "reason": arguments.reason,
                "signed": signed,
                "date": datetime.now(timezone.utc).date().isoformat(),
                "code": changed,
            }
    WAIVERS.write_text(json.dumps(waivers, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()

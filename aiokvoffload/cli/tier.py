"""`aiokvoffload tier`: look at the storage of a tier from outside."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence

from aiokvoffload.errors import ConfigurationError
from aiokvoffload.tiers.administration import StoredIdentity, TierAdministration, Verification
from aiokvoffload.tiers.opening import administer_tier


def run_tier(arguments: Sequence[str]) -> int:
    """Run `aiokvoffload tier` and return its exit status: 0 well, 1 if bad blocks were found."""
    parser = argparse.ArgumentParser(prog="aiokvoffload tier", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="WHAT")
    verify = commands.add_parser("verify", help="read every block and check every byte", allow_abbrev=False)
    verify.add_argument("--remove", action="store_true", help="remove the blocks that are not in order")
    stats = commands.add_parser("stats", help="what is stored, by identity", allow_abbrev=False)
    purge = commands.add_parser("purge", help="remove all blocks of all identities", allow_abbrev=False)
    for command in (verify, stats, purge):
        command.add_argument("url", metavar="URL", help="such as file:///var/cache/kv")
        command.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    try:
        administration = administer_tier(options.url)
        match options.command:
            case "verify":
                return _verify(administration, remove_bad=options.remove, is_json=options.json)
            case "stats":
                stored = administration.stored()
                print(json.dumps([dataclasses.asdict(one) for one in stored]) if options.json else stats_table(stored))
            case _:
                removed_count = administration.purge()
                print(json.dumps({"removed_blocks": removed_count}) if options.json else f"{removed_count} removed")
    except (ConfigurationError, OSError) as exc:
        parser.error(str(exc))
    return 0


def stats_table(stored: Sequence[StoredIdentity]) -> str:
    """Return what is stored as aligned lines."""
    lines = [f"{'blocks':>10} {'bytes':>18}  identity"]
    for one in stored:
        named = {name: value for name, value in one.description.items() if value and name != "fingerprint"}
        description = ", ".join(f"{name} {value}" for name, value in named.items()) or "not described"
        lines.append(f"{one.block_count:>10,} {one.used_bytes:>18,}  {one.name} ({description})")
    block_count, used_bytes = sum(one.block_count for one in stored), sum(one.used_bytes for one in stored)
    lines.append(f"{block_count:>10,} {used_bytes:>18,}  together")
    return "\n".join(lines)


def verification_lines(found: Verification) -> str:
    """Return what a verification has found, a line for each reason."""
    bad_count = sum(found.bad_by_reason.values())
    lines = [f"{found.good_blocks} good, {bad_count} bad, {found.removed_blocks} removed"]
    lines += [f"  {count} {reason}" for reason, count in sorted(found.bad_by_reason.items())]
    return "\n".join(lines)


def _verify(administration: TierAdministration, *, remove_bad: bool, is_json: bool) -> int:
    found = administration.verify(remove_bad=remove_bad)
    print(json.dumps(dataclasses.asdict(found)) if is_json else verification_lines(found))
    return 1 if found.bad_by_reason else 0

"""How a command line names groups: by their number in the table, or by conditions on settings.

`3` is the third row. `scheme=awc+topology=ring` is the one group of which both hold. A key may be written whole
(optimizer.lr) or short (lr, topology, scheme), a value as on the command line of a run.
"""

from __future__ import annotations

from collections.abc import Iterable

from tiny_llm.analysis.groups import Group, Report
from tiny_llm.analysis.keys import names_of, value_of
from tiny_llm.config.errors import UserError, nearest


def compared_groups(report: Report, text: str) -> tuple[Group, Group]:
    """Return the two groups of compare=A,B. Raises UserError."""
    argument = f"compare={text}"
    names = text.split(",")
    if len(names) != 2 or not all(names):
        raise UserError(
            f"{argument}: expected two groups A,B, each a number of the table or KEY=VALUE conditions joined by +, "
            "such as compare=1,3 or compare=topology=ring,topology=complete"
        )
    one, other = (_named_group(report, name, argument) for name in names)
    if one is other:
        raise UserError(f"{argument}: both name group {one.number}; name two groups")
    if not set(one.seeds) & set(other.seeds):
        raise UserError(
            f"{argument}: groups {one.number} and {other.number} share no seed (complete are "
            f"{_listed(one.seeds)} and {_listed(other.seeds)}); run both with the same runtime.seed"
        )
    return one, other


def baselines(report: Report, text: str) -> dict[int, Group]:
    """Return, by group number, the group with KEY=VALUE that is otherwise equal; a group without one is absent.

    Otherwise equal: in every varying key that both have, but for those that follow from KEY (a scheme brings its
    own tuned lr with it). The number of workers is no difference from a synchronous run. Raises UserError.
    """
    argument = f"baseline={text}"
    key, value = _condition(report, text, argument)
    if key not in report.keys:
        raise UserError(
            f"{argument}: {key} is the same in all runs; keys that vary are {_listed(report.keys)}"
        )
    bases = [group for group in report.groups if _equals(group, key, value)]
    if not bases:
        known = dict.fromkeys(
            value_of(group.settings, key) for group in report.groups if key in group.settings
        )
        raise UserError(f"{argument}: no complete run has this value; {key} is {_listed(known)} in the table")
    free = {key, *report.followers(key)}
    matches = {
        group.number: [base for base in bases if _alike(group, base, set(report.keys) - free)]
        for group in report.groups
    }
    return {number: found[0] for number, found in matches.items() if len(found) == 1}


def _alike(group: Group, base: Group, keys: set[str]) -> bool:
    one, other = group.settings, base.settings
    if "off" in (one.get("decentralized.scheme"), other.get("decentralized.scheme")):
        keys = keys - {"decentralized.num_models"}
    return all(value_of(one, key) == value_of(other, key) for key in keys if key in one and key in other)


def _named_group(report: Report, name: str, argument: str) -> Group:
    if name.isdecimal():
        found = [group for group in report.groups if group.number == int(name)]
    else:
        conditions = [_condition(report, condition, argument) for condition in name.split("+")]
        found = [group for group in report.groups if all(_equals(group, *one) for one in conditions)]
    if len(found) == 1:
        return found[0]
    if found:
        raise UserError(
            f"{argument}: {name} holds for the groups {_listed(group.number for group in found)}; "
            f"add conditions with + on {_listed(report.keys)}, or write a number"
        )
    numbers = _listed(group.number for group in report.groups)
    raise UserError(f"{argument}: no group with a complete run is {name}; groups are {numbers}")


def _condition(report: Report, text: str, argument: str) -> tuple[str, str]:
    """Return the whole key and the value of KEY=VALUE."""
    word, _, value = text.partition("=")
    if not value:
        raise UserError(
            f"{argument}: '{text}' is no number and no KEY=VALUE; keys that vary are {_listed(report.keys)}"
        )
    known = [*report.keys, *report.shared]
    named = [key for key in known if key == word] or [key for key in known if word in names_of(key)]
    named = [key for key in named if key in report.keys] or named
    if len(named) > 1:
        raise UserError(f"{argument}: '{word}' may be {_listed(named)}; write the key whole")
    if not named:
        near = nearest(word, [name for key in known for name in names_of(key)])
        raise UserError(
            f"{argument}: unknown key '{word}'{near or f'; keys that vary are {_listed(report.keys)}'}"
        )
    return named[0], value


def _equals(group: Group, key: str, value: str) -> bool:
    shown = value_of(group.settings, key)
    try:
        return shown == value or float(shown) == float(value)
    except ValueError:
        return False


def _listed(values: Iterable[object]) -> str:
    return ", ".join(str(value) for value in values) or "none"

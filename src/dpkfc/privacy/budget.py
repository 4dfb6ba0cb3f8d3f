"""The budget of one group of people: a file that each run on their data charges at its start.

A run charges all releases of its plan. The accountant composes them with the releases of all
earlier runs, and a run that would take the total above the budget is refused. A crash between
charge and start therefore counts too much, never too little. Nothing is given back: a ledger cannot
prove that a stopped run will never go on.

A run starts when the first private record is about to decide something. What is refused before,
for its settings, model, optimizer or a loss on public rows, charges nothing. From then on the
charge is on the disk, whatever follows. So no value of a record decides whether a run is charged,
and no release is ahead of its charge (`Ledger.begin`).
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import logging
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import scipy
import tomli_w

from dpkfc._checks import check_in_range, check_positive
from dpkfc.disk_sync import sync
from dpkfc.privacy.accounting import total_epsilon
from dpkfc.privacy.calibration import PlanBase
from dpkfc.privacy.events import compose, event_from_dict, event_to_dict
from dpkfc.privacy.ledger import BudgetExhausted, Ledger, Receipt, verify
from dpkfc.privacy.ledger_lines import Verified
from dpkfc.privacy.locks import take_lock
from dpkfc.privacy.quick_epsilon import quick_epsilon

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib
if TYPE_CHECKING:
    from dp_accounting import DpEvent

_log = logging.getLogger(__name__)
_HEAD = """\
# The privacy budget of one group of people, in all runs together. dpkfc adds a [[charge]] before
# each run starts. A charge that is deleted here is not undone: what was released stays released.

"""
_KEYS = {"people", "epsilon", "delta", "charge"}
# The noise that would fit is searched up to this factor, to this error, both as logarithms.
_MOST_LOG_FACTOR = math.log(64)
_TOLERANCE = 0.02


class BudgetError(ValueError):
    """A budget that cannot be read or written, or a run that it cannot count."""


@dataclass(frozen=True, kw_only=True)
class Charge:
    """One run in a budget; a forecast has no ledger.

    Attributes:
        ledger: name of its ledger.
        path: of its ledger, "" in memory.
        plan: hash of its plan.
        when: time of the charge.
        unit: whom its plan protects.
        neighbouring_relation: of its plan.
        releases: how often its event is counted; 1 where it has several kinds of releases.
        event: of one release, as JSON; of all kinds together where there are several.
        epsilon: ε of this run alone, at the budget's δ.
        before, after: total ε without and with this run, at the budget's δ.
        released, head: of the ledger, when the run was last opened or closed.
    """

    ledger: str = ""
    path: str = ""
    plan: str
    when: str
    unit: str
    neighbouring_relation: str
    releases: int
    event: str
    epsilon: float
    before: float
    after: float
    released: int = 0
    head: str = ""

    @property
    def cost(self) -> tuple[DpEvent, int]:
        """The event of a release, and the number of releases."""
        return event_from_dict(json.loads(self.event)), self.releases


class Budget:
    """A file that counts all runs on the data of the same people.

    Args:
        path: a TOML file; begun where it does not exist and `epsilon` and `delta` are given.
        epsilon: ε of all runs together. None takes the file's.
        delta: δ of all runs together. None takes the file's.
        people: whom the budget is about; "" takes the file's entry, for a new file its name.

    Raises:
        BudgetError: no budget, a damaged one, or one with another ε, δ or other people.
        ValueError: ε that is not positive, δ outside (0, 1).

    Guarantee: The plans of all runs that were charged cost at most (ε, δ) together. Runs that name
        no budget, or another one, are not counted.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        epsilon: float | None = None,
        delta: float | None = None,
        people: str = "",
    ) -> None:
        self.path = Path(path).expanduser().resolve()
        if epsilon is not None:
            check_positive("epsilon", epsilon)
        if delta is not None:
            check_in_range("delta", delta, "(0, 1)")
        if epsilon is not None and delta is not None:
            self._begin(epsilon, delta, people)
        state = self._read()
        stated = {"epsilon": epsilon, "delta": delta, "people": people or None}
        known = {"epsilon": state.epsilon, "delta": state.delta, "people": state.people}
        for name, value in stated.items():
            if value is not None and value != known[name]:
                raise BudgetError(
                    f"the budget {self.path.name} has {name} = {known[name]!r}, not {value!r};"
                    " leave it out, or name another file"
                )
        self.epsilon = state.epsilon
        self.delta = state.delta
        self.people = state.people

    @property
    def charges(self) -> tuple[Charge, ...]:
        """All runs so far, in order."""
        return self._read().charges

    @property
    def spent(self) -> float:
        """Total ε of all runs so far, at δ."""
        return total_epsilon([charge.cost for charge in self.charges], self.delta)

    def check(self, plan: PlanBase, releases: int | None) -> Receipt:
        """Return what a new run would be charged, and write nothing.

        Args:
            plan: of the run.
            releases: that its plan allows; a plan without an end is refused.

        Raises:
            BudgetError: a run that this budget cannot count.
            BudgetExhausted: the run does not fit.
        """
        return self._receipt(self._price(self._read(), plan, releases))

    def charge_on_begin(self, plan: PlanBase, ledger: Ledger) -> None:
        """Check that a run fits, and let its ledger charge it when the run begins.

        A run that was charged before begins at once.

        Args:
            plan: of the run.
            ledger: of the run, open; abandoned if the run is refused.

        Raises:
            BudgetError, BudgetExhausted: as `check`.
        """
        ledger.on_begin = functools.partial(self.charge, plan)
        try:
            if _find_charge(self._read(), ledger, _place_of(ledger)) is None:
                self.check(plan, ledger.max_releases)
            else:
                ledger.begin()
        except BaseException:
            ledger.abandon()
            raise

    def charge(self, plan: PlanBase, ledger: Ledger) -> Receipt:
        """Charge a whole plan once for each ledger. When this returns, the disk has the charge.

        The charge follows the ledger: it notes the last release when the run begins and ends.

        Args:
            plan: of the run.
            ledger: of the run, open. A run that goes on with its ledger is not charged again; one
                that goes on with a copy, a moved file or an earlier state of it is.

        Raises:
            BudgetError: a run that this budget cannot count, or a file that cannot be written.
            BudgetExhausted: the run does not fit; nothing was written.
        """
        path = _place_of(ledger)
        with _locked(self.path):
            state = self._read()
            number = _find_charge(state, ledger, path)
            if number is not None:
                ledger.on_end = functools.partial(self._record, number)
                return self._receipt(self._update(state, number, ledger))
            if any(charge.ledger == ledger.id for charge in state.charges):
                _log.warning(
                    "%s was charged at another path or in a later state, and is charged again; if"
                    " its file was moved: dpkfc budget %s --moved OLD NEW",
                    ledger.name,
                    self.path.name,
                )
            charge = replace(
                self._price(state, plan, ledger.max_releases),
                ledger=ledger.id,
                path=path,
                released=ledger.count,
                head=ledger.head,
            )
            row = tomli_w.dumps({"charge": [asdict(charge)]})
            _replace(self.path, f"{state.text}\n{row}")
        ledger.on_end = functools.partial(self._record, len(state.charges))
        return self._receipt(charge)

    def move(self, old: str | os.PathLike[str], new: str | os.PathLike[str]) -> None:
        """Note that the file of a charged ledger was moved, so that it is not charged again.

        Args:
            old: where the ledger was when it was charged.
            new: where it is.

        Raises:
            BudgetError: the old file exists, or no charge of this ledger has that path.
            LedgerError: the new file is not a valid ledger.
        """
        if os.path.exists(old):
            raise BudgetError(
                f"{Path(old).name} is still there, and a copy is a run of its own; delete one of"
                " them before --moved"
            )
        ledger = verify(new)
        before = str(Path(old).resolve())
        with _locked(self.path):
            state = self._read()
            number = _find_charge(state, ledger, before)
            if number is None:
                raise BudgetError(
                    f"no charge of {Path(new).name} has the path {Path(old).name}; dpkfc budget"
                    f" {self.path.name} shows the paths"
                )
            path = str(Path(new).resolve())
            _replace(self.path, _edit(state, number, replace(state.charges[number], path=path)))

    def _record(self, number: int, ledger: Ledger) -> None:
        """Note how far the ledger of a charge has come; no run fails where that cannot be."""
        try:
            with _locked(self.path):
                state = self._read()
                if [charge.ledger for charge in state.charges[number : number + 1]] == [ledger.id]:
                    self._update(state, number, ledger)
        except (BudgetError, OSError) as error:
            _log.warning("the budget does not know the end of %s: %s", ledger.name, error)

    def _update(self, state: _State, number: int, ledger: Ledger) -> Charge:
        """Write into a charge how far its ledger has come, and return the charge."""
        known = state.charges[number]
        charge = replace(known, released=ledger.count, head=ledger.head)
        if charge == known or charge.released < known.released:
            return known
        _replace(self.path, _edit(state, number, charge))
        return charge

    def _begin(self, epsilon: float, delta: float, people: str) -> None:
        """Write a new file if it is missing."""
        if self.path.exists():
            return
        people = people or self.path.stem
        head = {"people": people, "epsilon": float(epsilon), "delta": float(delta)}
        with _locked(self.path):
            if not self.path.exists():
                _replace(self.path, _HEAD + tomli_w.dumps(head))

    def _read(self) -> _State:
        try:
            return _parse(self.path.read_text("utf-8"), self.path.name)
        except FileNotFoundError:
            raise BudgetError(
                f"the budget {self.path} does not exist; create it:"
                f" dpkfc budget {quote(self.path.name)} --epsilon 3 --delta 1e-6"
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not a text"
            raise BudgetError(
                f"the budget {self.path.name} cannot be read ({reason}); name another file"
            ) from None

    def _price(self, state: _State, plan: PlanBase, releases: int | None) -> Charge:
        """Return the charge of a run that fits."""
        if releases is None:
            raise BudgetError(
                "a budget counts runs with a planned end, and make_private plans no end; use"
                " make_private_with_epsilon"
            )
        unit = unit_of(plan.privacy_unit)
        self._check_countable(state, plan, unit)
        costs = [charge.cost for charge in state.charges]
        extra = [(kind.event, kind.count) for kind in plan.extra_releases]
        own = compose([(plan.event, plan.count_events(releases)), *extra])
        before = total_epsilon(costs, state.delta)
        after = total_epsilon([*costs, own], state.delta)
        if not after <= state.epsilon:
            fitting = _find_fitting_epsilon(costs, plan.delta, own, state)
            advice = "name another budget"
            if fitting:
                advice = f"plan for ε = {fitting:g}, or {advice}"
            left = max(0.0, state.epsilon - before)
            raise BudgetExhausted(
                f"the budget {self.path.name} has ε = {left:.3g} of {state.epsilon:g} left, this"
                f" run takes the total to {after:.4g} at δ = {state.delta:g}; {advice}"
            )
        now = datetime.datetime.now(datetime.timezone.utc)
        return Charge(
            plan=plan.hash,
            when=now.isoformat(timespec="seconds"),
            unit=unit,
            neighbouring_relation=plan.neighbouring_relation,
            releases=own[1],
            event=json.dumps(event_to_dict(own[0])),
            epsilon=total_epsilon([own], state.delta),
            before=before,
            after=after,
        )

    def _check_countable(self, state: _State, plan: PlanBase, unit: str) -> None:
        if plan.caveats:
            raise BudgetError(
                f"the budget {self.path.name} counts certified plans alone. {plan.caveats[0]}"
            )
        if not state.charges:
            return
        first = state.charges[0]
        relation = plan.neighbouring_relation
        for known, wanted in ((first.unit, unit), (first.neighbouring_relation, relation)):
            if known != wanted:
                raise BudgetError(
                    f"the budget {self.path.name} counts {known}, this plan has {wanted}:"
                    " their ε do not add up; name another budget"
                )

    def _receipt(self, charge: Charge) -> Receipt:
        return Receipt(
            people=self.people,
            epsilon=self.epsilon,
            delta=self.delta,
            before=charge.before,
            after=charge.after,
        )


def unit_of(text: str) -> str:
    """Return whom a plan protects, without how many of their records count in a step."""
    return text.split(" (", maxsplit=1)[0]


def _find_fitting_epsilon(
    costs: Sequence[tuple[DpEvent, int]],
    delta: float,
    planned: tuple[DpEvent, int],
    state: _State,
) -> float:
    """Return ε of the plan with more noise that fits, rounded down to two digits; 0 for none."""
    event, releases = planned

    def excess(log_factor: float) -> float:
        own = (_scale_noise(event, math.exp(log_factor)), releases)
        quick = quick_epsilon([*costs, own], state.delta)
        if quick is None:
            return total_epsilon([*costs, own], state.delta) - state.epsilon
        return quick.value - state.epsilon

    is_spent = total_epsilon(costs, state.delta) >= state.epsilon
    if is_spent or excess(_MOST_LOG_FACTOR) > 0:
        return 0.0
    root = 0.0
    if excess(root) > 0:
        root = scipy.optimize.brentq(excess, root, _MOST_LOG_FACTOR, xtol=_TOLERANCE)
    louder = _scale_noise(event, math.exp(root + _TOLERANCE))
    epsilon = total_epsilon([(louder, releases)], delta)
    scale = 10.0 ** (math.floor(math.log10(epsilon)) - 1)
    return float(f"{math.floor(epsilon / scale) * scale:.2g}")


def _scale_noise(event: DpEvent, factor: float) -> DpEvent:
    """Return the event with a larger noise multiplier."""

    def scale(value: Any) -> Any:
        if isinstance(value, Mapping):
            changed = {name: scale(inner) for name, inner in value.items()}
            if "noise_multiplier" in changed:
                changed["noise_multiplier"] *= factor
            return changed
        return [scale(inner) for inner in value] if isinstance(value, list) else value

    return event_from_dict(scale(event_to_dict(event)))


def _find_charge(state: _State, ledger: Ledger | Verified, path: str) -> int | None:
    """Return the number of the charge that pays for a ledger, None if nothing does.

    A charge pays for one file, which still has the last head that the charge knows.

    Args:
        state: of the budget.
        ledger: as it is.
        path: of its file, when it was charged.
    """
    paid = [
        (charge.released, number)
        for number, charge in enumerate(state.charges)
        if charge.ledger == ledger.id
        and ledger.contains(charge.released, charge.head)
        and _is_same_file(charge.path, path)
    ]
    return max(paid)[1] if paid else None


def _place_of(ledger: Ledger) -> str:
    return "" if ledger.place is None else str(ledger.place.resolve())


def _is_same_file(one: str, other: str) -> bool:
    both_exist = os.path.exists(one) and os.path.exists(other)
    return one == other or (both_exist and os.path.samefile(one, other))


# -- the file ----


@dataclass(frozen=True, kw_only=True)
class _State:
    """The content of a file."""

    text: str
    people: str
    epsilon: float
    delta: float
    charges: tuple[Charge, ...]


def _parse(text: str, name: str) -> _State:
    """Return what a file says.

    Raises:
        BudgetError: it is damaged.
    """
    try:
        content = tomllib.loads(text)
        unknown = sorted(set(content) - _KEYS)
        if unknown:
            raise ValueError(f"unknown key {unknown[0]!r}")
        charges = tuple(_read_charge(row) for row in content.get("charge", []))
        epsilon, delta = content["epsilon"], content["delta"]
        check_positive("epsilon", epsilon)
        check_in_range("delta", delta, "(0, 1)")
        people = str(content.get("people") or Path(name).stem)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise BudgetError(
            f"the budget {name} is damaged ({reason[:60]}); put back a copy of it"
        ) from None
    if not text.endswith("\n"):
        text += "\n"
    return _State(
        text=text,
        people=people,
        epsilon=float(epsilon),
        delta=float(delta),
        charges=charges,
    )


def _read_charge(row: Mapping[str, Any]) -> Charge:
    for known in fields(Charge):
        value = row[known.name]
        kind = str(known.type)
        is_number = isinstance(value, (int, float) if kind == "float" else int)
        is_right = isinstance(value, str) if kind == "str" else is_number
        if not is_right or isinstance(value, bool):
            raise ValueError(f"{known.name} of a charge is {value!r}")
    charge = Charge(**{known.name: row[known.name] for known in fields(Charge)})
    if min(charge.releases, charge.released) < 0:
        raise ValueError("a charge of fewer than 0 releases")
    _ = charge.cost
    return charge


def _edit(state: _State, number: int, charge: Charge) -> str:
    """Return the text of a file with other last entries in a charge; what people wrote stays.

    Raises:
        BudgetError: the charges are not written as this library writes them.
    """
    head, *charges = re.split(r"(?m)^(?=\[\[charge\]\])", state.text)
    if len(charges) == len(state.charges):
        kept = re.sub(r"(?m)^(path|released|head) = .*\n", "", charges[number])
        own = {"path": charge.path, "released": charge.released, "head": charge.head}
        charges[number] = kept.replace("\n", "\n" + tomli_w.dumps(own), 1)
    text = "".join([head, *charges])
    expected = list(state.charges)
    expected[number] = charge
    if list(_parse(text, "").charges) != expected:
        raise BudgetError("a [[charge]] of the budget was rewritten by hand; put back a copy of it")
    return text


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other processes from charging; wait for one that does."""
    try:
        lock = take_lock(path, wait=True)
    except (FileNotFoundError, PermissionError) as error:
        raise _unwritable(path, error) from None
    except OSError as error:
        raise BudgetError(
            f"the budget {path.name} cannot be locked ({error.strerror}), so two runs could spend"
            " it twice; put it on another disk"
        ) from None
    try:
        yield
    finally:
        lock.release()


def _replace(path: Path, text: str) -> None:
    """Put a new content in place; a crash leaves the old one or the new one."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(text, "utf-8")
        sync(part)
        if path.exists():
            # A file that may not be written may not be replaced.
            path.open("r+b").close()
            os.chmod(part, os.stat(path).st_mode & 0o777)
        os.replace(part, path)
        sync(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError) -> BudgetError:
    return BudgetError(
        f"the budget {path.name} cannot be written ({error.strerror}); make room, or change the"
        " rights of the file and its folder"
    )

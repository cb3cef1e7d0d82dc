"""The phrases and words that `word_problems` writes its questions with."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Phrase:
    """What one phrase says and does to the running total: `total op number`, `~` being `number - total`.

    op: one of `+ - * / ~`, or `=` for none. constant: the number where the words imply it ("half").
    heldout: never said in training.
    """

    text: str
    op: str
    constant: int | None
    heldout: bool


@dataclass(frozen=True)
class Domain:
    """Phrases that go together. A start's first number is {a}; every other phrase's number is {b}."""

    starts: tuple[Phrase, ...]
    events: tuple[Phrase, ...]
    ends: tuple[Phrase, ...]


def _domain(starts: str, events: str, ends: str) -> Domain:
    return Domain(_phrases(starts), _phrases(events), _phrases(ends))


def _phrases(table: str) -> tuple[Phrase, ...]:
    """One phrase a line: `?` where it is held out, the operation with its constant if any, the words."""
    return tuple(
        Phrase(words, op, int(constant) if constant else None, bool(held))
        for held, op, constant, words in re.findall(r"^(\??)([-=+*/~])(\d*) (.+)$", table, re.MULTILINE)
    )


def each(words: str) -> tuple[str, ...]:
    """The words of a text."""
    return tuple(words.split())


THINGS = _domain(
    """
= {n} has {a} {o}.
= {n} starts the day with {a} {o}.
= {n} finds {a} {o} {p}.
= {n} collects {o} and has {a} of them.
= On Monday {n} counts {a} {o}.
= In the morning {n} has {a} {o}.
+ {n} has {a} red {o} and {b} blue {o}.
+ {n} finds {a} {o} on Monday and {b} {o} on Tuesday.
+ {n} has {a} old {o} and {b} new {o}.
* {n} has {a} {k} with {b} {o} in each.
* {n} buys {a} {k} of {b} {o} each.
* {n} puts {b} {o} in each of {a} {k}.
- {n} had {a} {o} but lost {b} of them.
- {n} bought {a} {o} and sold {b} of them.
?= On Tuesday {n} has {a} {o}.
?= {n} buys {a} {o} {p}.
?+ {n} buys {a} small {o} and {b} big {o}.
?* {n} finds {a} {k} with {b} {o} in each.
?- {n} had {a} {o} but sold {b} of them.
""",
    """
+ {n} buys {b} more {o}.
+ {m} gives {n} {b} {o}.
+ Then {n} finds {b} more {o} {p}.
+ {n} gets {b} new {o} from {m}.
+ Later {n} receives another {b} {o}.
+ The next day {n} collects {b} {o}.
+ {m} brings {b} more {o} for {n}.
+ After that, {n} picks up {b} {o}.
- {n} gives {b} {o} to {m}.
- {n} loses {b} {o} {p}.
- {n} sells {b} of the {o}.
- Then {b} of the {o} break.
- {m} takes {b} {o} away.
- After that, {n} throws away {b} {o}.
- Later {n} uses {b} of them.
- The next day {n} hands {b} {o} to {m}.
*2 Then {n} doubles the number of {o}.
*2 Soon {n} has twice as many {o}.
*3 Soon {n} has three times as many {o}.
/2 {n} gives half of the {o} to {m}.
/2 Then {n} loses half of them.
?+ Then {m} gives {n} {b} more {o}.
?+ Later {n} buys another {b} {o} {p}.
?+ The next day {n} finds {b} {o}.
?- Then {n} gives away {b} of the {o}.
?- Later {m} takes {b} of them.
?- After that, {n} sells {b} {o} to {m}.
?*2 Later {n} has twice as many {o}.
?/2 The next day {n} sells half of the {o}.
""",
    """
= How many {o} does {n} have now?
= How many {o} does {n} have?
= How many {o} are there in the end?
= What is the number of {o} that {n} has at the end?
+ {m} has {b} {o}. How many {o} do {n} and {m} have together?
+ {m} has {b} more {o} than {n}. How many {o} does {m} have?
- {m} has {b} fewer {o} than {n}. How many {o} does {m} have?
- {m} has {b} {o}. How many more {o} does {n} have than {m}?
- If {b} of them are red, how many are not red?
* {m} has {b} times as many {o} as {n}. How many {o} does {m} have?
* Each of the {o} costs {b} dollars. How many dollars do they cost in all?
/ {n} shares the {o} equally among {b} friends. How many {o} does each friend get?
/ {n} packs the {o} into {k} of {b}. How many {k} does {n} need?
/ {n} puts the same number of {o} in each of {b} {k}. How many {o} are in each?
/2 {m} has half as many {o} as {n}. How many {o} does {m} have?
~ {n} wants {b} {o} in all. How many more {o} does {n} need?
?= How many {o} does {n} have at the end?
?= What is the number of {o} now?
?+ {m} has {b} more {o}. How many {o} do they have together?
?- {m} has {b} fewer than {n}. How many {o} is that?
?* {m} has {b} times as many. How many {o} does {m} have?
?/ {n} shares them equally among {b} children. How many {o} does each child get?
?/ {n} packs all of them into {k} of {b} {o}. How many {k} are there?
?~ {n} needs {b} {o} in all. How many more {o} are missing?
""",
)

PLACES = _domain(
    """
= There are {a} {o} {p}.
= {n} counts {a} {o} {p}.
= A shop has {a} {o}.
= In the morning there are {a} {o} {p}.
+ There are {a} white {o} and {b} black {o} {p}.
+ A shop has {a} {o} inside and {b} {o} outside.
* There are {a} rows of {b} {o} {p}.
* There are {a} {k} {p}, each with {b} {o}.
* {n} sees {a} {k} with {b} {o} in each.
- Of {a} {o} {p}, {b} are broken and are thrown away.
?= On Monday there are {a} {o} {p}.
?= A shop starts the day with {a} {o}.
?* {n} counts {a} rows of {b} {o} {p}.
?+ There are {a} red {o} and {b} white {o} {p}.
""",
    """
+ {b} more {o} are brought in.
+ {n} adds {b} {o}.
+ Then {b} new {o} arrive.
+ A truck delivers another {b} {o}.
+ Later {n} puts {b} more {o} there.
- {b} of the {o} are taken away.
- {n} removes {b} {o}.
- Then {b} {o} are sold.
- A truck takes away {b} of them.
- Later {n} carries {b} {o} home.
*2 Overnight the number of {o} doubles.
*3 Then the number of {o} triples.
/2 Half of the {o} are sold.
/2 Then half of them are removed.
?+ Later {b} more {o} arrive.
?+ Then {n} brings in another {b} {o}.
?- Later {b} of the {o} are sold.
?- Then {n} takes away {b} of them.
?*2 Later the number of {o} doubles.
?/2 Then half of the {o} are taken away.
""",
    """
= How many {o} are there now?
= How many {o} are left?
= How many {o} are {p} in the end?
+ There are also {b} {o} in the cellar. How many {o} are there in all?
- If {b} of the {o} are green, how many are not green?
* Each of the {o} weighs {b} pounds. How many pounds do they weigh together?
/ They are put into {b} equal groups. How many {o} are in each group?
/ {n} arranges them in rows of {b}. How many rows are there?
~ There is room for {b} {o}. How many more {o} can be added?
?= How many {o} are there in the end?
?- If {b} of them are broken, how many {o} are not broken?
?/ {n} puts them into {b} equal rows. How many {o} are in each row?
?* Each of them weighs {b} pounds. How many pounds is that in all?
?~ There is room for {b} of them. How many more can {n} add?
""",
)

MONEY = _domain(
    """
= {n} has {a} {c}.
= {n} has saved {a} {c}.
= {n} starts the week with {a} {c}.
= There are {a} {c} in the wallet of {n}.
+ {n} has {a} {c} at home and {b} {c} in the bank.
+ {n} earns {a} {c} on Monday and {b} {c} on Tuesday.
* {n} earns {a} {c} each day for {b} days.
* {n} works {a} hours for {b} {c} an hour.
* {n} sells {a} {o} for {b} {c} each.
- {n} had {a} {c} and paid {b} {c} for a {t}.
?= {n} has earned {a} {c}.
?* {n} saves {a} {c} each day for {b} days.
?* {n} works {a} days for {b} {c} a day.
?- {n} had {a} {c} and spent {b} {c} on a {t}.
""",
    """
+ {n} earns {b} {c} more.
+ {m} pays {n} {b} {c}.
+ Then {n} finds {b} {c} in a coat.
+ {n} sells a {t} for {b} {c}.
+ Later {n} wins {b} {c}.
+ A friend gives {n} {b} {c}.
- {n} spends {b} {c} on a {t}.
- {n} buys a {t} for {b} {c}.
- Then {n} pays {b} {c} for lunch.
- {n} lends {b} {c} to {m}.
- Later {n} gives {b} {c} to {m}.
- A {t} costs {n} {b} {c}.
*2 Then {n} doubles the money.
/2 {n} spends half of the money.
/2 Then {n} gives half of the money to {m}.
?+ Then {m} gives {n} {b} {c}.
?+ Later {n} earns another {b} {c}.
?- Then {n} buys a {t} for {b} {c}.
?- Later {n} spends {b} {c} on lunch.
?/2 Later {n} pays half of the money for a {t}.
""",
    """
= How many {c} does {n} have now?
= How many {c} does {n} have left?
= How much money does {n} have in the end?
+ {m} has {b} {c} more than {n}. How many {c} does {m} have?
+ {m} has {b} {c}. How many {c} do they have together?
- {m} has {b} {c} less than {n}. How many {c} does {m} have?
* {m} has {b} times as much money as {n}. How many {c} does {m} have?
/ {n} shares the money equally among {b} people. How many {c} does each person get?
/ Each {t} costs {b} {c}. How many can {n} buy?
~ A {t} costs {b} {c}. How many more {c} does {n} need?
~ {n} is saving for a {t} that costs {b} {c}. How many {c} are missing?
?= How much money does {n} have left?
?+ {m} has {b} {c} more. How many {c} does {m} have?
?/ {n} shares the money equally among {b} friends. How much does each friend get?
?~ {n} wants a {t} that costs {b} {c}. How many more {c} does {n} need?
""",
)

PEOPLE = _domain(
    """
= A {v} leaves with {a} passengers.
= There are {a} people on a {v}.
= A {v} carries {a} people.
+ A {v} has {a} adults and {b} children on board.
* A {v} has {a} cars with {b} passengers in each.
* There are {a} rows with {b} people in each on a {v}.
?= A {v} starts with {a} people on board.
?+ There are {a} adults and {b} children on a {v}.
?* A {v} carries {a} groups with {b} people in each.
""",
    """
+ At the first stop {b} people get on.
+ Then {b} more passengers get on.
+ Another {b} people board.
+ At the station {b} children join them.
- At the next stop {b} people get off.
- Then {b} passengers leave.
- At the harbour {b} of them get off.
- Later {b} people walk away.
/2 At the market half of the people get off.
*2 At the school the number of passengers doubles.
?+ At the next stop {b} more people get on.
?+ Later {b} passengers board.
?- At the station {b} people get off.
?- Then {b} of them leave.
""",
    """
= How many people are on board now?
= How many passengers are on the {v} at the end?
- If {b} of them are asleep, how many are awake?
* Each passenger pays {b} dollars. How many dollars is that in all?
/ They form groups of {b}. How many groups are there?
/ They sit in {b} equal rows. How many people are in each row?
~ The {v} has {b} seats. How many seats are empty?
?= How many people are on the {v} now?
?* Each of them pays {b} dollars. How many dollars do they pay in all?
?/ They form {b} equal groups. How many people are in each group?
""",
)

WORK = _domain(
    """
= {n} {does} {a} {w} on Monday.
= In the morning {n} {does} {a} {w}.
+ {n} {does} {a} {w} in the morning and {b} {w} in the evening.
* {n} {does} {a} {w} each day for {b} days.
* For {a} hours {n} {does} {b} {w} an hour.
* {n} and {m} have {a} helpers, and each of them {does} {b} {w}.
?= On the first day {n} {does} {a} {w}.
?* For {a} days {n} {does} {b} {w} a day.
?+ {n} {does} {a} {w} on Monday and {b} {w} on Tuesday.
""",
    """
+ The next day {n} {does} {b} {w}.
+ Then {n} {does} {b} more {w}.
+ On Sunday {n} {does} another {b} {w}.
+ {m} helps and {does} {b} {w}.
- {b} of the {w} do not count.
- But {b} of them must be taken off the list.
*2 {m} {does} the same number of {w}, which doubles the total.
?+ Later {n} {does} another {b} {w}.
?+ The next day {m} helps and {does} {b} more {w}.
?- But {b} of the {w} must be taken off.
""",
    """
= How many {w} is that in all?
= How many {w} are there on the list in the end?
+ {m} {does} {b} more than that. How many {w} does {m} have?
- {m} {does} {b} fewer than that. How many {w} does {m} have?
* {n} gets {b} dollars for each. How many dollars does {n} get?
/ They are shared equally among {b} people. How many {w} does each person get?
~ The plan is {b} {w}. How many {w} are still to do?
?= How many {w} is that in the end?
?* For each of them {n} gets {b} dollars. How many dollars is that in all?
?~ The plan is {b} {w} in all. How many more {w} are needed?
""",
)

DOMAINS = (THINGS, PLACES, MONEY, PEOPLE, WORK)

NAMES = each("""
    Ada Alan Alice Amir Anna Ben Carla Chen Clara Daniel Diego Elena Emma Eva Felix Finn Grace Hana Hugo
    Ida Iris Ivan Jack James John Julia Kai Kofi Lara Lena Leo Lily Lucas Luna Maria Mary Max Maya Mia
    Mila Nina Noah Nora Olga Oliver Omar Oscar Paul Peter Priya Ravi Rosa Ruth Sam Sara Sofia Sven Tara
    Tom Uma Vera Victor Wei Yara Zoe
""")
OBJECTS = each("""
    apples bags balls balloons bananas beads bells books bottles bowls bricks brushes buttons cakes
    candles candies cards carrots chairs coins cookies cups dolls eggs flowers forks glasses grapes hats
    kites lamps leaves lemons magnets marbles mugs nails notebooks nuts oranges pears pencils pens pies
    plates plums postcards potatoes ribbons ropes rocks roses seeds shells shirts socks spoons stamps
    stickers stones tickets toys tomatoes tulips
""")
CONTAINERS = each("baskets boxes buckets cartons cases crates drawers jars packs sacks trays tins")
PLACE_NAMES = each(
    "attic barn field forest garden hall house kitchen library market park room school store yard"
)
CURRENCIES = each("dollars euros pounds coins")
PURCHASES = each(
    "bicycle book camera cap clock coat game guitar hat jacket kite lamp phone radio shirt ticket toy"
)
VEHICLES = each("bus train tram ferry boat ship plane")
WORKS = tuple(
    (pair.split("/")[0], pair.split("/")[1])
    for pair in each("""
        reads/pages bakes/cakes plants/trees paints/walls writes/letters runs/laps folds/shirts washes/plates
        makes/toys solves/puzzles draws/pictures picks/apples repairs/clocks builds/chairs sews/hats
    """)
)
"""What someone does, and to what."""

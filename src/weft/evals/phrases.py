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
    """One phrase a line: `?` where it is held out, the operation with its constant if any, the words.

    `[a|b]` in the words is either; MORE and SOME stand for such choices.
    """
    table = table.replace("MORE", "[{b}|{b} more|another {b}]").replace("SOME", "[{b} {o}|{b} of the {o}|{b} of them]")
    return tuple(
        Phrase(words, op, int(constant) if constant else None, bool(held))
        for held, op, constant, words in re.findall(r"^(\??)([-=+*/~])(\d*) (.+)$", table, re.MULTILINE)
    )


def each(words: str) -> tuple[str, ...]:
    """The words of a text."""
    return tuple(words.split())


THINGS = _domain(
    """
= {n} has {a} {o}[| on Monday| on Tuesday| on Friday].
= {n} [starts the day with|starts with|begins with] {a} {o}.
= {n} [finds|buys|picks|collects] {a} {o} [{p}|on Monday|in the morning].
= [on Monday|on Friday|in the morning|at first|today|yesterday] {n} [has|counts|owns] {a} {o}.
= {n} collects {o} and has {a} of them.
+ {n} has {a} [red|old|small|white] {o} and {b} [blue|new|big|black] {o}.
+ {n} [finds|buys|collects] {a} {o} on [Monday|Friday] and {b} {o} on [Tuesday|Sunday].
+ {n} [finds|gets|buys] {a} {o} {p} and {b} {o} at home.
* {n} [has|keeps|fills] {a} {k} with {b} {o} in each.
* {n} [has|buys|finds] {a} {k} of {b} {o} each.
* {n} [puts|packs] {b} {o} in each of {a} {k}.
- {n} had {a} {o} but [lost|sold|broke|used] {b} of them.
- {n} bought {a} {o} and [sold|gave away|lost] {b} of them.
?= on Tuesday {n} [has|counts] {a} {o}.
?= {n} has found {a} {o} {p}.
?+ {n} buys {a} [small|old] {o} and {b} [big|new] {o}.
?* {n} finds {a} {k} with {b} {o} in each.
?* {n} has {a} {k}, each with {b} {o}.
?- {n} had {a} {o} and gave {b} of them to {m}.
""",
    """
+ {when}{n} [buys|finds|gets|collects|picks up|makes] MORE {o}.
+ {when}{n} [buys|finds|gets|collects] MORE {o} {p}.
+ {when}{m} [gives|lends|passes] {n} MORE {o}.
+ {when}{m} [gives|brings|sends|hands] MORE {o} to {n}.
+ {when}{n} [gets|takes|borrows|receives] MORE {o} from {m}.
+ {when}a friend [gives|brings|sends] {n} MORE {o}.
- {when}{n} [gives|brings|sends|sells|hands] SOME to {m}.
- {when}{n} [gives|lends|passes] {m} SOME.
- {when}{n} [loses|breaks|drops|uses|sells] SOME.
- {when}{n} [loses|leaves|sells] SOME {p}.
- {when}{n} [throws|gives] away SOME.
- {when}[{m}|a friend] [takes|borrows|buys] SOME from {n}.
- {when}{m} [takes|carries] SOME away.
- {when}{b} of [them|the {o}] [break|are lost|are sold].
*2 {when}{n} doubles the number of {o}.
*2 {when}{n} has [twice|two times] as many {o}.
*2 {when}the number of {o} doubles.
*3 {when}{n} has three times as many {o}.
/2 {when}{n} [gives|sells|sends] half of [the {o}|them] to {m}.
/2 {when}{n} [loses|uses|sells|throws away] half of [the {o}|them].
?+ {when}{m} [sends|brings] {n} MORE {o}.
?+ {when}a friend gives MORE {o} to {n}.
?+ {when}{n} makes MORE {o} {p}.
?- {when}{n} [hands|sends] {m} SOME.
?- {when}{n} [breaks|drops] SOME {p}.
?- {when}a friend takes SOME away.
?*2 {when}the number of {o} that {n} has doubles.
?/2 {when}{n} gives away half of them.
?/2 {when}half of the {o} are lost.
""",
    """
= how many {o} does {n} have[| now| left| in the end| at the end]?
= how many {o} are there [now|in the end|in all]?
= what is the number of {o} that {n} has [now|at the end]?
+ {m} has {b} {o}. How many {o} do [they|{n} and {m}] have [together|in all]?
+ {m} has {b} more [|{o} ]than {n}. How many {o} does {m} have?
- {m} has {b} fewer {o} than {n}. How many {o} does {m} have?
- {m} has {b} {o}. How many more {o} does {n} have than {m}?
- if {b} of [them|the {o}] are red, how many are not red?
- if {b} of [them|the {o}] are broken, how many [|{o} ]are not broken?
* {m} has {b} times as many {o} as {n}. How many {o} does {m} have?
* each of [them|the {o}] costs {b} dollars. How many dollars do they cost [in all|together]?
/ {n} shares [them|the {o}] equally among {b} friends. How many {o} does each friend get?
/ {n} shares [them|the {o}] equally among {b} people. How many {o} does each person get?
/ {n} [packs|puts] [them|the {o}] into {k} of {b}. How many {k} [does {n} need|are there]?
/ {n} puts the same number of {o} in each of {b} {k}. How many {o} are in each?
/ {n} puts [them|the {o}] into {b} equal groups. How many {o} are in each group?
/2 {m} has half as many {o} as {n}. How many {o} does {m} have?
~ {n} [wants|needs] {b} {o}[| in all]. How many more {o} does {n} need?
~ {n} [wants|needs] {b} {o}. How many {o} are missing?
?= what is the number of {o} in the end?
?= how many {o} does {n} have in all?
?+ {m} also has {b} {o}. How many {o} do they have together?
?- {m} has {b} fewer than {n}. How many {o} does {m} have?
?* {m} has {b} times as many. How many {o} does {m} have?
?/ {n} shares the {o} equally among {b} children. How many {o} does each child get?
?/ {n} puts all of them into {k} of {b} {o}. How many {k} are there?
?~ {n} wants to have {b} {o}. How many more {o} does {n} need?
""",
)

PLACES = _domain(
    """
= there are {a} {o} {p}[| on Monday| on Tuesday| today].
= {n} [counts|sees|finds] {a} {o} {p}.
= a shop [has|starts with|opens with] {a} {o}.
= [on Monday|on Friday|in the morning|at first|today|yesterday] there are {a} {o} {p}.
+ there are {a} [white|old|small] {o} and {b} [black|new|big] {o} {p}.
+ a shop has {a} {o} inside and {b} {o} outside.
* there are {a} [rows|groups] of {b} {o} {p}.
* there are {a} {k} {p}, each with {b} {o}.
* {n} [sees|counts] {a} {k} with {b} {o} in each.
- of {a} {o} {p}, {b} are broken and are thrown away.
- there were {a} {o} {p}, but {b} of them [were sold|were lost].
?= on Tuesday there are {a} {o} {p}.
?= a shop starts the day with {a} {o}.
?* {n} [counts|sees] {a} rows of {b} {o} {p}.
?+ there are {a} red {o} and {b} blue {o} {p}.
""",
    """
+ {when}MORE {o} [are brought in|arrive|are added|come in].
+ {when}{n} [adds|brings in|delivers] MORE {o}.
+ {when}{n} puts MORE {o} there.
+ {when}a truck [delivers|brings] MORE {o}.
- {when}SOME [are taken away|are sold|are thrown away|are removed|break].
- {when}{n} [removes|takes away|buys|carries away] SOME.
- {when}{n} [carries|takes] SOME home.
- {when}a truck takes away SOME.
*2 {when}the number of {o} doubles.
*2 {when}there are twice as many {o}.
*3 {when}the number of {o} triples.
/2 {when}half of [the {o}|them] are [sold|removed|thrown away].
/2 {when}{n} takes half of [the {o}|them] home.
?+ {when}a truck brings in MORE {o}.
?+ {when}{n} brings MORE {o}.
?- {when}{n} sends away SOME.
?- {when}a truck carries away SOME.
?*2 {when}there are two times as many {o}.
?/2 {when}half of [the {o}|them] are taken away.
""",
    """
= how many {o} are there [now|in the end]?
= how many {o} are left?
= how many {o} are {p} [now|in the end]?
+ there are also {b} {o} in the cellar. How many {o} are there [in all|together]?
- if {b} of [the {o}|them] are green, how many [|{o} ]are not green?
- if {b} of [the {o}|them] are broken, how many are not broken?
* each of [the {o}|them] weighs {b} pounds. How many pounds do they weigh [together|in all]?
* each of [the {o}|them] costs {b} coins. How many coins is that [together|in all]?
/ they are put into {b} equal groups. How many {o} are in each group?
/ {n} [arranges|puts] [the {o}|them] [in|into] rows of {b}. How many rows are there?
/ {n} [puts|sorts] [the {o}|them] into {b} equal rows. How many {o} are in each row?
/ {n} arranges [the {o}|them] in {b} equal rows. How many {o} are in each row?
~ there is room for {b} {o}. How many more {o} can be added?
~ there is room for {b} [{o}|of them]. How many more can {n} add?
?= how many {o} are left in the end?
?- if {b} of [the {o}|them] are red, how many {o} are not red?
?/ {n} arranges [the {o}|them] in {b} equal groups. How many {o} are in each group?
?* each of [the {o}|them] weighs {b} pounds. How many pounds is that in all?
?~ there is room for {b} of them. How many more {o} can be added?
""",
)

MONEY = _domain(
    """
= {n} has {a} {c}.
= {n} has [saved|earned|won] {a} {c}.
= {n} [starts the week with|starts with|begins with] {a} {c}.
= there are {a} {c} in the wallet of {n}.
+ {n} has {a} {c} at home and {b} {c} in the bank.
+ {n} [earns|saves|wins] {a} {c} on Monday and {b} {c} on Tuesday.
* {n} [earns|saves|gets] {a} {c} [each|every] day for {b} days.
* {n} works {a} hours for {b} {c} an hour.
* {n} works {a} weeks for {b} {c} a week.
* {n} sells {a} {o} for {b} {c} each.
- {n} had {a} {c} and paid {b} {c} for a {t}.
- {n} had {a} {c} but [lost {b} of them|spent {b} {c} on food].
- {n} had {a} {c} and [gave|lent] {b} {c} to {m}.
?= {n} has found {a} {c}.
?* {n} wins {a} {c} each day for {b} days.
?* {n} works {a} days for {b} {c} a day.
?- {n} had {a} {c} and spent {b} {c} on a {t}.
""",
    """
+ {when}{n} [earns|wins|finds|saves|gets] MORE {c}.
+ {when}{m} [pays|gives|lends|hands] {n} MORE {c}.
+ {when}{m} [gives|sends|lends] MORE {c} to {n}.
+ {when}{n} [finds|earns] MORE {c} {p}.
+ {when}{n} sells a {t} for {b} {c}.
+ {when}a friend [gives|pays] {n} {b} {c}.
+ {when}{n} [gets|receives|borrows] MORE {c} from {m}.
- {when}{n} spends {b} {c} on [a {t}|lunch|food].
- {when}{n} buys a {t} for {b} {c}.
- {when}{n} pays {b} {c} for [a {t}|lunch|food].
- {when}{n} [lends|gives|sends] {b} {c} to {m}.
- {when}{n} [lends|gives|pays|hands] {m} {b} {c}.
- {when}{n} [loses|spends] {b} {c}.
- {when}a {t} costs {n} {b} {c}.
*2 {when}{n} doubles the money.
*2 {when}{n} has twice as much money.
/2 {when}{n} [spends|loses] half of the money.
/2 {when}{n} [gives|lends|sends] half of the money to {m}.
?+ {when}{m} [hands|pays] MORE {c} to {n}.
?+ {when}a friend sends {n} {b} {c}.
?- {when}{n} sends {m} {b} {c}.
?- {when}lunch costs {n} {b} {c}.
?- {when}{n} pays {m} {b} {c} for a {t}.
?/2 {when}{n} pays half of the money for a {t}.
""",
    """
= how many {c} does {n} have [now|left|in the end]?
= how much money does {n} have [now|in the end]?
+ {m} has {b} {c} more than {n}. How many {c} does {m} have?
+ {m} has {b} {c}. How [many {c}|much money] do [they|{n} and {m}] have [together|in all]?
- {m} has {b} {c} less than {n}. How many {c} does {m} have?
* {m} has {b} times as much money as {n}. How many {c} does {m} have?
/ {n} shares the money equally among {b} people. How [many {c}|much] does each person get?
/ {n} shares the money equally among {b} friends. How many {c} does each friend get?
/ each {t} costs {b} {c}. How many can {n} buy?
~ a {t} costs {b} {c}. How many more {c} does {n} need?
~ {n} [wants|needs] {b} {c}[| in all]. How many more {c} does {n} need?
~ {n} is saving for a {t} that costs {b} {c}. How many {c} are missing?
?= how much money does {n} have left?
?+ {m} has {b} {c} more than {n}. How much money does {m} have?
?- {m} has {b} {c} less than {n}. How much money does {m} have?
?/ {n} shares the money equally among {b} friends. How much does each friend get?
?~ {n} wants a {t} that costs {b} {c}. How many more {c} does {n} need?
""",
)

PEOPLE = _domain(
    """
= a {v} [leaves|starts|sets off] with {a} [passengers|people].
= there are {a} [people|passengers] on a {v}.
= a {v} carries {a} [people|passengers].
= a {v} has {a} [people|passengers] on board.
+ a {v} [has|carries] {a} adults and {b} children on board.
+ {a} [people|adults] and {b} children [board|get on] a {v}.
* a {v} has {a} cars with {b} [people|passengers] in each.
* there are {a} rows with {b} people in each on a {v}.
* {a} groups of {b} people [board|get on] a {v}.
?= a {v} starts with {a} people on board.
?+ there are {a} adults and {b} children on a {v}.
?* a {v} carries {a} groups of {b} people.
""",
    """
+ {stop}MORE [people|passengers|children] [get on|board|join them|come on board].
+ {stop}the {v} picks up MORE [people|passengers].
- {stop}{b} [people|passengers|children|of them|of the people] [get off|leave|walk away].
- {stop}the {v} lets off {b} [people|passengers].
/2 {stop}half of [the people|the passengers|them] [get off|leave].
*2 {stop}the number of [people|passengers] doubles.
?+ {stop}MORE adults [board|get on].
?+ {stop}the {v} picks up MORE children.
?- {stop}{b} adults [get off|leave].
?- {stop}{b} of the passengers [get off|leave].
""",
    """
= how many people are on board [now|in the end]?
= how many passengers are [|there ]on the {v} [now|at the end]?
- if {b} of them are asleep, how many are awake?
- if {b} of the [people|passengers] are asleep, how many are not asleep?
* each [passenger|person|of them] pays {b} dollars. How many dollars is that in all?
* each [passenger|person] pays {b} {c}. How many {c} do they pay [in all|together]?
/ they form groups of {b}. How many groups are there?
/ they [sit in|form] {b} equal rows. How many people are in each row?
~ the {v} has {b} seats. How many seats are empty?
~ the {v} has room for {b} people. How many more can get on?
?= how many people are on the {v} now?
?- if {b} of them are asleep, how many people are not asleep?
?* each of them pays {b} dollars. How many dollars do they pay in all?
?/ they form {b} equal groups. How many people are in each group?
""",
)

WORK = _domain(
    """
= {n} {does} {a} {w} [on Monday|in the morning].
= [in the morning|on Monday|at first|today] {n} {does} {a} {w}.
+ {n} {does} {a} {w} in the morning and {b} [|{w} ]in the evening.
+ {n} {does} {a} {w} and {m} {does} {b}[| {w}].
* {n} {does} {a} {w} [each|every] day for {b} days.
* for {a} hours {n} {does} {b} {w} [an|each] hour.
* {n} {does} {b} {w} [a|each] day for {a} days.
* for {a} weeks {n} {does} {b} {w} [a|each] week.
* there are {a} helpers, and each of them {does} {b} {w}.
?= on the first day {n} {does} {a} {w}.
?* for {a} days {n} {does} {b} {w} a day.
?+ {n} {does} {a} {w} on Monday and {b} {w} on Tuesday.
""",
    """
+ {when}{n} {does} MORE {w}.
+ {when}{m} [helps|comes] and {does} MORE {w}.
+ {when}{m} {does} MORE {w} for {n}.
+ [on Sunday|in the evening] {n} {does} MORE {w}.
- {when}{b} of [them|the {w}] [do not count|are crossed out|are taken off the list].
- but {b} of [them|the {w}] must be taken off the list.
*2 {m} {does} the same number of {w}, which doubles the total.
*2 {when}the number of {w} doubles.
?+ {when}a friend {does} MORE {w}.
?+ in the evening {m} comes and {does} MORE {w}.
?- but {b} of [them|the {w}] do not count.
""",
    """
= how many {w} is that [in all|now]?
= how many {w} are there [on the list|in all] [now|in the end]?
+ {m} {does} {b} more than that. How many {w} does {m} have?
- {m} {does} {b} fewer than that. How many {w} does {m} have?
* {n} gets {b} {c} for each. How many {c} does {n} get?
* for each of them {n} gets {b} {c}. How many {c} is that?
/ they are shared equally among {b} people. How many {w} does each person get?
/ they are put into {b} equal groups. How many {w} are in each group?
~ the plan is {b} {w}. How many {w} are [still to do|missing]?
~ {n} [wants|needs] {b} {w} in all. How many more {w} does {n} need?
?= how many {w} is that in the end?
?* {n} gets {b} {c} for each of [them|the {w}]. How many {c} does {n} get?
?/ they are shared equally among {b} friends. How many {w} does each friend get?
?~ the plan is {b} {w} in all. How many more {w} are missing?
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
    candles candies cards carrots chairs cookies cups dolls eggs flowers forks glasses grapes hats
    kites lamps leaves lemons magnets marbles mugs nails notebooks nuts oranges pears pencils pens pies
    plates plums postcards potatoes ribbons ropes rocks roses seeds shells shirts socks spoons stamps
    stickers stones tickets toys tomatoes tulips
""")
CONTAINERS = each("baskets boxes buckets cartons cases crates drawers jars packs sacks trays tins")
PLACE_NAMES = each("attic barn field forest garden hall house kitchen library market park room school store yard")
WHENS = (
    "",
    "then ",
    "later ",
    "soon ",
    "after that, ",
    "the next day ",
    "on Tuesday ",
    "on Friday ",
    "on Sunday ",
    "a week later ",
)
STOPS = ("", "then ", "later ", "soon ", "at the next stop ", "at the first stop ", "at the station ", "at the market ")
CURRENCIES = each("dollars euros pounds coins")
PURCHASES = each("bicycle book camera cap clock coat game guitar hat jacket kite lamp phone radio shirt ticket toy")
VEHICLES = each("bus train tram ferry boat ship plane")
WORKS = tuple(
    (pair.split("/")[0], pair.split("/")[1])
    for pair in each("""
        reads/pages bakes/cakes plants/trees paints/walls writes/letters runs/laps folds/shirts washes/plates
        makes/toys solves/puzzles draws/pictures picks/apples repairs/clocks builds/chairs sews/hats
    """)
)
"""What someone does, and to what."""

"""The built-in questions over the built-in corpus. Each needs one, two or three passages.

A quarter of the countries, with their cities, is reserved for the test split. No place that a test question names or
needs occurs in a training question.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache
from itertools import combinations

from agentgym_rl.environment.envs.searchqa.geography import (
    LANGUAGE_ALIASES,
    City,
    Country,
    Geography,
    load_geography,
    spellings,
)
from agentgym_rl.environment.envs.searchqa.questions import HOPS, Fact, Question

NUM_QUESTIONS = {"train": {"hop1": 450, "hop2": 500, "hop3": 500}, "test": {"hop1": 120, "hop2": 120, "hop3": 120}}
SPLITS = {"train": range(1450), "test": range(1450, 1810)}
_NOT_ASKED = {"Georgia", "Micronesia"}
"""Ambiguous names: also a state of the US, and a region."""
_TEST_SHARE = 0.25
_CITIES_PER_COUNTRY = 6
_PAIRS_PER_COUNTRY = 8
_MARGIN = 1.5
"""Smallest ratio of compared numbers, so that a newer census does not change the answer."""


class _Pool:
    """Countries and cities of one split."""

    def __init__(self, split: str, geography: Geography, countries: list[Country]) -> None:
        self.split = split
        self.all = geography
        self.countries = countries
        self.names = {country.name for country in countries}
        self.cities = [city for country in countries for city in self._sample_cities(country)]
        self.pairs = [pair for country in countries for pair in self._sample_pairs(country)]

    def _rng(self, what: str) -> random.Random:
        return random.Random(f"searchqa {self.split} {what}")

    def _sample_cities(self, country: Country) -> list[City]:
        """Return random cities with unambiguous names. Capitals have their own questions."""
        cities = [c for c in self.all.cities if c.country == country.name and c.unique and not c.capital]
        return self._rng(f"cities {country.code}").sample(cities, min(len(cities), _CITIES_PER_COUNTRY))

    def _sample_pairs(self, country: Country) -> list[tuple[Country, Country]]:
        later = [other for other in self.countries if other.code > country.code]
        return [
            (country, other)
            for other in self._rng(f"pairs {country.code}").sample(later, min(len(later), _PAIRS_PER_COUNTRY))
        ]

    def country(self, city: City) -> Country:
        return self.all.countries[city.country]

    def neighbours(self, country: Country, number: int) -> list[Country]:
        """Return its neighbours if there are exactly `number` and all belong to this split, otherwise nothing."""
        borders = country.borders or ()
        return (
            [self.all.countries[name] for name in borders]
            if len(borders) == number and self.names.issuperset(borders)
            else []
        )


def _where(city: City) -> Fact:
    return Fact(f"{city.title} city", city.title, f"I need to know in which country {city.name} lies.")


def _about(country: Country, what: str) -> Fact:
    return Fact(f"{country.name} country area capital", country.name, f"I need to know {what}.")


def _has_capital(country: Country, city: City) -> Fact:
    return Fact(f"country with the capital {city.name}", country.name, f"I need to know whose capital {city.name} is.")


def _economy(country: Country, what: str) -> Fact:
    return Fact(country.economy_title, country.economy_title, f"I need to know {what} of {country.called}.")


def _people(country: Country, what: str) -> Fact:
    return Fact(country.people_title, country.people_title, f"I need to know {what} of {country.called}.")


def _zone(city: City) -> Fact:
    return Fact(f"{city.title} city time zone", city.title, f"I need to know the time zone of {city.name}.")


Rows = Iterator[tuple[str, tuple[str, ...], list[Fact]]]
"""(question, accepted answers, facts)."""


def _capital(pool: _Pool) -> Rows:
    for x in pool.countries:
        if x.capital:
            yield (
                f"What is the capital of {x.called}?",
                spellings(*x.capital),
                [_about(x, f"the capital of {x.called}")],
            )


def _capital_of(pool: _Pool) -> Rows:
    for x in pool.countries:
        city = pool.all.capitals.get(x.name)
        if city and city.unique:
            yield f"Which country has {city.name} as its capital?", spellings(*x.names), [_has_capital(x, city)]


def _attributes(country: Country) -> Iterator[tuple[str, tuple[str, ...], Fact]]:
    """Yield (attribute such as "the currency", accepted answers, fact)."""
    if country.currency:
        yield "the currency", spellings(*country.currency), _economy(country, "the currency")
    if country.domain:
        yield "the internet top-level domain", (country.domain,), _economy(country, "the internet domain")
    if country.calling:
        yield (
            "the international calling code",
            (country.calling, f"+{country.calling}"),
            _economy(country, "the calling code"),
        )
    if country.language:
        names = spellings(country.language, *LANGUAGE_ALIASES.get(country.language, ()))
        yield "the official language", names, _people(country, "the official language")


def _country_attribute(pool: _Pool) -> Rows:
    for x in pool.countries:
        for what, answers, fact in _attributes(x):
            yield f"What is {what} of {x.called}?", answers, [fact]


def _city_country(pool: _Pool) -> Rows:
    for city in pool.cities:
        yield f"In which country is the city of {city.name}?", spellings(*pool.country(city).names), [_where(city)]


def _city_zone(pool: _Pool) -> Rows:
    for city in pool.cities:
        yield f"Which time zone of the tz database does the city of {city.name} keep?", (city.zone,), [_zone(city)]


def _capital_of_city_country(pool: _Pool) -> Rows:
    for city in pool.cities:
        x = pool.country(city)
        passage = f"{city.name} {city.state} {city.zone}".replace("_", " ")
        if x.capital and not any(name in passage for name in spellings(*x.capital)):  # Africa/Banjul reveals it
            facts = [_where(city), _about(x, f"the capital of {x.called}")]
            yield (
                f"What is the capital of the country in which the city of {city.name} lies?",
                spellings(*x.capital),
                facts,
            )


def _attribute_of_city_country(pool: _Pool) -> Rows:
    for city in pool.cities:
        for what, answers, fact in _attributes(pool.country(city)):
            yield f"What is {what} of the country in which the city of {city.name} lies?", answers, [_where(city), fact]


def _attribute_of_capital_country(pool: _Pool) -> Rows:
    for x in pool.countries:
        city = pool.all.capitals.get(x.name)
        if city and city.unique:
            for what, answers, fact in _attributes(x):
                yield (
                    f"What is {what} of the country whose capital is {city.name}?",
                    answers,
                    [_where(city), fact],
                )


def _zone_of_capital(pool: _Pool) -> Rows:
    for x in pool.countries:
        city = pool.all.capitals.get(x.name)
        if city:
            facts = [_about(x, f"the capital of {x.called}"), _zone(city)]
            yield f"Which time zone of the tz database does the capital of {x.called} keep?", (city.zone,), facts


def _more_populous(pool: _Pool) -> Rows:
    for a, b in pool.pairs:
        if winner := _larger(a, b, a.population, b.population):
            facts = [_people(a, "the population"), _people(b, "the population")]
            yield f"Which country has more inhabitants, {a.called} or {b.called}?", spellings(*winner.names), facts


def _larger_area(pool: _Pool) -> Rows:
    for a, b in pool.pairs:
        if winner := _larger(a, b, a.area, b.area):
            facts = [_about(a, f"the area of {a.called}"), _about(b, f"the area of {b.called}")]
            yield f"Which country has the larger area, {a.called} or {b.called}?", spellings(*winner.names), facts


def _only_neighbour(pool: _Pool) -> Rows:
    for x in pool.countries:
        for y in pool.neighbours(x, 1):
            for what, answers, fact in _attributes(y):
                facts = [_about(x, f"which country borders {x.called}"), fact]
                yield f"What is {what} of the only country that has a land border with {x.called}?", answers, facts


def _zone_of_capital_of_city_country(pool: _Pool) -> Rows:
    for city in pool.cities:
        x = pool.country(city)
        capital = pool.all.capitals.get(x.name)
        if capital and capital.zone != city.zone:  # otherwise the first passage contains the answer
            facts = [_where(city), _about(x, f"the capital of {x.called}"), _zone(capital)]
            yield (
                f"Which time zone of the tz database does the capital of the country with the city {city.name} keep?",
                (capital.zone,),
                facts,
            )


def _city_country_or_other(pool: _Pool) -> Rows:
    for number, city in enumerate(pool.cities):
        x, y = pool.country(city), pool.countries[number * 7 % len(pool.countries)]
        if x is not y and (winner := _larger(x, y, x.population, y.population)):
            facts = [_where(city), _people(x, "the population"), _people(y, "the population")]
            yield (
                f"Which country has more inhabitants: the one in which the city of {city.name} lies, or {y.called}?",
                spellings(*winner.names),
                facts,
            )


def _capital_of_larger(pool: _Pool) -> Rows:
    for number, city in enumerate(pool.cities):
        x, y = pool.country(city), pool.countries[number * 11 % len(pool.countries)]
        if x is not y and (winner := _larger(x, y, x.area, y.area)) and winner.capital:
            facts = [_where(city), _about(x, f"the area of {x.called}"), _about(y, f"the area of {y.called}")]
            choice = f"the one with the city {city.name}, or {y.called}"
            yield f"What is the capital of the larger country by area: {choice}?", spellings(*winner.capital), facts


def _neighbour_of_city_country(pool: _Pool) -> Rows:
    for city in pool.cities:
        x = pool.country(city)
        for y in pool.neighbours(x, 1):
            for what, answers, fact in _attributes(y):
                facts = [_where(city), _about(x, f"which country borders {x.called}"), fact]
                question = f"What is {what} of the only country that borders the country with the city {city.name}?"
                yield question, answers, facts


def _attribute_of_larger(pool: _Pool) -> Rows:
    for a, b in pool.pairs:
        if winner := _larger(a, b, a.area, b.area):
            areas = [_about(a, f"the area of {a.called}"), _about(b, f"the area of {b.called}")]
            for what, answers, fact in _attributes(winner):
                yield (
                    f"What is {what} of the larger country by area, {a.called} or {b.called}?",
                    answers,
                    [*areas, fact],
                )


def _capital_of_more_populous(pool: _Pool) -> Rows:
    for a, b in pool.pairs:
        if (winner := _larger(a, b, a.population, b.population)) and winner.capital:
            facts = [
                _people(a, "the population"),
                _people(b, "the population"),
                _about(winner, f"the capital of {winner.called}"),
            ]
            question = f"What is the capital of the country with more inhabitants, {a.called} or {b.called}?"
            yield question, spellings(*winner.capital), facts


def _two_neighbours(pool: _Pool) -> Rows:
    for x in pool.countries:
        for a, b in combinations(pool.neighbours(x, 2), 2):
            if winner := _larger(a, b, a.population, b.population):
                facts = [
                    _about(x, f"which countries border {x.called}"),
                    _people(a, "the population"),
                    _people(b, "the population"),
                ]
                question = f"Which of the two countries that have a land border with {x.called} has more inhabitants?"
                yield question, spellings(*winner.names), facts


def _larger(a: Country, b: Country, amount_a: int, amount_b: int) -> Country | None:
    if max(amount_a, amount_b) < _MARGIN * min(amount_a, amount_b):
        return None
    return a if amount_a > amount_b else b


TEMPLATES: dict[str, tuple[Callable[[_Pool], Rows], ...]] = {
    "hop1": (_capital, _capital_of, _country_attribute, _city_country, _city_zone),
    "hop2": (
        _capital_of_city_country,
        _attribute_of_city_country,
        _attribute_of_capital_country,
        _zone_of_capital,
        _more_populous,
        _larger_area,
        _only_neighbour,
    ),
    "hop3": (
        _zone_of_capital_of_city_country,
        _city_country_or_other,
        _capital_of_larger,
        _neighbour_of_city_country,
        _attribute_of_larger,
        _capital_of_more_populous,
        _two_neighbours,
    ),
}


@cache
def builtin_questions() -> tuple[Question, ...]:
    """Return the questions by item number: first train, then test, each with mixed hops."""
    geography = load_geography()
    countries = [country for country in geography.countries.values() if country.name not in _NOT_ASKED]
    drawn = random.Random("searchqa countries of the test split").sample(countries, round(_TEST_SHARE * len(countries)))
    test_names = {country.name for country in drawn}
    questions: list[Question] = []
    for split, counts in NUM_QUESTIONS.items():
        pool = _Pool(split, geography, [c for c in countries if (c.name in test_names) == (split == "test")])
        chosen = [question for hop in HOPS for question in _draw(pool, hop, counts[hop])]
        random.Random(f"searchqa order of {split}").shuffle(chosen)
        questions += chosen
    return tuple(questions)


def _draw(pool: _Pool, hop: str, count: int) -> list[Question]:
    """Return `count` questions, taken in turn from all templates that have any left."""
    stacks = []
    for template in TEMPLATES[hop]:
        stack = [Question(text, answers, hop, tuple(facts)) for text, answers, facts in template(pool)]
        random.Random(f"searchqa {pool.split} {template.__name__}").shuffle(stack)
        stacks.append(stack)
    chosen: list[Question] = []
    while len(chosen) < count:
        before = len(chosen)
        for stack in stacks:
            if stack and len(chosen) < count:
                chosen.append(stack.pop())
        if len(chosen) == before:
            raise AssertionError(f"{pool.split} has only {before} questions of {hop}, not {count}")
    return chosen
